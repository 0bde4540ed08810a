"""Dropout: known answers of the generator, the same mask everywhere, different masks where they must differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.philox import philox, random_words
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine

from .op_checks import ODD_SIZES, run

STEP = StepParameters(seed=0x123456789ABCDEF0, step=7, micro_batch=2)


@pytest.fixture(autouse=True)
def step_parameters(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    vulkan.set_step_parameters(STEP)
    cpu.set_step_parameters(STEP)


@pytest.mark.parametrize(
    "counter,key,expected",
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    """The test vectors that come with Random123, the generator's publication."""
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == expected


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_same_mask_on_both(vulkan: VulkanEngine, cpu: CpuEngine, p: float) -> None:
    """Vulkan and NumPy agree to the bit, in every size."""
    for size in (*ODD_SIZES, 4100):
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        (device,) = run(vulkan, lambda engine, t: engine.dropout(t, p=p, site=3), (x,))
        (host,) = run(cpu, lambda engine, t: engine.dropout(t, p=p, site=3), (x,))
        assert np.array_equal(device.view(np.uint32), host.view(np.uint32))


def test_dropout_add(vulkan: VulkanEngine) -> None:
    """The same bits as dropout and then add; wide and narrow kernel alike."""
    rng = np.random.default_rng(0)
    x, residual = (rng.standard_normal(1021).astype(np.float32) for _ in range(2))
    t, r = vulkan.tensor(x), vulkan.tensor(residual)
    fused = vulkan.dropout_add(t, r, p=0.3, site=9).numpy()
    assert np.array_equal(fused, (r + vulkan.dropout(t, p=0.3, site=9)).numpy())


def test_fraction_and_scale(vulkan: VulkanEngine) -> None:
    """Kept values are scaled by 1 / (1 - p), so the mean stays; the fraction is within 5 standard deviations."""
    size = 200_000
    for p in (0.1, 0.5):
        y = vulkan.dropout(vulkan.tensor(np.ones(size, np.float32)), p=p, site=1).numpy()
        assert set(np.unique(y)) == {np.float32(0), np.float32(1 / (1 - p))}
        assert abs((y != 0).mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / size)


def test_masks_differ(vulkan: VulkanEngine) -> None:
    """By micro-batch and site; by step and half of the seed as well. Agreement is that of chance."""
    ones = vulkan.tensor(np.ones(8192, np.float32))

    def mask(parameters: StepParameters, site: int) -> np.ndarray:
        vulkan.set_step_parameters(parameters)
        return vulkan.dropout(ones, p=0.5, site=site).numpy() != 0

    masks = [
        mask(STEP, 0),
        mask(STEP, 1),
        mask(replace(STEP, micro_batch=3), 0),
        mask(replace(STEP, step=8), 0),
        mask(replace(STEP, seed=STEP.seed + 1), 0),
        mask(replace(STEP, seed=STEP.seed + 2**32), 0),
    ]
    for i, first in enumerate(masks):
        for second in masks[:i]:
            assert abs((first == second).mean() - 0.5) < 0.05
    assert np.array_equal(masks[0], mask(STEP, 0))


def test_shape_and_order_do_not_matter(vulkan: VulkanEngine) -> None:
    """The mask depends on the element's index, not on the shape, nor on what was computed in between."""
    flat = np.ones(600, np.float32)
    first = vulkan.dropout(vulkan.tensor(flat), p=0.4, site=5).numpy()
    vulkan.dropout(vulkan.tensor(np.ones(64, np.float32)), p=0.4, site=6)
    assert np.array_equal(vulkan.dropout(vulkan.tensor(flat.reshape(4, 10, 15)), p=0.4, site=5).numpy().ravel(), first)
    assert np.array_equal(vulkan.dropout(vulkan.tensor(flat[:333]), p=0.4, site=5).numpy(), first[:333])
    assert np.array_equal(random_words(600, 5, STEP) >= round(0.4 * 2**32), first != 0)


def test_misaligned_view(vulkan: VulkanEngine) -> None:
    """A view that starts in the middle of 16 bytes counts its own elements from 0, as any tensor does."""
    view = vulkan.tensor(np.ones((9, 3), np.float32)).rows(1, 9)
    kept = vulkan.dropout(view, p=0.5, site=5).numpy().ravel() != 0
    assert np.array_equal(kept, random_words(24, 5, STEP) >= 2**31)


def test_bad_input(cpu: CpuEngine) -> None:
    x = cpu.tensor(np.zeros(3))
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            cpu.dropout(x, p=p, site=0)
    with pytest.raises(ValueError, match="32 bits"):
        cpu.dropout(x, p=0.5, site=2**32)
