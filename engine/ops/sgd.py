"""One SGD update of one parameter, with or without momentum, in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import Op, register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .adamw import check_update, clipped
from .row_kernels import RowKernels, column_groups, flat_groups

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

PLAIN = RowKernels(
    "sgd",
    "sgd.comp",
    "inout row p, in row g, in f32 state, step, uint n, uint has_state, float weight_decay",
    MOMENTUM=0,
)
WITH_MOMENTUM = RowKernels(
    "sgd_momentum",
    "sgd.comp",
    "inout row p, in row g, inout row b, in f32 state, step, uint n, uint has_state, float weight_decay, "
    "float momentum, uint nesterov",
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


class SgdOp(Op):
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

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        momentum: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        p, g, b, state = inputs
        assert p is not None and g is not None
        groups = flat_groups(column_groups(p.size))
        rest = (p if state is None else state, p.size, int(state is not None), weight_decay)
        if b is None:
            gpu.dispatch(PLAIN.pick(p.size, p, g), groups, p, g, *rest)
        else:
            kernel = WITH_MOMENTUM.pick(p.size, p, g, b)
            gpu.dispatch(kernel, groups, p, g, b, *rest, momentum, int(nesterov))

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
