"""Where the time of a training step goes: milliseconds of each op, and the share outside matmul and attention.

    python benchmarks/step_share.py [--model small|tiny-lm|mlp] [--layers 12] [--seq 512] [--vocab 50257] [--steps 3]

Each op is submitted and waited for by itself, the time of an empty submit is taken off, and medians over the steps are
shown. small is GPT-2 small (768, 3072, 12 heads); models of one and of two blocks are measured, and their difference is
added for each block that is missing to --layers (--measure-all runs all of them).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from training_steps import mlp, tiny_lm

import vkfold as vf
from vkfold.engine.compute_engine import ComputeEngine, Rule
from vkfold.engine.op import Op
from vkfold.engine.tensor import Tensor
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

Times = dict[str, float]  # op -> milliseconds a step
INSIDE = ("matmul", "attention")  # an op whose name starts so counts as matmul or attention


class TimedEngine(vf.VulkanEngine):
    """Submits each op alone and adds up its time under its name."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.timing = False
        self.empty_seconds = statistics.median(self._empty() for _ in range(50))

    def _wait(self) -> float:
        start = time.perf_counter()
        self.recorder.submit()
        self.recorder.wait()
        return time.perf_counter() - start

    def _empty(self) -> float:
        self.recorder._open()
        return self._wait()

    def _launch(self, op: Op, rule: Rule, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any) -> None:
        if self.timing:
            self._wait()
        super()._launch(op, rule, inputs, made, settings)
        if self.timing:
            self.seconds[op.name] += max(0.0, self._wait() - self.empty_seconds)
            self.calls[op.name] += 1

    def measure(self, step: Callable[[int], object], steps: int) -> tuple[Times, dict[str, int]]:
        """(median milliseconds of each op, calls of each) over `steps` steps, after one that compiles."""
        step(0)
        found: list[Times] = []
        for n in range(1, steps + 1):
            self.seconds.clear()
            self.calls.clear()
            self.timing = True
            step(n)
            self.timing = False
            found.append({name: 1e3 * value for name, value in self.seconds.items()})
        return {name: statistics.median(times[name] for times in found) for name in found[0]}, dict(self.calls)


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
    with TimedEngine() as engine:
        if args.model != "small":
            times, calls = engine.measure({"tiny-lm": tiny_lm, "mlp": mlp}[args.model](engine), args.steps)
        elif args.measure_all or args.layers < 3:
            times, calls = engine.measure(small(engine, args.layers, args.seq, args.vocab), args.steps)
        else:
            one, calls1 = engine.measure(small(engine, 1, args.seq, args.vocab), args.steps)
            engine.release_idle_pool_blocks()
            two, calls2 = engine.measure(small(engine, 2, args.seq, args.vocab), args.steps)
            times = extrapolated(one, two, args.layers)
            calls = {name: calls1[name] + (args.layers - 1) * (calls2[name] - calls1[name]) for name in one}
        total = sum(times.values())
        print(f"{args.model} on {engine.name}; an empty submit takes {1e6 * engine.empty_seconds:.0f} us, taken off")
        print(f"{'op':32s} {'calls':>6s} {'ms':>10s} {'share':>7s}")
        for name, value in sorted(times.items(), key=lambda item: -item[1]):
            print(f"{name:32s} {calls[name]:6d} {value:10.2f} {value / total:7.1%}")
        print(f"{'all':32s} {sum(calls.values()):6d} {total:10.2f}")
        print(f"outside matmul and attention: {share_outside(times):.1%}")


if __name__ == "__main__":
    main()
