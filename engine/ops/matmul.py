"""Matrix product, batched, with transposes and an epilogue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import rounded
from ..expr import Expr
from ..expr_numpy import evaluate
from ..expr_walk import topological
from ..input_checks import described, require_tensors
from ..kernel import Kernel
from ..matmul_choice import MatmulChooser, call_name
from ..matmul_variants import PRECISIONS, SUBGROUP_SIZES, Product, all_variants, rounded_variants
from ..op import Op, register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from ..variant_choice import choice_state
from .activation import check_activation
from .matmul_check import checked
from .matmul_launch import (
    ALL_PAIRS,
    PAIRS_SUBGROUP,
    PLAIN,
    Epilogue,
    Layout,
    Plan,
    has_pairs,
    matmul_kernel,
    pairs_of,
    plan_of,
    run_plan,
    slice_of,
)
from .matmul_parts import SUM, OwnEpilogue, needed_shape, own_epilogue, usual_epilogue

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder


class _Shape:
    """Sizes of one product after folding: batch x [m, k] x [k, n]."""

    __slots__ = ("batch", "k", "m", "n", "out", "stride_a", "stride_b")

    def __init__(self, a: TensorSpec, b: TensorSpec, trans_a: bool, trans_b: bool) -> None:
        for name, spec in (("a", a), ("b", b)):
            if spec.dtype != "float32":
                raise ValueError(f"matmul: {name} is {spec.dtype}, needed is float32")
            if len(spec.shape) < 2:
                raise ValueError(f"matmul: {name} of shape {spec.shape} needs two dimensions or more")
        lead = a.shape[:-2]
        if b.shape[:-2] not in ((), lead):
            raise ValueError(
                f"matmul: leading dimensions of a {a.shape} and b {b.shape} differ: "
                "make them equal, or give b two dimensions"
            )
        self.m, self.k = a.shape[-2:] if not trans_a else (a.shape[-1], a.shape[-2])
        inner, self.n = b.shape[-2:] if not trans_b else (b.shape[-1], b.shape[-2])
        if inner != self.k:
            raise ValueError(
                f"matmul: a {a.shape}{' transposed' if trans_a else ''} has {self.k} columns, "
                f"b {b.shape}{' transposed' if trans_b else ''} has {inner} rows"
            )
        self.out = (*lead, self.m, self.n)
        self.batch = math.prod(lead)
        self.stride_a, self.stride_b = self.m * self.k, self.k * self.n
        if len(b.shape) == 2 and self.batch != 1:  # one B for all: more rows of A, or the same B every time
            self.stride_b = 0
            if not trans_a:
                self.m, self.batch = self.m * self.batch, 1


@cache
def layout_of(a: TensorSpec, b: TensorSpec, trans_a: bool, trans_b: bool) -> Layout:
    """Sizes and strides of a product. Raises ValueError for shapes or types that do not fit."""
    shape = _Shape(a, b, trans_a, trans_b)
    product = Product(shape.batch, shape.m, shape.n, shape.k)
    a_row, a_k = (1, shape.m) if trans_a else (shape.k, 1)
    b_col, b_k = (shape.k, 1) if trans_b else (1, shape.n)
    return Layout(product, shape.stride_a, shape.stride_b, a_row, a_k, b_col, b_k)


def plan_for(
    gpu: Recorder,
    a: Tensor,
    b: Tensor,
    layout: Layout,
    trans_a: bool,
    trans_b: bool,
    accumulate: bool,
    precision: str = "float32",
    epilogue: OwnEpilogue | None = None,
) -> Plan:
    """Choose a variant that is known to be right, and work out its dispatch. Kept, since steps repeat.

    epilogue: None for the usual one.
    """
    chooser = MatmulChooser.of(gpu)
    aligned = not (a.address | b.address) & 7  # both operands start on 8 bytes
    tune = choice_state().tune
    key = (layout, trans_a, trans_b, accumulate, precision, aligned, chooser.forced(), tune, epilogue)
    plan: Plan | None = chooser.plans.get(key)
    while plan is None:
        letters = f"{'NT'[trans_a]}{'NT'[trans_b]}"
        choice = chooser.choose(layout.product, letters, precision)
        kinds = {accumulate, accumulate or layout.product.k > slice_of(chooser.device, layout.product)}
        pairs = pairs_of(gpu, layout, choice) if aligned else PLAIN
        if all(checked(gpu, chooser, choice.variant, resumes, pairs) for resumes in kinds):
            plan = plan_of(gpu, chooser.device, layout, choice, pairs, epilogue=epilogue)
            kernels = [(plan.kernel, plan.more)[resumes] for resumes in kinds]
            chooser.keep(key, plan, call_name(layout.product, letters, precision), kernels)
    return plan


class MatmulOp(Op):
    """Inputs a, b, bias, residual, out (the last three may be None), then the operands of `epilogue`; see `matmul`.

    epilogue: instead of the usual one, and then without bias, residual and activation. numbers: those it takes.
    """

    name = "matmul"
    writes = (4,)
    takes_step = True  # random numbers of an epilogue

    def outputs(
        self,
        a: TensorSpec,
        b: TensorSpec,
        bias: TensorSpec | None,
        residual: TensorSpec | None,
        out: TensorSpec | None,
        *operands: TensorSpec,
        trans_a: bool,
        trans_b: bool,
        activation: str | None,
        accumulate: bool,
        precision: str = "float32",
        epilogue: OwnEpilogue | None = None,
        numbers: tuple[float, ...] = (),
    ) -> Sequence[TensorSpec]:
        shape = _Shape(a, b, trans_a, trans_b)
        if activation is not None:
            check_activation(self.name, activation)
        if precision not in PRECISIONS:
            raise ValueError(f"matmul: unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
        wanted = {"bias": (bias, (shape.n,)), "residual": (residual, shape.out), "out": (out, shape.out)}
        for name, (spec, needed) in wanted.items():
            if spec is not None and spec != TensorSpec(needed):
                raise ValueError(f"matmul: {name} is {spec.dtype} {spec.shape}, needed is float32 {needed}")
        kinds = () if epilogue is None else epilogue.kinds
        for i, (kind, spec) in enumerate(zip(kinds, operands, strict=True)):
            if spec != TensorSpec(needed := needed_shape(kind, shape.out)):
                raise ValueError(f"matmul: operand {i} is {spec.dtype} {spec.shape}, needed is float32 {needed}")
        if out is not None:
            return ()
        if accumulate:
            raise ValueError("matmul: accumulate=True needs out, the tensor to add to")
        return (TensorSpec(shape.out),)

    def flops(
        self,
        a: TensorSpec,
        b: TensorSpec,
        *rest: Any,
        trans_a: bool,
        trans_b: bool,
        epilogue: OwnEpilogue | None = None,
        **settings: Any,
    ) -> int:
        shape = _Shape(a, b, trans_a, trans_b)
        each = 0 if epilogue is None else sum(bool(node.args) for node in topological([epilogue.root]))
        return shape.batch * shape.m * shape.n * (2 * shape.k + each)

    def reference(
        self,
        a: Any,
        b: Any,
        bias: Any,
        residual: Any,
        out: Any,
        *operands: Any,
        trans_a: bool,
        trans_b: bool,
        activation: str | None,
        accumulate: bool,
        precision: str = "float32",
        epilogue: OwnEpilogue | None = None,
        numbers: tuple[float, ...] = (),
        step: StepParameters | None = None,
    ) -> Sequence[Any]:
        a, b = rounded(a, precision), rounded(b, precision)
        value = np.matmul(np.swapaxes(a, -1, -2) if trans_a else a, np.swapaxes(b, -1, -2) if trans_b else b)
        if accumulate:
            value = out + value
        root = usual_epilogue(bias is not None, activation, residual is not None) if epilogue is None else epilogue.root
        if root is not SUM:
            given = {"bias": bias, "residual": residual} if epilogue is None else epilogue.named(operands, numbers)
            given = {name: array for name, array in given.items() if array is not None}
            (value,) = evaluate([root], step=step, sum=value, **given)
        if out is None:
            return (value,)
        out[...] = value
        return ()

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        trans_a: bool,
        trans_b: bool,
        activation: str | None,
        accumulate: bool,
        precision: str = "float32",
        epilogue: OwnEpilogue | None = None,
        numbers: tuple[float, ...] = (),
    ) -> None:
        a, b, bias, residual, out = inputs[:5]
        assert a is not None and b is not None
        c = outputs[0] if out is None else out
        layout = layout_of(a.spec, b.spec, trans_a, trans_b)
        batch, m, n, _ = layout.product
        if batch * m * n:
            plan = plan_for(gpu, a, b, layout, trans_a, trans_b, accumulate, precision, epilogue)
            operands: Any = inputs[5:]
            run_plan(gpu, plan, layout, a, b, c, Epilogue(bias, residual, activation, accumulate, operands, numbers))

    def kernels(self) -> Iterable[Kernel]:
        for size in SUBGROUP_SIZES:
            for variant in all_variants(size):
                wanted = [PLAIN, *(p for p in ALL_PAIRS if size == PAIRS_SUBGROUP and has_pairs(variant, p))]
                yield from (matmul_kernel(variant, size, resumes, p) for p in wanted for resumes in (False, True))
            for variant in rounded_variants(size):
                yield from (matmul_kernel(variant, size, resumes) for resumes in (False, True))


MATMUL = register(MatmulOp())


def matmul(
    engine: ComputeEngine,
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    precision: str = "float32",
    epilogue: Expr | None = None,
    operands: Mapping[str, Tensor | float] | None = None,
) -> Tensor:
    """residual + activation(a @ b + bias), all float32; parts left out are not there.

    a [..., m, k] (trans_a: [..., k, m]), b [..., k, n] (trans_b: [..., n, k]); leading dimensions are equal, or b is
    two-dimensional and shared by all. bias [n]; activation "relu", "gelu" or "silu"; residual [..., m, n].
    out [..., m, n]: written in place and returned. accumulate: out + a @ b takes the place of a @ b.
    Every element is one chain of fused multiply-adds over k from 0, so |error| <= 2 k 2^-24 (|a| @ |b|) before the
    epilogue; with accumulate the chain starts from out, as if the products added before were the front of a longer k.

    precision "float16" or "bfloat16": a and b are rounded to it (to nearest even; float16 overflows to infinity from
    65,520), the sums stay float32. A device with cooperative matrices of that precision then multiplies on them, and
    the order of its sums is its own; elsewhere nothing is faster than float32. What is left of a @ b's relative error
    is 2^-10 (float16) or 2^-7 (bfloat16) of |a| @ |b|. Never chosen unless asked for.

    epilogue: what is stored instead, an expression of SUM (a @ b), of BIAS and RESIDUAL where those are given, and of
    any other names, whose values are `operands`: a tensor of C's shape, of [n] (a number a column), of [..., m, 1] (a
    number a row) or of one element; a number; for a `whole` an integer. Random numbers are those of C's elements. Its
    kernels are compiled at first use and kept in the cache folder; other numbers or shapes need no others. 128 bytes of
    arguments hold 5 tensors, or 4 and two numbers.

        gated = engine.matmul(x, w, epilogue=SUM * logistic(variable("gate")), operands={"gate": gate})

    Raises ValueError for shapes or types that do not fit, for accumulate without out, for an out that overlaps an
    input, and for an epilogue with an activation, without SUM, or with other names than there are values.
    """
    if operands is not None and not isinstance(operands, Mapping):
        raise TypeError(f"matmul: operands is {described(operands)}, needed are tensors and numbers by name")
    inputs: tuple[Tensor | None, ...] = (a, b, bias, residual, out)
    own: dict[str, Any] = {}
    if epilogue is not None or operands:
        require_tensors("matmul", a=a, b=b)
        if activation is not None:
            raise ValueError(
                f"matmul: epilogue and activation={activation!r}: make the activation part of the epilogue"
            )
        given: dict[str, Tensor | float] = dict(operands or {})
        for name, tensor in (("bias", bias), ("residual", residual)):
            if name in given:
                raise ValueError(f"matmul: operands has {name!r}, which is an argument of its own: {name}=...")
            if tensor is not None:
                given[name] = tensor
        form, tensors, numbers = own_epilogue(epilogue, given, _Shape(a.spec, b.spec, trans_a, trans_b).out)
        inputs, own = (a, b, None, None, out, *tensors), {"epilogue": form, "numbers": numbers}
    made = engine.execute(
        MATMUL,
        inputs,
        trans_a=trans_a,
        trans_b=trans_b,
        activation=activation,
        accumulate=accumulate,
        precision=precision,
        **own,
    )
    return made[0] if out is None else out
