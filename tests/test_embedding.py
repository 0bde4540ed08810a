"""Embedding look-up and its deterministic gradient."""

from __future__ import annotations

import numpy as np
import pytest
from op_checks import check_gradient, sampled_sizes

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine

SHAPES = sampled_sizes(3, 24, seed=7)  # tokens, vocabulary, columns


def sums_in_order(dy: np.ndarray, tokens: np.ndarray, start: np.ndarray | None, vocabulary: int) -> np.ndarray:
    """The gradient in float32, the rows of each id added by position, then to what was there."""
    total = np.zeros((vocabulary, dy.shape[-1]), np.float32)
    np.add.at(total, tokens.reshape(-1), dy.reshape(-1, dy.shape[-1]))
    return total if start is None else start + total


@pytest.mark.parametrize(("count", "vocabulary", "cols"), SHAPES)
def test_look_up(vulkan: VulkanEngine, count: int, vocabulary: int, cols: int) -> None:
    rng = np.random.default_rng(count)
    table = rng.standard_normal((vocabulary, cols)).astype(np.float32)
    tokens = rng.integers(0, vocabulary, count)
    assert np.array_equal(vulkan.embedding(vulkan.tensor(table), vulkan.tensor(tokens)).numpy(), table[tokens])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("count", "vocabulary", "cols"), SHAPES)
def test_backward_adds_in_order(vulkan: VulkanEngine, count: int, vocabulary: int, cols: int, accumulate: bool) -> None:
    """To the bit: float32 additions in the order of positions, whatever the driver."""
    rng = np.random.default_rng(count + 1)
    tokens = rng.integers(0, vocabulary, count)
    dy = rng.standard_normal((count, cols)).astype(np.float32)
    start = rng.standard_normal((vocabulary, cols)).astype(np.float32)
    out = vulkan.tensor(start)
    vulkan.embedding_backward(vulkan.tensor(dy), vulkan.tensor(tokens), out, accumulate=accumulate)
    assert np.array_equal(out.numpy(), sums_in_order(dy, tokens, start if accumulate else None, vocabulary))


def test_large_batch_and_vocabulary(vulkan: VulkanEngine) -> None:
    """6,144 tokens over 50,257 ids, as in the reference configuration; ids near both ends included."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_257, (6, 1024))
    tokens[:, ::7] = rng.integers(0, 40, tokens[:, ::7].shape)  # frequent ids: long chains
    tokens[0, 0] = tokens[5, 1023] = 50_256
    dy = rng.standard_normal((6, 1024, 5)).astype(np.float32)
    out = vulkan.empty((50_257, 5))
    vulkan.embedding_backward(vulkan.tensor(dy), vulkan.tensor(tokens), out)
    assert np.array_equal(out.numpy(), sums_in_order(dy, tokens, None, 50_257))


def test_one_id_more_often_than_a_loop_may_run(vulkan: VulkanEngine) -> None:
    """70,000 positions of one id: a driver that ends loops after 65,535 rounds must not lose any."""
    count = 70_000
    dy = np.ones((count, 1), np.float32)
    out = vulkan.empty((3, 1))
    vulkan.embedding_backward(vulkan.tensor(dy), vulkan.tensor(np.full(count, 1)), out)
    assert out.numpy().ravel().tolist() == [0.0, count, 0.0]


def test_a_table_larger_than_storage_buffers(vulkan: VulkanEngine) -> None:
    """50,257 x 768 floats are more than the 128 MiB a storage-buffer range has on lavapipe."""
    table = vulkan.zeros((50_257, 768))
    rows = np.random.default_rng(1).standard_normal((2, 768)).astype(np.float32)
    vulkan.copy_into(table, vulkan.tensor(rows), offset=50_255 * 768)
    tokens = vulkan.tensor(np.array([50_256, 3, 50_255]))
    found = vulkan.embedding(table, tokens)
    assert np.array_equal(found.numpy(), np.stack([rows[1], np.zeros(768, np.float32), rows[0]]))
    vulkan.embedding_backward(found, tokens, table, accumulate=True)
    assert np.array_equal(table.rows(50_255, 50_257).numpy(), 2 * rows)


def test_ids_out_of_range_are_clamped(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    tokens = np.array([-1, 4, 2**31 - 1, -(2**31), 2])
    for engine in (vulkan, cpu):
        found = engine.embedding(engine.tensor(table), engine.tensor(tokens))
        assert np.array_equal(found.numpy(), table[[0, 3, 3, 0, 2]])
        out = engine.empty((4, 3))
        engine.embedding_backward(engine.tensor(np.ones((5, 3))), engine.tensor(tokens), out)
        assert out.numpy()[:, 0].tolist() == [2, 0, 1, 2]


def test_no_tokens(vulkan: VulkanEngine) -> None:
    assert vulkan.embedding(vulkan.zeros((4, 3)), vulkan.empty((0,), "int32")).shape == (0, 3)
    out = vulkan.tensor(np.ones((4, 3)))
    vulkan.embedding_backward(vulkan.empty((0, 3)), vulkan.empty((0,), "int32"), out)
    assert not out.numpy().any()


def test_gradient(oracle: CpuEngine) -> None:
    tokens = np.array([[1, 0, 1], [3, 1, 0]])

    def backward(e: ComputeEngine, dy: Tensor, table: Tensor) -> Tensor:
        out = e.empty(table.shape)
        e.embedding_backward(dy, e.tensor(tokens), out)
        return out

    table = np.random.default_rng(0).standard_normal((4, 3))
    check_gradient(oracle, lambda e, table: e.embedding(table, e.tensor(tokens)), backward, [table])


def test_repeats_give_equal_bits_from_unaligned_rows(vulkan: VulkanEngine) -> None:
    rng = np.random.default_rng(5)
    dy = rng.standard_normal(300 * 8 + 1).astype(np.float32)
    tokens = vulkan.tensor(rng.integers(0, 20, 300))
    results = []
    whole = vulkan.tensor(dy)
    for source in (vulkan.tensor(dy[1:]), whole.rows(1, len(dy)), whole.rows(1, len(dy))):
        out = vulkan.empty((20, 8))
        vulkan.embedding_backward(source.reshape(300, 8), tokens, out)
        results.append(out.numpy())
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_too_many_tokens(cpu: CpuEngine) -> None:
    with pytest.raises(ValueError, match="131073 tokens in one call, at most 131072"):
        cpu.embedding_backward(cpu.empty((131_073, 1)), cpu.empty((131_073,), "int32"), cpu.zeros((2, 1)))


def test_shapes_that_do_not_fit(cpu: CpuEngine) -> None:
    table, tokens = cpu.zeros((4, 3)), cpu.zeros((5,), "int32")
    with pytest.raises(ValueError, match="tokens is float32, needed is int32"):
        cpu.embedding(table, cpu.zeros((5,)))
    with pytest.raises(ValueError, match="vocabulary"):
        cpu.embedding(cpu.zeros((3,)), tokens)
    with pytest.raises(ValueError, match="vocabulary"):
        cpu.embedding(cpu.zeros((0, 3)), tokens)
    with pytest.raises(ValueError, match=r"dy has shape \(5, 4\), needed is \(5, 3\)"):
        cpu.embedding_backward(cpu.zeros((5, 4)), tokens, table)
