"""How every op is checked: Vulkan against the float64 oracle, and backward against finite differences."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.tensor import Tensor

ODD_SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1000)
EPS32 = 2.0**-24  # half a unit in the last place of float32, relative

Call = Callable[..., Any]


def sampled_sizes(
    dimensions: int, count: int, seed: int = 0, sizes: Sequence[int] = ODD_SIZES
) -> list[tuple[int, ...]]:
    """`count` size combinations: every size in every position first, then a seeded sample of the product."""
    rng = np.random.default_rng(seed)
    columns = [rng.permutation(sizes) for _ in range(dimensions)]
    chosen = [tuple(int(n) for n in row) for row in zip(*columns, strict=True)]
    while len(chosen) < count:
        chosen.append(tuple(int(n) for n in rng.choice(sizes, dimensions)))
    return chosen[:count] if count >= len(sizes) else chosen


def run(engine: ComputeEngine, call: Call, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Results of `call(engine, *tensors)` as arrays."""
    tensors = [engine.tensor(a) for a in arrays]
    result = call(engine, *tensors)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    return [out.numpy() for out in outputs]


def check_op(
    vulkan: ComputeEngine,
    oracle: CpuEngine,
    call: Call,
    arrays: Sequence[np.ndarray],
    tolerance: float | Callable[[list[np.ndarray]], Sequence[Any]],
) -> list[np.ndarray]:
    """Compare Vulkan with the oracle element by element; returns what Vulkan gave.

    tolerance: largest |error| relative to max(1, |expected|), or a function from the oracle's outputs to one array (or
    number) of absolute bounds an output. NaN and infinities must stand in the same places. Inputs must not change
    unless the op says so: the oracle's copy of each input is compared with the device's afterwards by the caller.
    """
    expected = run(oracle, call, arrays)
    actual = run(vulkan, call, arrays)
    assert len(actual) == len(expected)
    bounds = tolerance(expected) if callable(tolerance) else [tolerance * np.maximum(1.0, np.abs(e)) for e in expected]
    for i, (got, want, bound) in enumerate(zip(actual, expected, bounds, strict=True)):
        assert got.shape == want.shape
        finite = np.isfinite(want)
        assert np.array_equal(np.isfinite(got), finite), f"output {i}: non-finite values in other places"
        assert np.array_equal(got[~finite], want[~finite].astype(got.dtype), equal_nan=True), f"output {i}: non-finite"
        error = np.abs(np.where(finite, got.astype(np.float64) - np.where(finite, want, 0), 0.0))
        limit = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
        worst = np.unravel_index(np.argmax(error - np.where(finite, limit, np.inf)), want.shape) if want.size else None
        assert worst is None or np.all(error[finite] <= limit[finite]), (
            f"output {i} at {worst}: got {got[worst]!r}, expected {want[worst]!r}, allowed error {limit[worst]:.3g}"
        )
    return actual


def check_gradient(
    oracle: CpuEngine,
    forward: Call,
    backward: Call,
    arrays: Sequence[np.ndarray],
    *,
    step: float = 1e-5,
    tolerance: float = 1e-6,
    samples: int = 40,
    seed: int = 0,
) -> None:
    """Central finite differences in float64 against a backward.

    `forward(engine, *tensors)` gives y; `backward(engine, dy, *tensors)` gives one gradient an input (None to leave an
    input out). A seeded sample of elements of each input is tried.
    """
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(a, dtype=np.float64) if np.asarray(a).dtype.kind == "f" else np.asarray(a) for a in arrays]

    def value(cotangent: np.ndarray | None, inputs: Sequence[np.ndarray]) -> Any:
        y = forward(oracle, *[oracle.tensor(a) for a in inputs])
        y = y if isinstance(y, Tensor) else y[0]
        return y.numpy() if cotangent is None else float((y.numpy() * cotangent).sum())

    cotangent = rng.standard_normal(value(None, arrays).shape)
    gradients = backward(oracle, oracle.tensor(cotangent), *[oracle.tensor(a) for a in arrays])
    gradients = (gradients,) if isinstance(gradients, Tensor) else tuple(gradients)
    for which, gradient in enumerate(gradients):
        if gradient is None:
            continue
        analytic = gradient.numpy()
        assert analytic.shape == arrays[which].shape, f"gradient {which} has shape {analytic.shape}"
        places = list(itertools.product(*[range(n) for n in analytic.shape]))
        picks = rng.permutation(len(places))[:samples]
        for place in (places[p] for p in picks):
            sides = []
            for sign in (1, -1):
                moved = [a.copy() for a in arrays]
                moved[which][place] += sign * step
                sides.append(value(cotangent, moved))
            numeric = (sides[0] - sides[1]) / (2 * step)
            allowed = tolerance * max(1.0, abs(numeric), abs(analytic[place]))
            assert abs(numeric - analytic[place]) <= allowed, (
                f"gradient {which} at {place}: backward {analytic[place]:.9g}, finite differences {numeric:.9g}"
            )
