"""Simplification that keeps every bit: only identities that hold for all floats, signed zeros and infinities included.

x + 0 stays (it makes -0 into 0), 0 * x stays (NaN), and constants are folded only where the exact result and its
operands are float32 numbers, so that float32 and float64 would both have computed just that. A NaN stays NaN, though
perhaps with another payload. Nothing is reassociated, distributed or assumed finite.
"""

from __future__ import annotations

import math
from fractions import Fraction

from .expr import Expr, constant, fma, make, where
from .expr_walk import is_float32, topological


def simplify(root: Expr) -> Expr:
    """An expression of the same value, to the bit (a NaN may be another NaN)."""
    new: dict[Expr, Expr] = {}
    for node in topological([root]):
        new[node] = _made(node.op, *[new[arg] for arg in node.args]) if node.args else node
    return new[root]


def _made(op: str, *args: Expr) -> Expr:
    """An operation of simplified arguments, simplified."""
    if all(arg.op == "constant" for arg in args):
        folded = _fold(op, [arg.number for arg in args])
        if folded is not None:
            return constant(folded)
    rule = _RULES.get(op)
    found = rule(*args) if rule else None
    return make(op, *args) if found is None else found


def _fold(op: str, numbers: list[float]) -> float | None:
    if not all(math.isfinite(number) and is_float32(number) for number in numbers):
        return None
    if op in ("neg", "abs"):
        return -numbers[0] if op == "neg" else abs(numbers[0])
    exact = [Fraction(number) for number in numbers]
    if op == "add":
        value = exact[0] + exact[1]
    elif op == "sub":
        value = exact[0] - exact[1]
    elif op == "mul":
        value = exact[0] * exact[1]
    else:
        return None
    # a zero result has a sign that fractions do not know; subnormals may be flushed
    if not value or not Fraction(2) ** -126 <= abs(value) < Fraction(2) ** 127:
        return None
    rounded = float(value)
    return rounded if is_float32(rounded) and Fraction(rounded) == value else None


def _is(node: Expr, number: float) -> bool:
    return node is constant(number)


def _neg(a: Expr) -> Expr | None:
    return a.args[0] if a.op == "neg" else None


def _abs(a: Expr) -> Expr | None:
    if a.op == "abs":
        return a
    return make("abs", a.args[0]) if a.op == "neg" else None


def _add(a: Expr, b: Expr) -> Expr | None:
    if _is(b, -0.0):
        return a
    if _is(a, -0.0):
        return b
    if b.op == "neg":
        return a - b.args[0]
    return b - a.args[0] if a.op == "neg" else None


def _sub(a: Expr, b: Expr) -> Expr | None:
    if _is(b, 0.0):
        return a
    return a + b.args[0] if b.op == "neg" else None


def _mul(a: Expr, b: Expr) -> Expr | None:
    for one, other in ((a, b), (b, a)):
        if _is(one, 1.0):
            return other
        if _is(one, -1.0):
            return _made("neg", other)
    return a.args[0] * b.args[0] if a.op == b.op == "neg" else None


def _div(a: Expr, b: Expr) -> Expr | None:
    if _is(b, 1.0):
        return a
    return _made("neg", a) if _is(b, -1.0) else None


def _fma(a: Expr, b: Expr, c: Expr) -> Expr | None:
    if _is(c, -0.0):
        return _made("mul", a, b)
    for one, other in ((a, b), (b, a)):
        if _is(one, 1.0):
            return _made("add", other, c)
        if _is(one, -1.0):
            return _made("sub", c, other)
    return fma(a.args[0], b.args[0], c) if a.op == b.op == "neg" else None


def _same(a: Expr, b: Expr) -> Expr | None:
    return a if a is b else None


def _not(a: Expr) -> Expr | None:
    return a.args[0] if a.op == "not" else None


def _where(condition: Expr, a: Expr, b: Expr) -> Expr | None:
    if a is b:
        return a
    if condition.op == "not":
        return where(condition.args[0], b, a)
    if a.op == "where" and a.args[0] is condition:
        return where(condition, a.args[1], b)
    return where(condition, a, b.args[2]) if b.op == "where" and b.args[0] is condition else None


def _again(op: str):  # type: ignore[no-untyped-def]
    return lambda a: a if a.op == op else None


_RULES = {
    "neg": _neg,
    "abs": _abs,
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "fma": _fma,
    "max": _same,
    "and": _same,
    "or": _same,
    "not": _not,
    "min": _same,
    "where": _where,
    "float16": _again("float16"),
    "bfloat16": _again("bfloat16"),
}
