"""An engine that nobody has any more is closed when Python collects it: its memory goes back to the driver."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from vkfold.engine.vulkan_device import Device
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep


def of_tensors(engine: VulkanEngine) -> object:
    x = engine.tensor(np.ones((64, 64)))
    return engine.softmax(x), engine.scale(x, 2.0)  # not launched yet


def of_copies(engine: VulkanEngine) -> object:
    return engine.offload(engine.softmax(engine.tensor(np.ones((64, 64)))))


def of_training(engine: VulkanEngine) -> object:
    """With captured steps, and the reference cycles of a model."""
    model = GPTModel(engine, GPTConfig(20, 4, 8, num_heads=1, num_layers=1))
    step = TrainingStep(model, AdamW(model))
    tokens = np.zeros((1, 4), np.int32)
    for number in range(4):
        step([(tokens, tokens)], step=number, learning_rate=1e-3)
    assert engine.replay_stats().captured == 1
    return step


def is_gone(device: Device) -> bool:
    gc.collect()
    return device.handle is None and device.num_buffers == 0 and not device.live


@pytest.mark.parametrize("work", [of_tensors, of_copies, of_training])
@pytest.mark.parametrize("queue", ["off", "shared"])
def test_what_is_dropped_is_given_back(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[VulkanEngine], object], queue: str
) -> None:
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", queue)
    engine = VulkanEngine()
    made = work(engine)
    device, instance, messages = engine.device, engine.instance, engine.validation_messages
    del engine
    assert not is_gone(device) and device.num_buffers > 0  # tensors keep their engine
    del made
    assert is_gone(device) and instance.handle is None
    assert not messages


def test_an_engine_of_another_thread_is_given_back() -> None:
    devices: list[Device] = []
    kept: list[VulkanEngine] = []

    def work() -> None:
        engine = VulkanEngine()
        of_tensors(engine)
        devices.append(engine.device)
        kept.append(engine)
        del engine
        there.set()
        stop.wait()

    there, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    there.wait()
    kept.clear()  # while its thread lives
    assert is_gone(devices[0])
    stop.set()
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_engine_alone() -> None:
    engine = VulkanEngine()
    x = engine.tensor(np.arange(4.0))
    child = os.fork()
    if child == 0:
        device = engine.device
        del engine, x
        gc.collect()
        os._exit(7 if device.handle is not None else 8)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert np.array_equal(x.numpy(), np.arange(4.0))
    engine.close()


def test_a_program_may_end_with_open_engines() -> None:
    program = "import vkfold as vf; e = vf.VulkanEngine(); x = e.tensor([1.0]); y = e.scale(x, 2.0); e.me = e"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Error" not in done.stderr and "Exception" not in done.stderr
