"""Step time with a loader at work: while the device runs the step, and in front of it; against none at all.

The loader waits (as for a disk) for a share of a step's time, then makes the next batch and calls `prepare`. Rounds of
one step each kind follow one another in one process, and ratios are of steps of one round: other load hits all alike.

Run: python benchmarks/loader_overlap.py [--loader 0.3 0.8] [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

import vkfold as vf

KINDS = ("no loader", "while the step runs", "in front of the step")
Batches = list[tuple[np.ndarray, np.ndarray]]


class Training:
    """A model in training, whose steps are replayed."""

    def __init__(self, engine: vf.VulkanEngine, d_model: int, num_layers: int, seq_len: int) -> None:
        config = vf.nn.GPTConfig(256, seq_len, d_model, num_heads=4, num_layers=num_layers, dropout=0.1)
        model = vf.nn.GPTModel(engine, config)
        self.step = vf.nn.TrainingStep(model, vf.nn.AdamW(model), max_norm=1.0)
        self.shape = (4, seq_len)
        self.random = np.random.default_rng(0)
        self.number = 0
        self.ready = self.batch()

    def batch(self) -> Batches:
        """The data of a step."""
        tokens = self.random.integers(0, 256, (2, *self.shape))
        return [(tokens[0], tokens[1])]

    def run(self, kind: str, load_seconds: float) -> float:
        """Seconds of one step, with the loading of the next one's data where the kind has it."""
        loaded: list[Batches] = []

        def load() -> None:
            time.sleep(load_seconds)
            loaded.append(self.batch())
            if kind == KINDS[1]:
                self.step.prepare(loaded[0])

        start = time.perf_counter()
        if kind == KINDS[2]:
            load()
        meanwhile = load if kind == KINDS[1] else None
        self.step(self.ready, step=self.number, learning_rate=1e-3, while_running=meanwhile)
        seconds = time.perf_counter() - start
        self.number += 1
        self.ready = loaded[0] if loaded else self.batch()
        return seconds


def measure(training: Training, share: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of each kind, and the median ratios to the step without a loader."""
    for kind in (*KINDS[:1] * 4, *KINDS):  # captures, and their second set of host memory
        training.run(kind, 0.0)
    load = share * statistics.median(training.run(KINDS[0], 0.0) for _ in range(15))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            times[kind].append(training.run(kind, load))
    row = {f"{kind}, ms": 1e3 * statistics.median(times[kind]) for kind in KINDS}
    row["loader, ms"] = 1e3 * load
    for kind in KINDS[1:]:
        pairs = zip(times[kind], times[KINDS[0]], strict=True)
        row[f"{kind}, ratio"] = statistics.median(one / other for one, other in pairs)
    return row


def main() -> None:
    """Parse the command line and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loader", type=float, nargs="+", default=[0.3, 0.8], help="its time, in steps")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with vf.VulkanEngine() as engine:
        training = Training(engine, options.d_model, options.layers, options.seq_len)
        rows = {share: measure(training, share, options.rounds) for share in options.loader}
        replayed = engine.replay_stats().replayed
    if options.json:
        print(json.dumps({"replayed": replayed, **{str(share): row for share, row in rows.items()}}))
        return
    for share, row in rows.items():
        real = row["loader, ms"] / row["no loader, ms"]
        print(f"a loader that takes {row['loader, ms']:.1f} ms, {real:.0%} of a step ({share:.0%} was wanted)")
        for kind in KINDS:
            ratio = f"  {row[f'{kind}, ratio']:.3f} times" if kind != KINDS[0] else ""
            print(f"  {kind:22s} {row[f'{kind}, ms']:8.1f} ms{ratio}")
    print(f"{replayed} steps were replayed")


if __name__ == "__main__":
    main()
