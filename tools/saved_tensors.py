"""What each op of a forward leaves behind for backward: newly held bytes, and what is only a reference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from ..engine.allocation_ledger import ACTIVATIONS, AllocationLedger

_BLOCK = re.compile(r"^blocks\.(\d+)\.|^segment\.(\d+)")


@dataclass
class SavedRow:
    """One op. number: in the order of the step, from 0. outputs: shapes.

    new: label -> bytes, rounded as the pool does, of what it made and a layer keeps. references: kept tensors that it
    read, or other names of what it made: the same bytes, counted where they were made.
    """

    number: int
    op: str
    outputs: list[tuple[int, ...]]
    new: dict[str, int] = field(default_factory=dict)
    references: list[str] = field(default_factory=list)

    @property
    def new_bytes(self) -> int:
        """Bytes held from this op on."""
        return sum(self.new.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        shapes = [list(shape) for shape in self.outputs]
        return {
            "number": self.number,
            "op": self.op,
            "outputs": shapes,
            "new_bytes": self.new_bytes,
            "new": self.new,
            "references": self.references,
        }


def saved_rows(ledger: AllocationLedger) -> list[SavedRow]:
    """The ops of the first micro-batch's forward, those that have nothing to do with kept tensors left out.

    The sum of `new_bytes` is what is kept at the end of that forward (with activation offload: what was, in turn). What
    was uploaded or made empty for an op, such as tokens, counts as made by it. A tensor that lives anyway (a table) is
    a reference.
    """
    numbers = [i for i, record in enumerate(ledger.ops) if record.phase]
    forward = list(itertools.takewhile(lambda i: ledger.ops[i].phase == "forward", numbers))
    rows = {i: SavedRow(i - numbers[0], ledger.ops[i].op, ledger.ops[i].outputs) for i in forward}
    for allocation in ledger.allocations:
        row = rows.get(allocation.op)
        if row is not None and allocation.phase == "forward" and allocation.kind == ACTIVATIONS and allocation.label:
            row.new[allocation.label] = row.new.get(allocation.label, 0) + allocation.nbytes
            row.references += allocation.aliases
    for i, row in rows.items():
        for allocation in ledger.ops[i].read:
            names = [allocation.label] if allocation.kind == ACTIVATIONS else allocation.aliases
            row.references += [name for name in names if name not in row.new and name not in row.references]
    return [row for row in rows.values() if row.new or row.references]


def print_saved(console: Console, ledger: AllocationLedger) -> None:
    """As a table; of runs of blocks that keep the same, the first stands for all."""
    rows = saved_rows(ledger)
    console.print("\nsaved tensors, op by op", markup=False, highlight=False, style="bold")
    table = Table()
    for heading, justify in (("op", "left"), ("outputs", "left"), ("newly held", "left"), ("bytes", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    table.add_column("references")
    for group, blocks in _alike(rows):
        for row in group:
            shapes = " ".join("x".join(map(str, shape)) for shape in row.outputs)
            nbytes = f"{row.new_bytes:,}" if row.new else ""
            table.add_row(f"{row.number} {row.op}", shapes, "\n".join(row.new), nbytes, "\n".join(row.references))
        if blocks > 1:
            table.add_row(f"and as much in each of the next {blocks - 1} blocks")
        table.add_section()
    table.add_row("all", "", "", f"{sum(row.new_bytes for row in rows):,}", "")
    console.print(table)


def _block_of(row: SavedRow) -> int:
    """The lowest number of a block among what a row names; -1 for none."""
    found = (_BLOCK.match(name) for name in (*row.new, *row.references))
    return min((int(match[1] or match[2]) for match in found if match), default=-1)


def _signature(row: SavedRow, block: int) -> tuple[Any, ...]:
    """The row with blocks counted from its own, so that rows of alike blocks are equal."""

    def relative(name: str) -> str:
        match = _BLOCK.match(name)
        return name if match is None else f"{int(match[1] or match[2]) - block}:{name[match.end() :]}"

    new = tuple((relative(name), nbytes) for name, nbytes in row.new.items())
    return row.op, tuple(row.outputs), new, tuple(map(relative, row.references))


def _alike(rows: list[SavedRow]) -> Iterator[tuple[list[SavedRow], int]]:
    """(rows of one block, number of blocks in a row that keep the same)."""
    groups = [(block, list(group)) for block, group in itertools.groupby(rows, _block_of)]
    keyed = [(tuple(_signature(row, block) for row in group), group) for block, group in groups]
    for _, same in itertools.groupby(keyed, key=lambda pair: pair[0]):
        members = [group for _, group in same]
        yield members[0], len(members)
