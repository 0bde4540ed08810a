"""What the choice of a kernel variant looks at of a device, whatever the family."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from .physical_device import MatrixShape, PhysicalDevice

if TYPE_CHECKING:
    from .recorder import Recorder

# Fragments of cooperative matrices that there are kernels for, (m, n, k) by subgroup size: GPUs', and Mesa llvmpipe's
FRAGMENTS = {8: (8, 8, 8), 32: (16, 16, 16), 64: (16, 16, 16)}


class Capabilities(NamedTuple):
    """What the choice looks at. driver: "llvmpipe", "SwiftShader" or another; driver_major: its version.

    parallel: subgroups the device works on at a time, about. matrices: cooperative matrices that it has and there are
    kernels for. invocations, shared_bytes: the most of a workgroup.
    """

    subgroup_size: int
    is_cpu: bool
    driver: str
    driver_major: int
    parallel: int = 1024
    matrices: tuple[MatrixShape, ...] = ()
    invocations: int = 256
    shared_bytes: int = 32768

    @classmethod
    def of(cls, gpu: Recorder) -> Capabilities:
        """Of the device that is being recorded for."""
        parallel = _cpus() if gpu.is_cpu else 1024
        physical, size = gpu.device.physical, gpu.subgroup_size
        version = major_version(physical.driver_info)
        limits = physical.max_workgroup_invocations, physical.max_shared_bytes
        return cls(size, gpu.is_cpu, gpu.driver, version, parallel, usable_matrices(physical, size), *limits)


def usable_matrices(physical: PhysicalDevice, subgroup_size: int) -> tuple[MatrixShape, ...]:
    """The cooperative matrices of a device that there are kernels for."""
    return tuple(dict.fromkeys(s for s in physical.matrices if s[1:] == FRAGMENTS.get(subgroup_size)))


@cache
def major_version(driver_info: str) -> int:
    """The first number in what a driver says about itself, 0 without one."""
    found = re.search(r"\d+", driver_info)  # "Mesa 22.3.6 (LLVM 15.0.6)"; lavapipe's own driverVersion is always 1
    return int(found.group()) if found else 0


@cache
def _cpus() -> int:
    return os.cpu_count() or 1
