"""The engine that runs on a Vulkan device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..memory_pool import DEFAULT_BLOCK_BYTES, OutOfBlockMemory, PoolRange
from . import step_parameters, switches
from .compute_engine import MEMORY_BUDGET, DriverMemory, Rule
from .debug_checks import GUARD_BYTES, MemoryChecks
from .device_choice import choose_device
from .dtypes import numpy_dtype
from .errors import OutOfDeviceMemoryError
from .fusion import Call, Fusion
from .fusion_rules import late_rules, rules
from .host_memory import available_bytes
from .input_checks import check_dispatch
from .kernel import Kernel
from .launcher import OpLauncher
from .op import Cost, Op
from .pooled_engine import STEP, PooledEngine
from .recorder import Recorder, buffer_of
from .replay import StepReplayer
from .replay_stats import ReplayStats
from .step_parameters import StepParameters
from .tensor import Storage, Tensor, TensorSpec, nowhere
from .transfer_queue import TransferQueue
from .variant_choice import ChoosingAs, choice_state
from .variant_families import check_forced
from .vulkan_api import Buffer, Device, Instance

if TYPE_CHECKING:
    from .profiler import OpProfiler


class VulkanBlockSource:
    """Blocks of memory for the pools, within a budget; returned ones die after the open batch.

    host_visible: of host memory that the device can copy to and from, else of device memory.
    """

    def __init__(self, device: Device, recorder: Recorder, budget_bytes: int, *, host_visible: bool = False) -> None:
        self.device = device
        self.host_visible = host_visible
        self.recorder = recorder
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0

    def allocate(self, nbytes: int) -> Buffer:
        """One block. Raises OutOfBlockMemory when the budget or the driver has no more."""
        limit = self.device.max_allocation_bytes
        if nbytes > limit:
            message = f"the device gives at most {limit} bytes in one piece (maxMemoryAllocationSize, maxBufferSize)"
            raise OutOfBlockMemory(message, over_limit=True)
        if self.reserved_bytes + nbytes > self.budget_bytes:
            raise OutOfBlockMemory(
                f"{nbytes} bytes more than {self.reserved_bytes} reserved would pass the budget of {self.budget_bytes}"
            )
        try:
            buffer = self.device.create_buffer(nbytes, host_visible=self.host_visible)
        except OutOfDeviceMemoryError as error:
            raise OutOfBlockMemory(str(error)) from error
        self.reserved_bytes += nbytes
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Return a block; the driver object is destroyed once no batch can use it."""
        self.reserved_bytes -= buffer.nbytes
        self.recorder.retire(buffer)


class VulkanEngine(PooledEngine):
    """Records ops as dispatches and runs them on one device.

    device: index, name or UUID of the device; None takes VKFOLD_DEVICE, else the best one there is.
    block_bytes: most bytes of a pool's block, 32 MiB unless given. budget_bytes: most device memory to reserve; None
    asks the driver.

    Raises VulkanUnavailableError where no device fits, with what is missing and what would supply it. One engine serves
    one thread at a time, and says so when another calls: see `take_over`.
    """

    uses_device = True

    def __init__(
        self,
        device: str | int | None = None,
        *,
        block_bytes: int | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        self.closed = True  # until everything below has worked
        self._checks: MemoryChecks | None = None
        self.fusion: Fusion | None = None  # None: every op is launched when it is called
        self._launcher: OpLauncher | None = None
        self.profiler: OpProfiler | None = None
        switches.check()
        self.debug = switches.get("VKFOLD_DEBUG")
        wanted = device if device is not None else switches.get("VKFOLD_DEVICE")
        self.instance = Instance(validation=self.debug >= 1)
        try:
            physical = choose_device(self.instance.physical_devices(), wanted)
            self.device = Device(self.instance, physical)
        except BaseException:
            self.instance.destroy()
            raise
        self.recorder = Recorder(self.device)
        self.choosers = self.recorder.choosers  # a map kernel is launched on either
        if switches.raw("VKFOLD_VARIANT"):
            try:
                check_forced(self.recorder)
            except BaseException:
                self.recorder.close()
                self.device.destroy()
                self.instance.destroy()
                raise
        budget = self.device.memory_budget() if budget_bytes is None else budget_bytes
        self.source = VulkanBlockSource(self.device, self.recorder, budget)
        if block_bytes is None:  # the strictest debug level copies all blocks around every op
            block_bytes = DEFAULT_BLOCK_BYTES if self.debug < 3 else 2**20
        self._host_source = VulkanBlockSource(self.device, self.recorder, available_bytes(), host_visible=True)
        super().__init__(self.source, self._host_source, block_bytes=block_bytes)
        self.name = physical.name
        self._in_batch = False
        self._step_buffer = self.device.create_buffer(step_parameters.SIZE_BYTES, host_visible=False)
        self.recorder.step_address = self._step_buffer.address
        self.recorder.write(self._step_buffer, 0, self.step_parameters.pack())
        self._checks = MemoryChecks(self, self.debug) if self.debug >= 2 else None
        # Memory checks look at memory after every op as it was called.
        fusion = switches.get("VKFOLD_FUSION")
        if self._checks is None and fusion != "0":
            # They save bytes at the cost of arithmetic (a norm in every tile) or of compiling, which is dear on CPUs.
            late = late_rules(self.recorder) if fusion == "all" or not self.device.is_cpu else {}
            self._launcher = OpLauncher(self, self._launch_call, self._rehearse)
            self.fusion = Fusion(self._launcher, rules(), late)
            self.recorder.before_recording = self.fusion.drain
        self.guard_bytes = GUARD_BYTES if self._checks else 0
        self.replayer = StepReplayer(self.recorder, (*self.pools.values(), self.host_pool), self._return)

    # -- ops ---------------------------------------------------------------------------------------------------------
    def _address(self, range_: PoolRange) -> int:
        return range_.block.handle.address + range_.offset

    def _launch(self, op: Op, rule: Rule, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any) -> None:
        if self._launcher is not None:
            addresses = 0
            for tensor in inputs:
                if tensor is not None:
                    addresses |= tensor.address
            state = rule.choice_state
            if addresses & 15 or not rule.ready_aligned or (state is not None and state != choice_state()):
                self._launcher.make_ready(op, rule, inputs, made, settings)
        if self.recorder.transfers is not None:
            written = op.written(len(inputs), **settings)
            self.recorder.transfers.before_use(inputs, [inputs[i] for i in written])
        if self.fusion is None and self.profiler is None:
            self._launch_now(op, rule.cost, inputs, made, settings)
            return
        call = Call(op, rule.cost, inputs, made, len(rule.outputs), settings, identity=rule)
        call.choices = rule.choice_state  # as things stand: see above
        if self.profiler is not None:
            call.scope = self.profiler.scope
        if self.fusion is not None:
            self.fusion.add(call)
        else:
            self._launch_call(call)

    def _launch_now(
        self, op: Op, cost: Cost, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any
    ) -> None:
        recorder = self.recorder
        recorder.rehearsing = False  # whatever an interrupt left
        recorder.op_work = cost.flops + 4.0 * (cost.bytes_read + cost.bytes_written)
        if self._checks is None:
            op.launch(recorder, inputs, made, **settings)
            return
        self._checks.before_op(op, made)
        op.launch(recorder, inputs, made, **settings)
        self._checks.after_op(op, inputs, made, settings)

    def _rehearse(self, op: Op, inputs: Sequence[Tensor | None], made: Sequence[Tensor], settings: Any) -> None:
        self.recorder.rehearse(lambda: op.launch(self.recorder, inputs, made, **settings))

    def prepare_call(self, op: Op, specs: Sequence[TensorSpec | None], settings: dict[str, Any]) -> None:
        """What the first call with such inputs does before it is recorded: its rule, and its kernels looked for.

        Raises what the call would. Allocates nothing and records nothing of the call.
        """
        given = iter(nowhere(self, [spec for spec in specs if spec is not None]))
        inputs = tuple([None if spec is None else next(given) for spec in specs])
        rule = self.rule_of(op, inputs, settings)
        if self._launcher is not None and not rule.ready_aligned:
            made = nowhere(self, rule.outputs + rule.scratch, behind=inputs)
            self._launcher.make_ready(op, rule, inputs, made, settings)

    def _launch_call(self, call: Call) -> None:
        profiler = self.profiler
        if profiler is not None:
            profiler.begin(call)
        try:
            if call.choices is None or call.choices is choice_state():
                self._launch_now(call.op, call.cost, call.inputs, call.made, call.settings)
            else:
                with ChoosingAs(call.choices):
                    self._launch_now(call.op, call.cost, call.inputs, call.made, call.settings)
        finally:
            if profiler is not None:
                profiler.end()

    def _guard(self, storage: Storage) -> None:
        if self._checks is not None:
            self._checks.allocated(storage)

    def _free(self, storage: Storage) -> None:
        if self._checks is not None:
            self._checks.freed(storage)
        if self.recorder.transfers is not None:
            self.recorder.transfers.freed(storage)
        pool, range_ = storage.handle
        pool.free(range_)

    def dispatch(self, kernel: Kernel, num_groups: int, *args: Any) -> None:
        """Run a kernel of your own: see `Kernel` for its arguments. Tensors for pointers, numbers for scalars.

        f32 pointers take float32 tensors, i32 pointers int32 ones, u32 pointers the 32-bit words of any tensor.

        Raises TypeError for a wrong number or kind of arguments, ValueError for numbers that do not fit, tensors of
        another engine or smaller than the kernel declares, and a local_size beyond the device's.
        """
        self.check_open()
        check_dispatch(self, kernel, num_groups, args)
        self.recorder.before_recording()
        tensors = [arg[0] if isinstance(arg, tuple) else arg for arg in args]
        tensors = [arg for arg in tensors if isinstance(arg, Tensor)]
        self.check_made(kernel.name, tensors)
        self._before_use(tensors, tensors)
        self.recorder.op_work = 0.0
        self.recorder.dispatch(kernel, num_groups, *args)

    def set_step_parameters(self, parameters: StepParameters) -> None:
        """Values that ops recorded from now on read."""
        before = self.step_parameters
        try:
            super().set_step_parameters(parameters)
            self.recorder.write(self._step_buffer, 0, parameters.pack())
        except BaseException:  # an interrupt: it may be recorded or not
            self.step_parameters = before
            self.recorder.write(self._step_buffer, 0, before.pack())
            raise

    # -- host data ---------------------------------------------------------------------------------------------------
    def _write(self, tensor: Tensor, data: np.ndarray) -> None:
        if data.nbytes:
            self._before_use((tensor,), (tensor,))
            buffer, offset = buffer_of(tensor)
            self.recorder.write(buffer, offset, data.tobytes())
            if self.never_made is not None:
                self.never_made.overwritten(tensor)

    def download(self, tensor: Tensor) -> np.ndarray:
        """The tensor's values. Submits what is recorded and waits for it."""
        self.check_open()
        self.check_tensor("download", tensor)
        self.check_made("download", (tensor,))
        self._before_use((tensor,))
        buffer, offset = buffer_of(tensor)
        raw = self.recorder.read(buffer, offset, tensor.nbytes)
        return np.frombuffer(raw, numpy_dtype(tensor.dtype)).reshape(tensor.shape)

    def _record_offload(self, tensor: Tensor, range_: PoolRange) -> None:
        transfers = self._transfer_queue()
        if transfers is None:
            self.recorder.copy_buffer(*buffer_of(tensor), range_.block.handle, range_.offset, tensor.nbytes)
        else:
            transfers.copy_out(tensor, buffer_of(tensor), (range_.block.handle, range_.offset), tensor.nbytes)

    def _record_restore(self, range_: PoolRange, tensor: Tensor) -> None:
        transfers = self._transfer_queue()
        if transfers is None:
            self.recorder.copy_buffer(range_.block.handle, range_.offset, *buffer_of(tensor), tensor.nbytes)
        else:
            transfers.copy_back(tensor, (range_.block.handle, range_.offset), buffer_of(tensor), tensor.nbytes)

    def _transfer_queue(self) -> TransferQueue | None:
        recorder = self.recorder
        # The checks poison and compare memory on the compute queue: they want everything in one order.
        if recorder.transfers is None and self.device.has_transfer_queue and self._checks is None:
            TransferQueue(recorder)
        return recorder.transfers

    def _before_use(self, used: Sequence[Tensor], changed: Sequence[Tensor] = ()) -> None:
        if self.recorder.transfers is not None:
            self.recorder.transfers.before_use(used, changed)

    def start_copies(self) -> None:
        """Hand the copies recorded so far to the queue for copies, where there is one."""
        if self.recorder.transfers is not None:
            self.recorder.transfers.submit()

    # -- batches -----------------------------------------------------------------------------------------------------
    def begin_batch(self) -> None:
        """Start recording. Raises RuntimeError inside a batch."""
        self.check_open()
        if self._in_batch:
            raise RuntimeError("begin_batch inside a batch: call end_batch first")
        self._in_batch = True

    def flush_batch(self) -> None:
        """Submit what is recorded and go on; does not wait."""
        self.check_thread()
        self.recorder.submit()
        self.start_copies()

    def end_batch(self) -> None:
        """Submit, wait for everything submitted, destroy what was pending."""
        self.check_thread()
        self._in_batch = False
        self.recorder.submit()
        self.recorder.wait()
        if self._checks is not None:
            self._checks.check_guards()

    def staging_bytes(self) -> int:
        """Bytes of driver buffers outside the pools: staging, step parameters, host data of captured steps.

        Right after `end_batch`; in a batch also blocks that were returned and wait for its fence.
        """
        pools = self.source.reserved_bytes + self._host_source.reserved_bytes
        return self.device.buffer_bytes - pools

    def driver_memory(self) -> DriverMemory | None:
        """Device memory as VK_EXT_memory_budget counts it; process memory on software drivers and without it."""
        self.check_open()
        used = self.device.memory_used()
        return super().driver_memory() if used is None else DriverMemory(MEMORY_BUDGET, used)

    # -- replay ------------------------------------------------------------------------------------------------------
    def replay_obstacle(self) -> str:
        """Why no step can be captured or replayed right now, "" if it can."""
        if not switches.is_on("VKFOLD_REPLAY"):
            return "VKFOLD_REPLAY is 0"
        if self._checks is not None:
            return "VKFOLD_DEBUG looks at memory around every op"
        if self.ledger is not None:
            return "an allocation ledger hears of every op"
        if self.profiler is not None:
            return "a profiler measures every op"
        if self.never_made:
            return "a tensor was never made: its op failed"
        if self._pool is not self.pools[STEP]:
            return "the step runs inside parameter_pool()"
        return self.replayer.obstacle

    def replay_stats(self) -> ReplayStats:
        """How many training steps were recorded, captured and replayed, and why others were not. Grows with them."""
        return self.replayer.stats

    def _recover_memory(self) -> None:
        self.recorder.submit()
        self.recorder.wait()
        super()._recover_memory()
        self.recorder.wait()

    # -- life --------------------------------------------------------------------------------------------------------
    @property
    def validation_messages(self) -> list[str]:
        """What the validation layers said so far (VKFOLD_DEBUG at least 1)."""
        return self.instance.messages

    def close(self) -> None:
        """Wait for the device and give everything back. Tensors of this engine are dead afterwards.

        Harmless a second time; goes on where an interrupt stopped it.
        """
        if self.closed and self.instance.handle is None:
            return
        if not self.closed:
            self.check_open()
        self.closed = True
        if self.fusion is not None:
            self.fusion.discard()
        self.replayer.close()
        self.recorder.close()
        if self._checks is not None:
            self._checks.close()
        for pool in (*self.pools.values(), self.host_pool):
            pool.destroy()
        self.device.destroy_buffer(self._step_buffer)
        self.device.destroy()
        self.instance.destroy()

    def __del__(self) -> None:
        # Nobody has the engine any more, nor a tensor of it, so no thread can be using it: `close` may run here. A
        # forked child must not touch the parent's device, and what lives until the end goes with the process.
        if self.closed or self.is_forked or sys.is_finalizing():
            return
        try:
            self._own()
            self.close()
        except Exception as error:
            switches.logger.warning("an engine that nobody has any more could not be closed: %s", str(error))
