"""The feed-forward branch: SwiGLU, or two matrices with GELU or ReLU between."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .layer import Layer
from .linear import Linear

ACTIVATIONS = ("swiglu", "gelu", "relu", "silu")


def default_width(d_model: int, activation: str) -> int:
    """Width of the hidden layer: 8/3 d rounded up to 256 for SwiGLU (Touvron et al. 2023), 4 d otherwise."""
    return -(-8 * d_model // (3 * 256)) * 256 if activation == "swiglu" else 4 * d_model


class FeedForward(Layer):
    """y = down(activation(up(x))). With "swiglu" (Shazeer 2020, "GLU Variants Improve Transformer") `up` is gate and
    value side by side, one matmul [d, 2f], and the activation is silu(first half) * second half.

    Keeps x and the pre-activation; the activation is rebuilt in backward. With "mlp" in `recompute` the pre-activation
    is freed once the activation has read it, and rebuilt from x.

    Raises ValueError for an unknown activation.
    """

    def __init__(
        self,
        engine: ComputeEngine,
        d_model: int,
        d_ff: int = 0,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        down_std: float = 0.02,
        seed: int | None = 0,
    ) -> None:
        super().__init__(engine)
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}: use one of {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.d_ff = d_ff or default_width(d_model, activation)
        self.recompute: frozenset[str] = frozenset()
        up_width = 2 * self.d_ff if activation == "swiglu" else self.d_ff
        self.up = Linear(engine, d_model, up_width, bias=bias, seed=None)
        self.down = Linear(engine, self.d_ff, d_model, bias=bias, std=down_std, seed=None)
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> y [..., d]."""
        y = self.run(lambda: x)
        self.keep(x=x)
        assert y is not None
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """dy [..., d] -> dx [..., d]."""
        x = self.take("x")
        return self.backward_from(dy, lambda: x)

    def run(
        self, source: Callable[[], Tensor], residual: Tensor | None = None, need_output: bool = True
    ) -> Tensor | None:
        """forward for a caller that can make x again: `source()` gives it, and it is not kept.

        residual [..., d] is added to the output. Without need_output only what backward needs is made; returns None.
        """
        self.start_forward()
        if not need_output and (not self.keeps or "mlp" in self.recompute):
            return None
        pre = self.up.apply(source())
        if "mlp" in self.recompute:
            self.made(pre=pre)
        else:
            self.keep(pre=pre)
        if not need_output:
            return None
        hidden = self._activate(pre)
        del pre
        self.made(hidden=hidden)
        return self.down.apply(hidden, residual)

    def apply(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """forward (+ residual [..., d]) without keeping anything."""
        return self.down.apply(self._activate(self.up.apply(x)), residual)

    def backward_from(self, dy: Tensor, source: Callable[[], Tensor]) -> Tensor:
        """backward; `source()` gives x again whenever it is needed."""
        if "mlp" in self.recompute:
            pre = self.up.apply(source())
            self.recomputed(pre=pre)
        else:
            pre = self.take("pre")
        d_hidden = self.down.input_gradient(dy)
        if self.activation == "swiglu":
            d_pre = self.engine.swiglu_backward(d_hidden, pre)
        else:
            d_pre = self.engine.activation_backward(d_hidden, pre, self.activation)
        del d_hidden
        hidden = self._activate(pre)
        del pre
        self.made_again(hidden=hidden)
        self.down.weight_gradient(dy, hidden)
        del hidden
        dx = self.up.input_gradient(d_pre)
        self.up.weight_gradient(d_pre, source())
        return dx

    def _activate(self, pre: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return self.engine.swiglu(pre)
        return self.engine.activation(pre, self.activation)
