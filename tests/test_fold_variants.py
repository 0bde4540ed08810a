"""Variants of folds over rows: the same bits for any shape and value, checked before use, chosen by a pure function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pytest
from variant_checks import damaged

from vkfold.engine.capabilities import Capabilities
from vkfold.engine.errors import BadInputError, VkfoldError
from vkfold.engine.expr import variables
from vkfold.engine.fold import FoldSpec, State, Walk
from vkfold.engine.fold_choice import RowCall, RowFoldChooser, select_for
from vkfold.engine.fold_glsl import kept_inputs
from vkfold.engine.fold_variants import RowVariant, row_variants, takes_powers
from vkfold.engine.kernel import Kernel
from vkfold.engine.ops import cross_entropy, layer_norm, rms_norm, softmax
from vkfold.engine.ops.row_fold import RowFold
from vkfold.engine.ops.row_fold_tuner import RowFoldCall, tune_row_fold
from vkfold.engine.tensor import Tensor, TensorSpec
from vkfold.engine.variant_cache import TuningTable
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.variant_families import variant_reasons
from vkfold.engine.vulkan_engine import VulkanEngine

NEW, OLD = Capabilities(8, True, "llvmpipe", 25, 2), Capabilities(8, True, "llvmpipe", 22, 2)
SWIFTSHADER, GPU = Capabilities(4, True, "SwiftShader", 5, 2), Capabilities(32, False, "a GPU", 1)
X, MEAN, TOTAL, SQUARES, COLS = variables("x mean total squares cols")
_WALKS = [
    Walk([State("total", "sum", X)], {"mean": TOTAL / COLS}),
    Walk([State("squares", "sum", (X - MEAN) * (X - MEAN))]),
]
CENTRED = FoldSpec("centred", {"x": "row"}, _WALKS, elements={"x": (X - MEAN) * SQUARES}, values={"middle": MEAN})


def bits(tensor: Tensor) -> np.ndarray:
    """One pattern for NaN: which of its bits are set is up to a driver's compiler."""
    array = tensor.numpy()
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


def values(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Rows of ordinary numbers, one with NaN, one of nothing but -inf, one with +inf and zeros of both signs."""
    made = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    made[1, cols // 2] = np.nan
    made[2] = -np.inf
    made[3, ::2] = np.resize(np.array([np.inf, 0.0, -0.0], np.float32), made[3, ::2].size)
    return made


def every_fold(engine: VulkanEngine, rows: int, cols: int, offset: int = 0) -> list[Tensor]:
    """One of each kind: one walk and two, with states that depend on each other, picks, rows left out, in place."""

    def tensor(seed: int) -> Tensor:
        array = np.concatenate([np.ones(offset, np.float32), values(rows, cols, seed).ravel()])
        return Tensor(engine, TensorSpec((rows, cols)), engine.tensor(array).storage, 4 * offset)

    x, weight = tensor(0), engine.tensor(values(4, cols)[0])
    targets = np.random.default_rng(1).integers(0, cols, rows).astype(np.int32)
    targets[::3] = -1
    y, rstd = engine.rms_norm(x, weight)
    loss, lse = engine.cross_entropy(x, engine.tensor(targets), ignore_index=-1)
    gradient = engine.rms_norm_backward(tensor(1), x, weight, rstd)
    own = tensor(2)
    middle = engine.fold(CENTRED, x=own)["middle"]
    return [engine.softmax(x), y, rstd, loss, lse, gradient, own, middle]


@pytest.mark.parametrize(("rows", "cols", "offset"), [(21, 4, 0), (5, 3, 1), (18, 101, 0), (17, 100, 3), (7, 64, 0)])
def test_every_variant_gives_the_same_bits(vulkan: VulkanEngine, rows: int, cols: int, offset: int) -> None:
    device, largest = RowFoldChooser.of(vulkan.recorder).device, vulkan.recorder.max_invocations
    family = row_variants(device, "", cols, largest)
    found = {}
    for variant in family:
        kernels: list[str] = []
        vulkan.recorder.trace = kernels.append
        try:
            with forced_variant(variant.name, "row_fold"):
                found[variant.name] = list(map(bits, every_fold(vulkan, rows, cols, offset)))
        finally:
            vulkan.recorder.trace = None
        assert len(kernels) == 5 and all(f"_{variant.name}" in kernel for kernel in kernels)
    base = found.pop(family[-1].name)
    assert any(name.startswith("kept") for name in found)
    for name, got in found.items():
        for i, (one, other) in enumerate(zip(got, base, strict=True)):
            assert np.array_equal(one, other), (name, i)


def test_what_is_kept() -> None:
    """Rows that more than one loop reads; each is then loaded once."""
    assert kept_inputs(CENTRED) == ("x",) and kept_inputs(softmax.FORWARD.spec) == ("x",)
    assert kept_inputs(rms_norm.APPLY.spec) == () and set(kept_inputs(rms_norm.BACKWARD.spec)) == {"dy", "x"}
    for fold in (softmax.FORWARD, rms_norm.BACKWARD, layer_norm.FORWARD):
        text = fold.variant(RowVariant("kernel", 4, 3), wide=True).glsl.partition("void main() {")[2]
        for name in kept_inputs(fold.spec):
            assert len(re.findall(rf"load4\w*\(args\.p_{name}, start", text)) == 3, (fold.spec.name, name)
        assert text.count("for (") == 0


# -- the choice --------------------------------------------------------------------------------------------------------
def test_selection_is_a_pure_function_of_its_table() -> None:
    table = TuningTable()

    def name(device: Capabilities, rows: int, cols: int, spec: FoldSpec = CENTRED, **more: int) -> str:
        call = RowCall(spec, "k", rows, cols, more.get("largest", 1024), bool(more.get("compiles", True)))
        return select_for(device, call, table, bool(more.get("tuned", True))).choice.name

    power = softmax.FORWARD.spec
    assert takes_powers(power) and not takes_powers(CENTRED)
    assert name(NEW, 512, 1024) == name(OLD, 512, 256) == name(SWIFTSHADER, 512, 256) == "kept16"
    assert name(NEW, 512, 1028) == name(OLD, 512, 260) == name(SWIFTSHADER, 512, 260) == "rows16"
    assert name(SWIFTSHADER, 512, 64, power) == "kept16" and name(SWIFTSHADER, 512, 256, power) == "rows16"
    assert name(NEW, 512, 16) == "rows16", "what is saved does not pay for compiling"
    assert name(NEW, 512, 1024, compiles=0) == "rows16", "there is no compiler"
    assert name(NEW, 63, 1024) == "kept4" and name(NEW, 15, 1024) == "rows1" and name(NEW, 1, 1024) == "rows4"
    assert name(GPU, 512, 1024) == "rows4" and name(NEW, 512, 2048, largest=64) == "rows4"
    table.note_times("row_fold k 512x1024", {"rows1": 1.0, "kept4": 0.5, "no_such_variant": 0.1})
    assert name(GPU, 512, 1024) == "kept4" and name(GPU, 512, 1024, tuned=0) == "rows4"
    table.bar("k_kept4_of8", "wrong")
    assert name(GPU, 512, 1024) == "rows1" and name(NEW, 512, 1024) == "kept4"
    for variant in row_variants(GPU, "k", 1024, 1024):
        table.bar(variant.barred_as, "wrong")
    with pytest.raises(VkfoldError, match="every variant of row_fold k 512x1024 is barred"):
        name(GPU, 512, 1024)


def test_forcing(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_VARIANT", "row_fold=rows3")
    with pytest.raises(BadInputError, match=r"no row_fold variant 'rows3': there are kept16, .*, rows4"):
        VulkanEngine()
    with pytest.raises(BadInputError, match="no row_fold variant"):
        vulkan.softmax(vulkan.tensor(np.ones((4, 4))))
    monkeypatch.setenv("VKFOLD_VARIANT", "row_fold=kept4")
    vulkan.softmax(vulkan.tensor(np.ones((5, 4)))).numpy()
    reasons = variant_reasons(vulkan.recorder)["softmax_vec4_kept4_of1"]
    assert reasons["row_fold softmax_vec4 5x4"] == "kept4, forced"
    with pytest.raises(BadInputError, match="row_fold variant kept4: rows of 4097 have rows16, rows1, rows4"):
        vulkan.softmax(vulkan.tensor(np.ones((1, 4097))))


# -- tuning ------------------------------------------------------------------------------------------------------------
CALL = RowFoldCall(softmax.FORWARD, (40, 68), True, ())


def soft(engine: VulkanEngine) -> np.ndarray:
    return bits(engine.softmax(engine.tensor(values(40, 68))))


def test_tuning_is_kept_used_and_changes_no_bit(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = soft(untuned)
    measured = tune_row_fold(untuned.recorder, CALL, rounds=1)
    assert measured.key == CALL.key == "row_fold softmax_vec4 40x68" and min(measured.seconds.values()) > 0
    assert {name[:4] for name in measured.seconds} == {"rows", "kept"} and np.array_equal(soft(untuned), before)
    path = RowFoldChooser.of(untuned.recorder).table.path
    assert path is not None
    data = json.loads(path.read_text())
    assert data["times"] == {measured.key: measured.seconds}
    data["times"][measured.key]["rows1"] = 1e-9
    path.write_text(json.dumps(data))
    with VulkanEngine() as second:
        assert np.array_equal(soft(second), before)
        assert variant_reasons(second.recorder)["softmax_vec4_rows1"][measured.key].startswith("rows1, measured 1e-06")
        monkeypatch.setenv("VKFOLD_TUNE", "0")
        assert np.array_equal(soft(second), before)
        assert measured.key not in variant_reasons(second.recorder).get("softmax_vec4_rows1", {})


def test_whole_numbers_and_step_parameters_are_measured(untuned: VulkanEngine) -> None:
    for fold in (cross_entropy.FORWARD, cross_entropy.BACKWARD):
        call = RowFoldCall(fold, (5, 7), False, (1,) * len(fold.spec.scalar_kinds))
        assert len(tune_row_fold(untuned.recorder, call, rounds=1).seconds) > 2


# -- checks ------------------------------------------------------------------------------------------------------------
DAMAGES: dict[str, tuple[str, str]] = {
    "a sum": ("v_total = subgroupAdd(a_total)", "v_total = 1.0000002 * subgroupAdd(a_total)"),
    "more is written than there is": ("if (row >= args.rows) return;", "if (row > args.rows) return;"),
    "a maximum": ("max_or_nan(s_largest, nan_largest);", "1.0 + max_or_nan(s_largest, nan_largest);"),
}


@pytest.fixture(params=DAMAGES)
def wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The variants kept4 and rows16 of softmax are wrong."""
    old, new = DAMAGES[request.param]
    right: Callable[..., Kernel] = RowFold.variant

    def faulty(fold: RowFold, choice: RowVariant, *, wide: bool) -> Kernel:
        kernel = right(fold, choice, wide=wide)
        if choice.name not in ("kept4", "rows16") or fold is not softmax.FORWARD:
            return kernel
        return damaged(kernel, old, new)

    monkeypatch.setattr(RowFold, "variant", faulty)
    return str(request.param)


def test_a_wrong_variant_is_barred_and_the_next_best_taken(
    untuned: VulkanEngine, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it computes anything anybody sees; for good; it cannot be forced."""
    with forced_variant("rows4", "row_fold"):
        expected = soft(untuned)
    chooser = RowFoldChooser.of(untuned.recorder)
    chooser.table.note_times(CALL.key, {"kept4": 1.0, "rows16": 2.0, "rows1": 3.0, "rows4": 4.0})
    assert np.array_equal(soft(untuned), expected)
    kept = f"softmax_vec4_kept4_of{-(-68 // (4 * untuned.recorder.subgroup_size))}"
    assert set(chooser.table.barred) == {kept, "softmax_vec4_rows16"}
    assert f"row_fold variant {kept} is barred on this device" in caplog.text
    assert "words differ from the base variant's, the first at y[" in caplog.text
    assert variant_reasons(untuned.recorder)["softmax_vec4_rows1"][CALL.key].startswith("rows1, measured")
    assert not {"kept4", "rows16"} & set(tune_row_fold(untuned.recorder, CALL, rounds=1).seconds)
    with forced_variant("kept4", "row_fold"), pytest.raises(VkfoldError, match="kept4 is forced and barred"):
        soft(untuned)
    with VulkanEngine() as second:
        assert np.array_equal(soft(second), expected)
        assert kept not in variant_reasons(second.recorder)
