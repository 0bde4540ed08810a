"""What both attention ops share on the host: shapes, settings, cost, and the NumPy formulas.

Which keys a query sees is told by engine/attention_masks.py. A query that sees nothing, or only scores of -inf, has
output 0, log-sum-exp -inf and no gradient. With a sink, a score of its head with no value behind it, the log-sum-exp is
never below the sink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..attention_folds import attention_d_kv, attention_d_q, attention_forward
from ..attention_masks import seen_pairs, visible_range
from ..attention_scores import check_score
from ..expr import Expr
from ..setting_checks import is_whole
from ..tensor import Tensor, TensorSpec
from .block_fold_launch import MAX_HEAD_DIM, MAX_HEADS, MAX_POSITIONS

SETTING_TYPES = {"causal": "bool", "window": "int", "scale": "finite"}  # as annotations of a shape rule


class Mask(NamedTuple):
    """Optional inputs of one call (tensors, arrays or specs) and its settings: what is seen, what becomes of scores."""

    lengths: Any
    documents: Any
    sinks: Any
    head_values: Any
    causal: bool
    window: int
    scale: float
    score: Expr | None

    @classmethod
    def of(cls, optional: Sequence[Any], settings: Mapping[str, Any]) -> Mask:
        """From the optional inputs of an op, of which the last may be missing, and its settings."""
        lengths, documents, sinks, head_values = [*optional, None, None, None, None][:4]
        causal, window, scale = (settings[name] for name in ("causal", "window", "scale"))
        return cls(lengths, documents, sinks, head_values, causal, window, scale, settings.get("score"))


def settings_of(head_dim: int, causal: bool, window: int, scale: float | None, score: Expr | None) -> dict[str, Any]:
    """Settings of the ops from what a caller gave; the scale is 1 / sqrt(head_dim) unless given."""
    factor = 1.0 / math.sqrt(max(head_dim, 1)) if scale is None else scale
    # Anything but a whole number is refused by its type; beyond all positions one window is as good as another.
    whole = min(int(window), 2**31 - 1) if is_whole(window) else window
    return {"causal": causal, "window": whole, "scale": factor, "score": score}


def last_size(tensor: Any) -> int:
    """Size of the last dimension; 0 without one, and for what is no tensor (the op refuses it by name)."""
    return tensor.shape[-1] if isinstance(tensor, Tensor) and tensor.ndim else 0


class AttentionShape(NamedTuple):
    """Sizes of one call. `q_row`, `kv_row` and `o_row` are elements from one position to the next in memory."""

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_row: int
    kv_row: int
    o_row: int

    @property
    def lse(self) -> TensorSpec:
        """Spec of the log-sum-exp: one number a query row and head."""
        return TensorSpec((self.batch, self.num_heads, self.num_queries))


def separate_shape(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> AttentionShape:
    """Sizes of attention over three tensors. Raises ValueError naming what does not fit."""
    for name, spec in (("q", q), ("k", k), ("v", v)):
        if len(spec.shape) != 4:
            raise ValueError(f"attention: {name} must be [batch, positions, heads, head_dim], not {spec.shape}")
    batch, num_queries, num_heads, head_dim = q.shape
    if k.shape != v.shape:
        raise ValueError(f"attention: k {k.shape} and v {v.shape} must have one shape")
    num_keys, num_kv_heads = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"attention: q {q.shape} and k {k.shape} differ in batch or head_dim")
    shape = AttentionShape(
        batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim,
        num_heads * head_dim, num_kv_heads * head_dim, num_heads * head_dim,
    )  # fmt: skip
    _check(shape, (q, k, v))
    return shape


def fused_shape(qkv: TensorSpec, num_heads: int, num_kv_heads: int) -> AttentionShape:
    """Sizes of attention over one tensor that holds q, k and v. Raises ValueError naming what does not fit."""
    if len(qkv.shape) != 3:
        raise ValueError(f"attention_qkv: qkv must be [batch, seq, (heads + 2 kv_heads) * head_dim], not {qkv.shape}")
    if num_heads < 1 or num_kv_heads < 1:
        raise ValueError(f"attention_qkv: num_heads {num_heads} and num_kv_heads {num_kv_heads} must be at least 1")
    batch, seq, width = qkv.shape
    if width % (num_heads + 2 * num_kv_heads):
        raise ValueError(f"attention_qkv: width {width} is no multiple of {num_heads} + 2 * {num_kv_heads} heads")
    head_dim = width // (num_heads + 2 * num_kv_heads)
    shape = AttentionShape(batch, seq, seq, num_heads, num_kv_heads, head_dim, width, width, num_heads * head_dim)
    _check(shape, (qkv,))
    return shape


def _check(shape: AttentionShape, specs: tuple[TensorSpec, ...]) -> None:
    if any(spec.dtype != "float32" for spec in specs):
        raise ValueError(f"attention: float32 tensors are needed, not {', '.join(spec.dtype for spec in specs)}")
    if not 1 <= shape.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"attention: head_dim {shape.head_dim} is not within 1..{MAX_HEAD_DIM}")
    if max(shape.num_queries, shape.num_keys) > MAX_POSITIONS:
        raise ValueError(
            f"attention: {shape.num_queries} queries and {shape.num_keys} keys; at most {MAX_POSITIONS} are possible"
        )
    if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"attention: {shape.num_heads} heads cannot share {shape.num_kv_heads} kv heads evenly")
    if shape.num_heads > MAX_HEADS:
        raise ValueError(f"attention: {shape.num_heads} heads; at most {MAX_HEADS} are possible")


def check_mask(shape: AttentionShape, mask: Mask) -> None:
    """Raises ValueError when an optional input or a setting does not belong to these sizes."""
    if mask.window < 0:
        raise ValueError(f"attention: window {mask.window} is negative; 0 means no window")
    wanted = {
        "key_lengths": (mask.lengths, TensorSpec((shape.batch,), "int32")),
        "documents": (mask.documents, TensorSpec((shape.batch, shape.num_keys, 2), "int32")),
        "sinks": (mask.sinks, TensorSpec((shape.num_heads,))),
        "head_values": (mask.head_values, TensorSpec((shape.num_heads,))),
    }
    for name, (given, needed) in wanted.items():
        if given is not None and given != needed:
            sizes = ", ".join(map(str, needed.shape))
            raise ValueError(f"attention: {name} must be {needed.dtype} [{sizes}], not {given.dtype} {given.shape}")
    if mask.score is not None:
        check_score(mask.score, mask.head_values is not None)
    elif mask.head_values is not None:
        raise ValueError("attention: head_values without a score that has HEAD in it")


def check_backward(shape: AttentionShape, d_o: TensorSpec, o: TensorSpec, lse: TensorSpec) -> None:
    """Raises ValueError when what forward gave does not belong to these inputs."""
    if d_o.shape != o.shape or o.size != shape.batch * shape.num_queries * shape.o_row:
        raise ValueError(f"attention backward: d_o {d_o.shape} and o {o.shape} do not fit the inputs")
    if lse.shape != shape.lse.shape:
        raise ValueError(f"attention backward: lse must be {shape.lse.shape}, not {lse.shape}")


def flops(shape: AttentionShape, causal: bool, window: int, products: int) -> int:
    """Floating-point operations of `products` multiplications of seen (query, key) pairs by head_dim."""
    low, high = visible_range(shape.num_queries, shape.num_keys, causal, window)
    return 2 * products * shape.head_dim * shape.batch * shape.num_heads * int((high - low).sum())


def _seen(shape: AttentionShape, mask: Mask) -> np.ndarray:
    return seen_pairs(
        shape.batch,
        shape.num_queries,
        shape.num_keys,
        causal=mask.causal,
        window=mask.window,
        lengths=mask.lengths,
        documents=mask.documents,
    )


def reference_forward(
    shape: AttentionShape, mask: Mask, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(score(scale * q k^T) + mask) v, one head at a time, and the log-sum-exp of each row.

    q [b, s, H, D], k and v [b, t, Hkv, D] -> o [b, s, H, D], lse [b, H, s].
    """
    fold = attention_forward(mask.score)
    seen = _seen(shape, mask)
    o, lse = fold.reference(seen, q=q, k=k, v=v, scale=mask.scale, head=mask.head_values, sinks=mask.sinks)
    return o, lse


def reference_backward(
    shape: AttentionShape,
    mask: Mask,
    d_o: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of `reference_forward` by the chain rule of softmax: dS = P * (dO v^T - rowsum(dO * O))."""
    seen = _seen(shape, mask)
    given = {"d_o": d_o, "q": q, "k": k, "v": v, "lse": lse, "scale": mask.scale, "head": mask.head_values}
    d_q, delta = attention_d_q(mask.score).reference(seen, o=o, **given)
    d_k, d_v = attention_d_kv(mask.score).reference(seen.swapaxes(1, 2), delta=delta, **given)
    return d_q, d_k, d_v
