"""The family of a fold over rows: rows a workgroup, and whether a row is kept in registers.

A subgroup has a row to itself, and the order in which a lane goes along it is a function of columns and subgroup size
(engine/fold.py): no variant changes a bit. Where a row is kept, its loops are written out for its number of rounds,
what more than one loop reads is loaded once, and all rounds but the last go without a test for the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from .capabilities import Capabilities
from .expr_walk import expanded, topological
from .fold import FoldSpec

ROWS = (16, 1, 4)  # rows a workgroup; the last is the base variant's
KEPT_ROWS = (16, 4)  # of those that keep them
MAX_ROUNDS = 32  # of a row that is kept: longer code takes seconds to compile
_PAYS = 2**14  # elements from which on rows are kept unmeasured: such a kernel is compiled at first use
_GROUPS_A_CPU = 2  # workgroups for each, at least


class RowVariant(NamedTuple):
    """One of the family. kernel: its name; rows: a workgroup; rounds: of a kept row, 0 where none is kept."""

    kernel: str
    rows: int
    rounds: int = 0

    @property
    def name(self) -> str:
        """As it is forced and logged, for example "rows16" or "kept4"."""
        return f"{'kept' if self.rounds else 'rows'}{self.rows}"

    @property
    def barred_as(self) -> str:
        """The name of the variant's own kernel."""
        return f"{self.kernel}_{self.name}" + f"_of{self.rounds}" * bool(self.rounds)


def rounds_of(cols: int, subgroup_size: int) -> int:
    """How often a subgroup goes on along a row."""
    return -(-cols // (4 * subgroup_size))


def variant_names() -> list[str]:
    """All names, the base variant's last."""
    return [f"kept{rows}" for rows in KEPT_ROWS] + [f"rows{rows}" for rows in ROWS]


def row_variants(device: Capabilities, kernel: str, cols: int, largest: int) -> tuple[RowVariant, ...]:
    """The family for rows of so many columns; the last is the base variant that the others are checked by.

    largest: invocations a workgroup that the device allows.
    """
    rounds = rounds_of(cols, device.subgroup_size)
    most = max(ROWS[-1], largest // device.subgroup_size)
    kept = [RowVariant(kernel, rows, rounds) for rows in KEPT_ROWS if rounds <= MAX_ROUNDS and rows <= most]
    return (*kept, *(RowVariant(kernel, rows) for rows in ROWS if rows <= most))


@cache
def takes_powers(spec: FoldSpec) -> bool:
    """Whether a fold works out exponentials or logarithms for each element."""
    roots = [*spec.elements.values()]
    for walk in spec.walks:
        roots += [part for s in walk.states for part in (s.contribution, s.aligned) if part is not None]
    return any(node.op.startswith(("exp", "log", "tanh")) for node in topological(expanded(roots)))


def _keeps(device: Capabilities, spec: FoldSpec, rounds: int) -> bool:
    """Whether keeping a row of so many rounds was faster, on the drivers measured. On lavapipe 22.3 more than eight do
    not fit its registers; SwiftShader's code for exponentials grows too long when it is written out."""
    if device.driver == "llvmpipe":
        return rounds <= (8 if device.driver_major < 24 else MAX_ROUNDS)
    return rounds <= (4 if takes_powers(spec) else 16)


def estimated(
    device: Capabilities, spec: FoldSpec, rows: int, cols: int, usable: Sequence[RowVariant]
) -> tuple[RowVariant, str]:
    """The variant that is taken where nothing was measured, and why. GPUs: the base variant, not measured for want of
    one."""
    if not device.is_cpu:
        return usable[-1], "not measured: four rows a workgroup"
    fits = [v for v in usable if v.rows * _GROUPS_A_CPU * device.parallel <= rows] or [usable[-1]]
    kept = [v for v in fits if v.rounds and rows * cols >= _PAYS and _keeps(device, spec, v.rounds)]
    if kept:
        return kept[0], f"not measured: rows of {cols} fit the registers of a CPU driver"
    best = max((v for v in fits if not v.rounds), key=lambda v: v.rows, default=usable[-1])
    return best, "not measured: the most rows a workgroup that keep the cores of a CPU busy"


def worth_measuring(rows: int, usable: Iterable[RowVariant]) -> list[RowVariant]:
    """Those that do not stand mostly empty."""
    return [v for v in usable if v.rows <= max(2 * rows, ROWS[-1])]
