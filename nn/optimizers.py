"""AdamW and SGD: moments in the parameter pool, updates that do nothing when a gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..engine.tensor import Tensor
from .layer import Layer, check_names
from .parameter import Parameter


class NormReport(NamedTuple):
    """What the norm kernel wrote: still on the device.

    names: of the tensors in `sums`, in order. sums [n]: sum of squares of each gradient. state [4]: clip factor,
    1 when all is finite else 0, global norm, loss.
    """

    names: tuple[str, ...]
    sums: Tensor
    state: Tensor


class Optimizer:
    """Base of the optimizers: one slot a parameter, in the model's order.

    learning_rate: used when `step` is given none. weight_decay: decoupled, on tensors of two or more dimensions only,
    unless decay_all. Raises ValueError for settings out of range, or a model without parameters.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, model: Layer, *, learning_rate: float, weight_decay: float, decay_all: bool) -> None:
        if not learning_rate >= 0:
            raise ValueError(f"learning_rate is {learning_rate}, it must not be negative")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay is {weight_decay}, it must not be negative")
        self.engine = model.engine
        self.parameters = model.named_parameters()
        if not self.parameters:
            raise ValueError("the model has no parameters to optimize")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.decay_all = decay_all
        self.num_updates = 0
        with self.engine.parameter_pool():
            self.moments: dict[str, tuple[Tensor, ...]] = {
                name: tuple(self.engine.zeros(p.shape) for _ in self.slots) for name, p in self.parameters.items()
            }

    # -- one step ----------------------------------------------------------------------------------------------------
    def step(
        self, learning_rate: float | None = None, *, loss: Tensor | None = None, max_norm: float = 0.0
    ) -> NormReport:
        """Update every parameter that has a gradient.

        The global norm is worked out first, over parameters in their order; with max_norm > 0 gradients are scaled by
        min(1, max_norm / norm). When the loss [1] or a gradient is not finite, weights and moments stay as they are
        (the caller then calls `take_back`). Raises ValueError when no parameter has a gradient.
        """
        self.set_step_parameters(learning_rate)
        ready = {name: p for name, p in self.parameters.items() if p.grad is not None}
        if not ready:
            raise ValueError("no parameter has a gradient: run backward first")
        gradients = [p.grad for p in ready.values() if p.grad is not None]
        sums, state = self.engine.gradient_norm(gradients, loss, max_norm=max_norm)
        self.num_updates += 1
        for name, parameter in ready.items():
            self.update(name, parameter, state)
        return NormReport(tuple(ready), sums, state)

    def update(self, name: str, parameter: Parameter, state: Tensor | None) -> None:
        """Record the update of one parameter."""
        raise NotImplementedError

    def take_back(self) -> None:
        """Do not count the last step: its kernels found something that is not finite and changed nothing."""
        self.num_updates -= 1

    def bias_corrections(self) -> tuple[float, float]:
        """Of the update about to be made."""
        return 1.0, 1.0

    def set_step_parameters(self, learning_rate: float | None = None) -> None:
        """Put learning rate and bias corrections into the engine's step parameters, if they are not there already."""
        first, second = self.bias_corrections()
        now = self.engine.step_parameters
        rate = self.learning_rate if learning_rate is None else learning_rate
        wanted = replace(now, learning_rate=rate, bias_correction1=first, bias_correction2=second)
        if wanted != now:
            self.engine.set_step_parameters(wanted)

    def decay_of(self, parameter: Parameter) -> float:
        """Weight decay of this parameter."""
        return self.weight_decay if self.decay_all or len(parameter.shape) >= 2 else 0.0

    # -- values ------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, np.ndarray]:
        """`SLOT.NAME` -> values of every moment, and `num_updates`."""
        state = {
            f"{slot}.{name}": tensor.numpy()
            for name, tensors in self.moments.items()
            for slot, tensor in zip(self.slots, tensors, strict=True)
        }
        state["num_updates"] = np.array([self.num_updates], np.int64)
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite every moment. Raises ValueError that lists missing, unexpected and misshapen ones; nothing is
        changed then."""
        tensors = {
            f"{slot}.{name}": tensor
            for name, group in self.moments.items()
            for slot, tensor in zip(self.slots, group, strict=True)
        }
        check_names(type(self).__name__, {**{n: t.shape for n, t in tensors.items()}, "num_updates": (1,)}, state)
        for name, tensor in tensors.items():
            self.engine.upload(tensor, np.asarray(state[name]))
        self.num_updates = int(np.asarray(state["num_updates"])[0])


class AdamW(Optimizer):
    """Adam with decoupled weight decay: Loshchilov & Hutter 2019, algorithm 2; bias corrections of Kingma & Ba 2015.

    Two moments a parameter, float32. Raises ValueError for betas outside 0 <= beta < 1 or an eps that is not positive.
    """

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        model: Layer,
        *,
        learning_rate: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        decay_all: bool = False,
    ) -> None:
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            raise ValueError(f"betas are {beta1} and {beta2}, each must be at least 0 and below 1")
        if not eps > 0:
            raise ValueError(f"eps is {eps}, it must be positive")
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        super().__init__(model, learning_rate=learning_rate, weight_decay=weight_decay, decay_all=decay_all)

    def bias_corrections(self) -> tuple[float, float]:
        """1 - beta^t of both moments, float64."""
        t = self.num_updates + 1
        return 1.0 - self.beta1**t, 1.0 - self.beta2**t

    def update(self, name: str, parameter: Parameter, state: Tensor | None) -> None:
        """Record the update of one parameter."""
        first, second = self.moments[name]
        assert parameter.grad is not None
        self.engine.adamw_(
            parameter.data,
            parameter.grad,
            first,
            second,
            state,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.decay_of(parameter),
        )


class SGD(Optimizer):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013), Nesterov's on request; decay is decoupled.

    Raises ValueError for a momentum outside 0 <= momentum < 1.
    """

    slots = ("momentum",)

    def __init__(
        self,
        model: Layer,
        *,
        learning_rate: float = 1e-2,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decay_all: bool = False,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, it must be at least 0 and below 1")
        self.momentum, self.nesterov = momentum, nesterov
        super().__init__(model, learning_rate=learning_rate, weight_decay=weight_decay, decay_all=decay_all)

    def update(self, name: str, parameter: Parameter, state: Tensor | None) -> None:
        """Record the update of one parameter."""
        assert parameter.grad is not None
        self.engine.sgd_(
            parameter.data,
            parameter.grad,
            self.moments[name][0],
            state,
            momentum=self.momentum,
            weight_decay=self.decay_of(parameter),
            nesterov=self.nesterov,
        )
