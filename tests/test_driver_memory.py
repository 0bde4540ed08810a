"""What the driver or the operating system counts, beside what the pools say; and the reference step's command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vkfold.engine import vulkan_describe, vulkan_device
from vkfold.engine.compute_engine import MEMORY_BUDGET, PROCESS
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.host_memory import process_bytes
from vkfold.engine.physical_device import MemoryHeap
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.vulkan_engine import VulkanEngine

MIB = 2**20


def test_process_memory_is_that_of_this_process() -> None:
    before = process_bytes()
    assert before is not None and 10 * MIB < before < 2**40
    array = np.ones(64 * MIB, np.uint8)
    grown = process_bytes()
    assert grown is not None and 60 * MIB <= grown - before <= 80 * MIB
    del array


def test_the_count_grows_by_the_bytes_that_were_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a software driver device memory is process memory, page by page as it is first written."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    with VulkanEngine() as engine:
        if not engine.device.is_cpu:
            pytest.skip("device memory of a GPU is no process memory")
        engine.zeros((1000,))
        engine.end_batch()
        counts = []
        tensors = []
        for _ in range(4):
            tensors.append(engine.zeros((16 * MIB,)))  # 64 MiB, a block of its own
            engine.end_batch()
            told = engine.driver_memory()
            assert told is not None and told.source == PROCESS
            counts.append((told.used_bytes, engine.pool_stats()["step"].live_bytes))
        driver, pool = (last - first for first, last in zip(counts[0], counts[-1], strict=True))
        assert pool == 3 * 64 * MIB
        assert pool <= driver + MIB <= 1.1 * pool + 16 * MIB
        del tensors
        engine.release_idle_pool_blocks()
        engine.end_batch()
        told = engine.driver_memory()
        assert told is not None and counts[-1][0] - told.used_bytes >= 0.9 * counts[-1][1]


def test_the_extension_is_asked_on_a_gpu(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = (MemoryHeap(2**33, 2**32, True, 111), MemoryHeap(2**34, 2**33, False, 1000), MemoryHeap(1, 1, True, 222))
    monkeypatch.setattr(vulkan_device, "heap_budgets", lambda handle: heaps)
    monkeypatch.setattr(vulkan.device, "is_cpu", False)
    monkeypatch.setattr(vulkan.device, "extensions", [])
    assert vulkan.device.memory_used() is None
    monkeypatch.setattr(vulkan.device, "extensions", ["VK_EXT_memory_budget"])
    assert vulkan.driver_memory() == (MEMORY_BUDGET, 333)


def test_the_extension_where_the_driver_has_it(vulkan: VulkanEngine) -> None:
    if MEMORY_BUDGET not in vulkan.device.extensions:
        pytest.skip("this driver has no VK_EXT_memory_budget")
    for heap in vulkan_describe.heap_budgets(vulkan.device.physical.handle):
        assert 0 < heap.used_bytes < heap.size_bytes


def test_other_engines_tell_too() -> None:
    for engine in (CpuEngine(), PlanEngine()):
        told = engine.driver_memory()
        assert told is not None and told.source == PROCESS and told.used_bytes > 10 * MIB


# -- the reference step ----------------------------------------------------------------------------------------------
PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks" / "reference_step.py"
SMALL = ["--num-layers", "2", "--d-model", "64", "--d-ff", "96", "--num-heads", "4", "--seq-len", "24"]
SMALL += ["--batch-size", "2", "--vocab-size", "301"]


def reference_step(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *SMALL, *options], capture_output=True, text=True)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--activation-offload", "--recompute", "mlp,qkv"],
        ["--checkpoint-every", "1", "--optimizer", "adafactor", "--fused-update", "--max-norm", "0"],
    ],
)
def test_a_small_reference_step_is_as_planned(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    done = reference_step("--json", *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["differ"] == []
    assert told["measured"]["peak_bytes"] == told["planned"]["peak_bytes"] > 0
    assert told["measured"]["allocated_bytes"] == told["planned"]["peak_reserved_bytes"]
    assert told["measured"]["loss"] == pytest.approx(np.log(301), rel=0.1)
    assert 2**22 <= told["measured"]["staging_bytes"] <= 5 * 2**22  # 4 MiB each, 4 at most are kept
    assert set(told["measured"]["driver_bytes"]) == {"forward", "backward", "optimizer"}


def test_a_step_that_does_not_fit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    done = reference_step("--d-model", "8192", "--d-ff", "65536", "--num-layers", "60", "--num-heads", "64")
    assert done.returncode == 2
    assert "the step needs" in done.stderr and "a smaller --batch-size" in done.stderr
