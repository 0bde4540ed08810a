"""Blocks that steady training keeps from step to step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.pooled_engine import STEP, PooledEngine
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn.training_step import evaluate_loss
from vkfold.tools.model_setup import make_model, make_optimizer, make_training_step
from vkfold.tools.run_config import RunConfig

BASE = RunConfig(inputs=["-"], d_model=256, num_heads=4, num_layers=4, seq_len=256, batch_size=8)
VOCAB = 256


def reserved_by_step(engine: PooledEngine, config: RunConfig, *, retain: int | None = None) -> list[tuple[int, int]]:
    """(blocks that the step pool took from the driver so far, its reserved bytes after the step) for four steps."""
    model = make_model(engine, config, VOCAB)
    optimizer = make_optimizer(model, config)
    step = make_training_step(model, optimizer, config)
    engine.set_retain_free_bytes(retain)
    tokens = np.zeros((config.batch_size, config.seq_len), np.int32)
    longer = np.zeros((2 * config.batch_size, config.seq_len), np.int32)
    seen = []
    for number in range(4):
        if number == 2:
            evaluate_loss(model, [(longer, longer)])
            engine.release_idle_pool_blocks()
        before = engine.pools[STEP].total_blocks
        step([(tokens, tokens)] * config.accum_steps, step=number, learning_rate=1e-3)
        engine.finish_step()
        stats = engine.pools[STEP].stats()
        seen.append((stats.total_blocks - before, stats.allocated_bytes))
    return seen


@pytest.mark.parametrize("checkpoint_every", [0, 1, 2])
@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("d_model", [64, 256, 1024])
def test_steady_steps_take_no_block(checkpoint_every: int, accum_steps: int, d_model: int) -> None:
    """After the first step no block is asked for, and none is reserved beyond what that step reserved."""
    config = replace(BASE, d_model=d_model, checkpoint_every=checkpoint_every, accum_steps=accum_steps)
    (first, reserved), *rest = reserved_by_step(PlanEngine(), config)
    assert first > 0 and reserved > 0
    assert rest == [(0, reserved)] * 3


def test_nothing_is_kept_when_told_so() -> None:
    seen = reserved_by_step(PlanEngine(), BASE, retain=0)
    assert all(blocks == seen[0][0] > 0 and reserved == 0 for blocks, reserved in seen)


def test_steady_on_a_device() -> None:
    config = replace(BASE, d_model=32, num_layers=1, seq_len=32, batch_size=2)
    with VulkanEngine() as engine:
        seen = reserved_by_step(engine, config)
        assert seen[0][0] == 1 and seen[1:] == [(0, seen[0][1])] * 3
        engine.pools[STEP].budget_bytes = engine.pools[STEP].reserved_bytes
        made = engine.empty((engine.pools[STEP].reserved_bytes // 4,))  # memory is short: what is kept is there to use
        assert engine.pools[STEP].reserved_bytes == made.nbytes
        engine.pools[STEP].budget_bytes = made.nbytes * 2
        del made
        engine.finish_step()
        made = engine.empty((engine.pools[STEP].budget_bytes // 4,))  # fits only once the kept block is given back
        assert engine.pools[STEP].reserved_bytes == made.nbytes
        del made
