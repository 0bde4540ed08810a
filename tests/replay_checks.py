"""A model in training, and the comparison of replayed with recorded steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

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
        assert np.array_equal(state[name], value, equal_nan=True), name
