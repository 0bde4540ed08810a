"""Every option of text_train, in one dataclass, and the checks that need no device."""

# ruff: noqa: RUF009 (option is dataclasses.field)

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.errors import BadInputError
from ..nn.gpt_block import RECOMPUTE_GROUPS
from ..nn.gpt_config import POSITIONS
from .options import FRACTION, NOT_NEGATIVE, POSITIVE, between, check_values, flag, option, parse_bytes

INPUT, MODEL, TRAINING, MEMORY, RUN = "input", "model", "training", "memory", "run"


MAX_TOKENS_A_STEP = 2**28  # a step's windows are in host memory at once


@dataclass
class RunConfig:
    """Options of one training run. None means: worked out from the other options (see each help text)."""

    # -- input -------------------------------------------------------------------------------------------------------
    inputs: list[str] = option(str, None, "text files or folders; - for standard input", group=INPUT, repeated=True)
    glob: str = option(str, "*.txt", "which files of an input folder to take, at any depth", group=INPUT)
    tokenizer: str = option(str, "bytes", "bytes, bpe (trained on the input), or a tokenizer.json", group=INPUT)
    vocab_size: int = option(int, 1024, "tokens of a trained bpe", group=INPUT, rule=between(1, 2**20))
    held_out: float | None = option(
        float,
        None,
        "part of the text held out, from its end; 0.1 where it fits unless given",
        group=INPUT,
        rule=FRACTION,
    )
    seq_len: int = option(int, 128, "tokens a window", group=INPUT, rule=POSITIVE)
    stride: int | None = option(
        int, None, "tokens from one window to the next; seq-len if not given", group=INPUT, rule=POSITIVE
    )

    # -- model -------------------------------------------------------------------------------------------------------
    d_model: int = option(int, 128, "width", group=MODEL, rule=POSITIVE)
    num_layers: int = option(int, 4, "blocks", group=MODEL, rule=between(1, 10_000))
    num_heads: int = option(int, 4, "attention heads", group=MODEL, rule=POSITIVE)
    num_kv_heads: int | None = option(int, None, "key/value heads; num-heads if not given", group=MODEL, rule=POSITIVE)
    d_ff: int | None = option(
        int, None, "width of the feed-forward; 8/3 d rounded up to 256 for swiglu, else 4 d", group=MODEL, rule=POSITIVE
    )
    norm: str = option(str, "rmsnorm", "normalisation", group=MODEL, choices=("rmsnorm", "layernorm"))
    activation: str = option(str, "swiglu", "feed-forward", group=MODEL, choices=("swiglu", "gelu", "relu", "silu"))
    positions: str = option(str, "rope", "positions", group=MODEL, choices=POSITIONS)
    attention_window: int = option(
        int, 0, "keys each token sees, itself included; 0 is all before it", group=MODEL, rule=NOT_NEGATIVE
    )
    attention_softcap: float = option(
        float, 0.0, "attention scores stay below this, by tanh; 0 is off", group=MODEL, rule=NOT_NEGATIVE
    )
    attention_sinks: bool = option(bool, False, "a trainable score a head with no value behind it", group=MODEL)
    tie_head: bool = option(bool, False, "use the embedding table as the head", group=MODEL)
    dropout: float = option(float, 0.0, "dropout probability", group=MODEL, rule=FRACTION)

    # -- training ----------------------------------------------------------------------------------------------------
    batch_size: int = option(int, 8, "windows a micro-batch", group=TRAINING, rule=POSITIVE)
    accum_steps: int = option(int, 1, "micro-batches a step", group=TRAINING, rule=POSITIVE)
    epochs: int = option(int, 1, "passes over the windows, where max-steps is not given", group=TRAINING, rule=POSITIVE)
    max_steps: int | None = option(int, None, "optimizer steps in all", group=TRAINING, rule=POSITIVE)
    optimizer: str = option(str, "adamw", "optimizer", group=TRAINING, choices=("adamw", "sgd", "adafactor"))
    lr: float = option(float, 1e-3, "peak learning rate", group=TRAINING, rule=POSITIVE)
    beta1: float = option(
        float, 0.9, "decay of AdamW's first moment, and momentum of SGD", group=TRAINING, rule=FRACTION
    )
    beta2: float = option(float, 0.95, "decay of AdamW's second moment", group=TRAINING, rule=FRACTION)
    weight_decay: float = option(float, 0.1, "decoupled weight decay", group=TRAINING, rule=NOT_NEGATIVE)
    max_norm: float = option(float, 1.0, "clip the gradient to this norm; 0 is off", group=TRAINING, rule=NOT_NEGATIVE)
    lr_schedule: str = option(str, "cosine", "learning-rate schedule", group=TRAINING, choices=("cosine", "constant"))
    warmup_steps: int = option(int, 0, "steps of linear warm-up", group=TRAINING, rule=NOT_NEGATIVE)
    min_lr: float = option(float, 0.0, "learning rate at the end of the cosine", group=TRAINING, rule=NOT_NEGATIVE)
    schedule_steps: int | None = option(
        int, None, "steps the schedule spans; all of the run if not given", group=TRAINING, rule=POSITIVE
    )
    seed: int = option(int, 0, "of weights, order of windows and dropout", group=TRAINING, rule=NOT_NEGATIVE)

    # -- memory ------------------------------------------------------------------------------------------------------
    checkpoint_every: int = option(
        int, 0, "recompute activations in segments of so many blocks; 0 is off", group=MEMORY, rule=NOT_NEGATIVE
    )

    recompute: str = option(
        str, "", f"what to free in forward and rebuild in backward: any of {', '.join(RECOMPUTE_GROUPS)}", group=MEMORY
    )
    recompute_blocks: int | None = option(
        int, None, "recompute so only in the first so many blocks; all if not given", group=MEMORY, rule=POSITIVE
    )
    memory_budget: str | None = option(
        str,
        None,
        "choose the cheapest recomputation whose peak fits: 4GB, 512MiB; instead of checkpoint-every and recompute",
        group=MEMORY,
    )
    activation_offload: bool = option(
        bool, False, "keep what blocks keep for backward in host memory meanwhile", group=MEMORY
    )
    memory_timeline: str | None = option(
        str, None, "write live bytes by kind over the first step here, as .json and .png", group=MEMORY
    )
    fused_update: bool = option(
        bool,
        False,
        "update each weight once its gradient is complete, and free that; needs --max-norm 0 and --accum-steps 1",
        group=MEMORY,
    )
    flush_interval: int = option(
        int, 0, "blocks from one submit to the next; 0 is once a pass", group=MEMORY, rule=NOT_NEGATIVE
    )
    loss_chunk_bytes: int = option(
        int,
        128 * 2**20,
        "logits made at a time, forward and backward; 0 is all at once; other sums, so other bits",
        group=MEMORY,
        rule=NOT_NEGATIVE,
    )

    # -- run ---------------------------------------------------------------------------------------------------------
    engine: str = option(str, "vulkan", "what computes", group=RUN, choices=("vulkan", "cpu"))
    device: str | None = option(str, None, "Vulkan device: index, name or UUID; the best one if not given", group=RUN)
    log_interval: int = option(int, 10, "steps from one line of progress to the next", group=RUN, rule=POSITIVE)
    log_file: str | None = option(str, None, "write one JSON line a step here; folders are made", group=RUN)
    eval_interval: int = option(
        int, 0, "steps from one held-out loss to the next; 0 is at the end only", group=RUN, rule=NOT_NEGATIVE
    )
    save: str | None = option(str, None, "folder for saves, made where there is none", group=RUN)
    save_interval: int = option(
        int, 0, "steps from one save to the next; 0 is at the end only", group=RUN, rule=NOT_NEGATIVE
    )
    keep: int = option(int, 0, "newest saves to keep; 0 is all", group=RUN, rule=NOT_NEGATIVE)
    resume: str | None = option(
        str,
        None,
        "go on from a folder of saves or from one save in it; alone: from the --save folder",
        group=RUN,
        bare="",
    )
    sample: int = option(int, 0, "tokens of text to generate at the end", group=RUN, rule=NOT_NEGATIVE)
    prompt: str = option(str, "", "text that the sample goes on from", group=RUN)
    config: str | None = option(str, None, "TOML or JSON file with the same names; the command line wins", group=RUN)


def check_config(config: RunConfig) -> None:
    """Check how the options go together. Raises BadInputError naming the options that do not."""
    d_model, heads = config.d_model, config.num_heads
    kv_heads = config.num_kv_heads or heads
    if d_model % heads:
        near = nearest_divisor(d_model, heads)
        hint = "give a divisor" if near is None else f"the nearest that does is {near}"
        raise BadInputError(f"--num-heads {heads} does not divide --d-model {d_model}: {hint}")
    if heads % kv_heads:
        raise BadInputError(
            f"--num-kv-heads {kv_heads} does not divide --num-heads {heads}: several query heads share one"
        )
    if config.positions == "rope" and (d_model // heads) % 2:
        raise BadInputError(
            f"head_dim {d_model // heads} (--d-model {d_model} / --num-heads {heads}) is odd: rotary positions turn "
            f"pairs; choose an even head_dim or --positions learned or alibi"
        )
    if config.min_lr > config.lr:
        raise BadInputError(f"--min-lr {config.min_lr:g} is more than --lr {config.lr:g}")
    tokens_a_step = config.batch_size * config.accum_steps * config.seq_len
    if tokens_a_step > MAX_TOKENS_A_STEP:
        raise BadInputError(
            f"--batch-size {config.batch_size} x --accum-steps {config.accum_steps} x --seq-len {config.seq_len} are "
            f"{tokens_a_step:,} tokens a step: more than {MAX_TOKENS_A_STEP:,} are not supported"
        )
    if config.fused_update and config.max_norm:
        raise BadInputError(
            f"--fused-update cannot clip to the global norm (--max-norm {config.max_norm:g}): the norm is known only "
            f"when all gradients are there, and each is applied and freed before the next is made; add --max-norm 0"
        )
    if config.fused_update and config.accum_steps > 1:
        raise BadInputError(
            f"--fused-update cannot accumulate (--accum-steps {config.accum_steps}): gradients are complete only in "
            f"the last micro-batch, so all would be alive between two; use --accum-steps 1 and a larger --batch-size"
        )
    unknown = sorted(set(recompute_groups(config)) - set(RECOMPUTE_GROUPS))
    if unknown:
        raise BadInputError(f"--recompute {', '.join(unknown)}: choose from {', '.join(RECOMPUTE_GROUPS)}")
    if config.memory_budget is not None:
        parse_bytes(config.memory_budget)
        if config.checkpoint_every or config.recompute:
            raise BadInputError(
                "--memory-budget chooses the recomputation itself: leave out --checkpoint-every and --recompute"
            )
    if config.recompute_blocks is not None and not config.recompute:
        raise BadInputError("--recompute-blocks needs --recompute: what should those blocks recompute?")
    if config.memory_timeline is not None and config.engine != "vulkan":
        raise BadInputError("--memory-timeline shows the pools of a Vulkan device: it needs --engine vulkan")
    if config.keep and not (config.save or config.resume):
        raise BadInputError("--keep needs --save")
    if config.save_interval and not (config.save or config.resume):
        raise BadInputError("--save-interval needs --save: where should the saves go?")
    if config.tokenizer == "bpe" and config.vocab_size < 256:
        raise BadInputError(
            f"--vocab-size {config.vocab_size}: a byte-level BPE has at least 256 tokens, one for each byte"
        )


def nearest_divisor(number: int, wish: int, search: int = 10_000) -> int | None:
    """The divisor of number that is nearest to wish, the lower of two; None when none is within `search` of it."""
    if wish >= number:
        return number
    candidates = (n for distance in range(search + 1) for n in (wish - distance, wish + distance))
    return next((n for n in candidates if n > 0 and number % n == 0), None)


def recompute_groups(config: RunConfig) -> list[str]:
    """The names in --recompute."""
    return [name.strip() for name in config.recompute.split(",") if name.strip()]


# What a resumed run may change: nothing that enters the arithmetic of the steps before max_steps.
FREE_ON_RESUME = {
    *("recompute_blocks", "memory_budget", "activation_offload", "memory_timeline"),
    *("inputs", "glob", "epochs", "max_steps", "checkpoint_every", "recompute", "flush_interval", "engine", "device"),
    "fused_update",
    *(
        "log_interval",
        "log_file",
        "eval_interval",
        "save",
        "save_interval",
        "keep",
        "resume",
        "sample",
        "prompt",
        "config",
    ),
}


def resumed_config(config: RunConfig, given: set[str], saved: Mapping[str, Any]) -> RunConfig:
    """The saved run's options with those given now that may change.

    Raises BadInputError when an option was given that would make it another run, or the saved options are not ours.
    """
    names = {field.name for field in dataclasses.fields(RunConfig)}
    if set(saved) - names:
        raise BadInputError(f"the save has options unknown here: {', '.join(sorted(set(saved) - names))}")
    result = RunConfig(**saved)
    result.memory_timeline = None  # it was of that run
    if "memory_budget" in given:  # the newest word on recomputation counts
        result.checkpoint_every, result.recompute, result.recompute_blocks = 0, "", None
    elif given & {"checkpoint_every", "recompute"}:
        result.memory_budget = None
        if "recompute" in given:
            result.recompute_blocks = None
    for name in sorted(given):
        value = getattr(config, name)
        if name not in FREE_ON_RESUME and value != getattr(result, name):
            raise BadInputError(
                f"cannot resume with {flag(name)} {value}: the save was made with {getattr(result, name)}; "
                f"leave the option out, or start a new run"
            )
        setattr(result, name, value)
    result.resume = config.resume
    check_values(result)
    check_config(result)
    return result
