"""Softmax over the last dimension, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..expr import equal, exp, variables, where
from ..fold import FoldSpec, State, Walk, online_softmax, softmax_shift
from ..op import register
from ..tensor import Tensor, TensorSpec
from .row_fold import RowFold, RowFoldOp
from .row_kernels import check_spec, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_X, _DY, _Y, _LARGEST, _TOTAL, _DOT, _REST = variables("x dy y largest total dot rest")

FORWARD = RowFold(
    FoldSpec(
        "softmax",
        {"x": "row"},
        walks=[online_softmax(_X)],
        elements={"y": exp(_X - softmax_shift(_LARGEST), nonpositive=True) / where(equal(_TOTAL, 0.0), 1.0, _TOTAL)},
    )
)
BACKWARD = RowFold(
    FoldSpec(
        "softmax_backward",
        {"dy": "row", "y": "row"},
        # The y of a row sum to 1 up to rounding only, so a large mean of dy would leave its own rounding in the first
        # sum: the second walk takes the weighted mean of what is left, which is small.
        walks=[Walk([State("dot", "sum", _DY * _Y)]), Walk([State("rest", "sum", (_DY - _DOT) * _Y)])],
        elements={"dx": _Y * ((_DY - _DOT) - _REST)},
    )
)


class SoftmaxOp(RowFoldOp):
    """y = softmax(x) of each row."""

    name = "softmax"
    fold = FORWARD

    def outputs(self, x: TensorSpec) -> Sequence[TensorSpec]:
        rows_and_columns(self.name, "x", x, loops=2)
        return (x,)

    def flops(self, x: TensorSpec) -> int:
        return 5 * x.size


class SoftmaxBackwardOp(RowFoldOp):
    """dx from dy and y."""

    name = "softmax_backward"
    fold = BACKWARD

    def outputs(self, dy: TensorSpec, y: TensorSpec) -> Sequence[TensorSpec]:
        rows_and_columns(self.name, "y", y, loops=3)
        check_spec(self.name, "dy", dy, y.shape)
        return (y,)

    def flops(self, dy: TensorSpec, y: TensorSpec) -> int:
        return 7 * y.size


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

    y must be a softmax: that its rows sum to 1 keeps digits where dy has a large mean. Masked
    entries, and rows masked throughout, get 0. Raises ValueError for shapes that differ.
    """
    (dx,) = engine.execute(SOFTMAX_BACKWARD, (dy, y))
    return dx
