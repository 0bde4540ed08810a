"""The ops that kernel_lab looks at: what a shape means, inputs, the call, and how much error is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engine.ops.adafactor import factored_shapes
from ..engine.tensor import Tensor
from . import error_bounds as bounds
from .error_bounds import Arrays, Bounds
from .lab_heads import HEAD_SUBJECTS
from .lab_subject import STEP, Call, Subject, changed, normal

DECAY = 0.1  # of weights, by the optimizers
RELATIVE = 1e-3  # least size of a parameter in Adafactor's relative step
_ADAMW = bounds.of_adamw(STEP.learning_rate, STEP.bias_correction1, STEP.bias_correction2, DECAY)
_ADAFACTOR = bounds.of_adafactor(STEP.learning_rate, DECAY, RELATIVE)


def _of_rows(
    call: Call, allowed: Bounds = bounds.rounded_once, forced: str = "", *, rows: int = 1, vectors: int = 0
) -> Subject:
    """An op of `rows` tensors [rows, cols] and `vectors` vectors of cols."""
    shapes = [lambda r, c: (r, c)] * rows + [lambda r, c: (c,)] * vectors
    return Subject("ROWSxCOLS", normal(*shapes), call, allowed, forced)


def _norm_inputs(rng: np.random.Generator, rows: int, cols: int) -> tuple[np.ndarray, ...]:
    """dy, x, weight, mean and rstd, as a norm's backward takes them."""
    dy, x = rng.standard_normal((2, rows, cols)).astype(np.float32)
    weight, mean = rng.standard_normal(cols).astype(np.float32), x.mean(axis=-1, dtype=np.float64)
    rstd = 1 / np.sqrt(np.square(x - mean[:, None]).mean(axis=-1) + 1e-5)
    return dy, x, weight, mean.astype(np.float32), rstd.astype(np.float32)


def _weight_sums(inputs: Arrays, expected: Arrays) -> Arrays:
    dy, x = (array.astype(np.float64) for array in inputs[:2])
    if len(expected) == 1:
        return bounds.of_column_sums(dy * x * inputs[2][:, None])
    return bounds.of_column_sums(dy * (x - inputs[2][:, None]) * inputs[3][:, None], dy)


def _softmax_backward(rng: np.random.Generator, rows: int, cols: int) -> list[np.ndarray]:
    dy, x = rng.standard_normal((2, rows, cols)).astype(np.float32)
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return [dy, weights / weights.sum(axis=-1, keepdims=True)]


def _logits(rng: np.random.Generator, rows: int, cols: int) -> list[np.ndarray]:
    logits = (3 * rng.standard_normal((rows, cols))).astype(np.float32)
    return [logits, rng.integers(0, cols, rows).astype(np.int32)]


def _logits_and_lse(rng: np.random.Generator, rows: int, cols: int) -> list[np.ndarray]:
    logits, targets = _logits(rng, rows, cols)
    return [logits, targets, np.log(np.exp(logits.astype(np.float64)).sum(axis=1)).astype(np.float32)]


def _tokens(rng: np.random.Generator, tokens: int, vocabulary: int) -> np.ndarray:
    return rng.integers(0, vocabulary, tokens).astype(np.int32)


def _moments(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    p, g, m, v = rng.standard_normal((4, n)).astype(np.float32)
    return [p, g, m, np.square(v)]


def _factored(rng: np.random.Generator, *shape: int) -> list[np.ndarray]:
    """p, g and Adafactor's moments."""
    p, g = rng.standard_normal((2, *shape))
    moments = [rng.uniform(0.1, 2, size) for size in factored_shapes(shape)]
    return [array.astype(np.float32) for array in (p, g, *moments)]


def _adamw_many(engine: Any, *tensors: Tensor) -> Sequence[Tensor]:
    p, g, m, v = tensors
    engine.adamw_many_([p], [g], [m], [v], weight_decays=[DECAY])
    return p, m, v


SUBJECTS: dict[str, Subject] = {
    "add": _of_rows(lambda e, x, y: e.add(x, y), forced="map", rows=2),
    "multiply": _of_rows(lambda e, x, y: e.multiply(x, y), forced="map", rows=2),
    "scale": _of_rows(lambda e, x: e.scale(x, 0.3), lambda i, e: [2 * b for b in bounds.rounded_once(i, e)], "map"),
    "add_bias": _of_rows(changed("add_bias_", 0), forced="map", vectors=1),
    "dropout": _of_rows(lambda e, x: e.dropout(x, p=0.5, site=3), forced="map"),
    "dropout_add": _of_rows(
        lambda e, x, y: e.dropout_add(x, y, p=0.4, site=3),
        lambda i, e: bounds.of_scaled_sum(i, e, 1 / 0.6),
        "map",
        rows=2,
    ),
    "silu": _of_rows(lambda e, x: e.silu(x), bounds.of_activation, "map"),
    "gelu": _of_rows(lambda e, x: e.gelu(x), bounds.of_activation, "map"),
    "relu": _of_rows(lambda e, x: e.relu(x), forced="map"),
    **{
        f"{kind}_backward": _of_rows(
            lambda e, dy, x, kind=kind: e.activation_backward(dy, x, kind), bounds.of_activation, "map", rows=2
        )
        for kind in ("silu", "gelu", "relu")
    },
    "swiglu": Subject(
        "ROWSxCOLS", normal(lambda r, c: (r, 2 * c)), lambda e, gate_up: e.swiglu(gate_up), bounds.of_swiglu, "map"
    ),
    "swiglu_backward": Subject(
        "ROWSxCOLS",
        normal(lambda r, c: (r, c), lambda r, c: (r, 2 * c)),
        lambda e, dy, gate_up: e.swiglu_backward(dy, gate_up),
        bounds.of_swiglu_backward,
        "map",
    ),
    "softmax": _of_rows(lambda e, x: e.softmax(x), bounds.of_softmax, "row_fold"),
    "softmax_backward": Subject(
        "ROWSxCOLS",
        _softmax_backward,
        lambda e, dy, y: e.softmax_backward(dy, y),
        bounds.of_softmax_backward,
        "row_fold",
    ),
    "rms_norm": _of_rows(lambda e, x, w: e.rms_norm(x, w), bounds.of_rms_norm, "row_fold", vectors=1),
    "rms_norm_backward": Subject(
        "ROWSxCOLS",
        lambda rng, r, c: [array for i, array in enumerate(_norm_inputs(rng, r, c)) if i != 3],
        lambda e, *tensors: e.rms_norm_backward(*tensors),
        bounds.of_rms_norm_backward,
        "row_fold",
    ),
    "rms_norm_weight_backward": Subject(
        "ROWSxCOLS",
        lambda rng, r, c: [*(_norm_inputs(rng, r, c)[i] for i in (0, 1, 4)), np.zeros(c, np.float32)],
        changed("rms_norm_weight_backward", 3),
        _weight_sums,
        "loop",
    ),
    "layer_norm": _of_rows(lambda e, x, w, b: e.layer_norm(x, w, b), bounds.of_layer_norm, "row_fold", vectors=2),
    "layer_norm_backward": Subject(
        "ROWSxCOLS",
        _norm_inputs,
        lambda e, *tensors: e.layer_norm_backward(*tensors),
        bounds.of_layer_norm_backward,
        "row_fold",
    ),
    "layer_norm_weight_backward": Subject(
        "ROWSxCOLS",
        lambda rng, r, c: [*(_norm_inputs(rng, r, c)[i] for i in (0, 1, 3, 4)), *np.zeros((2, c), np.float32)],
        changed("layer_norm_weight_backward", 4, 5),
        _weight_sums,
        "loop",
    ),
    "cross_entropy": Subject(
        "ROWSxVOCABULARY",
        _logits,
        lambda e, logits, targets: e.cross_entropy(logits, targets),
        bounds.of_cross_entropy,
        "row_fold",
    ),
    "cross_entropy_backward": Subject(
        "ROWSxVOCABULARY",
        _logits_and_lse,
        changed("cross_entropy_backward_", 0),
        bounds.of_cross_entropy_backward,
        "row_fold",
    ),
    "embedding": Subject(
        "TOKENSxVOCABULARYxCOLS",
        lambda rng, t, v, c: [rng.standard_normal((v, c)).astype(np.float32), _tokens(rng, t, v)],
        lambda e, table, tokens: e.embedding(table, tokens),
        forced="map",
    ),
    "embedding_backward": Subject(
        "TOKENSxVOCABULARYxCOLS",
        lambda rng, t, v, c: [
            rng.standard_normal((t, c)).astype(np.float32),
            _tokens(rng, t, v),
            np.zeros((v, c), np.float32),
        ],
        changed("embedding_backward", 2),
        bounds.of_embedding_backward,
        "loop",
    ),
    **HEAD_SUBJECTS,
    "column_sum": Subject(
        "ROWSxCOLS",
        lambda rng, r, c: [rng.standard_normal((r, c)).astype(np.float32), np.zeros(c, np.float32)],
        changed("column_sum", 1),
        lambda inputs, expected: bounds.of_column_sums(inputs[0]),
        "loop",
    ),
    "sum": Subject(
        "ELEMENTS",
        lambda rng, n: [rng.uniform(size=n).astype(np.float32)],  # of one sign: a sum that cancels would show nothing
        lambda e, x: e.sum(x),
        bounds.of_sum,
        "loop",
    ),
    "gradient_norm": Subject(
        "ELEMENTS",
        normal(lambda n: (n,)),
        lambda e, g: e.gradient_norm([g], max_norm=1.0),
        bounds.of_gradient_norm,
        "loop",
    ),
    "adamw": Subject("ELEMENTS", _moments, changed("adamw_", 0, 2, 3, weight_decay=DECAY), _ADAMW, "map"),
    "adafactor": Subject(
        "ROWSxCOLS",
        _factored,
        changed("adafactor_", 0, 2, 3, weight_decay=DECAY, relative=RELATIVE),
        _ADAFACTOR,
        "loop",
    ),
    "adafactor_vector": Subject(
        "ELEMENTS",
        _factored,
        changed("adafactor_", 0, 2, weight_decay=DECAY, relative=RELATIVE),
        _ADAFACTOR,
        "loop",
    ),
    "adamw_many": Subject("ELEMENTS", _moments, _adamw_many, _ADAMW, "loop"),
    "sgd": Subject(
        "ELEMENTS",
        normal(*[lambda n: (n,)] * 3),
        changed("sgd_", 0, 2, momentum=0.9, weight_decay=DECAY),
        bounds.of_sgd(STEP.learning_rate, DECAY),
        "map",
    ),
}


def matmul_subject(layout: str) -> Subject:
    """The product of A and B as they lie: 2 k 2^-24 |A| |B| (Higham 2002, 3.5, with room for a change of order)."""
    trans_a, trans_b = layout[0] == "T", layout[1] == "T"

    def allowed(inputs: Arrays, expected: Arrays) -> Arrays:
        a, b = (np.abs(x.astype(np.float64)) for x in inputs)
        a, b = a.T if trans_a else a, b.T if trans_b else b
        return [2 * a.shape[1] * bounds.EPS32 * (a @ b)]

    return Subject(
        "MxNxK",
        normal(lambda m, n, k: (k, m) if trans_a else (m, k), lambda m, n, k: (n, k) if trans_b else (k, n)),
        lambda e, a, b: e.matmul(a, b, trans_a=trans_a, trans_b=trans_b),
        allowed,
        "matmul",
    )
