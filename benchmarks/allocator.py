"""Cost of the pool allocator: nanoseconds an operation, and fragmentation, for several patterns.

Besides made-up patterns it replays what a training run asked for: every allocation and free of 100 steps, recorded
from the pools of an engine that plans (the same events as on a device).

Run: python benchmarks/allocator.py [--operations N] [--trace-steps N] [--seed N] [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vkfold.engine.plan_engine import PlanEngine
from vkfold.memory_pool import BlockPool, NullBlockSource, PoolRange
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep, evaluate_loss

MIB = 2**20
TRACED = GPTConfig(8192, 512, 512, 8, 8)
TRACED_SHAPE = (8, 512)
EVALUATE_EVERY = 25
SAMPLES = 2000  # of the series over a replayed trace

# (event, bytes, block, offset); events of a pool's observer, and "step" at the end of each step
Trace = list[tuple[str, int, int, int]]


def churn(pool: BlockPool, rng: random.Random, operations: int, *, live: int, low: int, high: int) -> None:
    """Hold `live` ranges with sizes log-uniform in low..high bytes, replacing one at random each time."""
    ratio = high / low
    sizes = [int(low * ratio ** rng.random()) for _ in range(4096)]
    held = [pool.allocate(sizes[i & 4095]) for i in range(live)]
    picks = [rng.randrange(live) for _ in range(operations // 2)]
    start = time.perf_counter_ns()
    for i, pick in enumerate(picks):
        pool.free(held[pick])
        held[pick] = pool.allocate(sizes[i & 4095])
    record(pool, len(picks) * 2, start)
    for range_ in held:
        pool.free(range_)


def training_step(pool: BlockPool, rng: random.Random, operations: int) -> None:
    """Forward keeps some outputs of each layer, backward frees them in reverse, and temporaries come and go."""
    num_layers, kept, temporaries = 24, 8, 6
    per_step = 2 * num_layers * (kept + 2 * temporaries)
    start = time.perf_counter_ns()
    steps = max(1, operations // per_step)
    for _ in range(steps):
        caches = []
        for _ in range(num_layers):
            cache = []
            for i in range(kept):
                cache.append(pool.allocate((1 + i) * 300_000))
                if i < temporaries:
                    pool.free(pool.allocate(700_000))
            caches.append(cache)
        while caches:
            for range_ in reversed(caches.pop()):
                pool.free(range_)
            for _ in range(temporaries):
                pool.free(pool.allocate(900_000))
    record(pool, steps * per_step, start)


def small_tensors(pool: BlockPool, rng: random.Random, operations: int) -> None:
    """Allocate many 1 KiB tensors, free every other one, then the rest."""
    count = operations // 2
    start = time.perf_counter_ns()
    held = [pool.allocate(1024) for _ in range(count)]
    for range_ in held[::2]:
        pool.free(range_)
    for range_ in held[1::2]:
        pool.free(range_)
    record(pool, count * 2, start)


def record_trace(num_steps: int) -> Trace:
    """The events of the step pool while a model trains, its held-out loss taken now and then."""
    engine = PlanEngine()
    engine.set_retain_free_bytes(0)  # so that the replayed calls need not tell the pool what a step is
    trace: Trace = []
    pool = engine.pools["step"]
    pool.observer = lambda event, block, offset, nbytes: trace.append((event, nbytes, block, offset))
    model = GPTModel(engine, TRACED, loss_chunk_bytes=32 * MIB)
    step = TrainingStep(model, AdamW(model), max_norm=1.0)
    batch = (np.zeros(TRACED_SHAPE, np.int32),) * 2
    for number in range(num_steps):
        step([batch], step=number, learning_rate=1e-3)
        if number % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            evaluate_loss(model, [batch] * 2)
        engine.release_idle_pool_blocks()
        trace.append(("step", 0, 0, 0))
    pool.observer = None
    return trace


def replay(trace: Trace, num_steps: int) -> None:
    """Make the recorded calls anew and time them; then once more, looking at the pool now and then and at each peak.

    series: (call, fragmentation, reserved / live) through all calls.
    """
    held: dict[tuple[int, int], PoolRange] = {}
    calls = [event for event in trace if event[0] in ("allocate", "free", "step")]
    name = f"{num_steps} recorded steps"
    pool = BlockPool(NullBlockSource(), name=name)
    start = time.perf_counter_ns()
    for event, nbytes, block, offset in calls:
        if event == "allocate":
            held[block, offset] = pool.allocate(nbytes)
        elif event == "free":
            pool.free(held.pop((block, offset)))
        else:
            pool.release_idle_blocks()
    record(pool, len(calls), start)

    pool = BlockPool(NullBlockSource(), name=name)
    fragmentation: list[float] = []
    overhead: list[float] = []
    at_peak, same = (0, 0.0, 1.0), True
    series: list[tuple[int, float, float]] = []
    every = max(1, len(calls) // SAMPLES)
    for number, (event, nbytes, block, offset) in enumerate(calls):
        if number % every == 0 and pool.live_bytes:
            ratio = pool.reserved_bytes / pool.live_bytes
            series.append((number, round(pool.stats().fragmentation, 4), round(ratio, 4)))
        if event == "allocate":
            held[block, offset] = range_ = pool.allocate(nbytes)
            same &= (range_.block.sequence, range_.offset) == (block, offset)
            if pool.live_bytes > at_peak[0]:
                at_peak = pool.live_bytes, pool.stats().fragmentation, pool.reserved_bytes / pool.live_bytes
        elif event == "free":
            pool.free(held.pop((block, offset)))
        else:
            fragmentation.append(round(at_peak[1], 4))
            overhead.append(round(at_peak[2], 4))
            at_peak = 0, 0.0, 1.0
            pool.release_idle_blocks()
    RESULTS[name] |= {
        "series": series,
        "fragmentation_at_peaks": fragmentation,
        "reserved_by_live_at_peaks": overhead,
        "same_places": same,
    }


RESULTS: dict[str, Any] = {}


def record(pool: BlockPool, operations: int, start: int) -> None:
    """Keep the figures of the pattern that just ran."""
    elapsed = time.perf_counter_ns() - start
    stats = pool.stats()
    RESULTS[pool.name] = {
        "ns_per_operation": round(elapsed / operations, 1),
        "operations": operations,
        "num_ranges": stats.num_ranges,
        "blocks": stats.blocks,
        "allocated_bytes": stats.allocated_bytes,
        "live_bytes": stats.live_bytes,
        "fragmentation": round(stats.fragmentation, 4),
    }


PATTERNS: dict[str, Callable[[BlockPool, random.Random, int], None]] = {
    "training step": training_step,
    "20,000 live, 256 B to 64 KiB": lambda p, r, n: churn(p, r, n, live=20_000, low=256, high=65536),
    "500 live, 4 KiB to 8 MiB": lambda p, r, n: churn(p, r, n, live=500, low=4096, high=8 * MIB),
    "100 live, 1 to 200 MiB": lambda p, r, n: churn(p, r, n, live=100, low=MIB, high=200 * MIB),
    "1 KiB, every other one freed": small_tensors,
}


def at_least(low: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `low` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        return value

    return number


at_least_one, at_least_two = at_least(1), at_least(2)  # a pair is an allocation and a free


def main() -> None:
    """Run the patterns and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=at_least_two, default=200_000, help="a pattern (default 200000)")
    parser.add_argument("--trace-steps", type=at_least_one, default=100, help="steps to replay (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    for name, pattern in PATTERNS.items():
        pattern(BlockPool(NullBlockSource(), name=name), random.Random(args.seed), args.operations)
    replay(record_trace(args.trace_steps), args.trace_steps)
    if args.json:
        print(json.dumps(RESULTS))
        return
    print(f"{'pattern':32} {'ns an op':>9} {'live':>7} {'blocks':>6} {'reserved MiB':>12} {'fragmentation':>13}")
    for name, row in RESULTS.items():
        print(
            f"{name:32} {row['ns_per_operation']:9.0f} {row['num_ranges']:7d} {row['blocks']:6d} "
            f"{row['allocated_bytes'] / MIB:12.1f} {row['fragmentation']:13.4f}"
        )
    row = RESULTS[f"{args.trace_steps} recorded steps"]
    last = row["series"][-max(1, len(row["series"]) // args.trace_steps) :]
    shown = last[:: max(1, len(last) // 20)]
    print("within the last replayed step, call: fragmentation, reserved / live (all of them with --json)")
    for call, fragmentation, ratio in shown:
        print(f"{call:10,d}: {fragmentation:.4f} {ratio:.3f}")
    for key in ("fragmentation_at_peaks", "reserved_by_live_at_peaks"):
        told = row[key][:: max(1, args.trace_steps // 10)]
        print(f"{key}, of every {max(1, args.trace_steps // 10)}th step: {' '.join(map(str, told))}")


if __name__ == "__main__":
    main()
