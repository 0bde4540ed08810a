"""A joint call that fails when it is launched is taken apart: what its parts make is made, to the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from vkfold.engine.errors import NeverMadeError, OutOfDeviceMemoryError, VkfoldError
from vkfold.engine.fusion import Call
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

from .fusion_checks import arrays, counts, fusing_engine, fusion_of
from .test_fusion import random_program

engine = pytest.fixture(name="engine")(fusing_engine)

Operands = Sequence[Tensor]


def bias_and_residual(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    made = gpu.matmul(x[0], x[2])
    gpu.add_bias_(made, x[3])
    gpu.add_(made, x[1])
    return [made]


def activated(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    return [gpu.gelu(gpu.matmul(x[0], x[2]))]


def gated(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    return [gpu.multiply(gpu.matmul(x[0], x[2]), x[1])]


def added_to(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    made = gpu.matmul(x[0], x[2])
    gpu.add_(made, x[1])
    return [made]


def normed(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    y, rstd = gpu.rms_norm(x[0], x[3])
    return [gpu.matmul(y, x[2]), rstd]


def normed_again(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    return [gpu.matmul(gpu.rms_norm_apply(x[0], x[3], x[4]), x[2])]


def norm_backward(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    stream = gpu.copy(x[1])
    gpu.add_(stream, gpu.rms_norm_backward(x[0], x[1], x[3], x[4]))
    return [stream]


def chain(gpu: VulkanEngine, x: Operands) -> list[Tensor]:
    between = gpu.scale(x[0], 0.5)
    made = gpu.add(between, x[1])
    last = gpu.gelu(made)
    gpu.add_(made, x[1])
    return [made, last]


CALLS = [bias_and_residual, activated, gated, added_to, normed, normed_again, norm_backward, chain]


class JointFault:
    """Makes launches of joint calls fail that `which` chooses, with nothing recorded; or every launch."""

    def __init__(self, engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.which: Callable[[Call], bool] = lambda call: False
        self.error: Callable[[], BaseException] = lambda: VkfoldError("the driver cannot make it")
        self.failed: list[tuple[str, ...]] = []
        fusion = fusion_of(engine)
        launch = fusion._launch

        def launches(call: Call) -> None:
            if self.which(call):
                self.failed.append(call.parts)
                raise self.error()
            launch(call)

        monkeypatch.setattr(fusion, "_launch", launches)


@pytest.fixture
def fault(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> JointFault:
    return JointFault(engine, monkeypatch)


@pytest.fixture
def operands(engine: VulkanEngine) -> Operands:
    shapes = (24, 16), (24, 16), (16, 16), (16,), (24,)
    return [engine.tensor(array) for array in arrays(*shapes)]


def live_bytes(engine: VulkanEngine) -> int:
    return engine.pool_stats()["step"].live_bytes


def values_of(tensor: Tensor) -> np.ndarray | None:
    try:
        return tensor.numpy()
    except NeverMadeError:
        return None


@pytest.mark.parametrize("call", CALLS)
def test_the_parts_of_a_joint_call_that_fails_are_launched(
    engine: VulkanEngine,
    operands: Operands,
    fault: JointFault,
    caplog: pytest.LogCaptureFixture,
    call: Callable[[VulkanEngine, Operands], list[Tensor]],
) -> None:
    before = live_bytes(engine)
    expected = [tensor.numpy() for tensor in call(engine, operands)]
    joined = sum(counts(engine).values())
    assert joined >= 1
    fault.which = lambda call: call.joined is not None
    with caplog.at_level(logging.WARNING, "vkfold"):
        made = call(engine, operands)
        engine.flush_batch()
    assert fault.failed and "launched apart: the driver cannot make it" in caplog.text
    for array, tensor in zip(expected, made, strict=True):
        assert np.array_equal(array, tensor.numpy())
    num_failed = []
    for _ in range(8):  # pieces of what was joined are tried once each; then nothing is
        num_failed.append(len(fault.failed))
        for array, tensor in zip(expected, call(engine, operands), strict=True):
            assert np.array_equal(array, tensor.numpy())
    assert len(fault.failed) == num_failed[-1] == num_failed[-2]
    del made, tensor
    assert live_bytes(engine) == before


@pytest.mark.parametrize("call", CALLS)
def test_a_part_that_fails_too_is_an_error_and_nothing_else_is_lost(
    engine: VulkanEngine, operands: Operands, fault: JointFault, call: Callable[[VulkanEngine, Operands], list[Tensor]]
) -> None:
    before = live_bytes(engine)
    expected = [tensor.numpy() for tensor in call(engine, operands)]
    ops = "matmul", "rms_norm_backward", "add"
    fault.which = lambda call: call.joined is not None or call.op.name in ops
    made = call(engine, operands)
    last = engine.softmax(operands[2])
    with pytest.raises(VkfoldError, match="cannot make it"):
        engine.flush_batch()
    assert fault.failed[-1][0] in ops
    fault.which = lambda call: False
    assert np.array_equal(last.numpy(), engine.softmax(operands[2]).numpy())
    values = [values_of(tensor) for tensor in made]
    assert any(one is None for one in values)
    assert all(one is None or np.array_equal(one, other) for one, other in zip(values, expected, strict=True))
    del made, last
    assert live_bytes(engine) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, lambda: OutOfDeviceMemoryError("vkCreateFence", -2, "no memory")])
def test_a_joint_call_that_is_interrupted_stays_joined(
    engine: VulkanEngine, operands: Operands, fault: JointFault, error: Callable[[], BaseException]
) -> None:
    expected = chain(engine, operands)[1].numpy()
    made = chain(engine, operands)[1]
    fault.which, fault.error = lambda call: call.joined is not None and not fault.failed, error
    with pytest.raises(type(error())):
        engine.flush_batch()
    assert np.array_equal(made.numpy(), expected)
    assert fusion_of(engine).report()["elementwise neighbours"].times >= 2


@pytest.mark.parametrize("seeds", [range(0, 12), range(12, 24)], ids=str)
def test_random_programs_whose_joint_calls_fail_give_the_same_bits(
    engine: VulkanEngine, fault: JointFault, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    """Memory of values that a joint call leaves out may serve others by then; parts are joined anew with others."""
    launcher: Any = engine._launcher
    monkeypatch.setattr(launcher, "refuse", lambda call, error: None)  # so that they are joined again
    for seed in seeds:
        rng = np.random.default_rng(seed)
        fault.which = lambda call: False
        program = random_program(seed)
        expected = program(engine)
        fault.which = lambda call, rng=rng: call.joined is not None and rng.random() < 0.5
        for one, other in zip(expected, program(engine), strict=True):
            assert np.array_equal(one, other, equal_nan=True)
    kinds = {frozenset(parts) for parts in fault.failed}
    assert len(fault.failed) > 5 * len(seeds) and len(kinds) > 20


@pytest.mark.parametrize("replay", ["0", "1"])
def test_training_goes_on_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, replay: str) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    monkeypatch.setenv("VKFOLD_FUSION", "all")
    monkeypatch.setenv("VKFOLD_REPLAY", replay)

    def train(fails: bool) -> tuple[list[Any], int]:
        with VulkanEngine() as engine, monkeypatch.context() as patch:
            model = GPTModel(engine, GPTConfig(40, 24, 16, num_heads=2, num_layers=2, dropout=0.1))
            fault = JointFault(engine, patch)
            if fails:
                fault.which = lambda call: call.joined is not None
            step = TrainingStep(model, AdamW(model), max_norm=1.0)
            tokens = np.random.default_rng(0).integers(0, 40, (2, 8))
            losses = [step([(tokens, tokens)], step=i, learning_rate=1e-2).loss for i in range(6)]
            return [*losses, *model.state_dict().values()], engine.replay_stats().replayed

    plain, replayed = train(fails=False)
    apart, replayed_apart = train(fails=True)
    for one, other in zip(plain, apart, strict=True):
        assert np.array_equal(one, other)
    assert (replayed > 0) == (replayed_apart > 0) == (replay == "1")
