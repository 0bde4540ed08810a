"""Tells a profiler which layer and phase of a training step an op belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.profiler import OpProfiler, Scope
from ..nn.gpt_model import GPTModel

_METHODS = ("forward", "backward", "forward_recompute", "normalize", "rebuild", "backward_from")


class ModelScopes:
    """Watches the layers of a model while it is used as a context manager. Give `on_phase` to the TrainingStep and
    call `start` before each step. Recomputed ops are in the phase "recompute".
    """

    def __init__(self, profiler: OpProfiler, model: GPTModel) -> None:
        self.profiler = profiler
        self.model = model
        self._watched: list[tuple[Any, str]] = []
        self._num_micro_batches = 1

    def start(self, num_micro_batches: int) -> None:
        """A step of so many micro-batches begins."""
        self._num_micro_batches = num_micro_batches
        self.profiler.scope = Scope("forward")

    def on_phase(self, phase: str, micro_batch: int) -> None:
        """A phase was recorded: name the next one."""
        if phase == "forward":
            following = "backward"
        elif phase == "backward":
            following = "forward" if micro_batch + 1 < self._num_micro_batches else "optimizer"
        else:
            following = ""
        self.profiler.scope = Scope(following)

    def __enter__(self) -> ModelScopes:
        model = self.model
        layers: list[tuple[str, Any]] = [("embedding", model.embedding), ("final_norm", model.final_norm)]
        layers += [("head", model.head_loss)] + [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        if model.config.positions == "learned":
            layers.append(("embedding", model.positions))
        for name, layer in layers:
            for method in _METHODS:
                if hasattr(layer, method):
                    self._watch(name, layer, method)
        return self

    def __exit__(self, *exc: object) -> None:
        for layer, method in self._watched:
            vars(layer).pop(method, None)
        self._watched.clear()

    def _watch(self, name: str, layer: Any, method: str) -> None:
        plain: Callable[..., Any] = getattr(layer, method)

        def watched(*inputs: Any, **settings: Any) -> Any:
            before = self.profiler.scope
            phase = "recompute" if method == "forward_recompute" else before.phase
            self.profiler.scope = Scope(phase, name)
            try:
                return plain(*inputs, **settings)
            finally:
                self.profiler.scope = before

        setattr(layer, method, watched)
        self._watched.append((layer, method))
