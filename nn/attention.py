"""Multi-head attention with shared key/value heads (MHA, GQA, MQA) and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.attention_folds import describe_folds
from ..engine.compute_engine import ComputeEngine
from ..engine.expr import Expr
from ..engine.tensor import Tensor
from .layer import Layer
from .linear import Linear
from .parameter import Parameter
from .rope import Rope


class Attention(Layer):
    """out(attend(rope(qkv(x)))): Vaswani et al. 2017; grouped heads: Ainslie et al. 2023, "GQA".

    q, k and v come from one matmul: weight [d, (num_heads + 2 num_kv_heads) * head_dim], q heads first. Rotation is in
    place. score, head_values: as for `engine.attention` (ALiBi, softcap). sinks: one trainable score a head, from 0.
    `documents`, an attribute: the document ranges of the batches that follow, or None.

    Keeps x, qkv (rotated), the output O before the last matmul, and one log-sum-exp a row and head; nothing of size
    seq x seq. With "qkv" or "attention" in `recompute`, qkv or (O, log-sum-exp) are freed once read, and rebuilt.

    Raises ValueError when heads do not divide d_model (with head_dim 0) or key/value heads do not divide heads, and for
    a score that attention cannot take.
    """

    def __init__(
        self,
        engine: ComputeEngine,
        d_model: int,
        num_heads: int,
        num_kv_heads: int = 0,
        *,
        head_dim: int = 0,
        bias: bool = False,
        rope: Rope | None = None,
        causal: bool = True,
        window: int = 0,
        score: Expr | None = None,
        head_values: Tensor | None = None,
        sinks: bool = False,
        out_std: float = 0.02,
        seed: int | None = 0,
    ) -> None:
        super().__init__(engine)
        num_kv_heads = num_kv_heads or num_heads
        if not head_dim and d_model % num_heads:
            raise ValueError(f"{num_heads} heads do not divide d_model {d_model}")
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_kv_heads} key/value heads do not divide {num_heads} heads")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim or d_model // num_heads
        self.rope = rope
        self.causal = causal
        self.window = window
        describe_folds(score)
        self.score = score
        self.head_values = head_values
        self.sinks = Parameter(engine, (num_heads,), "zeros") if sinks else None
        self.documents: Tensor | None = None
        self.recompute: frozenset[str] = frozenset()
        width = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.qkv = Linear(engine, d_model, width, bias=bias, seed=None)
        self.out = Linear(engine, num_heads * self.head_dim, d_model, bias=bias, std=out_std, seed=None)
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, d] -> y [batch, seq, d]."""
        y = self.run(lambda: x)
        self.keep(x=x)
        return y

    def backward(self, dy: Tensor) -> Tensor:
        """dy [batch, seq, d] -> dx [batch, seq, d]."""
        x = self.take("x")
        return self.backward_from(dy, lambda: x)

    def run(self, source: Callable[[], Tensor], residual: Tensor | None = None) -> Tensor:
        """forward for a caller that can make x again: `source()` gives it, and it is not kept.

        residual [batch, seq, d] is added to the output.
        """
        self.start_forward()
        qkv = self.project(source())
        o, lse = self._attend(qkv)
        if "qkv" in self.recompute:
            self.made(qkv=qkv)
        else:
            self.keep(qkv=qkv)
        del qkv
        if "attention" in self.recompute:
            self.made(o=o, lse=lse)
        else:
            self.keep(o=o, lse=lse)
        del lse
        return self.out.apply(o, residual)

    def backward_from(self, dy: Tensor, source: Callable[[], Tensor]) -> Tensor:
        """backward; `source()` gives x again whenever it is needed."""
        if "qkv" in self.recompute:
            qkv = self.project(source())
            self.recomputed(qkv=qkv)
        else:
            qkv = self.take("qkv")
        if "attention" in self.recompute:
            o, lse = self._attend(qkv)
            self.recomputed(o=o, lse=lse)
        else:
            o, lse = self.take("o"), self.take("lse")
        d_o = self.out.input_gradient(dy)
        self.out.weight_gradient(dy, o)
        d_qkv = self.engine.attention_qkv_backward(
            d_o,
            qkv,
            o,
            lse,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            **self.options(),
        )
        if self.sinks is not None:
            out, accumulate = self.sinks.gradient()
            self.engine.attention_sinks_backward(d_o, o, lse, self.sinks.data, out, accumulate=accumulate)
            self.sinks.gradient_written()
        del d_o, qkv, o, lse
        if self.rope is not None:
            self.rope.rotate(d_qkv, self.num_heads + self.num_kv_heads, inverse=True)
        dx = self.qkv.input_gradient(d_qkv)
        self.qkv.weight_gradient(d_qkv, source())
        return dx

    def project(self, x: Tensor, position_offset: int = 0) -> Tensor:
        """Rotated qkv [batch, seq, (num_heads + 2 num_kv_heads) * head_dim] of x, whose first row is at the offset."""
        if x.ndim != 3:
            raise ValueError(f"attention needs x of shape [batch, seq, d_model], got {x.shape}")
        qkv = self.qkv.apply(x)
        if self.rope is not None:
            self.rope.rotate(qkv, self.num_heads + self.num_kv_heads, position_offset=position_offset)
        return qkv

    def options(self) -> dict[str, Any]:
        """Masks, sinks and scores, as `engine.attention` and its backward take them."""
        return {
            "causal": self.causal,
            "window": self.window,
            "documents": self.documents,
            "sinks": None if self.sinks is None else self.sinks.data,
            "score": self.score,
            "head_values": self.head_values,
        }

    def _attend(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        return self.engine.attention_qkv(
            qkv, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, **self.options()
        )
