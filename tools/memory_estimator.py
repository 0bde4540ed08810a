"""memory_estimator: what a run takes, and where, to the byte and without a device."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import BadInputError
from .attribution import attribute, left_out, print_attribution
from .budget_option import mode_json, within_memory_budget
from .console import TableConsole, run_program
from .inference_plan import ITEM_BYTES, plan_inference
from .memory_plan import plan_training
from .memory_plot import check_picture, draw
from .memory_report import inference_json, print_inference, print_training, training_json
from .model_setup import gpt_config
from .options import NOT_NEGATIVE, POSITIVE, Rule, flag, option, parse_options
from .presets import PRESETS
from .run_config import RunConfig, check_config
from .saved_tensors import print_saved, saved_rows
from .several_cards import plan_card
from .step_options import fill_preset, vocab_size_of

DESCRIPTION = """What a training run, or a model that generates, will take: planned by the run's own code on an engine
that only counts, so that no device is needed. Takes the options of text_train (inputs are not read): a command line
can be planned before it is run."""

ESTIMATE = "estimate"
MOST_BLOCKS = 100_000  # some minutes, and each op is remembered
ZERO_STAGE: Rule = ("0, 1, 2 or 3", lambda value: 0 <= value <= 3)


@dataclass
class EstimateConfig(RunConfig):
    """The options of text_train, and what to estimate."""

    preset: str | None = option(
        str, None, f"start from a model with a name, other options change it: {', '.join(PRESETS)}", group=ESTIMATE
    )
    json: bool = option(bool, False, "print one JSON object", group=ESTIMATE)
    ops: bool = option(bool, False, "list every op with shapes, FLOPs, bytes, and whether it is kept", group=ESTIMATE)
    saved: bool = option(bool, False, "list op by op what forward keeps for backward", group=ESTIMATE)
    attribution: bool = option(bool, False, "turn each saving off alone: its bytes and FLOPs", group=ESTIMATE)
    plot: str | None = option(str, None, "write live bytes over the ops of a step here, as .png", group=ESTIMATE)
    inference: bool = option(bool, False, "estimate generation instead of training", group=ESTIMATE)
    dtype: str = option(str, "float32", "of weights, keys and values, with --inference", choices=tuple(ITEM_BYTES))
    card_gb: float = option(
        float, 0.0, "memory of one card in decimal GB, for the largest batch with --inference", rule=NOT_NEGATIVE
    )
    cards: int = option(int, 1, "data-parallel cards, each with its own batch", group=ESTIMATE, rule=POSITIVE)
    zero_stage: int = option(int, 0, "what these cards spread among them", group=ESTIMATE, rule=ZERO_STAGE)
    tensor_parallel: int = option(int, 1, "cards that share every layer", group=ESTIMATE, rule=POSITIVE)


def estimate_config(argv: Sequence[str]) -> tuple[EstimateConfig, int]:
    """The options, a preset's filled in where none was given, and the size of the vocabulary.

    Raises BadInputError for options that are wrong or do not go together.
    """
    config, given = parse_options(EstimateConfig, argv, "memory_estimator", DESCRIPTION)
    given = fill_preset(config, given)
    check_config(config)
    _check_effects(config)
    blocks = config.num_layers * config.accum_steps
    if blocks > MOST_BLOCKS and not config.inference:
        raise BadInputError(
            f"--num-layers {config.num_layers} x --accum-steps {config.accum_steps} are {blocks:,} blocks to plan, "
            f"more than {MOST_BLOCKS:,}: plan --accum-steps 2, the peak of more is the same"
        )
    return config, vocab_size_of(config, given)


_OF_TRAINING = (
    *("plot", "ops", "saved", "attribution", "cards", "zero_stage"),
    *("checkpoint_every", "recompute", "recompute_blocks", "memory_budget", "activation_offload", "fused_update"),
)
_OF_INFERENCE = ("dtype", "card_gb")


def _check_effects(config: EstimateConfig) -> None:
    if config.inference:
        refuse_set(config, _OF_TRAINING, "it has no effect with --inference, which estimates no training step")
    else:
        refuse_set(config, _OF_INFERENCE, "it has no effect without --inference")
    if config.plot is not None:
        check_picture(Path(config.plot))


def refuse_set(config: EstimateConfig, names: Sequence[str], why: str) -> None:
    """Raises BadInputError for the first of these options that is not at its default."""
    defaults = EstimateConfig()
    for name in names:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise BadInputError(f"{flag(name)}{'' if value is True else f' {value}'}: {why}; leave it out")


def _program(argv: Sequence[str]) -> int:
    config, vocab_size = estimate_config(argv)
    model = gpt_config(config, vocab_size)
    console = TableConsole(soft_wrap=False)
    if config.inference:
        inference = plan_inference(
            model,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            dtype=config.dtype,
            tensor_parallel=config.tensor_parallel,
            card_bytes=round(config.card_gb * 1e9) if config.card_gb else None,
        )
        if config.json:
            print(json.dumps(inference_json(inference, model.num_parameters), indent=1))
        else:
            print_inference(console, inference, model.num_parameters)
        return 0
    config, within = within_memory_budget(config, vocab_size)
    if within is not None:
        print(f"--memory-budget asks for: {within.mode}", file=sys.stderr)
    plan = plan_training(config, vocab_size)
    several = config.cards > 1 or config.tensor_parallel > 1 or config.zero_stage > 0
    card = None
    if several:
        card = plan_card(plan, cards=config.cards, zero_stage=config.zero_stage, tensor_parallel=config.tensor_parallel)
    contributions = attribute(plan, vocab_size) if config.attribution else []
    if config.json:
        result = training_json(plan, card, with_ops=config.ops)
        if within is not None:
            result["memory_budget"] = mode_json(within.mode) | {"peak_bytes": within.peak_bytes}
        if config.saved:
            result["saved"] = [row.as_dict() for row in saved_rows(plan.ledger)]
        if config.attribution:
            result["attribution"] = [row.as_dict() for row in contributions]
            result["attribution_left_out"] = left_out(config)
        print(json.dumps(result, indent=1))
    else:
        print_training(console, plan, card, with_ops=config.ops)
        if config.saved:
            print_saved(console, plan.ledger)
        if config.attribution:
            print_attribution(console, plan, contributions)
    if config.plot is not None:
        draw(plan.ledger, Path(config.plot), f"{config.preset or 'model'}: {model.num_parameters:,} parameters")
        print(f"picture: {config.plot}", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    return run_program("memory_estimator", _program, argv)


if __name__ == "__main__":
    sys.exit(main())
