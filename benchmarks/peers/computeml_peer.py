"""computeml: float32 tensors and autograd on Vulkan."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import computeml as cml
import numpy as np
import work as works
from work import Attention, LmStep, Matmul, MlpStep, Unsupported, Work


class Job:
    """Calls `step`, then flushes, which waits."""

    def __init__(self, context: Any, step: Callable[[], None], results: Callable[[], dict[str, np.ndarray]]) -> None:
        self.context, self.step, self.results = context, step, results
        context.flush()

    def run(self) -> None:
        """Once."""
        self.step()
        self.context.flush()


class Library:
    """See worker.Library."""

    def __init__(self) -> None:
        self.version = version("computeml")
        self.context = cml.Context()
        self.device = self.context.device_name

    def prepare(self, work: Work) -> Job:
        """Matmul, attention and the perceptron."""
        match work:
            case Matmul():
                return self.matmul(work)
            case MlpStep():
                return self.perceptron(work)
            case Attention():
                return self.attention(work)
            case _:
                assert isinstance(work, LmStep)
                raise Unsupported("no grouped-query attention that can be trained")

    def matmul(self, work: Matmul) -> Job:
        """C = op(A) op(B)."""
        a, b = (self.context.asarray(x) for x in work.inputs())
        kept: dict[str, Any] = {}

        def step() -> None:
            kept["c"] = cml.ops.matmul(a, b, work.trans_a, work.trans_b)

        return Job(self.context, step, lambda: {"c": kept["c"].numpy()})

    def attention(self, work: Attention) -> Job:
        """Forward and backward; with several heads and a tape it makes the score matrix. Layout [seq, heads * dim]."""
        if work.batch != 1:
            raise Unsupported("its attention takes one sequence")
        shape = (work.seq, work.heads * work.head_dim)
        q, k, v, d_o = (self.context.asarray(x[0].swapaxes(0, 1).reshape(shape)) for x in work.inputs())
        kept: dict[str, Any] = {}
        for x in (q, k, v):
            x.requires_grad = True

        def step() -> None:
            for x in (q, k, v):
                if x.grad is not None:
                    x.grad.fill_(0.0)
            kept["o"] = cml.ops.attention(q, k, v, num_heads=work.heads, causal=True)
            cml.ops.mean(kept["o"] * d_o).backward()

        def results() -> dict[str, np.ndarray]:
            size = float(np.prod(shape))  # mean() divided by it
            found = {
                "o": kept["o"].numpy(),
                **{n: x.grad.numpy() * size for n, x in zip(names, (q, k, v), strict=True)},
            }
            return {n: a.reshape(1, work.seq, work.heads, work.head_dim).swapaxes(1, 2) for n, a in found.items()}

        names = ("d_q", "d_k", "d_v")
        return Job(self.context, step, results)

    def perceptron(self, work: MlpStep) -> Job:
        """Training steps; the loss comes back to the host every step."""
        layers = []
        for i, (weight, bias) in enumerate(work.weights()):
            activation = "relu" if i < len(work.sizes) - 2 else None
            weight = np.ascontiguousarray(weight.T)
            layers.append(cml.nn.Linear.from_numpy(self.context, weight, bias, activation=activation))
        model = cml.nn.Sequential(*layers).requires_grad_()
        optimizer = cml.optim.AdamW(
            model.parameters(),
            lr=works.LEARNING_RATE,
            betas=(works.BETA1, works.BETA2),
            eps=works.EPS,
            weight_decay=works.WEIGHT_DECAY,
        )
        x, labels = (self.context.asarray(value) for value in work.data())
        losses: list[float] = []

        def step() -> None:
            optimizer.zero_grad()
            loss = cml.ops.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))

        def results() -> dict[str, np.ndarray]:
            while len(losses) < works.CHECKED_STEPS:
                step()
            return {"losses": np.array(losses[: works.CHECKED_STEPS])}

        return Job(self.context, step, results)
