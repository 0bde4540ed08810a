"""One AdamW update of many parameters, in place, in one dispatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .adamw import ADAMW, check_adamw_settings, check_update
from .loop_kernels import LoopCall, LoopOp, every_text
from .tensor_table import UPDATE_WORDS, by_parameter, check_lists, table_spec
from .update_kernels import launch_updates, update_call, update_kernel

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

KERNEL = update_kernel(
    "adamw_many",
    "float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float eps",
    (0.875, 0.125, 0.75, 0.25, 1e-8),
    4,
    ADAMW=1,
)


class AdamWManyOp(LoopOp):
    """Inputs: the state (or None), then p, g, m, v of each parameter; all p, m and v change in place."""

    name = "adamw_many_"
    takes_step = True

    def written(self, num_inputs: int, **settings: Any) -> Sequence[int]:
        """p, m and v of each."""
        return [i for i in range(1, num_inputs) if i % 4 != 2]

    def outputs(
        self,
        state: TensorSpec | None,
        *specs: TensorSpec,
        weight_decays: tuple[float, ...],
        beta1: float,
        beta2: float,
        eps: float,
    ) -> Sequence[TensorSpec]:
        for p, g, m, v in by_parameter(specs, 4):
            check_update(self.name, p, state, g=g, m=m, v=v)
        for weight_decay in weight_decays:
            check_adamw_settings(self.name, beta1, beta2, eps, weight_decay)
        return ()

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        return (table_spec((len(specs) - 1) // 4, UPDATE_WORDS),)

    def flops(self, state: TensorSpec | None, *specs: TensorSpec, **settings: Any) -> int:
        return sum(ADAMW.flops(p) for p in specs[::4])

    def reference(
        self,
        state: Any,
        *arrays: Any,
        weight_decays: tuple[float, ...],
        beta1: float,
        beta2: float,
        eps: float,
        step: StepParameters,
    ) -> Sequence[Any]:
        for (p, g, m, v), decay in zip(by_parameter(arrays, 4), weight_decays, strict=True):
            ADAMW.reference(p, g, m, v, state, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay, step=step)
        return ()

    def loop_calls(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, beta1: float, beta2: float, eps: float, **_: Any
    ) -> Sequence[LoopCall]:
        settings = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps)
        return (update_call(KERNEL, list(by_parameter(inputs[1:], 4)), settings),)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        weight_decays: tuple[float, ...],
        beta1: float,
        beta2: float,
        eps: float,
    ) -> None:
        (call,) = self.loop_calls(inputs, outputs, beta1=beta1, beta2=beta2, eps=eps)
        launch_updates(gpu, call, outputs[0], inputs[0], weight_decays)

    def kernels(self) -> Iterable[Kernel]:
        return every_text((KERNEL,))


ADAMW_MANY = register(AdamWManyOp())


def adamw_many_(
    engine: ComputeEngine,
    p: Sequence[Tensor],
    g: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    state: Tensor | None = None,
    *,
    weight_decays: Sequence[float],
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> None:
    """`adamw_` on each (p, g, m, v), with one weight decay a parameter, in one dispatch; the same bits.

    Shapes may differ from parameter to parameter; within one, all four are float32 of one shape.

    Raises ValueError for lists of different lengths, no or more than 65,535 parameters, and what `adamw_` refuses.
    """
    check_lists(ADAMW_MANY.name, p=p, g=g, m=m, v=v, weight_decays=weight_decays)
    inputs = [tensor for group in zip(p, g, m, v, strict=True) for tensor in group]
    engine.execute(ADAMW_MANY, (state, *inputs), weight_decays=tuple(weight_decays), beta1=beta1, beta2=beta2, eps=eps)
