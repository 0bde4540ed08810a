"""torchvulkan: PyTorch's ops as Vulkan compute shaders. The same PyTorch code as on the CPU."""

from __future__ import annotations

import os

os.environ.setdefault("TORCHVULKAN_STRICT", "1")  # an op that would run on the CPU is an error

import torch_peer
import torchvulkan


class Library(torch_peer.Library):
    """See worker.Library."""

    version = torchvulkan.__version__

    def __init__(self) -> None:
        if not torchvulkan.is_available():
            raise RuntimeError("torchvulkan finds no usable device")
        super().__init__("vulkan", torchvulkan.get_device_name())

    def wait(self) -> None:
        """Until the device is done."""
        torchvulkan.synchronize()
