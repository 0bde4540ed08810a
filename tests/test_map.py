"""engine.map: any chain of elementwise arithmetic in one dispatch, compiled once, with gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkfold import expr as e
from vkfold.engine import kernel_registry
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr_derivative import pullback
from vkfold.engine.expr_walk import substitute
from vkfold.engine.glsl_compiler import compile_glsl
from vkfold.engine.op import OPS
from vkfold.engine.ops import map as map_op
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine

from .op_checks import EPS32, check_gradient, check_op

X, B, R, S = e.variables("x b r s")
CHAIN = e.tanh(X * S + B) * e.logistic(R) - e.maximum(X, B)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("cols", [1, 3, 4, 7, 8, 64])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_broadcasts(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    """A full tensor, one value a column, one a row, one for all: in every layout the values of NumPy's broadcasting."""
    x, b, r, one = normal(2, rows, cols), normal(cols, seed=1), normal(2, rows, 1, seed=2), normal(1, seed=3)

    def call(engine: Any, *tensors: Any) -> Any:
        names = ("x", "b", "r")
        return engine.map(CHAIN, **dict(zip(names, tensors, strict=True)), s=0.75)

    check_op(vulkan, oracle, call, (x, b, r), 40 * EPS32)
    check_op(vulkan, oracle, call, (x, one, r), 40 * EPS32)
    check_op(vulkan, oracle, call, (x[0, 0], b, r[0]), 40 * EPS32)  # x itself is the bias


def test_several_outputs(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    """One dispatch writes them all; exact operations have NumPy's bits."""
    x, b = normal(7, 12), normal(7, 12, seed=1)
    for engine in (vulkan, cpu):
        chains = {"low": e.minimum(X, B), "high": e.maximum(X, B), "sum": X + B}
        made = engine.map(chains, x=engine.tensor(x), b=engine.tensor(b))
        assert list(made) == ["low", "high", "sum"]
        for name, want in (("low", np.minimum(x, b)), ("high", np.maximum(x, b)), ("sum", x + b)):
            assert np.array_equal(made[name].numpy(), want), name


def test_a_chain_has_the_bits_of_its_ops(vulkan: VulkanEngine) -> None:
    """Joined from what the ops say about themselves, dropout included."""
    vulkan.set_step_parameters(StepParameters(seed=4, step=2))
    x, b = vulkan.tensor(normal(9, 20)), vulkan.tensor(normal(9, 20, seed=1))
    whole = e.where(e.random_below(2**30, 6), 0.0, e.variable("h") * (4.0 / 3.0))
    gelu = OPS["activation"].expressions(kind="gelu")["y"]
    joined = substitute([X + whole], {e.variable("h"): substitute([gelu], {X: B})[0]})[0]
    got = vulkan.map(joined, x=x, b=b)
    assert np.array_equal(got.numpy(), vulkan.add(x, vulkan.dropout(vulkan.gelu(b), p=0.25, site=6)).numpy())


def test_random_numbers_need_no_state(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    """Keyed by seed, step, micro-batch, site and element: equal on both engines, other for another site."""
    x = normal(5, 13)
    drawn = []
    for engine in (vulkan, cpu):
        engine.set_step_parameters(StepParameters(seed=3, step=1, micro_batch=2))
        t = engine.tensor(x)
        drawn.append([engine.map(X * e.uniform(e.whole("site")), x=t, site=site).numpy() for site in (1, 2)])
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0][0], drawn[0][1])


def test_gradients(oracle: CpuEngine, vulkan: VulkanEngine) -> None:
    """`pullback` gives the backward's expressions: finite differences agree, and the device with the oracle."""
    chain = e.log(1.5 + X * X) * B + e.exp(-abs(B)) / (2.0 + X * X)
    gradient = pullback(chain, "x b")
    assert list(gradient) == ["d_x", "d_b"]
    arrays = (normal(4, 6), normal(4, 6, seed=1))

    def backward(engine: Any, dy: Any, x: Any, b: Any) -> Any:
        made = engine.map(gradient, dy=dy, x=x, b=b)
        return made["d_x"], made["d_b"]

    check_gradient(oracle, lambda engine, x, b: engine.map(chain, x=x, b=b), backward, arrays)
    check_op(vulkan, oracle, backward, (normal(4, 6, seed=2), *arrays), 60 * EPS32)
    two = pullback({"p": X * B, "q": X + B}, "x")["d_x"]
    d_p, d_q = e.variables("d_p d_q")
    assert two in (d_p * B + d_q, e.fma(d_p, B, d_q))
    with pytest.raises(ValueError, match="'z' is not among x, b"):
        pullback(chain, "z")
    with pytest.raises(ValueError, match="inputs are called dy"):
        pullback(X * e.variable("dy"), "x")


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (e.where(X < 1.0, 1.0, 2.0), {"d_x": 0.0}),
        (X + 0.0 * B, {"d_x": 3.0, "d_b": 0.0}),
        (X * 2.0, {"d_x": 6.0}),
        ({"p": X + B * R, "q": e.where(e.same(e.whole("n"), 1), X, X)}, {"d_x": 6.0, "d_r": None}),
    ],
)
def test_a_gradient_takes_all_inputs_of_its_chain(
    vulkan: VulkanEngine, cpu: CpuEngine, chain: Any, expected: dict[str, float | None]
) -> None:
    """Also those it does not depend on; a constant one has the chain's shape. Other names are still refused."""
    gradient = pullback(chain, " ".join(name[2:] for name in expected))
    for engine in (vulkan, cpu):
        bias, dy = engine.tensor(normal(6, seed=1)), engine.tensor(np.full((4, 6), 3.0))
        given = {"x": engine.tensor(normal(4, 6)), "b": bias, "r": engine.tensor(normal(4, 1)), "n": 1}
        given |= dict.fromkeys(("dy", "d_p", "d_q"), dy)
        given = {name: given[name] for name in gradient.inputs}
        made = engine.map(gradient, **given)
        for name, value in expected.items():
            want = np.full((4, 6), value) if value is not None else 3.0 * np.broadcast_to(bias.numpy(), (4, 6))
            assert np.array_equal(made[name].numpy(), want), name
        needed = {name: given[name] for name in given if name not in ("b", "n") or None in expected.values()}
        assert engine.map(gradient, **needed)["d_x"].shape == (4, 6)
        with pytest.raises(ValueError, match="nothing is called dx; the expressions have"):
            engine.map(gradient, **given, dx=dy)
        with pytest.raises(ValueError, match="x is '1' of type str, needed is a tensor or a number"):
            engine.map(gradient, **{**given, "x": "1"})  # type: ignore[arg-type]


def test_compiled_once_and_kept_on_disk(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other names, numbers and shapes need no other kernel; a fresh process finds it in the cache folder."""
    compiled: list[str] = []

    def counted(text: str, name: str) -> bytes:
        compiled.append(name)
        return compile_glsl(text, name)

    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_registry, "compile_glsl", counted)
    monkeypatch.setattr(kernel_registry, "_loaded", {})
    p, q = e.variables("in float")  # words of GLSL
    x, y = vulkan.tensor(normal(8)), vulkan.tensor(normal(16))
    one = vulkan.map(X * 3.0 + S * B * 7.25, x=x, b=x, s=2.0)
    two = vulkan.map(p * 3.0 + S * q * 7.25, **{"in": y, "float": y}, s=5)
    assert one.numpy().shape == (8,) and two.numpy().shape == (16,)
    assert len(compiled) == 1 and compiled[0].startswith("map_")
    map_op._kernel.cache_clear()
    kernel_registry._loaded.clear()
    with VulkanEngine() as other:
        x = other.tensor(normal(8))
        assert other.map(X * 3.0 + S * B * 7.25, x=x, b=x, s=2.0).numpy().any()
    assert len(compiled) == 1


def test_what_simplification_leaves_out_still_gives_the_shape(vulkan: VulkanEngine) -> None:
    x, b = normal(3), normal(2, 3, seed=1)
    root = e.where(B < 0.0, X * 1.0, X)
    assert np.array_equal(vulkan.map(root, x=vulkan.tensor(x), b=vulkan.tensor(b)).numpy(), np.stack([x, x]))


def test_plans(vulkan: VulkanEngine) -> None:
    """The plan engine gives the shape and counts the work."""
    plan = PlanEngine()
    out = plan.map(X * B + 1.0, x=plan.empty((4, 6)), b=plan.empty((6,)))
    assert out.shape == (4, 6)
    assert plan.cost.flops == 2 * 24 and plan.cost.bytes_read == 4 * 30 and plan.cost.bytes_written == 4 * 24


def test_misuse_is_refused(cpu: CpuEngine) -> None:
    x, ids = cpu.tensor(normal(2, 3)), cpu.tensor(np.zeros((2, 3), np.int32))
    for call, message in [
        (lambda: cpu.map(X + B, x=x), "no value for b; the expressions have b, x"),
        (lambda: cpu.map(X + 1.0, x=x, y=x), "nothing is called y"),
        (lambda: cpu.map(X + B, x=x, b=ids), "b is int32, needed is float32"),
        (lambda: cpu.map(X + B, x=x, b=cpu.tensor(normal(4))), r"do not go together: x \(2, 3\), b \(4,\)"),
        (lambda: cpu.map(X + B, x=cpu.tensor(normal(2, 5, 3)), b=cpu.tensor(normal(2, 1, 3))), "neither the end nor"),
        (lambda: cpu.map(X < B, x=x, b=x), "no float: cast"),
        (lambda: cpu.map({}, x=x), "no expression"),
        (lambda: cpu.map(X + 1.0, x=2.0), "at least one input must be a tensor"),
        (lambda: cpu.map(X * S, x=x, s="2"), "s is '2' of type str, needed is a tensor or a number"),
        (lambda: cpu.map(X * e.uniform(e.whole("n")), x=x, n=1.5), "n is 1.5, needed is a whole number"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
