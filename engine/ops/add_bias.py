"""A bias of one value a column, added in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..expr import variables
from ..map_kernel import MapKernel, Operand
from ..op import register
from ..tensor import Tensor, TensorSpec
from .elementwise import MapOp, check_same

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine


_Y, _BIAS = variables("y bias")


class AddBiasOp(MapOp):
    """y += bias, broadcast over the rows."""

    name = "add_bias_"
    writes = (0,)
    kernel = MapKernel(
        "add_bias",
        ("y", Operand("bias", "bias", "index % args.width")),
        ("y",),
        {"y": _Y + _BIAS},
        scalars="uint width",
    )

    def outputs(self, y: TensorSpec, bias: TensorSpec) -> Sequence[TensorSpec]:
        check_same(self.name, y=y)
        if not y.shape or bias != TensorSpec(y.shape[-1:]):
            raise ValueError(
                f"{self.name}: bias is {bias.dtype} {bias.shape}, needed for y {y.shape} is float32 {y.shape[-1:]}"
            )
        return ()

    def scalar_values(self, *specs: TensorSpec) -> tuple[float, ...]:
        return (specs[1].size,)

    def allows_wide(self, *specs: TensorSpec) -> bool:
        return specs[1].size % 4 == 0


ADD_BIAS = register(AddBiasOp())


def add_bias_(engine: ComputeEngine, y: Tensor, bias: Tensor) -> None:
    """y += bias, float32: y [..., n], bias [n]. Raises ValueError for other shapes or types."""
    engine.execute(ADD_BIAS, (y, bias))
