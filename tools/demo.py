"""The demo: train on the documentation that every Python carries, and show that the model learned.

`./run demo` runs it. No download: the text is `pydoc_data.topics`, a tenth of it is held out, and a bigram model of the
same training part is the yardstick.
"""

from __future__ import annotations

import itertools
import os
import pydoc_data.topics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.errors import BadInputError
from .bigram import bigram_loss
from .console import run_program
from .options import NOT_NEGATIVE, POSITIVE, option, parse_options
from .run_config import RunConfig
from .saves import lock_save_folder, step_folders
from .text_data import split_held_out
from .text_train import train

HELD_OUT = 0.1
MARGIN = 0.3  # nats a byte that the model has to be better than the bigrams
GOAL = 2.0  # nats a byte


@dataclass
class DemoConfig:
    """Options of the demo."""

    folder: str = option(
        str,
        "demo-run",
        "where text, saves and log go; earlier saves in it stay, the new ones then go into saves-2, saves-3, ...",
    )
    steps: int = option(int, 800, "training steps; fewer than 800 may not reach the goal", rule=POSITIVE)
    engine: str = option(str, "vulkan", "what computes", choices=("vulkan", "cpu"))
    device: str | None = option(str, None, "Vulkan device: index, name or UUID; the best one if not given")
    seed: int = option(int, 0, "of weights and order", rule=NOT_NEGATIVE)


def demo_text() -> str:
    """The topics of Python's own documentation, in the order of their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def _program(argv: Sequence[str]) -> int:
    """Run the demo; returns 0 when the model reached the goal, 1 when it did not."""
    options, _ = parse_options(DemoConfig, argv, "demo", "Train a small transformer on Python's own documentation.")
    folder = Path(options.folder)
    text_file = _write_text(folder)
    saves = _free_saves(folder)
    config = RunConfig(
        inputs=[str(text_file)],
        held_out=HELD_OUT,
        seq_len=64,
        batch_size=8,
        d_model=64,
        num_layers=2,
        num_heads=4,
        max_steps=options.steps,
        lr=3e-3,
        min_lr=3e-4,
        warmup_steps=min(40, options.steps // 2),
        seed=options.seed,
        engine=options.engine,
        device=options.device,
        log_interval=50,
        eval_interval=200,
        save=str(saves),
        save_interval=400,
        keep=2,
        sample=400,
        prompt="The ",
    )
    tokens = np.frombuffer(text_file.read_bytes(), np.uint8)
    num_train = split_held_out(len(tokens), config.seq_len, HELD_OUT)
    print(f"training on {num_train:,} bytes of Python's documentation, {len(tokens) - num_train:,} are held out")
    outcome = train(config, {"inputs", "save"})
    bigram = bigram_loss(tokens[:num_train], tokens[num_train:])
    print(f"bigram model, same text: {bigram:.3f} nats/byte")
    print(f"files: {folder.resolve()} (text.txt, {saves.name}/, {saves.name}/log.jsonl)")
    programs = os.path.relpath(Path(sys.executable).parent) if os.name != "nt" else Path(sys.executable).parent
    print(f"resume: {programs}/text_train --resume {saves} --max-steps {2 * options.steps}")
    print(f"more text: {programs}/text_generate {saves} --prompt 'The '")
    if outcome.held_out_loss is None:  # stopped by a signal
        return 0
    if outcome.held_out_loss < min(GOAL, bigram - MARGIN):
        return 0
    print(f"the model did not reach {min(GOAL, bigram - MARGIN):.3f} nats/byte", file=sys.stderr)
    return 1


def _write_text(folder: Path) -> Path:
    """Write the text, unless it is there already. Raises BadInputError when that cannot be done."""
    text_file, text = folder / "text.txt", demo_text().encode("utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not text_file.is_file() or text_file.read_bytes() != text:
            text_file.write_bytes(text)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise BadInputError(f"cannot write into {folder}: {getattr(error, 'strerror', None) or error}") from error
    return text_file


def _free_saves(folder: Path) -> Path:
    """The first of saves, saves-2, saves-3, ... that has no save of an earlier run and is not a living run's."""
    for number in itertools.count(1):
        saves = folder / ("saves" if number == 1 else f"saves-{number}")
        if not saves.exists():
            break
        try:
            if saves.is_dir() and not step_folders(saves):
                with lock_save_folder(saves):
                    break
        except BadInputError:  # locked by the run that saves there, or not ours to look into
            continue
    return saves


def main(argv: Sequence[str] | None = None) -> int:
    """The program: runs on the arguments (the command line's when None), prints errors, returns the exit code."""
    return run_program("demo", _program, argv)


if __name__ == "__main__":
    sys.exit(main())
