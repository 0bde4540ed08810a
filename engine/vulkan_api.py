"""What the engines use of Vulkan. Thin typed classes over raw cffi calls; PyVulkan itself is in `vulkan_binding`."""

from __future__ import annotations

from .physical_device import PhysicalDevice
from .vulkan_commands import CommandBuffer, Fence, PreparedSubmit, QueryPool
from .vulkan_device import Buffer, Device, Pipeline
from .vulkan_instance import Instance
from .vulkan_timeline import Timeline

__all__ = [
    "Buffer",
    "CommandBuffer",
    "Device",
    "Fence",
    "Instance",
    "PhysicalDevice",
    "Pipeline",
    "PreparedSubmit",
    "QueryPool",
    "Timeline",
]
