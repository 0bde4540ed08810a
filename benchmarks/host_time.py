"""Host time of one op call (shape rule, allocation, recording) and of recording one dispatch, in microseconds.

Run: python benchmarks/host_time.py [--calls N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import vkfold as vf


def microseconds(engine: vf.VulkanEngine, call: Callable[[], object], calls: int) -> float:
    """Median over 7 rounds of the processor time a call takes to record, in this thread: other load leaves it alone."""
    rounds = []
    for _ in range(7):
        engine.end_batch()
        start = time.thread_time()
        for _ in range(calls):
            call()
        rounds.append((time.thread_time() - start) / calls * 1e6)
    engine.end_batch()
    return statistics.median(rounds)


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    calls = parser.parse_args().calls
    kernel = vf.Kernel("nothing", "void main() {}", "inout f32 y, uint n", local_size=64)
    with vf.VulkanEngine() as engine:
        x, w = engine.tensor(np.ones((8, 16))), engine.tensor(np.ones((16, 16)))
        scale = engine.tensor(np.ones(16))
        engine.recorder.op_work = 0.0
        rows = {
            "one dispatch (recorder)": lambda: engine.recorder.dispatch(kernel, 1, x, 0),
            "add": lambda: engine.add(x, x),
            "matmul": lambda: engine.matmul(x, w),
            "rms_norm": lambda: engine.rms_norm(x, scale),
        }
        for name, call in rows.items():
            call()
            print(f"{name:28s} {microseconds(engine, call, calls):7.1f} us")


if __name__ == "__main__":
    main()
