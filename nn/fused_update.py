"""Updating each parameter as soon as its gradient is complete, so that gradients are never all alive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..engine.tensor import Tensor
from .optimizers import Optimizer
from .parameter import Parameter

OVERFLOWS = "gradient norm overflows: "  # and the parameter's name, in StepResult.non_finite


def is_finite_sum(square: Any) -> bool:
    """Whether a sum of squares of `engine.gradient_norm` is a finite number: one beyond float32 is negative there."""
    return bool(np.isfinite(square) and square >= 0)


def non_finite_gradient(squares: Iterable[tuple[str, Any]]) -> str | None:
    """From names and sums of squares (`engine.gradient_norm`): the first parameter whose gradient is not finite, else
    OVERFLOWS and the first whose gradient is, its norm not; None for neither."""
    bad = {name: square for name, square in squares if not is_finite_sum(square)}
    infinite = next((name for name, square in bad.items() if not np.isfinite(square)), None)
    return infinite or next((OVERFLOWS + name for name in bad), None)


class FusedReport(NamedTuple):
    """What a step with fused updates found. squares: name -> sum of squares of the gradient, in parameter order.

    loss: sum of losses.
    """

    squares: dict[str, np.float32]
    loss: float

    @classmethod
    def of(cls, names: dict[int, str], values: np.ndarray) -> FusedReport:
        """From the values of a step's record. names: place in it -> name."""
        return cls({name: np.float32(values[i]) for i, name in names.items()}, float(values[-1]))

    @property
    def norm(self) -> float:
        """The global norm of all gradients, added up in float32 in the order of the parameters, as the device does."""
        with np.errstate(all="ignore"):
            squares = np.array(list(self.squares.values()), np.float32)
            squares[squares < 0] = np.inf
            return float(np.sqrt(np.cumsum(squares, dtype=np.float32)[-1]))

    @property
    def non_finite(self) -> str | None:
        """ "loss", what `non_finite_gradient` says, or None."""
        return "loss" if not np.isfinite(self.loss) else non_finite_gradient(self.squares.items())

    @property
    def any_updated(self) -> bool:
        """Whether any tensor was changed."""
        return bool(np.isfinite(self.loss)) and any(map(is_finite_sum, self.squares.values()))


class FusedUpdate:
    """Listens to the gradients of one step: `with FusedUpdate(optimizer) as fused:` around forward and backward.

    A gradient that is complete is applied and freed at once; what layers did not report as complete is applied by
    `finish`. Those complete before the loss is known (an untied head's) wait for `loss_known`.

    A tensor stays as it is when the loss or its own gradient is not finite: with a loss that is not finite nothing
    changes at all, otherwise tensors whose gradients are finite do, and the caller must stop and say so.
    The engine's step parameters must hold the learning rate and the optimizer's `step_values` from the start.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.engine = optimizer.engine
        self._places = {id(parameter): (i, name) for i, (name, parameter) in enumerate(optimizer.parameters.items())}
        self._done: set[int] = set()
        self._waiting: list[Parameter] = []
        self._loss: Tensor | None = None
        self._record: Tensor | None = None  # sums of squares of all gradients, then the loss

    def __enter__(self) -> FusedUpdate:
        self._record = self.engine.zeros((len(self._places) + 1,))
        for parameter in self.optimizer.parameters.values():
            parameter.on_complete = self._complete
        return self

    def __exit__(self, *exc: object) -> None:
        for parameter in self.optimizer.parameters.values():
            parameter.on_complete = None
        self._waiting.clear()
        self._loss = self._record = None

    def loss_known(self, loss: Tensor) -> None:
        """The loss [1]: from now on gradients are applied as they become complete."""
        assert self._record is not None
        self._loss = loss
        self.engine.copy_into(self._record, loss, offset=len(self._places))
        for parameter in self._waiting:
            self._update(parameter)
        self._waiting.clear()

    def finish(self) -> Tensor:
        """Apply what is left, count the update; the record of the step, still on the device, for `report`.

        Raises ValueError when no parameter had a gradient.
        """
        for parameter in self.optimizer.parameters.values():
            if parameter.grad is not None:
                self._update(parameter)
        if not self._done:
            raise ValueError("no parameter has a gradient: run backward first")
        self.optimizer.num_updates += 1
        assert self._record is not None
        return self._record

    @property
    def names(self) -> dict[int, str]:
        """Place in the record -> name of each parameter that was updated, in order."""
        return {i: name for i, name in sorted(self._places.values()) if i in self._done}

    def report(self, record: Tensor) -> FusedReport:
        """Read the record back. Submits what was recorded and waits for it."""
        return FusedReport.of(self.names, record.numpy())

    def _complete(self, parameter: Parameter) -> None:
        if self._loss is None:
            self._waiting.append(parameter)
        else:
            self._update(parameter)

    def _update(self, parameter: Parameter) -> None:
        place, name = self._places[id(parameter)]
        if place in self._done:
            raise RuntimeError(f"{name}: a gradient came after its update: num_uses {parameter.num_uses} is too small")
        if parameter.grad is None:
            return
        assert self._record is not None
        sums, state = self.engine.gradient_norm([parameter.grad], self._loss)
        self.optimizer.update(name, parameter, state)
        self.engine.copy_into(self._record, sums, offset=place)
        parameter.clear_gradient()
        self._done.add(place)
