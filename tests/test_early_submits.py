"""An idle device is given what is recorded so far; no value, and no captured step, depends on it."""

from __future__ import annotations

import numpy as np
import pytest

from vkfold.engine.profiler import OpProfiler
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep


def train(engine: VulkanEngine) -> tuple[list[float], list[np.ndarray]]:
    """Losses and weights of six steps with dropout and two micro-batches; three of them replays."""
    model = GPTModel(engine, GPTConfig(19, 8, 16, 2, 2, d_ff=24, dropout=0.1), seed=3)
    step = TrainingStep(model, AdamW(model), max_norm=1.0)
    rng = np.random.default_rng(0)
    losses = []
    for n in range(6):
        batches = [tuple(rng.integers(0, 19, (2, 2, 8))) for _ in range(2)]
        losses.append(step(batches, step=n, learning_rate=1e-2).loss)
    return losses, [parameter.data.numpy() for parameter in model.parameters()]


def test_early_submits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with VulkanEngine() as engine:
        before = engine.recorder.num_submits
        expected, weights = train(engine)
        stats, num_submits = engine.replay_stats(), engine.recorder.num_submits - before
    for idle in (True, False):
        with VulkanEngine() as engine:
            engine.recorder._early_work = 0.0
            monkeypatch.setattr(engine.recorder, "_is_idle", lambda idle=idle: idle)
            before = engine.recorder.num_submits
            losses, got = train(engine)
            assert losses == expected
            assert all(np.array_equal(a, b) for a, b in zip(got, weights, strict=True))
            assert engine.replay_stats() == stats and stats.replayed >= 3
            early = engine.recorder.num_submits - before - num_submits
            assert early > 100 if idle else early == 0


def test_a_captured_step_is_submitted_as_if_none_had_been_early() -> None:
    """Long submits are cut where they were, whatever was submitted early before."""
    places = []
    for early in (0.0, float("inf")):
        with VulkanEngine() as engine:
            recorder = engine.recorder
            x, w = engine.tensor(np.ones((64, 64))), engine.tensor(np.ones((64, 64)))
            recorder._early_work, recorder._submit_work = early, 3.5 * 2 * 64**3
            engine.replayer.start()
            for _ in range(12):
                engine.matmul(x, w)
            stream, _ = engine.replayer.finish()
            places.append([i for i, command in enumerate(stream.commands) if len(command) == 1])
    assert places[0] == places[1] and len(places[0]) >= 3


def test_a_busy_device_is_not_disturbed() -> None:
    """What it has not begun it would only get in smaller pieces."""
    with VulkanEngine() as engine:
        recorder = engine.recorder
        recorder._early_work = 0.0
        busy = [True]
        recorder._is_idle = lambda: not busy[0]  # type: ignore[method-assign]
        x = engine.tensor(np.ones((8, 8)))
        before = recorder.num_submits
        for _ in range(40):
            x = engine.matmul(x, x)
        assert recorder.num_submits == before
        busy[0] = False
        for _ in range(40):
            x = engine.matmul(x, x)
        assert recorder.num_submits > before + 10


def test_a_profile_has_no_early_submits() -> None:
    """The device would wait for the host between an op's first timestamp and its dispatch."""
    with VulkanEngine() as engine:
        profiler = OpProfiler(engine)
        profiler.attach()
        engine.recorder._early_work = 0.0
        before = engine.recorder.num_submits
        x = engine.tensor(np.ones((8, 8)))
        for _ in range(40):
            x = engine.matmul(x, x)
        assert engine.recorder.num_submits == before
        assert len(profiler.take()) == 40
        profiler.detach()


def test_idle_is_what_the_queue_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with VulkanEngine() as engine:
        recorder = engine.recorder
        recorder.finish()
        assert recorder._is_idle()
        engine.matmul(engine.tensor(np.ones((256, 256))), engine.tensor(np.ones((256, 256))))
        recorder.submit()
        fence = recorder._in_flight[-1].fence
        with monkeypatch.context() as patch:
            patch.setattr(type(fence), "is_signaled", lambda self: False)
            assert not recorder._is_idle()
        fence.wait()
        assert recorder._is_idle()
