"""One optimizer step over several micro-batches, and the loss on held-out data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..engine.compute_engine import ComputeEngine
from ..engine.errors import BadInputError
from ..engine.step_parameters import StepParameters
from ..engine.tensor import Tensor
from .fused_update import FusedUpdate
from .losses import IGNORE_INDEX
from .optimizers import Optimizer
from .parameter import Parameter

MicroBatch = tuple[np.ndarray, np.ndarray]


class LossModel(Protocol):
    """What TrainingStep needs of a model."""

    engine: ComputeEngine
    training: bool

    def loss(self, tokens: np.ndarray, targets: np.ndarray) -> Tensor:
        """Sum of losses [1] over targets that are not -100."""

    def backward(self) -> None:
        """Add to the gradients of loss_scale * (sum of losses)."""

    def named_parameters(self) -> dict[str, Parameter]:
        """Name -> parameter."""

    def clear_gradients(self) -> None:
        """Give gradients back."""

    def set_training(self, on: bool) -> None:
        """Dropout and keeping on or off."""


@dataclass(frozen=True)
class StepResult:
    """loss: nats a valid token, over all micro-batches. grad_norm: before clipping. num_valid: tokens with a label.

    updated: whether any weight changed. With fused updates that can be so although a gradient is not finite: training
    must then stop, and go on from an earlier save. non_finite: name of the first tensor that is not finite ("loss", or
    a parameter whose gradient it is), None when all are.
    """

    loss: float
    grad_norm: float
    num_valid: int
    updated: bool
    non_finite: str | None = None

    @property
    def finite(self) -> bool:
        """Whether loss and all gradients were finite."""
        return self.non_finite is None


class TrainingStep:
    """Forward, backward and update: `result = step(micro_batches, step=n, learning_rate=rate)`.

    The gradient is that of (sum of losses over all micro-batches) / (number of valid tokens in all of them), so
    micro-batches of different lengths weigh what their tokens weigh.

    max_norm: clip gradients to this global norm (0: off). seed: of the dropout generator. on_phase(phase, micro_batch):
    called after each forward and backward was recorded and after the update, to sample statistics. keep_gradients:
    leave the gradients in the parameters afterwards. fused_update: see FusedUpdate; the weights get the same bits.

    Raises BadInputError for a negative max_norm, or fused_update together with max_norm or keep_gradients.
    """

    def __init__(
        self,
        model: LossModel,
        optimizer: Optimizer,
        *,
        max_norm: float = 0.0,
        seed: int = 0,
        on_phase: Callable[[str, int], None] | None = None,
        keep_gradients: bool = False,
        fused_update: bool = False,
    ) -> None:
        if not max_norm >= 0:
            raise BadInputError(f"max_norm is {max_norm}, it must not be negative")
        if fused_update and max_norm:
            raise BadInputError(
                f"a fused update cannot clip to the global norm {max_norm:g}: the norm is known only when all "
                f"gradients are there, and each is applied and freed before the next one is made; set max_norm to 0"
            )
        if fused_update and keep_gradients:
            raise BadInputError("a fused update frees each gradient at once: it cannot keep_gradients")
        self.model = model
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.seed = seed
        self.on_phase = on_phase or (lambda phase, micro_batch: None)
        self.keep_gradients = keep_gradients
        self.fused_update = fused_update

    def __call__(self, micro_batches: Sequence[MicroBatch], *, step: int, learning_rate: float) -> StepResult:
        """micro_batches: (tokens, targets) integer arrays [batch, seq], target -100 where there is no label.

        When no label is valid at all, warns, runs nothing, and leaves weights, moments and their count unchanged.
        Raises BadInputError for an empty list, several micro-batches with a fused update, or a rate that is not finite.
        """
        if not micro_batches:
            raise BadInputError("a training step needs at least one micro-batch")
        if self.fused_update and len(micro_batches) > 1:
            raise BadInputError(
                f"a fused update cannot accumulate {len(micro_batches)} micro-batches: gradients are complete only in "
                f"the last one, so all of them would be alive between two; use one micro-batch"
            )
        if not math.isfinite(learning_rate):
            raise BadInputError(f"learning_rate is {learning_rate}: it must be finite")
        engine, optimizer = self.model.engine, self.optimizer
        self.model.clear_gradients()
        num_valid = sum(int((np.asarray(targets) != IGNORE_INDEX).sum()) for _, targets in micro_batches)
        if num_valid == 0:
            warnings.warn(f"step {step}: every label is ignored; the weights stay as they are", stacklevel=2)
            return StepResult(0.0, 0.0, 0, False)
        values = optimizer.step_values()
        if self.fused_update:
            ((tokens, targets),) = micro_batches
            engine.set_step_parameters(StepParameters(self.seed, step, 0, learning_rate, 1.0 / num_valid, **values))
            return self._fused(tokens, targets, num_valid)
        total: Tensor | None = None
        for i, (tokens, targets) in enumerate(micro_batches):
            engine.set_step_parameters(StepParameters(self.seed, step, i, learning_rate, 1.0 / num_valid, **values))
            loss = self.model.loss(tokens, targets)
            if total is None:
                total = loss
            else:
                engine.add_(total, loss)
            del loss
            self.on_phase("forward", i)
            self.model.backward()
            self.on_phase("backward", i)
        report = optimizer.step(learning_rate, loss=total, max_norm=self.max_norm)
        del total
        if not self.keep_gradients:
            self.model.clear_gradients()
        self.on_phase("optimizer", len(micro_batches) - 1)
        state = report.state.numpy()
        engine.end_batch()
        return self._result(report.names, report.sums, state, num_valid)

    def _fused(self, tokens: np.ndarray, targets: np.ndarray, num_valid: int) -> StepResult:
        with FusedUpdate(self.optimizer) as fused:
            fused.loss_known(self.model.loss(tokens, targets))
            self.on_phase("forward", 0)
            self.model.backward()
            self.on_phase("backward", 0)
            record = fused.finish()
        self.on_phase("optimizer", 0)
        report = fused.report(record)
        self.model.engine.end_batch()
        if not report.any_updated:
            self.optimizer.take_back()
        culprit = report.non_finite
        if culprit is None and not math.isfinite(report.norm):
            culprit = "global gradient norm"
        return StepResult(report.loss / num_valid, report.norm, num_valid, report.any_updated, culprit)

    def _result(self, names: Sequence[str], sums: Tensor, state: np.ndarray, num_valid: int) -> StepResult:
        finite, norm, loss = bool(state[1]), float(state[2]), float(state[3])
        culprit = None
        if not finite:
            self.optimizer.take_back()
            squares = sums.numpy()
            culprit = next((name for name, square in zip(names, squares, strict=True) if not np.isfinite(square)), "")
            if not math.isfinite(loss):
                culprit = "loss"
            culprit = culprit or "global gradient norm"
        return StepResult(loss / num_valid, norm, num_valid, finite, culprit)


def evaluate_loss(model: LossModel, batches: Iterable[MicroBatch]) -> float:
    """Mean loss in nats a valid token, without dropout and with nothing kept. NaN when no label is valid."""
    was_training = model.training
    model.set_training(False)
    total, num_valid = 0.0, 0
    try:
        for tokens, targets in batches:
            total += float(model.loss(tokens, targets).item())
            num_valid += int((np.asarray(targets) != IGNORE_INDEX).sum())
    finally:
        model.set_training(was_training)
    model.engine.end_batch()
    return total / num_valid if num_valid else math.nan
