"""Attention over separate q, k and v tensors: one fold over key blocks, forward and backward."""

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

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder


class AttentionOp(Op):
    """o, lse = attention(q, k, v, key_lengths)."""

    name = "attention"

    def outputs(
        self, q: TensorSpec, k: TensorSpec, v: TensorSpec, key_lengths: TensorSpec | None, *, window: int, **_: Any
    ) -> Sequence[TensorSpec]:
        return q, rule.separate_shape(q, k, v, key_lengths, window).lse

    def flops(
        self, q: TensorSpec, k: TensorSpec, v: TensorSpec, *rest: Any, causal: bool, window: int, **_: Any
    ) -> int:
        return rule.flops(rule.separate_shape(q, k, v, None, window), causal, window, products=2)

    def reference(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        key_lengths: np.ndarray | None,
        *,
        causal: bool,
        window: int,
        scale: float,
    ) -> Sequence[np.ndarray]:
        shape = _shape_of(q, k, v, window)
        return rule.reference_forward(shape, q, k, v, key_lengths, causal, window, scale)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        causal: bool,
        window: int,
        scale: float,
    ) -> None:
        q, k, v, lengths = inputs
        shape = rule.separate_shape(q.spec, k.spec, v.spec, None, window)
        o, lse = outputs
        mask = Mask(lengths, causal, window, scale)
        launcher.launch_forward(gpu, shape, mask, [Part(q), Part(k), Part(v)], o, lse)

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels("forward")


class AttentionBackwardOp(Op):
    """d_q, d_k, d_v = attention_backward(d_o, q, k, v, o, lse, key_lengths)."""

    name = "attention_backward"

    def outputs(
        self,
        d_o: TensorSpec,
        q: TensorSpec,
        k: TensorSpec,
        v: TensorSpec,
        o: TensorSpec,
        lse: TensorSpec,
        key_lengths: TensorSpec | None,
        *,
        window: int,
        **_: Any,
    ) -> Sequence[TensorSpec]:
        rule.check_backward(rule.separate_shape(q, k, v, key_lengths, window), d_o, o, lse)
        return q, k, v

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        lse = specs[5]
        assert lse is not None
        return (lse,)  # rowsum(dO * O)

    def flops(
        self,
        d_o: TensorSpec,
        q: TensorSpec,
        k: TensorSpec,
        v: TensorSpec,
        *rest: Any,
        causal: bool,
        window: int,
        **_: Any,
    ) -> int:
        return rule.flops(rule.separate_shape(q, k, v, None, window), causal, window, products=7)

    def reference(
        self,
        d_o: np.ndarray,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        o: np.ndarray,
        lse: np.ndarray,
        key_lengths: np.ndarray | None,
        *,
        causal: bool,
        window: int,
        scale: float,
    ) -> Sequence[np.ndarray]:
        shape = _shape_of(q, k, v, window)
        return rule.reference_backward(shape, d_o, q, k, v, o, lse, key_lengths, causal, window, scale)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        causal: bool,
        window: int,
        scale: float,
    ) -> None:
        d_o, q, k, v, o, lse, lengths = inputs
        *gradients, delta = outputs
        shape = rule.separate_shape(q.spec, k.spec, v.spec, None, window)
        mask = Mask(lengths, causal, window, scale)
        parts = [Part(t) for t in gradients]
        launcher.launch_backward(gpu, shape, mask, d_o, [Part(q), Part(k), Part(v)], o, lse, parts, delta)

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels("d_q", "d_kv", "d_kv_more")


def _shape_of(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int) -> rule.AttentionShape:
    return rule.separate_shape(TensorSpec(q.shape), TensorSpec(k.shape), TensorSpec(v.shape), None, window)


ATTENTION = register(AttentionOp())
ATTENTION_BACKWARD = register(AttentionBackwardOp())


def attention(
    engine: ComputeEngine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, without ever holding the scores (Dao 2023, FlashAttention-2).

    q: [b, s, H, D]. k, v: [b, t, Hkv, D], Hkv dividing H (query head h uses key/value head h * Hkv // H). D up to 256.
    causal: query i, at position t - s + i, sees no later key. window: it sees keys less than `window` positions away
    only (0: all). key_lengths: int32 [b], keys from there on are padding. scale: 1/sqrt(D) unless given.
    Returns o [b, s, H, D] and lse [b, H, s], the log-sum-exp of each row's scores. A row that sees nothing: 0 and -inf.
    Raises ValueError for shapes or types that do not fit.
    """
    factor = _scale(q, scale)
    o, lse = engine.execute(ATTENTION, (q, k, v, key_lengths), causal=bool(causal), window=int(window), scale=factor)
    return o, lse


def attention_backward(
    engine: ComputeEngine,
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` for q, k and v; scores are computed again block by block (Dao 2023, algorithm 2).

    d_o: [b, s, H, D]; o, lse: what `attention` gave; the rest as there. Returns d_q, d_k, d_v in the shapes of q, k, v;
    d_k and d_v are sums over the query heads that share them. Deterministic: no atomics.
    Raises ValueError for shapes or types that do not fit.
    """
    factor = _scale(q, scale)
    inputs = (d_o, q, k, v, o, lse, key_lengths)
    d_q, d_k, d_v = engine.execute(ATTENTION_BACKWARD, inputs, causal=bool(causal), window=int(window), scale=factor)
    return d_q, d_k, d_v


def _scale(q: Tensor, scale: float | None) -> float:
    require_tensors("attention", q=q)
    head_dim = q.shape[-1] if q.ndim else 0
    return 1.0 / math.sqrt(max(head_dim, 1)) if scale is None else float(scale)
