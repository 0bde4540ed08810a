"""Softmax: odd sizes against the oracle, -inf entries, gradient."""

from __future__ import annotations

import numpy as np
import pytest
from op_checks import EPS32, check_gradient, check_op, run, sampled_sizes

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.vulkan_engine import VulkanEngine


@pytest.mark.parametrize(("rows", "cols"), sampled_sizes(2, 24))
def test_odd_sizes(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    """Relative error: the exponential's few units, and the sum's cols roundings."""
    rng = np.random.default_rng(rows * 1009 + cols)
    x = (4 * rng.standard_normal((rows, cols))).astype(np.float32)
    y = check_op(vulkan, oracle, lambda e, t: e.softmax(t), [x], lambda w: [(64 + cols) * EPS32 * w[0] + 1e-30])[0]
    dy = rng.standard_normal((rows, cols)).astype(np.float32)
    bound = 4 * (cols + 4) * EPS32 * (np.abs(dy) + np.abs(dy * y).sum(-1, keepdims=True)) * y + 1e-30
    check_op(vulkan, oracle, lambda e, d, t: e.softmax_backward(d, t), [dy, y], lambda _: [bound])


def test_masked_entries_are_exactly_zero(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Entries of -inf have no share; a fully masked row is zeros, never 1/n."""
    inf = np.inf
    for engine in (vulkan, oracle):
        (y,) = run(engine, lambda e, t: e.softmax(t), [np.array([[0.0, -inf, 1.0], [-inf, -inf, -inf]], np.float32)])
        assert np.allclose(y[0], [0.26894142, 0, 0.73105858], atol=1e-7)
        assert y[0, 1] == 0 and np.array_equal(y[1], np.zeros(3))


@pytest.mark.parametrize("edge", [4, 8, 32, 64])
def test_blocks_of_masked_entries_at_tile_edges(vulkan: VulkanEngine, oracle: CpuEngine, edge: int) -> None:
    """A lane, or a whole subgroup's round, that sees only -inf adds nothing."""
    x = np.random.default_rng(edge).standard_normal((3, 4 * edge + 1)).astype(np.float32)
    x[0, :edge] = x[1, edge : 3 * edge] = x[2, :-1] = -np.inf
    (y,) = check_op(vulkan, oracle, lambda e, t: e.softmax(t), [x], 1e-6)
    assert np.all(y[np.isneginf(x)] == 0) and y[2, -1] == 1


def test_large_values_and_nan(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """No overflow for large inputs; NaN spreads over its row and no other."""
    x = np.array([[1e30, 1e30, -1e30], [88.0, 89.0, 1000.0], [np.nan, 0, 0], [0, 0, 0]], np.float32)
    (y,) = check_op(vulkan, oracle, lambda e, t: e.softmax(t), [x], 1e-6)
    assert np.isnan(y[2]).all() and not np.isnan(y[[0, 1, 3]]).any()


@pytest.mark.parametrize("offset", [1e2, -1e4, 1e6])
def test_offsets_cost_no_digits(vulkan: VulkanEngine, oracle: CpuEngine, offset: float) -> None:
    """Softmax ignores what is added to a whole row, and its gradient what is added to a row of dy."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 32, 1000)) + offset
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    exact = run(oracle, lambda e, t: e.softmax(t), [x])[0]
    y = check_op(vulkan, oracle, lambda e, t: e.softmax(t), [x], lambda w: [1000 * EPS32 * w[0]])[0]
    rest = dy.astype(np.float64) - (dy.astype(np.float64) * exact).sum(-1, keepdims=True)
    (dx,) = run(vulkan, lambda e, d, t: e.softmax_backward(d, t), [dy, y])
    # Relative errors of y, of sums of 1000 terms that are near 1, and the rounding of a mean of the size of the offset,
    # of which the second pass leaves the part by which y does not sum to 1.
    bound = 1000 * EPS32 * exact * (np.abs(rest) + (np.abs(rest) * exact).sum(-1, keepdims=True) + abs(offset) * EPS32)
    assert np.all(np.abs(dx - exact * rest) <= bound)


def test_gradient(oracle: CpuEngine) -> None:
    """Finite differences."""
    x = np.random.default_rng(1).standard_normal((3, 5))
    check_gradient(
        oracle,
        lambda e, t: e.softmax(t),
        lambda e, dy, t: e.softmax_backward(dy, e.softmax(t)),
        [x],
    )


def test_shapes_are_checked(oracle: CpuEngine) -> None:
    """The message names what is wrong."""
    with pytest.raises(ValueError, match="softmax_backward: dy"):
        oracle.softmax_backward(oracle.zeros((2, 3)), oracle.zeros((3, 2)))
    with pytest.raises(ValueError, match="needs 1 to"):
        oracle.softmax(oracle.zeros((2, 0)))
