"""Ctrl-C at every line of recording, submitting and waiting: what is read afterwards is right or said to be lost.

The interrupt is raised where the interpreter would raise it: before a line of the files that talk to the driver.
TEST_EVERY_INSTRUCTION=1 raises it before every instruction instead, which takes a few minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from vkfold.engine import batch, recorder, replay, submits, transfer_queue, vulkan_commands, vulkan_timeline
from vkfold.engine.errors import DeviceLostError, NeverMadeError, OutOfDeviceMemoryError
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_device import Device
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

FILES = {module.__file__ for module in (batch, recorder, submits, transfer_queue, vulkan_commands, vulkan_timeline)}
SUBMITS = (Device.submit, Device.submit_compute, Device.submit_copies, Device.submit_prepared, Device.destroy_buffer)
CODES = {function.__code__ for function in SUBMITS}
OPCODES = bool(os.environ.get("TEST_EVERY_INSTRUCTION"))
FORGIVEN = {"__del__", "_give_back", "_free", "retire"}  # finalizers: Python prints what is raised there, and goes on
EVENT = "opcode" if OPCODES else "line"


class Breaker:
    """`with breaker.at(n):` raises KeyboardInterrupt at the n-th event, and swallows it. broken: whether it came."""

    def __init__(self) -> None:
        self.files = FILES
        self.left = 0
        self.broken = False
        self.where = ""

    def at(self, number: int) -> Breaker:
        self.left, self.broken = number, False
        return self

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.files and frame.f_code not in CODES:
            return None
        frame.f_trace_opcodes = OPCODES
        if event == EVENT and not self.broken:
            self.left -= 1
            if self.left == 0 and not self._in_finalizer(frame):
                self.broken = True
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self.left = max(self.left, 1) if self.left else 1
        return self._trace

    @staticmethod
    def _in_finalizer(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name in FORGIVEN:
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt


@pytest.fixture
def breaker() -> Iterator[Breaker]:
    before = sys.gettrace()
    yield Breaker()
    sys.settrace(before)


@pytest.fixture(params=["off", "shared"])
def engine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[VulkanEngine]:
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", request.param)
    monkeypatch.setenv("VKFOLD_DEBUG", "1" if "1" in os.environ.get("VKFOLD_DEBUG", "") else "0")
    made = VulkanEngine()
    yield made
    made.close()
    assert not made.validation_messages


def value_of(tensor: Tensor) -> np.ndarray | None:
    """None: it says that it was never made."""
    try:
        return tensor.numpy()
    except NeverMadeError:
        return None


def program(engine: VulkanEngine, values: np.ndarray, made: dict[str, Any]) -> None:
    """Uploads, ops that are joined and that are not, submits, reads, and copies to the host and back."""
    made["x"] = engine.tensor(values)
    made["twice"] = engine.scale(made["x"], 2.0)
    made["kept"] = engine.offload(made["twice"])
    engine.flush_batch()
    made["sum"] = engine.add(made["twice"], made["x"])
    made["total"] = engine.column_sum(made["x"], engine.zeros((values.shape[1],)))
    made["read"] = made["sum"].numpy()
    made["back"] = engine.restore(made["kept"])
    made["copy"] = engine.copy(made["back"])
    engine.end_batch()


EXPECTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "x": lambda x: x,
    "twice": lambda x: 2 * x,
    "sum": lambda x: 2 * x + x,
    "back": lambda x: 2 * x,
    "copy": lambda x: 2 * x,
}


def check(engine: VulkanEngine, values: np.ndarray, made: dict[str, Any], where: str) -> None:
    """Everything that a call returned holds what it should, or says that it does not."""
    if "read" in made:
        assert np.array_equal(made["read"], EXPECTED["sum"](values)), where
    if "kept" in made and "back" not in made and value_of(made["twice"]) is not None:
        assert np.array_equal(engine.restore(made["kept"]).numpy(), 2 * values), where
    for name, of in EXPECTED.items():
        if name in made:
            got = value_of(made[name])
            assert got is None or np.array_equal(got, of(values)), (name, where)


def test_nothing_is_wrong_after_an_interrupt_at_any_line(engine: VulkanEngine, breaker: Breaker) -> None:
    rng = np.random.default_rng(0)
    start = engine.device.num_buffers
    number, places = 1, set()
    while True:
        values = rng.integers(-99, 99, (4, 8)).astype(np.float32)  # sums are exact
        made: dict[str, Any] = {}
        with breaker.at(number):
            program(engine, values, made)
        if not breaker.broken:
            break
        places.add(breaker.where)
        check(engine, values, made, breaker.where)
        again: dict[str, Any] = {}
        program(engine, values, again)
        assert np.array_equal(again["copy"].numpy(), 2 * values), breaker.where
        number += 1
    assert number > 200 and {place.partition(":")[0] for place in places} >= {"submit", "_send", "wait", "_reclaim"}
    assert engine.device.num_buffers <= start + 10  # nothing is lost on the way


def test_a_replayed_step_is_made_and_counted_or_neither(monkeypatch: pytest.MonkeyPatch, breaker: Breaker) -> None:
    """After an interrupt anywhere in it the weights are those of as many updates as the optimizer counts."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    breaker.files = FILES | {replay.__file__}
    tokens = np.random.default_rng(0).integers(0, 20, (1, 4))

    def training() -> tuple[GPTModel, AdamW, Callable[[], Any]]:
        model = GPTModel(VulkanEngine(), GPTConfig(20, 4, 8, num_heads=1, num_layers=1, dropout=0.1), seed=3)
        optimizer = AdamW(model)
        step = TrainingStep(model, optimizer, max_norm=1.0)
        return model, optimizer, lambda: step([(tokens, tokens)], step=optimizer.num_updates, learning_rate=1e-2)

    (plain, plain_optimizer, plain_step), (model, optimizer, step) = training(), training()
    for _ in range(5):
        step()
    number, made = 1, 0
    while True:
        before, replayed = optimizer.num_updates, model.engine.replay_stats().replayed
        with breaker.at(number):
            step()
        made += breaker.broken and optimizer.num_updates > before
        assert optimizer.num_updates in (before, before + 1)
        if not breaker.broken:
            assert model.engine.replay_stats().replayed == replayed + 1
            break
        if number % 3 == 0:
            step()
        while plain_optimizer.num_updates < optimizer.num_updates:
            plain_step()
        for (name, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
            assert np.array_equal(one, other), (name, breaker.where)
        number += 1
    assert number > 50 and 5 < made < number - 5
    for each in (plain, model):
        each.engine.close()


def test_an_engine_whose_close_is_broken_off_closes_the_second_time(
    monkeypatch: pytest.MonkeyPatch, breaker: Breaker
) -> None:
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", "shared")
    number = 1
    while True:
        engine = VulkanEngine()
        x = engine.tensor(np.ones((4, 8)))
        kept = engine.offload(engine.softmax(x))
        engine.start_copies()
        with breaker.at(number):
            engine.close()
        engine.close()
        assert engine.closed and engine.device.handle is None and engine.instance.handle is None
        # What was being destroyed right then may be left to the driver.
        assert not [text for text in engine.validation_messages if "has not been destroyed" not in text], breaker.where
        assert kept.spec.shape == (4, 8)
        if not breaker.broken:
            break
        number += 3 if OPCODES else 1
    assert number > 60


def test_a_submit_that_fails_for_want_of_memory_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, failures = Device.submit, [2]

    def without_memory(device: Device, *args: Any) -> None:
        if failures[0]:
            failures[0] -= 1
            raise OutOfDeviceMemoryError("vkQueueSubmit", -2, "out of device memory")
        submit(device, *args)

    with VulkanEngine() as engine:
        x = engine.tensor(np.ones((4, 8)))
        y = engine.scale(x, 3.0)
        monkeypatch.setattr(Device, "submit", without_memory)
        with pytest.raises(OutOfDeviceMemoryError):
            engine.flush_batch()
        with pytest.raises(OutOfDeviceMemoryError):
            y.numpy()
        assert np.array_equal(y.numpy(), np.full((4, 8), 3.0))


def test_a_lost_device_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: Device, *args: Any) -> None:
        raise DeviceLostError("vkQueueSubmit", -4, "device lost", "")

    engine = VulkanEngine()
    y = engine.scale(engine.tensor(np.ones((4, 8))), 3.0)
    with monkeypatch.context() as patch:
        patch.setattr(Device, "submit", lost)
        with pytest.raises(DeviceLostError):
            y.numpy()
    engine.close()
    assert engine.device.handle is None
