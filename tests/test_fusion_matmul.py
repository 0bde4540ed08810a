"""A matmul with what is before it and behind it in one launch: norms as prologues, elementwise ops as epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkfold.engine.expr import logistic, maximum, variable, variables
from vkfold.engine.fold import FoldSpec
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import variants
from vkfold.engine.ops.matmul_parts import SUM
from vkfold.engine.ops.matmul_prologue import MATMUL_PROLOGUE
from vkfold.engine.ops.rms_norm import RMS_NORM
from vkfold.engine.tensor import Tensor
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine

from .fusion_checks import arrays, as_if_new, check_same, counts

engine = pytest.fixture(name="engine")(as_if_new)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize(
    ("rows", "cols", "n"), [(5, 7, 9), (33, 64, 130), (64, 40, 96), (70, 130, 33), (7, 1, 5), (64, 1, 64), (1, 9, 3)]
)
def test_a_norm_is_made_as_the_matmul_reads_it(
    engine: VulkanEngine, norm: str, trans_a: bool, rows: int, cols: int, n: int
) -> None:
    x, weight, shift, other = arrays((rows, cols), (cols,), (cols,), (rows if trans_a else cols, n))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        xt, wt, st, ot = (engine.tensor(array) for array in (x, weight, shift, other))
        results = []
        stats: list[Tensor] = []
        for again in (False, True):  # with the norm's row scalars still to be made, and with them kept
            if norm == "rms" and again:
                y = engine.rms_norm_apply(xt, wt, *stats)
            elif norm == "rms":
                y, *stats = engine.rms_norm(xt, wt)
            elif again:
                y = engine.layer_norm_apply(xt, wt, st, *stats)
            else:
                y, *stats = engine.layer_norm(xt, wt, st)
            z = engine.matmul(y, ot, trans_a=trans_a)
            del y
            results.append(z)
        return [tensor.numpy() for tensor in (*results, *stats)]

    check_same(engine, call)
    fired = counts(engine)
    assert fired.keys() == {"norm + matmul"}
    assert fired["norm + matmul"] == 2 or (
        fired["norm + matmul"] == 1 and 1 in (rows, cols)
    )  # bytes may not fall there


def test_a_norm_that_another_op_reads_is_made(engine: VulkanEngine) -> None:
    """By an op with fewer inputs than a matmul has."""
    x, weight = arrays((4, 8), (8,))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        y, rstd = engine.rms_norm(engine.tensor(x), engine.tensor(weight))
        z = engine.gelu(y)
        del y, rstd
        return [z.numpy()]

    check_same(engine, call)
    assert counts(engine) == {}


def test_one_tensor_under_two_names_of_an_epilogue(engine: VulkanEngine) -> None:
    """Joined with what reads the product: other tensors keep their places."""
    a, b, twice, gate = arrays((8, 6), (6, 10), (8, 10), (8, 10))
    root = SUM * variable("p") + variable("q")

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        at, bt, tt, gt = (engine.tensor(array) for array in (a, b, twice, gate))
        results = []
        for read in (lambda y: engine.multiply(y, gt), lambda y: engine.scale(y, 2.0)):
            y = engine.matmul(at, bt, epilogue=root, operands={"p": tt, "q": tt})
            results.append(read(y))
            del y
        return [tensor.numpy() for tensor in results]

    check_same(engine, call)
    assert counts(engine) == {"matmul + elementwise": 2}


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize(("rows", "cols", "n"), [(5, 7, 9), (33, 64, 130), (64, 40, 96)])
def test_any_fold_without_a_walk_is_a_prologue(
    engine: VulkanEngine, trans_a: bool, rows: int, cols: int, n: int
) -> None:
    """Of numbers a row alone, a column alone, of neither: the bits of the fold, then matmul; C swapped or not."""
    value, scale, shift = variables("value scale shift")
    x, scales, other = arrays((rows, cols), (rows,), (rows if trans_a else cols, n))
    shifts = np.linspace(-1, 1, cols, dtype=np.float32)
    settings = {"trans_a": trans_a, "trans_b": False, "activation": "silu", "accumulate": False}
    tensors = [engine.tensor(array) for array in (x, other)]
    for inputs, root, numbers in (
        ({"value": "row", "scale": "value"}, maximum(value, 0.0) * scale, [scales]),
        ({"value": "row", "shift": "column"}, logistic(value) - shift, [shifts]),
        ({"value": "row"}, abs(value), []),
    ):
        fold = FoldSpec("own", inputs, elements={"made": root})
        operands = [engine.tensor(array) for array in numbers]
        given = dict(zip(list(inputs)[1:], operands, strict=True))
        made = engine.fold(fold, value=tensors[0], **given)["made"]
        expected = engine.matmul(made, tensors[1], trans_a=trans_a, activation="silu").numpy()
        for swapped in ("", "_swapped"):
            with forced_variant(variants(MatmulChooser.of(engine.recorder).device)[-1].name + swapped):
                call = (*tensors, None, None, None, *operands)
                got = engine.execute(MATMUL_PROLOGUE, call, prologue=fold, **settings)[0].numpy()
            assert np.array_equal(got, expected)
        in_numpy = MATMUL_PROLOGUE.reference(x, other, None, None, None, *numbers, prologue=fold, **settings)[0]
        np.testing.assert_allclose(in_numpy, expected, rtol=1e-4, atol=1e-4)


def test_what_is_no_prologue_is_refused(engine: VulkanEngine) -> None:
    x, y = (engine.tensor(array) for array in arrays((4, 4), (4, 4)))
    settings = {"trans_a": False, "trans_b": False, "activation": None, "accumulate": False}
    with pytest.raises(ValueError, match=r"fold 'rms_norm' cannot be a prologue \(walks, values, scalars\)"):
        engine.execute(MATMUL_PROLOGUE, (x, y, None, None, None), prologue=RMS_NORM.fold.spec, **settings)


def norm_then(engine: VulkanEngine, change: Callable[..., Any]) -> list[np.ndarray]:
    """A norm, something else, a matmul of the norm's output, which is dropped."""
    x, weight, square, more = (engine.tensor(array) for array in arrays((8, 8), (8,), (8, 8), (8, 8)))
    engine.flush_batch()
    y, rstd = engine.rms_norm(x, weight)
    kept = change(engine, x, weight, y, rstd, more)
    z = engine.matmul(y, square)
    del y
    return [z.numpy(), *(tensor.numpy() for tensor in kept)]


@pytest.mark.parametrize(
    "change",
    [
        lambda engine, x, weight, y, rstd, more: [y],  # still held
        lambda engine, x, weight, y, rstd, more: [engine.add(y, more)],  # a second reader
        lambda engine, x, weight, y, rstd, more: engine.add_(x, more) or [],  # what the norm read is overwritten
        lambda engine, x, weight, y, rstd, more: [engine.zero_(weight)][:0],
        lambda engine, x, weight, y, rstd, more: [engine.zero_(rstd)],
        lambda engine, x, weight, y, rstd, more: engine.add_(y, more) or [],  # the output is changed
    ],
)
def test_a_norm_that_is_needed_is_made(engine: VulkanEngine, change: Callable[..., Any]) -> None:
    check_same(engine, lambda engine: norm_then(engine, change))
    assert "norm + matmul" not in counts(engine)


@pytest.mark.parametrize("layout", [{}, {"trans_a": True}, {"trans_b": True}, {"precision": "float16"}], ids=str)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("noise", [False, True])
def test_a_product_ends_in_what_reads_it(
    engine: VulkanEngine, layout: dict[str, Any], lead: tuple[int, ...], noise: bool
) -> None:
    """Two ops behind the usual epilogue, with every kind of operand or noise: one launch, the same bits."""
    a, b = ((9, 33) if layout.get("trans_a") else (33, 9)), ((18, 9) if layout.get("trans_b") else (9, 18))
    given = arrays((*lead, *a), (*lead, *b), (18,), (*lead, 33, 18), (*lead, 33, 1), (1,))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        x, w, bias, other, scales, one = (engine.tensor(array) for array in given)
        v, o, s, c = variables("v o s c")
        engine.flush_batch()
        y = engine.matmul(x, w, bias=bias, activation="silu", **layout)
        y = engine.multiply(y, other) if noise else engine.map(v * s + o * c, v=y, s=scales, o=other, c=one)
        y = engine.dropout(y, p=0.5, site=4) if noise else engine.silu(y)
        return [y.numpy()]

    check_same(engine, call)
    assert counts(engine) == {"elementwise neighbours": 1, "matmul + elementwise": 1}


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_a_product_is_written_into_may_be_changed_in_place(engine: VulkanEngine, accumulate: bool) -> None:
    a, b, c, other = arrays((7, 9), (9, 12), (7, 12), (7, 12))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        x, w, out, y = (engine.tensor(array) for array in (a, b, c, other))
        engine.flush_batch()
        engine.matmul(x, w, out=out, accumulate=accumulate, activation="relu")
        engine.scale(y, 2.0)
        engine.add_bias_(out, y.rows(0, 1).reshape(12))
        return [out.numpy(), y.numpy()]

    check_same(engine, call)
    assert counts(engine) == {"matmul + elementwise": 1}


def product_then(engine: VulkanEngine, change: Callable[..., Any]) -> list[np.ndarray]:
    """A product, something else, an elementwise op of the product, which is dropped."""
    x, square, more, other = (engine.tensor(array) for array in arrays((8, 8), (8, 8), (8, 8), (8, 8)))
    engine.flush_batch()
    y = engine.matmul(x, square)
    kept = change(engine, x, square, y, more)
    z = engine.multiply(y, other)
    del y, x
    return [z.numpy(), *(tensor.numpy() for tensor in kept)]


@pytest.mark.parametrize(
    "change",
    [
        lambda engine, x, square, y, more: [y],  # still held
        lambda engine, x, square, y, more: [engine.softmax(y)],  # a second reader, before
        lambda engine, x, square, y, more: [engine.zero_(x)][:0],  # operands are overwritten
        lambda engine, x, square, y, more: [engine.zero_(square.rows(7, 8))][:0],
        lambda engine, x, square, y, more: [engine.zero_(y.rows(2, 3))][:0],  # the product is changed in part
    ],
)
def test_a_product_that_is_needed_is_made(engine: VulkanEngine, change: Callable[..., Any]) -> None:
    check_same(engine, lambda engine: product_then(engine, change))
    assert "matmul + elementwise" not in counts(engine)


def test_a_product_is_not_stored_over_what_its_end_reads(engine: VulkanEngine) -> None:
    """The result may lie where a dropped operand was, or be an operand of its own: sums are stored there first."""
    a, b, other = arrays((8, 8), (8, 8), (8, 8))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        x, w, stream = (engine.tensor(array) for array in (a, b, other))
        x = engine.softmax(x)
        engine.flush_batch()
        y = engine.matmul(x, w)
        place = x.address
        del x
        z = engine.scale(y, 2.0)
        assert z.address == place
        del y
        engine.add_(stream, engine.matmul(z, w))
        return [z.numpy(), stream.numpy()]

    check_same(engine, call)
    assert not counts(engine)


def test_more_operands_than_fit_stay_outside(engine: VulkanEngine) -> None:
    names = "p q r s t"
    given = arrays((8, 8), (8, 8), *[(8, 8)] * 5)

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        x, w, *others = (engine.tensor(array) for array in given)
        residual = others[0]
        engine.flush_batch()
        expression = sum(variables(names), variable("y") * variable("factor"))
        y = engine.matmul(x, w, residual=residual)
        operands = dict(zip(names.split(), [others[1], *others[1:]], strict=True))
        z = engine.map(expression, y=y, factor=0.5, **operands)
        del y
        return [z.numpy()]

    check_same(engine, call)
    assert not counts(engine)


def test_cpu_drivers_take_these_rules_only_when_asked(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What saves bytes for arithmetic is off where arithmetic is dear."""
    monkeypatch.setenv("VKFOLD_FUSION", "1")
    with VulkanEngine() as usual:
        norm_then(usual, lambda *_: [])
        product_then(usual, lambda *_: [])
        for rule in ("norm + matmul", "matmul + elementwise"):
            assert (rule in counts(usual)) is not usual.device.is_cpu
    norm_then(engine, lambda *_: [])
    product_then(engine, lambda *_: [])
    assert counts(engine) == {"norm + matmul": 1, "matmul + elementwise": 1}
