"""Rotary positions: both pairings against the oracle, the inverse, what stays untouched, angles by hand."""

from __future__ import annotations

import numpy as np
import pytest
from op_checks import EPS32, check_op

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine


def rotated(engine: ComputeEngine, x: Tensor, cos: Tensor, sin: Tensor, **settings: object) -> Tensor:
    """rope_ and its tensor."""
    engine.rope_(x, cos, sin, **settings)  # type: ignore[arg-type]
    return x


def tables(length: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position * 1e4^(-i/half)."""
    angle = np.arange(length)[:, None] * 1e4 ** (-np.arange(half) / half)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("batch", "seq", "heads", "head_dim", "extra"),
    [(1, 1, 1, 2, 0), (3, 17, 5, 6, 7), (2, 65, 3, 64, 64), (2, 5, 19, 8, 4), (1, 3, 9, 8, 3), (2, 3, 8, 4, 0)],
)
def test_against_the_oracle(
    vulkan: VulkanEngine,
    oracle: CpuEngine,
    interleaved: bool,
    inverse: bool,
    batch: int,
    seq: int,
    heads: int,
    head_dim: int,
    extra: int,
) -> None:
    """Any shape; columns behind the rotated heads keep their bits."""
    rng = np.random.default_rng(seq)
    x = rng.standard_normal((batch, seq, heads * head_dim + extra)).astype(np.float32)
    cos, sin = tables(seq + 3, head_dim // 2)
    settings = {"num_heads": heads, "head_dim": head_dim, "position_offset": 3}
    settings |= {"interleaved": interleaved, "inverse": inverse}
    bound = 6 * EPS32 * np.abs(x).max()
    (y,) = check_op(vulkan, oracle, lambda e, *t: rotated(e, *t, **settings), [x, cos, sin], lambda _: [bound])
    assert np.array_equal(y[..., heads * head_dim :], x[..., heads * head_dim :])


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_undoes_it(oracle: CpuEngine, interleaved: bool) -> None:
    """The rotation is orthogonal, so its inverse is the backward."""
    x = np.random.default_rng(0).standard_normal((2, 9, 24))
    cos, sin = (oracle.tensor(t.astype(np.float64)) for t in tables(9, 4))
    tensor = oracle.tensor(x)
    for inverse in (False, True):
        oracle.rope_(tensor, cos, sin, num_heads=3, head_dim=8, interleaved=interleaved, inverse=inverse)
    assert np.allclose(tensor.numpy(), x, atol=1e-6)


def test_by_hand(vulkan: VulkanEngine) -> None:
    """Half rotation: (1, 0) of a pair at angle a becomes (cos a, sin a)."""
    x = vulkan.tensor(np.array([[[1.0, 2.0, 0.0, 0.0]]]))
    vulkan.rope_(x, vulkan.tensor([[0.6, 0.0]]), vulkan.tensor([[0.8, 1.0]]), num_heads=1, head_dim=4)
    assert np.allclose(x.numpy(), [[[0.6, 0.0, 0.8, 2.0]]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 1, "head_dim": 3}, "even"),
        ({"num_heads": 4, "head_dim": 4}, "at least 4 x 4"),
        ({"num_heads": 1, "head_dim": 8}, r"\[max_seq, 4\]"),
        ({"num_heads": 1, "head_dim": 4, "position_offset": 1}, "positions 1..5 pass the 5"),
    ],
)
def test_bad_settings(oracle: CpuEngine, settings: dict[str, int], message: str) -> None:
    """Refused with the numbers."""
    with pytest.raises(ValueError, match=message):
        oracle.rope_(oracle.zeros((1, 5, 8)), oracle.zeros((5, 2)), oracle.zeros((5, 2)), **settings)  # type: ignore[arg-type]
