"""One SGD update of one parameter, with or without momentum, in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .adamw import check_update, clipped
from .piece_kernels import PieceCall, PieceOp, rows_by_pieces
from .row_kernels import column_groups

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_EXAMPLE = {"has_state": 1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": 1}
PLAIN = rows_by_pieces(
    "sgd",
    "sgd.comp",
    "inout row p[n], in row g[n], in f32 state[4], step, uint n, uint has_state, float weight_decay",
    lambda pieces: (pieces, {**_EXAMPLE, "n": 4 * pieces}),
    MOMENTUM=0,
)
WITH_MOMENTUM = rows_by_pieces(
    "sgd_momentum",
    "sgd.comp",
    "inout row p[n], in row g[n], inout row b[n], in f32 state[4], step, uint n, uint has_state, float weight_decay, "
    "float momentum, uint nesterov",
    lambda pieces: (pieces, {**_EXAMPLE, "n": 4 * pieces}),
    MOMENTUM=1,
)


def check_sgd_settings(op: str, has_buffer: bool, momentum: float, weight_decay: float, nesterov: bool) -> None:
    """Raises ValueError for settings out of range."""
    if not 0 <= momentum < 1:
        raise ValueError(f"{op}: momentum is {momentum}, it must be at least 0 and below 1")
    if not has_buffer and (momentum or nesterov):
        raise ValueError(f"{op}: momentum {momentum}, nesterov {nesterov} need a momentum_buffer")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"{op}: weight_decay is {weight_decay}, it must not be negative, and finite")


class SgdOp(PieceOp):
    """p and the momentum buffer change in place."""

    name = "sgd_"
    writes = (0, 2)
    takes_step = True

    def outputs(
        self,
        p: TensorSpec,
        g: TensorSpec,
        momentum_buffer: TensorSpec | None,
        state: TensorSpec | None,
        *,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> Sequence[TensorSpec]:
        check_update(self.name, p, state, g=g, momentum_buffer=momentum_buffer)
        check_sgd_settings(self.name, momentum_buffer is not None, momentum, weight_decay, nesterov)
        return ()

    def flops(self, p: TensorSpec, *others: TensorSpec | None, **settings: Any) -> int:
        return 6 * p.size

    def reference(
        self,
        p: Any,
        g: Any,
        momentum_buffer: Any,
        state: Any,
        *,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
        step: StepParameters,
    ) -> Sequence[Any]:
        g = clipped(g, state)
        if g is None:
            return ()
        direction = g
        if momentum_buffer is not None:
            momentum_buffer[...] = momentum * momentum_buffer + g
            direction = g + momentum * momentum_buffer if nesterov else momentum_buffer
        rate = step.learning_rate
        p[...] = p - (rate * weight_decay * p + rate * direction)
        return ()

    def piece_call(
        self,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> PieceCall:
        p, g, b, state = inputs
        assert p is not None and g is not None
        pieces, last = column_groups(p.size), p if state is None else state
        scalars = p.size, int(state is not None), weight_decay
        if b is None:
            return PieceCall(PLAIN.pick(p.size, p, g), pieces, (p, g, last), scalars)
        kernel = WITH_MOMENTUM.pick(p.size, p, g, b)
        return PieceCall(kernel, pieces, (p, g, b, last), (*scalars, momentum, int(nesterov)))

    def kernels(self) -> Iterable[Kernel]:
        return (*PLAIN.both(), *WITH_MOMENTUM.both())


SGD = register(SgdOp())


def sgd_(
    engine: ComputeEngine,
    p: Tensor,
    g: Tensor,
    momentum_buffer: Tensor | None = None,
    state: Tensor | None = None,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """One step of stochastic gradient descent on p, all float32 of one shape; p and the buffer b change in place.

    With c the clip factor of `state` (from `gradient_norm`; 1 without state) and lr from the step parameters:
    b = momentum b + c g, d = b (with nesterov c g + momentum b; without a buffer c g),
    p = p (1 - lr weight_decay) - lr d (Sutskever et al. 2013; decay decoupled as in Loshchilov & Hutter 2019). A buffer
    of zeros is the start. Nothing changes when the state's finite flag is 0.

    Raises ValueError for shapes or types that differ, a momentum outside 0 <= momentum < 1 or without a buffer, or a
    negative weight_decay.
    """
    engine.execute(SGD, (p, g, momentum_buffer, state), momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)
