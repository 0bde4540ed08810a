"""One optimizer step over several micro-batches, and the loss on held-out data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from ..engine.compute_engine import ComputeEngine
from ..engine.errors import BadInputError
from ..engine.input_checks import described
from ..engine.setting_checks import is_number, is_whole
from ..engine.step_parameters import StepParameters
from ..engine.tensor import Tensor
from .fused_update import FusedReport, FusedUpdate, non_finite_gradient
from .hyperparameters import check_not_negative, check_whole
from .losses import IGNORE_INDEX
from .optimizers import Optimizer
from .parameter import Parameter
from .step_replay import Captured, StepReplay

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
    a parameter whose gradient it is); with finite gradients whose squares are beyond float32 (a norm above 1.8e19) and
    that are not clipped, "gradient norm overflows: " and the parameter; None when all are. replayed: whether a captured
    step was submitted again, which changes no value.
    """

    loss: float
    grad_norm: float
    num_valid: int
    updated: bool
    non_finite: str | None = None
    replayed: bool = field(default=False, compare=False)

    @property
    def finite(self) -> bool:
        """Whether loss and all gradients were finite."""
        return self.non_finite is None


class TrainingStep:
    """Forward, backward and update: `result = step(micro_batches, step=n, learning_rate=rate)`.

    The gradient is that of (sum of losses over all micro-batches) / (number of valid tokens in all of them), so
    micro-batches of different lengths weigh what their tokens weigh.

    max_norm: clip gradients to this global norm (0: off). seed: of the dropout generator. on_phase(phase, micro_batch):
    called after each forward and backward was recorded and after the update; it may look at everything, so such steps
    are never replayed. on_pools(phase, micro_batch, stats): called at the same moments with `engine.pool_stats()`, in
    replayed steps too. keep_gradients: leave the gradients in the parameters afterwards. fused_update: see FusedUpdate;
    the weights get the same bits.

    On a Vulkan device a step that is the same as two before it, but for its data, seed and learning rate, is
    submitted again instead of being recorded (docs/replay.md): same bits, no Python for any op.

    Raises BadInputError for a negative max_norm, a seed that is no whole number, or fused_update together with max_norm
    or keep_gradients.
    """

    def __init__(
        self,
        model: LossModel,
        optimizer: Optimizer,
        *,
        max_norm: float = 0.0,
        seed: int = 0,
        on_phase: Callable[[str, int], None] | None = None,
        on_pools: Callable[[str, int, dict[str, Any]], None] | None = None,
        keep_gradients: bool = False,
        fused_update: bool = False,
    ) -> None:
        if not hasattr(model, "loss") or not hasattr(optimizer, "step_values"):
            raise TypeError(
                f"TrainingStep: model {described(model)} and optimizer {described(optimizer)}: needed are a model with "
                "`loss`, such as GPTModel, and an optimizer of it, such as AdamW(model)"
            )
        if not is_number(max_norm) or not max_norm >= 0:
            raise BadInputError(f"max_norm is {max_norm!r:.40}: it must be a number that is not negative")
        if not is_whole(seed):
            raise BadInputError(f"seed is {seed!r:.40}: it must be a whole number")
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
        self.on_phase = on_phase
        self.on_pools = on_pools
        self.keep_gradients = keep_gradients
        self.fused_update = fused_update
        self._prepared: tuple[Sequence[MicroBatch], int] | None = None
        self._while_running: Callable[[], object] | None = None  # of the call under way
        self._in_meanwhile = False
        self._replay: StepReplay | None = None
        if getattr(model.engine, "replayer", None) is not None and hasattr(model, "check_batch"):
            self._replay = StepReplay(model, optimizer)

    def prepare(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Check the data of the next step and put it where the device will take it from; then call with the same list.

        Meant for `while_running`. Never needed, and of no effect where the next call is given another list. The arrays
        must not change in between. Raises as the call would.
        """
        self._prepared = None
        num_valid = self._num_valid(micro_batches)
        if self._replay is not None:
            self._replay.prepare(self._settings(micro_batches), micro_batches)
        self._prepared = micro_batches, num_valid

    def discard_captures(self) -> None:
        """Record the next steps anew: to be called after changes that replay cannot notice (docs/replay.md)."""
        if self._replay is not None:
            self._replay.discard("discard_captures was called")

    def _num_valid(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Number of valid tokens. Raises BadInputError for what the model would not take."""
        check_micro_batches(micro_batches)
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is micro_batches:
            return prepared[1]
        if self._replay is not None:
            check: Callable[..., int] = self.model.check_batch  # type: ignore[attr-defined]
            return sum([check(tokens, targets) for tokens, targets in micro_batches])
        return sum(int(np.count_nonzero(np.asarray(targets) != IGNORE_INDEX)) for _, targets in micro_batches)

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        step: int,
        learning_rate: float,
        while_running: Callable[[], object] | None = None,
    ) -> StepResult:
        """micro_batches: (tokens, targets) integer arrays [batch, seq], target -100 where there is no label.

        while_running: called once the step was handed to the device, before the host waits for it: the place to load
        the next step's data (see `prepare`). It must leave the engine alone.

        When no label is valid at all, warns, runs nothing, and leaves weights, moments and their count unchanged.
        Raises BadInputError for an empty list, what is no pair of arrays, several micro-batches with a fused update, a
        rate that is negative or not finite, and a step that is no whole number of 32 bits; RuntimeError when called by
        its own while_running.
        """
        if self._in_meanwhile:
            raise RuntimeError(
                "while_running calls the step that is running: it may prepare the next step's data alone"
            )
        if self.fused_update and len(micro_batches) > 1:
            raise BadInputError(
                f"a fused update cannot accumulate {len(micro_batches)} micro-batches: gradients are complete only in "
                f"the last one, so all of them would be alive between two; use one micro-batch"
            )
        check_not_negative("learning_rate", learning_rate)
        check_whole("step", step, 2**32)
        self.model.engine.check_open()
        replay = self._replay
        if replay is not None and (replay.model is not self.model or replay.optimizer is not self.optimizer):
            replay = self._replay = StepReplay(self.model, self.optimizer)
        num_valid = self._num_valid(micro_batches)
        if num_valid == 0:
            self.model.clear_gradients()
            warnings.warn(f"step {step}: every label is ignored; the weights stay as they are", stacklevel=2)
            return StepResult(0.0, 0.0, 0, False)
        self._while_running = while_running
        values = self.optimizer.step_values()
        last = len(micro_batches) - 1
        parameters = StepParameters(self.seed, step, last, learning_rate, 1.0 / num_valid, **values)
        if replay is None:
            self.model.clear_gradients()
            self.model.engine.start_step()
            return self._recorded(micro_batches, parameters, num_valid)
        key = self._settings(micro_batches)
        captured = replay.find(key)
        if captured is None:
            self.model.clear_gradients()
            captured = replay.find(key)
        if captured is not None:
            return self._replayed(replay, captured, micro_batches, parameters, num_valid)
        self.model.engine.start_step()
        replay.start(key, self._obstacle())
        try:
            return self._recorded(micro_batches, parameters, num_valid)
        finally:
            replay.abandon()

    # -- recorded ----------------------------------------------------------------------------------------------------
    def _recorded(self, micro_batches: Sequence[MicroBatch], parameters: StepParameters, num_valid: int) -> StepResult:
        """parameters: of the last micro-batch."""
        if self.fused_update:
            return self._fused(micro_batches[0], parameters, num_valid)
        engine, model = self.model.engine, self.model
        total: Tensor | None = None
        for i, micro_batch in enumerate(micro_batches):
            loss = self._loss(micro_batch, replace(parameters, micro_batch=i))
            if total is None:
                total = loss
            else:
                engine.add_(total, loss)
            del loss
            self._phase("forward", i)
            model.backward()
            self._phase("backward", i)
        report = self.optimizer.step(parameters.learning_rate, loss=total, max_norm=self.max_norm)
        del total
        if not self.keep_gradients:
            model.clear_gradients()
        self._phase("optimizer", len(micro_batches) - 1)
        if self._replay is not None:
            self._replay.finish((report.state, report.sums), report.names)
        self._run_meanwhile()
        state = report.state.numpy()
        engine.end_batch()
        engine.end_step()
        return self._result(report.names, report.sums.numpy, state, num_valid)

    def _fused(self, micro_batch: MicroBatch, parameters: StepParameters, num_valid: int) -> StepResult:
        with FusedUpdate(self.optimizer) as fused:
            fused.loss_known(self._loss(micro_batch, parameters))
            self._phase("forward", 0)
            self.model.backward()
            self._phase("backward", 0)
            record = fused.finish()
        self._phase("optimizer", 0)
        if self._replay is not None:
            self._replay.finish((record,), fused.names)
        self._run_meanwhile()
        report = fused.report(record)
        self.model.engine.end_batch()
        self.model.engine.end_step()
        return self._fused_result(report, num_valid)

    def _loss(self, micro_batch: MicroBatch, parameters: StepParameters) -> Tensor:
        replay, i = self._replay, parameters.micro_batch
        if replay is None or not replay.recording:
            self.model.engine.set_step_parameters(parameters)
            return self.model.loss(*micro_batch)
        tokens, targets = micro_batch
        replay.set_parameters(parameters)
        loss: Any = self.model.loss  # a model with check_batch takes tensors, too
        return loss(replay.upload("tokens", i, tokens), replay.upload("targets", i, targets))

    def _phase(self, phase: str, micro_batch: int) -> None:
        if self.on_phase is not None:
            self.on_phase(phase, micro_batch)
        if self.on_pools is not None:
            stats = self.model.engine.pool_stats()
            if self._replay is not None:
                stats = self._replay.sample(phase, micro_batch, stats)
            self.on_pools(phase, micro_batch, stats)

    def _meanwhile(self) -> Callable[[], object] | None:
        """`while_running` of the call under way, once; no step may be made in it."""
        meanwhile, self._while_running = self._while_running, None
        if meanwhile is None:
            return None

        def guarded() -> None:
            try:
                self._in_meanwhile = True
                meanwhile()
            finally:
                self._in_meanwhile = False

        return guarded

    def _run_meanwhile(self) -> None:
        meanwhile = self._meanwhile()
        if meanwhile is not None:
            self.model.engine.flush_batch()
            meanwhile()

    # -- replayed ----------------------------------------------------------------------------------------------------
    def _settings(self, micro_batches: Sequence[MicroBatch]) -> tuple[Any, ...]:
        """What decides which ops a step records, beside model, optimizer and engine."""
        shapes = [(tokens.shape, targets.shape) for tokens, targets in micro_batches]
        return shapes, self.max_norm, self.fused_update, self.keep_gradients, self.on_phase, self.on_pools is not None

    def _obstacle(self) -> str:
        if self.on_phase is not None:
            return "on_phase may look at tensors"
        return "gradients are kept" if self.keep_gradients else ""

    def _replayed(
        self,
        replay: StepReplay,
        captured: Captured,
        micro_batches: Sequence[MicroBatch],
        parameters: StepParameters,
        num_valid: int,
    ) -> StepResult:
        results = replay.run(captured, micro_batches, parameters, self.on_pools, self._meanwhile())
        if self.fused_update:
            report = FusedReport.of(captured.names, np.array(results[0]))
            return self._fused_result(report, num_valid, replayed=True)
        return self._result(captured.names, lambda: np.array(results[1]), results[0], num_valid, replayed=True)

    # -- result ------------------------------------------------------------------------------------------------------
    def _fused_result(self, report: FusedReport, num_valid: int, *, replayed: bool = False) -> StepResult:
        if not report.any_updated:
            self.optimizer.take_back()
        culprit = report.non_finite
        if culprit is None and not math.isfinite(report.norm):
            culprit = "global gradient norm"
        return StepResult(report.loss / num_valid, report.norm, num_valid, report.any_updated, culprit, replayed)

    def _result(
        self,
        names: Sequence[str],
        sums: Callable[[], np.ndarray],
        state: np.ndarray | memoryview,
        num_valid: int,
        *,
        replayed: bool = False,
    ) -> StepResult:
        finite, norm, loss = bool(state[1]), float(state[2]), float(state[3])
        culprit = None
        if not finite:
            self.optimizer.take_back()
            culprit = non_finite_gradient(zip(names, sums(), strict=True))
            if not math.isfinite(loss):
                culprit = "loss"
            culprit = culprit or "global gradient norm"
        return StepResult(loss / num_valid, norm, num_valid, finite, culprit, replayed)


def check_micro_batches(micro_batches: Any) -> None:
    """Raises BadInputError unless this is a list, not empty, of pairs of arrays."""
    what = "a training step takes a list of (tokens, targets), two NumPy arrays of integers"
    if type(micro_batches) is not list and (not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str)):
        raise BadInputError(f"{what}; given is {described(micro_batches)}")
    if not micro_batches:
        raise BadInputError("a training step needs at least one micro-batch")
    for i, pair in enumerate(micro_batches):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadInputError(f"{what}; micro-batch {i} is {described(pair)}")
        for array in pair:
            if not isinstance(array, np.ndarray):
                remedy = "tensor.numpy()" if isinstance(array, Tensor) else "numpy.asarray(...)"
                raise BadInputError(f"{what}; micro-batch {i} holds {described(array)}: convert it with {remedy}")


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
