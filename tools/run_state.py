"""What state.json of a save holds beside the step: all that a run needs to go on to the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..engine.errors import BadInputError
from ..nn.schedules import Schedule
from .options import LARGEST_FLOAT32, check_values, shown, typed_value
from .run_config import RunConfig, check_config
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
        """Read back; the options are checked as those of a command line are.

        Raises BadInputError, naming the file and the field, when a value is missing or makes no sense.
        """
        try:
            state = cls(**{name: value for name, value in save.state.items() if name not in ("format", "step")})
            _check_options(state.config)
            _check_schedule(state.schedule, state.make_schedule)
            for name, most in _MOST.items():
                value = getattr(state, name)
                if type(value) is not int or not 0 <= value <= most:
                    raise ValueError(f"{name} is {shown(value)}, it must be a whole number from 0 to {most:,}")
            for name in ("fingerprint", "tokenizer_kind", "engine"):
                if not isinstance(getattr(state, name), str):
                    raise ValueError(f"{name} is {shown(getattr(state, name))}, it must be a text")
            if not state.index < state.num_windows:
                raise ValueError(f"index {state.index} of num_windows {state.num_windows}")
            if state.num_steps < save.step:
                raise ValueError(f"step {save.step} of num_steps {state.num_steps}")
        except (TypeError, ValueError) as error:  # BadInputError is a ValueError
            raise BadInputError(f"the save {save.folder} is damaged: state.json: {error}") from error
        return state


# The largest value of each whole number beside the options.
_MOST = {
    **dict.fromkeys(("num_steps", "seed", "epoch", "index"), 2**63 - 1),
    "num_windows": 2**40,
    "vocab_size": 2**32 - 1,
}


def _check_options(values: Any) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"config is {shown(values)}, it must hold names and values")
    known = {field.name: field for field in dataclasses.fields(RunConfig)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"config has options unknown here: {shown(', '.join(unknown))}")
    config = RunConfig(**{name: typed_value(known[name], value) for name, value in values.items()})
    check_values(config)
    check_config(config)


def _check_schedule(values: Any, make: Callable[[], Schedule]) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"schedule is {shown(values)}, it must hold names and values")
    for name, value in values.items():
        if name == "kind":
            fits = isinstance(value, str)
        elif name in ("peak", "floor"):
            fits = type(value) in (int, float) and 0 <= value <= LARGEST_FLOAT32
        else:
            fits = type(value) is int and 0 <= value < 2**63
        if not fits:
            raise ValueError(f"schedule: {name} is {shown(value)}")
    make()
