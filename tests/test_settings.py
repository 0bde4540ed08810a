"""Settings of ops: a value of the wrong type is refused by name, on every engine, and nothing is cut to size."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr import variable, variables
from vkfold.engine.expr_derivative import pullback
from vkfold.engine.fold import FoldSpec
from vkfold.engine.op import OPS
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.setting_checks import check_settings
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine

A, B = variables("a b")


def attend(engine: ComputeEngine, **settings: Any) -> object:
    q = engine.zeros((1, 4, 2, 8))
    return engine.attention(q, q, q, **settings)


def attend_qkv(engine: ComputeEngine, **settings: Any) -> object:
    return engine.attention_qkv(engine.zeros((1, 4, 48)), **{"num_heads": 2, "num_kv_heads": 2, **settings})


def attend_backward(engine: ComputeEngine, **settings: Any) -> object:
    q = engine.zeros((1, 4, 2, 8))
    return engine.attention_backward(q, q, q, q, q, engine.zeros((1, 2, 4)), **settings)


def attend_qkv_backward(engine: ComputeEngine, **settings: Any) -> object:
    o, qkv = engine.zeros((1, 4, 16)), engine.zeros((1, 4, 48))
    settings = {"num_heads": 2, "num_kv_heads": 2, **settings}
    return engine.attention_qkv_backward(o, qkv, o, engine.zeros((1, 2, 4)), **settings)


def square(engine: ComputeEngine, **settings: Any) -> object:
    x = engine.zeros((8, 8))
    return engine.matmul(x, x, **settings)


def norm(engine: ComputeEngine, **settings: Any) -> object:
    return engine.rms_norm(engine.zeros((3, 8)), engine.zeros((8,)), **settings)


def layer_norm(engine: ComputeEngine, **settings: Any) -> object:
    return engine.layer_norm(engine.zeros((3, 8)), engine.zeros((8,)), engine.zeros((8,)), **settings)


def drop(engine: ComputeEngine, **settings: Any) -> object:
    return engine.dropout(engine.zeros((8,)), **{"p": 0.5, "site": 1, **settings})


def rotate(engine: ComputeEngine, **settings: Any) -> object:
    table = engine.zeros((8, 2))
    return engine.rope_(engine.zeros((1, 4, 8)), table, table, **{"num_heads": 2, "head_dim": 4, **settings})


def combine(engine: ComputeEngine, **inputs: Any) -> object:
    return engine.map(A * B, a=engine.zeros((8,)), **inputs)


def losses(engine: ComputeEngine, **settings: Any) -> object:
    return engine.cross_entropy(engine.zeros((2, 8)), engine.zeros((2,), "int32"), **settings)


SHIFT = FoldSpec("shift", {"row": "row"}, [], {"moved": variable("row") + variable("offset")}, scalars="float offset")


def shift(engine: ComputeEngine, **settings: Any) -> object:
    return engine.fold(SHIFT, row=engine.zeros((2, 8)), **settings)


def descend(engine: ComputeEngine, **settings: Any) -> object:
    return engine.sgd_many_([engine.zeros((3,))], [engine.zeros((3,))], **settings)


WRONG: list[tuple[Callable[..., object], dict[str, Any], type[Exception], str]] = [
    (attend, {"window": 1.5}, TypeError, r"attention: window is 1\.5 of type float, needed is a whole number"),
    (attend, {"window": 2.0}, TypeError, "attention: window is 2.0"),
    (attend, {"window": True}, TypeError, "attention: window is True"),
    (attend, {"causal": "no"}, TypeError, "attention: causal is 'no' of type str, needed is True or False"),
    (attend, {"scale": "1"}, TypeError, "attention: scale is '1'.*a number"),
    (attend_qkv, {"window": 1.5}, TypeError, "attention_qkv: window is 1.5"),
    (attend_qkv, {"num_heads": "2"}, TypeError, "attention_qkv: num_heads is '2'.*whole number"),
    (attend_qkv, {"num_kv_heads": 2.0}, TypeError, "attention_qkv: num_kv_heads is 2.0"),
    (drop, {"site": 1.7}, TypeError, "dropout: site is 1.7"),
    (drop, {"site": 1.0}, TypeError, "dropout: site is 1.0"),
    (drop, {"p": "0.5"}, TypeError, "dropout: p is '0.5'"),
    (norm, {"eps": "a"}, TypeError, "rms_norm: eps is 'a' of type str, needed is a number"),
    (norm, {"eps": 1e39}, ValueError, r"rms_norm: eps is 1e\+39, which does not fit float32"),
    *[
        (call, {"scale": value}, ValueError, rf"{op}: scale is {value}, it must be finite")
        for value in (np.nan, np.inf, -np.inf)
        for call, op in (
            (attend, "attention"),
            (attend_qkv, "attention_qkv"),
            (attend_backward, "attention_backward"),
            (attend_qkv_backward, "attention_qkv_backward"),
        )
    ],
    *[
        (call, {"eps": value}, ValueError, f"eps is {value}, it must be finite and not negative")
        for value in (np.nan, np.inf, -1e-6)
        for call in (norm, layer_norm)
    ],
    *[(drop, {"p": value}, ValueError, f"p is {value}, it must be at least 0") for value in (np.nan, 1.0, -0.1)],
    (norm, {"eps": 10**400}, ValueError, "rms_norm: eps is 1000.*does not fit float32"),
    (square, {"trans_b": "no"}, TypeError, "matmul: trans_b is 'no' of type str, needed is True or False"),
    (square, {"trans_a": 2}, TypeError, "matmul: trans_a is 2"),
    (square, {"activation": ["relu"]}, TypeError, r"matmul: activation is \['relu'\] of type list, .*string or None"),
    (square, {"precision": 16}, TypeError, "matmul: precision is 16"),
    (rotate, {"head_dim": 4.0}, TypeError, "rope_: head_dim is 4.0"),
    (rotate, {"inverse": "yes"}, TypeError, "rope_: inverse is 'yes'"),
    (attend, {"window": -1}, ValueError, "window -1 is negative"),
    (losses, {"ignore_index": 1.5}, TypeError, "cross_entropy: ignore_index is 1.5"),
    (losses, {"ignore_index": 2**40}, ValueError, "cross_entropy: ignore_index is 1099511627776.*32 bits"),
    (shift, {"offset": "a"}, TypeError, "fold 'shift': offset is 'a' of type str, needed is a number"),
    (shift, {"offset": 1e39}, ValueError, r"fold 'shift': offset is 1e\+39.*float32"),
    (lambda e: e.fold("abc"), {}, TypeError, "fold: 'abc' of type str is no FoldSpec"),
    (lambda e: pullback("a", "b"), {}, TypeError, "pullback: 'a' is no expression"),  # type: ignore[arg-type]
    (lambda e: e.set_step_parameters(5), {}, TypeError, "set_step_parameters: 5 of type int"),
    (descend, {"weight_decays": ["a"]}, TypeError, r"sgd_many_: weight_decays\[0\] is 'a'"),
    (descend, {"weight_decays": [1e39]}, ValueError, r"sgd_many_: weight_decays\[0\] is 1e\+39"),
    (combine, {"b": 1e39}, ValueError, r"map: b is 1e\+39, which does not fit float32"),
    (combine, {"b": "1"}, ValueError, "map: b is '1'.*a tensor or a number"),
    (lambda e: e.map("x+1"), {}, TypeError, r"map: 'x\+1' of type str is no expression: build one"),
    (lambda e, **s: e.scale(e.zeros((3,)), **s), {"factor": "2"}, TypeError, "scale: factor is '2'"),
    (lambda e, **s: e.scale(e.zeros((3,)), **s), {"factor": -1e39}, ValueError, r"scale: factor is -1e\+39"),
    (lambda e, **s: e.fill_(e.zeros((3,)), **s), {"value": "2"}, TypeError, "fill_: the value is '2'"),
    (lambda e, **s: e.fill_(e.zeros((3,), "int32"), **s), {"value": np.inf}, ValueError, "fill_: inf is no int32"),
    (
        lambda e, **s: e.gradient_norm([e.zeros((3,))], **s),
        {"max_norm": "1"},
        TypeError,
        "gradient_norm: max_norm is '1'",
    ),
]


@pytest.fixture(params=["vulkan", "cpu", "plan"])
def engine(request: pytest.FixtureRequest) -> ComputeEngine:
    if request.param == "vulkan":
        return request.getfixturevalue("vulkan")  # type: ignore[no-any-return]
    return CpuEngine() if request.param == "cpu" else PlanEngine()


@pytest.mark.parametrize(("call", "settings", "kind", "message"), WRONG, ids=[str(w[3])[:40] for w in WRONG])
def test_a_wrong_setting_is_named(
    engine: ComputeEngine, call: Callable[..., object], settings: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call(engine, **settings)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["learning_rate", "loss_scale", "bias_correction1", "bias_correction2", "square_weight"]
)
def test_step_parameters_are_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"step parameter {name} is {value}, it must be a finite"):
        StepParameters(**{name: value})


def test_a_number_that_is_not_finite_is_arithmetic_where_the_op_is(engine: ComputeEngine) -> None:
    """What a factor or a value to fill with does is told by arithmetic; only settings with a meaning are refused."""
    x = engine.tensor(np.ones(3))
    made = [engine.scale(x, np.inf), engine.affine(x, np.nan, 1.0), engine.divide_by(x, 0.0)]
    engine.fill_(x, np.nan)
    if engine.computes:
        assert [float(t.numpy()[0]) for t in made] == pytest.approx([np.inf, np.nan, np.inf], nan_ok=True)
        assert np.isnan(x.numpy()).all()


def test_a_float_is_refused_where_the_whole_number_was_seen_before(engine: ComputeEngine) -> None:
    """2.0 == 2 finds the kept shape rule of 2."""
    attend(engine, window=2**70)  # all positions
    attend(engine, window=2)
    with pytest.raises(TypeError, match=r"window is 2\.0"):
        attend(engine, window=2.0)
    drop(engine, site=1)
    with pytest.raises(TypeError, match=r"site is 1\.0"):
        drop(engine, site=1.0)


def test_numbers_of_numpy_are_numbers(vulkan: VulkanEngine) -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 2, 8)).astype(np.float32)
    t = vulkan.tensor(x)
    want = vulkan.attention(t, t, t, window=3, scale=0.25, causal=True)[0].numpy()
    got = vulkan.attention(t, t, t, window=np.int32(3), scale=np.float32(0.25), causal=np.bool_(True))[0].numpy()
    assert np.array_equal(got, want)
    kept = vulkan.dropout(t, p=0.1, site=3).numpy()
    assert np.array_equal(vulkan.dropout(t, p=np.float64(0.1), site=np.int64(3)).numpy(), kept)


def test_every_ops_settings_have_a_type() -> None:
    """An op whose rule takes settings says what they are, or check_settings could not look at them."""
    for name in ("attention", "attention_backward", "attention_qkv", "attention_qkv_backward"):
        for setting in ("causal", "window", "scale"):
            with pytest.raises(TypeError, match=f"{name}: {setting} is <object"):
                check_settings(OPS[name], {setting: object()})


def test_step_parameters_of_several_micro_batches_are_packed_alike() -> None:
    values = StepParameters(-(2**40) - 7, 5, 2, 1e-3, 0.25, 0.1, 0.2, 0.3)
    places = {i: memoryview(bytearray(36)) for i in range(3)}
    values.pack_into(places)
    assert {i: bytes(place) for i, place in places.items()} == {
        i: replace(values, micro_batch=i).pack() for i in range(3)
    }
    assert places[1][:16] == struct.pack("<qII", -(2**40) - 7, 5, 1)
