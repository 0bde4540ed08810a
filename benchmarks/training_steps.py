"""Time of whole training steps: forward, loss, backward, AdamW; weights stay on the device, the loss is read back.

    python benchmarks/training_steps.py [--steps N] [--work tiny-lm|mlp|all]

`tiny_lm_step_ms` and `mlp_step_ms` give one time a step in milliseconds, for tables of several libraries.

tiny lm: decoder of vocabulary 256, d_model 128, 2 layers, 4 heads (2 key/value heads), SwiGLU of 384, RMSNorm, RoPE,
sequence 128, batch 4. mlp: 256-512-512-16 with ReLU and cross-entropy, batch 512.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

import vkfold as vf
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.tensor import Tensor
from vkfold.nn import AdamW, GPTConfig, GPTModel, Layer, Linear, TrainingStep

WARM_UP = 2  # steps that compile and allocate


class Mlp(Layer):
    """Linear layers with ReLU between them and cross-entropy behind: what TrainingStep needs of a model."""

    def __init__(self, engine: ComputeEngine, sizes: Sequence[int] = (256, 512, 512, 16)) -> None:
        super().__init__(engine)
        self.linears = [
            Linear(engine, a, b, std=(2.0 / a) ** 0.5, seed=i) for i, (a, b) in enumerate(itertools.pairwise(sizes))
        ]

    def loss(self, inputs: np.ndarray, targets: np.ndarray) -> Tensor:
        """Sum of losses [1]. inputs: float [batch, features]; targets: int [batch]."""
        self.start_forward()
        x, labels = self.engine.tensor(inputs), self.engine.tensor(targets)
        for i, linear in enumerate(self.linears[:-1]):
            pre = linear(x)
            self.keep(**{f"pre.{i}": pre})
            x = self.engine.relu(pre)
        logits = self.linears[-1](x)
        losses, lse = self.engine.cross_entropy(logits, labels)
        self.keep(logits=logits, labels=labels, lse=lse)
        return self.engine.sum(losses)

    def backward(self, dy: Tensor | None = None) -> None:
        """Add to the gradients of loss_scale * (sum of losses)."""
        dy = self.take("logits")
        self.engine.cross_entropy_backward_(dy, self.take("labels"), self.take("lse"))
        for i in range(len(self.linears) - 1, 0, -1):
            dy = self.linears[i].backward(dy)
            dy = self.engine.activation_backward(dy, self.take(f"pre.{i - 1}"), "relu")
        first = self.linears[0]
        first.weight_gradient(dy, first.take("x"))  # nobody asks for the gradient of the input


def timed(step: Callable[[int], object], steps: int) -> list[float]:
    """Milliseconds of each of `steps` steps, after a warm-up."""
    times = []
    for n in range(WARM_UP + steps):
        start = time.perf_counter()
        step(n)
        times.append(1e3 * (time.perf_counter() - start))
    return times[WARM_UP:]


def tiny_lm(engine: ComputeEngine) -> Callable[[int], object]:
    """One training step of the tiny language model, as a function of the step's number."""
    config = GPTConfig(
        vocab_size=256, max_seq_len=128, d_model=128, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=384
    )
    model = GPTModel(engine, config, seed=0)
    run = TrainingStep(model, AdamW(model))
    windows = np.random.default_rng(0).integers(0, 256, (4, 129)).astype(np.int32)
    batch = [(windows[:, :-1], windows[:, 1:])]
    return lambda n: run(batch, step=n, learning_rate=1e-3)


def mlp(engine: ComputeEngine) -> Callable[[int], object]:
    """One training step of the multi-layer perceptron, as a function of the step's number."""
    model = Mlp(engine)
    run = TrainingStep(model, AdamW(model))
    rng = np.random.default_rng(0)
    batch = [(rng.standard_normal((512, 256)).astype(np.float32), rng.integers(0, 16, 512).astype(np.int32))]
    return lambda n: run(batch, step=n, learning_rate=1e-3)


def tiny_lm_step_ms(engine: ComputeEngine, steps: int = 10) -> list[float]:
    """Milliseconds of each of `steps` training steps of the tiny language model."""
    return timed(tiny_lm(engine), steps)


def mlp_step_ms(engine: ComputeEngine, steps: int = 10) -> list[float]:
    """Milliseconds of each of `steps` training steps of the multi-layer perceptron."""
    return timed(mlp(engine), steps)


WORKS = {"tiny-lm": tiny_lm_step_ms, "mlp": mlp_step_ms}


def main() -> None:
    """Parse the command line and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--work", choices=(*WORKS, "all"), default="all")
    args = parser.parse_args()
    with vf.VulkanEngine() as engine:
        for name, measure in WORKS.items():
            if args.work in (name, "all"):
                times = measure(engine, args.steps)
                print(f"{name:8s} median {statistics.median(times):8.1f} ms   least {min(times):8.1f}   {engine.name}")


if __name__ == "__main__":
    main()
