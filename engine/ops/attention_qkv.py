"""Attention over the one tensor a q/k/v projection gives: no copies to split it, none to join its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..input_checks import require_tensors
from ..kernel import Kernel
from ..op import Op, register
from ..tensor import Tensor, TensorSpec
from . import attention_launch as launcher
from . import attention_rule as rule
from .attention_launch import Mask, Part
from .attention_rule import AttentionShape

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder


def _parts(qkv: Tensor, shape: AttentionShape) -> tuple[Part, Part, Part]:
    start_k = shape.num_heads * shape.head_dim
    return Part(qkv), Part(qkv, start_k), Part(qkv, start_k + shape.num_kv_heads * shape.head_dim)


def _split(qkv: np.ndarray, shape: AttentionShape) -> list[np.ndarray]:
    heads = qkv.reshape(shape.batch, shape.num_queries, -1, shape.head_dim)
    return np.split(heads, [shape.num_heads, shape.num_heads + shape.num_kv_heads], axis=2)


class AttentionQkvOp(Op):
    """o, lse = attention_qkv(qkv, key_lengths)."""

    name = "attention_qkv"

    def outputs(
        self,
        qkv: TensorSpec,
        key_lengths: TensorSpec | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        window: int,
        **_: Any,
    ) -> Sequence[TensorSpec]:
        shape = rule.fused_shape(qkv, key_lengths, num_heads, num_kv_heads, window)
        return TensorSpec((shape.batch, shape.num_queries, shape.o_row)), shape.lse

    def flops(
        self,
        qkv: TensorSpec,
        *rest: Any,
        num_heads: int,
        num_kv_heads: int,
        causal: bool,
        window: int,
        **_: Any,
    ) -> int:
        shape = rule.fused_shape(qkv, None, num_heads, num_kv_heads, window)
        return rule.flops(shape, causal, window, products=2)

    def reference(
        self,
        qkv: np.ndarray,
        key_lengths: np.ndarray | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        causal: bool,
        window: int,
        scale: float,
    ) -> Sequence[np.ndarray]:
        shape = rule.fused_shape(TensorSpec(qkv.shape), None, num_heads, num_kv_heads, window)
        q, k, v = _split(qkv, shape)
        o, lse = rule.reference_forward(shape, q, k, v, key_lengths, causal, window, scale)
        return o.reshape(shape.batch, shape.num_queries, shape.o_row), lse

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        num_heads: int,
        num_kv_heads: int,
        causal: bool,
        window: int,
        scale: float,
    ) -> None:
        qkv, lengths = inputs
        shape = rule.fused_shape(qkv.spec, None, num_heads, num_kv_heads, window)
        o, lse = outputs
        launcher.launch_forward(gpu, shape, Mask(lengths, causal, window, scale), _parts(qkv, shape), o, lse)

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels("forward")


class AttentionQkvBackwardOp(Op):
    """d_qkv = attention_qkv_backward(d_o, qkv, o, lse, key_lengths)."""

    name = "attention_qkv_backward"

    def outputs(
        self,
        d_o: TensorSpec,
        qkv: TensorSpec,
        o: TensorSpec,
        lse: TensorSpec,
        key_lengths: TensorSpec | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        window: int,
        **_: Any,
    ) -> Sequence[TensorSpec]:
        shape = rule.fused_shape(qkv, key_lengths, num_heads, num_kv_heads, window)
        rule.check_backward(shape, d_o, o, lse)
        return (qkv,)

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        lse = specs[3]
        assert lse is not None
        return (lse,)  # rowsum(dO * O)

    def flops(
        self,
        d_o: TensorSpec,
        qkv: TensorSpec,
        *rest: Any,
        num_heads: int,
        num_kv_heads: int,
        causal: bool,
        window: int,
        **_: Any,
    ) -> int:
        shape = rule.fused_shape(qkv, None, num_heads, num_kv_heads, window)
        return rule.flops(shape, causal, window, products=7)

    def reference(
        self,
        d_o: np.ndarray,
        qkv: np.ndarray,
        o: np.ndarray,
        lse: np.ndarray,
        key_lengths: np.ndarray | None,
        *,
        num_heads: int,
        num_kv_heads: int,
        causal: bool,
        window: int,
        scale: float,
    ) -> Sequence[np.ndarray]:
        shape = rule.fused_shape(TensorSpec(qkv.shape), None, num_heads, num_kv_heads, window)
        q, k, v = _split(qkv, shape)
        d_o, o = d_o.reshape(q.shape), o.reshape(q.shape)
        parts = rule.reference_backward(shape, d_o, q, k, v, o, lse, key_lengths, causal, window, scale)
        return (np.concatenate(parts, axis=2).reshape(qkv.shape),)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        num_heads: int,
        num_kv_heads: int,
        causal: bool,
        window: int,
        scale: float,
    ) -> None:
        d_o, qkv, o, lse, lengths = inputs
        d_qkv, delta = outputs
        shape = rule.fused_shape(qkv.spec, None, num_heads, num_kv_heads, window)
        mask = Mask(lengths, causal, window, scale)
        launcher.launch_backward(gpu, shape, mask, d_o, _parts(qkv, shape), o, lse, _parts(d_qkv, shape), delta)

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels("d_q", "d_kv", "d_kv_more")


ATTENTION_QKV = register(AttentionQkvOp())
ATTENTION_QKV_BACKWARD = register(AttentionQkvBackwardOp())


def attention_qkv(
    engine: ComputeEngine,
    qkv: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window: int = 0,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` on one tensor: each position holds num_heads query heads, then num_kv_heads of k, then of v.

    qkv: [b, s, (num_heads + 2 num_kv_heads) * D]. Masks and scale as for `attention`.
    Returns o [b, s, num_heads * D] and lse [b, num_heads, s]. Raises ValueError for shapes or types that do not fit.
    """
    o, lse = engine.execute(
        ATTENTION_QKV,
        (qkv, key_lengths),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        causal=bool(causal),
        window=int(window),
        scale=_scale(qkv, num_heads + 2 * num_kv_heads, scale),
    )
    return o, lse


def attention_qkv_backward(
    engine: ComputeEngine,
    d_o: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window: int = 0,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Gradient of `attention_qkv` for qkv, in its shape. d_o: [b, s, num_heads * D]; o, lse: what forward gave.

    Raises ValueError for shapes or types that do not fit.
    """
    (d_qkv,) = engine.execute(
        ATTENTION_QKV_BACKWARD,
        (d_o, qkv, o, lse, key_lengths),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        causal=bool(causal),
        window=int(window),
        scale=_scale(qkv, num_heads + 2 * num_kv_heads, scale),
    )
    return d_qkv


def _scale(qkv: Tensor, heads: int, scale: float | None) -> float:
    require_tensors("attention_qkv", qkv=qkv)
    head_dim = qkv.shape[-1] // max(heads, 1) if qkv.ndim else 0
    return 1.0 / math.sqrt(max(head_dim, 1)) if scale is None else float(scale)
