"""Turns dispatches, copies and fills into command buffers, with a full memory barrier before every command: a dead
tensor's bytes may serve a later op of the same batch. No op writes barriers; one to the host is at the end of every
submit (submits.py).

Long work is split so that no dispatch and no submit runs near a driver's watchdog (about 2 s): by workgroup, never
along a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .errors import VkfoldError
from .kernel import Kernel
from .kernel_pipelines import KernelPipelines
from .pipeline_memory import Recipe
from .step_stream import COPY, FILL, WRITE, Input, Place
from .submits import STAGING_BYTES, Submits
from .tensor import Tensor
from .vulkan_api import Buffer, Device, QueryPool

MAX_GROUPS = 65535  # promised by every Vulkan device, per dimension
# Work a device surely does in a second, in FLOPs (bytes moved count four times): a floor, not an estimate.
_WORK_PER_SECOND = {"cpu": 2e9, "gpu": 2e11}
_DISPATCH_SECONDS, _SUBMIT_SECONDS = 0.25, 1.0
_EARLY_SECONDS = 0.02  # of work for a device that has none


class Recorder(Submits):
    """Records into an open batch, submits batches in order, and reclaims finished ones.

    Ops see it as their launcher: `dispatch`, `fill_zero`, and what kind of device this is.
    """

    def __init__(self, device: Device, pipelines: KernelPipelines | None = None) -> None:
        super().__init__(device)
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
        self._owned: list[Buffer] = []
        self.step_address = 0
        self.op_work = 0.0  # of the op being launched; set by the engine
        self.num_commands = 0  # recorded so far; counted before each, so an interrupt cannot leave one out
        self.rehearsing = False  # whether nothing is recorded, see `rehearse`
        self.next_input: Input | None = None  # what the next `write` brings, when that differs from step to step
        self.choosers: dict[type, Any] = {}  # of variants: variant_choice.py
        self.trace: Callable[[str], None] | None = None  # hears the kernel of every dispatch; profiler.py

    @property
    def in_words(self) -> bool:
        """Whether kernels run as their variants that read and write four floats as two words."""
        return self.pipelines.in_words

    @in_words.setter
    def in_words(self, on: bool) -> None:
        self.pipelines.in_words = on

    # -- recording ---------------------------------------------------------------------------------------------------
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

    def rehearse(self, launch: Callable[[], None]) -> None:
        """Call an op's launch with nothing recorded: it only compiles what it needs, and checks its arguments."""
        # No context manager: one that Ctrl-C breaks off between two of its steps would leave the recorder deaf.
        try:
            self.rehearsing = True
            launch()
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
        elif batch.new_work > self._early_work:
            batch.new_work = 0.0
            if self.trace is None and self._is_idle():  # a profile's times of an op have no gap in them
                batch = self._submit_early(batch)
        self.num_commands += 1
        commands = batch.commands
        commands.barrier()
        commands.bind(pipeline)
        commands.push(packed)
        commands.dispatch(groups)
        batch.work += work
        batch.new_work += work
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
        if not self.rehearsing:  # then a tensor may have no memory
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
        if not self.rehearsing:
            self.write(*buffer_of(tensor), data)

    def copy(self, source: Tensor, target: Tensor, nbytes: int) -> None:
        """Record copying bytes from the start of one tensor to the start of another."""
        if not self.rehearsing:
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
