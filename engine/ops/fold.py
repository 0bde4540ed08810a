"""Any fold over rows as one op: compiled when first seen, then kept in memory and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..expr_walk import topological
from ..fold import FoldSpec
from ..input_checks import described
from ..op import register
from ..setting_checks import check_setting
from ..tensor import Tensor, TensorSpec
from .row_fold import RowFold, RowFoldCalls
from .row_kernels import check_spec, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder


@lru_cache(maxsize=256)
def _row_fold(spec: FoldSpec) -> RowFold:
    return RowFold(spec)


def _row_shape(spec: FoldSpec, specs: Sequence[TensorSpec]) -> tuple[int, ...]:
    return next(s.shape for name, s in zip(spec.tensor_inputs, specs, strict=True) if spec.inputs[name] == "row")


class FoldAnyOp(RowFoldCalls):
    """Outputs of a fold that are no inputs: elements, then values."""

    name = "fold"
    takes_step = True

    def outputs(self, *specs: TensorSpec, spec: FoldSpec, scalars: tuple[float, ...]) -> Sequence[TensorSpec]:
        given = dict(zip(spec.tensor_inputs, specs, strict=True))
        first = next(name for name in given if spec.inputs[name] == "row")
        shape = given[first].shape
        rows_and_columns(f"fold {spec.name!r}", first, given[first], loops=spec.num_loops)
        needed = {"row": shape, "column": shape[-1:], "value": shape[:-1], "whole": shape[:-1]}
        for name, what in given.items():
            kind = spec.inputs[name]
            check_spec(f"fold {spec.name!r}", name, what, needed[kind], "int32" if kind == "whole" else "float32")
        elements = [TensorSpec(shape) for name in spec.elements if name not in spec.inputs]
        return (*elements, *(TensorSpec(shape[:-1]) for _ in spec.values))

    def written(self, num_inputs: int, **settings: Any) -> Sequence[int]:
        spec: FoldSpec = settings["spec"]
        return tuple(i for i, name in enumerate(spec.tensor_inputs) if name in spec.elements)

    def flops(self, *specs: TensorSpec, spec: FoldSpec, scalars: tuple[float, ...]) -> int:
        roots = [*spec.elements.values(), *(s.contribution for walk in spec.walks for s in walk.states)]
        each = sum(bool(node.args) for node in topological(roots)) + sum(len(walk.states) for walk in spec.walks)
        return each * TensorSpec(_row_shape(spec, specs)).size

    def reference(self, *arrays: Any, spec: FoldSpec, scalars: tuple[float, ...], step: Any) -> Sequence[Any]:
        return _row_fold(spec).reference(arrays, scalars, step)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        spec: FoldSpec,
        scalars: tuple[float, ...],
    ) -> None:
        _row_fold(spec).launch(gpu, (*inputs, *outputs), scalars)

    def fold_of_call(self, inputs: Sequence[Any], **settings: Any) -> tuple[RowFold, Sequence[Any], tuple[float, ...]]:
        return _row_fold(settings["spec"]), inputs, settings["scalars"]


FOLD = register(FoldAnyOp())


def fold(engine: ComputeEngine, spec: FoldSpec, /, **inputs: Tensor | float) -> dict[str, Tensor]:
    """A reduction over rows of your own (engine/fold.py) in one dispatch; the kernel is compiled at first use and kept.

    inputs: a tensor for each input of the spec but step parameters, with the shape its kind says, and a number for
    each scalar. Returns the outputs by name; one that is called like an input was written in its place and is that
    tensor. Keep the spec: another one, however equal, is compiled to the same text again. Raises ValueError for names,
    shapes or types that do not fit.
    """
    if not isinstance(spec, FoldSpec):
        raise TypeError(
            f"fold: {described(spec)} is no FoldSpec: describe the fold with vkfold.engine.fold.FoldSpec(...)"
        )
    wanted = [*spec.tensor_inputs, *spec.scalar_kinds]
    missing, unknown = sorted(set(wanted) - set(inputs)), sorted(set(inputs) - set(wanted))
    if missing or unknown:
        what = f"no value for {', '.join(missing)}" if missing else f"nothing is called {', '.join(unknown)}"
        raise ValueError(f"fold {spec.name!r}: {what}; it takes {', '.join(wanted)}")
    tensors: list[Any] = [inputs[name] for name in spec.tensor_inputs]
    for name, tensor in zip(spec.tensor_inputs, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"fold {spec.name!r}: {name} is {described(tensor)}, needed is a tensor")
    scalars: list[Any] = [inputs[name] for name in spec.scalar_kinds]
    for (name, kind), value in zip(spec.scalar_kinds.items(), scalars, strict=True):
        check_setting(f"fold {spec.name!r}", name, value, "float" if kind == "float" else "int")
    made = iter(engine.execute(FOLD, tuple(tensors), spec=spec, scalars=tuple(scalars)))
    return {
        name: tensors[spec.tensor_inputs.index(name)] if name in spec.inputs else next(made)
        for name in (*spec.elements, *spec.values)
    }
