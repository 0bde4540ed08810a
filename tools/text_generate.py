"""text_generate: text from a save of text_train."""

# ruff: noqa: RUF009 (option is dataclasses.field)

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import BadInputError
from ..engine.plan_engine import PlanEngine
from ..nn.sampling import Sampler
from .console import run_program
from .generation import generate_bytes
from .model_setup import make_engine, make_model
from .options import NOT_NEGATIVE, POSITIVE, option, parse_options
from .run_config import RunConfig
from .run_state import RunState
from .saves import open_save

DESCRIPTION = "Generate text with a model that text_train saved: text_generate run --prompt 'Once'"


@dataclass
class GenerateConfig:
    """Options of text_generate."""

    saves: list[str] = option(str, None, "a folder of saves (its latest is taken), or one save in it", repeated=True)
    prompt: str = option(str, "", "text to go on from")
    length: int = option(int, 256, "tokens to generate", rule=POSITIVE)
    temperature: float = option(float, 0.8, "0 takes the most likely token each time", rule=NOT_NEGATIVE)
    top_k: int = option(int, 0, "draw among the k most likely tokens; 0 is off", rule=NOT_NEGATIVE)
    top_p: float = option(float, 1.0, "draw among the fewest tokens whose probabilities reach this; 1 is off")
    seed: int = option(int, 0, "of the draws", rule=NOT_NEGATIVE)
    engine: str = option(str, "vulkan", "what computes", choices=("vulkan", "cpu"))
    device: str | None = option(str, None, "Vulkan device: index, name or UUID; the best one if not given")


def _program(argv: Sequence[str]) -> int:
    config, _ = parse_options(GenerateConfig, argv, "text_generate", DESCRIPTION)
    if len(config.saves) != 1:
        raise BadInputError(f"name one save, not {len(config.saves)} (see --help)")
    save = open_save(Path(config.saves[0]))
    tokenizer, weights = save.tokenizer(), save.model()
    run_config = RunConfig(**RunState.of(save).config)
    run_config.checkpoint_every = run_config.flush_interval = 0
    run_config.activation_offload = False
    sampler = Sampler(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        vocab_size=tokenizer.vocab_size,
    )
    make_model(PlanEngine(), run_config, tokenizer.vocab_size, weights)  # names and shapes, before the device opens
    with make_engine(config.engine, config.device) as engine:
        model = make_model(engine, run_config, tokenizer.vocab_size, weights)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        sys.stdout.write(config.prompt)
        prompt = config.prompt.encode("utf-8", errors="surrogateescape")
        for piece in generate_bytes(model, tokenizer, prompt, config.length, sampler):
            sys.stdout.write(decoder.decode(piece))
            sys.stdout.flush()
        sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The program: runs on the arguments (the command line's when None), prints errors, returns the exit code."""
    return run_program("text_generate", _program, argv)


if __name__ == "__main__":
    sys.exit(main())
