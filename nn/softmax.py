"""Softmax over the last dimension."""

from __future__ import annotations

from ..engine.tensor import Tensor
from .layer import Layer


class Softmax(Layer):
    """y = exp(x - max) / sum, over the last dimension. Keeps y."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., n] -> y [..., n]."""
        self.start_forward()
        y = self.engine.softmax(x)
        self.keep(y=y)
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """dy [..., n] -> dx [..., n]."""
        return self.engine.softmax_backward(dy, self.take("y"))
