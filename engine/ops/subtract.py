"""Elementwise difference."""

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

_A, _B = variables("a b")


class SubtractOp(MapOp):
    """a - b."""

    name = "subtract"
    kernel = MapKernel("subtract", ("a", "b"), ("y",), {"y": _A - _B})

    def outputs(self, a: TensorSpec, b: TensorSpec) -> Sequence[TensorSpec]:
        return (check_same(self.name, a=a, b=b),)


SUBTRACT = register(SubtractOp())


def subtract(engine: ComputeEngine, a: Tensor, b: Tensor) -> Tensor:
    """a - b element by element, float32 of one shape. Raises ValueError when shapes or types differ."""
    return engine.execute(SUBTRACT, (a, b))[0]
