"""A matrix product whose first operand is the output of a norm that is never stored. Made by fusion, not called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..matmul_variants import Choice, candidates, estimate
from ..op import Op
from ..tensor import Tensor, TensorSpec
from ..variant_choice import MatmulChooser
from .layer_norm import LAYER_NORM_APPLY
from .matmul import MATMUL, layout_of
from .matmul_check import checked
from .matmul_launch import PLAIN, Epilogue, Norm, Plan, pairs_of, plan_of, run_plan
from .rms_norm import RMS_NORM_APPLY

if TYPE_CHECKING:
    from ..recorder import Recorder

RMS, LAYER = 1, 2  # settings of `norm`


class NormMatmulOp(Op):
    """Inputs: those of matmul with x in place of a, then rstd, weight, mean, bias of the norm (RMSNorm: None, None).

    Its bits are those of the norm's apply and then matmul.
    """

    name = "norm_matmul"
    writes = (4,)

    def outputs(self, *specs: TensorSpec | None, norm: int, **settings: Any) -> Sequence[TensorSpec]:
        return MATMUL.outputs(*specs[:5], **settings)

    def flops(self, *specs: TensorSpec | None, norm: int, **settings: Any) -> int:
        assert specs[0] is not None
        return MATMUL.flops(*specs[:5], **settings) + (2 if norm == RMS else 4) * specs[0].size

    def reference(self, *arrays: Any, norm: int, **settings: Any) -> Sequence[Any]:
        x, *rest = arrays[:5]
        rstd, weight, mean, bias = (None if array is None else array.reshape(-1) for array in arrays[5:])
        if norm == RMS:
            (y,) = RMS_NORM_APPLY.reference(x, weight, rstd)
        else:
            (y,) = LAYER_NORM_APPLY.reference(x, weight, bias, mean, rstd)
        return MATMUL.reference(y, *rest, **settings)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        norm: int,
        trans_a: bool,
        trans_b: bool,
        activation: str | None,
        accumulate: bool,
        precision: str = "float32",
    ) -> None:
        x, b, bias, residual, out, rstd, weight, mean, norm_bias = inputs
        assert x is not None and b is not None and rstd is not None and weight is not None
        c = outputs[0] if out is None else out
        layout = layout_of(x.spec, b.spec, trans_a, trans_b)
        if layout.product.work:
            plan = norm_plan(gpu, x, b, {"norm": norm, "trans_a": trans_a, "trans_b": trans_b})
            assert plan is not None, "fusion makes no such call"
            epilogue = Epilogue(bias, residual, activation, accumulate)
            run_plan(gpu, plan, layout, x, b, c, epilogue, Norm(rstd, weight, mean, norm_bias))

    def kernels(self) -> Iterable[Kernel]:
        return ()  # too many to ship: compiled when first seen


def norm_plan(gpu: Recorder, x: Tensor, b: Tensor, settings: Mapping[str, Any]) -> Plan | None:
    """How to carry a product out; None where no variant has a place for the norm: tiles of whole workgroups have none.

    Kept, since steps repeat.
    """
    layout, norm = layout_of(x.spec, b.spec, settings["trans_a"], settings["trans_b"]), settings["norm"]
    aligned = not (x.address | b.address) & 7
    chooser = MatmulChooser.of(gpu)
    key = ("norm", layout, norm, aligned, chooser.forced())
    plan = chooser.plans.get(key)
    if plan is None:
        usable = [
            choice
            for choice in candidates(chooser.device, layout.product)
            if not choice.variant.whole_workgroup and choice.variant.name not in chooser.table.barred
        ]
        for choice in sorted(usable, key=lambda choice: estimate(chooser.device, layout.product, choice)):
            if _is_right(gpu, chooser, choice):
                pairs = pairs_of(gpu, layout, choice) if aligned else PLAIN
                plan = chooser.plans[key] = plan_of(gpu, chooser.device, layout, choice, pairs, norm)
                break
    return plan


def _is_right(gpu: Recorder, chooser: MatmulChooser, choice: Choice) -> bool:
    return all(checked(gpu, chooser, choice.variant, resumes) for resumes in (False, True))


NORM_MATMUL = NormMatmulOp()
