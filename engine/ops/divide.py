"""Elementwise quotients: of two tensors, by a number, of a number. Within 2.5 units in the last place on any device."""

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
_X, _DIVISOR, _DIVIDEND = variables("x divisor dividend")


class DivideOp(MapOp):
    """a / b."""

    name = "divide"
    kernel = MapKernel("divide", ("a", "b"), ("y",), {"y": _A / _B})

    def outputs(self, a: TensorSpec, b: TensorSpec) -> Sequence[TensorSpec]:
        return (check_same(self.name, a=a, b=b),)


class DivideByOp(MapOp):
    """x / divisor; the divisor is rounded to float32 first."""

    name = "divide_by"
    kernel = MapKernel("divide_by", ("x",), ("y",), {"y": _X / _DIVISOR}, scalars="float divisor")

    def outputs(self, x: TensorSpec, *, divisor: float) -> Sequence[TensorSpec]:
        return (check_same(self.name, x=x),)

    def scalar_values(self, x: TensorSpec, *, divisor: float) -> tuple[float, ...]:
        return (divisor,)


class DivideIntoOp(MapOp):
    """dividend / x; the dividend is rounded to float32 first."""

    name = "divide_into"
    kernel = MapKernel("divide_into", ("x",), ("y",), {"y": _DIVIDEND / _X}, scalars="float dividend")

    def outputs(self, x: TensorSpec, *, dividend: float) -> Sequence[TensorSpec]:
        return (check_same(self.name, x=x),)

    def scalar_values(self, x: TensorSpec, *, dividend: float) -> tuple[float, ...]:
        return (dividend,)


DIVIDE = register(DivideOp())
DIVIDE_BY = register(DivideByOp())
DIVIDE_INTO = register(DivideIntoOp())


def divide(engine: ComputeEngine, a: Tensor, b: Tensor) -> Tensor:
    """a / b element by element, float32 of one shape. Raises ValueError when shapes or types differ."""
    return engine.execute(DIVIDE, (a, b))[0]


def divide_by(engine: ComputeEngine, x: Tensor, divisor: float) -> Tensor:
    """x / divisor, float32; division by 0 gives infinities and NaN.

    Raises ValueError for another type and for a finite divisor beyond float32, TypeError for what is no number.
    """
    return engine.execute(DIVIDE_BY, (x,), divisor=divisor)[0]


def divide_into(engine: ComputeEngine, x: Tensor, dividend: float) -> Tensor:
    """dividend / x, float32; division by 0 gives infinities and NaN.

    Raises ValueError for another type and for a finite dividend beyond float32, TypeError for what is no number.
    """
    return engine.execute(DIVIDE_INTO, (x,), dividend=dividend)[0]
