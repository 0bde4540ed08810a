"""ReLU, GELU and SiLU as expressions: the ops, their backwards and the matmul epilogue are all made from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from ..expr import Expr, clamp, fma, logistic, variables, where
from ..expr_derivative import derivative
from ..kernel import Kernel
from ..map_kernel import MapKernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .elementwise import MapOp, check_same

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3}  # as `activation` of matmul's epilogue numbers them
_GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)
_X, _DY = variables("x dy")


def check_activation(op: str, kind: str) -> str:
    """The kind, if it is one. Raises ValueError with the list otherwise."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"{op}: unknown activation {kind!r}: use one of {', '.join(ACTIVATIONS)}")
    return kind


def activation_of(x: Expr, kind: str, near: Expr | None = None) -> Expr:
    """The activation as an expression.

    near: x again, or x clamped to where the logistic function is neither 0 nor 1; the value is the same.
    GELU is the tanh form written with the logistic function, 0.5 (1 + tanh(u)) = logistic(2 u).
    """
    near = x if near is None else near
    if kind == "relu":
        return where(x < 0.0, 0.0, x)  # -0.0 and NaN stay what they are
    if kind == "silu":
        return x * logistic(near)
    return x * logistic(near * fma(near * near, 2 * _GELU_SCALE * 0.044715, 2 * _GELU_SCALE))


def activation_slope(x: Expr, kind: str) -> Expr:
    """The derivative of the activation by the variable x; for relu 0 at 0.

    It is taken of the form with x clamped: beyond, its second term is 0 and not infinity times 0.
    """
    if kind == "relu":
        return derivative(where(x <= 0.0, 0.0, x), x)
    return derivative(activation_of(x, kind, clamped(x, kind)), x)


def clamped(x: Expr, kind: str) -> Expr:
    """x within the range outside of which the logistic function of the activation is exactly 0 or 1."""
    limit = 30.0 if kind == "gelu" else 200.0
    return clamp(x, -limit, limit)


class ActivationOp(MapOp):
    """y = activation(x)."""

    name = "activation"
    flops_per_element = 8
    by_kind: ClassVar = {kind: MapKernel(kind, ("x",), ("y",), {"y": activation_of(_X, kind)}) for kind in ACTIVATIONS}

    def outputs(self, x: TensorSpec, *, kind: str) -> Sequence[TensorSpec]:
        check_activation(self.name, kind)
        return (check_same(self.name, x=x),)

    def map_kernel(self, *, kind: str) -> MapKernel:  # type: ignore[override]
        return self.by_kind[kind]

    def kernels(self) -> Iterable[Kernel]:
        return [kernel for each in self.by_kind.values() for kernel in each.kernels()]


class ActivationBackwardOp(ActivationOp):
    """dx = dy * activation'(x)."""

    name = "activation_backward"
    flops_per_element = 14
    by_kind: ClassVar = {
        kind: MapKernel(
            f"{kind}_backward",
            ("dy", "x"),
            ("dx",),
            {"dx": _DY * activation_slope(_X, kind)},
        )
        for kind in ACTIVATIONS
    }

    def outputs(self, dy: TensorSpec, x: TensorSpec, *, kind: str) -> Sequence[TensorSpec]:  # type: ignore[override]
        check_activation(self.name, kind)
        return (check_same(self.name, x=x, dy=dy),)


ACTIVATION = register(ActivationOp())
ACTIVATION_BACKWARD = register(ActivationBackwardOp())


def activation(engine: ComputeEngine, x: Tensor, kind: str) -> Tensor:
    """The activation `kind` ("relu", "gelu" or "silu") of x, float32 of any shape.

    GELU is the tanh form of Hendrycks & Gimpel (2016), equation 3; SiLU is x / (1 + exp(-x)). Raises ValueError for
    another kind or type.
    """
    return engine.execute(ACTIVATION, (x,), kind=kind)[0]


def activation_backward(engine: ComputeEngine, dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dy times the derivative of the activation at x, float32 of one shape; finite where both are.

    Raises ValueError for an unknown kind, or when shapes or types differ.
    """
    return engine.execute(ACTIVATION_BACKWARD, (dy, x), kind=kind)[0]


def relu(engine: ComputeEngine, x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN. See `activation`."""
    return activation(engine, x, "relu")


def gelu(engine: ComputeEngine, x: Tensor) -> Tensor:
    """GELU, tanh form. See `activation`."""
    return activation(engine, x, "gelu")


def silu(engine: ComputeEngine, x: Tensor) -> Tensor:
    """SiLU. See `activation`."""
    return activation(engine, x, "silu")
