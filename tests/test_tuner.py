"""Tuning: measured, kept by device and kernels, used by the choice, no change of bits; wrong variants are barred."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from vkfold.engine.capabilities import Capabilities
from vkfold.engine.errors import VkfoldError
from vkfold.engine.kernel import Kernel, read_shader
from vkfold.engine.matmul_choice import MatmulChooser, select_for, tuning_key
from vkfold.engine.matmul_variants import Choice, Product, Variant, candidates, least_estimate
from vkfold.engine.ops import matmul_launch
from vkfold.engine.ops.matmul import layout_of
from vkfold.engine.ops.matmul_launch import Pairs, matmul_kernel
from vkfold.engine.ops.matmul_parts import USUAL, Parts
from vkfold.engine.ops.matmul_tuner import tune_product
from vkfold.engine.tensor import TensorSpec
from vkfold.engine.tuner import Timer
from vkfold.engine.variant_cache import TuningTable
from vkfold.engine.variant_choice import forced_variant, hash_of_files
from vkfold.engine.vulkan_engine import VulkanEngine

OLD = Capabilities(8, True, "llvmpipe", 22, 4)
PRODUCT = Product(1, 40, 48, 64)
LAYOUT = layout_of(TensorSpec((40, 64)), TensorSpec((64, 48)), False, False)
KEY = tuning_key(PRODUCT, "NN")


def product(engine: VulkanEngine) -> np.ndarray:
    """One product of PRODUCT's shape."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((40, 64)).astype(np.float32), rng.standard_normal((64, 48)).astype(np.float32)
    return (engine.tensor(a) @ engine.tensor(b)).numpy()


def test_selection_is_a_pure_function_of_its_table() -> None:
    """Nothing measured: the least estimate. Measured: the fastest that is not barred. Switched off: the estimate."""
    table = TuningTable()
    first = select_for(OLD, PRODUCT, KEY, table)
    assert first.choice == least_estimate(OLD, PRODUCT) and "estimate" in first.why
    others = [choice for choice in candidates(OLD, PRODUCT) if choice != first.choice]
    table.note_times(KEY, {others[0].name: 1.0, others[1].name: 0.5, first.choice.name: 2.0, "no_such_variant": 0.1})
    assert select_for(OLD, PRODUCT, KEY, table).choice == others[1]
    assert "measured 500 ms, the least of 3" in select_for(OLD, PRODUCT, KEY, table).why
    assert select_for(OLD, PRODUCT, KEY, table, tuned=False) == first
    assert select_for(OLD, PRODUCT, tuning_key(PRODUCT, "NT"), table) == first
    table.bar(others[1].variant.name, "wrong")
    assert select_for(OLD, PRODUCT, KEY, table).choice.variant != others[1].variant
    for choice in candidates(OLD, PRODUCT):
        table.bar(choice.variant.name, "wrong")
    with pytest.raises(VkfoldError, match="every variant of matmul 1x40x48x64 NN is barred"):
        select_for(OLD, PRODUCT, KEY, table)


def test_table_survives_and_bad_files_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was noted is read back; damaged, foreign and oddly shaped files are empty, with a warning."""
    path, about = tmp_path / "deep" / "table.json", {"device": "one"}
    table = TuningTable(path, about)
    table.note_checked("kernel")
    table.bar("tile", "reason")
    table.note_times(KEY, {"tile": 0.25})
    again = TuningTable(path, about)
    assert (again.checked, again.barred, again.times) == ({"kernel"}, {"tile": "reason"}, {KEY: {"tile": 0.25}})
    good = path.read_text()
    broken = [good[:-20], "", "[]", '{"format": 1}', good.replace("0.25", '"fast"'), good.replace('"one"', '"two"')]
    for text in broken:
        path.write_text(text)
        caplog.clear()
        empty = TuningTable(path, about)
        assert not (empty.checked or empty.barred or empty.times), text
        assert "is not used" in caplog.text, text
    empty.note_checked("kernel")
    assert TuningTable(path, about).checked == {"kernel"}


@pytest.mark.parametrize("seconds", ["NaN", "-1.0", "0.0", "Infinity", "-0.0"])
def test_impossible_times_are_not_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: str) -> None:
    """The others in the file are; a product with no other has none."""
    path = tmp_path / "table.json"
    TuningTable(path).note_times(KEY, {"fast": 0.5, "slow": 0.25})
    TuningTable(path).note_times("another", {"slow": 0.25})
    path.write_text(path.read_text().replace("0.25", seconds))
    table = TuningTable(path)
    assert table.times == {KEY: {"fast": 0.5}}
    assert f"times of {KEY} are not believed" in caplog.text
    table.note_checked("kernel")
    assert seconds not in path.read_text()


def test_two_at_the_same_moment_lose_nothing(tmp_path: Path) -> None:
    """Each loads, changes and saves while the other waits."""
    path = tmp_path / "table.json"

    def note(first: int) -> None:
        table = TuningTable(path)
        for i in range(first, 40, 2):
            table.note_times(str(i), {"tile": 1.0})

    threads = [threading.Thread(target=note, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(TuningTable(path).times) == {str(i) for i in range(40)}


def test_key_holds_device_driver_and_kernels(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another driver, another device, other kernels: another file."""
    physical = untuned.device.physical
    path = TuningTable.of_device(physical, "matmul", "hash").path
    for other in (
        TuningTable.of_device(physical, "matmul", "other"),
        TuningTable.of_device(physical, "attention", "hash"),
        TuningTable.of_device(dataclasses.replace(physical, uuid="1" * 32), "matmul", "hash"),
        TuningTable.of_device(dataclasses.replace(physical, driver_version=77), "matmul", "hash"),
        TuningTable.of_device(dataclasses.replace(physical, driver_info="Mesa 99"), "matmul", "hash"),
    ):
        assert other.path != path
    assert TuningTable.of_device(physical, "matmul", "hash").path == path


def test_tuning_is_kept_used_and_changes_no_bit(
    untuned: VulkanEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured once; the next engine takes the fastest from the file, says why, and gives the same bits."""
    before = product(untuned)
    measured = tune_product(untuned.recorder, LAYOUT, "NN", rounds=2)
    assert measured.key == KEY and len(measured.seconds) > 1 and all(t > 0 for t in measured.seconds.values())
    assert np.array_equal(product(untuned).view(np.uint32), before.view(np.uint32))
    path = MatmulChooser.of(untuned.recorder).table.path
    assert path is not None and json.loads(path.read_text())["times"][KEY] == measured.seconds
    # Whatever was the fastest: let the slowest be it, so that the table and not the estimate must have decided.
    slowest = max(measured.seconds, key=lambda name: measured.seconds[name])
    data = json.loads(path.read_text())
    data["times"][KEY][slowest] = 1e-9
    path.write_text(json.dumps(data))
    monkeypatch.setenv("VKFOLD_LOG", "info")
    with VulkanEngine() as second:
        assert np.array_equal(product(second).view(np.uint32), before.view(np.uint32))
        assert f"{KEY}: {slowest} (measured 1e-06 ms" in caplog.text
        caplog.clear()
        monkeypatch.setenv("VKFOLD_TUNE", "0")
        product(second)
        assert f"{KEY}: {least_estimate(MatmulChooser.of(second.recorder).device, PRODUCT).name} (least" in caplog.text


def test_host_clock_where_there_are_no_timestamps(untuned: VulkanEngine) -> None:
    """Both clocks see the same work, the host's with the submit on top."""
    aside = untuned.recorder.aside()
    buffer = untuned.device.create_buffer(2**22, host_visible=False)
    try:
        for timer in (Timer(aside), Timer(aside, no_timestamps=True)):
            seconds = [timer.seconds(lambda: aside.fill_buffer(buffer, 0, 2**22, 1)) for _ in range(3)]
            assert all(0 < second < 5 for second in seconds)
            timer.close()
    finally:
        aside.close()
        untuned.device.destroy_buffer(buffer)


@pytest.fixture
def wrong(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> Choice:
    """The choice for PRODUCT, whose kernel now leaves out the last value of k."""
    choice = MatmulChooser.of(untuned.recorder).choose(PRODUCT)

    def damaged(
        variant: Variant,
        subgroup_size: int,
        resumes: bool = False,
        pairs: Pairs = matmul_launch.PLAIN,
        parts: Parts = USUAL,
    ) -> Kernel:
        kernel = matmul_kernel(variant, subgroup_size, resumes, pairs, parts)
        if variant != choice.variant:
            return kernel
        text = kernel.glsl.partition("#line 1\n")[2].replace("k_end = args.k;", "k_end = args.k - 1u;")
        assert "args.k - 1u" in text and read_shader("matmul.comp") not in text
        args = matmul_launch._ARGS
        return Kernel(kernel.name, text, args, subgroups=kernel.subgroups, defines=kernel.defines)

    monkeypatch.setattr(matmul_launch, "matmul_kernel", damaged)
    return choice


def test_a_wrong_variant_is_barred_and_reported(
    untuned: VulkanEngine, wrong: Choice, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it computes anything anybody sees; for good; and it cannot be forced."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((40, 64)), rng.standard_normal((64, 48))
    result = product(untuned)
    np.testing.assert_allclose(result, a.astype(np.float32) @ b.astype(np.float32), rtol=1e-4, atol=1e-4)
    name = wrong.variant.name
    assert f"matmul variant {name} is barred on this device" in caplog.text and "elements differ" in caplog.text
    chooser = MatmulChooser.of(untuned.recorder)
    assert name in chooser.table.barred
    assert chooser.choose(PRODUCT).variant != wrong.variant
    assert name not in tune_product(untuned.recorder, LAYOUT, "NN", rounds=1).seconds
    with forced_variant(name), pytest.raises(VkfoldError, match=f"{name} is forced and barred"):
        product(untuned)
    with VulkanEngine() as second:
        assert MatmulChooser.of(second.recorder).choose(PRODUCT).variant != wrong.variant


def test_a_forced_wrong_variant_is_refused(untuned: VulkanEngine, wrong: Choice) -> None:
    """Forcing one that was never checked checks it first."""
    with forced_variant(wrong.name), pytest.raises(VkfoldError, match="is forced and barred"):
        product(untuned)


def test_each_kernel_is_checked_once(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the life of the table, not of the process."""
    product(untuned)
    with VulkanEngine() as second:
        table = MatmulChooser.of(second.recorder).table
        assert table.checked
        monkeypatch.setattr(table, "note_checked", lambda kernel: pytest.fail(f"{kernel} was checked again"))
        product(second)


def test_hash_of_the_kernels_is_of_their_files() -> None:
    """Two calls, one name; other files, another."""
    assert MatmulChooser.kernel_hash() == MatmulChooser.kernel_hash()
    hashes = {hash_of_files(names) for names in ((), ("matmul.comp",), ("ops/matmul_launch.py",))}
    assert len(hashes) == 3 and {len(text) for text in hashes} == {12}


def test_programs_add_to_one_table(tmp_path: Path) -> None:
    """What another one noted since the file was read is kept; of two times the later counts."""
    path, about = tmp_path / "table.json", {"device": "one"}
    one, two = TuningTable(path, about), TuningTable(path, about)
    one.note_times(KEY, {"tile": 0.25})
    two.note_checked("kernel")
    two.bar("other", "reason")
    one.note_times("another", {"tile": 1.0})
    one.note_times(KEY, {"tile": 0.5})
    both = TuningTable(path, about)
    assert both.times == {KEY: {"tile": 0.5}, "another": {"tile": 1.0}}
    assert (both.checked, both.barred) == ({"kernel"}, {"other": "reason"})
