"""A device with two queues made of byte arrays, and an engine on it that runs the NumPy references.

Commands run as late as Vulkan allows, in an order that an adversary chooses: within what barriers, timelines and fences
demand, any command of any queue may come next, a copy byte range by byte range, an op with its reads long before its
writes. A wait that is missing shows as other bytes, and use of a destroyed buffer is an error.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from vkfold.engine import vulkan_engine
from vkfold.engine.dtypes import numpy_dtype
from vkfold.engine.op import Cost, Op
from vkfold.engine.physical_device import PhysicalDevice
from vkfold.engine.recorder import buffer_of
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine

COMPUTE, COPIES = "compute", "copies"
POLICIES = ("random", "compute first", "copies first")
POISON = 0xA5  # of memory never written


class FakeBuffer:
    def __init__(self, device: FakeDevice, nbytes: int, address: int, host_visible: bool) -> None:
        self.device = device
        self.data = bytearray([POISON]) * nbytes
        self.nbytes = self.memory_bytes = nbytes
        self.address = address
        self.mapping = memoryview(self.data) if host_visible else None
        self.handle = self

    def destroy(self) -> None:
        self.device.destroy_buffer(self)

    def view(self, offset: int, nbytes: int) -> memoryview:
        assert self.handle is not None, "a command uses a buffer that was destroyed"
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return memoryview(self.data)[offset : offset + nbytes]


class Barrier:
    pass


class Work:
    """A command in pieces, run one after the other with others in between. owner: counts what is still to run."""

    def __init__(self, pieces: list[Callable[[], None]], owner: FakeCommands) -> None:
        self.pieces = pieces
        self.owner = owner


class Wait:
    def __init__(self, timeline: FakeTimeline, value: int) -> None:
        self.timeline, self.value = timeline, value


class Signal:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act


class FakeCommands:
    """Records closures; an op is recorded by `run`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.items: list[Any] = []
        self.in_flight = 0
        self.is_ended = False

    def begin(self, one_time: bool = False) -> None:
        assert not self.in_flight, "a command buffer is recorded anew while it is in flight"
        self.items, self.is_ended = [], False

    def barrier(self) -> None:
        self.items.append(Barrier())

    host_barrier = barrier

    def end(self) -> None:
        self.is_ended = True

    def reset(self) -> None:
        assert not self.in_flight, "a command buffer is reset while it is in flight"
        self.items, self.is_ended = [], False

    def destroy(self) -> None:
        self.reset()

    def copy(self, source: FakeBuffer, start: int, target: FakeBuffer, offset: int, nbytes: int) -> None:
        def piece(first: int, last: int) -> Callable[[], None]:
            def act() -> None:
                target.view(offset + first, last - first)[:] = source.view(start + first, last - first)

            return act

        cuts = [0, nbytes // 3, 2 * nbytes // 3, nbytes]
        self.items.append(Work([piece(a, b) for a, b in itertools.pairwise(cuts)], self))

    def fill(self, buffer: FakeBuffer, offset: int, nbytes: int, word: int) -> None:
        def act() -> None:
            buffer.view(offset, nbytes)[:] = word.to_bytes(4, "little") * (nbytes // 4)

        self.items.append(Work([act], self))

    def run(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        found: list[Any] = []
        self.items.append(Work([lambda: found.append(read()), lambda: write(found.pop())], self))


class FakeTimeline:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.reached = 0

    def value(self) -> int:
        return self.reached

    def wait(self, value: int) -> None:
        self.device.run_until(lambda: self.reached >= value)

    def destroy(self) -> None:
        pass


class FakeFence:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.signaled = False

    def wait(self, timeout: float | None = None) -> bool:
        self.device.run_until(lambda: self.signaled)
        return True

    def is_signaled(self) -> bool:
        return self.signaled

    def reset(self) -> None:
        self.signaled = False

    def destroy(self) -> None:
        pass


class FakeDevice:
    """What the recorder and the transfer queue ask of a device. policy: one of POLICIES; seed: of the adversary."""

    subgroup_size, max_workgroup_invocations = 8, 128
    is_cpu, driver_name = True, "fake"
    physical = PhysicalDevice(0, "fake", "other")
    max_allocation_bytes = 2**30

    def __init__(self, policy: str = "random", seed: int = 0, two_queues: bool = True) -> None:
        self.policy = policy
        self.random = random.Random(seed)
        self.has_transfer_queue = two_queues
        self.streams: dict[str, list[Any]] = {COMPUTE: [], COPIES: []}
        self.num_buffers = 0
        self._next_address = 4096
        self.overlapped = 0  # pieces of compute work that ran while a copy could have
        self.ran = {COMPUTE: 0, COPIES: 0}

    def memory_budget(self) -> int:
        return 2**30

    def create_buffer(self, nbytes: int, host_visible: bool) -> FakeBuffer:
        buffer = FakeBuffer(self, nbytes, self._next_address, host_visible)
        self._next_address += (nbytes + 4095) & -4096
        self.num_buffers += 1
        return buffer

    def destroy_buffer(self, buffer: FakeBuffer) -> None:
        if buffer.handle is not None:
            buffer.handle = None
            self.num_buffers -= 1

    def create_command_buffer(self, transfer: bool = False) -> FakeCommands:
        assert self.has_transfer_queue or not transfer
        return FakeCommands(self)

    def create_fence(self) -> FakeFence:
        return FakeFence(self)

    def create_timeline(self) -> FakeTimeline:
        return FakeTimeline(self)

    def destroy(self) -> None:
        assert not any(self.streams.values()), "the device is destroyed with work under way"

    # -- submits -----------------------------------------------------------------------------------------------------
    def submit(self, commands: FakeCommands, fence: FakeFence, sent: list[int]) -> None:
        self._enqueue(COMPUTE, commands, None, None, fence)
        sent.append(0)

    def wait_idle(self) -> None:
        """Waits for nothing here, so that a wait left out before it shows."""

    def submit_compute(self, commands: FakeCommands, fence: FakeFence, wait: Any, signal: Any, sent: list[int]) -> None:
        self._enqueue(COMPUTE, commands, wait, signal, fence)
        sent.append(0)

    def submit_copies(self, commands: FakeCommands, wait: Any, signal: Any, sent: list[int]) -> None:
        self._enqueue(COPIES, commands, wait, signal, None)
        sent.append(0)

    def _enqueue(self, queue: str, commands: FakeCommands, wait: Any, signal: Any, fence: FakeFence | None) -> None:
        stream = self.streams[queue]
        if wait is not None:
            stream.append(Wait(*wait))
        stream += commands.items
        commands.in_flight += sum(isinstance(item, Work) for item in commands.items)
        if signal is not None:
            timeline, value = signal

            def reach() -> None:
                assert value > timeline.reached, "a timeline must grow"
                timeline.reached = value

            stream.append(Signal(reach))
        if fence is not None:
            stream.append(Signal(lambda: setattr(fence, "signaled", True)))

    # -- the adversary -----------------------------------------------------------------------------------------------
    def ready(self, queue: str) -> list[Work]:
        """The commands of a queue that may run now; takes out what has been met on the way."""
        stream, found, kept = self.streams[queue], [], []
        stopped = len(stream)
        for position, item in enumerate(stream):
            if isinstance(item, Work):
                found.append(item)
            elif isinstance(item, Barrier):
                if found:
                    stopped = position
                    break
                continue
            elif isinstance(item, Wait):
                if item.timeline.reached < item.value:
                    stopped = position
                    break
                if not found:
                    continue
            elif not found:
                item.act()
                continue
            kept.append(item)
        self.streams[queue] = kept + stream[stopped:]
        return found

    def run_until(self, met: Callable[[], bool]) -> None:
        """Run commands until the condition holds; an error when nothing can run any more."""
        while True:
            choices = {queue: work for queue in self.streams if (work := self.ready(queue))}
            if not choices:  # what a signal of one queue allows may let another go on
                choices = {queue: work for queue in self.streams if (work := self.ready(queue))}
            if met():
                return
            assert choices, "deadlock: the host waits, and no command of any queue may run"
            queue = self.random.choice(list(choices))
            if self.policy == "compute first" and COMPUTE in choices:
                queue = COMPUTE
            elif self.policy == "copies first" and COPIES in choices:
                queue = COPIES
            self.ran[queue] += 1
            self.overlapped += len(choices) == 2 and queue == COMPUTE
            work = self.random.choice(choices[queue])
            work.pieces.pop(0)()
            if not work.pieces:
                self.streams[queue].remove(work)
                work.owner.in_flight -= 1


class HostOp:
    """An op whose launch records its reference."""

    def __init__(self, op: Op, engine: FakeEngine) -> None:
        self.op, self.engine, self.written = op, engine, op.written

    def launch(self, gpu: Any, inputs: Sequence[Tensor | None], made: Sequence[Tensor], **settings: Any) -> None:
        op, places = self.op, [None if t is None else (*buffer_of(t), t.spec) for t in inputs]
        targets = [(*buffer_of(t), t.spec) for t in made]
        written = op.written(len(inputs), **settings)
        if op.takes_step:
            settings["step"] = self.engine.step_parameters

        def read() -> list[Any]:
            arrays: list[Any] = []
            for place in places:
                if place is None:
                    arrays.append(None)
                    continue
                buffer, offset, spec = place
                raw = bytes(buffer.view(offset, spec.nbytes))
                arrays.append(np.frombuffer(raw, numpy_dtype(spec.dtype)).reshape(spec.shape).copy())
            return arrays

        def write(arrays: list[Any]) -> None:
            with np.errstate(all="ignore"):
                results = op.reference(*arrays, **settings)
            out = [(targets[i], array) for i, array in enumerate(results)]
            out += [(places[i], arrays[i]) for i in written if places[i] is not None]
            for (buffer, offset, spec), array in out:
                held = np.ascontiguousarray(array, numpy_dtype(spec.dtype))
                assert held.nbytes == spec.nbytes  # joint ops give flat arrays
                buffer.view(offset, spec.nbytes)[:] = held.tobytes()

        commands = gpu._open().commands
        commands.barrier()
        commands.run(read, write)


class FakeEngine(VulkanEngine):
    """The Vulkan engine, its recorder and its transfer queue, on a fake device."""

    def _launch_now(
        self, op: Op, cost: Cost, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any
    ) -> None:
        super()._launch_now(HostOp(op, self), cost, inputs, made, settings)  # type: ignore[arg-type]

    def _rehearse(self, op: Op, inputs: Sequence[Tensor | None], made: Sequence[Tensor], settings: Any) -> None:
        """References need no kernels."""

    def set_step_parameters(self, parameters: StepParameters) -> None:
        self.recorder.before_recording()  # references of ops held back take the old ones
        super().set_step_parameters(parameters)


class _FakeInstance:
    def __init__(self, validation: bool = False) -> None:
        self.messages: list[str] = []

    def physical_devices(self) -> list[PhysicalDevice]:
        return []

    def destroy(self) -> None:
        pass


@contextmanager
def fake_engine(device: FakeDevice, **options: Any) -> Iterator[FakeEngine]:
    """An engine on a fake device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vulkan_engine, "Instance", _FakeInstance)
        patch.setattr(vulkan_engine, "choose_device", lambda *_: FakeDevice.physical)
        patch.setattr(vulkan_engine, "Device", lambda *_: device)
        patch.setenv("VKFOLD_DEBUG", "0")
        patch.setenv("VKFOLD_REPLAY", "0")  # a captured step has no references to run
        engine = FakeEngine(**options)
        try:
            yield engine
        finally:
            engine.close()
