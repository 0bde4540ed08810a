"""The family of kernels by hand that loop: sums, sums of columns and of squares, updates of many tensors.

A piece of work belongs to one subgroup or one invocation, whose loop goes along it in one order: neither how many
pieces share a workgroup nor how many rounds of the loop are written out one after the other changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .capabilities import Capabilities

FACTORS = (4, 1)  # of the kernel's usual workgroup
TURNS = (4, 1)
_GROUPS_A_CPU = 2  # workgroups for each, at least: wider ones would leave some without work
_TURNS_PAY = 32  # rounds from which on four at a time do: what is left over goes one by one
_PAYS = 2**16  # elements from which on another variant than the base variant is worth its check, 0.05 to 0.1 s
_WIDE_PAYS = 2**20  # the same where it has wider workgroups and nothing else, which save a few per cent


class LoopVariant(NamedTuple):
    """One of the family. kernel: its name; factor: workgroups of so many usual ones; turns: rounds of its loop at a
    time, or where a workgroup loops along its part of a tensor, so many parts."""

    kernel: str
    factor: int
    turns: int

    @property
    def name(self) -> str:
        """As it is forced and logged, for example "4x1"."""
        return f"{self.factor}x{self.turns}"

    @property
    def barred_as(self) -> str:
        """The name of the variant's own kernel."""
        return f"{self.kernel}_{self.name}"


class LoopWork(NamedTuple):
    """What the choice looks at.

    kernel: its name; pieces: subgroups' or invocations' pieces of work; length: elements of a subgroup's, or fours of
    an invocation's. rounds: of the loop along a piece; elements: of all. a_group: pieces of the usual workgroup.
    factors, turns: what the kernel and the device have. longer: whether turns make a workgroup's part longer.
    """

    kernel: str
    pieces: int
    length: int
    rounds: int
    elements: int
    a_group: int
    factors: tuple[int, ...] = FACTORS
    turns: tuple[int, ...] = TURNS
    longer: bool = False

    @property
    def key(self) -> str:
        """Its name in a table."""
        return tuning_key(self.kernel, self.pieces, self.length)


def tuning_key(kernel: str, pieces: int, length: int) -> str:
    """How a call is called in a table."""
    return f"loop {kernel} {pieces}x{length}"


def variant_names() -> list[str]:
    """All names, the base variant's last."""
    return [variant.name for variant in loop_variants("", FACTORS, TURNS)]


def loop_variants(kernel: str, factors: Sequence[int], turns: Sequence[int]) -> tuple[LoopVariant, ...]:
    """The family of a kernel; the last is the base variant that the others are checked by."""
    return tuple(LoopVariant(kernel, factor, turn) for factor in factors for turn in turns)


def estimated(device: Capabilities, work: LoopWork, usable: Sequence[LoopVariant]) -> tuple[LoopVariant, str]:
    """The variant that is taken where nothing was measured, and why. GPUs: the usual workgroup, not measured for want
    of one."""
    if not device.is_cpu:
        return usable[-1], "not measured: the usual workgroup of a GPU"
    if work.elements < _PAYS:
        return usable[-1], f"not measured: {work.elements} elements are too few to check another one for"

    def fits(variant: LoopVariant) -> bool:
        if variant.turns > 1 and not work.longer and work.rounds < _TURNS_PAY:
            return False
        if variant.turns == 1 < variant.factor and work.elements < _WIDE_PAYS:
            return False
        at_once = variant.factor * (variant.turns if work.longer else 1)
        return at_once == 1 or at_once * work.a_group * _GROUPS_A_CPU * device.parallel <= work.pieces

    best = max(filter(fits, usable), key=lambda v: (v.turns, v.factor), default=usable[-1])
    return best, "not measured: the fewest rounds and workgroups that keep the cores of a CPU busy"


def worth_measuring(work: LoopWork, usable: Sequence[LoopVariant]) -> list[LoopVariant]:
    """Those that do not stand mostly empty."""
    return [v for v in usable if v.factor == 1 or v.factor * work.a_group <= 2 * work.pieces]
