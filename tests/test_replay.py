"""Replayed steps: how many there are, and that their bits are those of recorded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from replay_checks import CONFIG, LEARNED, Run, data, equal_to_recorded, ignored

from vkfold.engine.errors import BadInputError
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, Adafactor, AdamW, GPTConfig, GPTModel, evaluate_loss
from vkfold.nn.schedules import cosine


@pytest.fixture
def fresh() -> Iterator[VulkanEngine]:
    """An engine of the test's own, for counts and blocks."""
    with VulkanEngine() as engine:
        yield engine


def test_fifty_steps(fresh: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once: idle blocks released after each step, dropout, cosine, accumulation 3, clipping."""
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


@pytest.mark.parametrize("seed", range(3))
def test_random_programs(fresh: VulkanEngine, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Anything in any order between steps: the same bits as when every step is recorded."""

    def work(run: Run) -> None:
        engine, model = run.engine, run.model
        rng = np.random.default_rng(seed)
        held: list[Any] = []
        saved = model.state_dict(), run.optimizer.state_dict()
        for n in range(60):
            action = rng.integers(0, 16)
            if action == 0:
                held.append(engine.tensor(rng.standard_normal(int(rng.integers(1, 5000)))))
            elif action == 1:
                held.clear()
            elif action == 2:
                evaluate_loss(model, [data(n, rows=int(rng.integers(1, 4)))])
            elif action == 3:
                model.set_checkpoint_every(int(rng.integers(0, 3)))
            elif action == 4:
                model.set_activation_offload(bool(rng.integers(0, 2)))
            elif action == 5:
                model.set_recompute(("mlp",) if rng.integers(0, 2) else ())
            elif action == 6:
                engine.set_retain_free_bytes(0 if rng.integers(0, 2) else None)
                engine.release_idle_pool_blocks()
            elif action == 7:
                model.load_state_dict(saved[0])
                run.optimizer.load_state_dict(saved[1])
            elif action == 8:
                engine.upload(model.final_norm.weight.data, np.full(8, np.nan if rng.integers(0, 2) else 0.5))
            elif action == 9:
                run.training_step.max_norm = float(rng.integers(0, 2))
            elif action == 10:
                model.forward(data(n)[0])  # what it keeps lies in the step pool until the next forward
            for _ in range(int(rng.integers(1, 4))):
                seq = 8 if rng.integers(0, 4) else 5
                run.step(*[data(len(run.results), seq=seq)] * int(1 + (n // 20) % 2), rate=float(rng.random()) * 0.01)

    equal_to_recorded(fresh, monkeypatch, work, 1 if fresh.device.has_transfer_queue else 20)
