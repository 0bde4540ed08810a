"""What a device can do at most, measured: bytes a second and floating-point operations a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..engine.profiler import OpProfiler
from ..engine.vulkan_engine import VulkanEngine

_ROUNDS = 5


class Peaks(NamedTuple):
    """bandwidth: bytes a second of the better of two maps over 32 MiB tensors (y = a x; y = a + b). flops: of the
    better of chained multiply-adds in registers and the best square matmul; matmul_flops: of that matmul alone.
    """

    bandwidth: float
    flops: float
    matmul_flops: float


def measure_peaks(engine: VulkanEngine, *, megabytes: int = 32, matmul_sizes: tuple[int, ...] = (512, 1024)) -> Peaks:
    """Probe a device, best of 5 rounds each. Raises BadInputError where it writes no timestamps."""
    profiler = OpProfiler(engine)
    values = np.linspace(0.5, 1.5, megabytes * 2**18, dtype=np.float32)
    x, y = engine.tensor(values), engine.tensor(values)
    small = x.rows(0, 32 * 64 * 64)
    bandwidth = max(
        _best(profiler, lambda: engine.scale(x, 0.5), by_bytes=True),
        _best(profiler, lambda: engine.add(x, y), by_bytes=True),
    )
    chained = _best(profiler, lambda: engine.fma_chain(small, rounds=1000))
    products = []
    for size in matmul_sizes:
        a, b = (t.rows(0, size * size).reshape(size, size) for t in (x, y))
        products.append(_best(profiler, lambda a=a, b=b: engine.matmul(a, b)))  # type: ignore[misc]
    return Peaks(bandwidth, max(chained, *products), max(products))


def _best(profiler: OpProfiler, call: Callable[[], object], *, by_bytes: bool = False) -> float:
    call()  # compiles
    profiler.attach()
    try:
        for _ in range(_ROUNDS):
            call()
        samples = profiler.take()
    finally:
        profiler.detach()
    return max((s.bytes_moved if by_bytes else s.flops) / max(s.seconds, 1e-9) for s in samples)
