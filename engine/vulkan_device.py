"""VkDevice with a queue that computes, and one for copies where there is one: buffers, cached pipelines, submits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import host_memory, switches
from .errors import OutOfDeviceMemoryError, VkfoldError
from .physical_device import PhysicalDevice
from .pipeline_cache import load_cache, save_cache
from .vulkan_binding import binding, check, link, string_array, struct
from .vulkan_commands import CommandBuffer, Fence, PreparedSubmit, QueryPool, call_into
from .vulkan_describe import (
    BFLOAT_EXTENSION,
    FEATURES_1_2,
    FEATURES_BASE,
    FEATURES_BFLOAT,
    FEATURES_MATRIX,
    FEATURES_SUBGROUP,
    MATRIX_EXTENSION,
    heap_budgets,
)
from .vulkan_instance import Instance
from .vulkan_pipeline import PUSH_BYTES, Pipeline, make_pipeline
from .vulkan_timeline import Point, Timeline, submit_ordered

# Optional device extensions that are enabled where offered.
_EXTENSIONS = ("VK_KHR_portability_subset", "VK_EXT_memory_budget", "VK_EXT_subgroup_size_control")
_DEVICE_LOCAL, _HOST_VISIBLE, _COHERENT, _CACHED = 1, 2, 4, 8  # VkMemoryPropertyFlagBits


class Buffer:
    """A VkBuffer with memory of its own. address: on the device. mapping: writable memoryview, host-visible only."""

    __slots__ = ("address", "handle", "mapping", "memory", "memory_bytes", "nbytes")

    def __init__(self, handle: Any, memory: Any, nbytes: int, memory_bytes: int, address: int) -> None:
        self.handle = handle
        self.memory = memory
        self.nbytes = nbytes
        self.memory_bytes = memory_bytes
        self.address = address
        self.mapping: Any = None

    def __repr__(self) -> str:
        return f"Buffer({self.nbytes} bytes at {self.address:#x}{', mapped' if self.mapping is not None else ''})"


class Device:
    """A logical device with one compute queue. Not thread-safe: one thread at a time.

    subgroup_size, max_workgroup_invocations, is_cpu, driver_name ("llvmpipe", "SwiftShader", else the driver's own),
    timestamp_period (ns a tick), max_allocation_bytes (of one buffer), physical (all else), num_buffers, buffer_bytes.

    Raises VulkanError, OutOfDeviceMemoryError or DeviceLostError from its calls.
    """

    def __init__(self, instance: Instance, physical: PhysicalDevice) -> None:
        self.instance = instance
        self.physical = physical
        self.handle: Any = None
        self.subgroup_size = physical.subgroup_size
        self.max_workgroup_invocations = physical.max_workgroup_invocations
        self.is_cpu = physical.is_cpu
        self.driver_name = physical.driver_name
        self.timestamp_period = physical.timestamp_period
        self.max_allocation_bytes = physical.max_allocation_bytes
        self.num_buffers = 0
        self.buffer_bytes = 0
        self.live: set[Buffer | Fence] = set()  # what goes with the device at the latest
        self.num_pipelines_made = 0
        self._functions: dict[str, Any] = {}
        self.command_pool = self.transfer_pool = binding().null  # destroying null is allowed
        self.pipeline_layout = self._cache = binding().null
        self._make_device()
        try:
            self._make_shared_objects()
        except BaseException:
            self.destroy()
            raise

    def _make_device(self) -> None:
        lib, ffi, _, null = binding()
        physical = self.physical
        self.extensions = [name for name in _EXTENSIONS if name in physical.extensions]
        f12 = struct("VkPhysicalDeviceVulkan12Features")
        subgroup = struct("VkPhysicalDeviceSubgroupSizeControlFeatures")
        features = struct("VkPhysicalDeviceFeatures2")
        for name in FEATURES_1_2:
            setattr(f12, name, int(name in physical.features))
        for name in FEATURES_SUBGROUP:
            setattr(subgroup, name, int(name in physical.features))
        for name in FEATURES_BASE:
            setattr(features.features, name, int(name in physical.features))
        matrices = bfloats = None
        if physical.matrices:
            self.extensions.append(MATRIX_EXTENSION)
            matrices = struct("VkPhysicalDeviceCooperativeMatrixFeaturesKHR", **dict.fromkeys(FEATURES_MATRIX, 1))
        if any(shape.precision == "bfloat16" for shape in physical.matrices):
            self.extensions.append(BFLOAT_EXTENSION)
            bfloats = struct("VkPhysicalDeviceShaderBfloat16FeaturesKHR", **dict.fromkeys(FEATURES_BFLOAT, 1))
        link(features, f12, subgroup if "VK_EXT_subgroup_size_control" in self.extensions else None, matrices, bfloats)
        assert physical.compute_family is not None
        copies = self.transfer_queue = self._choose_transfer_queue()
        self.families = sorted({physical.compute_family, copies[0]} if copies else {physical.compute_family})
        priorities = ffi.new("float[]", [1.0, 1.0])
        queues = ffi.new("VkDeviceQueueCreateInfo[]", len(self.families))
        for info, family in zip(queues, self.families, strict=True):
            info.sType = ffi.cast("VkStructureType", lib.VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO)
            info.queueFamilyIndex, info.pQueuePriorities = family, priorities
            info.queueCount = 1 + copies[1] if copies and copies[0] == family else 1
        keep: list[Any] = []
        info = struct(
            "VkDeviceCreateInfo",
            pNext=features,
            queueCreateInfoCount=len(self.families),
            pQueueCreateInfos=queues,
            enabledExtensionCount=len(self.extensions),
            ppEnabledExtensionNames=string_array(self.extensions, keep),
        )
        out = ffi.new("VkDevice*")
        check(lib.vkCreateDevice(physical.handle, info, null, out), "vkCreateDevice")
        del f12, subgroup, matrices, bfloats, features, priorities, queues, keep
        self.handle = out[0]
        queue_out = ffi.new("VkQueue*")
        lib.vkGetDeviceQueue(self.handle, physical.compute_family, 0, queue_out)
        self.queue: Any = queue_out[0]
        if copies is not None:
            lib.vkGetDeviceQueue(self.handle, *copies, queue_out)
            self._copy_queue: Any = queue_out[0]

    def _choose_transfer_queue(self) -> tuple[int, int] | None:
        wish = switches.get("VKFOLD_TRANSFER_QUEUE")
        if wish == "shared" and "timelineSemaphore" in self.physical.features:
            assert self.physical.compute_family is not None
            return self.physical.compute_family, 0
        return self.physical.transfer_queue if wish == "auto" else None

    @property
    def has_transfer_queue(self) -> bool:
        """Whether copies can be submitted beside what is computed."""
        return self.transfer_queue is not None

    def _make_shared_objects(self) -> None:
        lib, ffi, _, null = binding()
        self._submit_call = self.function("vkQueueSubmit")
        self._submit_info = struct("VkSubmitInfo", commandBufferCount=1)
        self.command_pool = self._make_command_pool(self.physical.compute_family)
        if self.transfer_queue is not None:
            self.transfer_pool = self._make_command_pool(self.transfer_queue[0])
        push = ffi.new("VkPushConstantRange*")
        push.stageFlags, push.offset, push.size = lib.VK_SHADER_STAGE_COMPUTE_BIT, 0, PUSH_BYTES
        layout_info = struct("VkPipelineLayoutCreateInfo", pushConstantRangeCount=1, pPushConstantRanges=push)
        layout = ffi.new("VkPipelineLayout*")
        check(lib.vkCreatePipelineLayout(self.handle, layout_info, null, layout), "vkCreatePipelineLayout")
        self.pipeline_layout = layout[0]
        self._cache_file = switches.cache_folder() / "pipelines" / f"{self.physical.driver_key}.bin"
        data = load_cache(self._cache_file, self.physical)
        blob = ffi.from_buffer(data)
        cache_info = struct("VkPipelineCacheCreateInfo", initialDataSize=len(data), pInitialData=blob)
        cache = ffi.new("VkPipelineCache*")
        check(lib.vkCreatePipelineCache(self.handle, cache_info, null, cache), "vkCreatePipelineCache")
        self._cache = cache[0]
        self._cache_saved = data
        del push, blob

    def _make_command_pool(self, family: int | None) -> Any:
        lib, ffi, _, null = binding()
        reset = lib.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        info = struct("VkCommandPoolCreateInfo", flags=reset, queueFamilyIndex=family)
        pool = ffi.new("VkCommandPool*")
        check(lib.vkCreateCommandPool(self.handle, info, null, pool), "vkCreateCommandPool")
        return pool[0]

    def function(self, name: str) -> Any:
        """A device function past the loader's dispatch, for the hot path."""
        found = self._functions.get(name)
        if found is None:
            lib, ffi, _, null = binding()
            address = lib.vkGetDeviceProcAddr(self.handle, name.encode())
            if address == null:
                raise VkfoldError(f"the driver does not offer {name}")
            found = self._functions[name] = ffi.cast("PFN_" + name, address)
        return found

    # -- memory ------------------------------------------------------------------------------------------------------
    def memory_budget(self) -> int:
        """Bytes this process may use: VK_EXT_memory_budget, else the heap's size; on CPU devices the available RAM."""
        if self.is_cpu:
            return host_memory.available_bytes() + self.buffer_bytes
        has_budget = "VK_EXT_memory_budget" in self.extensions
        heaps = heap_budgets(self.physical.handle) if has_budget else self.physical.heaps
        local = [heap for heap in heaps if heap.device_local] or list(heaps)
        return max((heap.budget_bytes or heap.size_bytes for heap in local), default=0)

    def memory_used(self) -> int | None:
        """Bytes of device memory that the driver counts for this process; None where it does not tell.

        Software drivers that have the extension count the whole machine's memory: that tells nothing of this process.
        """
        if self.is_cpu or "VK_EXT_memory_budget" not in self.extensions:
            return None
        return sum(heap.used_bytes for heap in heap_budgets(self.physical.handle) if heap.device_local)

    def create_buffer(self, nbytes: int, host_visible: bool) -> Buffer:
        """A buffer for storage and copies, in memory of its own; contents undefined.

        host_visible: mapped for its whole life, coherent, cached where there is such memory. Raises
        OutOfDeviceMemoryError with the numbers, ValueError for a size that is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"a buffer of {nbytes} bytes: the size must be positive")
        lib, ffi, _, null = binding()
        if nbytes > self.max_allocation_bytes:  # invalid use of vkCreateBuffer, not an error it must report
            self._check_memory(lib.VK_ERROR_OUT_OF_DEVICE_MEMORY, "create_buffer", nbytes)
        usage = lib.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | lib.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        usage |= lib.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | lib.VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT
        out = ffi.new("VkBuffer*")
        info = struct("VkBufferCreateInfo", size=nbytes, usage=usage)
        if len(self.families) > 1:  # both queues use it at any time: no ownership to hand over
            families = ffi.new("uint32_t[]", self.families)
            info.sharingMode = lib.VK_SHARING_MODE_CONCURRENT
            info.queueFamilyIndexCount, info.pQueueFamilyIndices = len(self.families), families
        self._check_memory(lib.vkCreateBuffer(self.handle, info, null, out), "vkCreateBuffer", nbytes)
        handle, memory = out[0], None
        try:
            needs = ffi.new("VkMemoryRequirements*")
            lib.vkGetBufferMemoryRequirements(self.handle, handle, needs)
            flags = struct("VkMemoryAllocateFlagsInfo", flags=lib.VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT)
            allocate = struct(
                "VkMemoryAllocateInfo",
                pNext=flags,
                allocationSize=needs.size,
                memoryTypeIndex=self._memory_type(needs.memoryTypeBits, host_visible),
            )
            memory_out = ffi.new("VkDeviceMemory*")
            result = lib.vkAllocateMemory(self.handle, allocate, null, memory_out)
            self._check_memory(result, "vkAllocateMemory", nbytes)
            memory = memory_out[0]
            check(lib.vkBindBufferMemory(self.handle, handle, memory, 0), "vkBindBufferMemory")
            where = struct("VkBufferDeviceAddressInfo", buffer=handle)
            address = lib.vkGetBufferDeviceAddress(self.handle, where)
            buffer = Buffer(handle, memory, nbytes, needs.size, int(address))
            if host_visible:
                data = ffi.new("void**")
                check(lib.vkMapMemory(self.handle, memory, 0, nbytes, 0, data), "vkMapMemory")
                buffer.mapping = memoryview(ffi.buffer(data[0], nbytes)).cast("B")
        except BaseException:
            lib.vkDestroyBuffer(self.handle, handle, null)
            if memory is not None:
                lib.vkFreeMemory(self.handle, memory, null)
            raise
        self.live.add(buffer)
        self.num_buffers += 1
        self.buffer_bytes += buffer.memory_bytes
        return buffer

    def _memory_type(self, allowed: int, host_visible: bool) -> int:
        if host_visible:
            wishes = [(_HOST_VISIBLE | _COHERENT | _CACHED, 0), (_HOST_VISIBLE | _COHERENT, 0)]
        else:
            # Plain device memory first: the part that the host sees too can be a small window.
            wishes = [(_DEVICE_LOCAL, _HOST_VISIBLE), (_DEVICE_LOCAL, 0), (0, 0)]
        for wanted, unwanted in wishes:
            for index, kind in enumerate(self.physical.memory_types):
                if allowed >> index & 1 and kind.flags & wanted == wanted and not kind.flags & unwanted:
                    return index
        raise VkfoldError(f"{self.physical.name} offers no {'host-visible coherent ' * host_visible}memory for buffers")

    def _check_memory(self, result: int, call: str, nbytes: int) -> None:
        try:
            check(result, call)
        except OutOfDeviceMemoryError as error:
            budget = self.memory_budget()
            hint = (
                f"{nbytes} bytes were asked for with {self.buffer_bytes} already allocated in {self.num_buffers} "
                f"buffers; budget {budget}, largest single allocation {self.max_allocation_bytes}. "
                "A smaller batch or --checkpoint-every 1 needs less"
            )
            raise OutOfDeviceMemoryError(
                call,
                error.result,
                error.result_name,
                hint,
                requested_bytes=nbytes,
                allocated_bytes=self.buffer_bytes,
                budget_bytes=budget,
            ) from None

    def destroy_buffer(self, buffer: Buffer) -> None:
        """Destroy a buffer that no submit in flight uses. Its mapping dies with it. Safe to call twice, also after an
        interrupt."""
        lib, _, _, null = binding()
        handle, buffer.handle = buffer.handle, None
        if handle is None:
            return
        self.live.discard(buffer)
        self.num_buffers -= 1
        self.buffer_bytes -= buffer.memory_bytes
        memory, buffer.memory, buffer.address = buffer.memory, None, 0
        if buffer.mapping is not None:
            buffer.mapping = None
            lib.vkUnmapMemory(self.handle, memory)
        lib.vkDestroyBuffer(self.handle, handle, null)
        lib.vkFreeMemory(self.handle, memory, null)

    # -- pipelines ---------------------------------------------------------------------------------------------------
    def create_pipeline(
        self,
        spirv: bytes,
        local_size_x: int,
        push_bytes: int = PUSH_BYTES,
        name: str = "",
        subgroup_size_required: int | None = None,
        constants: Sequence[int] = (),
    ) -> Pipeline:
        """A compute pipeline from SPIR-V whose specialization constant 0 is the local size.

        subgroup_size_required: the size the kernel counts on; asked of the driver where it may vary. constants: values
        of the specialization constants 1, 2, ... Raises VkfoldError for sizes outside the device's limits, VulkanError
        when the driver refuses.
        """
        required = subgroup_size_required
        pipeline = make_pipeline(self, self._cache, spirv, (local_size_x, *constants), push_bytes, name, required)
        self.num_pipelines_made += 1
        return pipeline

    def destroy_pipeline(self, pipeline: Pipeline) -> None:
        """Destroy a pipeline that no submit in flight uses. Safe to call twice, also after an interrupt."""
        lib, _, _, null = binding()
        handle, pipeline.handle = pipeline.handle, None
        if handle is not None:
            lib.vkDestroyPipeline(self.handle, handle, null)

    def save_pipeline_cache(self) -> None:
        """Write the pipeline cache to disk if it grew; a folder that cannot be written is only logged."""
        lib, ffi, _, null = binding()
        if not self.num_pipelines_made:
            return
        size = ffi.new("size_t*")
        if lib.vkGetPipelineCacheData(self.handle, self._cache, size, null) or not size[0]:
            return
        data = ffi.new("char[]", size[0])
        if lib.vkGetPipelineCacheData(self.handle, self._cache, size, data):
            return
        blob = bytes(ffi.buffer(data, size[0]))
        if blob != self._cache_saved:
            save_cache(self._cache_file, blob)
            self._cache_saved = blob

    # -- commands ----------------------------------------------------------------------------------------------------
    def create_command_buffer(self, transfer: bool = False) -> CommandBuffer:
        """A new command buffer, of the compute queue or of the one for copies."""
        return CommandBuffer(self, transfer)

    def create_timeline(self) -> Timeline:
        """A new timeline at 0. Only where `has_transfer_queue`."""
        return Timeline(self)

    def create_fence(self) -> Fence:
        """A new unsignalled fence."""
        fence = Fence(self)
        self.live.add(fence)
        return fence

    def create_query_pool(self, count: int) -> QueryPool:
        """A pool of timestamps. Raises VkfoldError where the queue writes none."""
        if not self.physical.timestamp_bits:
            raise VkfoldError(f"the compute queue of {self.physical.name} writes no timestamps")
        return QueryPool(self, count)

    def submit(self, commands: CommandBuffer, fence: Fence, sent: list[int] | None = None) -> None:
        """Hand a finished command buffer to the queue. Raises DeviceLostError, OutOfDeviceMemoryError.

        sent: gets the driver's result with the call itself. After an interrupt it is [0] when the queue has the
        commands, and something else when it has not.
        """
        info = self._submit_info
        info.pCommandBuffers = commands.pointer
        sent = [] if sent is None else sent
        check(call_into(sent, self._submit_call, self.queue, 1, info, fence.handle), "vkQueueSubmit")

    def submit_compute(
        self, commands: CommandBuffer, fence: Fence, wait: Point | None, signal: Point, sent: list[int]
    ) -> None:
        """`submit`, behind a value of a timeline, and with a value that it raises another to."""
        submit_ordered(self.queue, commands, fence, wait, signal, sent)

    def submit_copies(self, commands: CommandBuffer, wait: Point, signal: Point, sent: list[int]) -> None:
        """The same on the queue for copies."""
        submit_ordered(self._copy_queue, commands, None, wait, signal, sent)

    def submit_prepared(self, prepared: PreparedSubmit, fence: Fence, sent: list[int]) -> None:
        """Hand several command buffers to the queue, in order, one after another. As `submit`."""
        count, infos = prepared.count, prepared.infos
        check(call_into(sent, self._submit_call, self.queue, count, infos, fence.handle), "vkQueueSubmit")

    def wait_idle(self) -> None:
        """Wait for all queues. Raises nothing: an error (device lost) must not keep the caller from letting go."""
        binding().lib.vkDeviceWaitIdle(self.handle)

    def destroy(self) -> None:
        """Save the pipeline cache and destroy the device, whose pipelines are gone, with the buffers and fences that
        nobody destroyed. Safe to call twice."""
        if self.handle is None:
            return
        lib, _, _, null = binding()
        self.wait_idle()
        for thing in list(self.live):
            if isinstance(thing, Buffer):
                self.destroy_buffer(thing)
            else:
                thing.destroy()
        self.save_pipeline_cache()
        lib.vkDestroyPipelineCache(self.handle, self._cache, null)
        lib.vkDestroyPipelineLayout(self.handle, self.pipeline_layout, null)
        lib.vkDestroyCommandPool(self.handle, self.command_pool, null)
        lib.vkDestroyCommandPool(self.handle, self.transfer_pool, null)
        lib.vkDestroyDevice(self.handle, null)
        self.handle = None
