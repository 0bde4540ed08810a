"""What a step is compared by: changes that no attribute reports, shapes that alternate, positions that are learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from replay_checks import CONFIG, LEARNED, Run, data, equal_to_recorded

from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, Optimizer, gpt_model, step_replay
from vkfold.nn.counted_dict import CountedDict

NAMES = [f"blocks.{i}.attention.out.weight" for i in range(2)]


def swap(entries: dict[str, Any]) -> None:
    entries[NAMES[0]], entries[NAMES[1]] = entries[NAMES[1]], entries[NAMES[0]]


def no_decay(optimizer: Optimizer, parameter: Any) -> float:
    return 0.5


CHANGES: dict[str, Callable[[Run, pytest.MonkeyPatch], None]] = {
    "moments": lambda run, patch: swap(run.optimizer.moments),
    "parameters": lambda run, patch: swap(run.optimizer.parameters),
    "plain moments": lambda run, patch: swap(run.optimizer.moments),
    "method": lambda run, patch: patch.setattr(AdamW, "decay_of", no_decay),
    "method of a base": lambda run, patch: patch.setattr(Optimizer, "decay_of", no_decay),
    "config": lambda run, patch: object.__setattr__(run.model.config, "dropout", 0.3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_no_attribute_reports(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    replayed: list[list[bool]] = []

    def work(run: Run) -> None:
        run.model.config = GPTConfig(**{**vars(CONFIG)})
        if change == "plain moments":
            run.optimizer.moments = dict(run.optimizer.moments)
        run.steps(5)
        with monkeypatch.context() as patch:
            CHANGES[change](run, patch)
            run.steps(4)
        replayed.append([result.replayed for result in run.results])

    equal_to_recorded(vulkan, monkeypatch, work, 3)
    assert replayed[0][4] and not replayed[0][5]
    assert replayed[0][8] is ("method" not in change)  # nobody knows what such a method depends on


def test_every_change_of_a_counted_dict_counts() -> None:
    made: CountedDict[str, int] = CountedDict(a=1)
    versions = {made.version}
    for change in (
        lambda d: d.__setitem__("b", 2),
        lambda d: d.update(c=3),
        lambda d: d.setdefault("d", 4),
        lambda d: d.pop("a"),
        lambda d: d.popitem(),
        lambda d: d.__delitem__("b"),
        lambda d: d.__ior__({"e": 5}),
        lambda d: d.clear(),
    ):
        change(made)
        versions.add(made.version)
    assert len(versions) == 9 and not made


def test_captures_can_be_discarded(vulkan: VulkanEngine) -> None:
    """For what cannot be noticed: here an attribute changed behind the back of the model."""
    run = Run(vulkan)
    run.steps(4)
    assert run.results[-1].replayed
    stats = vulkan.replay_stats()
    dropped = stats.dropped["discard_captures was called"]
    run.training_step.discard_captures()
    assert stats.dropped["discard_captures was called"] == dropped + 1
    run.steps(3)
    assert [result.replayed for result in run.results[-3:]] == [False, False, True]


@pytest.mark.parametrize("config", [CONFIG, LEARNED], ids=["rope", "learned"])
@pytest.mark.parametrize(("lengths", "least"), [([8, 5], 28), ([8, 5, 3], 25), ([3, 3, 4, 5, 6, 7, 8], 14)])
def test_lengths_that_alternate_are_replayed(
    vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, config: GPTConfig, lengths: list[int], least: int
) -> None:
    def work(run: Run) -> None:
        for i in range(35):
            run.step(data(i, seq=lengths[i % len(lengths)]))

    equal_to_recorded(vulkan, monkeypatch, work, least, config=config)


def test_more_shapes_than_are_kept_are_recorded(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_replay, "MAX_SEEN", 2)

    def work(run: Run) -> None:
        for i in range(12):
            run.step(data(i, seq=3 + i % 3))
        assert len(run.training_step._replay._seen) <= 2

    equal_to_recorded(vulkan, monkeypatch, work, 0)


def test_evaluation_leaves_learned_positions_alone(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(run: Run) -> None:
        for i in range(12):
            run.step()
            run.model.set_training(False)
            loss = run.model.loss(*data(i, rows=1, seq=3 + i % 4)).item()
            run.results[-1] = run.results[-1].__class__(**{**vars(run.results[-1]), "num_valid": round(loss * 1e4)})
            run.model.set_training(True)

    equal_to_recorded(vulkan, monkeypatch, work, 9, config=LEARNED)


def test_position_ids_are_kept_for_some_lengths(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor a length, of the most rows there were; the oldest goes; what is read is right after each."""
    monkeypatch.setattr(gpt_model, "MAX_LENGTHS", 3)
    model = GPTModel(vulkan, LEARNED, seed=1)
    before = vulkan.pool_stats()["parameter"].live_bytes
    for rows, seq in ((2, 8), (1, 8), (3, 8), (2, 5), (2, 4), (2, 3), (2, 8), (1, 5)):
        ids = model._positions(rows, seq)
        assert ids.numpy().tolist() == [list(range(seq))] * rows
        assert len(model._position_ids) <= 3
        assert len({kept.shape[1] for kept in model._position_ids}) == len(model._position_ids)
        del ids
    assert [kept.shape for kept in model._position_ids] == [(2, 3), (2, 8), (1, 5)]
    live = vulkan.pool_stats()["parameter"].live_bytes
    assert live > before
    model.set_training(False)
    assert model._positions(2, 7).numpy().tolist() == [list(range(7))] * 2
    assert vulkan.pool_stats()["parameter"].live_bytes == live
    del model


@pytest.mark.parametrize("replay", ["0", "1"])
def test_a_step_is_not_made_within_itself(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, replay: str) -> None:
    """The results of the outer one lie where the inner one's would."""
    monkeypatch.setenv("VKFOLD_REPLAY", replay)
    run = Run(vulkan)
    run.steps(4)

    def again() -> None:
        run.step()

    with pytest.raises(RuntimeError, match="while_running calls the step that is running"):
        run.training_step([data(4)], step=4, learning_rate=1e-2, while_running=again)
    run.steps(2)
    assert run.results[-1].replayed is (replay == "1")
