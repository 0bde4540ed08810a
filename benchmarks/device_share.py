"""How much of a device its kernels use: matmul of the f32 peak, bandwidth-bound kernels of measured copy bandwidth.

    python benchmarks/device_share.py [--size 4096] [--megabytes 256] [--rounds 7] [--tensor-tflops X]

Peaks are measured in the same run (tools/device_peaks.py: multiply-adds in registers; a copy from buffer to buffer). A
peak of matrix units cannot be measured from outside: --tensor-tflops gives the data sheet's (float16 or bfloat16
operands, float32 sums, dense), and matmul on cooperative matrices is then set against it. Goals, on discrete GPUs: f32
matmul 70 %, float16 and bfloat16 matmul 60 %, kernels bound by bandwidth 85 %. Device timestamps, medians over rounds
in turn. On a CPU driver sizes are smaller and nothing is a goal: caches, not memory, serve what fits them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np

import vkfold as vf
from vkfold.engine.capabilities import Capabilities
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.profiler import OpProfiler, OpSample
from vkfold.tools.device_peaks import measure_peaks

GOALS = {"matmul": 0.70, "matmul float16": 0.60, "matmul bfloat16": 0.60, "bandwidth": 0.85}
COLUMNS = 1024
Calls = dict[str, Callable[[], object]]


def bandwidth_bound(engine: ComputeEngine, nbytes: int) -> Calls:
    """Calls of ops that read or write tensors of about `nbytes`, several multiply-adds a byte at most."""
    rows = max(1, nbytes // (4 * COLUMNS))
    values = np.random.default_rng(0).standard_normal((rows, COLUMNS)).astype(np.float32)
    x, y = engine.tensor(values), engine.tensor(values)
    weight, bias = engine.tensor(values[0]), engine.tensor(values[0])
    targets = engine.tensor(np.zeros(rows, np.int32))
    sums, rstd = engine.empty((COLUMNS,)), engine.rms_norm(x, weight)[1]
    return {
        "copy": lambda: engine.copy(x),
        "scale": lambda: engine.scale(x, 0.5),
        "add": lambda: engine.add(x, y),
        "gelu": lambda: engine.gelu(x),
        "gelu backward": lambda: engine.activation_backward(x, y, "gelu"),
        "softmax": lambda: engine.softmax(x),
        "rms_norm": lambda: engine.rms_norm(x, weight),
        "rms_norm backward": lambda: engine.rms_norm_backward(y, x, weight, rstd),
        "layer_norm": lambda: engine.layer_norm(x, weight, bias),
        "cross_entropy": lambda: engine.cross_entropy(x, targets),
        "column_sum": lambda: engine.column_sum(x, sums),
    }


def matmuls(engine: ComputeEngine, size: int, precisions: list[str]) -> Calls:
    """Square products, operands resident."""
    values = np.random.default_rng(1).standard_normal((size, size)).astype(np.float32)
    a, b = engine.tensor(values), engine.tensor(values)
    calls: Calls = {}
    for precision in precisions:
        name = "matmul" if precision == "float32" else f"matmul {precision}"
        calls[name] = lambda precision=precision: engine.matmul(a, b, precision=precision)  # type: ignore[misc]
    return calls


def measure(engine: vf.VulkanEngine, calls: Calls, rounds: int) -> dict[str, tuple[float, float]]:
    """(FLOP/s, bytes/s) of each call: of its cost rule over the median of its device time. A first round compiles."""
    profiler = OpProfiler(engine)
    profiler.attach()
    samples: dict[str, list[list[OpSample]]] = {name: [] for name in calls}
    try:
        for number in range(rounds + 1):
            for name, call in calls.items():
                call()
                taken = profiler.take()
                if number:
                    samples[name].append(taken)
    finally:
        profiler.detach()
    found = {}
    for name, runs in samples.items():
        seconds = max(statistics.median(sum(s.seconds for s in run) for run in runs), 1e-9)
        found[name] = tuple(sum(getattr(s, kind) for s in runs[0]) / seconds for kind in ("flops", "bytes_moved"))
    return found


def main() -> None:
    """Parse the command line and print a table; the exit status says whether a GPU met the goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=0, help="of the square matmul (4096; 512 on a CPU driver)")
    parser.add_argument("--megabytes", type=int, default=0, help="of a tensor (256; 32 on a CPU driver)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensor-tflops", type=float, default=0.0, help="data sheet: 16-bit matrix units, dense")
    parser.add_argument("--device", help="index, part of its name, or UUID")
    args = parser.parse_args()
    with vf.VulkanEngine(args.device) as engine:
        cpu = engine.recorder.is_cpu
        size = args.size or (512 if cpu else 4096)
        megabytes = args.megabytes or (32 if cpu else 256)
        peaks = measure_peaks(engine)
        precisions = list(dict.fromkeys(shape.precision for shape in Capabilities.of(engine.recorder).matrices))
        products = measure(engine, matmuls(engine, size, ["float32", *precisions]), args.rounds)
        moving = measure(engine, bandwidth_bound(engine, megabytes * 2**20), args.rounds)
        print(f"{engine.name} ({engine.device.physical.driver_info})")

    def goal(name: str) -> str:
        return "" if cpu else f"   goal {GOALS[name]:.0%}"

    copy = moving["copy"][1]
    print(f"f32 peak {peaks.flops / 1e9:,.0f} GFLOP/s, copy {copy / 1e9:,.1f} GB/s, tensors of {megabytes} MiB")
    missed = []
    rows = [("matmul", products["matmul"][0], peaks.flops)]
    rounded = [f"matmul {precision}" for precision in precisions]
    if args.tensor_tflops:
        rows += [(name, products[name][0], 1e12 * args.tensor_tflops) for name in rounded]
    for name, rate, peak in rows:
        print(f"{name + ' ' + str(size):22s} {rate / 1e9:10,.1f} GFLOP/s {rate / peak:8.1%}{goal(name)}")
        if rate / peak < GOALS[name]:
            missed.append(name)
    if not rounded:
        print("matmul float16         no cooperative matrices here")
    elif not args.tensor_tflops:
        for name in rounded:
            print(f"{name + ' ' + str(size):22s} {products[name][0] / 1e9:10,.1f} GFLOP/s, share: --tensor-tflops X")
    for name, (_, rate) in moving.items():
        print(f"{name:22s} {rate / 1e9:10,.1f} GB/s    {rate / copy:8.1%}{goal('bandwidth')}")
        if rate / copy < GOALS["bandwidth"]:
            missed.append(name)
    if missed and not cpu:
        raise SystemExit(f"below the goal: {', '.join(missed)}")


if __name__ == "__main__":
    main()
