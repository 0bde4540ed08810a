"""The ops of kernel_lab that go over heads: attention, separate and on one tensor, a block fold of another kind, rope.

A shape may name fewer heads of keys and values: 1x8(2)x512x64 is 8 heads of queries in groups of 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine.attention_masks import KEYS_OF_QUERIES
from ..engine.block_fold import BlockFold, RowSum
from ..engine.block_fold_call import BlockCall
from ..engine.cpu_engine import CpuEngine
from ..engine.expr import logistic, variable, variables
from ..engine.fold import State, Walk
from ..engine.ops import attention_rule as rule
from ..engine.ops.attention import attention_calls
from ..engine.ops.attention_qkv import ATTENTION_QKV, ATTENTION_QKV_BACKWARD
from ..engine.ops.block_fold import BLOCK_FOLD
from ..engine.tensor import Tensor, TensorSpec
from .attention_bounds import causal_backward, causal_forward, causal_logistic
from .error_bounds import Arrays, of_rope
from .lab_subject import Inputs, Subject

HEADS = "BATCHxHEADSxSEQxHEAD_DIM"
GROUPED_HEADS = "BATCHxHEADS(KV_HEADS)xSEQxHEAD_DIM"  # sizes: batch, heads, kv_heads, seq, head_dim

_qk, _scale = variables("qk scale")
LOGISTIC = BlockFold(  # sigmoid attention (Ramapuram et al. 2024, arXiv 2409.04431) without its bias
    "lab_logistic",
    held=["q"],
    streamed=["k", "v"],
    products={"qk": ("q", "k")},
    walk=Walk([State("weights", "sum", logistic(_qk * _scale))]),
    sums=[RowSum("y", "v", logistic(_qk * _scale))],
    rows={"y": variable("y")},
    values={"total": variable("weights")},
    scalars=["scale"],
    seen=KEYS_OF_QUERIES,
)


def _rope_inputs(rng: np.random.Generator, b: int, h: int, s: int, d: int) -> list[np.ndarray]:
    if d % 2:
        raise ValueError(f"rope: head_dim is {d}, it must be even: pairs are rotated")
    angle = np.arange(s)[:, None] * 1e4 ** (-2 * np.arange(d // 2) / d)
    return [
        rng.standard_normal((b, s, h * d)).astype(np.float32),
        *(f(angle).astype(np.float32) for f in (np.cos, np.sin)),
    ]


def _rope(engine: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    head_dim = 2 * cos.shape[1]
    engine.rope_(x, cos, sin, num_heads=x.shape[-1] // head_dim, head_dim=head_dim)
    return x


def _qkv(rng: np.random.Generator, b: int, h: int, kv: int, s: int, d: int) -> list[np.ndarray]:
    return [rng.standard_normal((b, s, n, d)).astype(np.float32) for n in (h, kv, kv)]


def _backward(rng: np.random.Generator, b: int, h: int, kv: int, s: int, d: int) -> list[np.ndarray]:
    """d_o, q, k, v, and what forward makes of them."""
    q, k, v = _qkv(rng, b, h, kv, s, d)
    oracle = CpuEngine("float64")
    o, lse = oracle.attention(*(oracle.tensor(array) for array in (q, k, v)), causal=True)
    d_o = rng.standard_normal(q.shape).astype(np.float32)
    return [d_o, q, k, v, o.numpy().astype(np.float32), lse.numpy().astype(np.float32)]


# -- on one tensor: q, k and v of a position side by side --------------------------------------------------------------
def _joined(*heads: np.ndarray) -> np.ndarray:
    """[b, s, heads, D] each, as one [b, s, all heads * D]."""
    return np.concatenate(heads, axis=2).reshape(*heads[0].shape[:2], -1)


def _split(qkv: np.ndarray, heads: int, head_dim: int) -> list[np.ndarray]:
    """q, k and v of one tensor, [b, s, heads, D] each."""
    each = qkv.reshape(*qkv.shape[:2], -1, head_dim)
    return np.split(each, [heads, (heads + each.shape[2]) // 2], axis=2)


def _joined_inputs(inputs: Inputs) -> Inputs:
    """Those of separate tensors, for one."""

    def joined(rng: np.random.Generator, *sizes: int) -> list[np.ndarray]:
        *d_o, q, k, v, o, lse = inputs(rng, *sizes)
        return [_joined(d_o[0]), _joined(q, k, v), _joined(o), lse]

    return joined


def _forward_of_one(inputs: Arrays, expected: Arrays) -> Arrays:
    o, lse = expected
    heads = lse.shape[1]
    separate = [o.reshape(*o.shape[:2], heads, -1), lse]
    of_o, of_lse = causal_forward(_split(inputs[0], heads, o.shape[2] // heads), separate)
    return [_joined(of_o), of_lse]


def _backward_of_one(inputs: Arrays, expected: Arrays) -> Arrays:
    d_o, qkv, o, lse = inputs
    heads = lse.shape[1]
    head_dim = o.shape[2] // heads
    d_o, o = (array.reshape(*array.shape[:2], heads, head_dim) for array in (d_o, o))
    separate = _split(expected[0], heads, head_dim)
    return [_joined(*causal_backward([d_o, *_split(qkv, heads, head_dim), o, lse], separate))]


def _numbers_of_heads(b: int, h: int, kv: int, s: int, d: int) -> dict[str, Any]:
    return {"num_heads": h, "num_kv_heads": kv, "causal": True}


def _folds_of_one(op: Any, place: int, *sizes: int) -> Sequence[BlockCall]:
    """place: of the tensor among the inputs."""
    b, h, kv, s, d = sizes
    settings = {"num_heads": h, "num_kv_heads": kv, **rule.settings_of(d, True, 0, None, None)}
    inputs: list[Any] = [None] * 4
    inputs[place] = TensorSpec((b, s, (h + 2 * kv) * d))
    calls: Sequence[BlockCall] = op.block_calls(inputs[: 1 if place == 0 else 4], settings)
    return calls


def _folds_of_logistic(b: int, h: int, kv: int, s: int, d: int) -> Sequence[BlockCall]:
    specs = [TensorSpec((b, s, n, d)) for n in (h, kv, kv)]
    op: Any = BLOCK_FOLD
    calls: Sequence[BlockCall] = op.block_calls([*specs, None, None], {"spec": LOGISTIC, "causal": True, "window": 0})
    return calls


HEAD_SUBJECTS: dict[str, Subject] = {
    "rope": Subject(HEADS, _rope_inputs, _rope, of_rope, "map"),
    "attention": Subject(
        GROUPED_HEADS,
        _qkv,
        lambda e, q, k, v: e.attention(q, k, v, causal=True),
        causal_forward,
        "attention_forward",
        folds=lambda b, h, kv, s, d: attention_calls(b, h, s, d, kv)[:1],
    ),
    "attention_backward": Subject(
        GROUPED_HEADS,
        _backward,
        lambda e, *tensors: e.attention_backward(*tensors, causal=True),
        causal_backward,
        "attention",
        folds=lambda b, h, kv, s, d: attention_calls(b, h, s, d, kv)[1:],
    ),
    "attention_qkv": Subject(
        GROUPED_HEADS,
        lambda rng, *sizes: [_joined(*_qkv(rng, *sizes))],
        lambda e, qkv, **settings: e.attention_qkv(qkv, **settings),
        _forward_of_one,
        "attention_forward",
        _numbers_of_heads,
        lambda *sizes: _folds_of_one(ATTENTION_QKV, 0, *sizes),
    ),
    "attention_qkv_backward": Subject(
        GROUPED_HEADS,
        _joined_inputs(_backward),
        lambda e, *tensors, **settings: e.attention_qkv_backward(*tensors, **settings),
        _backward_of_one,
        "attention",
        _numbers_of_heads,
        lambda *sizes: _folds_of_one(ATTENTION_QKV_BACKWARD, 1, *sizes),
    ),
    "block_fold": Subject(
        GROUPED_HEADS,
        _qkv,
        lambda e, q, k, v: list(e.block_fold(LOGISTIC, q=q, k=k, v=v, scale=q.shape[-1] ** -0.5, causal=True).values()),
        causal_logistic,
        "block_fold",
        folds=_folds_of_logistic,
    ),
}
