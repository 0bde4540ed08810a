"""Timeline semaphores (Vulkan 1.2), and submits that wait for one and signal another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vulkan_binding import binding, check, link, struct
from .vulkan_commands import FENCE_SLICE_NS, CommandBuffer, Fence, call_into

if TYPE_CHECKING:
    from .vulkan_device import Device

Point = tuple["Timeline", int]  # a timeline and one of its values


class Timeline:
    """A counter on the device that submits raise and wait for. It starts at 0 and only grows."""

    __slots__ = ("_device", "_pointer", "handle")

    def __init__(self, device: Device) -> None:
        lib, ffi, _, null = binding()
        self._device = device
        kind = struct("VkSemaphoreTypeCreateInfo", semaphoreType=lib.VK_SEMAPHORE_TYPE_TIMELINE, initialValue=0)
        info = struct("VkSemaphoreCreateInfo")
        link(info, kind)
        out = ffi.new("VkSemaphore*")
        check(lib.vkCreateSemaphore(device.handle, info, null, out), "vkCreateSemaphore")
        self._pointer = out
        self.handle: Any = out[0]

    def value(self) -> int:
        """What it has reached. Raises DeviceLostError."""
        lib, ffi, _, _ = binding()
        out = ffi.new("uint64_t*")
        check(lib.vkGetSemaphoreCounterValue(self._device.handle, self.handle, out), "vkGetSemaphoreCounterValue")
        return int(out[0])

    def wait(self, value: int) -> None:
        """Block until it has reached a value that a submit will signal. Raises DeviceLostError."""
        lib, ffi, _, _ = binding()
        values = ffi.new("uint64_t*", value)
        info = struct("VkSemaphoreWaitInfo", semaphoreCount=1, pSemaphores=self._pointer, pValues=values)
        while True:  # in slices, so that Ctrl-C is seen
            result = lib.vkWaitSemaphores(self._device.handle, info, FENCE_SLICE_NS)
            check(result, "vkWaitSemaphores")
            if result == 0:
                return

    def destroy(self) -> None:
        """Destroy it. No submit in flight may use it. Safe to call twice, also after an interrupt."""
        lib, _, _, null = binding()
        handle, self.handle = self.handle, None
        if handle is not None:
            lib.vkDestroySemaphore(self._device.handle, handle, null)


def submit_ordered(
    queue: Any,
    commands: CommandBuffer,
    fence: Fence | None,
    wait: Point | None,
    signal: Point | None,
    sent: list[int],
) -> None:
    """Hand a command buffer to a queue: it starts once `wait` is reached, and raises `signal` when it has finished.

    Both cover all memory accesses. sent: as for `Device.submit`. Raises DeviceLostError, OutOfDeviceMemoryError.
    """
    lib, ffi, _, null = binding()
    points = struct("VkTimelineSemaphoreSubmitInfo")
    info = struct("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=commands.pointer)
    link(info, points)
    keep: list[Any] = [points]
    if wait is not None:
        semaphores, values = ffi.new("VkSemaphore[]", [wait[0].handle]), ffi.new("uint64_t[]", [wait[1]])
        stages = ffi.new("VkPipelineStageFlags[]", [lib.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT])
        info.waitSemaphoreCount, info.pWaitSemaphores, info.pWaitDstStageMask = 1, semaphores, stages
        points.waitSemaphoreValueCount, points.pWaitSemaphoreValues = 1, values
        keep += [semaphores, values, stages]
    if signal is not None:
        semaphores, values = ffi.new("VkSemaphore[]", [signal[0].handle]), ffi.new("uint64_t[]", [signal[1]])
        info.signalSemaphoreCount, info.pSignalSemaphores = 1, semaphores
        points.signalSemaphoreValueCount, points.pSignalSemaphoreValues = 1, values
        keep += [semaphores, values]
    check(call_into(sent, lib.vkQueueSubmit, queue, 1, info, null if fence is None else fence.handle), "vkQueueSubmit")
    del keep
