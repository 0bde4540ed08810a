"""The family of a map kernel: invocations a workgroup, and how often each of them goes on to the next piece.

A piece is one element, or with 16-byte loads four. Elements do not depend on each other: no variant changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .capabilities import Capabilities

SIZES = (256, 64)  # invocations a workgroup; every device takes 128
STEPS = (8, 4, 2, 1)  # pieces an invocation
_GROUPS_A_CPU = 2  # workgroups for each, at least: wider ones would leave some without work


class MapVariant(NamedTuple):
    """One of the family. kernel: its name."""

    kernel: str
    size: int
    steps: int

    @property
    def name(self) -> str:
        """As it is forced and logged, for example "256x4"."""
        return f"{self.size}x{self.steps}"

    @property
    def barred_as(self) -> str:
        """The name of the variant's own kernel."""
        return f"{self.kernel}_{self.name}"

    @property
    def pieces(self) -> int:
        """Pieces a workgroup."""
        return self.size * self.steps


def map_variants(kernel: str, largest: int) -> tuple[MapVariant, ...]:
    """The family, widest first; the last is the base variant that the others are checked by. largest: invocations a
    workgroup that the device allows."""
    return tuple(MapVariant(kernel, size, steps) for size in SIZES for steps in STEPS if size <= largest)


def estimated(device: Capabilities, num_pieces: int, usable: Sequence[MapVariant]) -> tuple[MapVariant, str]:
    """The variant that is taken where nothing was measured, and why.

    On CPU drivers a workgroup and a subgroup cost time of their own: eight pieces, four on lavapipe 22.3, which reads
    more slowly what lies further apart, as long as all cores have work. On GPUs 256 invocations, one piece each: not
    measured for want of one.
    """
    if not device.is_cpu:
        best = next((v for v in usable if v.name == "256x1"), usable[-1])
        return best, "not measured: the usual workgroup of a GPU"
    most = 4 if device.driver == "llvmpipe" and device.driver_major < 24 else 8
    enough = [v for v in usable if v.steps <= most and v.pieces * _GROUPS_A_CPU * device.parallel <= num_pieces]
    if not enough:
        return usable[-1], f"not measured: {num_pieces} pieces would not keep the cores busy in wider ones"
    best = max(enough, key=lambda v: (v.pieces, v.steps))
    return best, "not measured: the widest that keeps the cores of a CPU busy"


def worth_measuring(num_pieces: int, usable: Sequence[MapVariant]) -> list[MapVariant]:
    """Those that do not stand mostly empty."""
    return [v for v in usable if v == usable[-1] or v.pieces <= 2 * num_pieces]
