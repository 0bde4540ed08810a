"""Addition, into a new tensor or in place."""

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


class AddOp(MapOp):
    """a + b."""

    name = "add"
    kernel = MapKernel("add", ("a", "b"), ("y",), {"y": _A + _B})

    def outputs(self, a: TensorSpec, b: TensorSpec) -> Sequence[TensorSpec]:
        return (check_same(self.name, a=a, b=b),)


class AddInPlaceOp(MapOp):
    """a += b."""

    name = "add_"
    writes = (0,)
    kernel = MapKernel("add_in_place", ("a", "b"), ("a",), {"a": _A + _B})

    def outputs(self, a: TensorSpec, b: TensorSpec) -> Sequence[TensorSpec]:
        check_same(self.name, a=a, b=b)
        return ()


ADD = register(AddOp())
ADD_IN_PLACE = register(AddInPlaceOp())


def add(engine: ComputeEngine, a: Tensor, b: Tensor) -> Tensor:
    """a + b, float32 of one shape. Raises ValueError when shapes or types differ."""
    return engine.execute(ADD, (a, b))[0]


def add_(engine: ComputeEngine, a: Tensor, b: Tensor) -> None:
    """a += b, float32 of one shape. Raises ValueError when shapes or types differ."""
    engine.execute(ADD_IN_PLACE, (a, b))
