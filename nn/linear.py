"""y = x W + b."""

from __future__ import annotations

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .layer import Layer
from .parameter import Parameter


class Linear(Layer):
    """y[..., out] = x[..., in] @ weight[in, out] + bias[out]. Keeps x.

    Composites that can rebuild x use `apply` (keeps nothing) and `backward_from` (is given x).
    """

    def __init__(
        self,
        engine: ComputeEngine,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        std: float = 0.02,
        seed: int | None = 0,
    ) -> None:
        super().__init__(engine)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = Parameter(engine, (in_features, out_features), std=std)
        self.bias = Parameter(engine, (out_features,), "zeros") if bias else None
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> y [..., out]. Raises ValueError when the last dimension is not in_features."""
        self.start_forward()
        y = self.apply(x)
        self.keep(x=x)
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """dy [..., out] -> dx [..., in]."""
        return self.backward_from(dy, self.take("x"))

    def apply(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x W + b (+ residual [..., out]) without keeping anything."""
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"Linear({self.in_features}, {self.out_features}) got x of shape {x.shape}")
        rows = x.reshape(-1, self.in_features)
        y = self.engine.matmul(rows, self.weight.data)
        if self.bias is not None:
            self.engine.add_bias_(y, self.bias.data)
        if residual is not None:
            self.engine.add_(y, residual.reshape(-1, self.out_features))
        return y.reshape(*x.shape[:-1], self.out_features)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> None:
        """Add x^T dy to the weight's gradient and the column sums of dy to the bias's."""
        rows, d_rows = x.reshape(-1, self.in_features), dy.reshape(-1, self.out_features)
        out, accumulate = self.weight.gradient()
        self.engine.matmul(rows, d_rows, trans_a=True, out=out, accumulate=accumulate)
        self.weight.gradient_written()
        if self.bias is not None:
            out, accumulate = self.bias.gradient()
            self.engine.column_sum(d_rows, out, accumulate=accumulate)
            self.bias.gradient_written()

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dy W^T. Asked for before the weight's gradient is complete: an update right after that changes W."""
        d_rows = dy.reshape(-1, self.out_features)
        dx = self.engine.matmul(d_rows, self.weight.data, trans_b=True)
        return dx.reshape(*dy.shape[:-1], self.in_features)

    def backward_from(self, dy: Tensor, x: Tensor) -> Tensor:
        """backward for an input that the caller kept or rebuilt."""
        dx = self.input_gradient(dy)
        self.weight_gradient(dy, x)
        return dx
