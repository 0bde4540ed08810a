"""For tests of fusion: an engine with every rule on, and the same calls with and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vkfold.engine.fusion import Fusion
from vkfold.engine.vulkan_engine import VulkanEngine


def fusing_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[VulkanEngine]:
    """A fixture: an engine with every rule on, whatever the device."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    monkeypatch.setenv("VKFOLD_FUSION", "all")
    with VulkanEngine() as made:
        yield made


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
        assert np.array_equal(one, other, equal_nan=True)
