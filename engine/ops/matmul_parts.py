"""What comes before and after the sums of a matmul, as expressions, and how its kernels have them.

Prologue: what becomes of an element of A as it is read. It is a fold without a walk (engine/fold.py), such as a norm's
`apply`: made of the element and numbers of its row and column. Epilogue: what is stored, made of SUM and whatever else
the expression names. The usual one, residual + activation(sum + bias), is in every kernel, its parts chosen as it runs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ..expr import Expr, same, select, variables, where, whole
from ..expr_glsl import glsl_branches, glsl_includes, glsl_statements
from ..expr_simplify import simplify
from ..expr_walk import substitute, topological
from ..fold import FoldSpec
from ..kernel import read_shader
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


class Parts(NamedTuple):
    """What of a kernel is made to order."""

    prologue: Prologue | None = None


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
    """Arguments of a kernel; without a prologue's operands and with a batch where there is no prologue."""
    fold = None if parts.prologue is None else parts.prologue.fold
    own = [] if fold is None else [f"in f32 {_pointer(name)}" for name, _ in operands_of(fold)]
    pointers = ["in f32 a", "in f32 b", "inout f32 c", "in f32 bias", "in f32 residual", *own]
    batched = "batch batch_a batch_b" if fold is None else ""
    sizes = f"m n k {batched} a_row a_k b_col b_k c_row c_col tiles_m tiles_n activation flags".split()
    return ", ".join([*pointers, *(f"uint {name}" for name in sizes)])


def parts_glsl(parts: Parts) -> str:
    """What comes before the text of matmul.comp or matmul_shared.comp: `finish`, and `prologue` where there is one."""
    roots = [USUAL_EPILOGUE]
    if parts.prologue is not None:
        roots += parts.prologue.fold.elements.values()
    text = "".join(read_shader(name) for name in glsl_includes(roots)) + _epilogue_glsl()
    return text if parts.prologue is None else text + _prologue_glsl(parts.prologue)


def _epilogue_glsl() -> str:
    names = {
        "has_bias": f"(args.flags & {HAS_BIAS}u)",
        "has_residual": f"((args.flags & {HAS_RESIDUAL}u) >> 1)",
        "activation": "args.activation",
        "bias": f"args.bias.v[(args.flags & {SWAPPED}u) != 0u ? row : column]",
        "residual": "args.residual.v[index]",
    }
    return (
        f"bool has_epilogue() {{ return args.activation != 0u || (args.flags & {HAS_BIAS | HAS_RESIDUAL}u) != 0u; }}\n"
        "// Element (row, column) of the kernel's C whose sum is complete; c_start: where this product's C begins.\n"
        "float finish(float sum, uint c_start, uint row, uint column) {\n"
        "const uint index = c_start + row * args.c_row + column * args.c_col;\n"
        f"float result;\n{glsl_branches('result', USUAL_EPILOGUE, names)}\nreturn result;\n}}\n"
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
