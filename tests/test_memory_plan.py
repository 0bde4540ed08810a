"""Plan = measured: PlanEngine's books of a training step are those of the real Vulkan run, to the byte."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from vkfold.engine.allocation_ledger import AllocationLedger
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.memory_pool import PoolStats
from vkfold.tools.memory_plan import TrainingPlan, plan_training
from vkfold.tools.memory_watch import MemoryWatch
from vkfold.tools.model_setup import make_model, make_optimizer, make_training_step
from vkfold.tools.run_config import RunConfig, check_config

SEED = 20260
VOCAB = 96


def choices_of(name: str) -> tuple[str, ...]:
    """What an option may be, from the options themselves."""
    return next(field for field in dataclasses.fields(RunConfig) if field.name == name).metadata["choices"]


def draw_config(rng: random.Random) -> RunConfig:
    """One configuration over all options that change what is allocated."""
    heads, kv_heads = rng.choice([(4, 4), (4, 2), (4, 1), (2, 2), (3, 1)])
    values: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "d_model": heads * rng.choice([8, 16]),
        "num_layers": rng.choice([1, 2, 3, 5]),
        "d_ff": rng.choice([None, 64, 100]),
        "norm": rng.choice(choices_of("norm")),
        "activation": rng.choice(choices_of("activation")),
        "positions": rng.choice(choices_of("positions")),
        "tie_head": rng.random() < 0.5,
        "dropout": rng.choice([0.0, 0.1]),
        "seq_len": rng.choice([8, 17, 32]),
        "batch_size": rng.choice([1, 2, 3]),
        "accum_steps": rng.choice([1, 1, 3]),
        "checkpoint_every": rng.choice([0, 0, 1, 2, 3]),
        "recompute": rng.choice(["", "norm", "mlp", "attention,qkv", "mlp,qkv", "norm,activation,attention,qkv,mlp"]),
        "flush_interval": rng.choice([0, 1, 2]),
        "optimizer": rng.choice(choices_of("optimizer")),
        "max_norm": rng.choice([0.0, 1.0]),
        "loss_chunk_bytes": rng.choice([0, 64 * VOCAB * 4]),
    }
    for name in ("activation_offload", "fused_update"):
        values[name] = rng.random() < 0.5
    if values["fused_update"]:  # refused together with these
        values |= {"accum_steps": 1, "max_norm": 0.0}
    config = RunConfig(**values)
    check_config(config)
    return config


class Measured:
    """The first step of a run on a real device. device_bytes: most bytes of vkAllocateMemory for device memory at once,
    less what the engine holds before the run."""

    ledger: AllocationLedger
    pools: dict[str, PoolStats]
    device_bytes: int

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        generator = np.random.default_rng(3)
        shape = (config.batch_size, config.seq_len)
        batches = [
            (generator.integers(0, vocab_size, shape), generator.integers(0, vocab_size, shape))
            for _ in range(config.accum_steps)
        ]
        with VulkanEngine() as engine:
            sizes = self._count_device_memory(engine)
            self.ledger = AllocationLedger(engine)
            self.ledger.attach()
            model = make_model(engine, config, vocab_size)
            optimizer = make_optimizer(model, config)
            watch = MemoryWatch(self.ledger, model, optimizer)
            step = make_training_step(model, optimizer, config, watch.on_phase)
            watch.start(config.accum_steps)
            result = step(batches, step=0, learning_rate=config.lr)
            assert result.updated
            self.ledger.detach()
            self.device_bytes = max(sizes)
            assert sizes[-1] == sum(pool.stats().allocated_bytes for pool in engine.pools.values())
            engine.release_idle_pool_blocks()
            engine.end_batch()
            self.pools = engine.pool_stats()
            assert engine.source.reserved_bytes == sum(pool.reserved_bytes for pool in engine.pools.values())

    @staticmethod
    def _count_device_memory(engine: VulkanEngine) -> list[int]:
        """Sum of the sizes given to vkAllocateMemory for device memory, after each call from now on."""
        sizes = [0]
        create, destroy = engine.device.create_buffer, engine.device.destroy_buffer
        counted: set[int] = set()

        def create_buffer(nbytes: int, host_visible: bool) -> Any:
            buffer = create(nbytes, host_visible)
            if not host_visible:
                counted.add(id(buffer))
                sizes.append(sizes[-1] + buffer.memory_bytes)
            return buffer

        def destroy_buffer(buffer: Any) -> None:
            if id(buffer) in counted:
                counted.remove(id(buffer))
                sizes.append(sizes[-1] - buffer.memory_bytes)
            destroy(buffer)

        engine.device.create_buffer = create_buffer  # type: ignore[method-assign]
        engine.device.destroy_buffer = destroy_buffer  # type: ignore[method-assign]
        return sizes


def compare(config: RunConfig, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[TrainingPlan, Measured]:
    """Plan a run and measure it; everything the two books hold is equal."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")  # guard words make tensors larger
    plan, real = plan_training(config, vocab_size), Measured(config, vocab_size)
    assert plan.peak_bytes == real.ledger.peak_bytes
    assert {name: stats.as_dict() for name, stats in plan.pools.items()} == {
        name: stats.as_dict() for name, stats in real.pools.items()
    }
    assert plan.ledger.by_kind() == real.ledger.by_kind()
    assert (plan.ledger.peak_op, plan.ledger.peak_phase) == (real.ledger.peak_op, real.ledger.peak_phase)
    assert [record.op for record in plan.ledger.ops] == [record.op for record in real.ledger.ops]
    assert plan.ledger.peak_reserved_bytes == real.ledger.peak_reserved_bytes == real.device_bytes
    return plan, real


@pytest.mark.parametrize("number", range(10))
def test_plan_equals_measured(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = draw_config(random.Random(f"{SEED}/{number}"))
    plain = RunConfig()
    changed = {k: v for k, v in dataclasses.asdict(config).items() if v != getattr(plain, k)}
    print(f"seed {SEED}/{number}: {changed}")
    compare(config, VOCAB, monkeypatch)


# -- by hand -----------------------------------------------------------------------------------------------------------
def span(*elements: int) -> int:
    """Bytes of tensors of so many 4-byte elements, each rounded up to 256."""
    return sum(-(-4 * count // 256) * 256 for count in elements)


def test_closed_form_of_a_gpt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recomputation, AdamW: the peak is in the last block, where activation_backward has three arrays of width f."""
    d, heads, layers, f, batch, seq, vocab = 32, 4, 3, 128, 4, 64, 64
    config = RunConfig(
        d_model=d,
        num_heads=heads,
        num_layers=layers,
        d_ff=f,
        norm="layernorm",
        activation="gelu",
        positions="learned",
        tie_head=True,
        batch_size=batch,
        seq_len=seq,
    )
    n = batch * seq
    block = span(d, d, d * 3 * d, 3 * d, d * d, d, d, d, d * f, f, f * d, d)
    weights = span(vocab * d, seq * d, d, d) + layers * block
    kept = span(n * d, n * 3 * d, n * d, n * d, n * f, n, n, n, n, batch * heads * seq)  # x qkv O mid pre, scalars
    head = span(vocab * d, d, d)  # gradients of the tied table and of the final norm
    peak = 3 * weights + layers * kept + 2 * span(n * f) + span(n * d) + head
    peak += span(n, n, 1)  # position numbers, tokens, the loss
    plan, real = compare(config, vocab, monkeypatch)
    assert plan.peak_bytes == real.ledger.peak_bytes == peak
    assert (plan.ledger.peak_op, plan.ledger.peak_phase) == ("activation_backward", "backward")
    assert plan.ledger.by_kind()["parameters"] == weights


def test_closed_form_of_a_checkpointed_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """--checkpoint-every 1, SGD: one block's tensors, the inputs of those before it, and five arrays of width f."""
    d, heads, kv_heads, layers, f, batch, seq, vocab = 32, 4, 2, 3, 64, 4, 128, 64
    config = RunConfig(
        d_model=d,
        num_heads=heads,
        num_kv_heads=kv_heads,
        num_layers=layers,
        d_ff=f,
        batch_size=batch,
        seq_len=seq,
        optimizer="sgd",
        checkpoint_every=1,
    )
    n, head_dim = batch * seq, d // heads
    qkv = (heads + 2 * kv_heads) * head_dim
    block = span(d, d * qkv, d * d, d, d * 2 * f, f * d)
    weights = span(vocab * d, d, vocab * d) + layers * block
    rebuilt = span(n * d, n * qkv, n * d, n * d, n * 2 * f, n, n, batch * heads * seq)
    peak = 2 * weights + (layers - 1) * span(n * d) + rebuilt + span(n * f, n * 2 * f) + span(n * d)
    peak += span(vocab * d, d)  # gradients of the head and the final norm
    peak += span(seq * head_dim // 2, seq * head_dim // 2, n, 1)  # cos, sin, tokens, the loss
    plan, real = compare(config, vocab, monkeypatch)
    assert plan.peak_bytes == real.ledger.peak_bytes == peak
    assert (plan.ledger.peak_op, plan.ledger.peak_phase) == ("swiglu_backward", "backward")


def test_closed_form_with_accumulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """--recompute mlp,qkv over two micro-batches: in the second all gradients are there before backward begins."""
    d, heads, layers, f, batch, seq, vocab = 64, 4, 2, 256, 2, 64, 64
    config = RunConfig(
        d_model=d,
        num_heads=heads,
        num_kv_heads=1,
        num_layers=layers,
        d_ff=f,
        activation="relu",
        batch_size=batch,
        seq_len=seq,
        accum_steps=2,
        recompute="mlp,qkv",
        tie_head=True,
    )
    n, head_dim = batch * seq, d // heads
    qkv = (heads + 2) * head_dim
    weights = span(vocab * d, d) + layers * span(d, d * qkv, d * d, d, d * f, f * d)
    kept = span(n * d, n * d, n * d, n, n, batch * heads * seq)  # x, O, mid, two norms' scalars, log-sum-exp
    peak = 4 * weights + layers * kept + span(n * f, n * f, n * f, n * d)
    peak += span(seq * head_dim // 2, seq * head_dim // 2, n, 1)
    plan, real = compare(config, vocab, monkeypatch)
    assert plan.peak_bytes == real.ledger.peak_bytes == peak
    assert (plan.ledger.peak_op, plan.ledger.peak_phase) == ("activation_backward", "backward")
    assert plan.ledger.by_kind()["gradients"] == weights
