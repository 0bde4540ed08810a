"""VkInstance: devices as plain data, and the validation layers' messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .errors import VulkanUnavailableError
from .physical_device import MIN_API, PhysicalDevice
from .switches import apply_log_level, logger
from .vulkan_binding import binding, check, enumerate_all, string_array, struct, text
from .vulkan_describe import describe_device

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
API_1_2 = (1 << 22) | (2 << 12)


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
        return [describe_device(index, array[index], self.function) for index in range(count)]

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


def _names(function: Any, element: str, field: str, *args: Any) -> set[str]:
    array, count = enumerate_all(function, element, *args, call="vkEnumerateInstance...Properties")
    return {text(getattr(array[i], field)) for i in range(count)}


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
