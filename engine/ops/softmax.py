"""Softmax over the last dimension, and its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import Op, register
from ..tensor import Tensor, TensorSpec
from .row_kernels import ROW_SUBGROUPS, RowKernels, check_spec, row_groups, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

FORWARD = RowKernels("softmax", "softmax.comp", "in row x, out row y, uint rows, uint cols", subgroups=ROW_SUBGROUPS)
BACKWARD = RowKernels(
    "softmax_backward",
    "softmax_backward.comp",
    "in row dy, in row y, out row dx, uint rows, uint cols",
    subgroups=ROW_SUBGROUPS,
)


class SoftmaxOp(Op):
    """y = softmax(x) of each row."""

    name = "softmax"

    def outputs(self, x: TensorSpec) -> Sequence[TensorSpec]:
        rows_and_columns(self.name, "x", x, loops=2)
        return (x,)

    def flops(self, x: TensorSpec) -> int:
        return 5 * x.size

    def reference(self, x: Any) -> Sequence[Any]:
        top = x.max(axis=-1, keepdims=True)
        weights = np.exp(x - np.where(np.isneginf(top), 0, top).astype(x.dtype))
        total = weights.sum(axis=-1, keepdims=True)
        return (weights / np.where(total == 0, 1, total),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        (x,), (y,) = inputs, outputs
        cols = x.shape[-1]
        rows = x.size // cols
        kernel = FORWARD.pick(cols, x, y)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rows), x, y, rows, cols)

    def kernels(self) -> Iterable[Kernel]:
        return FORWARD.both()


class SoftmaxBackwardOp(Op):
    """dx from dy and y."""

    name = "softmax_backward"

    def outputs(self, dy: TensorSpec, y: TensorSpec) -> Sequence[TensorSpec]:
        rows_and_columns(self.name, "y", y, loops=2)
        check_spec(self.name, "dy", dy, y.shape)
        return (y,)

    def flops(self, dy: TensorSpec, y: TensorSpec) -> int:
        return 4 * y.size

    def reference(self, dy: Any, y: Any) -> Sequence[Any]:
        return (y * (dy - (dy * y).sum(axis=-1, keepdims=True)),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        (dy, y), (dx,) = inputs, outputs
        cols = y.shape[-1]
        rows = y.size // cols
        kernel = BACKWARD.pick(cols, dy, y, dx)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rows), dy, y, dx, rows, cols)

    def kernels(self) -> Iterable[Kernel]:
        return BACKWARD.both()


SOFTMAX = register(SoftmaxOp())
SOFTMAX_BACKWARD = register(SoftmaxBackwardOp())


def softmax(engine: ComputeEngine, x: Tensor) -> Tensor:
    """exp(x - max) / sum(exp(x - max)) over the last dimension (Milakov & Gimelshein 2018: running maximum).

    x: [..., n] -> [..., n]. An entry of -inf is masked: exactly 0. A row masked throughout gives zeros, never 1/n.
    NaN or +inf anywhere in a row makes the whole row NaN. Raises ValueError for no columns, or
    more than a kernel loops over.
    """
    (y,) = engine.execute(SOFTMAX, (x,))
    return y


def softmax_backward(engine: ComputeEngine, dy: Tensor, y: Tensor) -> Tensor:
    """Gradient of `softmax` for its input: y (dy - sum(dy y)). dy, y: [..., n] -> [..., n].

    Masked entries, and rows masked throughout, get 0. Raises ValueError for shapes that differ.
    """
    (dx,) = engine.execute(SOFTMAX_BACKWARD, (dy, y))
    return dx
