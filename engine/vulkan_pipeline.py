"""Compute pipelines: SPIR-V, a local size, perhaps a required subgroup size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import VkfoldError
from .physical_device import PhysicalDevice
from .spirv import preserve_special_values
from .vulkan_binding import binding, check, struct

if TYPE_CHECKING:
    from .vulkan_device import Device

PUSH_BYTES = 128


class Pipeline:
    """A compute pipeline. layout is shared by all pipelines of the device."""

    __slots__ = ("handle", "layout", "local_size", "name", "subgroup_size")

    def __init__(self, handle: Any, layout: Any, name: str, local_size: int, subgroup_size: int | None) -> None:
        self.handle = handle
        self.layout = layout
        self.name = name
        self.local_size = local_size
        self.subgroup_size = subgroup_size

    def __repr__(self) -> str:
        return f"Pipeline({self.name}, {self.local_size} invocations)"


def make_pipeline(
    device: Device,
    cache: Any,
    spirv: bytes,
    specialized: Sequence[int],
    push_bytes: int,
    name: str,
    subgroup_size: int | None,
) -> Pipeline:
    """What `Device.create_pipeline` does, with the driver's pipeline cache given. specialized: constants by number."""
    lib, ffi, _, null = binding()
    local_size_x = specialized[0]
    if len(spirv) % 4 or spirv[:4] != b"\x03\x02\x23\x07":
        raise VkfoldError(f"kernel {name!r}: these {len(spirv)} bytes are not SPIR-V")
    if not 0 < local_size_x <= device.max_workgroup_invocations:
        raise VkfoldError(
            f"kernel {name!r}: {local_size_x} invocations a workgroup, "
            f"{device.physical.name} allows 1 to {device.max_workgroup_invocations}"
        )
    if push_bytes > PUSH_BYTES:
        raise VkfoldError(f"kernel {name!r}: {push_bytes} bytes of push constants, at most {PUSH_BYTES} are portable")
    if device.physical.preserves_special_values:
        spirv = preserve_special_values(spirv)
    # Each object that a struct points to stays in a local variable until the pipeline exists: a struct nested by
    # value (info.stage) is copied, and the copy keeps nothing alive.
    code = ffi.from_buffer("uint32_t[]", spirv)
    module_info = struct("VkShaderModuleCreateInfo", codeSize=len(spirv), pCode=code)
    module = ffi.new("VkShaderModule*")
    check(lib.vkCreateShaderModule(device.handle, module_info, null, module), f"vkCreateShaderModule of {name}")
    try:
        values = ffi.new("uint32_t[]", list(specialized))
        entries = ffi.new("VkSpecializationMapEntry[]", len(specialized))
        for i, entry in enumerate(entries):
            entry.constantID, entry.offset, entry.size = i, 4 * i, 4
        constants = ffi.new("VkSpecializationInfo*")
        constants.mapEntryCount, constants.pMapEntries = len(specialized), entries
        constants.dataSize, constants.pData = 4 * len(specialized), values
        entry_point = ffi.new("char[]", b"main")
        required = _subgroup_requirement(device.physical, name, subgroup_size)
        flags = 0
        whole = required is not None and local_size_x % required.requiredSubgroupSize == 0
        if whole and "computeFullSubgroups" in device.physical.features:
            flags = lib.VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT
        info = struct("VkComputePipelineCreateInfo", layout=device.pipeline_layout)
        stage = struct(
            "VkPipelineShaderStageCreateInfo",
            pNext=null if required is None else required,
            flags=flags,
            stage=lib.VK_SHADER_STAGE_COMPUTE_BIT,
            module=module[0],
            pName=entry_point,
            pSpecializationInfo=constants,
        )
        info.stage = stage[0]
        out = ffi.new("VkPipeline*")
        result = lib.vkCreateComputePipelines(device.handle, cache, 1, info, null, out)
        check(result, f"vkCreateComputePipelines of {name}")
        del values, entries, constants, entry_point, required, stage, code
    finally:
        lib.vkDestroyShaderModule(device.handle, module[0], null)
    return Pipeline(out[0], device.pipeline_layout, name, local_size_x, subgroup_size)


def _subgroup_requirement(physical: PhysicalDevice, name: str, size: int | None) -> Any:
    if size is None:
        return None
    if physical.max_subgroup_size and physical.min_subgroup_size <= size <= physical.max_subgroup_size:
        return struct("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=size)
    if size != physical.subgroup_size:
        raise VkfoldError(f"kernel {name!r} needs subgroups of {size}, {physical.name} has {physical.subgroup_size}")
    return None
