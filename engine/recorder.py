"""Turns dispatches, copies and fills into command buffers. The only place that writes barriers.

A full memory barrier lies before every command, so a dead tensor's bytes may serve a later op of the same batch, and
one to the host at the end of every submit. Long work is split so that no dispatch and no submit runs near a driver's
watchdog (about 2 s): by workgroup, never along a reduction.

Ctrl-C may come between any two steps of the interpreter. What it breaks off is gone on with at the next call that
submits or waits, and an object that it may have left in doubt is not used again: nothing recorded is lost, nothing is
handed over twice, and nobody waits for what was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .batch import Batch
from .errors import OutOfDeviceMemoryError, VkfoldError
from .kernel import Kernel
from .kernel_pipelines import KernelPipelines
from .pipeline_memory import Recipe
from .step_stream import COPY, FILL, SUBMIT, WRITE, Input, Place, StepStream
from .tensor import Tensor
from .transfer_queue import TransferQueue
from .vulkan_api import Buffer, CommandBuffer, Device, Fence, PreparedSubmit, QueryPool

MAX_GROUPS = 65535  # promised by every Vulkan device, per dimension
# Work a device surely does in a second, in FLOPs (bytes moved count four times): a floor, not an estimate.
_WORK_PER_SECOND = {"cpu": 2e9, "gpu": 2e11}
_DISPATCH_SECONDS, _SUBMIT_SECONDS = 0.25, 1.0
_EARLY_SECONDS = 0.02  # of work for a device that has none
STAGING_BYTES = 4 * 2**20


class Recorder:
    """Records into an open batch, submits batches in order, and reclaims finished ones.

    Ops see it as their launcher: `dispatch`, `fill_zero`, and what kind of device this is.
    """

    def __init__(self, device: Device, pipelines: KernelPipelines | None = None) -> None:
        self.device = device
        self.subgroup_size: int = device.subgroup_size
        self.max_invocations: int = device.max_workgroup_invocations
        self.is_cpu: bool = device.is_cpu
        self.driver: str = device.driver_name
        rate = _WORK_PER_SECOND["cpu" if device.is_cpu else "gpu"]
        self._dispatch_work = rate * _DISPATCH_SECONDS
        self._submit_work = rate * _SUBMIT_SECONDS
        self._early_work = rate * _EARLY_SECONDS
        self._owns_pipelines = pipelines is None
        self.pipelines = KernelPipelines(device) if pipelines is None else pipelines
        self._by_kernel = self.pipelines.by_kernel
        self._current: Batch | None = None
        self._sending: Batch | None = None  # on its way to the queue: after an interrupt, or when memory was lacking
        self._batches: list[Batch] = []  # all with command buffers of their own
        self._in_flight: list[Batch] = []
        self._spare: list[Batch] = []
        self._staging: list[Buffer] = []
        self._owned: list[Buffer] = []
        self._staging_used = STAGING_BYTES  # of the newest staging buffer of the open batch
        self.step_address = 0
        self.op_work = 0.0  # of the op being launched; set by the engine
        self.num_submits = 0
        self.num_commands = 0  # recorded so far; counted before each, so an interrupt cannot leave one out
        self.rehearsing = False  # whether nothing is recorded, see `rehearsal`
        self.stream: StepStream | None = None  # takes down what is recorded, while a step may be replayed later
        self.next_input: Input | None = None  # what the next `write` brings, when that differs from step to step
        # Called before anything but an op's own commands is recorded: ops may be held back (fusion.py).
        self.before_recording: Callable[[], None] = lambda: None
        self.choosers: dict[type, Any] = {}  # of variants: variant_choice.py
        self.transfers: TransferQueue | None = None  # a second queue, once tensors are offloaded on one
        self.trace: Callable[[str], None] | None = None  # hears the kernel of every dispatch; profiler.py

    @property
    def in_words(self) -> bool:
        """Whether kernels run as their variants that read and write four floats as two words."""
        return self.pipelines.in_words

    @in_words.setter
    def in_words(self, on: bool) -> None:
        self.pipelines.in_words = on

    # -- recording ---------------------------------------------------------------------------------------------------
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

    def aside(self) -> Recorder:
        """A recorder with the same pipelines, for work apart from the open batch. Close it."""
        aside = Recorder(self.device, self.pipelines)
        aside.choosers = self.choosers
        return aside

    def own_buffer(self, nbytes: int, *, host_visible: bool) -> Buffer:
        """A new buffer that `close` destroys, once nothing uses it. Raises OutOfDeviceMemoryError."""
        buffer = self.device.create_buffer(nbytes, host_visible)
        self._owned.append(buffer)
        return buffer

    def make_ahead(self, recipes: Iterable[Recipe]) -> int:
        """Make the pipelines of recipes that are not there yet, all at once. Returns how many were made."""
        made = self.pipelines.make_ahead(recipes)
        if made:
            # Some drivers put off compiling to the first dispatch: one of no workgroup is enough.
            commands = (self._current or self._open()).commands
            for recipe, pipeline in made.items():
                commands.bind(pipeline)
                commands.push(bytes(recipe.push_bytes))
                commands.dispatch(0)
            self.submit()
            self.wait()
        return len(made)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Nothing is recorded inside: an op's launch only compiles what it needs, and checks its arguments."""
        try:
            self.rehearsing = True
            yield
        finally:
            self.rehearsing = False

    def dispatch(self, kernel: Kernel, num_groups: int, *args: Any) -> None:
        """Record a dispatch of `num_groups` workgroups, split where it would run too long.

        args: one value an argument of the kernel, in order, the step pointer left out: tensors, (tensor, byte offset)
        pairs, or numbers. Raises ValueError for a number of workgroups outside 0..2^32 - 1, VkfoldError for an
        address that breaks the alignment the kernel declares.
        """
        if not 0 < num_groups < 2**32:
            if num_groups == 0:
                return
            raise ValueError(f"kernel {kernel.name!r}: {num_groups} workgroups; it must be 0 to 2^32 - 1")
        pipeline = self._by_kernel.get(kernel)
        if pipeline is None:
            if self.rehearsing:
                self.pipelines.compile(kernel)
            else:
                pipeline = self.pipelines.make(kernel)
        values = []
        for arg in args:
            kind = type(arg)
            if kind is Tensor:
                values.append(arg.address)
            elif kind is tuple:
                values.append(arg[0].address + arg[1])
            else:
                values.append(arg)
        if kernel.takes_step:
            values.insert(kernel.step_index, self.step_address)
        for index, mask in kernel.alignment_masks:
            if values[index] & mask:
                self._misaligned(kernel, index, values[index])
        if self.rehearsing:
            return
        if self.trace is not None:
            self.trace(kernel.name)
        pieces = 1
        if self.op_work > self._dispatch_work:
            pieces = min(num_groups, int(self.op_work / self._dispatch_work) + 1)
        step = min(MAX_GROUPS, -(-num_groups // pieces))
        if step >= num_groups:
            self._dispatch_piece(pipeline, kernel.packer.pack(*values, 0), num_groups, self.op_work)
            return
        share = self.op_work * step / num_groups
        for base in range(0, num_groups, step):
            packed = kernel.packer.pack(*values, base)
            self._dispatch_piece(pipeline, packed, min(step, num_groups - base), share)

    def _dispatch_piece(self, pipeline: Any, packed: bytes, groups: int, work: float) -> None:
        batch = self._current or self._open()
        if batch.work and batch.work + work > self._submit_work:
            self.submit()
            batch = self._open()
        elif batch.own_work > self._early_work and self._is_idle():
            batch = self._submit_early(batch)
        self.num_commands += 1
        commands = batch.commands
        commands.barrier()
        commands.bind(pipeline)
        commands.push(packed)
        commands.dispatch(groups)
        batch.work += work
        batch.own_work += work
        if self.stream is not None:
            self.stream.commands.append((pipeline, packed, groups))

    @staticmethod
    def _misaligned(kernel: Kernel, index: int, address: int) -> None:
        arg = kernel.args[index]
        raise VkfoldError(
            f"kernel {kernel.name!r}: argument {arg.name!r} at address {address:#x} is not aligned to "
            f"{arg.alignment} bytes: pass a tensor that starts there or use the scalar kernel"
        )

    def write_timestamp(self, pool: QueryPool, index: int) -> None:
        """Record writing the time at which everything before has finished."""
        (self._current or self._open()).commands.write_timestamp(pool, index)

    def reset_queries(self, pool: QueryPool) -> None:
        """Record making a pool's timestamps writable."""
        (self._current or self._open()).commands.reset_queries(pool)

    def fill_zero(self, tensor: Tensor) -> None:
        """Record zeroing a tensor (its whole aligned range)."""
        self.fill(tensor, 0)

    def fill(self, tensor: Tensor, word: int) -> None:
        """Record filling a tensor with a 32-bit word. Sizes are rounded up to 4 bytes, within the tensor's range."""
        buffer, offset = buffer_of(tensor)
        self.fill_buffer(buffer, offset, (tensor.nbytes + 3) & ~3, word)

    def fill_buffer(self, buffer: Buffer, offset: int, nbytes: int, word: int) -> None:
        """Record filling a range of a buffer, both ends multiples of 4, with a 32-bit word."""
        if self.rehearsing:
            return
        self.before_recording()
        if nbytes:
            commands = (self._current or self._open()).commands
            self.num_commands += 1
            commands.barrier()
            commands.fill(buffer.handle, offset, nbytes, word)
            if self.stream is not None:
                self.stream.commands.append((FILL, buffer, offset, nbytes, word))

    def write_tensor(self, tensor: Tensor, data: bytes) -> None:
        """Record a copy of host bytes to the start of a tensor."""
        self.write(*buffer_of(tensor), data)

    def copy(self, source: Tensor, target: Tensor, nbytes: int) -> None:
        """Record copying bytes from the start of one tensor to the start of another."""
        self.copy_buffer(*buffer_of(source), *buffer_of(target), nbytes)

    def copy_buffer(self, source: Buffer, source_offset: int, target: Buffer, target_offset: int, nbytes: int) -> None:
        """Record copying bytes from one buffer to another."""
        if self.rehearsing:
            return
        self.before_recording()
        if nbytes:
            commands = (self._current or self._open()).commands
            self.num_commands += 1
            commands.barrier()
            commands.copy(source.handle, source_offset, target.handle, target_offset, nbytes)
            if self.stream is not None:
                self.stream.commands.append((COPY, source, source_offset, target, target_offset, nbytes))

    # -- host data ---------------------------------------------------------------------------------------------------
    def write(self, buffer: Buffer, offset: int, data: Any) -> None:
        """Record a copy of host bytes into a buffer. The bytes are staged at once and may change afterwards."""
        if self.rehearsing:
            return
        brings, self.next_input = self.next_input, None  # ops held back that are recorded first may write, too
        self.before_recording()
        view = memoryview(data).cast("B")
        if self.stream is not None and len(view):
            self.stream.commands.append((WRITE, buffer, offset, len(view), bytes(view) if brings is None else brings))
        position = 0
        while position < len(view):
            batch = self._current or self._open()
            if self._staging_used >= STAGING_BYTES:
                self._see_to_staging()
                batch.staging.extend(map(self._staging.pop, [-1]))  # one step of the interpreter
                self._staging_used = 0
            staging = batch.staging[-1]
            start = self._staging_used
            count = min(len(view) - position, STAGING_BYTES - start)
            self._staging_used += (count + 15) & ~15  # first: after an interrupt nothing else is put there
            self.num_commands += 1
            staging.mapping[start : start + count] = view[position : position + count]
            batch.commands.barrier()
            batch.commands.copy(staging.handle, start, buffer.handle, offset + position, count)
            position += count
            batch.work += count
            if batch.work > self._submit_work:
                self.submit()

    def _see_to_staging(self) -> None:
        """After it there is a staging buffer that nothing uses."""
        # Uploads larger than what may be in flight wait for the oldest batch instead of growing without bound.
        while not self._staging and len(self._in_flight) > 8:
            self._finish_oldest()
        if not self._staging:
            self._staging.append(self.device.create_buffer(STAGING_BYTES, host_visible=True))

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytearray:
        """The bytes of a buffer after everything recorded so far. Submits and waits."""
        self.before_recording()
        if self.stream is not None:
            self.stream.obstacle = "a value is read back in the middle of the step"
        result = bytearray(nbytes)
        if nbytes == 0:
            return result
        size = min(nbytes, STAGING_BYTES)
        for start in range(0, nbytes, size):
            count = min(size, nbytes - start)
            batch = self._current or self._open()
            self._see_to_staging()
            # The batch's own, but not the newest, which uploads go to: it is free when the batch has finished, whoever
            # waits for that.
            batch.staging[:0] = map(self._staging.pop, [-1])
            staging = batch.staging[0]
            batch.commands.barrier()
            batch.commands.copy(buffer.handle, offset + start, staging.handle, 0, count)
            self.submit()
            self.wait()
            result[start : start + count] = staging.mapping[:count]
        return result

    # -- submits -----------------------------------------------------------------------------------------------------
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
        while self._in_flight and (self._in_flight[0].finished or self._in_flight[0].fence.is_signaled()):
            self._reclaim(self._in_flight[0])

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
        return any(batch.fence is fence for batch in self._in_flight)

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
        self._staging.extend(map(batch.staging.pop, [-1] * len(batch.staging)))
        batch.retired.extend(map(self._staging.pop, [0] * (len(self._staging) - 4)))
        while batch.retired:
            self._destroy(batch.retired[-1])  # which may be done twice
            batch.retired.pop()
        del self._in_flight[0]
        if batch.commands is not None:
            batch.work, batch.own_work, batch.number = 0.0, 0.0, 0
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

    def close(self) -> None:
        """Submit what is recorded, wait for everything, destroy everything."""
        self.finish()
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None
        for batch in self._batches:
            batch.commands.destroy()
            batch.fence.destroy()
        for buffer in (*self._staging, *self._owned):
            self.device.destroy_buffer(buffer)
        if self._owns_pipelines:
            self.pipelines.destroy()
        self._batches.clear()
        self._spare.clear()
        self._staging.clear()
        self._owned.clear()


def place_of(tensor: Tensor) -> Place:
    """Buffer, offset and bytes of a tensor."""
    return (*buffer_of(tensor), tensor.nbytes)


def buffer_of(tensor: Tensor) -> tuple[Buffer, int]:
    """The driver buffer behind a tensor, and the tensor's offset in it."""
    _, range_ = tensor.storage.handle
    buffer = range_.block.handle
    return buffer, tensor.address - buffer.address
