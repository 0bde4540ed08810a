"""Ops that are one fold over rows: kernel, launch and reference follow from the description (engine/fold.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..fold import FoldSpec
from ..fold_choice import RowCall, RowFoldChooser, family_of
from ..fold_glsl import fold_arguments, fold_glsl
from ..fold_variants import ROWS, RowVariant
from ..glsl_compiler import compiler_name
from ..kernel import Kernel
from ..kernel_registry import is_available
from ..kernel_text import KernelText, key_of
from ..op import Op
from ..step_parameters import StepParameters
from ..tensor import Tensor
from ..variant_choice import ask_state, choice_state
from .row_fold_check import right_fold
from .row_kernels import RowKernels

if TYPE_CHECKING:
    from ..recorder import Recorder


class RowPlan(NamedTuple):
    """The dispatch of a call, but for its tensors and scalars."""

    kernel: Kernel
    num_groups: int
    rows: int
    cols: int


class RowFold:
    """The two kernels of a fold (16-byte and 4-byte loads, the same bits), its launch and its reference."""

    def __init__(self, spec: FoldSpec) -> None:
        self.spec = spec
        self._key = key_of(spec)
        self._kernels = self._written(0)
        kinds = [spec.inputs[name] for name in spec.tensor_inputs]
        kinds += ["row"] * sum(name not in spec.inputs for name in spec.elements)
        self._by_columns = [i for i, kind in enumerate(kinds) if kind in ("row", "column")]
        self._first_row = kinds.index("row")
        self._variants: dict[tuple[RowVariant, bool], Kernel] = {}

    def _written(self, rounds: int) -> RowKernels:
        spec = self.spec
        text = KernelText(("row fold", self._key, rounds), lambda: fold_glsl(spec, rounds))
        return RowKernels(spec.name, text, fold_arguments(spec), subgroups=ROWS[-1], more={"family": "row_fold"})

    def variant(self, choice: RowVariant, *, wide: bool) -> Kernel:
        """The kernel of a variant. Rows a workgroup are put in when the pipeline is made; what keeps rows is a text of
        its own, for their number of rounds."""
        found = self._variants.get((choice, wide))
        if found is None:
            kernels = self._written(choice.rounds) if choice.rounds else self._kernels
            suffix = choice.barred_as.removeprefix(choice.kernel)
            found = (kernels.wide if wide else kernels.narrow).specialized(suffix, subgroups=choice.rows)
            self._variants[choice, wide] = found
        return found

    def launch(self, gpu: Recorder, tensors: Sequence[Tensor], scalars: Sequence[float] = ()) -> None:
        """Record it. tensors: inputs in order, then outputs: elements that are no inputs, then values."""
        shape, aligned = self.rows_of(tensors)
        chooser = gpu.choosers.get(RowFoldChooser)
        plan = chooser and chooser.plans.get((self, shape, aligned, ask_state()))
        kernel, num_groups, rows, cols = plan or self._plan(gpu, shape, aligned)
        gpu.dispatch(kernel, num_groups, *tensors, rows, cols, *scalars)

    def rows_of(self, tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], bool]:
        """Shape of a call's rows, and whether all that is read by columns begins on 16 bytes."""
        addresses = 0
        for i in self._by_columns:
            addresses |= tensors[i].address
        return tensors[self._first_row].shape, not addresses & 15

    def call(self, gpu: Recorder, shape: Sequence[int], wide: bool) -> RowCall:
        """What a variant is chosen by for rows of this shape."""
        kernel = self._kernels.wide if wide else self._kernels.narrow
        rows, cols = math.prod(shape[:-1]), shape[-1]
        call = RowCall(self.spec, kernel.name, rows, cols, gpu.max_invocations)
        kept = [choice for choice in family_of(RowFoldChooser.of(gpu).device, call) if choice.rounds]
        if not kept or compiler_name():
            return call
        return call._replace(compiles=is_available(gpu.pipelines.text_of(self.variant(kept[0], wide=wide))))

    def _plan(self, gpu: Recorder, shape: tuple[int, ...], aligned: bool) -> RowPlan:
        """Choose a variant that is known to be right, and work out its dispatch. Kept, since steps repeat."""
        chooser, wide = RowFoldChooser.of(gpu), aligned and shape[-1] % 4 == 0
        call = self.call(gpu, shape, wide)
        while True:
            choice = chooser.choose(call)
            if right_fold(gpu, chooser, self, choice, wide=wide):
                break
        plan = RowPlan(self.variant(choice, wide=wide), -(-call.rows // choice.rows), call.rows, call.cols)
        chooser.keep((self, shape, aligned, choice_state()), plan, call.key, [plan.kernel])
        return plan

    def reference(self, arrays: Sequence[Any], scalars: Sequence[float], step: StepParameters | None) -> list[Any]:
        """The outputs in NumPy that are tensors of their own; the others are written into the arrays."""
        spec = self.spec
        rounded: dict[str, Any] = {}
        for (name, kind), value in zip(spec.scalar_kinds.items(), scalars, strict=True):
            rounded[name] = np.float32(value) if kind == "float" else value
        inputs = dict(zip(spec.tensor_inputs, arrays, strict=True))
        made = []
        results = spec.reference(step, **inputs, **rounded)
        for name, result in zip((*spec.elements, *spec.values), results, strict=True):
            if name in inputs:
                inputs[name][...] = result
            else:
                made.append(result)
        return made

    def kernels(self) -> tuple[Kernel, Kernel]:
        """Both widths."""
        return self._kernels.both()


class RowFoldCalls(Op):
    """An op that is carried out by a fold over rows."""

    def fold_of_call(self, inputs: Sequence[Any], **settings: Any) -> tuple[RowFold, Sequence[Any], tuple[float, ...]]:
        """The fold of a call, its inputs and its scalars."""
        raise NotImplementedError


class RowFoldOp(RowFoldCalls):
    """An op of one fold; a subclass gives the spec, the shape rule and the cost."""

    fold: RowFold
    fold_into: RowFold | None = None  # where the last input may be left out: the fold that adds to it

    def _chosen(self, inputs: Sequence[Any]) -> tuple[RowFold, Sequence[Any]]:
        if self.fold_into is None:
            return self.fold, inputs
        return (self.fold, inputs[:-1]) if inputs[-1] is None else (self.fold_into, inputs)

    def scalar_values(self, **settings: Any) -> tuple[float, ...]:
        """Values of the fold's scalars, in order."""
        return ()

    def reference(self, *given: Any, **settings: Any) -> Sequence[Any]:
        fold, arrays = self._chosen(given)
        step = settings.pop("step") if self.takes_step else None
        return fold.reference(arrays, self.scalar_values(**settings), step)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **settings: Any) -> None:
        fold, inputs = self._chosen(inputs)
        fold.launch(gpu, (*inputs, *outputs), self.scalar_values(**settings))

    def fold_of_call(self, inputs: Sequence[Any], **settings: Any) -> tuple[RowFold, Sequence[Any], tuple[float, ...]]:
        fold, inputs = self._chosen(inputs)
        return fold, inputs, self.scalar_values(**settings)

    def kernels(self) -> Iterable[Kernel]:
        return self.fold.kernels() if self.fold_into is None else (*self.fold.kernels(), *self.fold_into.kernels())
