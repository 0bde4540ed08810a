"""What may be done to attention's scores, as expressions, and the masks and numbers that go with it.

A score expression is made of SCORE (scale * q.k), the positions QUERY and KEY (floats, exact), and HEAD, one number of
each query head. The block folds of attention (engine/attention_folds.py) are made with it, forward and backward, with
its derivative by SCORE. A pair whose score is -inf is not seen.

    softcap = 30.0 * tanh(SCORE / 30.0)
    prefix = where((KEY <= QUERY) | (KEY < 10.0), SCORE, -math.inf)  # with causal=False: ten keys that all see
"""

from __future__ import annotations

import math

import numpy as np

from .expr import RANDOM, Expr, constant, tanh, variables
from .expr_walk import named, topological

SCORE, QUERY, KEY, HEAD = variables("score query key head")
NAMES = ("score", "query", "key", "head")


def alibi(score: Expr = SCORE) -> Expr:
    """score - slope * distance (Press, Smith & Lewis 2022, "Train short, test long"); HEAD is the slope."""
    return score - HEAD * abs(QUERY - KEY)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Slopes of ALiBi, float32 [num_heads]: 2^(-8 i / n), i from 1, for a power of two n; for others, as in the
    paper's code, those of the next lower power of two, then every other one of the next higher.
    """
    lower = 2 ** (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 * np.arange(1, lower + 1) / lower)
    more = 2.0 ** (-8.0 * np.arange(1, 2 * (num_heads - lower) + 1, 2) / (2 * lower))
    return np.concatenate([slopes, more]).astype(np.float32)


def softcap(limit: float, score: Expr = SCORE) -> Expr:
    """limit * tanh(score / limit): scores stay between -limit and limit (Gemma 2, 2024).

    Raises ValueError when the limit is not positive and finite.
    """
    if not 0 < limit < math.inf:
        raise ValueError(f"softcap: the limit is {limit}, it must be positive and finite")
    return tanh(score * (1.0 / limit)) * limit


def document_ranges(ids: np.ndarray) -> np.ndarray:
    """int32 [batch, seq, 2] for the `documents` of attention: first position of the run of equal ids that holds each
    position, and one past its last. ids: integers [batch, seq]. Raises ValueError for another number of dimensions.
    """
    ids = np.asarray(ids)
    if ids.ndim != 2:
        raise ValueError(f"document_ranges: ids have shape {ids.shape}, needed is [batch, seq]")
    batch, seq = ids.shape
    begins = np.ones((batch, seq), bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    place = np.arange(seq)
    start = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    ends = np.ones((batch, seq), bool)
    ends[:, :-1] = begins[:, 1:]
    stop = np.minimum.accumulate(np.where(ends, place + 1, seq)[:, ::-1], axis=1)[:, ::-1]
    return np.stack([start, stop], axis=-1).astype(np.int32)


def check_score(score: Expr, has_head_values: bool) -> None:
    """Raises ValueError for an expression of anything else than the four names, or of HEAD without numbers for it."""
    if not isinstance(score, Expr) or score.kind != "f":
        raise ValueError(f"attention: score is {score!r}, needed is an expression of {', '.join(NAMES)}")
    used = named([score]) + named([score], "whole")
    unknown = [name for name in used if name not in NAMES]
    if unknown:
        raise ValueError(f"attention: the score has {', '.join(unknown)}; known are {', '.join(NAMES)}")
    if any(node.op in RANDOM for node in topological([score])):
        raise ValueError("attention: a score cannot have random numbers in it")
    if ("head" in used) != has_head_values:
        raise ValueError("attention: head_values are one number a head for HEAD of the score: give both or neither")


NEVER = constant(-np.inf)  # the score of a pair that is not seen
