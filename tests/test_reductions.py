"""Sums over rows and over everything. Small integers add up exactly in any order: a lost or doubled element shows."""

from __future__ import annotations

import numpy as np
import pytest
from op_checks import EPS32, ODD_SIZES, check_gradient, check_op, sampled_sizes

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.ops.column_sum import column_chunks
from vkfold.engine.ops.sum import sum_parts
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine


@pytest.mark.parametrize(("rows", "cols"), [*sampled_sizes(2, 30, seed=5), (0, 5), (70_000, 1), (1, 5000)])
def test_column_sum_is_exact_on_integers(vulkan: VulkanEngine, rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows + cols)
    x = rng.integers(-9, 10, (rows, cols)).astype(np.float32)
    out = vulkan.tensor(np.full(cols, np.nan, np.float32))
    vulkan.column_sum(vulkan.tensor(x), out)
    assert np.array_equal(out.numpy(), x.sum(axis=0))
    vulkan.column_sum(vulkan.tensor(x), out, accumulate=True)
    assert np.array_equal(out.numpy(), 2 * x.sum(axis=0))


@pytest.mark.parametrize(("rows", "cols"), [(1000, 33), (257, 128)])
def test_column_sum_error(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    x = np.random.default_rng(1).standard_normal((rows, cols)).astype(np.float32)

    def total(engine: ComputeEngine, x: Tensor) -> Tensor:
        out = engine.empty((cols,))
        engine.column_sum(x, out)
        return out

    terms = sum(column_chunks(rows, cols))
    check_op(vulkan, oracle, total, [x], lambda expected: [terms * EPS32 * np.abs(x).sum(axis=0)])


def test_column_chunks_cover_the_rows() -> None:
    for rows in (0, 1, 31, 32, 33, 4095, 4097, 6144, 10**6, 2**31):
        for cols in (1, 3, 768, 50_257, 2**20):
            chunks, chunk_rows = column_chunks(rows, cols)
            assert chunks >= 1
            assert (chunks - 1) * chunk_rows < max(rows, 1) <= max(1, chunks * chunk_rows)
            assert max(chunks, chunk_rows) <= 65_535 or rows > 2**30


def test_sum_parts_cover_the_elements() -> None:
    for n in (0, 1, 4095, 4096, 4097, 10**6 + 1, 2**26, 2**26 + 1, 2**32 - 1):
        parts, chunk = sum_parts(n)
        assert chunk % 4 == 0
        assert parts <= 16384
        assert (parts - 1) * chunk < max(n, 1) <= parts * chunk
        assert chunk / 16 <= 65_535


@pytest.mark.parametrize("n", [0, *ODD_SIZES, 4095, 4096, 4097, 8192, 100_003])
def test_sum_is_exact_on_integers(vulkan: VulkanEngine, n: int) -> None:
    x = np.random.default_rng(n).integers(-50, 51, n).astype(np.float32)
    result = vulkan.sum(vulkan.tensor(x))
    assert result.shape == (1,)
    assert result.item() == x.sum()


def test_sum_error_and_shape(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    x = np.random.default_rng(2).standard_normal((3, 50, 701)).astype(np.float32)
    parts, chunk = sum_parts(x.size)
    terms = chunk / 16 + parts / 16 + 24  # 4 elements x at least 4 lanes a round, and the trees
    check_op(vulkan, oracle, lambda e, x: e.sum(x), [x], lambda expected: [terms * EPS32 * np.abs(x).sum()])


@pytest.mark.parametrize("n", [4096, 20_000])
def test_sum_bits_do_not_depend_on_alignment(vulkan: VulkanEngine, n: int) -> None:
    x = np.random.default_rng(3).standard_normal(n + 1).astype(np.float32)
    aligned, whole = vulkan.tensor(x[1:]), vulkan.tensor(x)
    results = {vulkan.sum(t).item() for t in (aligned, whole.rows(1, n + 1), aligned)}
    assert len(results) == 1


def test_sum_passes_nan_on(vulkan: VulkanEngine) -> None:
    x = np.zeros(9000, np.float32)
    x[8191] = np.nan
    assert np.isnan(vulkan.sum(vulkan.tensor(x)).item())
    x[8191] = np.inf
    assert vulkan.sum(vulkan.tensor(x)).item() == np.inf


def test_column_sum_is_the_gradient_of_a_bias(oracle: CpuEngine) -> None:
    def forward(e: ComputeEngine, bias: Tensor) -> Tensor:
        return e.tensor(np.broadcast_to(bias.numpy(), (4, 3)))

    def backward(e: ComputeEngine, dy: Tensor, bias: Tensor) -> Tensor:
        out = e.empty(bias.shape)
        e.column_sum(dy, out)
        return out

    check_gradient(oracle, forward, backward, [np.arange(3.0)])


def test_shapes_that_do_not_fit(cpu: CpuEngine) -> None:
    with pytest.raises(ValueError, match=r"column_sum: out has shape \(4,\), needed is \(3,\)"):
        cpu.column_sum(cpu.zeros((2, 3)), cpu.zeros((4,)))
    with pytest.raises(ValueError, match="sum: x is int32"):
        cpu.sum(cpu.zeros((2,), "int32"))
