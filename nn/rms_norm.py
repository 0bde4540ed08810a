"""RMSNorm: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"."""

from __future__ import annotations

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .hyperparameters import check_not_negative
from .layer import Layer
from .parameter import Parameter

Stats = tuple[Tensor, ...]


class RMSNorm(Layer):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension. Keeps x and one scalar a row.

    Composites use `normalize` (gives the row scalars), `rebuild` (the same bits of y from them, one elementwise
    dispatch) and `backward_from`.
    """

    num_stats = 1

    def __init__(self, engine: ComputeEngine, dim: int, *, eps: float = 1e-5, seed: int | None = 0) -> None:
        super().__init__(engine)
        check_not_negative("eps", eps)
        self.eps = eps
        self.weight = Parameter(engine, (dim,), "ones")
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> y [..., d]."""
        self.start_forward()
        y, (rstd,) = self.normalize(x)
        self.keep(x=x, rstd=rstd)
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """dy [..., d] -> dx [..., d]."""
        return self.backward_from(dy, self.take("x"), (self.take("rstd"),))

    def normalize(self, x: Tensor) -> tuple[Tensor, Stats]:
        """(y, (rstd [rows],)) without keeping anything."""
        y, rstd = self.engine.rms_norm(x, self.weight.data, eps=self.eps)
        return y, (rstd,)

    def rebuild(self, x: Tensor, stats: Stats) -> Tensor:
        """y again, from x and the row scalars."""
        return self.engine.rms_norm_apply(x, self.weight.data, stats[0])

    def backward_from(self, dy: Tensor, x: Tensor, stats: Stats) -> Tensor:
        """backward for an input and scalars that the caller kept."""
        dx = self.engine.rms_norm_backward(dy, x, self.weight.data, stats[0])
        out, accumulate = self.weight.gradient()
        self.engine.rms_norm_weight_backward(dy, x, stats[0], out, accumulate=accumulate)
        self.weight.gradient_written()
        return dx
