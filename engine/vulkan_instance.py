"""VkInstance: devices as plain data, and the validation layers' messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import VulkanUnavailableError
from .physical_device import MIN_API, TYPES, MemoryHeap, MemoryType, PhysicalDevice
from .switches import apply_log_level, logger
from .vulkan_binding import binding, check, enumerate_all, struct, text

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
API_1_2 = (1 << 22) | (2 << 12)
# Feature names by the struct that carries them; only these are asked about and enabled.
FEATURES_1_2 = ("bufferDeviceAddress", "scalarBlockLayout", "shaderFloat16", "shaderInt8", "subgroupBroadcastDynamicId",
                "hostQueryReset", "vulkanMemoryModel", "vulkanMemoryModelDeviceScope")  # fmt: skip
FEATURES_SUBGROUP = ("subgroupSizeControl", "computeFullSubgroups")
FEATURES_BASE = ("shaderInt64", "shaderFloat64", "shaderInt16")


class Instance:
    """A VkInstance for Vulkan 1.2.

    validation: load the validation layers, with thread-safety checks on and no limit on repeats; what they say is
    collected in `messages` (list of str).

    Raises VulkanUnavailableError without a loader, without Vulkan 1.2, or without the layers when they are asked for.
    """

    def __init__(self, validation: bool = False) -> None:
        apply_log_level()
        self.handle: Any = None
        self.validation = validation
        self.messages: list[str] = []
        self._messenger: Any = None
        lib, ffi, _, null = binding()
        version = ffi.new("uint32_t*")
        check(lib.vkEnumerateInstanceVersion(version), "vkEnumerateInstanceVersion")
        if version[0] < API_1_2:
            raise VulkanUnavailableError(
                f"the Vulkan loader is version {version[0] >> 22}.{version[0] >> 12 & 0x3FF}, vkfold needs "
                f"{MIN_API[0]}.{MIN_API[1]}: update the loader and the driver"
            )
        offered = _names(lib.vkEnumerateInstanceExtensionProperties, "VkExtensionProperties", "extensionName", null)
        extensions, flags = [], 0
        if "VK_KHR_portability_enumeration" in offered:
            extensions.append("VK_KHR_portability_enumeration")
            flags |= lib.VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR
        layers = []
        keep: list[Any] = []  # everything the create info points to, until the call has returned
        chain = null
        if validation:
            self._require_layer()
            layers.append(VALIDATION_LAYER)
            extensions.append("VK_EXT_debug_utils")
            chain = self._validation_chain(extensions, keep)
        app_name = ffi.new("char[]", b"vkfold")
        app = struct("VkApplicationInfo", pApplicationName=app_name, pEngineName=app_name, apiVersion=API_1_2)
        layer_array, extension_array = string_array(layers, keep), string_array(extensions, keep)
        info = struct(
            "VkInstanceCreateInfo",
            pNext=chain,
            flags=flags,
            pApplicationInfo=app,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=layer_array,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extension_array,
        )
        out = ffi.new("VkInstance*")
        with _layer_environment() if validation else _nothing():
            result = lib.vkCreateInstance(info, null, out)
        if result == lib.VK_ERROR_INCOMPATIBLE_DRIVER:
            from .device_choice import DRIVER_HINT

            raise VulkanUnavailableError(f"the Vulkan loader works but found no driver: {DRIVER_HINT}")
        check(result, "vkCreateInstance")
        del app, info, layer_array, extension_array
        self.handle = out[0]
        if validation:
            self._listen()

    # -- validation --------------------------------------------------------------------------------------------------
    @staticmethod
    def _require_layer() -> None:
        lib = binding().lib
        if VALIDATION_LAYER not in _names(lib.vkEnumerateInstanceLayerProperties, "VkLayerProperties", "layerName"):
            raise VulkanUnavailableError(
                f"VKFOLD_DEBUG asks for validation, and {VALIDATION_LAYER} is not installed "
                "(Debian/Ubuntu: apt-get install vulkan-validationlayers; elsewhere: the Vulkan SDK)"
            )

    def _validation_chain(self, extensions: list[str], keep: list[Any]) -> Any:
        lib, ffi, _, null = binding()
        layer = ffi.new("char[]", VALIDATION_LAYER.encode())
        offered = _names(lib.vkEnumerateInstanceExtensionProperties, "VkExtensionProperties", "extensionName", layer)
        # Naming what is disabled (nothing) replaces the layer's default list, which leaves thread safety off.
        features = struct("VkValidationFeaturesEXT")
        keep += [layer, features]
        if "VK_EXT_validation_features" in offered:
            extensions.append("VK_EXT_validation_features")
        if "VK_EXT_layer_settings" in offered:
            extensions.append("VK_EXT_layer_settings")
            settings = ffi.new("VkLayerSettingEXT[2]")
            for entry, (name, kind) in zip(
                settings,
                (
                    (b"enable_message_limit", lib.VK_LAYER_SETTING_TYPE_BOOL32_EXT),
                    (b"thread_safety", lib.VK_LAYER_SETTING_TYPE_BOOL32_EXT),
                ),
                strict=True,
            ):
                text_, value = ffi.new("char[]", name), ffi.new("VkBool32*", name == b"thread_safety")
                entry.pLayerName, entry.pSettingName, entry.type = layer, text_, kind
                entry.valueCount, entry.pValues = 1, value
                keep += [text_, value]
            info = struct("VkLayerSettingsCreateInfoEXT", settingCount=len(settings), pSettings=settings)
            keep += [settings, info]
            features.pNext = info
        return features if "VK_EXT_validation_features" in offered else features.pNext or null

    def _listen(self) -> None:
        lib, ffi, _, null = binding()
        messages = self.messages

        def receive(severity: int, _types: int, data: Any, _user: Any) -> int:
            message = text(data.pMessage)
            messages.append(message)
            logger.debug("validation (severity %#x): %s", severity, message)
            return 0

        self._callback = ffi.callback("PFN_vkDebugUtilsMessengerCallbackEXT", receive, error=0)
        info = struct(
            "VkDebugUtilsMessengerCreateInfoEXT",
            messageSeverity=lib.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
            | lib.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
            messageType=lib.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT,
            pfnUserCallback=self._callback,
        )
        out = ffi.new("VkDebugUtilsMessengerEXT*")
        create = self.function("vkCreateDebugUtilsMessengerEXT")
        check(create(self.handle, info, null, out), "vkCreateDebugUtilsMessengerEXT")
        self._messenger = out[0]

    def function(self, name: str) -> Any:
        """An extension's function of this instance."""
        lib, ffi, _, null = binding()
        address = lib.vkGetInstanceProcAddr(self.handle, name.encode())
        if address == null:
            raise VulkanUnavailableError(f"the Vulkan loader does not offer {name}: update it")
        return ffi.cast("PFN_" + name, address)

    # -- devices -----------------------------------------------------------------------------------------------------
    def physical_devices(self) -> list[PhysicalDevice]:
        """All devices in the loader's order."""
        lib = binding().lib
        array, count = enumerate_all(
            lib.vkEnumeratePhysicalDevices, "VkPhysicalDevice", self.handle, call="vkEnumeratePhysicalDevices"
        )
        return [describe_device(index, array[index]) for index in range(count)]

    def destroy(self) -> None:
        """Destroy the instance; devices must be gone. Safe to call twice."""
        if self.handle is None:
            return
        lib, _, _, null = binding()
        if self._messenger is not None:
            self.function("vkDestroyDebugUtilsMessengerEXT")(self.handle, self._messenger, null)
            self._messenger = None
        lib.vkDestroyInstance(self.handle, null)
        self.handle = None


def describe_device(index: int, handle: Any) -> PhysicalDevice:
    """Ask a VkPhysicalDevice everything vkfold wants to know."""
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
    maintenance4 = modern and "VK_KHR_maintenance4" in extensions
    v11, driver = struct("VkPhysicalDeviceVulkan11Properties"), struct("VkPhysicalDeviceDriverProperties")
    sizes = struct("VkPhysicalDeviceSubgroupSizeControlProperties")
    buffers = struct("VkPhysicalDeviceMaintenance4Properties")
    properties = struct("VkPhysicalDeviceProperties2")
    if modern:
        link(properties, v11, driver, sizes if control else None, buffers if maintenance4 else None)
    lib.vkGetPhysicalDeviceProperties2(handle, properties)
    f12, fcontrol = (
        struct("VkPhysicalDeviceVulkan12Features"),
        struct("VkPhysicalDeviceSubgroupSizeControlFeatures"),
    )
    features = struct("VkPhysicalDeviceFeatures2")
    if modern:
        link(features, f12, fcontrol if control else None)
    lib.vkGetPhysicalDeviceFeatures2(handle, features)
    names = [name for name in FEATURES_1_2 if getattr(f12, name)]
    names += [name for name in FEATURES_SUBGROUP if getattr(fcontrol, name)]
    names += [name for name in FEATURES_BASE if getattr(features.features, name)]
    heaps, types = _memory(handle, "VK_EXT_memory_budget" in extensions)
    family, bits = _compute_family(handle)
    limits = base.limits
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
        driver_name=_driver_name(driver),
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
        timestamp_period=limits.timestampPeriod,
        compute_family=family,
        timestamp_bits=bits,
        features=frozenset(names),
        extensions=extensions,
        heaps=heaps,
        memory_types=types,
        handle=handle,
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
        MemoryHeap(heap.size, budget.heapBudget[i] if has_budget else 0, bool(heap.flags & 1))
        for i, heap in ((i, found.memoryHeaps[i]) for i in range(found.memoryHeapCount))
    )
    types = tuple(
        MemoryType(found.memoryTypes[i].propertyFlags, found.memoryTypes[i].heapIndex)
        for i in range(found.memoryTypeCount)
    )
    return heaps, types


def heap_budgets(handle: Any) -> tuple[MemoryHeap, ...]:
    """The heaps with their budgets as of now."""
    return _memory(handle, True)[0]


def _compute_family(handle: Any) -> tuple[int | None, int]:
    lib = binding().lib
    array, count = enumerate_all(
        lib.vkGetPhysicalDeviceQueueFamilyProperties,
        "VkQueueFamilyProperties",
        handle,
        call="vkGetPhysicalDeviceQueueFamilyProperties",
    )
    for index in range(count):
        if array[index].queueFlags & lib.VK_QUEUE_COMPUTE_BIT and array[index].queueCount:
            return index, array[index].timestampValidBits
    return None, 0


def link(head: Any, *links: Any) -> None:
    """Chain structs through pNext. The callers keep each link in a variable."""
    for link in links:
        if link is not None:
            head.pNext = link
            head = link


def _names(function: Any, element: str, field: str, *args: Any) -> set[str]:
    array, count = enumerate_all(function, element, *args, call="vkEnumerateInstance...Properties")
    return {text(getattr(array[i], field)) for i in range(count)}


def string_array(names: list[str], keep: list[Any]) -> Any:
    ffi = binding().ffi
    strings = [ffi.new("char[]", name.encode()) for name in names]
    array = ffi.new("char*[]", strings)
    keep += [*strings, array]
    return array


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _layer_environment() -> Iterator[None]:
    """Layers before 1.3.262 take the repeat limit from the environment only; a value set by the user stays."""
    name = "VK_LAYER_DUPLICATE_MESSAGE_LIMIT"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
