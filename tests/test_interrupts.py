"""Ctrl-C while the device is at work: what it still uses is not destroyed, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkfold.engine.batch import Batch
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import variants
from vkfold.engine.ops.attention import attention_calls
from vkfold.engine.ops.block_fold_tuner import tune_block_fold
from vkfold.engine.ops.matmul import layout_of
from vkfold.engine.ops.matmul_check import checked
from vkfold.engine.ops.matmul_tuner import tune_product
from vkfold.engine.profiler import OpProfiler
from vkfold.engine.recorder import Recorder
from vkfold.engine.tensor import TensorSpec
from vkfold.engine.vulkan_api import Device, Fence, QueryPool
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools.device_peaks import measure_peaks

LONG = 20000  # rounds of fma_chain on LONG_SIZE values, or rows of a product: the device is at work for a while
LONG_SIZE = 2**15


class Interrupter:
    """Interrupts the wait number `at` (from 1) instead of waiting, and notes what is destroyed at work."""

    def __init__(self) -> None:
        self.at = 0
        self.waits = 0
        self.running: list[Fence] = []
        self.wrong: list[str] = []
        self.reclaiming = False  # what goes then retired with a batch that has finished, whatever runs after it

    def check(self, what: str) -> None:
        if not self.reclaiming and any(not fence.is_signaled() for fence in self.running):
            self.wrong.append(what)


@pytest.fixture
def interrupter(monkeypatch: pytest.MonkeyPatch) -> Interrupter:
    noted = Interrupter()
    wait, reset, submit = Fence.wait, Fence.reset, Device.submit
    destroy_buffer, destroy_pool, reclaim = Device.destroy_buffer, QueryPool.destroy, Recorder._reclaim

    def waits(fence: Fence, timeout: float | None = None) -> bool:
        noted.waits += 1
        if noted.waits == noted.at:
            raise KeyboardInterrupt
        return wait(fence, timeout)

    def submits(device: Device, commands: Any, fence: Fence, sent: list[int] | None = None) -> None:
        noted.running.append(fence)
        submit(device, commands, fence, sent)

    def resets(fence: Fence) -> None:
        noted.running.remove(fence)
        reset(fence)

    def destroys_buffer(device: Device, buffer: Any) -> None:
        noted.check("a buffer")
        destroy_buffer(device, buffer)

    def destroys_pool(pool: QueryPool) -> None:
        noted.check("a query pool")
        destroy_pool(pool)

    def reclaims(recorder: Recorder, batch: Batch) -> None:
        assert batch.fence.is_signaled()
        noted.reclaiming = True
        reclaim(recorder, batch)
        noted.reclaiming = False

    monkeypatch.setattr(Recorder, "_reclaim", reclaims)
    monkeypatch.setattr(Fence, "wait", waits)
    monkeypatch.setattr(Fence, "reset", resets)
    monkeypatch.setattr(Device, "submit", submits)
    monkeypatch.setattr(Device, "destroy_buffer", destroys_buffer)
    monkeypatch.setattr(QueryPool, "destroy", destroys_pool)
    return noted


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, interrupter: Interrupter) -> Iterator[VulkanEngine]:
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    engine = VulkanEngine()
    yield engine
    engine.close()
    assert interrupter.wrong == []


def tuning(engine: VulkanEngine) -> None:
    layout = layout_of(TensorSpec((700, 700)), TensorSpec((700, 700)), False, False)
    tune_product(engine.recorder, layout, "NN", rounds=1)


def checking(engine: VulkanEngine) -> None:
    chooser = MatmulChooser.of(engine.recorder)
    checked(engine.recorder, chooser, variants(chooser.device)[0], False)


def tuning_attention(engine: VulkanEngine) -> None:
    forward, *_ = attention_calls(1, 2, 512, 32)
    tune_block_fold(engine.recorder, forward, rounds=1)


def probing(engine: VulkanEngine) -> None:
    measure_peaks(engine, megabytes=2, matmul_sizes=(512,))


def profiling(engine: VulkanEngine) -> None:
    profiler = OpProfiler(engine)
    profiler.attach()
    try:
        engine.fma_chain(engine.tensor(np.ones(LONG_SIZE)), rounds=LONG)
        profiler.take()
    finally:
        profiler.detach()


def reading(engine: VulkanEngine) -> None:
    engine.fma_chain(engine.tensor(np.ones(LONG_SIZE)), rounds=LONG).numpy()


@pytest.mark.parametrize("work", [tuning, tuning_attention, checking, probing, profiling, reading])
def test_nothing_in_use_is_destroyed(
    fresh: VulkanEngine, interrupter: Interrupter, work: Callable[[VulkanEngine], None]
) -> None:
    """Whichever of the first waits is interrupted; the engine then computes as before."""
    values = np.arange(8.0, dtype=np.float32)
    for at in (1, 2, 3, 5, 8):
        interrupter.waits, interrupter.at = 0, at
        try:
            work(fresh)
        except KeyboardInterrupt:
            pass
        else:
            assert interrupter.waits < at  # all of it is done with fewer
        interrupter.at = 0
        assert interrupter.wrong == []
        np.testing.assert_array_equal(fresh.scale(fresh.tensor(values), 2.0).numpy(), 2 * values)
        assert fresh.profiler is None


def test_staging_of_an_interrupted_read_is_not_written_meanwhile(fresh: VulkanEngine, interrupter: Interrupter) -> None:
    """The copy into it may still come: an upload must not be staged there."""
    slow = fresh.fma_chain(fresh.tensor(np.ones(LONG_SIZE)), rounds=LONG)
    interrupter.waits, interrupter.at = 0, 1
    with pytest.raises(KeyboardInterrupt):
        slow.numpy()
    values = np.arange(float(LONG_SIZE), dtype=np.float32)
    uploaded = fresh.tensor(values)
    np.testing.assert_array_equal(uploaded.numpy(), values)
