"""Turns dispatches, copies and fills into command buffers. The only place that writes barriers.

A full memory barrier lies before every command, so a dead tensor's bytes may serve a later op of the same batch, and
one to the host at the end of every submit. Long work is split so that no dispatch and no submit runs near a driver's
watchdog (about 2 s): by workgroup, never along a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .errors import VkfoldError
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
STAGING_BYTES = 4 * 2**20


class Batch:
    """One submit: its command buffer, and what may be destroyed or reused once its fence has signalled."""

    __slots__ = ("commands", "fence", "retired", "staging", "work")

    def __init__(self, commands: CommandBuffer | None, fence: Fence) -> None:
        self.commands: Any = commands  # None: a replay, whose command buffers stay recorded
        self.fence = fence
        self.retired: list[Buffer | CommandBuffer | Fence] = []
        self.staging: list[Buffer] = []
        self.work = 0.0


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
        self._owns_pipelines = pipelines is None
        self.pipelines = KernelPipelines(device) if pipelines is None else pipelines
        self._by_kernel = self.pipelines.by_kernel
        self._current: Batch | None = None
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
        batch = self._current
        if batch is None:
            if self.transfers is not None:
                self.transfers.submit()
            if self._spare:
                batch = self._spare.pop()
            else:
                batch = Batch(self.device.create_command_buffer(), self.device.create_fence())
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
        self.num_commands += 1
        commands = batch.commands
        commands.barrier()
        commands.bind(pipeline)
        commands.push(packed)
        commands.dispatch(groups)
        batch.work += work
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
                batch.staging.append(self._staging.pop() if self._staging else self._new_staging())
                self._staging_used = 0
            staging = batch.staging[-1]
            count = min(len(view) - position, STAGING_BYTES - self._staging_used)
            self.num_commands += 1
            staging.mapping[self._staging_used : self._staging_used + count] = view[position : position + count]
            batch.commands.barrier()
            batch.commands.copy(staging.handle, self._staging_used, buffer.handle, offset + position, count)
            position += count
            self._staging_used += (count + 15) & ~15
            batch.work += count
            if batch.work > self._submit_work:
                self.submit()

    def _new_staging(self) -> Buffer:
        # Uploads larger than what may be in flight wait for the oldest batch instead of growing without bound.
        while len(self._in_flight) > 8:
            self._finish_oldest()
        return self._staging.pop() if self._staging else self.device.create_buffer(STAGING_BYTES, host_visible=True)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> bytearray:
        """The bytes of a buffer after everything recorded so far. Submits and waits."""
        self.before_recording()
        if self.stream is not None:
            self.stream.obstacle = "a value is read back in the middle of the step"
        result = bytearray(nbytes)
        if nbytes == 0:
            return result
        size = min(nbytes, STAGING_BYTES)
        staging = self._staging.pop() if self._staging else self.device.create_buffer(STAGING_BYTES, host_visible=True)
        try:
            for start in range(0, nbytes, size):
                count = min(size, nbytes - start)
                commands = (self._current or self._open()).commands
                commands.barrier()
                commands.copy(buffer.handle, offset + start, staging.handle, 0, count)
                self.submit()
                self.wait()
                result[start : start + count] = staging.mapping[:count]
        except BaseException:
            self.retire(staging)  # an interrupt: the copy into it may still run
            raise
        self._staging.append(staging)
        return result

    # -- submits -----------------------------------------------------------------------------------------------------
    def submit(self) -> None:
        """Close the open batch with a barrier to the host and hand it to the queue; does not wait."""
        self.before_recording()
        batch = self._current
        if batch is None:
            return
        self._current = None
        self._staging_used = STAGING_BYTES
        batch.commands.host_barrier()
        batch.commands.end()
        if self.transfers is None:
            self.device.submit(batch.commands, batch.fence)
        else:
            self.transfers.submit_compute(batch.commands, batch.fence)
        if self.stream is not None:
            self.stream.commands.append(SUBMIT)
        self._sent(batch)

    def _sent(self, batch: Batch) -> None:
        self._in_flight.append(batch)
        self.num_submits += 1
        while self._in_flight and self._in_flight[0].fence.is_signaled():
            self._reclaim(self._in_flight.pop(0))

    # -- replay ------------------------------------------------------------------------------------------------------
    def encode(self, stream: StepStream, staging: Buffer, places: Sequence[int]) -> list[CommandBuffer]:
        """Command buffers of a whole step, one for each of its submits, that can be submitted over and over.

        staging: where its host data lies, each write at the next of `places`, and then what is read back.
        """
        finished: list[CommandBuffer] = []
        commands: CommandBuffer | None = None
        place = iter(places)

        def close() -> None:
            nonlocal commands
            if commands is not None:
                commands.host_barrier()
                commands.end()
                finished.append(commands)
                commands = None

        for command in stream.commands:
            if command is SUBMIT:
                close()
                continue
            if commands is None:
                commands = self.device.create_command_buffer()
                commands.begin()
            commands.barrier()
            kind = command[0]
            if kind == WRITE:
                _, target, offset, nbytes, _ = command
                commands.copy(staging.handle, next(place), target.handle, offset, nbytes)
            elif kind == COPY:
                _, source, source_offset, target, offset, nbytes = command
                commands.copy(source.handle, source_offset, target.handle, offset, nbytes)
            elif kind == FILL:
                _, target, offset, nbytes, word = command
                commands.fill(target.handle, offset, nbytes, word)
            else:
                commands.bind(kind)
                commands.push(command[1])
                commands.dispatch(command[2])
        for source, source_offset, nbytes in stream.results:
            if commands is None:
                commands = self.device.create_command_buffer()
                commands.begin()
            commands.barrier()
            commands.copy(source.handle, source_offset, staging.handle, next(place), nbytes)
        close()
        return finished

    def resubmit(self, prepared: PreparedSubmit, fence: Fence) -> None:
        """Hand a step's command buffers to the queue once more, behind all that is recorded; does not wait."""
        self.submit()
        if self.transfers is not None:
            self.transfers.wait()
        self.device.submit_prepared(prepared, fence)
        self._sent(Batch(None, fence))

    def is_in_flight(self, fence: Fence) -> bool:
        """Whether a batch with this fence was submitted and not waited for."""
        return any(batch.fence is fence for batch in self._in_flight)

    def wait(self) -> None:
        """Wait for all submitted batches and reclaim what they held."""
        while self._in_flight:
            self._finish_oldest()
        if self.transfers is not None:
            self.transfers.wait()

    def finish(self) -> None:
        """Submit what is recorded and wait until the device does nothing more: what it used may be destroyed. Holds
        after an interrupt, too."""
        self.submit()
        self.wait()
        self.device.wait_idle()  # for a submit that an interrupt kept from being noted

    def _finish_oldest(self) -> None:
        try:
            self._in_flight[0].fence.wait()  # an interrupt leaves it in flight
        except VkfoldError:  # the device is lost: it does nothing any more
            del self._in_flight[0]
            raise
        self._reclaim(self._in_flight.pop(0))

    def _reclaim(self, batch: Batch) -> None:
        """Take back what a batch held, whose fence has signalled."""
        batch.fence.reset()
        if batch.commands is not None:
            batch.commands.reset()
        self._staging.extend(batch.staging)
        for extra in self._staging[4:]:
            self.device.destroy_buffer(extra)
        del self._staging[4:]
        for thing in batch.retired:
            self._destroy(thing)
        batch.staging.clear()
        batch.retired.clear()
        batch.work = 0.0
        if batch.commands is not None:
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
        for batch in self._spare:
            batch.commands.destroy()
            batch.fence.destroy()
        for buffer in (*self._staging, *self._owned):
            self.device.destroy_buffer(buffer)
        if self._owns_pipelines:
            self.pipelines.destroy()
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
