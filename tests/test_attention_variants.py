"""Variants of attention and other block folds: equal bits, chosen by a table, forced, checked, barred, tuned."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from variant_checks import MASKS, damaged

from vkfold.engine.block_fold import BlockFold
from vkfold.engine.block_fold_choice import BlockFoldChooser, select_for
from vkfold.engine.block_fold_glsl import Tile, block_fold_kernel
from vkfold.engine.block_fold_variants import (
    device_tile,
    estimated_rows,
    family_rows,
    tile_variants,
    worth_measuring,
)
from vkfold.engine.capabilities import Capabilities
from vkfold.engine.errors import BadInputError, VkfoldError
from vkfold.engine.kernel import Kernel
from vkfold.engine.ops import block_fold_check, block_fold_dispatch
from vkfold.engine.ops.attention import attention_calls
from vkfold.engine.ops.block_fold_launch import KNOWN_HEAD_DIMS
from vkfold.engine.ops.block_fold_tuner import tune_block_fold
from vkfold.engine.variant_cache import TuningTable
from vkfold.engine.variant_choice import OPS_WITH_VARIANTS, forced_by_switch, forced_variant, op_of_fold
from vkfold.engine.variant_families import CHOOSERS, variant_reasons
from vkfold.engine.vulkan_engine import VulkanEngine

LAVAPIPE, SWIFTSHADER = Capabilities(8, True, "llvmpipe", 22, 4), Capabilities(4, True, "SwiftShader", 5, 4)
NEWER = LAVAPIPE._replace(driver_major=25)
GPU = Capabilities(32, False, "a GPU", 1)
CALLS = attention_calls(1, 4, 40, 12, 2)
KEYS = [f"attention_{kind} 1x4(2)x40x12 causal" for kind in ("forward", "d_q", "d_kv")]


def attention(engine: VulkanEngine, seq: int = 40, head_dim: int = 12, keys: int | None = None, **mask: Any) -> Any:
    """o, lse and the three gradients of 4 heads over 2, in bits."""
    rng = np.random.default_rng(seq + head_dim)
    shapes = [
        (1, seq, 4, head_dim),
        (1, keys or seq, 2, head_dim),
        (1, keys or seq, 2, head_dim),
        (1, seq, 4, head_dim),
    ]
    q, k, v, d_o = (engine.tensor(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    mask = {name: engine.tensor(x) if isinstance(x, np.ndarray) else x for name, x in mask.items()}
    o, lse = engine.attention(q, k, v, **mask)
    return [t.numpy().view(np.uint32) for t in (o, lse, *engine.attention_backward(d_o, q, k, v, o, lse, **mask))]


def equal(one: Any, two: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def rows_of(engine: VulkanEngine, **call: Any) -> dict[str, int]:
    """Rows a lane of the kernels that attention launches, by fold."""
    names: list[str] = []
    engine.recorder.trace = names.append
    try:
        attention(engine, **call)
    finally:
        engine.recorder.trace = None
    rows = {}
    for name in filter(lambda name: name.startswith("attention_"), names):
        fold, _, rest = name.partition("_12_r")
        rows[fold] = int(rest.partition("_")[0])
    return rows


@pytest.mark.parametrize("name", MASKS)
def test_variants_have_equal_bits(vulkan: VulkanEngine, name: str) -> None:
    """Every tile of the family, forward and backward, whatever the mask."""
    device = BlockFoldChooser.of(vulkan.recorder).device
    names = [variant.name for variant in tile_variants(device, "attention_forward", 12)]
    assert len(names) >= 3 and names[-1] == "rows1"
    results = {}
    for variant in names:
        with forced_variant(variant, "attention"):
            results[variant] = attention(vulkan, **MASKS[name])
    for variant in names[1:]:
        assert equal(results[variant], results[names[0]]), f"{variant} differs from {names[0]}"


@pytest.mark.parametrize("head_dim", [1, 16, 24])
def test_variants_have_equal_bits_at_other_sizes(vulkan: VulkanEngine, head_dim: int) -> None:
    device = BlockFoldChooser.of(vulkan.recorder).device
    results = []
    for variant in tile_variants(device, "attention_forward", head_dim):
        with forced_variant(variant.name, "attention"):
            results.append(attention(vulkan, 37, head_dim))
    assert len(results) >= 2 and all(equal(results[0], other) for other in results[1:])


def test_family_is_a_function_of_kind_size_and_device() -> None:
    """Widest first, rows1 last; the accumulation order is one; no wider than registers hold; the
    tile that is taken unmeasured is in it and is compiled ahead of time."""
    for device in (LAVAPIPE, SWIFTSHADER, GPU):
        for head_dim in (*KNOWN_HEAD_DIMS, 1, 200, 256):
            family = tile_variants(device, "attention_d_q", head_dim)
            rows = [variant.tile.rows for variant in family]
            assert rows == sorted(rows, reverse=True) and rows[-1] == 1
            assert {variant.tile.spread for variant in family} == {min(device.subgroup_size, 8)}
            assert estimated_rows(device, head_dim, 1024)[0] in rows
    for device, kept, head_dim, rows in [
        (LAVAPIPE, 2, 64, (4, 2, 1)), (LAVAPIPE, 3, 64, (2, 1)), (LAVAPIPE, 4, 128, (1,)), (NEWER, 3, 64, (4, 2, 1)),
        (NEWER, 4, 64, (2, 1)), (NEWER, 4, 256, (1,)), (SWIFTSHADER, 2, 64, (4, 2, 1)), (GPU, 4, 128, (1,)),
    ]:  # fmt: skip
        assert family_rows(device, head_dim, kept) == rows
    wide = tile_variants(LAVAPIPE, "attention_d_q", 16)
    assert [v.name for v in worth_measuring(LAVAPIPE, wide, 10)] == ["rows2", "rows1"]  # 10 rows: half of 16, not of 32


def test_what_is_taken_unmeasured() -> None:
    """As wide as pays on CPU drivers if there are rows to fill it; one row a lane on GPUs."""
    assert [estimated_rows(LAVAPIPE, head_dim, 512)[0] for head_dim in (8, 16, 32, 64, 96, 128)] == [4, 4, 4, 2, 1, 1]
    assert [estimated_rows(LAVAPIPE, 64, rows)[0] for rows in (1, 8, 9)] == [1, 1, 2]
    assert [estimated_rows(SWIFTSHADER, head_dim, 512, kept=2)[0] for head_dim in (8, 16, 32, 64, 128)] == [
        1,
        1,
        4,
        4,
        2,
    ]
    assert estimated_rows(SWIFTSHADER, 128, 512)[0] == 1 and estimated_rows(NEWER, 64, 512, kept=2)[0] == 4
    assert estimated_rows(GPU, 16, 512)[0] == 1


def test_selection_obeys_its_table() -> None:
    """Nothing measured: the estimate. Measured: the fastest that is not barred. Switched off: the estimate."""
    table, call = TuningTable(), attention_calls(1, 4, 512, 16)[1]
    assert call.key == "attention_d_q 1x4x512x16 causal"
    first = select_for(LAVAPIPE, call, table)
    assert first.choice.name == "rows4" and "not measured" in first.why
    table.note_times(call.key, {"rows4": 3.0, "rows2": 1.0, "rows1": 2.0, "rows3": 0.1})
    assert select_for(LAVAPIPE, call, table).choice.name == "rows2"
    assert "measured 1e+03 ms, the least of 3" in select_for(LAVAPIPE, call, table).why
    assert select_for(LAVAPIPE, call, table, tuned=False) == first
    other = attention_calls(1, 4, 512, 16)[0]
    assert select_for(LAVAPIPE, other, table).choice.name == "rows4"  # another kernel, another key
    table.bar("attention_d_q_16_r2", "wrong")
    assert select_for(LAVAPIPE, call, table).choice.name == "rows1"
    table.bar("attention_d_q_16_r4", "wrong")
    assert select_for(LAVAPIPE, call, table, tuned=False).choice.name == "rows1"
    assert select_for(LAVAPIPE, other, table).choice.name == "rows4"  # nothing of forward is barred
    table.bar("attention_d_q_16_r1", "wrong")
    with pytest.raises(VkfoldError, match="every variant of attention_d_q 1x4x512x16 causal is barred"):
        select_for(LAVAPIPE, call, table)


def test_keys_tell_calls_apart(vulkan: VulkanEngine, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes and all that changes the work are in the key, and the log says what was chosen and why."""
    caplog.set_level("INFO", "vkfold")
    BlockFoldChooser.of(vulkan.recorder).plans.clear()
    for mask in MASKS.values():
        attention(vulkan, **mask)
    shown = {line.partition(": ")[0] for line in caplog.messages if line.startswith("attention_d_kv")}
    assert shown == {
        "attention_d_kv 1x4(2)x40x12 causal",
        "attention_d_kv 1x4(2)x40x12",
        "attention_d_kv 1x4(2)x40x12 causal window7",
        "attention_d_kv 1x4(2)x40x12 window5",
        "attention_d_kv 1x4(2)x40:53x12 causal",
        "attention_d_kv 1x4(2)x40:11x12 causal",
        "attention_d_kv 1x4(2)x40x12 causal key_lengths",
        "attention_d_kv 1x4(2)x40x12 documents",
        "attention_d_kv_alibi 1x4(2)x40x12 causal window11",
        next(key for key in shown if key.endswith("window9")),
    }
    assert any(line.startswith("attention_forward 1x4(2)x40x12 causal sinks: rows") for line in caplog.messages)
    assert all("(not measured: " in line for line in caplog.messages if line.startswith("attention"))


# -- forcing -----------------------------------------------------------------------------------------------------------
def test_forcing(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three kernels or one of them, by context or by VKFOLD_VARIANT, beside matmul's."""
    two = {f"attention_{kind}": 2 for kind in ("forward", "d_q", "d_kv")}
    chosen = rows_of(vulkan)
    assert 2 not in chosen.values()
    monkeypatch.setenv("VKFOLD_VARIANT", "attention=rows2, matmul=broadcast_8x4u2")
    assert rows_of(vulkan) == two
    monkeypatch.setenv("VKFOLD_VARIANT", "attention=rows2,attention_d_q=rows1")
    assert rows_of(vulkan) == {**two, "attention_d_q": 1}
    with forced_variant("rows1", "attention_d_kv"):
        assert rows_of(vulkan) == {"attention_forward": 2, "attention_d_q": 1, "attention_d_kv": 1}
    monkeypatch.delenv("VKFOLD_VARIANT")
    assert rows_of(vulkan) == chosen


def test_unknown_names_are_refused_before_anything_runs(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in {
        "attention=rows3": "no attention_forward variant 'rows3': there are rows4, rows2, rows1",
        "attention_d_kv=wide": "no attention_d_kv variant 'wide'",
        "block_fold=rows0": "no block_fold variant 'rows0'",
        "atention=rows2": "'atention' has no variants; these ops have: matmul, attention, attention_forward",
    }.items():
        monkeypatch.setenv("VKFOLD_VARIANT", text)
        with pytest.raises(BadInputError, match=message):
            VulkanEngine()
    with pytest.raises(BadInputError, match="'atention' has no variants"):
        attention(vulkan)


def test_every_op_that_can_be_forced_has_a_chooser() -> None:
    ops = [op for chooser in CHOOSERS for op in chooser.ops]
    assert sorted(ops) == sorted({op for named in OPS_WITH_VARIANTS.values() for op in named})
    assert forced_by_switch("attention=a,attention_d_q=b") == {
        "attention_forward": "a",
        "attention_d_q": "b",
        "attention_d_kv": "a",
    }
    assert op_of_fold("attention_d_q") == "attention_d_q" and op_of_fold("mine") == "block_fold"


# -- tuning ------------------------------------------------------------------------------------------------------------
def test_tuning_is_kept_used_and_changes_no_bit(
    untuned: VulkanEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured once; the next engine takes the fastest from the file, says why, and gives the same bits."""
    before, chosen = attention(untuned), rows_of(untuned)
    names = {"rows4", "rows2", "rows1"}
    for call, key in zip(CALLS, KEYS, strict=True):
        measured = tune_block_fold(untuned.recorder, call, rounds=2)
        assert measured.key == call.key == key and measured.seconds.keys() <= names  # not what is hopeless at first
        assert measured.seconds and all(seconds > 0 for seconds in measured.seconds.values())
    path = BlockFoldChooser.of(untuned.recorder).table.path
    assert path is not None
    data = json.loads(path.read_text())
    assert set(data["times"]) == set(KEYS)
    # Whatever was the fastest: let another tile than is taken unmeasured be it in one of the three kernels.
    data["times"] = {KEYS[1]: {"rows2": 1e-9, "rows1": 1.0}}
    path.write_text(json.dumps(data))
    monkeypatch.setenv("VKFOLD_LOG", "info")
    with VulkanEngine() as second:
        assert equal(attention(second), before)
        assert f"{KEYS[1]}: rows2 (measured 1e-06 ms, the least of 2)" in caplog.text
        assert rows_of(second) == {**chosen, "attention_d_q": 2} != chosen
        reasons = variant_reasons(second.recorder)
        (taken,) = (calls for kernel, calls in reasons.items() if kernel.startswith("attention_d_q"))
        assert taken == {KEYS[1]: "rows2, measured 1e-06 ms, the least of 2"}
        monkeypatch.setenv("VKFOLD_TUNE", "0")
        assert rows_of(second) == chosen
    path.write_text("{")
    monkeypatch.delenv("VKFOLD_TUNE")
    with VulkanEngine() as third:
        assert rows_of(third) == chosen and "is not used" in caplog.text


def test_every_input_a_fold_may_have_is_measured(untuned: VulkanEngine) -> None:
    """Key lengths, documents, sinks and head values are there when the call has them."""
    calls = {}
    plain = attention_calls(2, 4, 24, 8)
    for name in ("key_lengths", "documents"):
        calls[name] = [call._replace(given=(name,)) for call in plain]
    calls["sinks"] = [plain[0]._replace(given=("sinks",))]
    for name, several in calls.items():
        for call in several:
            assert tune_block_fold(untuned.recorder, call, rounds=1).seconds, (name, call.key)
            assert call.key.endswith(f"causal {name}")


# -- checks ------------------------------------------------------------------------------------------------------------
DAMAGES = {
    "attention_forward": (" b_total);", " 1.0000001 * b_total);"),
    "attention_d_q": (" < args.num_held) {", " < args.num_held + 1u) {"),
    "attention_d_kv": ("seen ? ", "seen && block != 2 ? "),
}


@pytest.fixture(params=DAMAGES)
def wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fold whose tile of two rows a lane is wrong: in a sum, in what it writes to, in the mask."""
    fold_name: str = request.param
    old, new = DAMAGES[fold_name]

    def faulty(fold: BlockFold, head_dim: int, tile: Tile, *, continues: bool = False, suffix: str = "") -> Kernel:
        kernel = block_fold_kernel(fold, head_dim, tile, continues=continues, suffix=suffix)
        if fold.name != fold_name or tile.rows != 2:
            return kernel
        return damaged(kernel, old, new)

    for module in (block_fold_dispatch, block_fold_check):
        monkeypatch.setattr(module, "kernel_of", faulty)
    return fold_name


def test_a_wrong_variant_is_barred_and_the_next_best_taken(
    untuned: VulkanEngine, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it computes anything anybody sees; for good; it cannot be forced, and other kernels are not barred."""
    with forced_variant("rows1", "attention"):
        expected = attention(untuned, 33, 8)
    chooser = BlockFoldChooser.of(untuned.recorder)
    call = next(call for call in attention_calls(1, 4, 33, 8, 2) if call.fold.name == wrong)
    chooser.table.note_times(call.key, {"rows2": 1.0, "rows4": 3.0, "rows1": 2.0})
    assert equal(attention(untuned, 33, 8), expected)
    barred = min(chooser.table.barred)
    assert set(chooser.table.barred) == {barred, *[f"{barred}_pairs"] * untuned.recorder.in_words}
    assert barred == f"{wrong}_8_{device_tile(chooser.device, 2).name}"
    assert f"block_fold variant {barred} is barred on this device" in caplog.text
    assert "words differ from rows1, the first at " in caplog.text
    assert chooser.choose(call).name == "rows1"
    assert "rows2" not in tune_block_fold(untuned.recorder, call, rounds=1).seconds
    with forced_variant("rows2", wrong), pytest.raises(VkfoldError, match="rows2 is forced and barred"):
        attention(untuned, 33, 8)
    with VulkanEngine() as second:
        assert BlockFoldChooser.of(second.recorder).choose(call).name != "rows2"
        assert equal(attention(second, 33, 8), expected)


def test_each_kernel_is_checked_once(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the life of the table, not of the process; the base variant is not compared with itself."""
    with forced_variant("rows2", "attention"):
        attention(untuned, 70, 8)
    with VulkanEngine() as second, forced_variant("rows2", "attention"):
        table = BlockFoldChooser.of(second.recorder).table
        assert len(table.checked) == 3 and not any("_r1" in name for name in table.checked)
        monkeypatch.setattr(table, "note_checked", lambda kernel: pytest.fail(f"{kernel} was checked again"))
        attention(second, 70, 8)
        attention(second, 90, 8, window=3)


def test_wrong_pairs_are_read_one_by_one(
    untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels that read two elements at a time are compared with the base variant that does not, rows1 too; where one
    is wrong its variant goes on without."""

    def faulty(fold: BlockFold, head_dim: int, tile: Tile, *, continues: bool = False, suffix: str = "") -> Kernel:
        kernel = block_fold_kernel(fold, head_dim, tile, continues=continues, suffix=suffix)
        old, new = DAMAGES["attention_forward"]
        if fold.name == "attention_forward" and tile.words:
            return damaged(kernel, old, new)
        return kernel

    with forced_variant("rows1", "attention"):
        expected = attention(untuned)
        table = BlockFoldChooser.of(untuned.recorder).table
        assert len(table.checked) == 3 * untuned.recorder.in_words and not table.barred
    table.checked.clear()
    BlockFoldChooser.of(untuned.recorder).plans.clear()
    for module in (block_fold_dispatch, block_fold_check):
        monkeypatch.setattr(module, "kernel_of", faulty)
    for rows in (1, 2):
        with forced_variant(f"rows{rows}", "attention"):
            assert equal(attention(untuned), expected)
    pairs = [f"attention_forward_12_r{rows}_pairs" for rows in (1, 2)]
    assert sorted(table.barred) == (pairs if untuned.recorder.in_words else [])
    assert ("is barred" in caplog.text) == untuned.recorder.in_words


def test_kernels_that_go_on_are_checked(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the heads of a group take several dispatches, both kernels are compared."""
    monkeypatch.setattr(block_fold_dispatch, "MAX_ROUNDS", 1)
    with forced_variant("rows2", "attention_d_kv"):
        attention(untuned)
    names = [name for name in BlockFoldChooser.of(untuned.recorder).table.checked if name.startswith("attention_d_kv")]
    assert len(names) == 2 and sum("_more_" in name for name in names) == 1
