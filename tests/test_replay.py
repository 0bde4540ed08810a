"""Replayed steps: how many there are, that their bits are those of recorded ones, and what drops a capture."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vkfold.engine.allocation_ledger import AllocationLedger
from vkfold.engine.errors import BadInputError
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, Adafactor, AdamW, GPTConfig, GPTModel, TrainingStep, evaluate_loss
from vkfold.nn.schedules import cosine

CONFIG = GPTConfig(13, 8, 8, 2, 2, d_ff=12, dropout=0.1)
LEARNED = GPTConfig(13, 8, 8, 2, 2, d_ff=12, positions="learned", norm="layernorm", activation="gelu")

Batch = tuple[np.ndarray, np.ndarray]
Work = Callable[["Run"], None]


def data(seed: int, rows: int = 2, seq: int = 8) -> Batch:
    tokens, targets = np.random.default_rng(seed).integers(0, 13, (2, rows, seq))
    return tokens, targets


def ignored(batch: Batch) -> Batch:
    return batch[0], np.full_like(batch[1], -100)


class Run:
    """A model in training. results: of every step, in order."""

    def __init__(
        self, engine: VulkanEngine, config: GPTConfig = CONFIG, optimizer: Any = AdamW, **settings: Any
    ) -> None:
        self.engine = engine
        self.model = GPTModel(engine, config, seed=1)
        self.optimizer = optimizer(self.model)
        self.training_step = TrainingStep(self.model, self.optimizer, seed=9, **settings)
        self.results: list[Any] = []

    def step(self, *batches: Batch, rate: float = 1e-2) -> Any:
        number = len(self.results)
        result = self.training_step(batches or [data(number)], step=number, learning_rate=rate)
        self.results.append(result)
        return result

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def state(self) -> dict[str, np.ndarray]:
        return {**self.model.state_dict(), **self.optimizer.state_dict()}


@pytest.fixture
def fresh() -> Iterator[VulkanEngine]:
    """An engine of the test's own, for counts and blocks."""
    with VulkanEngine() as engine:
        yield engine


def equal_to_recorded(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, work: Work, least_replayed: int, **settings: Any
) -> None:
    """Do the work twice, with and without replay: every result, weight and moment must be the same bits."""
    stats = engine.replay_stats()
    outcomes = []
    for switch in ("1", "0"):
        monkeypatch.setenv("VKFOLD_REPLAY", switch)
        before = stats.replayed
        run = Run(engine, **settings)
        work(run)
        outcomes.append((run.results, run.state()))
        replayed = stats.replayed - before
        if switch == "1":
            assert replayed >= least_replayed, f"{replayed} of {len(run.results)} steps were replayed: {stats}"
        else:
            assert replayed == 0
        del run
    (results, state), (recorded, expected) = outcomes
    assert [replace(r, loss=0, grad_norm=0) for r in results] == [replace(r, loss=0, grad_norm=0) for r in recorded]
    for name in ("loss", "grad_norm"):
        assert np.array_equal([getattr(r, name) for r in results], [getattr(r, name) for r in recorded], equal_nan=True)
    for name, value in expected.items():
        assert np.array_equal(state[name], value), name


def test_fifty_steps(fresh: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the issue: idle blocks released after each step, dropout, cosine, accumulation 3, clipping."""
    schedule = cosine(1e-2, total_steps=50, warmup_steps=5)

    def work(run: Run) -> None:
        for n in range(50):
            run.step(data(n), data(n + 100), data(n + 200), rate=schedule(n))
            fresh.release_idle_pool_blocks()

    equal_to_recorded(fresh, monkeypatch, work, 45, max_norm=0.1)
    assert not [reason for reason in fresh.replay_stats().dropped if "block" in reason]


@pytest.mark.parametrize("optimizer", [AdamW, SGD, Adafactor])
@pytest.mark.parametrize("config", [CONFIG, LEARNED])
def test_optimizers(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, optimizer: type, config: GPTConfig) -> None:
    equal_to_recorded(vulkan, monkeypatch, lambda run: run.steps(8), 5, optimizer=optimizer, config=config)


@pytest.mark.parametrize(
    "mode",
    [
        lambda model: model.set_checkpoint_every(1),
        lambda model: model.set_checkpoint_every(2),
        lambda model: model.set_recompute(("mlp", "norm")),
        lambda model: model.set_activation_offload(True),
        lambda model: model.set_flush_interval(1),
        lambda model: setattr(model.head_loss, "chunk_bytes", 64),
    ],
    ids=["every 1", "every 2", "recompute", "offload", "flush", "loss chunk"],
)
def test_memory_modes(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, mode: Callable[[GPTModel], None]) -> None:
    """Each mode from the start, and switched on and off again between replayed steps."""

    def from_the_start(run: Run) -> None:
        mode(run.model)
        run.steps(6)

    def in_between(run: Run) -> None:
        run.steps(4)
        mode(run.model)
        run.steps(4)

    probe = GPTModel(vulkan, CONFIG, seed=None)
    mode(probe)
    on_two_queues = vulkan.device.has_transfer_queue and probe.activation_offload
    del probe
    equal_to_recorded(vulkan, monkeypatch, from_the_start, 0 if on_two_queues else 3)
    equal_to_recorded(vulkan, monkeypatch, in_between, 2)


def test_fused_update(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    equal_to_recorded(vulkan, monkeypatch, lambda run: run.steps(8), 5, fused_update=True)


def test_work_in_between(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation, sampling, uploads, other tensors and a new rate between steps: right, and replayed all the same."""

    def work(run: Run) -> None:
        engine, model = run.engine, run.model
        run.steps(4)
        evaluate_loss(model, [data(77, rows=3)])
        run.step()
        model.logits_last(data(5)[0])
        run.step(rate=3e-3)
        held = engine.tensor(np.ones(1000))
        run.step()
        assert np.array_equal(held.numpy(), np.ones(1000))
        del held
        run.step()
        weight = model.named_parameters()["final_norm.weight"].data
        engine.upload(weight, np.full(weight.shape, 0.5))
        run.step()
        with engine.batch():
            engine.upload(weight, np.full(weight.shape, 0.75))
        run.steps(2)

    equal_to_recorded(vulkan, monkeypatch, work, 7)


def test_data_of_the_next_step(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data loaded and put in place while a step runs: the bits are the same, prepared or not, used or not."""

    def work(run: Run) -> None:
        lists = [[data(n), data(n + 50)] for n in range(14)]
        called = []

        def load() -> None:
            called.append(len(run.results))
            following = lists[len(run.results) + 1]
            if len(run.results) % 4 != 2:
                run.training_step.prepare(following if len(run.results) % 5 != 3 else [data(0), data(1)])

        for n in range(13):
            run.results.append(run.training_step(lists[n], step=n, learning_rate=1e-2, while_running=load))
        assert called == list(range(13))
        assert run.training_step.prepare(lists[13]) is None
        run.training_step([data(3)], step=13, learning_rate=1e-2)
        with pytest.raises(BadInputError, match="lie outside the vocabulary"):
            run.training_step.prepare([(data(0)[0] + 13, data(0)[1])])
        run.step(data(3), data(4))

    equal_to_recorded(vulkan, monkeypatch, work, 10)


def test_shapes(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that change and come back, and another number of micro-batches."""

    def work(run: Run) -> None:
        for n in range(12):
            run.step(*[data(n, rows=1 + n % 2)] * (1 + n // 6))

    equal_to_recorded(vulkan, monkeypatch, work, 0)

    def in_runs(run: Run) -> None:
        for n in range(16):
            run.step(data(n, seq=8 if n // 4 % 2 else 5))

    equal_to_recorded(vulkan, monkeypatch, in_runs, 10)


def test_steps_that_change_nothing(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite, and a step without any label, leave weights, moments and their count alone."""

    def work(run: Run) -> None:
        run.steps(4)
        weight = run.model.named_parameters()["blocks.1.feed_forward.up.weight"].data
        good = weight.numpy()
        bad = good.copy()
        bad[0, 0] = np.nan
        run.engine.upload(weight, bad)
        result = run.step()
        assert (result.updated, result.non_finite) == (False, "loss")
        assert run.optimizer.num_updates == 4
        run.engine.upload(weight, good)
        run.steps(2)
        with pytest.warns(UserWarning, match="every label is ignored"):
            run.step(ignored(data(1)))
        run.step(data(3))

    equal_to_recorded(vulkan, monkeypatch, work, 5)


def test_names_a_gradient(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a finite loss the first parameter whose gradient is not finite is named in replayed steps, too."""

    def work(run: Run) -> None:
        run.steps(4)
        weight = run.model.named_parameters()["final_norm.weight"].data
        run.engine.upload(weight, np.full(weight.shape, 1e30))
        run.step()

    equal_to_recorded(vulkan, monkeypatch, work, 2, config=replace(LEARNED, norm="rmsnorm"))


def test_resume(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(run: Run) -> None:
        run.steps(4)
        weights, moments = run.model.state_dict(), run.optimizer.state_dict()
        run.steps(2)
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(moments)
        run.steps(2)
        assert run.optimizer.num_updates == 6

    equal_to_recorded(vulkan, monkeypatch, work, 5)


def test_bad_input_and_errors(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors before a replay and in the middle of recording leave the next step as it would be."""

    def work(run: Run) -> None:
        run.steps(4)
        before = run.optimizer.num_updates
        with pytest.raises(BadInputError, match="lie outside the vocabulary"):
            run.training_step([(data(0)[0] + 13, data(0)[1])], step=4, learning_rate=1e-2)
        with pytest.raises(BadInputError, match="differ in shape"):
            run.training_step([(data(0)[0], data(0, rows=3)[1])], step=4, learning_rate=1e-2)
        block = run.model.blocks[1]
        block.backward = None  # type: ignore[assignment,method-assign]
        with pytest.raises(TypeError):
            run.training_step([data(0)], step=4, learning_rate=1e-2)
        del block.backward
        assert run.optimizer.num_updates == before
        run.model.release_cache()
        run.steps(4)

    equal_to_recorded(vulkan, monkeypatch, work, 3)


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


def test_nothing_leaks(fresh: VulkanEngine) -> None:
    """Captures own bounded host memory and give it back; blocks in use are those of recorded steps."""
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


def test_two_models(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models take turns, and one dies in between."""

    def work(run: Run) -> None:
        other = Run(run.engine, LEARNED, SGD)
        for _ in range(6):
            run.step()
            other.step()
        run.results += other.results
        del other
        run.step()
        run.step()
        run.step()

    equal_to_recorded(vulkan, monkeypatch, work, 7)


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
