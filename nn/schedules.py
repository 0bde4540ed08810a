"""Learning rate as a function of the step. A schedule is plain data: it is saved with a run, horizon included."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..engine.errors import BadInputError

KINDS = ("constant", "cosine")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to `peak` over `warmup_steps`, then constant, or a half cosine down to `floor` at `total_steps`.

    Step counts from 0. During warm-up the rate is peak * (step + 1) / warmup_steps; the cosine's progress is
    (step - warmup_steps) / (total_steps - warmup_steps - 1), and beyond it the rate stays at the floor
    (Loshchilov & Hutter 2017, "SGDR", without restarts).

    Raises BadInputError for settings that make no sense.
    """

    kind: str
    peak: float
    warmup_steps: int = 0
    total_steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInputError(f"unknown learning-rate schedule {self.kind!r}: use one of {', '.join(KINDS)}")
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise BadInputError(f"learning rate {self.peak}: it must be finite and not negative")
        if self.warmup_steps < 0:
            raise BadInputError(f"warmup_steps is {self.warmup_steps}, it must not be negative")
        if self.kind == "cosine":
            if not 0 <= self.floor <= self.peak:
                raise BadInputError(f"the lowest learning rate {self.floor} must lie between 0 and {self.peak}")
            if self.total_steps <= self.warmup_steps:
                raise BadInputError(
                    f"a cosine schedule of {self.total_steps} steps has no room after {self.warmup_steps} warm-up steps"
                )

    def __call__(self, step: int) -> float:
        """The learning rate of this step, in float64."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        span = self.total_steps - self.warmup_steps - 1
        past = step - self.warmup_steps
        progress = min(1.0, past / span) if span else float(past > 0)
        return self.floor + (self.peak - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a save; `Schedule(**values)` is the schedule again."""
        return asdict(self)


def constant(learning_rate: float, warmup_steps: int = 0) -> Schedule:
    """The same rate for ever, after a linear warm-up."""
    return Schedule("constant", learning_rate, warmup_steps)


def cosine(peak: float, total_steps: int, *, warmup_steps: int = 0, floor: float = 0.0) -> Schedule:
    """Warm-up, then a half cosine from peak to floor."""
    return Schedule("cosine", peak, warmup_steps, total_steps, floor)
