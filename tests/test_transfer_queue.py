"""Offload on a queue of its own: the same bytes under every order that the waits allow, and only with each of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_device import COMPUTE, COPIES, POLICIES, FakeDevice, FakeEngine, fake_engine

from vkfold.engine import vulkan_device, vulkan_engine
from vkfold.engine.physical_device import QueueFamily, compute_family, transfer_queue
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.recorder import Recorder
from vkfold.engine.switches import get
from vkfold.engine.transfer_queue import TransferQueue
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

NUM_LAYERS = 4
CONFIG = GPTConfig(
    vocab_size=19, max_seq_len=8, d_model=8, num_heads=2, d_ff=12, num_layers=NUM_LAYERS, dropout=0.1,
    norm="layernorm", activation="gelu", positions="learned",
)  # fmt: skip


def train(
    engine: Any, *, accumulate: int = 1, num_steps: int = 2, fused: bool = False, **modes: Any
) -> dict[str, np.ndarray]:
    """Losses, weights and moments after two steps with offload; idle blocks go back between steps."""
    model = GPTModel(engine, CONFIG, seed=2, loss_chunk_bytes=4 * 19 * 7)
    model.set_activation_offload(True)
    for mode, value in modes.items():
        getattr(model, f"set_{mode}")(value)
    optimizer = AdamW(model)
    step = TrainingStep(model, optimizer, seed=11, fused_update=fused)
    seen: dict[str, np.ndarray] = {}
    for n in range(num_steps):
        rng = np.random.default_rng(n)
        pairs = [tuple(rng.integers(0, 19, (2, 2, 7))) for _ in range(accumulate)]
        seen[f"loss {n}"] = np.array(step(pairs, step=n, learning_rate=1e-2).loss)
        engine.release_idle_pool_blocks()
    seen.update(model.state_dict())
    seen.update({f"moment {name}": value for name, value in optimizer.state_dict().items()})
    return seen


def run(policy: str, seed: int, *, two_queues: bool = True, **options: Any) -> dict[str, np.ndarray]:
    # Small blocks: bytes are reused soon, and blocks go back while copies are under way.
    with fake_engine(FakeDevice(policy, seed, two_queues), block_bytes=2**12) as engine:
        seen = train(engine, **options)
        assert (engine.recorder.transfers is not None) == two_queues
    assert engine.device.num_buffers == 0
    return seen


def differences(seen: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> list[str]:
    assert seen.keys() == expected.keys()
    return [name for name, value in expected.items() if seen[name].tobytes() != value.tobytes()]


MODES: list[dict[str, Any]] = [
    {},
    {"accumulate": 2, "flush_interval": 1},
    {"checkpoint_every": 1},
    {"fused": True, "recompute": ("attention", "norm")},
    {"recompute": ("mlp", "qkv"), "checkpoint_every": 2, "accumulate": 2, "flush_interval": 2},
]


@pytest.fixture(scope="module")
def one_queue() -> list[dict[str, np.ndarray]]:
    return [run("random", 0, two_queues=False, **mode) for mode in MODES]


# -- the same bytes --------------------------------------------------------------------------------------------------
@pytest.mark.deviceless
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_gives_the_bytes_of_one_queue(one_queue: list[Any], policy: str, mode: int) -> None:
    for seed in range(3 if policy == "random" else 1):
        assert not differences(run(policy, seed, **MODES[mode]), one_queue[mode])


# -- mutations: each wait left out shows -----------------------------------------------------------------------------
def small_program(engine: FakeEngine) -> list[np.ndarray]:
    """Offload and restore with every hazard the rules name, close together."""
    found = []
    for n in range(4):
        values = [np.full((700,), 10.0 * n + i, np.float32) for i in range(6)]
        a, b = engine.tensor(values[0]), engine.tensor(values[1])
        a = engine.add(a, b)
        leaves = engine.offload(a)
        engine.zero_(a)  # changed while it may still be copied
        kept = engine.add(a, b)
        stays = engine.offload(kept)
        del kept  # its bytes are free while it may still be copied
        other = engine.add(b, b)
        more = engine.add(other, b)
        back = engine.restore(leaves)  # maybe where earlier work still reads
        del leaves
        third = engine.offload(more)  # host memory that the copy back may still read
        engine.start_copies()
        total = engine.add(back, more)  # used while it may not be there yet
        unused = engine.restore(stays)
        del unused  # given up before it was there
        late = engine.add(total, other)
        again = engine.offload(late)
        del late, back
        engine.release_idle_pool_blocks()  # with copies under way that read them
        found += [engine.restore(copy).numpy() for copy in (again, third, stays)] + [total.numpy()]
        del again, stays, third
        engine.offload(total)
        engine.flush_batch()  # under way when the engine is closed, the last time round
    return found


def small(policy: str, seed: int, two_queues: bool = True) -> list[bytes]:
    with fake_engine(FakeDevice(policy, seed, two_queues), block_bytes=2**12) as engine:
        return [array.tobytes() for array in small_program(engine)]


def no_wait_of_copies(self: TransferQueue) -> tuple[Any, int]:
    return self.computed, 0


def without_use(self: TransferQueue, used: Any, changed: Any = ()) -> None:
    arriving, self._arriving = self._arriving, {}
    BEFORE_USE(self, used, changed)
    self._arriving = arriving


def without_change(self: TransferQueue, used: Any, changed: Any = ()) -> None:
    BEFORE_USE(self, used, ())


def no_freed(self: TransferQueue, storage: Any) -> None:
    self._arriving.pop(id(storage), None)
    self._leaving.pop(id(storage), None)


def nothing(self: TransferQueue) -> None:
    pass


def no_barrier_between_copies(
    self: TransferQueue, pending: Any, tensor: Any, source: Any, target: Any, nbytes: int
) -> None:
    COPY(self, pending, tensor, source, target, nbytes)
    commands: Any = self._current
    if nbytes:
        del commands.items[-2]


BEFORE_USE, COPY, RETIRE = TransferQueue.before_use, TransferQueue._copy, Recorder.retire


def retired_with_any_batch(self: Recorder, buffer: Any) -> None:
    self.device.destroy_buffer(buffer)


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "copies wait for compute": (TransferQueue, "_wait_of_copies", no_wait_of_copies),
    "compute waits before it uses what comes back": (TransferQueue, "before_use", without_use),
    "compute waits before it changes what leaves": (TransferQueue, "before_use", without_change),
    "compute waits before it reuses bytes": (TransferQueue, "freed", no_freed),
    "blocks die after the copies": (TransferQueue, "before_retire", nothing),
    "blocks die after the batch": (Recorder, "retire", retired_with_any_batch),
    "copies are in order": (TransferQueue, "_copy", no_barrier_between_copies),
    "the host waits for the copies": (TransferQueue, "wait", nothing),
}


def shows(expected: list[bytes], seeds: int = 40) -> bool:
    """Whether any order of execution gives other bytes, or an error."""
    for policy, seed in itertools.product(POLICIES, range(seeds)):
        try:
            if small(policy, seed) != expected:
                return True
        except (AssertionError, TypeError, AttributeError):
            return True
    return False


def test_small_programs_are_right_under_every_order() -> None:
    assert not shows(small("random", 0, two_queues=False))


@pytest.mark.parametrize("wait", list(MUTATIONS))
def test_a_wait_left_out_shows(monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    expected = small("random", 0, two_queues=False)
    monkeypatch.setattr(*MUTATIONS[wait])
    assert shows(expected), f"without the rule '{wait}' everything is as before: the fake device cannot see it"


# -- overlap ---------------------------------------------------------------------------------------------------------
def test_copies_and_computing_overlap() -> None:
    """With copies as late as may be, most of forward and backward has run beside a copy that was ready."""
    device = FakeDevice("compute first")
    with fake_engine(device, block_bytes=2**12) as engine:
        model = GPTModel(engine, CONFIG, seed=2)
        model.set_activation_offload(True)
        tokens, targets = np.random.default_rng(0).integers(0, 19, (2, 2, 7))
        work: list[Callable[[], Any]] = [lambda: model.loss(tokens, targets), model.backward]
        for phase in work:
            engine.end_batch()
            device.ran = dict.fromkeys(device.ran, 0)
            device.overlapped = 0
            phase()
            engine.end_batch()
            assert device.ran[COPIES] > 0
            # One of four blocks has no copy beside it: the first in forward, the last in backward.
            assert device.overlapped > 0.6 * device.ran[COMPUTE]


def test_a_tensor_that_leaves_is_given_up_a_block_later(vulkan: VulkanEngine) -> None:
    model = GPTModel(vulkan, CONFIG, seed=2)
    model.set_activation_offload(True)
    model.loss(*np.random.default_rng(0).integers(0, 19, (2, 2, 7)))
    assert not model._offloaded._leaving
    model.backward()
    model.clear_gradients()


# -- the plan --------------------------------------------------------------------------------------------------------
def test_two_queues_take_the_memory_of_one_and_of_the_plan() -> None:
    seen = []
    for two_queues in (False, True, None):
        if two_queues is None:
            engine: Any = PlanEngine(block_bytes=2**12)
            train(engine, accumulate=2)
            seen.append((engine.pool_stats(), engine.offloaded_bytes, engine.restored_bytes))
            continue
        with fake_engine(FakeDevice("random", 1, two_queues), block_bytes=2**12) as engine:
            train(engine, accumulate=2)
            seen.append((engine.pool_stats(), engine.offloaded_bytes, engine.restored_bytes))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1] > 0


# -- which queue -----------------------------------------------------------------------------------------------------
GRAPHICS, COMPUTES, TRANSFERS, SPARSE, DECODES, ENCODES = 1, 2, 4, 8, 0x20, 0x40
ALL = GRAPHICS | COMPUTES | TRANSFERS


@pytest.mark.parametrize(
    ("families", "expected"),
    [
        ([(ALL, 1)], None),  # software drivers
        ([(ALL, 4)], (0, 1)),
        ([(ALL, 16), (TRANSFERS | SPARSE, 2), (COMPUTES | TRANSFERS, 8)], (1, 0)),
        ([(ALL, 16), (COMPUTES | TRANSFERS, 8)], (1, 0)),
        ([(ALL, 1), (TRANSFERS | DECODES, 1), (COMPUTES, 4), (TRANSFERS | ENCODES, 1)], (2, 0)),
        ([(ALL, 1), (TRANSFERS | DECODES, 1)], (1, 0)),
        ([(COMPUTES, 1), (GRAPHICS, 1)], (1, 0)),
        ([(ALL, 1), (TRANSFERS, 0)], None),
        ([(ALL, 1), (SPARSE, 1)], None),
        ([(GRAPHICS, 1)], None),
    ],
)
def test_the_queue_for_copies(families: list[tuple[int, int]], expected: tuple[int, int] | None) -> None:
    found = [QueueFamily(*family) for family in families]
    assert transfer_queue(found, compute_family(found)) == expected


# -- the real thing --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wish", ["shared", "off", "auto"])
def test_the_switch_changes_no_byte(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    """shared: timelines and two streams of submits on the one queue of a software driver."""
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", wish)
    with VulkanEngine() as engine:
        seen = train(engine, accumulate=2, flush_interval=1)
        if engine.debug < 2:
            used = wish == "shared" or (wish == "auto" and engine.device.physical.transfer_queue is not None)
            assert (engine.recorder.transfers is not None) == used
        assert not engine.validation_messages
    assert not differences(seen, train(vulkan, accumulate=2, flush_interval=1))


def test_a_wrong_value_of_the_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", "2")
    with pytest.raises(ValueError, match="VKFOLD_TRANSFER_QUEUE=2: expected auto, off or shared"):
        get("VKFOLD_TRANSFER_QUEUE")


class TwoFamilies:
    """The driver's functions as those of a device whose family 2 only copies; the one queue there is does all of it."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.queues: list[tuple[int, int]] = []
        self.taken: list[tuple[int, int]] = []
        self.pools: list[int] = []
        self.shared: set[tuple[int, tuple[int, ...]]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)

    def vkCreateDevice(self, physical: Any, info: Any, allocator: Any, out: Any) -> int:
        for i in range(info.queueCreateInfoCount):
            queue = info.pQueueCreateInfos[i]
            assert queue.sType == self.lib.VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO
            assert [queue.pQueuePriorities[j] for j in range(queue.queueCount)] == [1.0] * queue.queueCount
            self.queues.append((queue.queueFamilyIndex, queue.queueCount))
            queue.queueFamilyIndex, queue.queueCount = 0, 1
        info.queueCreateInfoCount = 1
        return self.lib.vkCreateDevice(physical, info, allocator, out)

    def vkGetDeviceQueue(self, device: Any, family: int, index: int, out: Any) -> None:
        self.taken.append((family, index))
        self.lib.vkGetDeviceQueue(device, 0, 0, out)

    def vkCreateCommandPool(self, device: Any, info: Any, allocator: Any, out: Any) -> int:
        self.pools.append(info.queueFamilyIndex)
        info.queueFamilyIndex = 0
        return self.lib.vkCreateCommandPool(device, info, allocator, out)

    def vkCreateBuffer(self, device: Any, info: Any, allocator: Any, out: Any) -> int:
        families = tuple(info.pQueueFamilyIndices[i] for i in range(info.queueFamilyIndexCount))
        self.shared.add((info.sharingMode, families))
        info.sharingMode, info.queueFamilyIndexCount = self.lib.VK_SHARING_MODE_EXCLUSIVE, 0
        return self.lib.vkCreateBuffer(device, info, allocator, out)


@pytest.mark.parametrize(
    ("queue", "asked", "pools"), [((2, 0), [(0, 1), (2, 1)], [0, 2]), ((0, 1), [(0, 2)], [0, 0]), (None, [(0, 1)], [0])]
)
def test_what_a_device_with_two_queues_is_asked_for(
    vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, queue: Any, asked: Any, pools: Any
) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    monkeypatch.delenv("VKFOLD_TRANSFER_QUEUE", raising=False)
    real = vulkan_device.binding()
    lib = TwoFamilies(real.lib)
    choose = vulkan_engine.choose_device
    with monkeypatch.context() as patch:
        patch.setattr(vulkan_device, "binding", lambda: real._replace(lib=lib))
        patch.setattr(
            vulkan_engine, "choose_device", lambda *words: dataclasses.replace(choose(*words), transfer_queue=queue)
        )
        with VulkanEngine() as engine:
            seen = train(engine)
            assert (engine.recorder.transfers is not None) == (queue is not None)
    assert (lib.queues, lib.pools) == (asked, pools)
    assert lib.taken == [(0, 0)] + [queue] * (queue is not None)
    concurrent, exclusive = real.lib.VK_SHARING_MODE_CONCURRENT, real.lib.VK_SHARING_MODE_EXCLUSIVE
    assert lib.shared == ({(concurrent, (0, 2))} if queue == (2, 0) else {(exclusive, ())})
    assert not differences(seen, train(vulkan))
