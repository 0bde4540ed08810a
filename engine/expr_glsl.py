"""Expressions as GLSL, for T = float and T = vec4: the same text each time, each common part computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

import numpy as np

from .expr import RANDOM, Expr, variable
from .expr_walk import expanded, substitute, topological

KINDS = ("float", "vec4")
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARISONS = {
    "lt": ("<", "lessThan"),
    "le": ("<=", "lessThanEqual"),
    "gt": (">", "greaterThan"),
    "ge": (">=", "greaterThanEqual"),
    "eq": ("==", "equal"),
    "ne": ("!=", "notEqual"),
}
# Zeros by sign, hidden from the compiler. Of those it sees, lavapipe's makes 0 * x and 0 / x into 0, x + 0 into x, and
# a choice between 1 and -0 into one between 1 and 0; SignedZeroInfNanPreserve, which it offers, changes little of that.
_UNSEEN_ZEROS = {
    False: "uintBitsToFloat(gl_LocalInvocationID.x >> 31)",
    True: "uintBitsToFloat((gl_LocalInvocationID.x >> 31) | 0x80000000u)",
}
# functions of shaders/exp.glsl and shaders/expr.glsl: the driver's own are not IEEE at the ends
_CALLS = {
    "abs": "abs",
    "fma": "fma",
    "exp": "exp_full",
    "exp_nonpositive": "exp_or_zero",
    "log": "log_full",
    "rsqrt": "rsqrt_full",
    "float16": "round_to_half",
    "bfloat16": "round_to_bfloat",
}


def glsl_includes(roots: Iterable[Expr]) -> tuple[str, ...]:
    """The files of shaders/ that the text of these expressions needs."""
    order = topological(expanded(roots))
    calls = {_call(node) for node in order}
    needed = ["random.glsl"] if any(node.op in RANDOM for node in order) else []
    if calls & {"exp_full", "log_full", "rsqrt_full", "round_to_half", "round_to_bfloat"}:
        needed.append("expr.glsl")
    elif "exp_or_zero" in calls:
        needed.append("exp.glsl")
    return tuple(needed)


def glsl_statements(outputs: Mapping[str, Expr], kind: str, names: Mapping[str, str] | None = None) -> str:
    """Statements that assign each output, which the caller has declared.

    kind: "float" or "vec4". names: GLSL text of kind's type for variables that are not called by their own name (of
    type uint for whole numbers). An output may have the name of a variable: it is written when nothing reads that any
    more. Random numbers need `index`, the number of the (first) element, and `args.step` around the text.
    """
    roots = expanded(outputs.values())
    lines, texts = _lines(roots, kind, names or {}, set(outputs) if len(outputs) > 1 else set())
    return "\n".join([*lines, *(f"{name} = {texts[root]};" for name, root in zip(outputs, roots, strict=True))])


def _lines(
    roots: Sequence[Expr], kind: str, names: Mapping[str, str], written: set[str]
) -> tuple[list[str], dict[Expr, str]]:
    order = topological(roots)
    uses = Counter(arg for node in order for arg in node.args) + Counter(roots)
    taken = {node.name for node in order if node.op == "variable"} | written
    overwrites = any(node.op == "variable" and node.name in written for node in order)
    texts: dict[Expr, str] = {}
    lines: list[str] = []
    number = 0
    for node in order:
        text = _text(node, kind, _with_unseen_zeros(node, kind, [texts[arg] for arg in node.args]), names)
        leaf = node.op == "constant" or node.kind == "u" or (node.op == "variable" and node.name in names)
        if node.op == "variable" and not (overwrites and node in roots):
            leaf = True
        if not leaf and (uses[node] > 1 or (overwrites and node in roots)):
            while f"t{number}" in taken:
                number += 1
            condition = "bool" if kind == "float" else "bvec4"
            lines.append(f"const {condition if node.is_condition else kind} t{number} = {text};")
            text = f"t{number}"
            number += 1
        texts[node] = text
    return lines, texts


def _with_unseen_zeros(node: Expr, kind: str, args: list[str]) -> list[str]:
    """The texts of a node's arguments; constant zeros that a driver would take for granted are hidden from it."""
    zeros = [arg.op == "constant" and arg.number == 0 for arg in node.args]
    if not any(zeros) or node.op not in (*_INFIX, "fma", "where"):
        return args
    if node.op == "where":
        numbers = [arg.number for arg in node.args[1:] if arg.op == "constant"]
        if len(numbers) < 2 or np.signbit(numbers[0]) == np.signbit(numbers[1]):
            return args
    hidden = []
    for arg, zero, text in zip(node.args, zeros, args, strict=True):
        unseen = _UNSEEN_ZEROS[bool(np.signbit(arg.number))] if zero else text
        hidden.append(f"vec4({unseen})" if zero and kind == "vec4" else unseen)
    return hidden


def _call(node: Expr) -> str | None:
    if node.op == "exp" and _at_most_zero(node.args[0]):
        return "exp_or_zero"
    return _CALLS.get(node.op)


def _at_most_zero(node: Expr) -> bool:
    """Whether a value is never above 0, as far as one can see without much thought."""
    if node.op == "neg":
        return node.args[0].op in ("abs", "exp") or (
            node.args[0].op == "mul" and node.args[0].args[0] is node.args[0].args[1]
        )
    if node.op == "mul":
        first, second = node.args
        return first.op == "constant" and first.number <= 0 and second.op in ("abs", "exp")
    return False


def _text(node: Expr, kind: str, args: list[str], names: Mapping[str, str]) -> str:
    op = node.op
    if op in ("variable", "whole"):
        return names.get(node.name, node.name)
    if op == "number":
        return f"{int(node.number)}u"
    if op in ("same", "below"):
        infix, function = ("==", "equal") if op == "same" else ("<", "lessThan")
        if kind == "float":
            return f"({args[0]} {infix} {args[1]})"
        return f"{function}(uvec4({args[0]}), uvec4({args[1]}))"
    if op in RANDOM:
        more = f", {args[0]}" if op == "random_below" else ""
        return f"{op}_{kind}(args.step, {args[-1]}, index{more})"
    if op == "not":
        return f"(!{args[0]})" if kind == "float" else f"not({args[0]})"
    if op in ("and", "or"):
        if kind == "float":
            return f"({args[0]} {'&&' if op == 'and' else '||'} {args[1]})"
        falls_to, holds = ("bvec4(false)", args[1]) if op == "and" else (args[1], "bvec4(true)")
        return f"mix({falls_to}, {holds}, {args[0]})"
    if op == "constant":
        text = _literal(node.number)
        return text if kind == "float" else f"vec4({text})"
    if op == "neg":
        return f"(-{args[0]})"
    if op in _INFIX:
        return f"({args[0]} {_INFIX[op]} {args[1]})"
    if op == "where":
        return f"mix({args[2]}, {args[1]}, {args[0]})"
    if op in _COMPARISONS:
        infix, function = _COMPARISONS[op]
        return f"({args[0]} {infix} {args[1]})" if kind == "float" else f"{function}({args[0]}, {args[1]})"
    return f"{_call(node)}({', '.join(args)})"


def _literal(number: float) -> str:
    with np.errstate(over="ignore"):
        value = np.float32(number)
    if not np.isfinite(value) or (value == 0 and np.signbit(value)):
        return f"uintBitsToFloat(0x{int(value.view(np.uint32)):08X}u)"
    return f"({float(number)!r})" if number < 0 else repr(float(number))


def glsl_branches(name: str, root: Expr, names: Mapping[str, str]) -> str:
    """Statements that assign `name`, a declared float, as `glsl_statements` would, but that a choice by whole numbers
    alone is a branch: it is the same for all of a dispatch, and what is not chosen is neither loaded nor computed.
    """
    lines: list[str] = []
    held: dict[Expr, Expr] = {}  # choice -> the variable that has it
    taken = {node.name for node in topological([root])}
    for node in topological([root]):
        if node.op == "where" and all(leaf.kind == "u" for leaf in topological([node.args[0]]) if not leaf.args):
            chosen = next(free for i in count(len(held)) if (free := f"chosen{i}") not in taken)
            taken.add(chosen)
            before, texts = _lines([node.args[0]], "float", names, set())
            one, other = (glsl_statements({chosen: arm}, "float", names) for arm in substitute(node.args[1:], held))
            lines += [*before, f"float {chosen};", f"if ({texts[node.args[0]]}) {{\n{one}\n}} else {{\n{other}\n}}"]
            held[node] = variable(chosen)
    lines.append(glsl_statements({name: substitute([root], held)[0]}, "float", names))
    return "\n".join(lines)
