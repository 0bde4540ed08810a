"""AdamW, SGD and Adafactor: moments in the parameter pool, updates that do nothing when a gradient is not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypedDict

import numpy as np

from ..engine.input_checks import described
from ..engine.ops.adafactor import factored_shapes
from ..engine.setting_checks import is_number
from ..engine.tensor import Tensor
from .counted_dict import CountedDict
from .hyperparameters import check_fraction, check_not_negative, check_positive, finite
from .layer import Layer, check_names
from .parameter import Parameter


class StepValues(TypedDict, total=False):
    """Fields of StepParameters that an optimizer sets."""

    bias_correction1: float
    bias_correction2: float
    square_weight: float


class NormReport(NamedTuple):
    """What the norm kernel wrote: still on the device.

    names: of the tensors in `sums`, in order. sums [n]: sum of squares of each gradient. state [4]: clip factor,
    1 when all is finite else 0, global norm, loss.
    """

    names: tuple[str, ...]
    sums: Tensor
    state: Tensor


def gradients_of(parameters: Mapping[str, Parameter]) -> list[Tensor]:
    """Their gradients, in order."""
    return [p.grad for p in parameters.values() if p.grad is not None]


class Optimizer:
    """Base of the optimizers: one slot a parameter, in the model's order.

    learning_rate: used when `step` is given none. weight_decay: decoupled, on tensors of two or more dimensions only,
    unless decay_all. Raises ValueError for settings out of range, or a model without parameters.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, model: Layer, *, learning_rate: float, weight_decay: float, decay_all: bool) -> None:
        if not hasattr(model, "named_parameters"):
            raise TypeError(f"{type(self).__name__}: the model is {described(model)}, needed is a Layer")
        check_not_negative("learning_rate", learning_rate)
        check_not_negative("weight_decay", weight_decay)
        self.engine = model.engine
        self.parameters: dict[str, Parameter] = CountedDict(model.named_parameters())
        if not self.parameters:
            raise ValueError("the model has no parameters to optimize")
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.decay_all = decay_all
        self.num_updates = 0
        with self.engine.parameter_pool():
            self.moments: dict[str, tuple[Tensor, ...]] = CountedDict(
                (name, tuple(self.engine.zeros(shape) for shape in self.slot_shapes(p).values()))
                for name, p in self.parameters.items()
            )

    def slot_shapes(self, parameter: Parameter) -> dict[str, tuple[int, ...]]:
        """Slot -> shape of each moment of a parameter."""
        return dict.fromkeys(self.slots, parameter.shape)

    def named_moments(self) -> dict[str, Tensor]:
        """`SLOT.NAME` -> every moment."""
        return {
            f"{slot}.{name}": tensor
            for name, group in self.moments.items()
            for slot, tensor in zip(self.slot_shapes(self.parameters[name]), group, strict=True)
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
        sums, state = self.engine.gradient_norm(gradients_of(ready), loss, max_norm=max_norm)
        self.num_updates += 1
        self.update_all(ready, state)
        return NormReport(tuple(ready), sums, state)

    def update(self, name: str, parameter: Parameter, state: Tensor | None) -> None:
        """Record the update of one parameter."""
        raise NotImplementedError(f"{type(self).__name__} defines no update")

    def update_all(self, parameters: Mapping[str, Parameter], state: Tensor | None) -> None:
        """Record the update of many parameters that have gradients: one by one, unless there is something better."""
        for name, parameter in parameters.items():
            self.update(name, parameter, state)

    def take_back(self) -> None:
        """Do not count the last step: its kernels found something that is not finite and changed nothing."""
        self.num_updates -= 1

    def step_values(self) -> StepValues:
        """Fields of the step parameters that this optimizer sets for the update about to be made."""
        return {}

    def set_step_parameters(self, learning_rate: float | None = None) -> None:
        """Put learning rate and `step_values` into the engine's step parameters, if they are not there already."""
        now = self.engine.step_parameters
        rate = self.learning_rate if learning_rate is None else learning_rate
        check_not_negative("learning_rate", rate)
        wanted = replace(now, learning_rate=rate, **self.step_values())
        if wanted != now:
            self.engine.set_step_parameters(wanted)

    def decay_of(self, parameter: Parameter) -> float:
        """Weight decay of this parameter."""
        return self.weight_decay if self.decay_all or len(parameter.shape) >= 2 else 0.0

    # -- values ------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, np.ndarray]:
        """`SLOT.NAME` -> values of every moment, and `num_updates`."""
        state = {name: tensor.numpy() for name, tensor in self.named_moments().items()}
        state["num_updates"] = np.array([self.num_updates], np.int64)
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite every moment and `num_updates`, or change nothing.

        Raises ValueError that lists missing, unexpected and misshapen ones, or names what float32 cannot hold.
        """
        tensors = self.named_moments()
        check_names(type(self).__name__, {**{n: t.shape for n, t in tensors.items()}, "num_updates": (1,)}, state)
        num_updates = np.asarray(state["num_updates"])
        if num_updates.dtype.kind not in "iu" or num_updates[0] < 0:
            raise ValueError(f"num_updates is {num_updates!r:.60}, needed is a whole number that is not negative")
        self.engine.upload_all(tensors, state)
        self.num_updates = int(num_updates[0])


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
        check_fraction("beta1", beta1)
        check_fraction("beta2", beta2)
        check_positive("eps", eps)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        super().__init__(model, learning_rate=learning_rate, weight_decay=weight_decay, decay_all=decay_all)

    def step_values(self) -> StepValues:
        """The bias corrections 1 - beta^t of both moments, float64."""
        t = self.num_updates + 1
        return {"bias_correction1": 1.0 - self.beta1**t, "bias_correction2": 1.0 - self.beta2**t}

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

    def update_all(self, parameters: Mapping[str, Parameter], state: Tensor | None) -> None:
        """Record the update of all parameters as one op."""
        self.engine.adamw_many_(
            [p.data for p in parameters.values()],
            gradients_of(parameters),
            [self.moments[name][0] for name in parameters],
            [self.moments[name][1] for name in parameters],
            state,
            weight_decays=[self.decay_of(p) for p in parameters.values()],
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
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
        check_fraction("momentum", momentum)
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

    def update_all(self, parameters: Mapping[str, Parameter], state: Tensor | None) -> None:
        """Record the update of all parameters as one op."""
        self.engine.sgd_many_(
            [p.data for p in parameters.values()],
            gradients_of(parameters),
            [self.moments[name][0] for name in parameters],
            state,
            weight_decays=[self.decay_of(p) for p in parameters.values()],
            momentum=self.momentum,
            nesterov=self.nesterov,
        )


class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern 2018) without a first moment: a matrix [rows, cols] costs rows + cols numbers.

    The second moment of a matrix is the outer product of the moving averages of its row and column means of squares;
    a vector has a whole one. Their decay is beta2_t = 1 - t^decay_power (section 7.2); an update whose root mean square
    exceeds clip_threshold is scaled down to it (section 6), so clipping of gradients is not needed. Weight decay is
    decoupled. relative_step: the learning rate is multiplied by max(1e-3, rms(parameter)) (section 8).

    Raises ValueError for a decay_power that is not between -1 and 0, or an eps or clip_threshold that is not positive.
    """

    slots = ("row_mean_sq", "column_mean_sq", "mean_sq")

    def __init__(
        self,
        model: Layer,
        *,
        learning_rate: float = 1e-2,
        decay_power: float = -0.8,
        eps: float = 1e-30,
        clip_threshold: float = 1.0,
        relative_step: bool = False,
        weight_decay: float = 0.0,
        decay_all: bool = False,
    ) -> None:
        if not -1 <= finite("decay_power", decay_power) < 0:
            raise ValueError(f"decay_power is {decay_power}, it must be at least -1 and below 0")
        check_positive("eps", eps)
        if not is_number(clip_threshold) or not clip_threshold > 0:  # infinite: nothing is clipped
            raise ValueError(f"clip_threshold is {clip_threshold!r:.40}, it must be a positive number")
        self.decay_power, self.eps, self.clip_threshold = decay_power, eps, clip_threshold
        self.relative_step = relative_step
        super().__init__(model, learning_rate=learning_rate, weight_decay=weight_decay, decay_all=decay_all)

    def slot_shapes(self, parameter: Parameter) -> dict[str, tuple[int, ...]]:
        """Row and column means of a matrix, the whole second moment of a vector."""
        shapes = factored_shapes(parameter.shape)
        return dict(zip(self.slots[:2] if len(shapes) == 2 else self.slots[2:], shapes, strict=True))

    def step_values(self) -> StepValues:
        """1 - beta2_t = t^decay_power, float64."""
        return {"square_weight": float(self.num_updates + 1) ** self.decay_power}

    def update(self, name: str, parameter: Parameter, state: Tensor | None) -> None:
        """Record the update of one parameter."""
        assert parameter.grad is not None
        first, *second = self.moments[name]
        self.engine.adafactor_(
            parameter.data,
            parameter.grad,
            first,
            second[0] if second else None,
            state,
            eps=self.eps,
            threshold=self.clip_threshold,
            weight_decay=self.decay_of(parameter),
            relative=1e-3 if self.relative_step else None,
        )
