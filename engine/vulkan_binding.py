"""The one file that imports PyVulkan: the loader's functions (`lib`), the cffi types (`ffi`), and results as errors.

Raw cffi calls are used throughout: PyVulkan's own wrappers cost nine times as much a call, and lose the value of
functions that return none of VkResult. Loading is lazy, so everything that needs no device works without a loader.
"""

from __future__ import annotations

import ctypes.util
import sys
from functools import lru_cache
from typing import Any, NamedTuple

from .errors import DeviceLostError, OutOfDeviceMemoryError, VulkanError, VulkanUnavailableError

# Structs that PyVulkan 1.3.275 does not have: VkStructureType, and the members behind pNext
_NEWER_STRUCTS = {
    "VkPhysicalDeviceShaderBfloat16FeaturesKHR": (
        1000141000,
        "VkBool32 shaderBFloat16Type, shaderBFloat16DotProduct, shaderBFloat16CooperativeMatrix;",
    )
}


class Binding(NamedTuple):
    """`lib`: Vulkan functions and enum values; `ffi`: cffi's types; both typed as Any because they are cffi objects."""

    lib: Any
    ffi: Any
    structure_types: dict[str, int]  # "VkBufferCreateInfo" without its underscores and case -> VkStructureType
    null: Any


def _install_hint() -> str:
    if sys.platform == "win32":
        return "update your GPU's driver: it brings vulkan-1.dll"
    if sys.platform == "darwin":
        return "install MoltenVK and the Vulkan loader: brew install molten-vk vulkan-loader"
    return (
        "install the Vulkan loader and a driver (Debian/Ubuntu: apt-get install libvulkan1 mesa-vulkan-drivers; "
        "Fedora: dnf install vulkan-loader mesa-vulkan-drivers; Arch: pacman -S vulkan-icd-loader vulkan-swrast)"
    )


@lru_cache(maxsize=1)
def binding() -> Binding:
    """The loaded binding. Raises VulkanUnavailableError where PyVulkan or the Vulkan loader is missing."""
    try:
        import vulkan
    except ImportError as error:
        raise VulkanUnavailableError(f"the Python package vulkan is missing ({error}): pip install vulkan") from error
    except OSError as error:
        found = ctypes.util.find_library("vulkan")
        where = f" (there is {found}, but it does not load)" if found else ""
        raise VulkanUnavailableError(f"no Vulkan loader was found{where}: {_install_hint()}") from error
    ffi = vulkan.ffi
    prefix = "VK_STRUCTURE_TYPE_"
    types = ffi.typeof("VkStructureType").relements
    table = {name[len(prefix) :].replace("_", ""): number for name, number in types.items() if name.startswith(prefix)}
    return Binding(vulkan.lib, ffi, table, ffi.NULL)


def struct(name: str, **fields: Any) -> Any:
    """A new Vulkan struct with sType filled in. What its pointers point to must be kept in variables by the caller
    until the call that reads it returns: cffi keeps nothing alive through a pointer field or a by-value copy.
    """
    _, ffi, table, _ = binding()
    number: int | None
    if name in _NEWER_STRUCTS:
        ffi, number = _newer(), _NEWER_STRUCTS[name][0]
    else:
        number = table.get(name[2:].upper())
    made = ffi.new(name + "*")
    if number is not None:
        made.sType = number
    for field, value in fields.items():
        setattr(made, field, value)
    return made


@lru_cache(maxsize=1)
def _newer() -> Any:
    """cffi types of _NEWER_STRUCTS."""
    import cffi

    ffi = cffi.FFI()
    ffi.cdef("typedef uint32_t VkBool32;")
    for name, (_, members) in _NEWER_STRUCTS.items():
        ffi.cdef(f"typedef struct {{ int32_t sType; void *pNext; {members} }} {name};")
    return ffi


def result_name(result: int) -> str:
    """A VkResult in words."""
    return binding().ffi.typeof("VkResult").elements.get(int(result), "unknown VkResult")


def check(result: int, call: str) -> None:
    """Raise the error for a negative VkResult: DeviceLostError, OutOfDeviceMemoryError or VulkanError."""
    if result >= 0:
        return
    result = int(result)
    name = result_name(result)
    if result == -4:
        raise DeviceLostError(
            call,
            result,
            name,
            "The driver reset the device: a crash in a kernel, or work that ran past its watchdog. Make a new engine; "
            "VKFOLD_DEBUG=1 shows invalid use",
        )
    if result in (-1, -2):
        raise OutOfDeviceMemoryError(call, result, name, "Use a smaller batch or --checkpoint-every 1")
    raise VulkanError(call, result, name)


def text(chars: Any) -> str:
    """A char array as str."""
    return binding().ffi.string(chars).decode("utf-8", "replace")


def enumerate_all(function: Any, element: str, *args: Any, call: str) -> tuple[Any, int]:
    """The two-call idiom: how many, then all. Returns the array (keep it: its elements are views) and its length."""
    _, ffi, _, null = binding()
    count = ffi.new("uint32_t*")
    while True:
        check(function(*args, count, null) or 0, call)
        array = ffi.new(element + "[]", max(1, count[0]))
        result = function(*args, count, array) or 0
        check(result, call)
        if result != 5:  # VK_INCOMPLETE: the list grew in between
            return array, count[0]


def link(head: Any, *links: Any) -> None:
    """Chain structs through pNext. The callers keep each link in a variable."""
    for link in links:
        if link is not None:
            head.pNext = link
            head = link


def string_array(names: list[str], keep: list[Any]) -> Any:
    """A char*[] of these names; what it points to goes into `keep`, which must outlive the call."""
    ffi = binding().ffi
    strings = [ffi.new("char[]", name.encode()) for name in names]
    array = ffi.new("char*[]", strings)
    keep += [*strings, array]
    return array
