"""LayerNorm: Ba, Kiros & Hinton 2016, "Layer Normalization"."""

from __future__ import annotations

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .hyperparameters import check_not_negative
from .layer import Layer
from .parameter import Parameter
from .rms_norm import Stats


class LayerNorm(Layer):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension. Keeps x and two scalars a row.

    Composites use `normalize`, `rebuild` and `backward_from`, as of RMSNorm.
    """

    num_stats = 2

    def __init__(self, engine: ComputeEngine, dim: int, *, eps: float = 1e-5, seed: int | None = 0) -> None:
        super().__init__(engine)
        check_not_negative("eps", eps)
        self.eps = eps
        self.weight = Parameter(engine, (dim,), "ones")
        self.bias = Parameter(engine, (dim,), "zeros")
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> y [..., d]."""
        self.start_forward()
        y, (mean, rstd) = self.normalize(x)
        self.keep(x=x, mean=mean, rstd=rstd)
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """dy [..., d] -> dx [..., d]."""
        return self.backward_from(dy, self.take("x"), (self.take("mean"), self.take("rstd")))

    def normalize(self, x: Tensor) -> tuple[Tensor, Stats]:
        """(y, (mean [rows], rstd [rows])) without keeping anything."""
        y, mean, rstd = self.engine.layer_norm(x, self.weight.data, self.bias.data, eps=self.eps)
        return y, (mean, rstd)

    def rebuild(self, x: Tensor, stats: Stats) -> Tensor:
        """y again, from x and the row scalars."""
        return self.engine.layer_norm_apply(x, self.weight.data, self.bias.data, *stats)

    def backward_from(self, dy: Tensor, x: Tensor, stats: Stats) -> Tensor:
        """backward for an input and scalars that the caller kept."""
        mean, rstd = stats
        dx = self.engine.layer_norm_backward(dy, x, self.weight.data, mean, rstd)
        out_weight, accumulate = self.weight.gradient()
        out_bias, _ = self.bias.gradient()
        self.engine.layer_norm_weight_backward(dy, x, mean, rstd, out_weight, out_bias, accumulate=accumulate)
        self.weight.gradient_written()
        self.bias.gradient_written()
        return dx
