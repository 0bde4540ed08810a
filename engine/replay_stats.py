"""What became of training steps: recorded, captured, replayed, and why not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class ReplayStats:
    """What became of the training steps of an engine.

    recorded: op by op. captured: of those, kept to be submitted again. replayed: without any op. dropped: reason ->
    captures given up. not_captured: reason -> recorded steps that could not be looked at for capture.
    """

    recorded: int = 0
    captured: int = 0
    replayed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    not_captured: Counter[str] = field(default_factory=Counter)
