"""--memory-budget: the cheapest recomputation that fits, worked out before the run."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import numpy as np

from ..engine.errors import BadInputError
from ..engine.plan_engine import PlanEngine
from ..nn.memory_budget import MemoryMode, PlannedMode, cheapest_mode
from .model_setup import make_model, make_optimizer, make_training_step
from .options import parse_bytes
from .run_config import RunConfig

C = TypeVar("C", bound=RunConfig)


def mode_json(mode: MemoryMode) -> dict[str, Any]:
    """What --memory-budget chose, for JSON: the options in words, and each by itself."""
    return {
        "mode": str(mode),
        "checkpoint_every": mode.checkpoint_every,
        "recompute": list(mode.groups),
        "recompute_blocks": mode.num_blocks,
    }


def within_memory_budget(config: C, vocab_size: int) -> tuple[C, PlannedMode | None]:
    """The options with --memory-budget replaced by the recomputation it asks for, and what that takes.

    Without a budget, the options as they are and None. Raises BadInputError, with the smallest peak that can be
    reached, when no recomputation fits.
    """
    if config.memory_budget is None:
        return config, None
    engine = PlanEngine()
    tokens = np.zeros((config.batch_size, config.seq_len), np.int32)
    micro_batches = [(tokens, tokens)] * min(config.accum_steps, 2)
    try:
        model = make_model(engine, config, vocab_size)
        step = make_training_step(model, make_optimizer(model, config), config)
        found = cheapest_mode(
            model,
            lambda: step(micro_batches, step=0, learning_rate=config.lr),
            parse_bytes(config.memory_budget),
        )
    except BadInputError:
        raise
    except ValueError as error:
        raise BadInputError(f"these sizes are too large: {error}") from error
    chosen = dataclasses.replace(
        config,
        memory_budget=None,
        checkpoint_every=found.mode.checkpoint_every,
        recompute=",".join(found.mode.groups),
        recompute_blocks=found.mode.num_blocks,
    )
    return chosen, found
