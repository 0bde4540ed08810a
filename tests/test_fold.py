"""Folds over rows: own ones on the device, the ops' descriptions against other formulas, the order of sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr import constant, equal, log, rsqrt, same, uniform, variables, where, whole
from vkfold.engine.fold import FoldSpec, State, Walk, online_softmax, softmax_shift
from vkfold.engine.fold_glsl import fold_arguments, fold_glsl
from vkfold.engine.ops.row_fold import RowFold, RowFoldOp
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.tensor import TensorSpec
from vkfold.engine.vulkan_engine import VulkanEngine

from .op_checks import EPS32, check_op

X, W, BIG, TOTAL, LARGEST, SCALE, COLS = variables("x w big total largest scale cols")


class Summary(RowFoldOp):
    """log-sum-exp of w * x, length of the row, x over its length at even columns, x itself in place of the odd ones."""

    name = "summary"
    fold = RowFold(
        FoldSpec(
            "summary",
            {"x": "row", "w": "column", "scale": "value", "wanted": "whole"},
            picks={"first": ("x", whole("wanted"))},
            walks=[
                online_softmax(X * W),
                Walk([State("squares", "sum", X * X), State("most", "max", abs(X))], {"big": variables("squares")[0]}),
            ],
            elements={
                "scaled": where(same(whole("column"), whole("wanted")), SCALE, X * rsqrt(BIG)),
            },
            values={
                "lse": softmax_shift(LARGEST) + log(TOTAL),
                "most": variables("most")[0] + constant(0.0),
                "picked": variables("first")[0] * 2.0,
            },
        )
    )

    def outputs(self, x: TensorSpec, *others: TensorSpec) -> Sequence[TensorSpec]:
        row = TensorSpec(x.shape[:-1])
        return x, row, row, row

    def flops(self, x: TensorSpec, *others: TensorSpec) -> int:
        return 8 * x.size


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("cols", [1, 3, 4, 7, 16, 33, 64, 130, 1000])
def test_own_fold(vulkan: VulkanEngine, oracle: CpuEngine, cols: int) -> None:
    """Two walks, a pick, a whole number a row, elements and three values a row; wide and narrow loads."""
    op, rows = Summary(), 7
    x, w, scale = normal(rows, cols), normal(cols, seed=1), normal(rows, seed=2)
    wanted = (np.arange(rows) * 3 % cols).astype(np.int32)

    def call(engine: Any, *tensors: Any) -> Any:
        return engine.execute(op, tensors)

    got = check_op(vulkan, oracle, call, (x, w, scale, wanted), (40 + cols) * EPS32)
    assert np.array_equal(got[2], np.abs(x).max(axis=1))
    assert np.array_equal(got[3], 2 * x[np.arange(rows), wanted])
    assert np.allclose(got[1], np.log(np.exp((x * w).astype(np.float64)).sum(axis=1)), rtol=1e-5, atol=1e-5)


def test_the_order_of_a_sum(vulkan: VulkanEngine) -> None:
    """Four accumulators a lane, added as (0 + 1) + (2 + 3): with values in the columns of lane 0 alone nothing else can
    have an influence, and the bits are those of the same additions in NumPy.
    """
    size = vulkan.recorder.subgroup_size
    rounds = 37
    x = np.zeros((1, 4 * size * rounds), np.float32)
    mine = np.random.default_rng(0).uniform(-1, 1, (rounds, 4)).astype(np.float32) * np.float32(10) ** np.arange(-2, 2)
    x.reshape(rounds, size, 4)[:, 0] = mine
    op = Summary()
    op.fold = RowFold(FoldSpec("total", {"x": "row"}, [Walk([State("total", "sum", X)])], values={"y": TOTAL}))
    op.outputs = lambda x: (TensorSpec(x.shape[:-1]),)  # type: ignore[method-assign]
    (got,) = vulkan.execute(op, (vulkan.tensor(x),))
    sums = np.zeros(4, np.float32)
    for four in mine.astype(np.float32):
        sums = sums + four
    assert got.numpy()[0] == (sums[0] + sums[1]) + (sums[2] + sums[3])
    assert got.numpy()[0] != np.float32(mine.astype(np.float64).sum()) or rounds < 4  # the order does matter here


def test_descriptions_are_the_papers_formulas(oracle: CpuEngine) -> None:
    """Reference and kernel share a description; here it is compared with another way to write the same, in float64."""
    x, dy = normal(6, 37).astype(np.float64), normal(6, 37, seed=1).astype(np.float64)
    w, b = normal(37, seed=2).astype(np.float64), normal(37, seed=3).astype(np.float64)
    t, d, tw, tb = (oracle.tensor(a) for a in (x, dy, w, b))
    p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    jacobian = np.einsum("ri,ij->rij", p, np.eye(37)) - np.einsum("ri,rj->rij", p, p)
    y = oracle.softmax(t)
    checks = [(y, p), (oracle.softmax_backward(d, y), np.einsum("rij,rj->ri", jacobian, dy))]
    eps = np.float64(np.float32(1e-5))
    rms = np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)
    out, rstd = oracle.rms_norm(t, tw, eps=1e-5)
    g = dy * w
    checks += [(out, x / rms * w), (rstd, 1 / rms[:, 0]), (oracle.rms_norm_apply(t, tw, rstd), x / rms * w)]
    dx = g / rms - x * (g * x).mean(axis=1, keepdims=True) / rms**3
    checks.append((oracle.rms_norm_backward(d, t, tw, rstd), dx))
    std = np.sqrt(x.var(axis=1, keepdims=True) + eps)
    xhat = (x - x.mean(axis=1, keepdims=True)) / std
    out, mean, rstd = oracle.layer_norm(t, tw, tb, eps=1e-5)
    checks += [(out, xhat * w + b), (mean, x.mean(axis=1)), (rstd, 1 / std[:, 0])]
    checks.append((oracle.layer_norm_apply(t, tw, tb, mean, rstd), xhat * w + b))
    centered = np.eye(37) - 1 / 37
    dx = (g @ centered - xhat * (g * xhat).mean(axis=1, keepdims=True)) / std
    checks.append((oracle.layer_norm_backward(d, t, tw, mean, rstd), dx))
    ids = np.array([0, 36, 5, -100, 7, 7], np.int32)
    loss, lse = oracle.cross_entropy(t, oracle.tensor(ids))
    kept = ids != -100
    checks += [(lse, np.where(kept, np.log(np.exp(x).sum(axis=1)), 0))]
    checks.append((loss, np.where(kept, -np.log(p[np.arange(6), ids % 37]), 0)))
    oracle.set_step_parameters(StepParameters(loss_scale=0.25))
    gradient = oracle.cross_entropy_backward_(oracle.tensor(x), oracle.tensor(ids), lse)
    checks.append((gradient, kept[:, None] * (p - (np.arange(37) == ids[:, None])) * 0.25))
    for i, (got, want) in enumerate(checks):
        assert np.allclose(got.numpy(), want, rtol=1e-10, atol=1e-12), i


def test_argument_order() -> None:
    """Inputs, then outputs that are none of them, step, sizes, scalars."""
    spec = FoldSpec(
        "k",
        {"x": "row", "w": "column", "scale": "value", "n": "whole", "loss_scale": "step"},
        elements={"x": X * variables("loss_scale")[0], "y": X * variables("eps")[0]},
        values={"v": SCALE},
        scalars="float eps",
    )
    assert fold_arguments(spec) == (
        "inout row p_x, in row p_w, in f32 p_scale, in i32 p_n, out row p_y, out f32 p_v, step, uint rows, uint cols, "
        "float p_eps"
    )
    assert spec.num_loops == 1 and "subgroupAdd" not in fold_glsl(spec)


CENTERED = FoldSpec(
    "centered",
    {"x": "row", "w": "column", "scale": "value", "n": "whole", "loss_scale": "step"},
    walks=[Walk([State("total", "sum", X)], {"big": TOTAL / COLS})],
    elements={"x": (X - BIG) * W * SCALE, "marked": where(same(whole("column"), whole("n")), variables("by")[0], X)},
    values={"big": BIG * variables("loss_scale")[0]},
    scalars="float by",
)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 8), (64,)])
def test_the_verb(vulkan: VulkanEngine, cpu: CpuEngine, shape: tuple[int, ...]) -> None:
    """Every kind of input, one output in place, one new, one a row, a number: on both engines."""
    x, w, scale = normal(*shape), normal(shape[-1], seed=1), normal(*shape[:-1], seed=2)
    n = np.full(shape[:-1], shape[-1] - 1, np.int32)
    for engine in (vulkan, cpu):
        engine.set_step_parameters(StepParameters(loss_scale=0.5))
        t = engine.tensor(x)
        rest = {"w": engine.tensor(w), "scale": engine.tensor(scale), "n": engine.tensor(n)}
        made = engine.fold(CENTERED, x=t, by=7.0, **rest)
        assert list(made) == ["x", "marked", "big"] and made["x"] is t
        mean = x.mean(axis=-1, keepdims=True)
        assert np.allclose(t.numpy(), (x - mean) * w * scale[..., None], rtol=1e-5, atol=1e-6)
        assert np.allclose(made["big"].numpy(), 0.5 * mean[..., 0], rtol=1e-5, atol=1e-6)
        marked = made["marked"].numpy()
        assert np.array_equal(marked[..., :-1], x[..., :-1]) and (marked[..., -1] == 7).all()


def test_misuse_of_the_verb_is_refused(cpu: CpuEngine) -> None:
    x = cpu.tensor(normal(3, 5))
    good = {
        "w": cpu.tensor(normal(5)),
        "scale": cpu.tensor(normal(3)),
        "n": cpu.tensor(np.zeros(3, np.int32)),
        "by": 1.0,
    }
    for change, message in [
        ({"w": cpu.tensor(normal(3))}, r"fold 'centered': w has shape \(3,\), needed is \(5,\)"),
        ({"n": cpu.tensor(normal(3))}, "n is float32, needed is int32"),
        ({"w": 2.0}, "w is 2.0 of type float, needed is a tensor"),
        ({"z": x}, "nothing is called z; it takes x, w, scale, n, by"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpu.fold(CENTERED, x=x, **good | change)
    with pytest.raises(ValueError, match="no value for by, n"):
        cpu.fold(CENTERED, x=x, w=good["w"], scale=good["scale"])


def test_a_maximum_of_nan_is_nan(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    """Wherever it stands in the row, alone or before and behind larger numbers; other rows keep their maximum."""
    spec = FoldSpec("most", {"x": "row"}, [Walk([State("largest", "max", X * 1.0)])], values={"y": LARGEST})
    for cols in (1, 3, 4, 37, 64, 515):
        x = normal(2 * cols + 2, cols)
        x[np.arange(cols), np.arange(cols)] = np.nan
        x[np.arange(cols) + cols, np.arange(cols)[::-1]] = np.nan
        x[cols : 2 * cols - 1, -1] = np.inf
        x[-1] = -np.inf
        for engine in (vulkan, cpu):
            got = engine.fold(spec, x=engine.tensor(x))["y"].numpy()
            assert np.isnan(got[:cols]).all() and not np.isnan(got[2 * cols :]).any()
            assert np.array_equal(got, np.max(x, axis=1), equal_nan=True)


def test_clashing_names_are_refused() -> None:
    """A name stands for one thing, says where, and how to mend it."""

    def spec(*states: State, inputs: Any = None, results: Any = None, **more: Any) -> FoldSpec:
        outputs = {} if {"elements", "values"} & set(more) else {"values": {"out": constant(0.0)}}
        return FoldSpec("k", inputs or {"x": "row"}, [Walk(states, results or {})], **outputs, **more)

    total, most = State("s", "sum", X), State("m", "max", X)
    for make, message in [
        (lambda: spec(State("x", "sum", X)), "'x' is the name of two things, row input and state: rename one"),
        (lambda: spec(total, State("s", "max", X)), "'s' is the name of two things, state and state"),
        (lambda: spec(total, results={"s": X}), "'s' is the name of two things, state and result"),
        (lambda: spec(State("cols", "sum", X)), "state 'cols' is called like one of cols, num_cols, column: rename"),
        (lambda: spec(State("index", "sum", X)), "'index' cannot name"),
        (lambda: spec(State("_s", "sum", X)), "'_s' begins with an underscore"),
        (lambda: spec(most, State("old_m", "sum", X)), "'old_m' is the name of two things, state and max state m's"),
        (lambda: spec(most, inputs={"x": "row", "old_m": "value"}), "'old_m' is the name of two things"),
        (lambda: spec(total, picks={"s": ("x", whole(0))}), "'s' is the name of two things, pick and state"),
        (lambda: spec(total, scalars="float s"), "'s' is the name of two things, scalar and state"),
        (lambda: spec(scalars="float x"), "'x' is the name of two things, row input and scalar"),
        (lambda: spec(scalars="double k"), r"scalar 'double k' is not a type \(float, int, uint\) and a name"),
        (lambda: spec(scalars="float k, j"), "scalar 'j' is not a type"),
        (lambda: spec(elements={"o": X}, values={"o": constant(1.0)}), "element output and value output"),
        (lambda: spec(inputs={"x": "row", "v": "value"}, values={"v": SCALE}), "value input and value output"),
        (lambda: spec(inputs={"x": "row", "w": "column"}, elements={"w": X}), "column input and element output"),
        (lambda: spec(inputs={"x": "row", "rate": "step"}), "rate is no step parameter: those are micro_batch, learn"),
        (lambda: spec(inputs={"v": "value"}), "no row input to fold over"),
        (lambda: spec(inputs={"x": "row", "n": "whole"}, values={"o": W + variables("n")[0]}), r"number, whole\('n'\)"),
        (lambda: spec(elements={"o": where(same(whole("x"), 1), X, X)}), r"it is a float, variable\('x'\)"),
        (lambda: spec(values={}, elements={}), "it has no output"),
        (lambda: spec(elements={"o": equal(X, 0.0)}), "o is eq.*, needed is a float"),
        (lambda: spec(elements={"o": 1.0}), "o is 1.0, needed is a float"),
        (lambda: spec(skip=constant(1.0)), "skip is 1.0, needed is a condition"),
        (lambda: spec(picks={"p": ("x", constant(0.0))}), "p is 0.0, needed is a whole number"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_names_that_look_like_the_kernels_own(vulkan: VulkanEngine) -> None:
    """Words of GLSL and of the kernel, outputs called like states."""
    lane, row, sum_row = variables("lane row sum_row")
    inputs = {"lane": "row", "sum_row": "row", "float": "value"}
    walk = Walk([State("row", "sum", lane + sum_row), State("c", "max", lane)], {"base": row + variables("float")[0]})
    spec = FoldSpec(
        "words", inputs, [walk], values={"row": row, "out": variables("base")[0]}, elements={"c": lane - 1.0}
    )
    x, y = normal(3, 10), normal(3, 10, seed=1)
    made = vulkan.fold(spec, lane=vulkan.tensor(x), sum_row=vulkan.tensor(y), **{"float": vulkan.tensor(np.ones(3))})
    assert np.allclose(made["row"].numpy(), (x + y).sum(axis=1), rtol=1e-5, atol=1e-5)
    assert np.array_equal(made["out"].numpy(), made["row"].numpy() + 1)
    assert np.array_equal(made["c"].numpy(), x - np.float32(1))


def test_unknown_names_are_refused() -> None:
    """Each expression may use what is known where it stands."""

    def spec(**more: Any) -> FoldSpec:
        return FoldSpec("k", {"x": "row"}, **more)

    later = State("a", "sum", variables("b")[0])
    for make, message in [
        (lambda: spec(elements={"y": W}), "y depends on w; known there are .*, x"),
        (lambda: spec(values={"v": X}), "v depends on x"),
        (lambda: spec(walks=[Walk([later, State("b", "max", X)])]), "a depends on b"),
        (lambda: spec(walks=[Walk([State("a", "mean", X)])]), "state a is 'mean': it is a"),
        (lambda: spec(elements={"y": X * uniform(1)}), "random numbers"),
        (lambda: spec(picks={"p": ("w", whole(0))}), "picked from 'w'"),
        (lambda: spec(skip=equal(X, 0.0)), "skip depends on x"),
        (lambda: FoldSpec("k", {"x": "rows"}), "input x is 'rows', not one of row, column"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_descriptions_of_the_wrong_type() -> None:
    """Said with what is needed, where the fold is described."""
    good: dict[str, Any] = {"name": "k", "inputs": {"x": "row"}, "elements": {"y": X}}
    total = State("s", "sum", X)
    for change, message in [
        ({"name": 5}, "fold: name is 5, needed is a str, such as 'my_fold'"),
        ({"scalars": ["a"]}, r"fold 'k': scalars is \['a'\], needed is a str of types and names, such as 'float eps"),
        ({"scalars": None}, "scalars is None, needed is a str"),
        ({"scalars": b"float a"}, "scalars is b'float a', needed is a str"),
        ({"inputs": ["x"]}, r"inputs is \['x'\], needed is a dict by name"),
        ({"elements": X}, "elements is x, needed is a dict by name"),
        ({"values": "v"}, "values is 'v', needed is a dict by name"),
        ({"picks": ["p"]}, r"picks is \['p'\], needed is a dict by name"),
        ({"picks": {"p": "xy"}}, "pick p is 'xy', needed is a row input's name and a whole number"),
        ({"picks": {"p": ("x",)}}, "pick p is .*, needed is a row input's name and a whole number"),
        ({"walks": Walk([total])}, r"walks is .*, needed is a list, such as \[Walk"),
        ({"walks": [total]}, r"one of walks is .*, needed is a Walk\(\.\.\.\)"),
        ({"walks": [Walk(total)]}, "walk.states is .*, needed is a list"),  # type: ignore[arg-type]
        ({"walks": [Walk([X])]}, "one of walk.states is x, needed is a State"),  # type: ignore[list-item]
        ({"walks": [Walk([total], ["r"])]}, "walk.results is .*, needed is a dict"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(TypeError, match=message):
            FoldSpec(**good | change)
    for name in ("", "a b", "../x"):
        with pytest.raises(ValueError, match=r"name is .* use ASCII letters"):
            FoldSpec(**good | {"name": name})
    with pytest.raises(ValueError, match=r"input x is \['row'\], not one of row, column"):
        FoldSpec(**good | {"inputs": {"x": ["row"]}})
    with pytest.raises(ValueError, match="5 cannot name a variable"):
        FoldSpec(**good | {"elements": {5: X}})
