"""Attention's masks: which keys a query sees. One rule, for kernels (shaders/attention_masks.glsl) and in NumPy.

With s queries and t keys, query i stands at position t - s + i. It sees key j if

- j < key_lengths[batch] (key padding; all t keys when there are no lengths),
- documents: first <= j < past, the range of the document that the position is in,
- causal: j <= position,
- window w > 0: j > position - w, and j < position + w (the second half only matters without `causal`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .block_fold import SeenRows

_TENSORS = ("key_lengths", "documents")
KEYS_OF_QUERIES = SeenRows("attention_masks.glsl", _TENSORS, {"KEYS_HELD": 0})  # queries held, keys streamed
QUERIES_OF_KEYS = SeenRows("attention_masks.glsl", _TENSORS, {"KEYS_HELD": 1})  # keys held, queries streamed
_CAUSAL, _LENGTHS, _DOCUMENTS = 1, 2, 4


def mask_flags(num_queries: int, num_keys: int, *, causal: bool, window: int, lengths: bool, documents: bool) -> int:
    """What kernels take of a mask in one word: which are on, and the window (beyond all positions one is as good as
    another).
    """
    flags = _CAUSAL * causal | _LENGTHS * lengths | _DOCUMENTS * documents
    return min(window, num_queries + num_keys) | flags << 24


def visible_range(num_queries: int, num_keys: int, causal: bool, window: int) -> tuple[np.ndarray, np.ndarray]:
    """First key each query sees and one past the last, by `causal` and `window` alone: two int arrays."""
    position = num_keys - num_queries + np.arange(num_queries)
    low, high = np.zeros_like(position), np.full_like(position, num_keys)
    if window:
        low = np.maximum(low, position - window + 1)
        high = np.minimum(high, position + window)
    if causal:
        high = np.minimum(high, position + 1)
    return low, np.maximum(high, low)


def seen_pairs(
    batch: int,
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: int,
    lengths: Any = None,
    documents: Any = None,
) -> np.ndarray:
    """Whether a query sees a key, bool [batch, queries, keys]. lengths: [batch]; documents: [batch, keys, 2]."""
    position = (num_keys - num_queries + np.arange(num_queries))[:, None]
    key = np.arange(num_keys)[None, :]
    seen = np.ones((batch, num_queries, num_keys), bool)
    if lengths is not None:
        seen &= key < np.asarray(lengths)[:, None, None]
    if documents is not None:
        ranges = np.asarray(documents)[:, np.clip(position[:, 0], 0, None)]
        seen &= (position >= 0) & (key >= ranges[..., :1]) & (key < ranges[..., 1:])
    if causal:
        seen &= key <= position
    if window:
        seen &= np.abs(position - key) < window
    return seen
