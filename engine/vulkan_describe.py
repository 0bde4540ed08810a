"""A VkPhysicalDevice turned into plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .physical_device import (
    TYPES,
    MatrixShape,
    MemoryHeap,
    MemoryType,
    PhysicalDevice,
    QueueFamily,
    compute_family,
    transfer_queue,
)
from .vulkan_binding import binding, check, enumerate_all, link, struct, text

API_1_2 = (1 << 22) | (2 << 12)
# Feature names by the struct that carries them; only these are asked about and enabled.
FEATURES_1_2 = ("bufferDeviceAddress", "scalarBlockLayout", "shaderFloat16", "shaderInt8", "subgroupBroadcastDynamicId",
                "hostQueryReset", "timelineSemaphore", "vulkanMemoryModel", "vulkanMemoryModelDeviceScope")  # fmt: skip
FEATURES_SUBGROUP = ("subgroupSizeControl", "computeFullSubgroups")
FEATURES_MATRIX = ("cooperativeMatrix",)
MATRIX_EXTENSION = "VK_KHR_cooperative_matrix"
FEATURES_BFLOAT = ("shaderBFloat16Type", "shaderBFloat16CooperativeMatrix")
BFLOAT_EXTENSION = "VK_KHR_shader_bfloat16"
_COMPONENT_TYPE_BFLOAT16 = 1000141000  # VK_COMPONENT_TYPE_BFLOAT16_KHR, which PyVulkan 1.3.275 does not name
FEATURES_BASE = ("shaderInt64", "shaderFloat64", "shaderInt16")


def describe_device(index: int, handle: Any, function: Callable[[str], Any]) -> PhysicalDevice:
    """Ask a VkPhysicalDevice everything vkfold wants to know. function: gives an extension's functions by name."""
    lib, ffi, _, null = binding()
    array, count = enumerate_all(
        lib.vkEnumerateDeviceExtensionProperties,
        "VkExtensionProperties",
        handle,
        null,
        call="vkEnumerateDeviceExtensionProperties",
    )
    extensions = frozenset(text(array[i].extensionName) for i in range(count))
    base = ffi.new("VkPhysicalDeviceProperties*")
    lib.vkGetPhysicalDeviceProperties(handle, base)
    version = base.apiVersion
    modern = version >= API_1_2
    control = modern and "VK_EXT_subgroup_size_control" in extensions
    matrices = modern and MATRIX_EXTENSION in extensions
    bfloats = modern and BFLOAT_EXTENSION in extensions
    maintenance4 = modern and "VK_KHR_maintenance4" in extensions
    v11, driver = struct("VkPhysicalDeviceVulkan11Properties"), struct("VkPhysicalDeviceDriverProperties")
    floats = struct("VkPhysicalDeviceFloatControlsProperties")
    sizes = struct("VkPhysicalDeviceSubgroupSizeControlProperties")
    buffers = struct("VkPhysicalDeviceMaintenance4Properties")
    properties = struct("VkPhysicalDeviceProperties2")
    if modern:
        link(properties, v11, driver, floats, sizes if control else None, buffers if maintenance4 else None)
    lib.vkGetPhysicalDeviceProperties2(handle, properties)
    f12, fcontrol = (
        struct("VkPhysicalDeviceVulkan12Features"),
        struct("VkPhysicalDeviceSubgroupSizeControlFeatures"),
    )
    fmatrix = struct("VkPhysicalDeviceCooperativeMatrixFeaturesKHR")
    fbfloat = struct("VkPhysicalDeviceShaderBfloat16FeaturesKHR")
    features = struct("VkPhysicalDeviceFeatures2")
    if modern:
        link(
            features,
            f12,
            fcontrol if control else None,
            fmatrix if matrices else None,
            fbfloat if bfloats else None,
        )
    lib.vkGetPhysicalDeviceFeatures2(handle, features)
    names = [name for name in FEATURES_1_2 if getattr(f12, name)]
    names += [name for name in FEATURES_SUBGROUP if getattr(fcontrol, name)]
    names += [name for name in FEATURES_MATRIX if getattr(fmatrix, name)]
    names += [name for name in FEATURES_BFLOAT if getattr(fbfloat, name)]
    names += [name for name in FEATURES_BASE if getattr(features.features, name)]
    heaps, types = _memory(handle, "VK_EXT_memory_budget" in extensions)
    queues = _queue_families(handle)
    family = compute_family(queues)
    can_order = "timelineSemaphore" in names
    limits, named = base.limits, _driver_name(driver)
    allocation = v11.maxMemoryAllocationSize if modern else 2**30
    if maintenance4 and buffers.maxBufferSize:
        allocation = min(allocation, buffers.maxBufferSize)
    in_compute = v11.subgroupSupportedStages & lib.VK_SHADER_STAGE_COMPUTE_BIT
    can_require = control and fcontrol.subgroupSizeControl
    can_require = can_require and sizes.requiredSubgroupSizeStages & lib.VK_SHADER_STAGE_COMPUTE_BIT
    return PhysicalDevice(
        index=index,
        name=text(base.deviceName),
        type=TYPES[base.deviceType] if base.deviceType < len(TYPES) else "other",
        uuid=bytes(v11.deviceUUID).hex(),
        driver_name=named,
        driver_info=text(driver.driverInfo),
        driver_version=base.driverVersion,
        vendor_id=base.vendorID,
        device_id=base.deviceID,
        cache_uuid=bytes(base.pipelineCacheUUID).hex(),
        api_version=(version >> 22 & 0x7F, version >> 12 & 0x3FF, version & 0xFFF),
        subgroup_size=v11.subgroupSize,
        min_subgroup_size=sizes.minSubgroupSize if can_require else 0,
        max_subgroup_size=sizes.maxSubgroupSize if can_require else 0,
        subgroup_operations=v11.subgroupSupportedOperations if in_compute else 0,
        max_workgroup_invocations=min(limits.maxComputeWorkGroupInvocations, limits.maxComputeWorkGroupSize[0]),
        max_shared_bytes=limits.maxComputeSharedMemorySize,
        max_push_bytes=limits.maxPushConstantsSize,
        max_allocation_bytes=allocation,
        # SwiftShader keeps them anyway, and computes exp of a constant wrongly when it is told to.
        preserves_special_values=bool(floats.shaderSignedZeroInfNanPreserveFloat32) and named != "SwiftShader",
        timestamp_period=limits.timestampPeriod,
        compute_family=family,
        timestamp_bits=queues[family].timestamp_bits if family is not None else 0,
        transfer_queue=transfer_queue(queues, family) if can_order else None,
        features=frozenset(names),
        extensions=extensions,
        matrix_shapes=_matrix_shapes(handle, function) if "cooperativeMatrix" in names else (),
        heaps=heaps,
        memory_types=types,
        handle=handle,
    )


def _matrix_shapes(handle: Any, function: Callable[[str], Any]) -> tuple[MatrixShape, ...]:
    """Cooperative matrices that a subgroup multiplies, of float16 or bfloat16 operands and float32 sums."""
    lib, ffi, _, null = binding()
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    ask, count = function(name), ffi.new("uint32_t*")
    check(ask(handle, count, null), name)
    made = struct("VkCooperativeMatrixPropertiesKHR")
    array = ffi.new("VkCooperativeMatrixPropertiesKHR[]", max(1, count[0]))
    for i in range(count[0]):
        array[i].sType = made.sType
    check(ask(handle, count, array), name)
    single = lib.VK_COMPONENT_TYPE_FLOAT32_KHR
    precisions = {lib.VK_COMPONENT_TYPE_FLOAT16_KHR: "float16", _COMPONENT_TYPE_BFLOAT16: "bfloat16"}
    return tuple(
        MatrixShape(precisions[p.AType], p.MSize, p.NSize, p.KSize)
        for p in (array[i] for i in range(count[0]))
        if p.AType == p.BType
        and p.AType in precisions
        and p.CType == p.ResultType == single
        and p.scope == lib.VK_SCOPE_SUBGROUP_KHR
    )


def _driver_name(driver: Any) -> str:
    lib = binding().lib
    known = {lib.VK_DRIVER_ID_MESA_LLVMPIPE: "llvmpipe", lib.VK_DRIVER_ID_GOOGLE_SWIFTSHADER: "SwiftShader"}
    return known.get(driver.driverID) or text(driver.driverName)


def _memory(handle: Any, has_budget: bool) -> tuple[tuple[MemoryHeap, ...], tuple[MemoryType, ...]]:
    lib = binding().lib
    budget = struct("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
    memory = struct("VkPhysicalDeviceMemoryProperties2")
    if has_budget:
        link(memory, budget)
    lib.vkGetPhysicalDeviceMemoryProperties2(handle, memory)
    found = memory.memoryProperties
    heaps = tuple(
        MemoryHeap(
            heap.size,
            budget.heapBudget[i] if has_budget else 0,
            bool(heap.flags & 1),
            budget.heapUsage[i] if has_budget else 0,
        )
        for i, heap in ((i, found.memoryHeaps[i]) for i in range(found.memoryHeapCount))
    )
    types = tuple(
        MemoryType(found.memoryTypes[i].propertyFlags, found.memoryTypes[i].heapIndex)
        for i in range(found.memoryTypeCount)
    )
    return heaps, types


def heap_budgets(handle: Any) -> tuple[MemoryHeap, ...]:
    """The heaps with budgets and use as of now."""
    return _memory(handle, True)[0]


def _queue_families(handle: Any) -> tuple[QueueFamily, ...]:
    lib = binding().lib
    array, count = enumerate_all(
        lib.vkGetPhysicalDeviceQueueFamilyProperties,
        "VkQueueFamilyProperties",
        handle,
        call="vkGetPhysicalDeviceQueueFamilyProperties",
    )
    return tuple(
        QueueFamily(array[i].queueFlags, array[i].queueCount, array[i].timestampValidBits) for i in range(count)
    )
