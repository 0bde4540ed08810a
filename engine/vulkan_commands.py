"""Command buffers, fences and timestamp queries: the hot path, one cffi call a command."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .vulkan_binding import binding, check, struct

if TYPE_CHECKING:
    from .vulkan_device import Device, Pipeline

FENCE_SLICE_NS = 500_000_000  # a wait returns to Python this often, so that Ctrl-C is seen


def call_into(results: list[int], function: Callable[..., int], *args: Any) -> int:
    """Call a C function and append what it returns, which is returned too. Both are one step of the interpreter: after
    an interrupt the list tells whether the call was made."""
    results.extend(map(function, *([arg] for arg in args)))
    return results[-1]


class CommandBuffer:
    """Records commands. Buffers are raw handles (`Buffer.handle`), offsets and sizes bytes (multiples of 4).

    Nothing is checked here, and no barrier is written unless asked for: that is the recorder's work.
    """

    __slots__ = (
        "_access_barrier",
        "_barrier_call",
        "_bind_call",
        "_bound",
        "_compute",
        "_device",
        "_dispatch_call",
        "_ended",
        "_host_access",
        "_host_stage",
        "_layout",
        "_null",
        "_pool",
        "_push_call",
        "_region",
        "_stages",
        "handle",
        "pointer",
    )

    def __init__(self, device: Device, transfer: bool = False) -> None:
        lib, ffi, _, null = binding()
        self._device, self._null = device, null
        self._pool = device.transfer_pool if transfer else device.command_pool
        info = struct("VkCommandBufferAllocateInfo", commandPool=self._pool, level=0, commandBufferCount=1)
        out = ffi.new("VkCommandBuffer*")
        check(lib.vkAllocateCommandBuffers(device.handle, info, out), "vkAllocateCommandBuffers")
        self.pointer = out  # kept: submits point to it
        self.handle: Any = out[0]
        self._bound: Any = None
        self._ended: list[int] = []  # the result of vkEndCommandBuffer
        self._layout = device.pipeline_layout
        self._bind_call = device.function("vkCmdBindPipeline")
        self._push_call = device.function("vkCmdPushConstants")
        self._dispatch_call = device.function("vkCmdDispatch")
        self._barrier_call = device.function("vkCmdPipelineBarrier")
        self._compute = lib.VK_SHADER_STAGE_COMPUTE_BIT
        self._stages = lib.VK_PIPELINE_STAGE_TRANSFER_BIT
        if not transfer:  # a queue that only copies has no other stage
            self._stages |= lib.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
        self._host_stage = lib.VK_PIPELINE_STAGE_HOST_BIT
        self._access_barrier = struct(
            "VkMemoryBarrier",
            srcAccessMask=lib.VK_ACCESS_MEMORY_WRITE_BIT,
            dstAccessMask=lib.VK_ACCESS_MEMORY_READ_BIT | lib.VK_ACCESS_MEMORY_WRITE_BIT,
        )
        self._host_access = struct(
            "VkMemoryBarrier",
            srcAccessMask=lib.VK_ACCESS_MEMORY_WRITE_BIT,
            dstAccessMask=lib.VK_ACCESS_HOST_READ_BIT,
        )
        self._region = ffi.new("VkBufferCopy*")

    def begin(self, one_time: bool = False) -> None:
        """Start recording. one_time: it will be submitted once only (False allows replay)."""
        flags = 1 if one_time else 0  # VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT
        check(binding().lib.vkBeginCommandBuffer(self.handle, struct("VkCommandBufferBeginInfo", flags=flags)),
              "vkBeginCommandBuffer")  # fmt: skip
        self._bound = None
        self._ended.clear()

    def bind(self, pipeline: Pipeline) -> None:
        """Bind a pipeline for the dispatches that follow; free when it is bound already."""
        if pipeline is not self._bound:
            self._bind_call(self.handle, 1, pipeline.handle)  # VK_PIPELINE_BIND_POINT_COMPUTE
            self._bound = pipeline  # after the call: an interrupt must not leave what is not bound

    def push(self, data: bytes) -> None:
        """Set the push constants, from offset 0. At most 128 bytes, a multiple of 4."""
        self._push_call(self.handle, self._layout, self._compute, 0, len(data), data)

    def dispatch(self, groups: int) -> None:
        """Run the bound pipeline with `groups` workgroups (at most 65,535) in x."""
        self._dispatch_call(self.handle, groups, 1, 1)

    def barrier(self) -> None:
        """A full memory barrier between all commands before and all after, compute and transfer."""
        null, stages = self._null, self._stages
        self._barrier_call(self.handle, stages, stages, 0, 1, self._access_barrier, 0, null, 0, null)

    def host_barrier(self) -> None:
        """Make everything written so far visible to the host once the fence has signalled."""
        null = self._null
        self._barrier_call(self.handle, self._stages, self._host_stage, 0, 1, self._host_access, 0, null, 0, null)

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, nbytes: int) -> None:
        """Copy bytes between buffers (or within one, without overlap)."""
        region = self._region
        region.srcOffset, region.dstOffset, region.size = source_offset, target_offset, nbytes
        binding().lib.vkCmdCopyBuffer(self.handle, source, target, 1, region)

    def fill(self, buffer: Any, offset: int, nbytes: int, word: int) -> None:
        """Fill with a 32-bit word; offset and size are multiples of 4."""
        binding().lib.vkCmdFillBuffer(self.handle, buffer, offset, nbytes, word)

    def reset_queries(self, pool: QueryPool) -> None:
        """Make all of a pool's timestamps writable again; comes before the first write_timestamp."""
        binding().lib.vkCmdResetQueryPool(self.handle, pool.handle, 0, pool.count)

    def write_timestamp(self, pool: QueryPool, index: int) -> None:
        """Write the time at which all commands before this one have finished."""
        bottom = 0x2000  # VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
        binding().lib.vkCmdWriteTimestamp(self.handle, bottom, pool.handle, index)

    @property
    def is_ended(self) -> bool:
        """Whether `end` has finished recording."""
        return bool(self._ended)

    def end(self) -> None:
        """Finish recording. Harmless a second time, as after an interrupt."""
        if not self._ended:
            call_into(self._ended, binding().lib.vkEndCommandBuffer, self.handle)
        check(self._ended[0], "vkEndCommandBuffer")

    def reset(self) -> None:
        """Forget what was recorded. Must not be in flight."""
        check(binding().lib.vkResetCommandBuffer(self.handle, 0), "vkResetCommandBuffer")
        self._bound = None
        self._ended.clear()

    def destroy(self) -> None:
        """Free the command buffer. Must not be in flight. Safe to call twice, also after an interrupt."""
        if self.handle is not None:
            self.handle = None
            binding().lib.vkFreeCommandBuffers(self._device.handle, self._pool, 1, self.pointer)


class PreparedSubmit:
    """Finished command buffers, ready to be submitted any number of times; one fence signals when all are done."""

    __slots__ = ("commands", "count", "infos")

    def __init__(self, commands: Sequence[CommandBuffer]) -> None:
        lib, ffi, _, _ = binding()
        self.commands = tuple(commands)  # kept: the structs point to their handles
        self.count = len(self.commands)
        # One VkSubmitInfo each, so that no single piece of work runs longer than it did when it was recorded.
        self.infos = ffi.new("VkSubmitInfo[]", self.count)
        for info, each in zip(self.infos, self.commands, strict=True):
            info.sType = lib.VK_STRUCTURE_TYPE_SUBMIT_INFO
            info.commandBufferCount, info.pCommandBuffers = 1, each.pointer


class Fence:
    """Signalled when a submit has finished."""

    __slots__ = ("_device", "_pointer", "handle")

    def __init__(self, device: Device) -> None:
        lib, ffi, _, null = binding()
        self._device = device
        out = ffi.new("VkFence*")
        check(lib.vkCreateFence(device.handle, struct("VkFenceCreateInfo"), null, out), "vkCreateFence")
        self._pointer = out
        self.handle: Any = out[0]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds (None: for ever); whether it is signalled. Raises DeviceLostError."""
        lib = binding().lib
        device, pointer = self._device.handle, self._pointer
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            slice_ns = FENCE_SLICE_NS
            if deadline is not None:
                slice_ns = max(0, min(slice_ns, int((deadline - time.monotonic()) * 1e9)))
            result = lib.vkWaitForFences(device, 1, pointer, 1, slice_ns)
            check(result, "vkWaitForFences")
            if result == 0:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def is_signaled(self) -> bool:
        """Whether it is signalled now. Raises DeviceLostError."""
        result = binding().lib.vkGetFenceStatus(self._device.handle, self.handle)
        check(result, "vkGetFenceStatus")
        return result == 0

    def reset(self) -> None:
        """Unsignal, for the next submit."""
        check(binding().lib.vkResetFences(self._device.handle, 1, self._pointer), "vkResetFences")

    def destroy(self) -> None:
        """Destroy the fence. Must not be in flight. Safe to call twice, also after an interrupt."""
        lib, _, _, null = binding()
        handle, self.handle = self.handle, None
        if handle is not None:
            self._device.live.discard(self)
            lib.vkDestroyFence(self._device.handle, handle, null)


class QueryPool:
    """A pool of `count` timestamps."""

    __slots__ = ("_device", "count", "handle")

    def __init__(self, device: Device, count: int) -> None:
        lib, ffi, _, null = binding()
        self._device, self.count = device, count
        info = struct("VkQueryPoolCreateInfo", queryType=lib.VK_QUERY_TYPE_TIMESTAMP, queryCount=count)
        out = ffi.new("VkQueryPool*")
        check(lib.vkCreateQueryPool(device.handle, info, null, out), "vkCreateQueryPool")
        self.handle: Any = out[0]

    def seconds(self, count: int | None = None) -> list[float]:
        """The first `count` timestamps in seconds; the submit that wrote them must have finished."""
        lib, ffi, _, _ = binding()
        count = self.count if count is None else count
        values = ffi.new("uint64_t[]", max(1, count))
        flags = lib.VK_QUERY_RESULT_64_BIT | lib.VK_QUERY_RESULT_WAIT_BIT
        result = lib.vkGetQueryPoolResults(self._device.handle, self.handle, 0, count, 8 * count, values, 8, flags)
        check(result, "vkGetQueryPoolResults")
        physical = self._device.physical
        mask = (1 << physical.timestamp_bits) - 1
        return [(values[i] & mask) * physical.timestamp_period * 1e-9 for i in range(count)]

    def destroy(self) -> None:
        """Destroy the pool. Safe to call twice, also after an interrupt."""
        lib, _, _, null = binding()
        handle, self.handle = self.handle, None
        if handle is not None:
            lib.vkDestroyQueryPool(self._device.handle, handle, null)
