"""A training step planned to the byte: the run's own code on the engine that only counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.allocation_ledger import ACTIVATIONS, AllocationLedger
from ..engine.errors import BadInputError
from ..engine.plan_engine import PlanEngine
from ..memory_pool import PoolStats
from ..nn.gpt_config import GPTConfig
from .memory_watch import MemoryWatch
from .model_setup import gpt_config, make_model, make_optimizer, make_training_step
from .run_config import RunConfig

RESTORED = "restored"  # label of what activation offload brought back: the same tensors once more
MATMUL_AND_ATTENTION = ("matmul", "attention")  # beginnings of the names of the ops whose FLOPs are compared


@dataclass
class TrainingPlan:
    """What one optimizer step takes. pools: after the step, as the engine leaves them; num_tokens: of one step."""

    model: GPTConfig
    config: RunConfig
    ledger: AllocationLedger
    pools: dict[str, PoolStats]
    num_tokens: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once, over all pools."""
        return self.ledger.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Most bytes in host memory at once (activation offload); never counted with the device's."""
        return self.pools["host"].peak_live_bytes if "host" in self.pools else 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the step, every op counted."""
        return sum(op.cost.flops for op in self.ledger.ops)

    @property
    def matmul_attention_flops(self) -> int:
        """Those of matmul and attention alone."""
        return sum(op.cost.flops for op in self.ledger.ops if op.op.startswith(MATMUL_AND_ATTENTION))

    def saved_by_layer(self) -> dict[str, dict[str, int]]:
        """Bytes kept for backward by layer ("blocks.0", ..., "other") and by name within it, at their most numerous.

        Of several micro-batches, which each keep the same, one is told.
        """
        layers: dict[str, dict[str, int]] = {}
        seen: set[str] = set()
        for allocation in self.ledger.allocations:
            if allocation.kind != ACTIVATIONS or allocation.label in seen or allocation.label == RESTORED:
                continue
            seen.add(allocation.label)
            parts = allocation.label.split(".")
            in_block = parts[0] == "blocks" and len(parts) > 2
            layer, name = (".".join(parts[:2]), ".".join(parts[2:])) if in_block else ("other", allocation.label)
            layers.setdefault(layer, {})[name] = allocation.nbytes
        return layers

    def bytes_of(self, kind: str) -> int:
        """Most bytes of one kind that are live at once."""
        return int(self.ledger.curve(kind=kind).max())


def plan_training(
    config: RunConfig,
    vocab_size: int,
    *,
    engine: PlanEngine | None = None,
    watch_type: type[MemoryWatch] = MemoryWatch,
) -> TrainingPlan:
    """Plan the first optimizer step of a run, on an engine of its own unless given.

    Raises BadInputError for sizes no engine can hold.
    """
    engine = engine or PlanEngine()
    ledger = AllocationLedger(engine)
    ledger.attach()
    tokens = np.zeros((config.batch_size, config.seq_len), np.int32)
    try:
        model = make_model(engine, config, vocab_size)
        optimizer = make_optimizer(model, config)
        watch = watch_type(ledger, model, optimizer)
        step = make_training_step(model, optimizer, config, watch.on_phase)
        watch.start(config.accum_steps)
        step([(tokens, tokens)] * config.accum_steps, step=0, learning_rate=config.lr)
    except ValueError as error:
        raise BadInputError(f"these sizes are too large: {error}") from error
    finally:
        ledger.detach()
    engine.release_idle_pool_blocks()
    num_tokens = config.batch_size * config.seq_len * config.accum_steps
    return TrainingPlan(gpt_config(config, vocab_size), config, ledger, engine.pool_stats(), num_tokens)


def matmul_parameters(model: GPTConfig) -> int:
    """Weights that multiply activations; a tied head counts once, a look-up table not at all."""
    d, width = model.d_model, model.num_heads * model.head_dim
    up_width = model.d_ff * (2 if model.activation == "swiglu" else 1)
    block = d * (width + 2 * model.num_kv_heads * model.head_dim) + width * d + d * up_width + model.d_ff * d
    return model.num_layers * block + model.vocab_size * d


def rule_flops_per_token(model: GPTConfig, *, full_recompute: bool) -> int:
    """6 P, or 8 P when every block runs forward twice (Kaplan et al. 2020; Narayanan et al. 2021)."""
    return (8 if full_recompute else 6) * matmul_parameters(model)


def op_rows(plan: TrainingPlan) -> list[dict[str, Any]]:
    """One row an op: name, phase, shapes, FLOPs, bytes, live bytes, and whether its output is kept for backward."""
    return [
        {
            "op": record.op,
            "phase": record.phase,
            "inputs": [list(shape) for shape in record.inputs],
            "outputs": [list(shape) for shape in record.outputs],
            "flops": record.cost.flops,
            "bytes": record.cost.bytes_moved,
            "live_bytes": record.live_bytes,
            "kept": record.kept,
        }
        for record in plan.ledger.ops
        if record.phase
    ]
