"""How far float32 attention may lie from float64, element by element, from the roundings of each sum.

eps is half a unit in the last place. exp may be off by 3 + 2|x| units, log by 3 (Vulkan's precision table). Every sum
of n products by fma adds n eps of its absolute terms. Nothing here is fitted to what a device gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .error_bounds import EPS32, Arrays

TINY = 1e-36  # weights below exp(-87) count as 0


def _expand(x: np.ndarray, heads: int) -> np.ndarray:
    """[b, t, Hkv, D] -> float64 [b, H, t, D], each kv head repeated for its query heads."""
    return np.repeat(np.moveaxis(x.astype(np.float64), 2, 1), heads // x.shape[2], axis=1)


def _scores(q: np.ndarray, k: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores and the bound of their error: head_dim roundings, the product with scale, and scale's own."""
    qh, kh = np.moveaxis(q.astype(np.float64), 2, 1), _expand(k, q.shape[2])
    s = qh @ kh.swapaxes(-1, -2) * scale
    return s, (q.shape[3] + 3) * EPS32 * (np.abs(qh) @ np.abs(kh).swapaxes(-1, -2)) * abs(scale)


def _exp_error(x: np.ndarray) -> np.ndarray:
    """Relative error of exp(x) with x a rounded difference."""
    return (3 + 2 * np.abs(x)) * 2 * EPS32 + np.abs(x) * EPS32


def forward_bounds(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of o [b, s, H, D] and lse [b, H, s]; seen [b, 1, s, t] is the mask."""
    s, d_s = _scores(q, k, scale)
    masked = np.where(seen, s, -np.inf)
    top = masked.max(axis=-1, keepdims=True, initial=-np.inf)
    shift = np.where(np.isneginf(top), 0, top)
    p = np.exp(masked - shift)
    total = np.maximum(p.sum(axis=-1, keepdims=True), 1)
    p /= total
    spread = np.where(seen, shift - s, 0).max(axis=-1, keepdims=True, initial=0)
    terms = k.shape[1]  # roundings of a sum over keys; a block has at least two keys and may rescale once
    relative = d_s + _exp_error(spread) + (terms / 2) * 6 * EPS32 + 2 * terms * EPS32
    mean = (p * relative).sum(axis=-1, keepdims=True)
    vh = np.abs(_expand(v, q.shape[2]))
    o = (p * (relative + mean + 4 * EPS32)) @ vh + TINY
    size = np.abs(shift) + np.log(total)
    lse = mean + 4 * EPS32 * size + 2**-20
    return np.moveaxis(o, 1, 2), lse[..., 0]


def backward_bounds(
    d_o: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    seen: np.ndarray,
    scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of d_q, d_k and d_v for exactly these o and lse."""
    heads, head_dim, num_keys = q.shape[2], q.shape[3], k.shape[1]
    s, d_s = _scores(q, k, scale)
    seen = seen & ~np.isneginf(lse)[..., None]
    x = np.where(seen, s - np.where(np.isneginf(lse), 0, lse)[..., None], 0)
    p = np.where(seen, np.exp(x), 0)
    relative = d_s + np.abs(np.where(seen, s, 0)) * EPS32 + _exp_error(x)
    go, vh = np.moveaxis(d_o.astype(np.float64), 2, 1), _expand(v, heads)
    oh = np.moveaxis(o.astype(np.float64), 2, 1)
    reach = np.abs(go) @ np.abs(vh).swapaxes(-1, -2)
    delta = (np.abs(go) * np.abs(oh)).sum(axis=-1, keepdims=True)
    # d_s = p (d_p - delta) scale: each factor's error by the size of the others, and three roundings
    g = p * (reach + delta) * abs(scale)
    g_error = g * (relative + (head_dim + 4) * EPS32) + TINY * seen
    qh, kh = np.moveaxis(q.astype(np.float64), 2, 1), _expand(k, heads)
    rows = q.shape[1] * heads // k.shape[2]  # products in one sum of d_k or d_v

    def over_group(per_head: np.ndarray) -> np.ndarray:
        b, _, t, d = per_head.shape
        return np.moveaxis(per_head.reshape(b, k.shape[2], -1, t, d).sum(axis=2), 1, 2)

    d_q = (g_error + num_keys * EPS32 * g) @ np.abs(kh)
    d_k = over_group((g_error + rows * EPS32 * g).swapaxes(-1, -2) @ np.abs(qh))
    d_v = over_group((p * (relative + rows * EPS32) + TINY * seen).swapaxes(-1, -2) @ np.abs(go))
    return np.moveaxis(d_q, 1, 2), d_k, d_v


def logistic_bounds(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of sums of v weighted by the logistic function of scores, y [b, s, H, D], and of those weights, [b, H, s].

    The function's slope is w (1 - w); of its own it has an exp over 1 + exp: two errors of an exp, a sum, a division.
    """
    s, d_s = _scores(q, k, scale)
    w = np.where(seen, 1 / (1 + np.exp(-s)), 0)
    error = w * ((1 - w) * d_s + 2 * _exp_error(s) + 8 * EPS32) + TINY * seen
    terms = k.shape[1]
    y = (error + terms * EPS32 * w) @ np.abs(_expand(v, q.shape[2]))
    return np.moveaxis(y, 1, 2), (error + 2 * terms * EPS32 * w).sum(axis=-1)


def _by_group(
    of_group: Callable[..., Sequence[np.ndarray]], kv_heads: int, inputs: Arrays, expected: Arrays
) -> list[np.ndarray]:
    """Bounds of causal attention, one head of k and v with its heads of q at a time: they go through squares of the
    sequence. of_group: gives them for the inputs of a group, the mask and the scale."""
    batch, seq, _, head_dim = inputs[0].shape
    seen = np.tri(seq, dtype=bool)[None, None]

    def part(array: np.ndarray, b: int, group: int) -> np.ndarray:
        heads = array.shape[2] if array.ndim == 4 else array.shape[1]
        of = slice(group * heads // kv_heads, (group + 1) * heads // kv_heads)
        return array[b : b + 1, :, of] if array.ndim == 4 else array[b : b + 1, of]

    bounds = [np.zeros(e.shape) for e in expected]
    for b in range(batch):
        for group in range(kv_heads):
            found = of_group(*(part(a, b, group) for a in inputs), seen, head_dim**-0.5)
            for bound, of_heads in zip(bounds, found, strict=True):
                part(bound, b, group)[...] = of_heads
    return bounds


def causal_forward(inputs: Arrays, expected: Arrays) -> list[np.ndarray]:
    """Of o and lse of causal attention, from q, k, v."""
    return _by_group(forward_bounds, inputs[1].shape[2], inputs, expected)


def causal_backward(inputs: Arrays, expected: Arrays) -> list[np.ndarray]:
    """Of d_q, d_k and d_v of causal attention, from d_o, q, k, v, o, lse."""
    return _by_group(backward_bounds, inputs[2].shape[2], inputs, expected)


def causal_logistic(inputs: Arrays, expected: Arrays) -> list[np.ndarray]:
    """Of `logistic_bounds`, from q, k, v."""
    return _by_group(logistic_bounds, inputs[1].shape[2], inputs, expected)
