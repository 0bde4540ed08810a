"""Any elementwise chain as one op, from expressions: compiled when first seen, then kept in memory and on disk."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..expr import Expr, variable, whole
from ..expr_derivative import Gradients
from ..expr_simplify import simplify
from ..expr_walk import expanded, named, substitute, topological
from ..input_checks import described
from ..kernel import Kernel
from ..map_kernel import MapKernel, Operand
from ..op import register
from ..setting_checks import check_float32, is_number
from ..tensor import Tensor, TensorSpec
from .elementwise import MapOp

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

Roots = tuple[Expr, ...]

# How an input lies under the common shape -> where element `index` is found; {n} is the argument with its period.
_PLACES = {
    "full": "index",
    "cycle": "index % args.{n}",  # its shape is the end of the common shape: a bias over rows
    "repeat": "index / args.{n}",  # its shape is the start, then ones: a number a row
    "one": "0u",
}


class _Layouts(NamedTuple):
    """How inputs of some shapes lie under their common shape: kind and period of each."""

    common: tuple[int, ...]
    size: int
    each: tuple[tuple[str, int], ...]


@lru_cache(maxsize=4096)
def _layouts(shapes: tuple[tuple[int, ...], ...]) -> _Layouts:
    """Raises ValueError when the shapes do not go together. A kind is "" where an input lies otherwise."""
    common = np.broadcast_shapes(*shapes)
    return _Layouts(common, math.prod(common), tuple(_layout(shape, common) or ("", 0) for shape in shapes))


def _layouts_of(specs: Sequence[TensorSpec]) -> _Layouts:
    return _layouts(tuple(spec.shape for spec in specs))


@lru_cache(maxsize=1024)
def _names_of(roots: Roots) -> tuple[list[str], list[str], frozenset[str]]:
    """Variables, whole numbers, and both."""
    floats, wholes = named(roots), named(roots, "whole")
    return floats, wholes, frozenset((*floats, *wholes))


def _layout(shape: tuple[int, ...], common: tuple[int, ...]) -> tuple[str, int] | None:
    """Layout and period of an input; None for one that lies otherwise, as [2, 1, 3] under [2, 5, 3]."""
    if shape == common:
        return "full", 1
    size, total = int(np.prod(shape)), int(np.prod(common))
    if size == 1:
        return "one", 1
    aligned = (1,) * (len(common) - len(shape)) + shape
    first = next(i for i, n in enumerate(aligned) if n != 1)
    if aligned[first:] == common[first:]:
        return "cycle", size
    last = len(aligned) - next(i for i, n in enumerate(reversed(aligned)) if n != 1)
    return ("repeat", total // max(size, 1)) if aligned[:last] == common[:last] else None


@lru_cache(maxsize=1024)
def _kernel(roots: Roots, layouts: tuple[str, ...], counts: tuple[int, int]) -> MapKernel:
    inputs = []
    for i, layout in enumerate(layouts):
        inputs.append(Operand(f"x{i}", f"x{i}", _PLACES[layout].format(n=f"period{i}"), layout in ("repeat", "one")))
    scalars = [f"uint period{i}" for i, layout in enumerate(layouts) if layout in ("cycle", "repeat")]
    scalars += [f"float s{i}" for i in range(counts[0])] + [f"uint n{i}" for i in range(counts[1])]
    outputs = {f"y{i}": root for i, root in enumerate(roots)}
    kernel = MapKernel("map", inputs, list(outputs), outputs, scalars=", ".join(scalars))
    for each in kernel.kernels():  # profiles tell one chain from another
        each.name = f"map_{each.key[:8]}{each.name[3:]}"
    return kernel


class MapAnyOp(MapOp):
    """Outputs y0, y1, ... from tensors x0, x1, ..., numbers s0, s1, ... and whole numbers n0, n1, ..."""

    name = "map"
    takes_step = True

    def outputs(self, *specs: TensorSpec, roots: Roots, **_: Any) -> Sequence[TensorSpec]:
        return (TensorSpec(_layouts_of(specs).common),) * len(roots)

    def map_kernel(  # type: ignore[override]
        self, *, roots: Roots, layouts: tuple[str, ...], counts: tuple[int, int], **_: Any
    ) -> MapKernel:
        return _kernel(roots, layouts, counts)

    def scalar_values(self, *specs: TensorSpec, numbers: tuple[float, ...], **_: Any) -> tuple[float, ...]:
        return (*(period for layout, period in _layouts_of(specs).each if layout in ("cycle", "repeat")), *numbers)

    def num_elements(self, *specs: TensorSpec) -> int:
        return _layouts_of(specs).size

    def allows_wide(self, *specs: TensorSpec) -> bool:
        return all(period % 4 == 0 for layout, period in _layouts_of(specs).each if layout in ("cycle", "repeat"))

    def flops(self, *specs: TensorSpec, roots: Roots, **_: Any) -> int:
        return sum(bool(node.args) for node in topological(expanded(roots))) * self.num_elements(*specs)

    def kernels(self) -> Iterable[Kernel]:
        return ()  # there are as many as there are expressions


MAP = register(MapAnyOp())


@lru_cache(maxsize=1024)
def _canonical(roots: Roots, tensors: tuple[str, ...], numbers: tuple[str, ...], wholes: tuple[str, ...]) -> Roots:
    """The expressions simplified and with names of their own.

    Chains that differ in names alone are one kernel, and no name can be a word of GLSL.
    """
    new = {variable(name): variable(f"x{i}") for i, name in enumerate(tensors)}
    new |= {variable(name): variable(f"s{i}") for i, name in enumerate(numbers)}
    new |= {whole(name): whole(f"n{i}") for i, name in enumerate(wholes)}
    return tuple(substitute([simplify(root) for root in roots], new))


def map_expressions(
    engine: ComputeEngine, what: Expr | Mapping[str, Expr], /, **inputs: Tensor | float
) -> Tensor | dict[str, Tensor]:
    """An expression (engine/expr.py) of tensors in one dispatch: gives a tensor, or for a mapping one for each name.

    inputs: for every variable of the expressions a float32 tensor, or a number; for every `whole` one an integer. The
    outputs have the common shape; a tensor may lack leading dimensions (a bias) or have 1 for trailing ones (a number a
    row), as NumPy broadcasts. The kernel is compiled when such an expression is first used and kept in the cache
    folder; other numbers or shapes need no other. Bits are those of the expression as written, each operation rounded
    once. Gradients: `pullback` (engine/expr_derivative.py); of its result inputs may be given, or left out, that the
    gradients do not depend on, and tensors among them count for the common shape.

    Raises ValueError for names that do not match, other types or shapes, or more than 128 bytes of arguments (about 14
    tensors).
    """
    if not isinstance(what, (Expr, Mapping)):
        raise TypeError(
            f"map: {described(what)} is no expression: build one from vkfold.expr.variables(...), "
            "or give a dict of name -> expression"
        )
    outputs = {"": what} if isinstance(what, Expr) else dict(what)
    if not outputs:
        raise ValueError("map: no expression is given")
    roots = tuple(outputs.values())
    for name, root in outputs.items():
        if not isinstance(root, Expr) or root.kind != "f":
            raise ValueError(f"map: output {name!r} is {root!r}, no float: cast(condition, 'float32') makes one of it")
    floats, wholes, wanted = _names_of(roots)
    if wanted != inputs.keys():
        also = what.inputs if isinstance(what, Gradients) else ()
        if wanted - inputs.keys() or inputs.keys() - wanted - set(also):
            _refuse_names(wanted, also, inputs)
        for name in inputs.keys() - wanted:
            if not isinstance(inputs[name], Tensor):
                _number(name, inputs[name])
        floats = [*floats, *(name for name in also if name not in wanted and isinstance(inputs.get(name), Tensor))]
    tensors = [name for name in floats if isinstance(inputs[name], Tensor)]
    numbers = [name for name in floats if name not in tensors]
    given: list[Any] = [inputs[name] for name in tensors]
    layouts = _checked_layouts(tensors, given)
    made = engine.execute(
        MAP,
        tuple(given),
        roots=_canonical(roots, tuple(tensors), tuple(numbers), tuple(wholes)),
        layouts=layouts,
        counts=(len(numbers), len(wholes)),
        numbers=(
            *(_number(name, inputs[name]) for name in numbers),
            *(_integer(name, inputs[name]) for name in wholes),
        ),
    )
    return made[0] if isinstance(what, Expr) else dict(zip(outputs, made, strict=True))


def _refuse_names(wanted: Set[str], also: Sequence[str], inputs: Mapping[str, Any]) -> None:
    missing, unknown = sorted(wanted - set(inputs)), sorted(set(inputs) - wanted - set(also))
    what = f"no value for {', '.join(missing)}" if missing else f"nothing is called {', '.join(unknown)}"
    raise ValueError(f"map: {what}; the expressions have {', '.join(sorted(wanted)) or 'no variables'}")


def _checked_layouts(names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[str, ...]:
    if not tensors:
        raise ValueError("map: at least one input must be a tensor: it gives the shape")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != "float32":
            raise ValueError(f"map: {name} is {tensor.dtype}, needed is float32: cast it first")
    try:
        found = _layouts(tuple(tensor.shape for tensor in tensors))
    except ValueError:
        raise ValueError(f"map: shapes do not go together: {_shapes(names, tensors)}") from None
    kinds = tuple(kind for kind, _ in found.each)
    if "" in kinds:
        name, tensor = names[kinds.index("")], tensors[kinds.index("")]
        raise ValueError(
            f"map: {name} of shape {tensor.shape} is neither the end nor the start of {found.common} "
            f"({_shapes(names, tensors)}): bring it to the common shape first"
        )
    return kinds


def _shapes(names: Sequence[str], tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{name} {tensor.shape}" for name, tensor in zip(names, tensors, strict=True))


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"map: {name} is {described(value)}, needed is a tensor or a number")
    return check_float32("map", name, value)


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise ValueError(f"map: {name} is {value!r}, needed is a whole number of 32 bits")
    return int(value)
