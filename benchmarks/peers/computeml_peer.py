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
        """Matmul and the perceptron."""
        match work:
            case Matmul():
                return self.matmul(work)
            case MlpStep():
                return self.perceptron(work)
            case Attention():
                raise Unsupported("with several heads its attention can be trained only with the score matrix made")
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
