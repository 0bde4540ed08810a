"""One SGD update of many parameters, with or without momentum, in place, in one dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import Op, register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .adamw import check_update
from .row_kernels import FLAT_SIZE
from .sgd import SGD, check_sgd_settings
from .tensor_table import CHUNK, UPDATE_WORDS, by_parameter, check_lists, table_spec, update_table, write_table

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_ARGS = "in u32x4 table, in f32 state, step, uint num_tensors, uint has_state"
PLAIN = Kernel(
    "sgd_many",
    "update_many.comp",
    _ARGS,
    local_size=FLAT_SIZE,
    defines={"ADAMW": 0, "MOMENTUM": 0, "CHUNK": CHUNK},
)
WITH_MOMENTUM = Kernel(
    "sgd_momentum_many",
    "update_many.comp",
    f"{_ARGS}, float momentum, uint nesterov",
    local_size=FLAT_SIZE,
    defines={"ADAMW": 0, "MOMENTUM": 1, "CHUNK": CHUNK},
)


class SgdManyOp(Op):
    """Inputs: the state (or None), then p, g and with_momentum the momentum buffer of each parameter."""

    name = "sgd_many_"
    takes_step = True

    def written(self, num_inputs: int, **settings: Any) -> Sequence[int]:
        """p and the buffer of each."""
        stride = 2 + settings["with_momentum"]
        return [i for i in range(1, num_inputs) if i % stride != 2 % stride]

    def outputs(
        self,
        state: TensorSpec | None,
        *specs: TensorSpec,
        with_momentum: bool,
        weight_decays: tuple[float, ...],
        momentum: float,
        nesterov: bool,
    ) -> Sequence[TensorSpec]:
        for p, g, *buffer in by_parameter(specs, 2 + with_momentum):
            check_update(self.name, p, state, g=g, momentum_buffer=buffer[0] if buffer else None)
        for weight_decay in weight_decays:
            check_sgd_settings(self.name, with_momentum, momentum, weight_decay, nesterov)
        return ()

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        return (table_spec((len(specs) - 1) // (2 + settings["with_momentum"]), UPDATE_WORDS),)

    def flops(self, state: TensorSpec | None, *specs: TensorSpec, with_momentum: bool, **settings: Any) -> int:
        return sum(SGD.flops(p) for p in specs[:: 2 + with_momentum])

    def reference(
        self,
        state: Any,
        *arrays: Any,
        with_momentum: bool,
        weight_decays: tuple[float, ...],
        momentum: float,
        nesterov: bool,
        step: StepParameters,
    ) -> Sequence[Any]:
        for (p, g, *buffer), decay in zip(by_parameter(arrays, 2 + with_momentum), weight_decays, strict=True):
            b = buffer[0] if buffer else None
            SGD.reference(p, g, b, state, momentum=momentum, weight_decay=decay, nesterov=nesterov, step=step)
        return ()

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        with_momentum: bool,
        weight_decays: tuple[float, ...],
        momentum: float,
        nesterov: bool,
    ) -> None:
        state, *tensors = inputs
        (table,) = outputs
        rows, groups = update_table(by_parameter(tensors, 2 + with_momentum), weight_decays)
        write_table(gpu, table, rows)
        has_state = state is not None
        args = (table, state if has_state else table, len(rows) // (UPDATE_WORDS // 2), int(has_state))
        if with_momentum:
            gpu.dispatch(WITH_MOMENTUM, groups, *args, momentum, int(nesterov))
        else:
            gpu.dispatch(PLAIN, groups, *args)

    def kernels(self) -> Iterable[Kernel]:
        return PLAIN, WITH_MOMENTUM


SGD_MANY = register(SgdManyOp())


def sgd_many_(
    engine: ComputeEngine,
    p: Sequence[Tensor],
    g: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None = None,
    state: Tensor | None = None,
    *,
    weight_decays: Sequence[float],
    momentum: float = 0.0,
    nesterov: bool = False,
) -> None:
    """`sgd_` on each (p, g, momentum buffer), with one weight decay a parameter, in one dispatch; the same bits.

    Raises ValueError for lists of different lengths, no or more than 65,535 parameters, and what `sgd_` refuses.
    """
    named = {"p": p, "g": g} | ({} if momentum_buffers is None else {"momentum_buffers": momentum_buffers})
    check_lists(SGD_MANY.name, **named, weight_decays=weight_decays)
    inputs = [tensor for group in zip(*named.values(), strict=True) for tensor in group]
    engine.execute(
        SGD_MANY,
        (state, *inputs),
        with_momentum=momentum_buffers is not None,
        weight_decays=tuple(weight_decays),
        momentum=momentum,
        nesterov=nesterov,
    )
