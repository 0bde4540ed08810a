"""Captured steps: what ends or forbids them, what they hold, and what Python does in a replayed step."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from replay_checks import CONFIG, Run, data

from vkfold.engine.allocation_ledger import AllocationLedger
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, AdamW, GPTModel, TrainingStep, step_replay


@pytest.fixture
def fresh() -> Iterator[VulkanEngine]:
    """An engine of the test's own, for counts and blocks."""
    with VulkanEngine() as engine:
        yield engine


def test_changes_are_seen(vulkan: VulkanEngine) -> None:
    """Whatever decides which ops a step records ends replay until it is as before, or captured anew."""
    run = Run(vulkan)
    run.steps(4)
    stats = vulkan.replay_stats()

    def replays() -> bool:
        before = stats.replayed
        run.step()
        return stats.replayed > before

    assert replays()
    model, block = run.model, run.model.blocks[0]
    for change, undo in (
        (lambda: setattr(block, "dropout", 0.2), lambda: setattr(block, "dropout", 0.1)),
        (lambda: setattr(run.optimizer, "eps", 1e-6), lambda: setattr(run.optimizer, "eps", 1e-8)),
        (lambda: setattr(run.training_step, "max_norm", 1.0), lambda: setattr(run.training_step, "max_norm", 0.0)),
        (lambda: model.set_flush_interval(1), lambda: model.set_flush_interval(0)),
    ):
        change()
        assert not replays()
        undo()
        assert replays()
    model.blocks.reverse()
    assert not replays()
    model.blocks.reverse()
    run.steps(2)
    assert replays()
    weight = model.named_parameters()["final_norm.weight"]
    held = weight.data
    with vulkan.parameter_pool():
        weight.data = vulkan.tensor(np.ones(held.shape))
    assert not replays()
    weight.data = held
    assert replays()
    frozen, values = run.optimizer.parameters.pop("final_norm.weight"), held.numpy()
    assert not replays()
    assert np.array_equal(frozen.data.numpy(), values)
    run.optimizer.parameters = model.named_parameters()
    run.steps(2)
    assert replays()
    run.training_step.optimizer = SGD(model)
    assert not replays()
    run.training_step.optimizer = run.optimizer
    run.steps(2)
    assert replays()
    with vulkan.parameter_pool():
        run.step()
    assert stats.not_captured["the step runs inside parameter_pool()"]
    ledger = AllocationLedger(vulkan)
    ledger.attach()
    assert not replays()
    assert ledger.ops
    ledger.detach()
    assert replays()


class Counting(GPTModel):
    """A model of the user's own: nothing is known of what it records."""

    calls = 0

    def backward(self, dy: Any = None) -> None:
        type(self).calls += 1
        super().backward(dy)


class Declared(Counting):
    replay_supported = True


def test_only_known_classes_are_replayed(vulkan: VulkanEngine) -> None:
    for cls, replayed in ((Counting, 0), (Declared, 4)):
        model = cls(vulkan, CONFIG, seed=1)
        step = TrainingStep(model, AdamW(model))
        before, cls.calls = vulkan.replay_stats().replayed, 0
        for n in range(6):
            step([data(n)], step=n, learning_rate=1e-3)
        assert vulkan.replay_stats().replayed - before == replayed
        assert cls.calls == 6 - replayed
    model = GPTModel(vulkan, CONFIG, seed=1)
    step = TrainingStep(model, AdamW(model), keep_gradients=True)
    before = vulkan.replay_stats().replayed
    for n in range(4):
        step([data(n)], step=n, learning_rate=1e-3)
        assert all(p.grad is not None for p in model.parameters())
    assert vulkan.replay_stats().replayed == before


def test_released_blocks_drop_captures(fresh: VulkanEngine) -> None:
    run = Run(fresh)
    run.steps(4)
    stats = fresh.replay_stats()
    assert (stats.recorded, stats.captured, stats.replayed) == (2, 1, 2)
    fresh.set_retain_free_bytes(0)
    assert fresh.release_idle_pool_blocks() > 0
    assert stats.dropped == {"a block it uses was released": 1}
    run.steps(1)
    assert stats.recorded == 3
    fresh.set_retain_free_bytes(None)
    run.steps(3)
    assert (stats.recorded, stats.captured, stats.replayed) == (4, 2, 4)
    expected = Run(fresh)
    fresh.replayer.obstacle = "comparison"
    expected.steps(8)
    fresh.replayer.obstacle = ""
    assert expected.results == run.results


def test_nothing_leaks(fresh: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures own bounded host memory and give it back; blocks in use are those of recorded steps."""
    monkeypatch.setattr(step_replay, "MAX_CAPTURES", 4)
    for _ in range(2):
        run = Run(fresh)
        for n in range(24):
            run.step(data(n, seq=1 + n // 3))
        buffers = fresh.device.num_buffers
        for n in range(24):
            run.step(data(n, seq=1 + n // 3))
        assert fresh.device.num_buffers == buffers
        assert len(run.training_step._replay._captured) == 4  # type: ignore[union-attr]
        del run
    gc.collect()
    fresh.end_batch()
    fresh.set_retain_free_bytes(0)
    fresh.release_idle_pool_blocks()
    fresh.end_batch()
    assert sum(stats.live_bytes for stats in fresh.pool_stats().values()) == 0
    assert sum(stats.allocated_bytes for stats in fresh.pool_stats().values()) == 0
    assert not fresh.replayer._captures


def test_no_tensor_is_held(vulkan: VulkanEngine) -> None:
    """The watch and the captures keep no tensor alive, with the garbage collector off."""
    before = sum(stats.live_bytes for stats in vulkan.pool_stats().values())
    gc.disable()
    try:
        run = Run(vulkan)
        run.steps(5)
        del run
        assert sum(stats.live_bytes for stats in vulkan.pool_stats().values()) == before
    finally:
        gc.enable()


def test_closing_with_captures() -> None:
    engine = VulkanEngine()
    run = Run(engine)
    run.steps(4)
    assert engine.replay_stats().replayed == 2
    engine.close()
    assert engine.replay_stats().dropped == {"the engine was closed": 1}
    with pytest.raises(RuntimeError, match="closed"):
        run.step()


def test_no_python_for_any_op(vulkan: VulkanEngine) -> None:
    """A replayed step makes as many Python calls for many layers as for one, and only some hundred."""

    def calls(num_layers: int) -> int:
        run = Run(vulkan, replace(CONFIG, num_layers=num_layers), max_norm=1.0)
        run.steps(3)
        count = 0

        def heard(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(heard)
        try:
            result = run.step()
        finally:
            sys.setprofile(None)
        assert result.replayed
        return count

    few, many = calls(1), calls(6)
    assert abs(few - many) <= 5  # a wait may look at the fence once more
    assert few < 500


def test_blocks_released_in_a_step(fresh: VulkanEngine) -> None:
    """A step that gives blocks back midway is never captured: its stream may name memory that is gone."""

    def release(phase: str, micro_batch: int, stats: Any) -> None:
        held = fresh.empty((16 * 2**20,))
        del held
        fresh.pools["step"].release_idle_blocks(keep_retained=False)

    run = Run(fresh, on_pools=release)
    run.steps(5)
    stats = fresh.replay_stats()
    assert (stats.captured, stats.recorded) == (0, 5)
    assert stats.not_captured["blocks went back to the driver during the step"] == 5


def test_pool_statistics(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase samples, peaks and counts are those of recorded steps."""
    seen: dict[str, list[Any]] = {}
    offloaded = {}
    for switch in ("0", "1"):
        monkeypatch.setenv("VKFOLD_REPLAY", switch)
        samples: list[Any] = []
        run = Run(vulkan, on_pools=lambda *sample, to=samples: to.append(sample), max_norm=1.0)
        run.model.set_activation_offload(True)
        copied = vulkan.offloaded_bytes, vulkan.restored_bytes
        for n in range(6):
            vulkan.reset_peak()
            run.step(data(n), data(n + 1))
            samples.append(("step", n, vulkan.pool_stats()))
        offloaded[switch] = vulkan.offloaded_bytes - copied[0], vulkan.restored_bytes - copied[1]
        del run
        start = dict(samples[0][2])
        for _, _, stats in samples:
            for name, each in stats.items():
                first = start[name]
                stats[name] = replace(
                    each,
                    total_allocations=each.total_allocations - first.total_allocations,
                    total_blocks=each.total_blocks - first.total_blocks,
                    generation=each.generation - first.generation,
                    retain_free_bytes=0,
                )
        seen[switch] = samples
    assert len(seen["1"]) == 6 * 6
    assert vulkan.replay_stats().replayed > 0
    assert seen["1"] == seen["0"]
    assert offloaded["1"] == offloaded["0"] and offloaded["1"][0] > 0


def test_a_step_that_reads_is_not_captured(vulkan: VulkanEngine) -> None:
    """A value read in the middle may decide what comes next."""

    class Looking(GPTModel):
        replay_supported = True

        def backward(self, dy: Any = None) -> None:
            self.seen = float(self.kept["x"].numpy()[0, 0, 0])
            super().backward(dy)

    model = Looking(vulkan, CONFIG, seed=1)
    step = TrainingStep(model, AdamW(model))
    before = vulkan.replay_stats().captured
    for n in range(4):
        assert math.isfinite(step([data(n)], step=n, learning_rate=1e-3).loss)
    assert vulkan.replay_stats().captured == before
    assert vulkan.replay_stats().not_captured["a value is read back in the middle of the step"] >= 3
