"""What state.json of a save holds beside the step: all that a run needs to go on to the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.errors import BadInputError
from ..nn.schedules import Schedule
from .run_config import RunConfig
from .saves import Save
from .text_data import ShuffledWindows


@dataclass(frozen=True)
class RunState:
    """config: the options. num_steps: of the whole run. schedule: with its horizon. seed, epoch, index: of the windows'
    generator and its cursor. fingerprint: of the tokens. tokenizer_kind, vocab_size, engine: for people to read.
    """

    config: Mapping[str, Any]
    num_steps: int
    schedule: Mapping[str, Any]
    seed: int
    epoch: int
    index: int
    num_windows: int
    fingerprint: str
    tokenizer_kind: str
    vocab_size: int
    engine: str

    def make_schedule(self) -> Schedule:
        """The learning-rate schedule of the run."""
        return Schedule(**self.schedule)

    def make_windows(self) -> ShuffledWindows:
        """The stream of windows, where it was."""
        return ShuffledWindows(self.num_windows, self.seed, self.epoch, self.index)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for state.json."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, save: Save) -> RunState:
        """Read back and checked. Raises BadInputError when a value is missing or makes no sense."""
        try:
            state = cls(**{name: value for name, value in save.state.items() if name not in ("format", "step")})
            state.make_schedule()
            defaults = dataclasses.asdict(RunConfig())
            RunConfig(**state.config)
            for name, value in state.config.items():
                usual = defaults[name]
                if isinstance(usual, int | float) and not isinstance(value, int | float):
                    raise ValueError(f"{name} is {value!r}")
            for name in ("num_steps", "seed", "epoch", "index", "num_windows"):
                if type(getattr(state, name)) is not int or getattr(state, name) < 0:
                    raise ValueError(f"{name} is {getattr(state, name)!r}")
            if type(save.step) is not int or save.step < 0:
                raise ValueError(f"step is {save.step!r}")
            if not state.index < state.num_windows:
                raise ValueError(f"index {state.index} of {state.num_windows} windows")
        except (TypeError, ValueError) as error:
            raise BadInputError(f"the save {save.folder} is damaged: state.json: {error}") from error
        return state
