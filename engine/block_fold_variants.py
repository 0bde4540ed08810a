"""The family of a block fold's kernels on a device, and which of it a call takes where nothing was measured.

A variant is a tile: how many held rows a lane keeps in registers while the streamed ones pass by. It changes time and
nothing else. The block of streamed rows and the lanes that share its loads are the accumulation order, a function of
head_dim and device alone (engine/block_fold_glsl.py); nothing here varies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .block_fold_glsl import Tile
from .matmul_variants import Capabilities

ROWS = (8, 4, 2, 1)  # held rows a lane
# Rows times head_dim of the widest tile in registers. Wider ones spill more than they save loads, and compile for many
# seconds: four rows of 64 took 29 s on lavapipe 22.3 for forward and backward, and no less time to run than two.
_REGISTERS = 192


class TileVariant(NamedTuple):
    """A tile of a fold's kernel. fold: the fold's name; suffix: of the kernel's."""

    fold: str
    head_dim: int
    tile: Tile
    suffix: str = ""

    @property
    def name(self) -> str:
        """As it is forced and logged, for example "rows2"."""
        return f"rows{self.tile.rows}"

    @property
    def barred_as(self) -> str:
        """The kernel's name."""
        tile = self.tile
        return f"{self.fold}_{self.head_dim}_r{tile.rows}{'_rolled' * tile.rolled}{self.suffix}"


def device_tile(device: Capabilities, rows: int) -> Tile:
    """The tile of so many rows a lane on a device."""
    return Tile(min(device.subgroup_size, 8), rows, device.driver == "SwiftShader")


def family_rows(head_dim: int, rolled: bool) -> tuple[int, ...]:
    """Rows a lane of a family's tiles, the widest first. rolled: the tile lies in memory, whatever its size."""
    return tuple(rows for rows in ROWS if rolled or rows == 1 or (rows <= 4 and rows * head_dim <= _REGISTERS))


def tile_variants(device: Capabilities, fold: str, head_dim: int, suffix: str = "") -> tuple[TileVariant, ...]:
    """The family, widest first; the last is the base variant the others are checked by."""
    rolled = device_tile(device, 1).rolled
    tiles = [device_tile(device, rows) for rows in family_rows(head_dim, rolled)]
    return tuple(TileVariant(fold, head_dim, tile, suffix) for tile in tiles)


def _fill(device: Capabilities, rows: int, num_held: int) -> bool:
    """Whether so many held rows fill more than half of a tile of so many rows a lane."""
    return rows == 1 or num_held > device.subgroup_size * rows // 2


def worth_measuring(device: Capabilities, variants: Sequence[TileVariant], num_held: int) -> list[TileVariant]:
    """Those that would not stand mostly empty."""
    return [variant for variant in variants if _fill(device, variant.tile.rows, num_held)]


def most_rows(head_dim: int, rolled: bool) -> int:
    """Rows a lane of the tile that a CPU driver takes unmeasured."""
    if rolled:
        return 4
    return 4 if head_dim <= 16 else 2 if head_dim <= 96 else 1


def estimated_rows(device: Capabilities, head_dim: int, num_held: int) -> tuple[int, str]:
    """Rows a lane where nothing was measured, and why.

    Wide tiles on CPU drivers, where loads are dear, unless they would stand mostly empty. GPUs hide loads behind other
    subgroups and have no registers to spare: one row a lane.
    """
    if not device.is_cpu:
        return 1, "not measured: a GPU hides loads"
    rows = most_rows(head_dim, device_tile(device, 1).rolled)
    if not _fill(device, rows, num_held):
        return 1, f"not measured: {num_held} rows would leave most of a wider tile empty"
    return rows, f"not measured: the widest tile that pays on CPU drivers at head_dim {head_dim}"
