"""A multiple plus a constant, both numbers of the host: x + 1, 1 - x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..expr import variables
from ..map_kernel import MapKernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .elementwise import MapOp, check_same

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_X, _FACTOR, _OFFSET = variables("x factor offset")


class AffineOp(MapOp):
    """x * factor + offset; both numbers are rounded to float32 first, and each operation rounds."""

    name = "affine"
    flops_per_element = 2
    kernel = MapKernel("affine", ("x",), ("y",), {"y": _X * _FACTOR + _OFFSET}, scalars="float factor, float offset")

    def outputs(self, x: TensorSpec, *, factor: float, offset: float) -> Sequence[TensorSpec]:
        return (check_same(self.name, x=x),)

    def scalar_values(self, x: TensorSpec, *, factor: float, offset: float) -> tuple[float, ...]:
        return (factor, offset)


AFFINE = register(AffineOp())


def affine(engine: ComputeEngine, x: Tensor, factor: float, offset: float) -> Tensor:
    """x * factor + offset element by element, float32; rounded after the product and after the sum.

    Raises ValueError for another type and for a finite number beyond float32, TypeError for what is no number.
    """
    return engine.execute(AFFINE, (x,), factor=factor, offset=offset)[0]
