"""Ops that are one fold over rows: kernel, launch and reference follow from the description (engine/fold.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..fold import FoldSpec
from ..fold_glsl import fold_arguments, fold_glsl
from ..kernel import Kernel
from ..op import Op
from ..step_parameters import StepParameters
from ..tensor import Tensor
from .row_kernels import ROW_SUBGROUPS, RowKernels, row_groups

if TYPE_CHECKING:
    from ..recorder import Recorder


class RowFold:
    """The two kernels of a fold (16-byte and 4-byte loads, the same bits), its launch and its reference."""

    def __init__(self, spec: FoldSpec) -> None:
        self.spec = spec
        self._kernels = RowKernels(spec.name, fold_glsl(spec), fold_arguments(spec), subgroups=ROW_SUBGROUPS)
        kinds = [spec.inputs[name] for name in spec.tensor_inputs]
        kinds += ["row"] * sum(name not in spec.inputs for name in spec.elements)
        self._by_columns = [i for i, kind in enumerate(kinds) if kind in ("row", "column")]
        self._first_row = kinds.index("row")

    def launch(self, gpu: Recorder, tensors: Sequence[Tensor], scalars: Sequence[float] = ()) -> None:
        """Record it. tensors: inputs in order, then outputs: elements that are no inputs, then values."""
        shape = tensors[self._first_row].shape
        rows, cols = math.prod(shape[:-1]), shape[-1]
        kernel = self._kernels.pick(cols, *(tensors[i] for i in self._by_columns))
        gpu.dispatch(kernel, row_groups(gpu, kernel, rows), *tensors, rows, cols, *scalars)

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


class RowFoldOp(Op):
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

    def kernels(self) -> Iterable[Kernel]:
        return self.fold.kernels() if self.fold_into is None else (*self.fold.kernels(), *self.fold_into.kernels())
