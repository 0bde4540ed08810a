"""The batches of a recorder on their way: opened, handed to the queue in order, waited for, reclaimed.

Ctrl-C may come between any two steps of the interpreter. What it breaks off is gone on with at the next call that
submits or waits, and an object that it may have left in doubt is not used again: nothing recorded is lost, nothing is
handed over twice, and nobody waits for what was not.
"""

from __future__ import annotations

from collections.abc import Callable

from .batch import Batch
from .errors import OutOfDeviceMemoryError, VkfoldError
from .step_stream import SUBMIT, StepStream
from .transfer_queue import TransferQueue
from .vulkan_api import Buffer, CommandBuffer, Device, Fence, PreparedSubmit

STAGING_BYTES = 4 * 2**20


class Submits:
    """Opens a batch, submits batches in order, and takes back what finished ones held."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._current: Batch | None = None
        self._sending: Batch | None = None  # on its way to the queue: after an interrupt, or when memory was lacking
        self._batches: list[Batch] = []  # all with command buffers of their own
        self._in_flight: list[Batch] = []
        self._spare: list[Batch] = []
        self._staging: list[Buffer] = []
        self._staging_used = STAGING_BYTES  # of the newest staging buffer of the open batch
        self.num_submits = 0
        self.stream: StepStream | None = None  # takes down what is recorded, while a step may be replayed later
        # Called before anything but an op's own commands is recorded: ops may be held back (fusion.py).
        self.before_recording: Callable[[], None] = lambda: None
        self.transfers: TransferQueue | None = None  # a second queue, once tensors are offloaded on one

    def _open(self) -> Batch:
        if self._sending is not None:
            self._send()
        batch = self._current
        if batch is None:
            if self.transfers is not None:
                self.transfers.submit()
            if self._spare:
                batch = self._spare.pop()
            else:
                batch = Batch(self.device.create_command_buffer(), self.device.create_fence())
                self._batches.append(batch)
            batch.commands.begin()
            self._current = batch
        return batch

    def open_batch(self) -> None:
        """See to it that a batch is open: it will be submitted even if nothing more is recorded."""
        self._open()

    def submit(self) -> None:
        """Close the open batch with a barrier to the host and hand it to the queue; does not wait."""
        self.before_recording()
        if self._sending is not None:
            self._send()
        if self._current is not None:
            self._sending = self._current
            self._send()

    def _is_idle(self) -> bool:
        """Whether the device has done all that was submitted."""
        return not self._in_flight or self._in_flight[-1].fence.is_signaled()

    def _submit_early(self, batch: Batch) -> Batch:
        """Submit what an idle device can begin with; returns the open batch. It depends on time, so no captured step
        knows of it: its submits are those that would have been without."""
        batch.early, work = True, batch.work
        self.submit()
        batch = self._open()
        batch.work = work
        return batch

    def _send(self) -> None:
        """Hand `_sending` to the queue; goes on where an interrupt, or a lack of memory, stopped it."""
        batch = self._sending
        assert batch is not None
        if self._current is batch:
            self._current = None
        self._staging_used = STAGING_BYTES
        if batch.sent != [0]:
            if batch.commands is None:  # a replay that was broken off: who asked for it knows
                self._sending = None
                return
            batch.sent.clear()
            try:
                self._hand_over(batch)
            except OutOfDeviceMemoryError:
                raise
            except VkfoldError:  # the device is lost
                self._sending = None
                raise
        if self.transfers is not None and batch.number:
            self.transfers.num_compute_submits = batch.number
        if batch not in self._in_flight:
            self._in_flight.append(batch)
            self.num_submits += 1
        self._sending = None
        while (oldest := self._in_flight[0]) is not batch and (oldest.finished or oldest.fence.is_signaled()):
            self._reclaim(oldest)

    def _hand_over(self, batch: Batch) -> None:
        commands = batch.commands
        if not commands.is_ended:
            commands.host_barrier()
            commands.end()
        if self.transfers is None:
            self.device.submit(commands, batch.fence, batch.sent)
        else:
            batch.number = self.transfers.num_compute_submits + 1
            self.transfers.submit_compute(commands, batch.fence, batch.number, batch.sent)
        if self.stream is not None and not batch.early:
            self.stream.commands.append(SUBMIT)

    # -- replay ------------------------------------------------------------------------------------------------------
    def resubmit(self, prepared: PreparedSubmit, fence: Fence, sent: list[int]) -> None:
        """Hand a step's command buffers to the queue once more, behind all that is recorded; does not wait.

        sent: empty; [0] once the queue has them, also where an interrupt is raised.
        """
        self.submit()
        if self.transfers is not None:
            self.transfers.wait()
            self.transfers.uncovered = True
        batch = Batch(None, fence)
        batch.sent = sent
        self._sending = batch
        self.device.submit_prepared(prepared, fence, sent)
        self._send()

    def is_in_flight(self, fence: Fence) -> bool:
        """Whether a batch with this fence was submitted and not waited for."""
        if self._sending is not None:
            self._send()
        return bool(self._in_flight) and any(batch.fence is fence for batch in self._in_flight)

    # -- waiting -----------------------------------------------------------------------------------------------------
    def wait(self) -> None:
        """Wait for all submitted batches and reclaim what they held."""
        if self._sending is not None:
            self._send()
        while self._in_flight:
            self._finish_oldest()
        if self.transfers is not None:
            self.transfers.wait()

    def finish(self) -> None:
        """Submit what is recorded and wait until the device does nothing more: what it used may be destroyed. Holds
        after an interrupt, too."""
        self.submit()
        self.wait()
        self.device.wait_idle()

    def _finish_oldest(self) -> None:
        batch = self._in_flight[0]
        if not batch.finished:
            try:
                batch.fence.wait()  # an interrupt leaves it in flight
            except VkfoldError:  # the device is lost: it does nothing any more
                del self._in_flight[0]
                raise
        self._reclaim(batch)

    def _reclaim(self, batch: Batch) -> None:
        """Take back what the oldest batch in flight held, whose fence has signalled. An interrupt leaves it there."""
        batch.finished = True
        batch.fence.reset()
        if batch.commands is not None:
            batch.commands.reset()
        # Each of these is one step of the interpreter. What a read waits for is the last, and stays.
        if batch.staging:
            self._staging.extend(map(batch.staging.pop, [-1] * len(batch.staging)))
        if len(self._staging) > 4:
            batch.retired.extend(map(self._staging.pop, [0] * (len(self._staging) - 4)))
        while batch.retired:
            self._destroy(batch.retired[-1])  # which may be done twice
            batch.retired.pop()
        del self._in_flight[0]
        if batch.commands is not None:
            batch.work, batch.new_work, batch.number = 0.0, 0.0, 0
            batch.finished = batch.early = False
            batch.sent.clear()
            self._spare.append(batch)

    def _destroy(self, thing: Buffer | CommandBuffer | Fence) -> None:
        if isinstance(thing, Buffer):
            self.device.destroy_buffer(thing)
        else:
            thing.destroy()

    def retire(self, thing: Buffer | CommandBuffer | Fence) -> None:
        """Destroy something once nothing recorded or submitted so far can still use it."""
        self.before_recording()
        if self.transfers is not None:
            self.transfers.before_retire()
        if self._sending is not None:
            self._send()
        if self._current is not None:
            self._current.retired.append(thing)
        elif self._in_flight:
            self._in_flight[-1].retired.append(thing)
        else:
            self._destroy(thing)
