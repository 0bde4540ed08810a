"""Tensors in host memory: values, identity, what is freed when, and the books of every engine."""

from __future__ import annotations

import numpy as np
import pytest

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.vulkan_engine import VulkanEngine


@pytest.fixture(params=["vulkan", "cpu", "plan"])
def engine(request: pytest.FixtureRequest) -> ComputeEngine:
    if request.param == "vulkan":
        return request.getfixturevalue("vulkan")
    return CpuEngine() if request.param == "cpu" else PlanEngine()


def live(engine: ComputeEngine, pool: str) -> int:
    stats = engine.pool_stats()
    name = "direct" if pool == "step" and "direct" in stats else pool
    return stats[name].live_bytes if name in stats else 0


@pytest.mark.parametrize("shape", [(1,), (3, 5), (257,), (64, 1000), (0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_values_come_back(vulkan: VulkanEngine, cpu: CpuEngine, shape: tuple[int, ...], dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 100, shape).astype(np.float32 if dtype == "float32" else np.int32)
    for engine in (vulkan, cpu):
        tensor = engine.tensor(values)
        if dtype == "bfloat16":
            tensor = engine.cast(engine.tensor(values.astype(np.float32)), dtype)
        expected = tensor.numpy()
        copy = engine.offload(tensor)
        engine.zero_(tensor)  # the copy took place before this
        del tensor
        back = engine.restore(copy)
        assert (back.shape, back.dtype) == (shape, dtype)
        assert np.array_equal(back.numpy(), expected)


def test_views_are_copied_from_their_offset(vulkan: VulkanEngine) -> None:
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    copy = vulkan.offload(vulkan.tensor(values).rows(2, 5))
    assert np.array_equal(vulkan.restore(copy).numpy(), values[2:5])


def test_bytes_move_from_device_to_host_and_back(engine: ComputeEngine) -> None:
    before = {pool: live(engine, pool) for pool in ("step", "host")}
    copied = engine.offloaded_bytes, engine.restored_bytes
    tensor = engine.zeros((1000, 64))
    nbytes, on_device = tensor.nbytes, live(engine, "step") - before["step"]
    assert on_device == nbytes + 2 * getattr(engine, "guard_bytes", 0)  # VKFOLD_DEBUG=2 puts guards around it
    copy = engine.offload(tensor)
    del tensor
    assert (live(engine, "step"), live(engine, "host")) == (before["step"], before["host"] + nbytes)
    first = engine.restore(copy)
    assert engine.restore(copy) is first  # restoring twice copies once
    assert (engine.offloaded_bytes - copied[0], engine.restored_bytes - copied[1]) == (nbytes, nbytes)
    del copy
    assert (live(engine, "step"), live(engine, "host")) == (before["step"] + on_device, before["host"])
    engine.release_idle_pool_blocks()
    assert np.array_equal(first.numpy(), np.zeros((1000, 64)))


def test_restored_again_after_it_died(vulkan: VulkanEngine) -> None:
    copy = vulkan.offload(vulkan.tensor(np.arange(7.0)))
    for _ in range(2):
        assert np.array_equal(vulkan.restore(copy).numpy(), np.arange(7.0))


def test_freed_host_memory_is_reused_in_order(vulkan: VulkanEngine) -> None:
    """A range given up while its copy back is only recorded may be written by the next offload."""
    a, b = (vulkan.tensor(np.full((5000,), value)) for value in (1.0, 2.0))
    copy = vulkan.offload(a)
    restored = vulkan.restore(copy)
    del copy, a
    other = vulkan.offload(b)
    del b
    assert np.array_equal(restored.numpy(), np.full(5000, 1.0))
    assert np.array_equal(vulkan.restore(other).numpy(), np.full(5000, 2.0))


def test_host_blocks_go_back() -> None:
    with VulkanEngine() as engine:  # of its own: one that has trained keeps the blocks of its last step
        copy = engine.offload(engine.zeros((1000,)))
        assert engine.pool_stats()["host"].blocks > 0
        del copy
        engine.release_idle_pool_blocks()
        assert engine.pool_stats()["host"].blocks == 0


def test_a_host_that_is_full_names_its_pool() -> None:
    with VulkanEngine() as engine:
        engine.host_pool.source.budget_bytes = 2**20
        tensor = engine.empty((2**20,))
        with pytest.raises(MemoryError, match="'host'"):
            engine.offload(tensor)
        engine.offload(tensor.rows(0, 2**10))


def test_what_cannot_be_moved_is_named(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    mine, other = vulkan.tensor(np.arange(5.0)), cpu.tensor(np.arange(5.0))
    with pytest.raises(ValueError, match="offload: the tensor lives on another engine, cpu"):
        vulkan.offload(other)
    with pytest.raises(TypeError, match=r"offload: the argument is a NumPy array of shape \(5,\)"):
        vulkan.offload(np.arange(5.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="restore: the copy was made by another engine, cpu"):
        vulkan.restore(cpu.offload(other))
    with pytest.raises(ValueError, match="restore: the copy was made by another engine"):
        PlanEngine().restore(vulkan.offload(mine))
    for wrong in (mine, None, 3):
        with pytest.raises(TypeError, match=r"restore: .*, where what engine\.offload\(tensor\) returned is needed"):
            vulkan.restore(wrong)  # type: ignore[arg-type]


def test_a_closed_engine_moves_nothing() -> None:
    with VulkanEngine() as engine:
        tensor = engine.tensor(np.arange(5.0))
        copy = engine.offload(tensor)
    for use in (lambda: engine.offload(tensor), lambda: engine.restore(copy)):
        with pytest.raises(RuntimeError, match="is closed"):
            use()
