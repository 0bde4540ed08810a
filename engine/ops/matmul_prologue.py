"""A matrix product whose first operand goes through a prologue and is never stored so. Made by fusion, not called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..expr_walk import topological
from ..fold import FoldSpec
from ..kernel import Kernel
from ..matmul_choice import MatmulChooser, tuning_key
from ..matmul_variants import Choice, candidates, estimate
from ..op import Op
from ..tensor import Tensor, TensorSpec
from ..variant_choice import Selection
from .matmul import MATMUL, layout_of
from .matmul_check import checked
from .matmul_launch import PLAIN, Epilogue, Plan, pairs_of, plan_of, run_plan
from .matmul_parts import check_prologue, operands_of
from .row_kernels import check_spec

if TYPE_CHECKING:
    from ..recorder import Recorder


class MatmulPrologueOp(Op):
    """Inputs: those of matmul with x [rows, cols] in place of a, then the operands of the prologue, in order: "value"
    [rows], "column" [cols].

    prologue: a fold without a walk (matmul_parts.py). The bits are those of the fold and then matmul. trans_a: the
    prologue's rows lie along k.
    """

    name = "matmul_prologue"
    writes = (4,)

    def outputs(self, *specs: TensorSpec | None, prologue: FoldSpec, **settings: Any) -> Sequence[TensorSpec]:
        check_prologue(prologue)
        x = specs[0]
        assert x is not None
        if len(x.shape) != 2:
            raise ValueError(f"{self.name}: x of shape {x.shape} needs two dimensions")
        for (name, kind), spec in zip(operands_of(prologue), specs[5:], strict=True):
            assert spec is not None
            check_spec(self.name, name, spec, x.shape[:1] if kind == "value" else x.shape[1:])
        return MATMUL.outputs(*specs[:5], **settings)

    def flops(self, *specs: TensorSpec | None, prologue: FoldSpec, **settings: Any) -> int:
        assert specs[0] is not None
        each = sum(bool(node.args) for node in topological(prologue.elements.values()))
        return MATMUL.flops(*specs[:5], **settings) + each * specs[0].size

    def reference(self, x: Any, *arrays: Any, prologue: FoldSpec, **settings: Any) -> Sequence[Any]:
        given = dict(zip((name for name, _ in operands_of(prologue)), arrays[4:], strict=True))
        (y,) = prologue.reference(**given, **{prologue.of_kind("row")[0]: x})
        return MATMUL.reference(y, *arrays[:4], **settings)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        prologue: FoldSpec,
        trans_a: bool,
        trans_b: bool,
        activation: str | None,
        accumulate: bool,
        precision: str = "float32",
    ) -> None:
        x, b, bias, residual, out, *operands = inputs
        assert x is not None and b is not None
        c = outputs[0] if out is None else out
        layout = layout_of(x.spec, b.spec, trans_a, trans_b)
        if layout.product.work:
            plan = prologue_plan(gpu, x, b, prologue, trans_a, trans_b)
            assert plan is not None, "fusion makes no such call"
            epilogue = Epilogue(bias, residual, activation, accumulate)
            run_plan(gpu, plan, layout, x, b, c, epilogue, [t for t in operands if t is not None])

    def kernels(self) -> Iterable[Kernel]:
        return ()  # too many to ship: compiled when first seen


def prologue_plan(gpu: Recorder, x: Tensor, b: Tensor, prologue: FoldSpec, trans_a: bool, trans_b: bool) -> Plan | None:
    """How to carry a product out; None where no variant has a place for a prologue: tiles of workgroups have none.

    Kept, since steps repeat.
    """
    layout = layout_of(x.spec, b.spec, trans_a, trans_b)
    aligned = not (x.address | b.address) & 7
    chooser = MatmulChooser.of(gpu)
    forced = chooser.forced()
    key = (prologue, layout, trans_a, aligned, forced)  # with one row or column strides do not tell how A lies
    plan: Plan | None = chooser.plans.get(key)
    if plan is None:
        choices = [chooser.named(forced)] if forced else candidates(chooser.device, layout.product)
        letters = f"{'NT'[trans_a]}{'NT'[trans_b]}"
        call = f"{tuning_key(layout.product, letters)} after {prologue.name}"
        for choice in sorted(choices, key=lambda choice: estimate(chooser.device, layout.product, choice)):
            if not choice.variant.whole_workgroup and _is_right(gpu, chooser, choice):
                pairs = pairs_of(gpu, layout, choice) if aligned else PLAIN
                plan = plan_of(gpu, chooser.device, layout, choice, pairs, prologue, along_k=trans_a)
                milliseconds = 1e-6 * estimate(chooser.device, layout.product, choice)
                why = f"least estimate of {len(choices)}, {milliseconds:.3g} ms"
                chooser.note(call, Selection(choice, "forced" if forced else why))
                chooser.keep(key, plan, call, (plan.kernel, plan.more))
                break
    return plan


def _is_right(gpu: Recorder, chooser: MatmulChooser, choice: Choice) -> bool:
    if choice.variant.name in chooser.table.barred:
        return False
    return all(checked(gpu, chooser, choice.variant, resumes) for resumes in (False, True))


MATMUL_PROLOGUE = MatmulPrologueOp()
