"""ReLU, GELU and SiLU, forward and backward. The matmul epilogue has the same formulas (shaders/activation.glsl)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..kernel import Kernel
from ..map_kernel import MapKernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .elementwise import ElementwiseOp, check_same

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3}  # as `activate` in shaders/activation.glsl numbers them
_GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)


def check_activation(op: str, kind: str) -> str:
    """The kind, if it is one. Raises ValueError with the list otherwise."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"{op}: unknown activation {kind!r}: use one of {', '.join(ACTIVATIONS)}")
    return kind


def logistic(x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow."""
    tail = np.exp(-np.abs(x))
    tail = tail / (1 + tail)
    return np.where(x > 0, 1 - tail, tail)


def activation_reference(x: Any, kind: str) -> Any:
    """The activation of an array."""
    if kind == "relu":
        return np.where(x < 0, x.dtype.type(0), x)
    if kind == "silu":
        return x * logistic(x)
    return x * logistic(2 * _GELU_SCALE * (x + 0.044715 * x * x * x))


def derivative_reference(x: Any, kind: str) -> Any:
    """The derivative of the activation at x; for relu 0 at 0."""
    if kind == "relu":
        return np.where(x <= 0, x.dtype.type(0), x.dtype.type(1))
    near = np.clip(x, -200, 200)  # beyond, the second term is 0; without the clip infinity times 0
    if kind == "silu":
        s = logistic(x)
        return s + near * s * logistic(-x)
    u = 2 * _GELU_SCALE * (x + 0.044715 * x * x * x)
    slope = 2 * _GELU_SCALE * (1 + 3 * 0.044715 * near * near)
    return logistic(u) + near * slope * logistic(u) * logistic(-u)


class ActivationOp(ElementwiseOp):
    """y = activation(x)."""

    name = "activation"
    flops_per_element = 8
    by_kind: ClassVar = {
        kind: MapKernel(kind, ("x",), ("y",), f"y = {kind}(x);", includes=("activation.glsl",)) for kind in ACTIVATIONS
    }

    def outputs(self, x: TensorSpec, *, kind: str) -> Sequence[TensorSpec]:
        check_activation(self.name, kind)
        return (check_same(self.name, x=x),)

    def reference(self, x: Any, *, kind: str) -> Sequence[Any]:
        return (activation_reference(x, kind),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, kind: str) -> None:
        self.by_kind[kind].launch(gpu, outputs[0].size, *inputs, outputs[0])

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
            f"dx = dy * {kind}_derivative(x);",
            includes=("activation.glsl",),
        )
        for kind in ACTIVATIONS
    }

    def outputs(self, dy: TensorSpec, x: TensorSpec, *, kind: str) -> Sequence[TensorSpec]:  # type: ignore[override]
        check_activation(self.name, kind)
        return (check_same(self.name, x=x, dy=dy),)

    def reference(self, dy: Any, x: Any, *, kind: str) -> Sequence[Any]:  # type: ignore[override]
        return (dy * derivative_reference(x, kind),)


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
