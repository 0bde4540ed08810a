"""What kernel_lab knows of an op: what a shape means, inputs, the call, and how much error is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..engine.block_fold_call import BlockCall
from ..engine.step_parameters import StepParameters
from ..engine.tensor import Tensor
from .error_bounds import Bounds, rounded_once

Call = Callable[..., Any]
Inputs = Callable[..., Sequence[np.ndarray]]  # of a generator and the sizes

STEP = StepParameters(
    step=2,
    learning_rate=0.01,
    bias_correction1=1 - 0.9**3,
    bias_correction2=1 - 0.999**3,
    square_weight=3**-0.8,
)


class Subject(NamedTuple):
    """An op as the lab runs it. inputs: float32 and int32 arrays; those that the op changes are outputs.

    call: one op on an engine, the inputs' tensors and what `settings` makes of the sizes; gives the outputs. bounds: of
    each output, from inputs and float64 outputs. forced: what VKFOLD_VARIANT calls it, where it has variants. folds:
    the block folds that it is made of, from the sizes.
    """

    meaning: str
    inputs: Inputs
    call: Call
    bounds: Bounds = rounded_once
    forced: str = ""
    settings: Callable[..., dict[str, Any]] = lambda *sizes: {}
    folds: Callable[..., Sequence[BlockCall]] = lambda *sizes: ()


def normal(*shapes: Callable[..., tuple[int, ...]]) -> Inputs:
    """Standard normal numbers, of shapes that follow from the sizes."""
    return lambda rng, *sizes: [rng.standard_normal(shape(*sizes)).astype(np.float32) for shape in shapes]


def changed(name: str, *outputs: int, **settings: Any) -> Call:
    """An op that changes the inputs with these numbers in place."""

    def call(engine: Any, *tensors: Tensor) -> list[Tensor]:
        getattr(engine, name)(*tensors, **settings)
        return [tensors[i] for i in outputs]

    return call
