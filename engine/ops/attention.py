"""Attention over separate q, k and v tensors: one fold over key blocks, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention_folds import attention_d_kv, attention_d_q, attention_forward
from ..block_fold_call import BlockCall
from ..expr import Expr
from ..kernel import Kernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from . import attention_launch as launcher
from . import attention_rule as rule
from .attention_launch import Part
from .attention_rule import AttentionShape, Mask
from .block_fold_launch import BlockFoldCalls

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder


def _shape_of(q: Any, k: Any, v: Any) -> AttentionShape:
    """Sizes from tensors, arrays or specs."""
    return rule.separate_shape(*(s if isinstance(s, TensorSpec) else TensorSpec(s.shape) for s in (q, k, v)))


class AttentionOp(BlockFoldCalls):
    """o, lse = attention(q, k, v, key_lengths, documents, sinks, head_values)."""

    name = "attention"
    setting_types = rule.SETTING_TYPES

    def outputs(
        self, q: TensorSpec, k: TensorSpec, v: TensorSpec, *optional: TensorSpec | None, **settings: Any
    ) -> Sequence[TensorSpec]:
        shape = rule.separate_shape(q, k, v)
        rule.check_mask(shape, Mask.of(optional, settings))
        return q, shape.lse

    def flops(self, *specs: Any, causal: bool, window: int, **_: Any) -> int:
        return rule.flops(_shape_of(*specs[:3]), causal, window, products=2)

    def reference(self, *arrays: Any, **settings: Any) -> Sequence[np.ndarray]:
        q, k, v = arrays[:3]
        return rule.reference_forward(_shape_of(q, k, v), Mask.of(arrays[3:], settings), q, k, v)

    def launch(self, gpu: Recorder, inputs: Sequence[Any], outputs: Sequence[Tensor], **settings: Any) -> None:
        q, k, v = inputs[:3]
        o, lse = outputs
        mask = Mask.of(inputs[3:], settings)
        launcher.launch_forward(gpu, _shape_of(q, k, v), mask, [Part(q), Part(k), Part(v)], o, lse)

    def block_calls(self, inputs: Sequence[Any], settings: Mapping[str, Any]) -> list[BlockCall]:
        return launcher.forward_calls(_shape_of(*inputs[:3]), Mask.of(inputs[3:], settings))

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels(attention_forward)


class AttentionBackwardOp(BlockFoldCalls):
    """d_q, d_k, d_v = attention_backward(d_o, q, k, v, o, lse, key_lengths, documents, sinks, head_values)."""

    name = "attention_backward"
    setting_types = rule.SETTING_TYPES

    def outputs(
        self,
        d_o: TensorSpec,
        q: TensorSpec,
        k: TensorSpec,
        v: TensorSpec,
        o: TensorSpec,
        lse: TensorSpec,
        *optional: TensorSpec | None,
        **settings: Any,
    ) -> Sequence[TensorSpec]:
        shape = rule.separate_shape(q, k, v)
        rule.check_mask(shape, Mask.of(optional, settings))
        rule.check_backward(shape, d_o, o, lse)
        return q, k, v

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        lse = specs[5]
        assert lse is not None
        return (lse,)  # rowsum(dO * O)

    def flops(self, *specs: Any, causal: bool, window: int, **_: Any) -> int:
        return rule.flops(_shape_of(*specs[1:4]), causal, window, products=7)

    def reference(self, *arrays: Any, **settings: Any) -> Sequence[np.ndarray]:
        d_o, q, k, v, o, lse = arrays[:6]
        return rule.reference_backward(_shape_of(q, k, v), Mask.of(arrays[6:], settings), d_o, q, k, v, o, lse)

    def launch(self, gpu: Recorder, inputs: Sequence[Any], outputs: Sequence[Tensor], **settings: Any) -> None:
        d_o, q, k, v, o, lse = inputs[:6]
        *gradients, delta = outputs
        mask = Mask.of(inputs[6:], settings)
        parts = [Part(t) for t in gradients]
        launcher.launch_backward(gpu, _shape_of(q, k, v), mask, d_o, [Part(q), Part(k), Part(v)], o, lse, parts, delta)

    def block_calls(self, inputs: Sequence[Any], settings: Mapping[str, Any]) -> list[BlockCall]:
        return launcher.backward_calls(_shape_of(*inputs[1:4]), Mask.of(inputs[6:], settings))

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels(attention_d_q, attention_d_kv)


ATTENTION, ATTENTION_BACKWARD = AttentionOp(), AttentionBackwardOp()
register(ATTENTION)
register(ATTENTION_BACKWARD)


def attention_calls(
    batch: int, heads: int, seq: int, head_dim: int, kv_heads: int | None = None
) -> tuple[BlockCall, BlockCall, BlockCall]:
    """The folds of causal attention, forward and backward, at these sizes: to measure or to name them.

    Raises ValueError for sizes that cannot be.
    """
    q, kv = (TensorSpec((batch, seq, n, head_dim)) for n in (heads, kv_heads or heads))
    settings = rule.settings_of(head_dim, True, 0, None, None)
    _, lse = ATTENTION.outputs(q, kv, kv, **settings)
    (forward,) = ATTENTION.block_calls([q, kv, kv], settings)
    of_queries, of_keys = ATTENTION_BACKWARD.block_calls([q, q, kv, kv, q, lse], settings)
    return forward, of_queries, of_keys


def attention(
    engine: ComputeEngine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    key_lengths: Tensor | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    score: Expr | None = None,
    head_values: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + mask) v, without ever holding the scores (Dao 2023, FlashAttention-2).

    q: [b, s, H, D]. k, v: [b, t, Hkv, D], Hkv dividing H (query head h uses key/value head h * Hkv // H). D up to 256.
    causal: query i, at position t - s + i, sees no later key. window: it sees keys less than `window` positions away
    only (0: all). key_lengths: int32 [b], keys from there on are padding. documents: int32 [b, t, 2] from
    `document_ranges` (engine/attention_scores.py); a query sees keys of its own document only. sinks: [H], one score a
    head that takes part in the softmax without a value (Xiao et al. 2024); their gradient: `attention_sinks_backward`.
    score: an expression that replaces scale * q.k, as `alibi()` or `softcap(30.0)`, with head_values [H] for what it
    calls HEAD (engine/attention_scores.py). scale: finite, 1/sqrt(D) unless given. Blocks of keys that no row of a tile
    may see by causal, window, key_lengths or documents are not visited; those that an expression makes -inf are.
    Returns o [b, s, H, D] and lse [b, H, s], the log-sum-exp of each row's scores. A row that sees nothing: 0 and -inf.
    Raises ValueError for shapes or types that do not fit.
    """
    inputs = (q, k, v, key_lengths, documents, sinks, head_values)
    settings = rule.settings_of(rule.last_size(q), causal, window, scale, score)
    o, lse = engine.execute(ATTENTION, inputs, **settings)
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
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    score: Expr | None = None,
    head_values: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` for q, k and v; scores are computed again block by block (Dao 2023, algorithm 2).

    d_o: [b, s, H, D]; o, lse: what `attention` gave; the rest as there. Returns d_q, d_k, d_v in the shapes of q, k, v;
    d_k and d_v are sums over the query heads that share them. Deterministic: no atomics.
    Raises ValueError for shapes or types that do not fit.
    """
    inputs = (d_o, q, k, v, o, lse, key_lengths, documents, sinks, head_values)
    settings = rule.settings_of(rule.last_size(q), causal, window, scale, score)
    d_q, d_k, d_v = engine.execute(ATTENTION_BACKWARD, inputs, **settings)
    return d_q, d_k, d_v
