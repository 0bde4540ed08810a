"""One SGD update of many parameters, with or without momentum, in place, in one dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .adamw import check_update
from .loop_kernels import LoopCall, LoopOp, every_text
from .sgd import SGD, check_sgd_settings
from .tensor_table import UPDATE_WORDS, by_parameter, check_lists, table_spec
from .update_kernels import launch_updates, update_call, update_kernel

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

PLAIN = update_kernel("sgd_many", "", (), 2, ADAMW=0, MOMENTUM=0)
WITH_MOMENTUM = update_kernel("sgd_momentum_many", "float momentum, uint nesterov", (0.875, 1), 3, ADAMW=0, MOMENTUM=1)


class SgdManyOp(LoopOp):
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

    def loop_calls(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        with_momentum: bool,
        momentum: float,
        nesterov: bool,
        **_: Any,
    ) -> Sequence[LoopCall]:
        tensors = list(by_parameter(inputs[1:], 2 + with_momentum))
        if with_momentum:
            return (update_call(WITH_MOMENTUM, tensors, (momentum, int(nesterov))),)
        return (update_call(PLAIN, tensors, ()),)

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
        (call,) = self.loop_calls(inputs, outputs, with_momentum=with_momentum, momentum=momentum, nesterov=nesterov)
        launch_updates(gpu, call, outputs[0], inputs[0], weight_decays)

    def kernels(self) -> Iterable[Kernel]:
        return every_text((PLAIN, WITH_MOMENTUM))


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
