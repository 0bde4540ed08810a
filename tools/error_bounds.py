"""How far float32 results may lie from float64, element by element, from the roundings that meet in each.

EPS32 is half a unit in the last place. Vulkan's precision table allows exp 3 + 2|x| units, log 3, division 2.5. Sums
are lanes that add up apart (engine/fold.py): their error grows with columns a lane. Nothing is fitted to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..engine.ops.column_sum import column_chunks
from ..engine.ops.gradient_norm import square_parts
from ..engine.ops.sum import sum_parts

EPS32 = 2.0**-24
TINY = 1e-37  # below it float32 loses digits
CLOSE = 40 * 2 * EPS32  # of an activation, of its size and at least 1: exp weighted by what is left of the value there

Arrays = Sequence[np.ndarray]
Bounds = Callable[[Arrays, Arrays], Sequence[np.ndarray]]  # of inputs and float64 results


def row_terms(cols: int) -> float:
    """Roundings that meet in one sum over a row: 4 columns x at least 4 lanes a round, the tree, a division."""
    return cols / 16 + 16


def column_terms(rows: int, cols: int) -> float:
    """Roundings that meet in one sum over rows: within a chunk, then over chunks, then the product's own."""
    chunks, chunk_rows = column_chunks(rows, cols)
    return chunks + chunk_rows + 5


def rounded_once(inputs: Arrays, expected: Arrays) -> Arrays:
    """Of one operation an element."""
    return [EPS32 * np.abs(e) + TINY for e in expected]


def of_scaled_sum(inputs: Arrays, expected: Arrays, factor: float) -> Arrays:
    """x times a factor that is rounded itself, or 0, and another added to it."""
    return [EPS32 * (2 * factor * np.abs(inputs[0]) + np.abs(e)) + TINY for e in expected]


def of_activation(inputs: Arrays, expected: Arrays) -> Arrays:
    """Of an activation, or its gradient times one of size 1."""
    return [CLOSE * np.maximum(1.0, np.abs(e)) * np.maximum(1.0, np.abs(inputs[0])) for e in expected]


def of_swiglu(inputs: Arrays, expected: Arrays) -> Arrays:
    """silu(gate) * up."""
    gate, up = (np.abs(part).astype(np.float64) for part in np.split(inputs[0], 2, axis=-1))
    return [CLOSE * np.maximum(1.0, gate) * up + 2 * EPS32 * np.abs(expected[0]) + TINY]


def of_swiglu_backward(inputs: Arrays, expected: Arrays) -> Arrays:
    """dy * up * slope of silu, and dy * silu(gate)."""
    dy = np.abs(inputs[0]).astype(np.float64)
    gate, up = (np.abs(part).astype(np.float64) for part in np.split(inputs[1], 2, axis=-1))
    return [np.concatenate([2 * CLOSE * dy * up, CLOSE * dy * np.maximum(1.0, gate)], axis=-1) + TINY]


def of_softmax(inputs: Arrays, expected: Arrays) -> Arrays:
    """Each round of the running sum rescales by an exp and adds; then the element's own exp and a division."""
    x = inputs[0].astype(np.float64)
    below = x.max(axis=-1, keepdims=True) - x
    spread = np.minimum(below.max(axis=-1, keepdims=True), 90)
    total = 7 * (x.shape[-1] / 16 + 10) + 2 * (3 + 2 * spread) + spread
    return [EPS32 * (total + 2 * (3 + 2 * below) + below + 6) * expected[0] + TINY]


def of_softmax_backward(inputs: Arrays, expected: Arrays) -> Arrays:
    """y (dy - sum(dy y))."""
    dy, y = (np.abs(array).astype(np.float64) for array in inputs)
    size = dy + (dy * y).sum(axis=-1, keepdims=True)
    return [4 * (row_terms(y.shape[-1]) + 4) * EPS32 * size * y + TINY]


def of_rms_norm(inputs: Arrays, expected: Arrays) -> Arrays:
    """y and rstd: half the relative error of the sum, 2 units for the root, 2 for the products."""
    relative = (row_terms(inputs[0].shape[-1]) / 2 + 8) * EPS32
    return [relative * np.abs(e) + TINY for e in expected]


def of_rms_norm_backward(inputs: Arrays, expected: Arrays) -> Arrays:
    """rstd (g - xhat mean(g xhat)), g = dy weight."""
    dy, x, weight, rstd = (array.astype(np.float64) for array in inputs)
    g, xhat = np.abs(dy * weight), np.abs(x * rstd[..., None])
    slack = 3 * g + xhat * (row_terms(x.shape[-1]) + 8) * (g * xhat).mean(axis=-1, keepdims=True)
    return [EPS32 * (rstd[..., None] * slack + 3 * np.abs(expected[0])) + TINY]


def of_layer_norm(inputs: Arrays, expected: Arrays) -> Arrays:
    """y, mean and rstd; the error of the mean enters y with the slope rstd * weight.

    The first mean has the error of its sum; adding the mean of the deviations from it leaves the rounding of the result
    and the error of a sum of deviations, which are small beside the mean.
    """
    x, weight = inputs[0].astype(np.float64), inputs[1]
    terms = row_terms(x.shape[-1])
    y, mean, rstd = (np.asarray(e, np.float64) for e in expected)
    d_first = terms * EPS32 * np.abs(x).mean(axis=-1)
    deviation = np.abs(x - mean[..., None])
    d_mean = EPS32 * np.abs(mean) + terms * EPS32 * (deviation.mean(axis=-1) + d_first)
    relative = (terms / 2 + 8) * EPS32 * (1 + (d_first * rstd) ** 2) + (d_mean * rstd) ** 2
    d_y = np.abs(weight) * rstd[..., None] * (d_mean[..., None] + deviation * (relative[..., None] + 3 * EPS32))
    return [d_y + 2 * EPS32 * (np.abs(y) + np.abs(weight)) + TINY, d_mean + TINY, relative * rstd]


def of_layer_norm_backward(inputs: Arrays, expected: Arrays) -> Arrays:
    """rstd (g - mean(g) - xhat mean(g xhat)), g = dy weight."""
    dy, x, weight, mean, rstd = (array.astype(np.float64) for array in inputs)
    g, xhat = np.abs(dy * weight), np.abs((x - mean[..., None]) * rstd[..., None])
    mean_g, mean_dot = g.mean(axis=-1, keepdims=True), (g * xhat).mean(axis=-1, keepdims=True)
    slack = 3 * g + (row_terms(x.shape[-1]) + 8) * (mean_g + xhat * mean_dot)
    return [EPS32 * (rstd[..., None] * slack + 3 * np.abs(expected[0])) + TINY]


def of_column_sums(*terms: np.ndarray) -> Arrays:
    """Sums of these [rows, cols] over the rows; a deviation x - mean in one is rounded once more than x."""
    return [EPS32 * (column_terms(*t.shape) + 2) * np.abs(t.astype(np.float64)).sum(axis=0) + TINY for t in terms]


def of_sum(inputs: Arrays, expected: Arrays) -> Arrays:
    """Sum of all elements: lanes of each part, then the parts."""
    parts, chunk = sum_parts(inputs[0].size)
    return [np.full(1, (chunk / 16 + parts / 16 + 24) * EPS32 * np.abs(inputs[0].astype(np.float64)).sum())]


def of_gradient_norm(inputs: Arrays, expected: Arrays) -> Arrays:
    """Sums of squares and the state that follows from them, of one gradient."""
    parts, chunk = square_parts(inputs[0].size)
    return [(chunk / 16 + parts / 4 + 24) * EPS32 * np.abs(e) + TINY for e in expected]


def of_cross_entropy(inputs: Arrays, expected: Arrays) -> Arrays:
    """Loss and log-sum-exp: the running sum as in softmax; log is 3 units or 2^-21."""
    logits = inputs[0].astype(np.float64)
    spread = np.minimum(logits.max(axis=1) - logits.min(axis=1), 90)
    common = EPS32 * (7 * (logits.shape[1] / 16 + 10) + 2 * (3 + 2 * spread) + spread) + 2.0**-21
    common += 6 * EPS32 * np.log(logits.shape[1])
    return [common + 2 * EPS32 * (np.abs(logits).max(axis=1) + np.abs(e)) for e in expected]


def of_cross_entropy_backward(inputs: Arrays, expected: Arrays) -> Arrays:
    """exp(logits - lse), less 1 at the target."""
    distance = np.abs(inputs[0].astype(np.float64) - inputs[2][:, None])
    return [EPS32 * (np.exp(-distance) * (2 * (3 + 2 * distance) + distance + 2) + 4) + TINY]


def of_embedding_backward(inputs: Arrays, expected: Arrays) -> Arrays:
    """Sums of the rows of each id, one after the other."""
    dy, tokens, out = inputs
    size = np.zeros(out.shape)
    np.add.at(size, tokens, np.abs(dy).astype(np.float64))
    return [EPS32 * np.bincount(tokens, minlength=len(out))[:, None] * size + TINY]


def of_rope(inputs: Arrays, expected: Arrays) -> Arrays:
    """Two products and a sum."""
    return [np.full(expected[0].shape, 6 * EPS32 * np.abs(inputs[0]).max())]


def of_adamw(learning_rate: float, correction1: float, correction2: float, weight_decay: float) -> Bounds:
    """p, m, v after a step with the usual betas, 0.9 and 0.999, and eps 1e-8.

    Constants and operations are rounded once; the step has errors of m, v / 2, two corrections, a square root and two
    divisions.
    """

    def bounds(inputs: Arrays, expected: Arrays) -> Arrays:
        p, g, m, _ = (np.abs(array).astype(np.float64) for array in inputs)
        size = 0.9 * m + 0.1 * g
        step = learning_rate * size / correction1 / (np.sqrt(expected[2] / correction2) + 1e-8)
        d_p = np.abs(expected[0]) + 32 * step + 4 * learning_rate * weight_decay * p
        return [EPS32 * d_p, 4 * EPS32 * size, 8 * EPS32 * expected[2]]

    return bounds


def of_adafactor(learning_rate: float, weight_decay: float, relative: float) -> Bounds:
    """p and its moments after a step with a threshold of 1 and steps relative to the size of p.

    Moments are sums of terms of one sign, so their error is relative: roundings of the sum and 12 more (a mean, the
    share of the new). A root halves it and adds 9 (Vulkan: 2 units, and a division of 2.5), a division adds 5.
    """

    def total(n: int) -> float:  # one subgroup's sum, of n terms
        return n / 16 + 24

    def bounds(inputs: Arrays, expected: Arrays) -> Arrays:
        p, g = (array.astype(np.float64) for array in inputs[:2])
        moments = [np.asarray(e, np.float64) for e in expected[1:]]
        parts, chunk = square_parts(p.size)
        of_squares = chunk / 16 + total(parts)
        if len(moments) == 1:
            (v,) = moments
            terms: tuple[float, ...] = (12,)
            update, of_update, of_updates = np.abs(g) / np.sqrt(v), 6.0 + 9 + 5 + 2, of_squares
        else:
            (rows, cols), (r, c) = p.shape, moments
            terms = row_terms(cols) + 12, column_terms(rows, cols) + 12
            update = np.abs(g) * np.sqrt(r.mean()) / np.sqrt(np.outer(r, c))
            # mean(r) is a sum, too; three roots, a mean, two divisions, two products
            of_update = (terms[0] + total(rows)) / 2 + terms[0] / 2 + terms[1] / 2 + 3 * 9 + 5 / 2 + 2 * 5 + 2
            of_updates = row_terms(cols) + total(rows)
        rate = learning_rate * max(relative, np.sqrt(np.square(p).mean()))
        of_rate = of_squares / 2 + 9 + 5 + 3
        step = rate * update / max(1.0, np.sqrt(np.square(update).mean()))
        of_step = of_rate + of_update + (of_updates + 2 * of_update) / 2 + 9 + 5 + 5 + 2
        decay = rate * weight_decay * np.abs(p)
        d_p = np.abs(expected[0]) + (of_step + 1) * step + (of_rate + 3) * decay
        return [EPS32 * d_p, *(EPS32 * t * m for t, m in zip(terms, moments, strict=True))]

    return bounds


def of_sgd(learning_rate: float, weight_decay: float) -> Bounds:
    """p and the momentum buffer after a step."""

    def bounds(inputs: Arrays, expected: Arrays) -> Arrays:
        p, g, b = (np.abs(array).astype(np.float64) for array in inputs)
        d_p = np.abs(expected[0]) + 4 * learning_rate * (2 * (b + g) + weight_decay * p)
        return [EPS32 * d_p, 2 * EPS32 * (b + g)]

    return bounds
