"""One AdamW update of one parameter, in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .piece_kernels import PieceCall, PieceOp, rows_by_pieces
from .row_kernels import check_dtype_of, check_spec, column_groups

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_EXAMPLE = {"has_state": 1, "beta1": 0.9, "one_minus_beta1": 0.1, "beta2": 0.99, "one_minus_beta2": 0.01, "eps": 1e-8}
KERNELS = rows_by_pieces(
    "adamw",
    "adamw.comp",
    "inout row p[n], in row g[n], inout row m[n], inout row v[n], in f32 state[4], step, uint n, uint has_state, "
    "float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float eps, float weight_decay",
    lambda pieces: (pieces, {**_EXAMPLE, "weight_decay": 0.1, "n": 4 * pieces}),
)


def check_update(op: str, p: TensorSpec, state: TensorSpec | None, **others: TensorSpec | None) -> None:
    """Raises ValueError unless all are float32 of the shape of p, and state is [4]."""
    check_dtype_of(op, "p", p, "float32")
    for name, spec in others.items():
        if spec is not None:
            check_spec(op, name, spec, p.shape)
    if state is not None:
        check_spec(op, "state", state, (4,))


def check_adamw_settings(op: str, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """Raises ValueError for settings out of range."""
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"{op}: betas are {beta1} and {beta2}, each must be at least 0 and below 1")
    if not (0 <= eps < math.inf and 0 <= weight_decay < math.inf):
        raise ValueError(f"{op}: eps {eps} and weight_decay {weight_decay} must not be negative, and finite")


def clipped(g: Any, state: Any) -> Any | None:
    """The gradient times the clip factor; None when the state forbids the update."""
    if state is None:
        return g
    return None if state[1] == 0 else g * state[0]


class AdamWOp(PieceOp):
    """p, m and v change in place."""

    name = "adamw_"
    writes = (0, 2, 3)
    takes_step = True

    def outputs(
        self,
        p: TensorSpec,
        g: TensorSpec,
        m: TensorSpec,
        v: TensorSpec,
        state: TensorSpec | None,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> Sequence[TensorSpec]:
        check_update(self.name, p, state, g=g, m=m, v=v)
        check_adamw_settings(self.name, beta1, beta2, eps, weight_decay)
        return ()

    def flops(self, p: TensorSpec, *others: TensorSpec | None, **settings: Any) -> int:
        return 16 * p.size

    def reference(
        self,
        p: Any,
        g: Any,
        m: Any,
        v: Any,
        state: Any,
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        step: StepParameters,
    ) -> Sequence[Any]:
        g = clipped(g, state)
        if g is None:
            return ()
        m[...] = beta1 * m + (1 - beta1) * g
        v[...] = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = m / step.bias_correction1, v / step.bias_correction2
        rate = step.learning_rate
        p[...] = p - (rate * weight_decay * p + rate * (m_hat / (np.sqrt(v_hat) + eps)))
        return ()

    def piece_call(
        self,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> PieceCall:
        p, g, m, v, state = inputs
        assert p is not None and g is not None and m is not None and v is not None
        pointers = p, g, m, v, p if state is None else state
        scalars = p.size, int(state is not None), beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps, weight_decay
        return PieceCall(KERNELS.pick(p.size, p, g, m, v), column_groups(p.size), pointers, scalars)

    def kernels(self) -> Iterable[Kernel]:
        return KERNELS.both()


ADAMW = register(AdamWOp())


def adamw_(
    engine: ComputeEngine,
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    state: Tensor | None = None,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """One step of AdamW on p, with moments m and v, all float32 of one shape; p, m, v change in place.

    With c the clip factor of `state` (from `gradient_norm`; 1 without state) and lr, the bias corrections from the
    step parameters: m = beta1 m + (1 - beta1) c g, v = beta2 v + (1 - beta2) (c g)^2,
    p = p (1 - lr weight_decay) - lr (m / bias_correction1) / (sqrt(v / bias_correction2) + eps)
    (Loshchilov & Hutter 2019, algorithm 2, decay scaled by lr). Nothing changes when the state's finite flag is 0.

    Raises ValueError for shapes or types that differ, betas outside 0 <= beta < 1, a negative eps or weight_decay.
    """
    engine.execute(ADAMW, (p, g, m, v, state), beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
