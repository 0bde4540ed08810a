"""The figures of docs/results.md, each shown by one command.

    python benchmarks/training_figures.py curves TEXT    train and held-out loss fall together (PNG, table)
    python benchmarks/training_figures.py resume TEXT    killed at a random moment, resumed: the straight run's bits
    python benchmarks/training_figures.py engines TEXT   the same training on --engine cpu and on Vulkan
    python benchmarks/training_figures.py checkpoint     peak of the step pool with --checkpoint-every 0, 1, 2

TEXT is a text file. Runs go into a temporary folder, or --out FOLDER, which is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import vkfold as vf

MODEL = ["--d-model", "64", "--num-layers", "2", "--num-heads", "4", "--seq-len", "64", "--batch-size", "8"]


def train(*options: str, wait: bool = True) -> subprocess.Popen[bytes]:
    """text_train in a process of its own, quiet."""
    command = [sys.executable, "-m", "vkfold.tools.text_train", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if wait:
        _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(errors.decode())
    return process


def log_of(save: Path) -> tuple[dict[int, float], dict[int, float]]:
    """(step -> training loss, step -> held-out loss) of a run; a step logged twice counts as logged last."""
    training, held_out = {}, {}
    for line in (save / "log.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "held_out_loss" in record:
            held_out[record["step"]] = record["held_out_loss"]
        elif "loss" in record:
            training[record["step"]] = record["loss"]
    return training, held_out


def arrays_of(save: Path) -> dict[str, np.ndarray]:
    """Weights and moments of the newest save."""
    folder = save / (save / "latest").read_text(encoding="utf-8").strip()
    kinds = {kind: vf.load(folder / f"{kind}.safetensors") for kind in ("model", "optimizer")}
    return {f"{kind}:{name}": array for kind, arrays in kinds.items() for name, array in arrays.items()}


def differences(a: Path, b: Path) -> tuple[int, float]:
    """(number of tensors, largest absolute difference) between the newest saves of two runs."""
    one, other = arrays_of(a), arrays_of(b)
    if one.keys() != other.keys():
        raise SystemExit(f"the saves hold different tensors: {sorted(one.keys() ^ other.keys())}")
    worst = max(float(np.abs(one[name].astype(np.float64) - other[name]).max(initial=0.0)) for name in one)
    return len(one), worst


def curves(text: str, out: Path, steps: int) -> None:
    """Training and held-out loss of one run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    save = out / "curves"
    every = max(1, steps // 8)
    train(text, *MODEL, "--max-steps", str(steps), "--lr", "3e-3", "--warmup-steps", str(steps // 20),
          "--eval-interval", str(every), "--save", str(save))  # fmt: skip
    training, held_out = log_of(save)
    print("step   training loss (mean of the last interval)   held-out loss")
    for step, loss in held_out.items():
        recent = [training[s] for s in range(max(1, step - every + 1), step + 1) if s in training]
        print(f"{step:5d}  {sum(recent) / len(recent):8.4f}  {loss:35.4f}")
    pyplot.figure(figsize=(7, 4))
    pyplot.plot(list(training), list(training.values()), linewidth=0.6, label="training (each step)")
    pyplot.plot(list(held_out), list(held_out.values()), marker="o", label="held out")
    pyplot.xlabel("step")
    pyplot.ylabel("loss, nats a byte")
    pyplot.legend()
    pyplot.tight_layout()
    pyplot.savefig(out / "curves.png", dpi=120)
    print("picture:", out / "curves.png")


def resume(text: str, out: Path, steps: int) -> None:
    """SIGKILL at a random moment after the first save, resume, compare with the straight run."""
    options = [text, *MODEL, "--dropout", "0.1", "--max-steps", str(steps), "--save-interval", "10"]
    straight, killed = out / "straight", out / "killed"
    train(*options, "--save", str(straight))
    process = train(*options, "--save", str(killed), wait=False)
    while not (killed / "latest").exists():
        time.sleep(0.05)
    time.sleep(random.uniform(0, 3))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    print("killed; the newest save is", (killed / "latest").read_text(encoding="utf-8").strip())
    train("--resume", str(killed), "--max-steps", str(steps))
    count, worst = differences(straight, killed)
    same = log_of(straight)[0] == log_of(killed)[0]
    print(f"{count} tensors of weights and moments, largest difference {worst}; loss lists equal: {same}")
    if worst or not same:
        raise SystemExit("the resumed run differs")


def engines(text: str, out: Path, steps: int) -> None:
    """Loss curves on the CPU engine and on Vulkan."""
    runs = []
    for engine in ("cpu", "vulkan"):
        save = out / engine
        train(text, *MODEL, "--max-steps", str(steps), "--engine", engine, "--save", str(save))
        runs.append(log_of(save)[0])
    worst = max(abs(runs[0][step] - runs[1][step]) for step in runs[0])
    print(f"{len(runs[0])} steps, loss from {runs[1][1]:.4f} to {runs[1][steps]:.4f}; largest difference {worst:.2e}")
    if worst > 1e-4:
        raise SystemExit("the curves differ by more than 1e-4")


def checkpoint() -> None:
    """Peak of the step pool and gradients, 8 layers, --checkpoint-every 0, 1, 2."""
    config = vf.nn.GPTConfig(vocab_size=256, max_seq_len=128, d_model=64, num_heads=4, num_layers=8, dropout=0.1)
    windows = np.random.default_rng(0).integers(0, 256, (4, 129)).astype(np.int32)
    baseline: list[np.ndarray] = []
    print("checkpoint-every   peak of the step pool   gradients: largest difference")
    for every in (0, 1, 2):
        with vf.VulkanEngine() as engine:
            model = vf.nn.GPTModel(engine, config, seed=0)
            model.set_checkpoint_every(every)
            step = vf.nn.TrainingStep(model, vf.nn.AdamW(model), keep_gradients=True)
            for n in range(2):
                step([(windows[:, :-1], windows[:, 1:])], step=n, learning_rate=1e-3)
            gradients = [p.grad.numpy() for p in model.parameters() if p.grad is not None]
            baseline = baseline or gradients
            worst = max(float(np.abs(a - b).max()) for a, b in zip(baseline, gradients, strict=True))
            peak = engine.pool_stats()["step"].peak_live_bytes
            print(f"{every:16d}   {peak / 1e6:18.2f} MB   {worst}")
            del model, step
        if worst:
            raise SystemExit("the gradients differ")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=("curves", "resume", "engines", "checkpoint"))
    parser.add_argument("text", nargs="?")
    parser.add_argument("--steps", type=int, help="training steps (curves 400, resume 60, engines 50)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.figure == "checkpoint":
        checkpoint()
        return
    if args.text is None:
        parser.error(f"{args.figure} needs a text file")
    out = args.out or Path(tempfile.mkdtemp(prefix="vkfold-"))
    out.mkdir(parents=True, exist_ok=True)
    figure, steps = {"curves": (curves, 400), "resume": (resume, 60), "engines": (engines, 50)}[args.figure]
    figure(args.text, out, args.steps or steps)


if __name__ == "__main__":
    main()
