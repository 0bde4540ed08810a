"""What comes before and after the sums of a matmul, as expressions, and how its kernels have them.

Prologue: what becomes of an element of A as it is read. It is a fold without a walk (engine/fold.py), such as a norm's
`apply`: made of the element and numbers of its row and column. Epilogue: what is stored, made of SUM and whatever else
the expression names. The usual one, residual + activation(sum + bias), is in every kernel, its parts chosen as it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..expr import RANDOM, Expr, same, select, variable, variables, where, whole
from ..expr_glsl import glsl_branches, glsl_includes, glsl_statements
from ..expr_simplify import simplify
from ..expr_walk import named, substitute, topological
from ..fold import FoldSpec
from ..input_checks import described
from ..kernel import Kernel, read_shader
from ..setting_checks import check_float32, is_whole
from ..tensor import Tensor, TensorSpec
from .activation import ACTIVATIONS, activation_of

SUM, BIAS, RESIDUAL = variables("sum bias residual")
_HAS_BIAS, _ACTIVATION, _HAS_RESIDUAL = whole("has_bias"), whole("activation"), whole("has_residual")
HAS_BIAS, HAS_RESIDUAL, SWAPPED, LAST = 1, 2, 4, 8  # bits of the kernels' `flags`


def _usual_epilogue() -> Expr:
    value = where(same(_HAS_BIAS, 1), SUM + BIAS, SUM)
    cases = [(same(_ACTIVATION, number), activation_of(value, kind)) for kind, number in ACTIVATIONS.items()]
    value = select([condition for condition, _ in cases], [value for _, value in cases], value)
    return where(same(_HAS_RESIDUAL, 1), RESIDUAL + value, value)


USUAL_EPILOGUE = _usual_epilogue()


@cache
def usual_epilogue(bias: bool, activation: str | None, residual: bool) -> Expr:
    """USUAL_EPILOGUE with its choices made: an expression of SUM and, where they are there, BIAS and RESIDUAL."""
    numbers = {_HAS_BIAS: int(bias), _HAS_RESIDUAL: int(residual), _ACTIVATION: ACTIVATIONS.get(activation or "", 0)}
    chosen: dict[Expr, Expr] = {}
    for node in topological([USUAL_EPILOGUE]):
        if node.op == "where" and node.args[0].op == "same":
            what, number = node.args[0].args
            arm = node.args[1 if numbers[what] == number.number else 2]
            (chosen[node],) = substitute([arm], chosen)
    return chosen[USUAL_EPILOGUE]


class Prologue(NamedTuple):
    """What an operand of a kernel goes through on the way in: a fold that `check_prologue` takes.

    of_b: it is the kernel's B and not its A. along_k: the fold's rows lie along k.
    """

    fold: FoldSpec
    of_b: bool
    along_k: bool


class OwnEpilogue(NamedTuple):
    """An epilogue other than the usual one.

    root: of SUM, tensors x0, x1, ..., numbers s0, ... and whole numbers n0, ...
    kinds: how each tensor lies under C, one of PLACES. counts: how many numbers and whole numbers there are.
    """

    root: Expr
    kinds: tuple[str, ...] = ()
    counts: tuple[int, int] = (0, 0)

    def named(self, tensors: Sequence[Any], numbers: Sequence[float]) -> dict[str, Any]:
        """Values by name, as `evaluate` takes them, numbers rounded as the device gets them."""
        floats, wholes = numbers[: self.counts[0]], numbers[self.counts[0] :]
        found: dict[str, Any] = {f"x{i}": tensor for i, tensor in enumerate(tensors)}
        found |= {f"s{i}": np.float32(number) for i, number in enumerate(floats)}
        return found | {f"n{i}": int(number) for i, number in enumerate(wholes)}

    @property
    def takes_step(self) -> bool:
        """Whether there are random numbers in it."""
        return any(node.op in RANDOM for node in topological([self.root]))


# How an operand lies under C [..., m, n] -> where element (row, column), number `index` of C, finds its own.
PLACES = {
    "full": "index",
    "column": f"(args.flags & {SWAPPED}u) != 0u ? row : column",
    "row": "index / (args.c_row * args.c_col)",  # of the two strides one is 1 and the other n
    "one": "0u",
}


def needed_shape(kind: str, out: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an operand of an epilogue under C of shape `out`."""
    return {"full": out, "column": out[-1:], "row": (*out[:-1], 1), "one": (1,)}[kind]


def own_epilogue(
    root: Expr | None, given: Mapping[str, Any], out: tuple[int, ...]
) -> tuple[OwnEpilogue, list[Tensor], tuple[float, ...]]:
    """What `matmul` was given as an epilogue of C of shape `out`: its form, tensors and numbers. given: value by name.

    Raises ValueError for what is no epilogue, and for values that do not fit it.
    """
    if not isinstance(root, Expr) or root.kind != "f":
        what = "operands without an epilogue" if root is None else f"epilogue is {described(root)}"
        raise ValueError(f"matmul: {what}, needed is an expression of SUM and named values (vkfold.expr)")
    floats, wholes = (tuple(n for n in named([root], op) if n != "sum") for op in ("variable", "whole"))
    if "sum" not in named([root]):
        raise ValueError("matmul: the epilogue does not have SUM, so there is nothing to multiply for")
    if set(given) != {*floats, *wholes}:
        missing, unknown = sorted({*floats, *wholes} - set(given)), sorted(set(given) - {*floats, *wholes})
        what = f"no value for {', '.join(missing)}" if missing else f"nothing is called {', '.join(unknown)}"
        raise ValueError(f"matmul: {what}; the epilogue has {', '.join(('sum', *floats, *wholes))}")
    names = tuple(name for name in floats if isinstance(given[name], Tensor))
    kinds = tuple(_kind(name, given[name].spec, out) for name in names)
    tensors = [
        given[name] if kind != "one" else given[name].reshape(1) for name, kind in zip(names, kinds, strict=True)
    ]
    numbers = tuple(name for name in floats if name not in names)
    values = [check_float32("matmul", name, given[name]) for name in numbers]
    for name in wholes:
        if not is_whole(given[name]) or not 0 <= given[name] < 2**32:
            raise ValueError(f"matmul: {name} is {described(given[name])}, needed is a whole number of 32 bits")
        values.append(int(given[name]))
    return own_form(simplify(root), names, kinds, numbers, wholes), tensors, tuple(values)


@lru_cache(maxsize=1024)
def own_form(
    root: Expr, tensors: tuple[str, ...], kinds: tuple[str, ...], numbers: tuple[str, ...], wholes: tuple[str, ...]
) -> OwnEpilogue:
    """The form of an epilogue, from the names of its tensors, numbers and whole numbers.

    It has names of its own: those that differ in names alone are one kernel. Raises ValueError for more arguments than
    a dispatch takes.
    """
    new = {variable(name): variable(f"x{i}") for i, name in enumerate(tensors)}
    new |= {variable(name): variable(f"s{i}") for i, name in enumerate(numbers)}
    new |= {whole(name): whole(f"n{i}") for i, name in enumerate(wholes)}
    form = OwnEpilogue(substitute([root], new)[0], kinds, (len(numbers), len(wholes)))
    try:
        Kernel("matmul epilogue", "", kernel_arguments(Parts(epilogue=form)), local_size=1)
    except ValueError as error:
        raise ValueError(
            f"matmul: the epilogue takes {len(tensors)} tensors and {len(numbers) + len(wholes)} numbers, more than "
            "the 128 bytes of arguments that Vulkan promises hold: do a part of it by engine.map"
        ) from error
    return form


def _kind(name: str, spec: TensorSpec, out: tuple[int, ...]) -> str:
    for kind in PLACES:
        if spec == TensorSpec(needed_shape(kind, out)) or (kind == "one" and spec.size == 1):
            break
    else:
        kinds = ", ".join(str(needed_shape(kind, out)) for kind in PLACES)
        raise ValueError(f"matmul: {name} is {spec.dtype} {spec.shape}, needed is float32 of one of {kinds}")
    if spec.dtype != "float32":
        raise ValueError(f"matmul: {name} is {spec.dtype}, needed is float32")
    return kind


class Parts(NamedTuple):
    """What of a kernel is made to order; epilogue None: the usual one."""

    prologue: Prologue | None = None
    epilogue: OwnEpilogue | None = None


USUAL = Parts()


def check_prologue(fold: FoldSpec) -> None:
    """Raises ValueError for a fold that is more than one element of one row input."""
    more = [what for what in ("walks", "values", "picks", "skip", "scalars") if getattr(fold, what)]
    if more or len(fold.of_kind("row")) != 1 or len(fold.elements) != 1 or fold.of_kind("whole", "step"):
        raise ValueError(
            f"matmul: fold {fold.name!r} cannot be a prologue ({', '.join(more) or 'inputs or elements'}): "
            "it makes one element of one row input, of values and columns, and walks nowhere"
        )


def operands_of(fold: FoldSpec) -> list[tuple[str, str]]:
    """(name, kind) of what a prologue has beside the elements: "value", one a row, or "column"."""
    return [(name, kind) for name, kind in fold.inputs.items() if kind != "row"]


def kernel_arguments(parts: Parts) -> str:
    """Arguments of a kernel: no batch where there is a prologue, no activation beside an epilogue of its own."""
    fold, own = None if parts.prologue is None else parts.prologue.fold, parts.epilogue
    names = ["bias", "residual"] if own is None else [f"x{i}" for i in range(len(own.kinds))]
    names += [] if fold is None else [_pointer(name) for name, _ in operands_of(fold)]
    pointers = ["in f32 a", "in f32 b", "inout f32 c", *(f"in f32 {name}" for name in names)]
    pointers += ["step"] * (own is not None and own.takes_step)
    batched = "batch batch_a batch_b" if fold is None else ""
    sizes = (
        f"m n k {batched} a_row a_k b_col b_k c_row c_col tiles_m tiles_n {'activation' if own is None else ''} flags"
    )
    scalars = [f"uint {name}" for name in sizes.split()]
    if own is not None:
        scalars += [f"float s{i}" for i in range(own.counts[0])] + [f"uint n{i}" for i in range(own.counts[1])]
    return ", ".join([*pointers, *scalars])


@lru_cache(maxsize=256)
def parts_includes(parts: Parts) -> tuple[str, ...]:
    """The files of shaders/ that `parts_glsl` begins with."""
    roots = [USUAL_EPILOGUE if parts.epilogue is None else parts.epilogue.root]
    if parts.prologue is not None:
        roots += parts.prologue.fold.elements.values()
    return glsl_includes(roots)


@lru_cache(maxsize=256)  # many tiles share one text
def parts_glsl(parts: Parts) -> str:
    """What comes before the text of matmul.comp or matmul_shared.comp: `finish`, and `prologue` where there is one."""
    text = "".join(read_shader(name) for name in parts_includes(parts))
    if parts.epilogue is None:
        text += _usual_epilogue_glsl()
    else:
        text += _own_epilogue_glsl(parts.epilogue)
    return text if parts.prologue is None else text + _prologue_glsl(parts.prologue)


def _usual_epilogue_glsl() -> str:
    names = {
        "has_bias": f"(args.flags & {HAS_BIAS}u)",
        "has_residual": f"((args.flags & {HAS_RESIDUAL}u) >> 1)",
        "activation": "args.activation",
        "bias": f"args.bias.v[{PLACES['column']}]",
        "residual": f"args.residual.v[{PLACES['full']}]",
    }
    asked = f"args.activation != 0u || (args.flags & {HAS_BIAS | HAS_RESIDUAL}u) != 0u"
    return _finish(asked, glsl_branches("result", USUAL_EPILOGUE, names))


def _own_epilogue_glsl(own: OwnEpilogue) -> str:
    names = {f"{letter}{i}": f"args.{letter}{i}" for letter, n in zip("sn", own.counts, strict=True) for i in range(n)}
    body = "".join(f"const float x{i} = args.x{i}.v[{PLACES[kind]}];\n" for i, kind in enumerate(own.kinds))
    return _finish(f"(args.flags & {LAST}u) != 0u", body + glsl_statements({"result": own.root}, "float", names))


def _finish(asked: str, body: str) -> str:
    """asked: whether there is anything to do. body: assigns `result`."""
    return (
        f"bool has_epilogue() {{ return {asked}; }}\n"
        "// Element (row, column) of the kernel's C whose sum is complete; c_start: where this product's C begins.\n"
        "float finish(float sum, uint c_start, uint row, uint column) {\n"
        "const uint index = c_start + row * args.c_row + column * args.c_col;\n"
        f"float result;\n{body}\nreturn result;\n}}\n"
    )


def _prologue_glsl(prologue: Prologue) -> str:
    """Structs of what the operand's own index decides and of what k decides, how they are read, and `prologue`."""
    fold = prologue.fold
    kinds = {"Own": "column" if prologue.along_k else "value", "OfK": "value" if prologue.along_k else "column"}
    text, names = "", {fold.of_kind("row")[0]: "value"}
    for struct, kind in kinds.items():
        members = [name for name, what in operands_of(fold) if what == kind]
        names |= {name: f"{struct.lower()}.{_pointer(name)}" for name in members}
        declared = "".join(f" float {_pointer(name)};" for name in members) or " float nothing;"
        read = ", ".join(f"args.{_pointer(name)}.v[i]" for name in members) or "0.0"
        text += (
            f"struct {struct} {{{declared} }};\n{struct} {struct.lower()}_at(uint i) {{ return {struct}({read}); }}\n"
        )
    (root,) = fold.elements.values()
    body = glsl_statements({"result": simplify(root)}, "float", names)
    return f"{text}float prologue(float value, Own own, OfK ofk) {{\nfloat result;\n{body}\nreturn result;\n}}\n"


def _pointer(name: str) -> str:
    return f"of_{name}"
