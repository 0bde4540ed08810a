"""What recomputation costs: step time of full recomputation and of fine-grained modes over that of the plain step.

    python benchmarks/recompute_cost.py [--d-model 768] [--layers 2] [--seq 512] [--rounds 5] [--activation gelu]

Every round times one step in each mode, in turn, on one model and one engine; ratios are of the medians. Goals: full
recomputation (checkpoint-every 1) at most 1.34, fine-grained mlp at most 1.13. All modes give the same gradients.

Where the device is the CPU, the goals are held against processor time, which other programs do not disturb; elsewhere
against elapsed time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import numpy as np

import vkfold as vf
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

GOALS = {"full": 1.34, "mlp": 1.13}
MODES: dict[str, tuple[int, tuple[str, ...]]] = {  # name -> (blocks a checkpoint, groups recomputed)
    "plain": (0, ()),
    "full": (1, ()),
    "mlp": (0, ("mlp",)),
    "attention": (0, ("attention",)),
    "qkv": (0, ("qkv",)),
    "norm": (0, ("norm",)),
}


class Times(NamedTuple):
    """Milliseconds of each step: elapsed, and of the processor in all threads."""

    elapsed: list[float]
    processor: list[float]


def measure(model: GPTModel, rounds: int, batch: int, modes: list[str]) -> dict[str, Times]:
    """Times of each step in each mode; a first round, which compiles and allocates, is left out."""
    config = model.config
    run = TrainingStep(model, AdamW(model))
    windows = np.random.default_rng(0).integers(0, config.vocab_size, (batch, config.max_seq_len + 1)).astype(np.int32)
    times = {mode: Times([], []) for mode in modes}
    for n in range(rounds + 1):
        for mode in modes:
            every, groups = MODES[mode]
            model.set_checkpoint_every(every)
            model.set_recompute(groups)
            start, processor = time.perf_counter(), time.process_time()
            run([(windows[:, :-1], windows[:, 1:])], step=n, learning_rate=1e-4)
            if n:
                times[mode].elapsed.append(1e3 * (time.perf_counter() - start))
                times[mode].processor.append(1e3 * (time.process_time() - processor))
    return times


def main() -> None:
    """Parse the command line and print a table; the exit status says whether the goals were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--activation", choices=("gelu", "swiglu"), default="gelu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=["plain", "full", "mlp"])
    args = parser.parse_args()
    modes = ["plain", *(mode for mode in args.modes if mode != "plain")]
    llama = args.activation == "swiglu"
    config = GPTConfig(
        vocab_size=args.vocab, max_seq_len=args.seq, d_model=args.d_model, num_heads=args.heads, num_layers=args.layers,
        activation=args.activation, norm="rmsnorm" if llama else "layernorm",
        positions="rope" if llama else "learned", dropout=0.0 if llama else 0.1,
    )  # fmt: skip
    with vf.VulkanEngine() as engine:
        times = measure(GPTModel(engine, config, seed=0), args.rounds, args.batch, modes)
        print(f"{engine.name}: {args.layers} layers, d_model {args.d_model}, {args.batch} x {args.seq} tokens")
        print("mode       elapsed ms    ratio   processor ms    ratio   goal")
        plain, missed = times["plain"], []
        for mode, values in times.items():
            elapsed, processor = map(statistics.median, values)
            ratios = elapsed / statistics.median(plain.elapsed), processor / statistics.median(plain.processor)
            goal = GOALS.get(mode)
            shown = f"{goal:.2f}" if goal else ""
            print(f"{mode:10s} {elapsed:10.1f} {ratios[0]:8.3f} {processor:14.1f} {ratios[1]:8.3f}   {shown}")
            if goal and ratios[engine.recorder.is_cpu] > goal:
                missed.append(mode)
    if missed:
        raise SystemExit(f"costs more than the goal: {', '.join(missed)}")


if __name__ == "__main__":
    main()
