"""The tile of C that a whole workgroup computes from shared memory (shaders/matmul_shared.comp): its sizes."""

from __future__ import annotations

from typing import NamedTuple

from .physical_device import MatrixShape

_ROWS = 8  # of the sums that an invocation holds, without cooperative matrices
_SUMS = 64  # an invocation, in a workgroup of more than the least
_LEAST_INVOCATIONS = 128


class WorkgroupTile(NamedTuple):
    """tm x tn elements of C; depth: values of k staged at a time; matrix: fragments that the device multiplies."""

    tm: int
    tn: int
    depth: int
    matrix: MatrixShape | None = None

    @property
    def invocations(self) -> int:
        """Of the workgroup: 32 or 64 sums each."""
        return max(_LEAST_INVOCATIONS, self.tm * self.tn // _SUMS)

    @property
    def padding(self) -> int:
        """Elements behind a row in shared memory: 16 bytes, so that rows start in different banks and on 16 bytes."""
        return 4 if self.matrix is None else 8

    @property
    def sums(self) -> int:
        """Elements of C for each invocation."""
        return self.tm * self.tn // self.invocations

    def waves(self, subgroup_size: int) -> tuple[int, int]:
        """Subgroups along the rows and along the columns of a tile of matrices, each with as little to load as may be.

        Raises ValueError where fragments do not fill the tile.
        """
        assert self.matrix is not None
        total = self.invocations // subgroup_size
        grids = [(total // across, across) for across in range(1, total + 1) if total % across == 0]
        fitting = [
            (down, across)
            for down, across in grids
            if self.tm % (down * self.matrix.m) == 0 and self.tn % (across * self.matrix.n) == 0
        ]
        if not fitting or self.depth % self.matrix.k:
            raise ValueError(f"{self} does not divide into fragments for subgroups of {subgroup_size}")
        return min(fitting, key=lambda grid: self.tm // grid[0] + self.tn // grid[1])

    def shared_bytes(self, subgroup_size: int) -> int:
        """Of shared memory: both operands twice, and with matrices one fragment of sums for each subgroup."""
        staged = 2 * self.depth * (self.tm + self.tn + 2 * self.padding)
        if self.matrix is None:
            return 4 * staged
        return 2 * staged + 4 * self.invocations // subgroup_size * self.matrix.m * self.matrix.n

    def cost(self, subgroup_size: int) -> tuple[float, float]:
        """Values that an invocation reads of shared memory and of global memory for one k."""
        across: float
        if self.matrix is None:
            across = _ROWS + self.sums // _ROWS
        else:
            waves = self.waves(subgroup_size)
            across = (self.tm // waves[0] + self.tn // waves[1]) / subgroup_size
        return across, (self.tm + self.tn) / self.invocations

    def defines(self, subgroup_size: int) -> dict[str, int | float | str]:
        """What the shader is told."""
        told: dict[str, int | float | str] = {
            "TILE_M": f"{self.tm}u",
            "TILE_N": f"{self.tn}u",
            "DEPTH": f"{self.depth}u",
            "PADDING": f"{self.padding}u",
            "INVOCATIONS": f"{self.invocations}u",
            "MATRIX": int(self.matrix is not None),
        }
        if self.matrix is None:
            return told | {"ROWS": _ROWS, "COLUMNS": self.sums // _ROWS}
        down, across = self.waves(subgroup_size)
        _, m, n, k = self.matrix
        return told | {
            "SIZE": f"{subgroup_size}u",
            "WAVES": f"{down * across}u",
            "WAVES_N": f"{across}u",
            "FRAGMENT_M": m,
            "FRAGMENT_N": n,
            "FRAGMENT_K": k,
            "FRAGMENTS_M": self.tm // down // m,
            "FRAGMENTS_N": self.tn // across // n,
        }
