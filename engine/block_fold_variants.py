"""The family of a block fold's kernels on a device, and which of it a call takes where nothing was measured.

A variant is a tile: how many held rows a lane keeps in registers while the streamed ones pass by. It changes time and
nothing else. The block of streamed rows and the lanes that share its loads are the accumulation order, a function of
head_dim and device alone (engine/block_fold_glsl.py); nothing here varies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .block_fold_glsl import Tile
from .capabilities import Capabilities

ROWS = (4, 2, 1)  # held rows a lane
# Rows a lane -> most registers: rows a lane, times rows it keeps for each, times head_dim. Wider tiles spill more than
# they save loads, and compile for seconds, on lavapipe 22.3 ten times as long as on 25. Measured at head_dim 16 to 128.
_REGISTERS = {4: 768, 2: 640}
_REGISTERS_OLD = {4: 512, 2: 640}
_REGISTERS_SWIFTSHADER = {4: 768, 2: 512}  # two rows of 128 save a fifth of the time, and compile for 8 s a kernel
# Up to this head_dim SwiftShader takes one row a lane: two save 0.15 to 0.25 of the time and compile thrice as long.
_ONE_ROW_SWIFTSHADER = 16


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
        return f"{self.fold}_{self.head_dim}_{self.tile.name}{self.suffix}"


def device_tile(device: Capabilities, rows: int) -> Tile:
    """The tile of so many rows a lane on a device. The width of loads is up to a call (ops/block_fold_dispatch.py)."""
    return Tile(min(device.subgroup_size, 8), rows, "written" if device.driver == "SwiftShader" else "unrolled")


def family_rows(device: Capabilities, head_dim: int, kept: int) -> tuple[int, ...]:
    """Rows a lane of a family's tiles, the widest first. kept: `rows_in_registers` of the fold."""
    most = _REGISTERS if device.driver == "llvmpipe" and device.driver_major >= 24 else _REGISTERS_OLD
    if device.driver == "SwiftShader":
        most = _REGISTERS_SWIFTSHADER
    return tuple(rows for rows in ROWS if rows == 1 or rows * kept * head_dim <= most[rows])


def tile_variants(
    device: Capabilities, fold: str, head_dim: int, suffix: str = "", kept: int = 4
) -> tuple[TileVariant, ...]:
    """The family, widest first; the last is the base variant the others are checked by."""
    tiles = [device_tile(device, rows) for rows in family_rows(device, head_dim, kept)]
    return tuple(TileVariant(fold, head_dim, tile, suffix) for tile in tiles)


def _fill(device: Capabilities, rows: int, num_held: int) -> bool:
    """Whether so many held rows fill more than half of a tile of so many rows a lane."""
    return rows == 1 or num_held > device.subgroup_size * rows // 2


def worth_measuring(device: Capabilities, variants: Sequence[TileVariant], num_held: int) -> list[TileVariant]:
    """Those that would not stand mostly empty."""
    return [variant for variant in variants if _fill(device, variant.tile.rows, num_held)]


def estimated_rows(device: Capabilities, head_dim: int, num_held: int, kept: int = 4) -> tuple[int, str]:
    """Rows a lane where nothing was measured, and why.

    Wide tiles on CPU drivers, where loads are dear, unless they would stand mostly empty. GPUs hide loads behind other
    subgroups and have no registers to spare: one row a lane.
    """
    if not device.is_cpu:
        return 1, "not measured: a GPU hides loads"
    if device.driver == "SwiftShader" and head_dim <= _ONE_ROW_SWIFTSHADER:
        return 1, f"not measured: one row is the fastest on SwiftShader at head_dim {head_dim}"
    rows = family_rows(device, head_dim, kept)[0]
    if not _fill(device, rows, num_held):
        return 1, f"not measured: {num_held} rows would leave most of a wider tile empty"
    return rows, f"not measured: the widest tile that pays on CPU drivers at head_dim {head_dim}"
