"""For tests of fusion: an engine with every rule on, and the same calls with and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vkfold.engine.fusion import Fusion
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine


def fuse_everything(patch: pytest.MonkeyPatch) -> None:
    """Of engines that are made from now on: every rule is on, whatever the device."""
    patch.setenv("VKFOLD_DEBUG", "0")
    patch.setenv("VKFOLD_FUSION", "all")


def fusing_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[VulkanEngine]:
    """A fixture: an engine with every rule on."""
    fuse_everything(monkeypatch)
    with VulkanEngine() as made:
        yield made


def as_if_new(monkeypatch: pytest.MonkeyPatch, fusing_of_module: VulkanEngine) -> Iterator[VulkanEngine]:
    """A fixture: the same, of the whole module (tests/conftest.py), so that a kernel is made once."""
    fuse_everything(monkeypatch)
    engine = fusing_of_module
    engine.set_step_parameters(StepParameters())
    engine.end_batch()
    engine.release_idle_pool_blocks()
    fusion_of(engine).reset_report()
    yield engine


def fusion_of(engine: VulkanEngine) -> Fusion:
    assert engine.fusion is not None
    return engine.fusion


def counts(engine: VulkanEngine) -> dict[str, int]:
    engine.flush_batch()
    return {rule: fired.times for rule, fired in fusion_of(engine).report().items()}


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def both(
    engine: VulkanEngine, call: Callable[[VulkanEngine], list[np.ndarray]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What a call gives with fusion, and on the same engine without."""
    with_fusion = call(engine)
    fusion, engine.fusion = engine.fusion, None
    try:
        return with_fusion, call(engine)
    finally:
        engine.fusion = fusion


def check_same(engine: VulkanEngine, call: Callable[[VulkanEngine], list[np.ndarray]]) -> None:
    for one, other in zip(*both(engine, call), strict=True):
        assert np.array_equal(one, other, equal_nan=True) and np.array_equal(np.signbit(one), np.signbit(other))
