"""The options of text_train in programs that run a step of it and keep nothing: gpu_profile, vkfold tune."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

from ..engine.errors import BadInputError
from .options import flag, parse_options
from .presets import preset
from .run_config import RunConfig
from .tokenizers import load_tokenizer

C = TypeVar("C", bound=RunConfig)

# What only a whole run has. `inputs` are taken, so that a command line of text_train needs little change, and not read.
OF_A_RUN = (
    *("glob", "held_out", "stride", "epochs", "max_steps", "lr_schedule", "warmup_steps", "min_lr", "schedule_steps"),
    *("memory_timeline", "log_interval", "log_file", "eval_interval", "save", "save_interval", "keep", "resume"),
    *("sample", "prompt"),
)


def parse_step_options(cls: type[C], argv: Sequence[str], program: str, description: str) -> tuple[C, set[str]]:
    """As `parse_options`, a preset's options filled in.

    Raises BadInputError for wrong options and for those that would have no effect. A config file may have them: it is
    that of the run.
    """
    typed = {word.partition("=")[0] for word in argv}
    for name in OF_A_RUN:
        if flag(name) in typed:
            raise BadInputError(f"{flag(name)} has no effect in {program}, which does no whole run: leave it out")
    config, given = parse_options(cls, argv, program, description)
    if config.engine != "vulkan":
        raise BadInputError(f"{program} measures a Vulkan device: leave out --engine {config.engine}")
    return config, fill_preset(config, given)


def fill_preset(config: RunConfig, given: Collection[str]) -> set[str]:
    """Set what the preset says and `given` does not; returns the names of all that is given then.

    Raises BadInputError, with the nearest name, for a preset that is not there.
    """
    name = getattr(config, "preset", None)
    options = {} if name is None else preset(name)
    for key, value in options.items():
        if key not in given:
            setattr(config, key, value)
    return {*given, *options}


def vocab_size_of(config: RunConfig, given: Collection[str]) -> int:
    """Of the model that these options train: the size that was given, else the tokenizer's.

    Raises BadInputError for a tokenizer.json that cannot be read.
    """
    if "vocab_size" in given or config.tokenizer == "bpe":
        return config.vocab_size
    return 256 if config.tokenizer == "bytes" else load_tokenizer(Path(config.tokenizer)).vocab_size
