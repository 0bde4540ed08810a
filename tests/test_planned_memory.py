"""What a step of a 236M-parameter model takes, planned to the byte: the figures the memory design is held to."""

from __future__ import annotations

import numpy as np
import pytest

from vkfold.engine.plan_engine import PlanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

GPT_236M = GPTConfig(
    32782, 1024, 1024, 16, 16, d_ff=4096, norm="layernorm", activation="gelu", positions="learned", tie_head=True
)
BATCH, SEQ = 6, 1024


def plan(every: int = 0, groups: tuple[str, ...] = (), offload: bool = False) -> tuple[int, int, dict[str, int]]:
    """Peak of live bytes over both pools, FLOPs, and step-pool bytes live after each phase."""
    engine = PlanEngine()
    model = GPTModel(engine, GPT_236M, loss_chunk_bytes=64 * 2**20)
    model.set_checkpoint_every(every)
    model.set_recompute(groups)
    model.set_activation_offload(offload)
    live: dict[str, int] = {}

    def sample(phase: str, micro_batch: int) -> None:
        live[phase] = engine.pool_stats()["step"].live_bytes

    step = TrainingStep(model, AdamW(model), max_norm=1.0, on_phase=sample)
    tokens = np.zeros((BATCH, SEQ), np.int32)
    engine.reset_peak()
    step([(tokens, tokens)], step=0, learning_rate=1e-3)
    pools = engine.pool_stats()
    # The parameter pool is constant during a step, so its bytes add to the step pool's peak.
    return pools["step"].peak_live_bytes + pools["parameter"].live_bytes, engine.cost.flops, live


@pytest.mark.parametrize(
    ("every", "groups", "peak_gb", "more_flops"),
    [
        (0, (), 7.4, 0.0),
        (0, ("mlp",), 5.9, 0.12),
        (0, ("mlp", "qkv"), 4.8, 0.20),
        (1, (), 4.5, 0.34),
    ],
)
def test_peak_and_flops(every: int, groups: tuple[str, ...], peak_gb: float, more_flops: float) -> None:
    _, plain_flops, _ = plan()
    peak, flops, live = plan(every, groups)
    assert peak <= peak_gb * 1e9
    assert plain_flops <= flops <= (1 + more_flops) * plain_flops
    assert live["optimizer"] <= 4096  # the norm kernel's report


def test_activation_offload() -> None:
    """At most 4.8 GB without one FLOP more; the host holds what blocks keep, each byte copied once either way."""
    _, plain_flops, plain_live = plan()
    peak, flops, live = plan(offload=True)
    assert peak <= 4.8e9
    assert flops == plain_flops
    rows = BATCH * SEQ
    kept = 16 * (6 * rows * 1024 * 4 + rows * 4096 * 4 + 4 * rows * 4 + BATCH * 16 * SEQ * 4)
    assert plain_live["forward"] - live["forward"] == kept
    # Every block's input is kept by it; those of checkpointed segments alone:
    assert plan(every=1)[2]["forward"] - plan(every=1, offload=True)[2]["forward"] == 16 * rows * 1024 * 4


def test_bytes_between_forward_and_backward() -> None:
    """By hand: per block x, q, k, v, O, mid, the pre-activation, five scalars a row; for the head the last block's
    output, its norm's scalars, the gradient of the hidden states, and the tied weight's gradient; the tokens."""
    rows = BATCH * SEQ
    hidden = rows * 1024 * 4
    block = 6 * hidden + rows * 4096 * 4 + 4 * rows * 4 + BATCH * 16 * SEQ * 4
    head = 2 * hidden + 2 * rows * 4 + 32782 * 1024 * 4
    tokens, loss = rows * 4, 256
    assert block == pytest.approx(251.7e6, rel=5e-3)
    assert plan()[2]["forward"] == 16 * block + head + tokens + loss
    assert plan(every=1)[2]["forward"] == 16 * hidden + head + tokens + loss
    assert plan(every=3)[2]["forward"] == 6 * hidden + head + tokens + loss
    gradients = GPT_236M.num_parameters * 4
    assert plan()[2]["backward"] == gradients + loss
