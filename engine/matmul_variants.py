"""Which tile a matmul uses: a pure function of op, shape and device. All variants give the same bits.

A variant is a tile: rows (`tm`) and columns (`tn`) of C that one lane accumulates, and subgroups a workgroup. Every
element of C is one fma chain over k in every variant (shaders/matmul.comp): the choice changes time and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .recorder import Recorder

SUBGROUP_SIZES = (4, 8, 16, 32, 64)


class Capabilities(NamedTuple):
    """What the choice looks at. driver: "llvmpipe", "SwiftShader" or another; driver_major: its version."""

    subgroup_size: int
    is_cpu: bool
    driver: str
    driver_major: int

    @classmethod
    def of(cls, gpu: Recorder) -> Capabilities:
        """Of the device that is being recorded for."""
        return cls(gpu.subgroup_size, gpu.is_cpu, gpu.driver, _major(gpu.device.physical.driver_info))


@cache
def _major(driver_info: str) -> int:
    found = re.search(r"\d+", driver_info)  # "Mesa 22.3.6 (LLVM 15.0.6)"; lavapipe's own driverVersion is always 1
    return int(found.group()) if found else 0


class Variant(NamedTuple):
    """A tile of tm rows by tn columns a lane. speed: relative rate of FMAs when its tile is full.

    least_work: products below this many multiply-adds leave it aside, because its compilation would not pay.
    """

    tm: int
    tn: int
    subgroups: int
    speed: float
    least_work: int = 0

    @property
    def name(self) -> str:
        """As it is forced and logged, for example "8x4"."""
        return f"{self.tm}x{self.tn}"


# Speeds were measured at 512 x 512 x 512; only their ratios matter.
_LAVAPIPE_OLD = (Variant(32, 4, 1, 1.0, 2**25), Variant(16, 4, 1, 0.9), Variant(8, 4, 1, 0.7), Variant(4, 4, 1, 0.5))
_LAVAPIPE = (Variant(8, 8, 1, 1.0), Variant(16, 4, 1, 0.9), Variant(8, 4, 1, 0.8), Variant(4, 4, 1, 0.5))
_SWIFTSHADER = (Variant(16, 8, 1, 1.0), Variant(8, 8, 1, 0.9), Variant(8, 4, 1, 0.8), Variant(4, 4, 1, 0.5))
_GPU = (
    Variant(16, 4, 4, 1.0),
    Variant(8, 4, 4, 0.9),
    Variant(4, 4, 4, 0.6),
    Variant(8, 1, 4, 0.5),
    Variant(4, 1, 4, 0.4),
)


def variants(device: Capabilities) -> tuple[Variant, ...]:
    """The family of a device."""
    if device.driver == "llvmpipe":
        return _LAVAPIPE if device.driver_major >= 24 else _LAVAPIPE_OLD
    return _SWIFTSHADER if device.driver == "SwiftShader" else _GPU


def all_variants(subgroup_size: int) -> tuple[Variant, ...]:
    """Every variant a device with this subgroup size can ask for."""
    families: list[tuple[Variant, ...]] = [_GPU]
    if subgroup_size == 4:
        families.append(_SWIFTSHADER)
    if subgroup_size in (4, 8, 16):  # lavapipe goes by the CPU's vector width
        families += [_LAVAPIPE, _LAVAPIPE_OLD]
    return tuple({(v.tm, v.tn, v.subgroups): v for family in families for v in family}.values())


_forced: list[str] = []


@contextmanager
def forced_variant(name: str) -> Iterator[None]:
    """Every matmul recorded inside uses the variant of this name. For tests and measurements."""
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def choose(device: Capabilities, batch: int, m: int, n: int, k: int) -> Variant:
    """The variant with the least estimated time. Raises ValueError when a forced one is not in the family.

    Estimate: tiles are worked through `parallel` at a time, and a tile takes its area over its speed. So padding at the
    edges counts in full, and a matrix of few tiles prefers smaller ones that fill the device.
    """
    family = variants(device)
    if _forced:
        for variant in family:
            if variant.name == _forced[-1]:
                return variant
        raise ValueError(f"no matmul variant {_forced[-1]!r}: this device has {', '.join(v.name for v in family)}")
    parallel = 4 if device.is_cpu else 1024

    def seconds(variant: Variant) -> float:
        width = variant.tn * device.subgroup_size
        tiles = batch * -(-m // variant.tm) * -(-n // width)
        return -(-tiles // parallel) * variant.tm * width / variant.speed

    work = batch * m * n * k
    return min((variant for variant in family if variant.least_work <= work), key=seconds)
