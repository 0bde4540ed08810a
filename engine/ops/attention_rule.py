"""What both attention ops share on the host: shapes, the mask rule, cost, and the plain NumPy formulas.

The mask rule, in one place: with s queries and t keys, query i stands at position t - s + i. It sees key j if

- j < key_lengths[batch] (key padding; all t keys when there are no lengths),
- causal: j <= position,
- window w > 0: j > position - w, and j < position + w (the second half only matters without `causal`).

A query that sees nothing, or only scores of -inf, has output 0, log-sum-exp -inf and no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..tensor import TensorSpec

MAX_HEAD_DIM = 256
MAX_POSITIONS = 2**16 * 2 - 1024  # a kernel passes two positions a round, and no driver may cut its loop short


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


def separate_shape(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, key_lengths: TensorSpec | None, window: int
) -> AttentionShape:
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
    _check(shape, (q, k, v), key_lengths, window)
    return shape


def fused_shape(
    qkv: TensorSpec, key_lengths: TensorSpec | None, num_heads: int, num_kv_heads: int, window: int
) -> AttentionShape:
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
    _check(shape, (qkv,), key_lengths, window)
    return shape


def _check(shape: AttentionShape, specs: tuple[TensorSpec, ...], key_lengths: TensorSpec | None, window: int) -> None:
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
    if window < 0:
        raise ValueError(f"attention: window {window} is negative; 0 means no window")
    if key_lengths is not None and key_lengths != TensorSpec((shape.batch,), "int32"):
        raise ValueError(f"attention: key_lengths must be int32 [{shape.batch}], not {key_lengths}")


def check_backward(shape: AttentionShape, d_o: TensorSpec, o: TensorSpec, lse: TensorSpec) -> None:
    """Raises ValueError when what forward gave does not belong to these inputs."""
    if d_o.shape != o.shape or o.size != shape.batch * shape.num_queries * shape.o_row:
        raise ValueError(f"attention backward: d_o {d_o.shape} and o {o.shape} do not fit the inputs")
    if lse.shape != shape.lse.shape:
        raise ValueError(f"attention backward: lse must be {shape.lse.shape}, not {lse.shape}")


def visible_range(shape: AttentionShape, causal: bool, window: int) -> tuple[np.ndarray, np.ndarray]:
    """First key each query sees and one past the last, key padding apart: the mask rule as two int arrays."""
    position = shape.num_keys - shape.num_queries + np.arange(shape.num_queries)
    low, high = np.zeros_like(position), np.full_like(position, shape.num_keys)
    if window:
        low = np.maximum(low, position - window + 1)
        high = np.minimum(high, position + window)
    if causal:
        high = np.minimum(high, position + 1)
    return low, np.maximum(high, low)


def flops(shape: AttentionShape, causal: bool, window: int, products: int) -> int:
    """Floating-point operations of `products` multiplications of seen (query, key) pairs by head_dim."""
    low, high = visible_range(shape, causal, window)
    return 2 * products * shape.head_dim * shape.batch * shape.num_heads * int((high - low).sum())


def _mask(shape: AttentionShape, batch: int, key_lengths: np.ndarray | None, causal: bool, window: int) -> np.ndarray:
    position = (shape.num_keys - shape.num_queries + np.arange(shape.num_queries))[:, None]
    key = np.arange(shape.num_keys)[None, :]
    seen = np.ones((shape.num_queries, shape.num_keys), bool)
    if key_lengths is not None:
        seen &= key < key_lengths[batch]
    if causal:
        seen &= key <= position
    if window:
        seen &= np.abs(position - key) < window
    return seen


def reference_forward(
    shape: AttentionShape,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    key_lengths: np.ndarray | None,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scale * q k^T + mask) v, one head at a time, and the log-sum-exp of each row.

    q [b, s, H, D], k and v [b, t, Hkv, D] -> o [b, s, H, D], lse [b, H, s].
    """
    o = np.zeros_like(q)
    lse = np.full(shape.lse.shape, -np.inf, q.dtype)
    group = shape.num_heads // shape.num_kv_heads
    for b in range(shape.batch):
        seen = _mask(shape, b, key_lengths, causal, window)
        for h in range(shape.num_heads):
            scores = np.where(seen, (q[b, :, h] @ k[b, :, h // group].T) * q.dtype.type(scale), -np.inf)
            top = scores.max(axis=1, initial=-np.inf)
            shift = np.where(np.isneginf(top), 0, top).astype(q.dtype)
            weights = np.exp(scores - shift[:, None])
            total = weights.sum(axis=1)
            alive = total != 0
            safe = np.where(alive, total, 1)
            # Keys that no query sees take no part at all: they may never have been written.
            used = seen.any(axis=0)
            o[b, :, h] = np.where(alive[:, None], weights[:, used] @ v[b, used, h // group] / safe[:, None], 0)
            lse[b, h] = np.where(alive, shift + np.log(safe), -np.inf)
    return o, lse


def reference_backward(
    shape: AttentionShape,
    d_o: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    key_lengths: np.ndarray | None,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of `reference_forward` by the chain rule of softmax: dS = P * (dO v^T - rowsum(dO * O))."""
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    group = shape.num_heads // shape.num_kv_heads
    factor = q.dtype.type(scale)
    for b in range(shape.batch):
        seen = _mask(shape, b, key_lengths, causal, window)
        for h in range(shape.num_heads):
            g = h // group
            row_lse = lse[b, h][:, None]
            seen_h = seen & ~np.isneginf(row_lse)
            scores = (q[b, :, h] @ k[b, :, g].T) * factor
            p = np.where(seen_h, np.exp(scores - np.where(np.isneginf(row_lse), 0, row_lse)), 0)
            delta = (d_o[b, :, h] * o[b, :, h]).sum(axis=1)[:, None]
            d_s = np.where(seen_h, p * (d_o[b, :, h] @ v[b, :, g].T - delta), 0) * factor
            used = seen.any(axis=0)  # keys that no query sees may never have been written
            d_q[b, :, h] = d_s[:, used] @ k[b, used, g]
            d_k[b, :, g] += d_s.T @ q[b, :, h]
            d_v[b, :, g] += p.T @ d_o[b, :, h]
    return d_q, d_k, d_v
