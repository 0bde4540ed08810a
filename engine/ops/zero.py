"""Set every element of a tensor to zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tensor import Tensor
from .fill import FILL

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine


def zero_(engine: ComputeEngine, x: Tensor) -> Tensor:
    """Sets every element of x, of any shape and type, to zero, in place; returns x."""
    engine.execute(FILL, (x,), bits=0)
    return x
