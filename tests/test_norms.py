"""RMSNorm and LayerNorm against the float64 oracle, finite differences, and the promise that apply gives equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_checks import EPS32, check_gradient, check_op, sampled_sizes

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools.error_bounds import column_terms, of_layer_norm, of_rms_norm, row_terms

EPS = 1e-5
TINY = 1e-37
SHAPES = sampled_sizes(2, 24, seed=3)


def rms_bound(x: np.ndarray) -> Any:
    return lambda expected: of_rms_norm([x], expected)


def layer_bound(x: np.ndarray, weight: np.ndarray) -> Any:
    return lambda expected: of_layer_norm([x, weight], expected)


def arrays_for(rows: int, cols: int, offset: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x, weight, bias, dy in float32."""
    rng = np.random.default_rng(rows * 1009 + cols)
    x = (rng.standard_normal((rows, cols)) * rng.uniform(0.1, 5) + offset).astype(np.float32)
    dy = rng.standard_normal((rows, cols)).astype(np.float32)
    weight, bias = rng.standard_normal((2, cols)).astype(np.float32)
    return x, weight, bias, dy


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_rms_norm(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    x, weight, _, _ = arrays_for(rows, cols)
    check_op(vulkan, oracle, lambda e, x, w: e.rms_norm(x, w, eps=EPS), [x, weight], rms_bound(x))


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_layer_norm(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int, offset: float) -> None:
    x, weight, bias, _ = arrays_for(rows, cols, offset)
    check_op(
        vulkan, oracle, lambda e, x, w, b: e.layer_norm(x, w, b, eps=EPS), [x, weight, bias], layer_bound(x, weight)
    )


@pytest.mark.parametrize("offset", [1e3, -1e4, 1e6])
@pytest.mark.parametrize("cols", [63, 768, 4096])
def test_layer_norm_far_from_zero(vulkan: VulkanEngine, oracle: CpuEngine, cols: int, offset: float) -> None:
    """Deviations of 1 around a large mean cost no more digits than rounding the mean to float32 does."""
    rng = np.random.default_rng(cols)
    x = (rng.standard_normal((32, cols)) + offset).astype(np.float32)
    weight, bias = np.ones(cols, np.float32), np.zeros(cols, np.float32)
    bound = layer_bound(x, weight)
    exact_mean = x.astype(np.float64).mean(axis=-1)
    y, mean, rstd = check_op(vulkan, oracle, lambda e, *t: e.layer_norm(*t, eps=EPS), [x, weight, bias], bound)
    assert np.all(
        np.abs(mean - exact_mean) <= 0.51 * np.spacing(np.abs(mean))
    )  # a sum of 4096 terms alone: 60 and more
    dy = rng.standard_normal(x.shape).astype(np.float32)
    xhat = (x - exact_mean[:, None]) / np.sqrt(x.astype(np.float64).var(axis=-1, keepdims=True) + EPS)
    exact = np.square(rstd[:, None]) ** 0.5 * (
        dy - dy.mean(axis=-1, keepdims=True) - xhat * (dy * xhat).mean(axis=-1, keepdims=True)
    )
    d_x = vulkan.layer_norm_backward(*(vulkan.tensor(a) for a in (dy, x, weight, mean, rstd))).numpy()
    d_xhat = bound([y, exact_mean, rstd])[0] + 1e-5
    slack = d_xhat * np.abs(dy * xhat).mean(axis=-1, keepdims=True) + np.abs(xhat) * (np.abs(dy) * d_xhat).mean(
        axis=-1, keepdims=True
    )
    assert np.all(np.abs(d_x - exact) <= 2 * slack + 1e-5)


def test_layer_norm_of_constant_rows(vulkan: VulkanEngine) -> None:
    """A row of equal values has itself for a mean, and gives the bias, whatever the sum of the row rounds to."""
    values = np.array([0.1, 1e4 + 1 / 3, -7e7, 3e15], np.float32)
    x = np.repeat(values[:, None], 1000, axis=1)
    bias = np.arange(1000, dtype=np.float32)
    y, mean, rstd = vulkan.layer_norm(vulkan.tensor(x), vulkan.tensor(np.ones(1000)), vulkan.tensor(bias), eps=EPS)
    assert np.array_equal(mean.numpy(), values)
    assert np.allclose(rstd.numpy(), EPS**-0.5, rtol=1e-6)
    assert np.array_equal(y.numpy(), np.broadcast_to(bias, x.shape))


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_rms_norm_backward(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    x, weight, _, dy = arrays_for(rows, cols)
    rstd = (1 / np.sqrt(np.square(x).mean(axis=-1) + EPS)).astype(np.float32)
    g, xhat = np.abs(dy * weight), np.abs(x * rstd[:, None])
    slack = 3 * g + xhat * (row_terms(cols) + 8) * (g * xhat).mean(axis=-1, keepdims=True)
    check_op(
        vulkan,
        oracle,
        lambda e, *t: e.rms_norm_backward(*t),
        [dy, x, weight, rstd],
        lambda expected: [EPS32 * (rstd[:, None] * slack + 3 * np.abs(expected[0])) + TINY],
    )


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_layer_norm_backward(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    x, weight, _, dy = arrays_for(rows, cols, offset=3.0)
    mean = x.mean(axis=-1)
    rstd = (1 / np.sqrt(np.square(x - mean[:, None]).mean(axis=-1) + EPS)).astype(np.float32)
    g, xhat = np.abs(dy * weight), np.abs((x - mean[:, None]) * rstd[:, None])
    mean_g, mean_dot = g.mean(axis=-1, keepdims=True), (g * xhat).mean(axis=-1, keepdims=True)
    slack = 3 * g + (row_terms(cols) + 8) * (mean_g + xhat * mean_dot)
    check_op(
        vulkan,
        oracle,
        lambda e, *t: e.layer_norm_backward(*t),
        [dy, x, weight, mean, rstd],
        lambda expected: [EPS32 * (rstd[:, None] * slack + 3 * np.abs(expected[0])) + TINY],
    )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_weight_backward(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int, accumulate: bool) -> None:
    x, before, _, dy = arrays_for(rows, cols, offset=0.5)
    mean = x.mean(axis=-1)
    rstd = (1 / np.sqrt(np.square(x - mean[:, None]).mean(axis=-1) + EPS)).astype(np.float32)

    def both(engine: ComputeEngine, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, start: Tensor) -> list[Tensor]:
        outs = [engine.copy(start) if accumulate else engine.empty((cols,)) for _ in range(3)]
        engine.rms_norm_weight_backward(dy, x, rstd, outs[0], accumulate=accumulate)
        engine.layer_norm_weight_backward(dy, x, mean, rstd, outs[1], outs[2], accumulate=accumulate)
        return outs

    terms = [dy * x * rstd[:, None], dy * (x - mean[:, None]) * rstd[:, None], dy]
    sizes = [np.abs(t).sum(axis=0) + np.abs(before) for t in terms]
    # The deviation x - mean is rounded once more than x.
    bound = [EPS32 * (column_terms(rows, cols) + 2) * size + TINY for size in sizes]
    check_op(vulkan, oracle, both, [dy, x, mean, rstd, before], lambda expected: bound)


@pytest.mark.parametrize(("rows", "cols"), [(5, 8), (3, 7), (33, 128), (2, 1000)])
def test_apply_gives_the_bits_of_the_forward(vulkan: VulkanEngine, rows: int, cols: int) -> None:
    x, weight, bias, _ = (vulkan.tensor(a) for a in arrays_for(rows, cols, offset=1.0))
    y, rstd = vulkan.rms_norm(x, weight, eps=EPS)
    assert np.array_equal(vulkan.rms_norm_apply(x, weight, rstd).numpy(), y.numpy())
    y, mean, rstd = vulkan.layer_norm(x, weight, bias, eps=EPS)
    assert np.array_equal(vulkan.layer_norm_apply(x, weight, bias, mean, rstd).numpy(), y.numpy())


def test_gradients(oracle: CpuEngine) -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((2, 3, 5)), rng.standard_normal(5), rng.standard_normal(5)

    def rms_backward(e: ComputeEngine, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        _, rstd = e.rms_norm(x, w, eps=EPS)
        d_weight = e.empty(w.shape)
        e.rms_norm_weight_backward(dy, x, rstd, d_weight)
        return e.rms_norm_backward(dy, x, w, rstd), d_weight

    def layer_backward(e: ComputeEngine, dy: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, mean, rstd = e.layer_norm(x, w, b, eps=EPS)
        d_weight, d_bias = e.empty(w.shape), e.empty(b.shape)
        e.layer_norm_weight_backward(dy, x, mean, rstd, d_weight, d_bias)
        return e.layer_norm_backward(dy, x, w, mean, rstd), d_weight, d_bias

    check_gradient(oracle, lambda e, x, w: e.rms_norm(x, w, eps=EPS), rms_backward, [x, weight])
    check_gradient(oracle, lambda e, x, w, b: e.layer_norm(x, w, b, eps=EPS), layer_backward, [x, weight, bias])


def all_norm_results(engine: ComputeEngine, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[np.ndarray]:
    """Everything the norm ops compute, as arrays."""
    y, rstd = engine.rms_norm(x, weight, eps=EPS)
    results = [y, rstd, engine.rms_norm_backward(dy, x, weight, rstd)]
    outs = [engine.empty(weight.shape) for _ in range(3)]
    engine.rms_norm_weight_backward(dy, x, rstd, outs[0])
    y, mean, rstd = engine.layer_norm(x, weight, bias, eps=EPS)
    engine.layer_norm_weight_backward(dy, x, mean, rstd, outs[1], outs[2])
    results += [y, mean, rstd, engine.layer_norm_backward(dy, x, weight, mean, rstd), *outs]
    return [t.numpy() for t in results]


@pytest.mark.parametrize("cols", [8, 132])
def test_bits_do_not_depend_on_time_or_place(vulkan: VulkanEngine, cols: int) -> None:
    """Twice the same; and the same from rows that are not aligned to 16 bytes, which go through other kernels."""
    arrays = arrays_for(70, cols, offset=1.0)
    tensors = [vulkan.tensor(a) for a in arrays]
    first = all_norm_results(vulkan, *tensors)
    second = all_norm_results(vulkan, *tensors)
    moved = [
        vulkan.tensor(np.concatenate([np.zeros(1, np.float32), a.ravel()])).rows(1, a.size + 1).reshape(*a.shape)
        for a in arrays
    ]
    shifted = all_norm_results(vulkan, *moved)
    for a, b, c in zip(first, second, shifted, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)


def test_a_bad_row_stays_alone(vulkan: VulkanEngine) -> None:
    """NaN and infinity spoil their own row and no other (64 rows share workgroups)."""
    x, weight, bias, _ = arrays_for(64, 36)
    clean = [vulkan.rms_norm(vulkan.tensor(x), vulkan.tensor(weight))[0].numpy()]
    clean.append(vulkan.layer_norm(vulkan.tensor(x), vulkan.tensor(weight), vulkan.tensor(bias))[0].numpy())
    x[5, 35], x[9, 0] = np.nan, np.inf
    spoiled = [vulkan.rms_norm(vulkan.tensor(x), vulkan.tensor(weight))[0].numpy()]
    spoiled.append(vulkan.layer_norm(vulkan.tensor(x), vulkan.tensor(weight), vulkan.tensor(bias))[0].numpy())
    good = np.delete(np.arange(64), [5, 9])
    for before, after in zip(clean, spoiled, strict=True):
        assert np.isnan(after[5]).all()
        assert np.isnan(after[9, 0])
        assert np.array_equal(before[good], after[good])


def test_leading_dimensions_and_single_row(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    x, weight, _, _ = arrays_for(6, 20)
    for shape in ((2, 3, 20), (1, 6, 20)):
        y, rstd = vulkan.rms_norm(vulkan.tensor(x.reshape(shape)), vulkan.tensor(weight))
        assert y.shape == shape
        assert rstd.shape == shape[:-1]
    check_op(vulkan, oracle, lambda e, x, w: e.rms_norm(x, w, eps=EPS), [x[0], weight], rms_bound(x[0]))


def test_longest_row(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Rows up to the limit that keeps loops within what lavapipe 22.3 runs: none is cut short."""
    cols = (2**20 - 16) // 3
    x = np.random.default_rng(0).integers(-4, 5, (1, cols)).astype(np.float32)
    ones, zeros = vulkan.tensor(np.ones(cols)), vulkan.zeros((cols,))
    y, mean, rstd = vulkan.layer_norm(vulkan.tensor(x), ones, zeros)
    exact = x.astype(np.float64)
    assert mean.item() == pytest.approx(exact.mean(), abs=1e-6)
    assert rstd.item() == pytest.approx(1 / np.sqrt(exact.var() + 1e-5), rel=1e-5)
    assert np.allclose(y.numpy(), (exact - exact.mean()) / np.sqrt(exact.var() + 1e-5), atol=1e-4)


def test_no_rows(vulkan: VulkanEngine) -> None:
    x, weight = vulkan.empty((0, 12)), vulkan.tensor(np.ones(12))
    y, rstd = vulkan.rms_norm(x, weight)
    assert (y.shape, rstd.shape) == ((0, 12), (0,))
    out = vulkan.tensor(np.full(12, 7.0))
    vulkan.rms_norm_weight_backward(x, x, rstd, out)
    assert np.array_equal(out.numpy(), np.zeros(12))


def test_shapes_that_do_not_fit(cpu: CpuEngine) -> None:
    x, weight = cpu.zeros((4, 6)), cpu.zeros((6,))
    rstd = cpu.zeros((4,))
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(5,\), needed is \(6,\)"):
        cpu.rms_norm(x, cpu.zeros((5,)))
    with pytest.raises(ValueError, match="columns"):
        cpu.rms_norm(cpu.zeros((4, 0)), cpu.zeros((0,)))
    with pytest.raises(ValueError, match="columns"):
        cpu.layer_norm(cpu.zeros((1, 400_000)), cpu.zeros((400_000,)), cpu.zeros((400_000,)))
    with pytest.raises(ValueError, match="x is int32, needed is float32"):
        cpu.rms_norm(cpu.zeros((4, 6), "int32"), weight)
    with pytest.raises(ValueError, match="eps"):
        cpu.layer_norm(x, weight, weight, eps=-1.0)
    with pytest.raises(ValueError, match="bias has shape"):
        cpu.layer_norm(x, weight, cpu.zeros((7,)))
    with pytest.raises(ValueError, match="rstd has shape"):
        cpu.rms_norm_backward(x, x, weight, cpu.zeros((5,)))
    with pytest.raises(ValueError, match="dy has shape"):
        cpu.layer_norm_backward(cpu.zeros((4, 5)), x, weight, rstd, rstd)
    with pytest.raises(ValueError, match="out_bias has shape"):
        cpu.layer_norm_weight_backward(x, x, rstd, rstd, weight, cpu.zeros((4,)))
