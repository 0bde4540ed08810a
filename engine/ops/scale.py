"""Product with a number of the host."""

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

_X, _FACTOR = variables("x factor")


class ScaleOp(MapOp):
    """x * factor; the factor is rounded to float32 first."""

    name = "scale"
    kernel = MapKernel("scale", ("x",), ("y",), {"y": _X * _FACTOR}, scalars="float factor")

    def outputs(self, x: TensorSpec, *, factor: float) -> Sequence[TensorSpec]:
        return (check_same(self.name, x=x),)

    def scalar_values(self, x: TensorSpec, *, factor: float) -> tuple[float, ...]:
        return (factor,)


SCALE = register(ScaleOp())


def scale(engine: ComputeEngine, x: Tensor, factor: float) -> Tensor:
    """x * factor, float32; the factor is rounded to float32 first.

    Raises ValueError for another type and for a finite factor beyond float32, TypeError for what is no number.
    """
    return engine.execute(SCALE, (x,), factor=factor)[0]
