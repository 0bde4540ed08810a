"""Engines shared by the tests. Everything that says `vulkan` runs on a real driver; there is no mock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fusion_checks import fuse_everything
from small_run import SMALL, TEXT

from vkfold.engine import vulkan_engine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools import demo, text_generate, text_train


@pytest.fixture(scope="session")
def vulkan() -> Iterator[VulkanEngine]:
    """One Vulkan engine for the whole session; at the end nothing may be allocated and no message may be open."""
    engine = VulkanEngine()
    yield engine
    engine.end_batch()
    messages = list(engine.validation_messages)
    engine.close()
    assert not messages, f"{len(messages)} validation messages, the first: {messages[0]}"


@pytest.fixture(scope="module")
def fusing_of_module() -> Iterator[VulkanEngine]:
    """One engine with every rule of fusion on, for the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        fuse_everything(patch)
        engine = VulkanEngine()
    with engine:
        yield engine


@pytest.fixture(scope="module")
def cpu() -> CpuEngine:
    """The float32 reference engine."""
    return CpuEngine()


@pytest.fixture(scope="module")
def oracle() -> CpuEngine:
    """The float64 reference engine."""
    return CpuEngine("float64")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small text file."""
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def saved(text: Path, tmp_path: Path) -> Path:
    """The folder of saves of a short run on it."""
    root = tmp_path / "run"
    assert text_train.main([str(text), *SMALL, "--save", str(root)]) == 0
    return root


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of a device by the programs fails the test."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("an engine was made before the input was checked")

    monkeypatch.setattr(text_train, "make_engine", refuse)
    monkeypatch.setattr(text_generate, "make_engine", refuse)


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with fewer bytes in its held-out losses and its sample, which take most of the time of few steps."""
    part = demo.demo_text()[:30_000]
    monkeypatch.setattr(demo, "demo_text", lambda: part)
    monkeypatch.setattr(demo, "train", lambda config, given: text_train.train(replace(config, sample=40), given))


@pytest.fixture
def frozen_objects() -> Iterator[None]:
    """Collections look at what the test makes only, so that thousands of them are quick; then all is as before."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    if enabled:
        gc.enable()


@pytest.fixture(autouse=True)
def deviceless(request: pytest.FixtureRequest) -> None:
    """What is marked so needs no driver: CI runs it on one of them only."""
    if request.node.get_closest_marker("deviceless"):
        assert "vulkan" not in request.fixturenames
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        patch.setattr(vulkan_engine, "Instance", lambda *_, **__: pytest.fail("marked as deviceless"))


@pytest.fixture(autouse=True)
def no_tensor_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test gives back every byte it took from the session's engine."""
    if "vulkan" not in request.fixturenames:
        yield
        return
    engine: VulkanEngine = request.getfixturevalue("vulkan")
    engine.set_step_parameters(StepParameters())  # what an earlier test left in force is none of this one's
    before = sum(stats.live_bytes for stats in engine.pool_stats().values())
    yield
    after = sum(stats.live_bytes for stats in engine.pool_stats().values())
    engine.release_idle_pool_blocks()
    # Less: what an earlier test's caught error had kept alive was collected meanwhile.
    assert after <= before, f"{after - before} bytes are still allocated after the test"


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[VulkanEngine]:
    """An engine that knows nothing of its device."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    engine = VulkanEngine()
    yield engine
    engine.close()
