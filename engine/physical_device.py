"""What a Vulkan device says about itself, as plain data, and what vkfold needs of one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MIN_API = (1, 2)
TYPES = ("other", "integrated", "discrete", "virtual", "cpu")  # VkPhysicalDeviceType 0..4
_GRAPHICS, _COMPUTE, _TRANSFER, _VIDEO = 0x1, 0x2, 0x4, 0x60  # VkQueueFlagBits
_CAN_COPY = _GRAPHICS | _COMPUTE | _TRANSFER  # the first two imply the third
# VkSubgroupFeatureFlagBits that the kernels use
SUBGROUP_OPERATIONS = {0x1: "basic", 0x2: "vote", 0x4: "arithmetic", 0x8: "ballot", 0x10: "shuffle"}


@dataclass(frozen=True)
class MemoryHeap:
    """One heap: its size, what VK_EXT_memory_budget allows this process (0: not known), whether it is the device's.

    used_bytes: what the extension says this process uses of it.
    """

    size_bytes: int
    budget_bytes: int
    device_local: bool
    used_bytes: int = 0


@dataclass(frozen=True)
class MemoryType:
    """One memory type: VkMemoryPropertyFlags and the heap it lives in."""

    flags: int
    heap: int


class MatrixShape(NamedTuple):
    """Cooperative matrices that a subgroup multiplies: [m, k] x [k, n], operands of a precision and float32 sums."""

    precision: str  # "float16" or "bfloat16"
    m: int
    n: int
    k: int


# What a kernel with operands of a precision declares beside cooperative matrices
_MATRIX_FEATURES = {
    "float16": {"shaderFloat16"},
    "bfloat16": {"shaderBFloat16Type", "shaderBFloat16CooperativeMatrix"},
}


class QueueFamily(NamedTuple):
    """Queues of one kind: VkQueueFlags, how many there are, and valid bits of their timestamps."""

    flags: int
    num_queues: int
    timestamp_bits: int = 0


def compute_family(families: Sequence[QueueFamily]) -> int | None:
    """The first family that computes; None where there is none."""
    return next((i for i, family in enumerate(families) if family.flags & _COMPUTE and family.num_queues), None)


def transfer_queue(families: Sequence[QueueFamily], compute: int | None) -> tuple[int, int] | None:
    """(family, index) of the best queue for copies beside the first one of the family that computes, or None.

    A family that only copies stands for copy engines that do nothing else; then any other family without graphics,
    then a second queue of the same family, then any.
    """
    if compute is None:
        return None
    others = [i for i, family in enumerate(families) if i != compute and family.num_queues and family.flags & _CAN_COPY]
    for excluded in (_GRAPHICS | _COMPUTE | _VIDEO, _GRAPHICS | _VIDEO):
        for i in others:
            if not families[i].flags & excluded:
                return i, 0
    if families[compute].num_queues > 1:
        return compute, 1
    return (others[0], 0) if others else None


@dataclass(frozen=True)
class PhysicalDevice:
    """One device as its driver describes it. index: its place in the loader's list. uuid: 32 hex digits, 0s if unknown.

    features: those vkfold can use, by name. handle: VkPhysicalDevice, None in plain-data tests.
    """

    index: int
    name: str
    type: str  # one of TYPES
    uuid: str = "0" * 32
    driver_name: str = ""
    driver_info: str = ""
    driver_version: int = 0
    vendor_id: int = 0
    device_id: int = 0
    cache_uuid: str = "0" * 32
    api_version: tuple[int, int, int] = (1, 2, 0)
    subgroup_size: int = 32
    min_subgroup_size: int = 0  # 0: no subgroup size control
    max_subgroup_size: int = 0
    subgroup_operations: int = 0x1F
    max_workgroup_invocations: int = 256
    max_shared_bytes: int = 32768
    max_push_bytes: int = 128
    max_allocation_bytes: int = 2**30
    preserves_special_values: bool = False  # NaN, infinities and signed zeros of float32, when it is asked to
    timestamp_period: float = 1.0  # nanoseconds a tick
    compute_family: int | None = 0
    timestamp_bits: int = 64
    transfer_queue: tuple[int, int] | None = None  # (family, index) of a queue for copies beside the compute queue
    features: frozenset[str] = frozenset({"bufferDeviceAddress"})
    extensions: frozenset[str] = field(default=frozenset(), repr=False)
    matrix_shapes: tuple[MatrixShape, ...] = ()  # that the driver lists
    heaps: tuple[MemoryHeap, ...] = ()
    memory_types: tuple[MemoryType, ...] = ()
    handle: Any = field(default=None, repr=False, compare=False)

    @property
    def is_cpu(self) -> bool:
        """Whether this is a software driver."""
        return self.type == "cpu"

    @property
    def has_uuid(self) -> bool:
        """Whether the driver gives a deviceUUID."""
        return self.uuid.strip("0") != ""

    @property
    def matrices(self) -> tuple[MatrixShape, ...]:
        """Of the listed cooperative matrices those whose features are there as well."""
        usable = {"cooperativeMatrix", "vulkanMemoryModel"} <= self.features
        return tuple(s for s in self.matrix_shapes if usable and _MATRIX_FEATURES[s.precision] <= self.features)

    @property
    def driver_key(self) -> str:
        """Device and driver in one word fit for a file name: what caches of compiled or measured things hang on."""
        # lavapipe says version 1 for ever and a constant cache UUID; its driver_info tells releases apart.
        parts = (self.uuid, self.name, self.driver_name, self.driver_info, self.driver_version, self.cache_uuid)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def missing(self) -> list[str]:
        """What vkfold needs and this device lacks, in words; empty when it fits."""
        lacks = []
        if self.api_version[:2] < MIN_API:
            lacks.append(f"Vulkan {MIN_API[0]}.{MIN_API[1]} (it offers {self.api_version[0]}.{self.api_version[1]})")
        if self.compute_family is None:
            lacks.append("a compute queue")
        if "bufferDeviceAddress" not in self.features:
            lacks.append("the feature bufferDeviceAddress")
        absent = [name for bit, name in SUBGROUP_OPERATIONS.items() if not self.subgroup_operations & bit]
        if absent:
            lacks.append(f"subgroup operations in compute shaders: {', '.join(absent)}")
        if self.subgroup_size not in (4, 8, 16, 32, 64):
            lacks.append(f"a subgroup size of 4, 8, 16, 32 or 64 (it has {self.subgroup_size})")
        return lacks

    def describe(self) -> str:
        """One line: index, name, type, driver, UUID."""
        driver = " ".join(part for part in (self.driver_name, self.driver_info) if part)
        return f"[{self.index}] {self.name} ({self.type}{', ' + driver if driver else ''}) UUID {self.uuid}"
