"""Whether a run fits the device, told before any of it is allocated there."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..engine.errors import BadInputError
from ..engine.plan_engine import PlanEngine
from .model_setup import gpt_config, make_model, make_optimizer, make_training_step
from .run_config import RunConfig

MANY_BLOCKS = 500  # planning takes milliseconds a block


def planned_peak_bytes(config: RunConfig, vocab_size: int) -> int:
    """Most bytes live at once in one training step: the run's own code on an engine that only counts.

    Raises BadInputError for sizes no engine can hold.
    """
    engine = PlanEngine()
    tokens = np.zeros((config.batch_size, config.seq_len), np.int32)
    try:
        model = make_model(engine, config, vocab_size)
        step = make_training_step(model, make_optimizer(model, config), config)
        step([(tokens, tokens)] * min(config.accum_steps, 2), step=0, learning_rate=config.lr)
    except ValueError as error:
        raise BadInputError(f"these sizes are too large: {error}") from error
    return sum(pool.stats().peak_live_bytes for pool in engine.pools.values())


def planned_save_bytes(config: RunConfig, vocab_size: int) -> int:
    """Bytes of weights and moments, which are nearly all of a save."""
    engine = PlanEngine()
    optimizer = make_optimizer(make_model(engine, config, vocab_size), config)
    weights = sum(parameter.data.nbytes for parameter in optimizer.parameters.values())
    return weights + sum(tensor.nbytes for tensor in optimizer.named_moments().values())


def check_budget(config: RunConfig, vocab_size: int, budget: int, *, automatic: bool = False) -> int:
    """The planned peak in bytes. Raises BadInputError when it is over the budget, saying what would fit.

    automatic: the recomputation was chosen by --memory-budget, which no other option of recomputation goes with.
    """
    least = _least_bytes(config, vocab_size)
    if least > budget:  # told at once: planning takes as long as there are blocks
        raise BadInputError(
            f"the weights and moments alone take {_size(least)} of device memory, the budget is {_size(budget)}: "
            f"make --d-model, --num-layers or --d-ff smaller"
        )
    peak = _peak_or_none(config, vocab_size)
    if peak is not None and peak <= budget:
        return peak
    needs = "more than an engine can address" if peak is None else _size(peak)
    if automatic:
        advice = f"--memory-budget {budget} looks for what fits it"
    else:
        advice = _advice(config, vocab_size, budget)
    raise BadInputError(f"this run needs {needs} of device memory, the budget is {_size(budget)}: {advice}")


def _least_bytes(config: RunConfig, vocab_size: int) -> int:
    """Bytes of weights and moments by the model's formula, without planning; Adafactor's moments are left out."""
    num_moments = {"adamw": 2, "sgd": 1 if config.beta1 else 0}.get(config.optimizer, 0)
    return 4 * gpt_config(config, vocab_size).num_parameters * (1 + num_moments)


def _advice(config: RunConfig, vocab_size: int, budget: int) -> str:
    if config.num_layers >= MANY_BLOCKS:  # looking for a batch plans some dozen times
        return "make --batch-size, --num-layers or --seq-len smaller, or add --checkpoint-every 1"
    for every in sorted({config.checkpoint_every, 1}):
        changed = dataclasses.replace(config, checkpoint_every=every)
        fitting = _largest_batch(changed, vocab_size, budget)
        if fitting:
            checkpointing = [] if every == config.checkpoint_every else [f"--checkpoint-every {every}"]
            options = [] if fitting == config.batch_size else [f"--batch-size {fitting}"]
            advice = f"{' '.join(options + checkpointing)} would fit"
            same = _same_tokens(changed, vocab_size, budget, fitting)
            return f"{advice}; for the same tokens a step {' '.join(same + checkpointing)}" if same else advice
    return (
        "not even --batch-size 1 with --checkpoint-every 1 would fit; make --d-model, --num-layers or --seq-len smaller"
    )


def _same_tokens(config: RunConfig, vocab_size: int, budget: int, fitting: int) -> list[str]:
    """Options of the largest batch that fits and, accumulated, gives exactly the tokens a step asked for; [] for none.

    Accumulation has all gradients alive in the second micro-batch, so that it is planned too.
    """
    if config.fused_update or fitting == config.batch_size:  # fused updates cannot accumulate
        return []
    for batch_size in range(fitting, 0, -1):
        times, rest = divmod(config.batch_size, batch_size)
        if not rest:
            smaller = dataclasses.replace(config, batch_size=batch_size, accum_steps=times * config.accum_steps)
            peak = _peak_or_none(smaller, vocab_size)
            if peak is not None and peak <= budget:
                return [f"--batch-size {batch_size}", f"--accum-steps {smaller.accum_steps}"]
    return []


def _largest_batch(config: RunConfig, vocab_size: int, budget: int) -> int:
    """The largest batch size up to the config's that fits, 0 for none."""
    low, high = 0, config.batch_size
    while low < high:
        middle = (low + high + 1) // 2
        peak = _peak_or_none(dataclasses.replace(config, batch_size=middle), vocab_size)
        low, high = (middle, high) if peak is not None and peak <= budget else (low, middle - 1)
    return low


def _peak_or_none(config: RunConfig, vocab_size: int) -> int | None:
    try:
        return planned_peak_bytes(config, vocab_size)
    except BadInputError:
        return None


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"
