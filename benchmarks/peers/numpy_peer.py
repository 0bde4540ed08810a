"""NumPy on the CPU: the machine's yardstick for matmul."""

from __future__ import annotations

import platform

import numpy as np
from work import Matmul, Unsupported, Work


def processor() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


class MatmulJob:
    """C = op(A) op(B)."""

    def __init__(self, work: Matmul) -> None:
        a, b = work.inputs()
        self.a, self.b = a.T if work.trans_a else a, b.T if work.trans_b else b
        self.c = np.empty((work.m, work.n), np.float32)

    def run(self) -> None:
        """Once."""
        np.matmul(self.a, self.b, out=self.c)

    def results(self) -> dict[str, np.ndarray]:
        """c [m, n]."""
        return {"c": self.c}


class Library:
    """See worker.Library."""

    version = np.__version__

    def __init__(self) -> None:
        self.device = processor()

    def prepare(self, work: Work) -> MatmulJob:
        """Matmul only."""
        if isinstance(work, Matmul):
            return MatmulJob(work)
        raise Unsupported("NumPy has no automatic differentiation")
