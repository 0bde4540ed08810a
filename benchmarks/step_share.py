"""Where the time of a training step goes: milliseconds of each op, and the share outside matmul and attention.

    python benchmarks/step_share.py [--model small|tiny-lm|mlp] [--layers 12] [--seq 512] [--vocab 50257] [--steps 3]

Device timestamps around each launch, medians over the steps; what fusion put into a matmul counts as matmul. small is
GPT-2 small (768, 3072, 12 heads); models of one and of two blocks are measured, and their difference is added for each
block that is missing to --layers (--measure-all runs all of them).
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable

import numpy as np
from training_steps import mlp, tiny_lm

import vkfold as vf
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.profiler import OpProfiler
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

Times = dict[str, float]  # op -> milliseconds a step
INSIDE = ("matmul", "attention")  # an op whose name starts so counts as matmul or attention


def measure(engine: vf.VulkanEngine, step: Callable[[int], object], steps: int) -> tuple[Times, dict[str, int]]:
    """(median milliseconds of each op, launches of each) over `steps` steps, after one that compiles."""
    step(0)
    profiler = OpProfiler(engine)
    profiler.attach()
    found: list[Times] = []
    launches: Counter[str] = Counter()
    for n in range(1, steps + 1):
        step(n)
        samples = profiler.take()
        launches = Counter(sample.op for sample in samples)
        found.append({op: 1e3 * sum(s.seconds for s in samples if s.op == op) for op in launches})
    profiler.detach()
    return {op: statistics.median(times[op] for times in found) for op in launches}, dict(launches)


def small(engine: ComputeEngine, num_layers: int, seq: int, vocab: int) -> Callable[[int], object]:
    """One training step of GPT-2 small with so many blocks."""
    config = GPTConfig(
        vocab_size=vocab, max_seq_len=seq, d_model=768, num_heads=12, num_layers=num_layers, d_ff=3072,
        norm="layernorm", activation="gelu", positions="learned", dropout=0.1,
    )  # fmt: skip
    model = GPTModel(engine, config, seed=0)
    run = TrainingStep(model, AdamW(model), max_norm=1.0)
    windows = np.random.default_rng(0).integers(0, vocab, (1, seq + 1)).astype(np.int32)
    return lambda n: run([(windows[:, :-1], windows[:, 1:])], step=n, learning_rate=1e-4)


def extrapolated(one: Times, two: Times, num_layers: int) -> Times:
    """Times with num_layers blocks, from those with one and with two."""
    return {name: one[name] + (num_layers - 1) * max(0.0, two[name] - one[name]) for name in one}


def share_outside(times: Times) -> float:
    """Share of the time in ops other than matmul and attention."""
    inside = sum(value for name, value in times.items() if name.startswith(INSIDE))
    return 1.0 - inside / sum(times.values())


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("small", "tiny-lm", "mlp"), default="small")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--measure-all", action="store_true", help="run all blocks instead of counting two")
    args = parser.parse_args()
    with vf.VulkanEngine() as engine:
        if args.model != "small":
            times, calls = measure(engine, {"tiny-lm": tiny_lm, "mlp": mlp}[args.model](engine), args.steps)
        elif args.measure_all or args.layers < 3:
            times, calls = measure(engine, small(engine, args.layers, args.seq, args.vocab), args.steps)
        else:
            one, calls1 = measure(engine, small(engine, 1, args.seq, args.vocab), args.steps)
            engine.release_idle_pool_blocks()
            two, calls2 = measure(engine, small(engine, 2, args.seq, args.vocab), args.steps)
            times = extrapolated(one, two, args.layers)
            calls = {name: calls1[name] + (args.layers - 1) * (calls2[name] - calls1[name]) for name in one}
        total = sum(times.values())
        print(f"{args.model} on {engine.name}")
        print(f"{'op':32s} {'calls':>6s} {'ms':>10s} {'share':>7s}")
        for name, value in sorted(times.items(), key=lambda item: -item[1]):
            print(f"{name:32s} {calls[name]:6d} {value:10.2f} {value / total:7.1%}")
        print(f"{'all':32s} {sum(calls.values()):6d} {total:10.2f}")
        print(f"outside matmul and attention: {share_outside(times):.1%}")


if __name__ == "__main__":
    main()
