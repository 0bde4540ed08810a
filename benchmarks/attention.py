"""Fused attention beside the same with materialised scores, both on this engine: causal, forward and backward.

    python benchmarks/attention.py [--seq 2048] [--heads 4] [--head-dim 64] [--batch 1] [--rounds 5]

Materialised: scores = q k^T + mask in one matmul, softmax, o = p v; backward from the kept p: four matmuls and the
gradient of softmax. It goes through both halves of the square and holds [batch, heads, seq, seq] three times. Rounds
in turn; the ratio is that of each pair's times, median over rounds. Goal at sequence 2,048: at least 2. Exit status 1
where it is missed, or where the results differ by more than rounding.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import vkfold as vf
from vkfold.engine.tensor import Tensor

GOAL, GOAL_SEQ = 2.0, 2048
TOLERANCE = 1e-4  # of the largest value of a result
Run = Callable[[], dict[str, Tensor]]


def fused(engine: vf.VulkanEngine, arrays: dict[str, np.ndarray]) -> Run:
    """arrays: q, k, v, d_o [batch, seq, heads, head_dim]."""
    q, k, v, d_o = (engine.tensor(arrays[name]) for name in ("q", "k", "v", "d_o"))

    def run() -> dict[str, Tensor]:
        o, lse = engine.attention(q, k, v, causal=True)
        d_q, d_k, d_v = engine.attention_backward(d_o, q, k, v, o, lse, causal=True)
        return {"o": o, "d_q": d_q, "d_k": d_k, "d_v": d_v}

    return run


def materialised(engine: vf.VulkanEngine, arrays: dict[str, np.ndarray]) -> Run:
    """The same from matmuls over [batch, heads, seq, head_dim]."""
    q, k, v, d_o = (engine.tensor(np.ascontiguousarray(arrays[name].swapaxes(1, 2))) for name in ("q", "k", "v", "d_o"))
    batch, heads, seq, head_dim = q.shape
    hidden = np.triu(np.full((seq, seq), -np.inf, np.float32), 1)
    mask = engine.tensor(np.ascontiguousarray(np.broadcast_to(hidden, (batch, heads, seq, seq))))
    factor = head_dim**-0.5

    def run() -> dict[str, Tensor]:
        scaled = engine.scale(q, factor)
        p = engine.softmax(engine.matmul(scaled, k, trans_b=True, residual=mask))
        o = engine.matmul(p, v)
        d_v = engine.matmul(p, d_o, trans_a=True)
        d_s = engine.softmax_backward(engine.matmul(d_o, v, trans_b=True), p)
        d_q = engine.scale(engine.matmul(d_s, k), factor)
        return {"o": o, "d_q": d_q, "d_k": engine.matmul(d_s, scaled, trans_a=True), "d_v": d_v}

    return run


def largest_difference(here: dict[str, Tensor], there: dict[str, Tensor]) -> float:
    """Between fused and materialised results, over the largest value of each."""
    worst = 0.0
    for name, tensor in here.items():
        a, b = tensor.numpy(), there[name].numpy().swapaxes(1, 2)
        worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
    return worst


def main() -> None:
    """Parse the command line, measure, print; the exit status says whether the goal was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=GOAL_SEQ)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (args.batch, args.seq, args.heads, args.head_dim)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name in ("q", "k", "v", "d_o")}
    with vf.VulkanEngine() as engine:
        runs = {"fused": fused(engine, arrays), "materialised": materialised(engine, arrays)}
        difference = largest_difference(runs["fused"](), runs["materialised"]())  # and compiles
        elapsed: dict[str, list[float]] = {name: [] for name in runs}
        processor: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                start, start_processor = time.perf_counter(), time.process_time()
                made = run()
                engine.end_batch()
                elapsed[name].append(1e3 * (time.perf_counter() - start))
                processor[name].append(1e3 * (time.process_time() - start_processor))
                del made
        print(f"{engine.name}: {args.batch} x {args.heads} heads x {args.seq} x {args.head_dim}, causal, f+b")
        for name in runs:
            ms, cpu = statistics.median(elapsed[name]), statistics.median(processor[name])
            print(f"{name:13s} {ms:9.1f} ms elapsed {cpu:9.1f} ms of the processor")
        ratios = {
            kind: statistics.median(b / a for a, b in zip(times["fused"], times["materialised"], strict=True))
            for kind, times in (("elapsed", elapsed), ("processor", processor))
        }
        print(f"fused is {ratios['elapsed']:.2f} times as fast ({ratios['processor']:.2f} by processor time)")
        print(f"largest difference of results {difference:.1e}")
    if difference > TOLERANCE:
        raise SystemExit(f"results differ by {difference:.1e} of their largest value")
    if args.seq >= GOAL_SEQ and ratios["elapsed"] < GOAL:
        raise SystemExit(f"missed: the goal is {GOAL} times as fast")


if __name__ == "__main__":
    main()
