"""Copies between device and host memory on a queue of their own, so that they overlap what is computed.

Two timelines order the queues. Each compute submit raises `computed`, each submit of copies raises `copied`.

- A copy waits for everything recorded for the compute queue before it: for what wrote a tensor that leaves, and for
  what used the bytes before where a tensor comes back.
- The compute queue waits for a copy before the first command that is recorded after the program used a tensor that
  comes back, changed one that leaves, or gave either up (its bytes may then be anybody's).
- Copies are in the order of recording among themselves, so host memory needs nothing more.

The pools know none of this: bytes are free in the order of recording, as with one queue, so the plan is the same too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from .errors import OutOfDeviceMemoryError, VkfoldError
from .tensor import Storage, Tensor
from .vulkan_api import Buffer, CommandBuffer, Fence, Timeline

if TYPE_CHECKING:
    from .recorder import Recorder

Place = tuple[Buffer, int]  # a buffer and an offset in it, in bytes


class _Copies(NamedTuple):
    """A submit. number: what it raises `copied` to. sent: [0] once the queue has it."""

    commands: CommandBuffer
    number: int
    sent: list[int]


class TransferQueue:
    """The second queue beside a recorder's. Made when the first tensor is offloaded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.device = recorder.device
        self.computed: Timeline = self.device.create_timeline()
        self.copied: Timeline = self.device.create_timeline()
        self.num_compute_submits = 0  # what `computed` reaches with the last compute submit so far
        self.num_submits = 0  # what `copied` reaches with the last submit of copies so far
        self.uncovered = True  # whether compute work was submitted that no value of `computed` stands for
        self.required = 0  # of `copied`: what compute batches opened from now on wait for
        self._leaving: dict[int, int] = {}  # id of a storage -> value of `copied` once its copy to the host is done
        self._arriving: dict[int, int] = {}  # id of a storage -> value of `copied` once its values are there
        self._current: CommandBuffer | None = None
        self._sending: _Copies | None = None  # on its way to the queue: after an interrupt, or when memory was lacking
        self._in_flight: list[tuple[int, CommandBuffer]] = []
        self._spare: list[CommandBuffer] = []
        recorder.transfers = self

    # -- copies ------------------------------------------------------------------------------------------------------
    def copy_out(self, tensor: Tensor, source: Place, target: Place, nbytes: int) -> None:
        """Record the copy of a tensor to host memory."""
        self._copy(self._leaving, tensor, source, target, nbytes)

    def copy_back(self, tensor: Tensor, source: Place, target: Place, nbytes: int) -> None:
        """Record the copy of host memory into a tensor that was just allocated."""
        self._copy(self._arriving, tensor, source, target, nbytes)

    def _copy(self, pending: dict[int, int], tensor: Tensor, source: Place, target: Place, nbytes: int) -> None:
        """Record one copy, behind all that was recorded so far. pending: gets the value of `copied` that says it is
        done, before it is recorded: after an interrupt no copy is unknown."""
        if self.uncovered:  # one more submit stands for all before it
            self.recorder.open_batch()
        self.recorder.submit()
        self.uncovered = False
        if self._sending is not None:
            self._send()
        if self.recorder.stream is not None:
            self.recorder.stream.obstacle = "tensors are copied on a queue of their own"
        if self._current is None:
            commands = self._spare.pop() if self._spare else self.device.create_command_buffer(transfer=True)
            commands.begin()
            self._current = commands
        pending[id(tensor.storage)] = self.num_submits + 1
        if nbytes:
            self._current.barrier()
            self._current.copy(source[0].handle, source[1], target[0].handle, target[1], nbytes)

    def submit(self) -> None:
        """Hand the recorded copies to the queue; does not wait."""
        if self._sending is None and self._current is not None:
            self._sending = _Copies(self._current, self.num_submits + 1, [])
        if self._sending is not None:
            self._send()

    def _send(self) -> None:
        """Hand `_sending` to the queue; goes on where an interrupt, or a lack of memory, stopped it."""
        copies = self._sending
        assert copies is not None
        if self._current is copies.commands:
            self._current = None
        if copies.sent != [0]:
            copies.sent.clear()
            copies.commands.end()
            signal = self.copied, copies.number
            try:
                self.device.submit_copies(copies.commands, self._wait_of_copies(), signal, copies.sent)
            except OutOfDeviceMemoryError:
                raise
            except VkfoldError:  # the device is lost
                self._sending = None
                raise
        self.num_submits = copies.number
        if not self._in_flight or self._in_flight[-1][0] != copies.number:
            self._in_flight.append((copies.number, copies.commands))
        self._sending = None
        self._reclaim()

    def _wait_of_copies(self) -> tuple[Timeline, int]:
        return self.computed, self.num_compute_submits

    # -- what the compute queue waits for ----------------------------------------------------------------------------
    def before_use(self, used: Iterable[Tensor | None], changed: Iterable[Tensor | None] = ()) -> None:
        """The commands recorded next use these tensors, and change some of them."""
        if self._arriving:
            self._require(max((self._arriving.get(id(t.storage), 0) for t in used if t is not None), default=0))
        if self._leaving:
            self._require(max((self._leaving.get(id(t.storage), 0) for t in changed if t is not None), default=0))

    def freed(self, storage: Storage) -> None:
        """The bytes of a storage may be used for anything from the next command on."""
        if self._arriving or self._leaving:
            key = id(storage)
            self._require(max(self._arriving.get(key, 0), self._leaving.get(key, 0)))
            self._arriving.pop(key, None)  # after it: an interrupt leaves them
            self._leaving.pop(key, None)

    def _require(self, value: int) -> None:
        if value <= self.required:
            return
        self.recorder.submit()  # what is recorded so far need not wait
        self.required = value
        for pending in (self._arriving, self._leaving):
            for key in [key for key, done in pending.items() if done <= value]:
                del pending[key]

    def before_retire(self) -> None:
        """Open a compute batch behind all copies, where one is under way: what retires with it is used by none."""
        if self._current is not None or self._sending is not None or self._in_flight:
            self.submit()
            self._require(self.num_submits)
            self.recorder.open_batch()

    def submit_compute(self, commands: CommandBuffer, fence: Fence, number: int, sent: list[int]) -> None:
        """Hand a compute batch to its queue, behind the copies it needs. number: its place among them, from 1, which
        `num_compute_submits` becomes then. sent: as for `Device.submit`."""
        wait = (self.copied, self.required) if self.required else None
        self.device.submit_compute(commands, fence, wait, (self.computed, number), sent)

    # -- waiting -----------------------------------------------------------------------------------------------------
    def wait(self) -> None:
        """Submit what is left and block until all copies are done."""
        self.submit()
        if self._in_flight:
            self.copied.wait(self.num_submits)
            while self._in_flight:
                self._in_flight[-1][1].reset()
                self._spare.append(self._in_flight.pop()[1])

    def _reclaim(self) -> None:
        if len(self._in_flight) > 8:
            reached = self.copied.value()
            while self._in_flight and self._in_flight[0][0] <= reached:
                self._in_flight[0][1].reset()
                self._spare.append(self._in_flight.pop(0)[1])

    def close(self) -> None:
        """Wait for the copies and destroy what belongs to this queue."""
        self.wait()
        # Who raises a timeline may still hold it when its value is seen: lavapipe's queue thread then crashes.
        self.device.wait_idle()
        for commands in self._spare:
            commands.destroy()
        self._spare.clear()
        self.computed.destroy()
        self.copied.destroy()
