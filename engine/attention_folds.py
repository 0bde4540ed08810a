"""Attention as three block folds (engine/block_fold.py): forward, the gradient of the queries, that of keys and values.

Forward folds keys and values into every query by the online softmax of engine/fold.py. Backward computes the weights
again from the scores and the log-sum-exp (Dao 2023, FlashAttention-2, algorithm 2):

    P = exp(score - lse), delta = rowsum(dO * O), dS = P * (dO v^T - delta) * score'(scale * q.k) * scale
    dQ = dS k, dK = dS^T q, dV = P^T dO

with score' the derivative of a score that is an expression (engine/attention_scores.py), else 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from .attention_masks import KEYS_OF_QUERIES, QUERIES_OF_KEYS
from .attention_scores import SCORE
from .block_fold import BlockFold, RowSum
from .expr import Expr, constant, equal, exp, log, variable, variables, where
from .expr_derivative import derivative
from .expr_walk import named, substitute
from .fold import online_softmax

_QK, _DOV, _SCALE, _LSE, _DELTA, _SINK = variables("qk dov scale lse delta sinks")
_STRIDES = {
    **dict.fromkeys(("q", "d_q"), "q_row"),
    **dict.fromkeys(("k", "v", "d_k", "d_v"), "kv_row"),
    **dict.fromkeys(("o", "d_o"), "o_row"),
}


def _strides(rows: str) -> dict[str, str]:
    return {name: _STRIDES[name] for name in rows.split()}


def _score_and_slope(score: Expr | None) -> tuple[Expr, Expr]:
    """A pair's score, and its derivative by scale * q.k."""
    x = _QK * _SCALE
    if score is None:
        return x, constant(1.0)
    modified, slope = substitute([score, derivative(score, SCORE)], {SCORE: x})
    return modified, slope


def _weight_and_gradient(score: Expr | None) -> tuple[Expr, Expr]:
    """P and dS of a pair."""
    value, slope = _score_and_slope(score)
    weight = exp(value - _LSE, nonpositive=True)
    return weight, weight * (_DOV - _DELTA) * slope * _SCALE


def _more_numbers(score: Expr | None) -> dict[str, str]:
    return {"head": "head"} if score is not None and "head" in named([score]) else {}


def _positions(score: Expr | None, query: str, key: str) -> Mapping[str, str]:
    used = [] if score is None else named([score])
    return {name: kind for name, kind in (("query", query), ("key", key)) if name in used}


@lru_cache(maxsize=256)
def attention_forward(score: Expr | None = None) -> BlockFold:
    """o and lse. A sink is a score with no value behind it: it starts the maximum and the sum."""
    softmax = online_softmax(_score_and_slope(score)[0])
    weights = softmax.states[1]
    assert weights.aligned is not None
    o, total, largest = variables("o total largest")
    (aligned,) = substitute([weights.aligned], {total: o})
    nothing = equal(total, 0.0)
    return BlockFold(
        "attention_forward",
        held=["q"],
        streamed=["k", "v"],
        products={"qk": ("q", "k")},
        walk=softmax,
        sums=[RowSum("o", "v", weights.contribution, aligned)],
        rows={"o": where(nothing, 0.0, o / total)},
        values={"lse": where(nothing, -math.inf, largest + log(total))},
        numbers={"sinks": "head", **_more_numbers(score)},
        absent={"sinks": -math.inf},
        scalars=["scale"],
        positions=_positions(score, "held_end", "streamed"),
        start={"largest": _SINK, "total": where(equal(_SINK, -math.inf), 0.0, 1.0)},
        seen=KEYS_OF_QUERIES,
        strides=_strides("q k v o"),
    )


@lru_cache(maxsize=256)
def attention_d_q(score: Expr | None = None) -> BlockFold:
    """d_q, and delta for `attention_d_kv`. A row without weights, of which the log-sum-exp is -inf, has no gradient."""
    _, gradient = _weight_and_gradient(score)
    return BlockFold(
        "attention_d_q",
        held=["q", "d_o", "o"],
        streamed=["k", "v"],
        products={"qk": ("q", "k"), "dov": ("d_o", "v")},
        sums=[RowSum("d_q", "k", gradient)],
        rows={"d_q": variable("d_q")},
        values={"delta": _DELTA},
        numbers={"lse": "held", **_more_numbers(score)},
        scalars=["scale"],
        dots={"delta": ("d_o", "o")},
        positions=_positions(score, "held_end", "streamed"),
        unseen=equal(_LSE, -math.inf),
        seen=KEYS_OF_QUERIES,
        strides=_strides("q k v o d_o d_q"),
    )


@lru_cache(maxsize=256)
def attention_d_kv(score: Expr | None = None) -> BlockFold:
    """d_k and d_v: keys and values are held, the query heads of a group pass by in order."""
    weight, gradient = _weight_and_gradient(score)
    return BlockFold(
        "attention_d_kv",
        held=["k", "v"],
        streamed=["q", "d_o"],
        products={"qk": ("k", "q"), "dov": ("v", "d_o")},
        sums=[RowSum("d_k", "q", gradient), RowSum("d_v", "d_o", weight)],
        rows={"d_k": variable("d_k"), "d_v": variable("d_v")},
        numbers={"lse": "streamed", "delta": "streamed", **_more_numbers(score)},
        scalars=["scale"],
        positions=_positions(score, "streamed_end", "held"),
        unseen=equal(_LSE, -math.inf),
        seen=QUERIES_OF_KEYS,
        shared="held",
        strides=_strides("k v q d_o d_k d_v"),
    )


def describe_folds(score: Expr | None = None) -> None:
    """Describe attention's three folds for a score, which are then kept. Raises ValueError for one that is none."""
    for fold in (attention_forward, attention_d_q, attention_d_kv):
        fold(score)
