"""Host time: of recording one dispatch, of one op call (shape rule, allocation, recording), of one training step.

The steps are of a model of 48 layers, recorded and replayed; waiting for the device is left out of all figures.

Run: python benchmarks/host_time.py [--calls N] [--layers N] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

import vkfold as vf
from vkfold.engine.vulkan_commands import Fence

GOALS = {"one dispatch (recorder)": 6.0, "add": 25.0, "matmul": 25.0, "rms_norm": 25.0, "replayed step": 500.0}
ROUNDS = 25  # of op calls


def microseconds(engine: vf.VulkanEngine, call: Callable[[], object], calls: int) -> float:
    """The processor time that a call takes to record, in this thread: other load leaves it alone, or nearly."""
    engine.end_batch()
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls * 1e6


def op_calls(calls: int) -> dict[str, float]:
    """Microseconds a dispatch and an op call: medians."""
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
        rounds: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(ROUNDS):  # in turn: what disturbs the machine for a while disturbs few rounds of each
            for name, call in rows.items():
                rounds[name].append(microseconds(engine, call, calls))
        return {name: statistics.median(times) for name, times in rounds.items()}


class Stopwatch:
    """Adds up the time spent waiting on fences, while in force. cpu_seconds: of this thread, meanwhile."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self._plain = Fence.wait

    def __enter__(self) -> Stopwatch:
        plain = self._plain

        def timed(fence: Fence, timeout: float | None = None) -> bool:
            start, cpu_start = time.perf_counter(), time.thread_time()
            done = plain(fence, timeout)
            self.seconds += time.perf_counter() - start
            self.cpu_seconds += time.thread_time() - cpu_start
            return done

        Fence.wait = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *exc: object) -> None:
        Fence.wait = self._plain  # type: ignore[method-assign]


def steps(num_layers: int, rounds: int) -> dict[str, float]:
    """Microseconds of host time a recorded and a replayed step: accumulation 3, clipping, dropout, AdamW.

    The CPU time of the calling thread stands beside the wall-clock time: a driver that computes on the same cores takes
    them from the host in the middle of its work.
    """
    config = vf.nn.GPTConfig(64, 32, 32, num_heads=2, num_layers=num_layers, d_ff=48, dropout=0.1)
    tokens = np.random.default_rng(0).integers(0, 64, (3, 2, 2, 32))
    batches = [(pair[0], pair[1]) for pair in tokens]
    measured = {}
    for name, switch in (("recorded step", "0"), ("replayed step", "1")):
        os.environ["VKFOLD_REPLAY"] = switch
        with vf.VulkanEngine() as engine:
            model = vf.nn.GPTModel(engine, config)
            step = vf.nn.TrainingStep(model, vf.nn.AdamW(model), max_norm=1.0)
            spent, cpu_spent = [], []
            for number in range(rounds + 4):
                with Stopwatch() as waiting:
                    start, cpu_start = time.perf_counter(), time.thread_time()
                    result = step(batches, step=number, learning_rate=1e-3)
                    engine.release_idle_pool_blocks()
                    whole, cpu_whole = time.perf_counter() - start, time.thread_time() - cpu_start
                if number >= 4:
                    assert result.replayed == (switch == "1")
                    spent.append((whole - waiting.seconds) * 1e6)
                    cpu_spent.append((cpu_whole - waiting.cpu_seconds) * 1e6)
            measured[name] = statistics.median(spent)
            measured[f"{name}, CPU"] = statistics.median(cpu_spent)
    return measured


def main() -> None:
    """Parse the command line and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--layers", type=int, default=48, help="of the model whose steps are measured")
    parser.add_argument("--rounds", type=int, default=15, help="steps measured, recorded and replayed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = op_calls(options.calls) | steps(options.layers, options.rounds)
    if options.json:
        print(json.dumps({name: round(value, 2) for name, value in measured.items()}))
        return
    for name, value in measured.items():
        goal = f"  (goal: at most {GOALS[name]:.0f})" if name in GOALS else ""
        print(f"{name:28s} {value:9.1f} us{goal}")


if __name__ == "__main__":
    main()
