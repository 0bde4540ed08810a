"""Dropout (Srivastava et al. 2014) from a counter-based generator: a mask is recomputed where needed, never kept.

Random bits come from Philox (engine/philox.py), keyed by seed, step, micro-batch, site and element index. An element is
dropped when its 32 bits are below round(p * 2^32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..expr import random_below, variables, where, whole
from ..map_kernel import MapKernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .elementwise import MapOp, check_same

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_X, _RESIDUAL, _FACTOR = variables("x residual factor")
_DROPPED = where(random_below(whole("threshold"), whole("site")), 0.0, _X * _FACTOR)
_SCALARS = "float factor, uint site, uint threshold"


def _threshold(p: float) -> int:
    return min(round(float(p) * 2**32), 2**32 - 1)


def _factor(p: float) -> float:
    return float(np.float32(1.0 / (1.0 - float(p))))


def _check(op: str, p: float, site: int) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: p is {p}, it must be at least 0 and below 1")
    if not 0 <= site < 2**32:
        raise ValueError(f"{op}: site is {site}, it must fit 32 bits")


class DropoutOp(MapOp):
    """y = x / (1 - p) where kept, else 0."""

    name = "dropout"
    takes_step = True
    flops_per_element = 20
    kernel = MapKernel("dropout", ("x",), ("y",), {"y": _DROPPED}, scalars=_SCALARS)

    def outputs(self, x: TensorSpec, *, p: float, site: int) -> Sequence[TensorSpec]:
        _check(self.name, p, site)
        return (check_same(self.name, x=x),)

    def scalar_values(self, *specs: TensorSpec, p: float, site: int) -> tuple[float, ...]:
        return _factor(p), site, _threshold(p)


class DropoutAddOp(DropoutOp):
    """y = residual + dropout(x)."""

    name = "dropout_add"
    flops_per_element = 21
    kernel = MapKernel("dropout_add", ("x", "residual"), ("y",), {"y": _RESIDUAL + _DROPPED}, scalars=_SCALARS)

    def outputs(  # type: ignore[override]
        self, x: TensorSpec, residual: TensorSpec, *, p: float, site: int
    ) -> Sequence[TensorSpec]:
        _check(self.name, p, site)
        return (check_same(self.name, x=x, residual=residual),)


DROPOUT = register(DropoutOp())
DROPOUT_ADD = register(DropoutAddOp())


def dropout(engine: ComputeEngine, x: Tensor, *, p: float, site: int) -> Tensor:
    """x / (1 - p) where the mask keeps it, 0 elsewhere; float32 of any shape. Its backward is dropout(dy, p, site).

    p: probability of dropping, 0 <= p < 1. site: a stable number of this dropout in the model. Seed, step and
    micro-batch come from the engine's step parameters. Raises ValueError for p or site out of range, or another type.
    """
    return engine.execute(DROPOUT, (x,), p=p, site=site)[0]


def dropout_add(engine: ComputeEngine, x: Tensor, residual: Tensor, *, p: float, site: int) -> Tensor:
    """residual + dropout(x), the same bits as dropout and then add. See `dropout`; shapes must be equal."""
    return engine.execute(DROPOUT_ADD, (x, residual), p=p, site=site)[0]
