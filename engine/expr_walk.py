"""Going through expressions: every node in order, with parts replaced, with compound operations written out."""

from __future__ import annotations

import math
import struct
from collections.abc import Container, Iterable, Mapping

from .expr import Expr, exp, fma, make, where

# tanh(x) / x = 1 + z (c0 + z (c1 + ...)), z = x^2, for |x| < _TANH_NEAR: least maximum of the relative error, 4.6e-8,
# by Lawson's weighted least squares in float64 on 4,000 Chebyshev nodes in z. From 0.55 on tanh is above a half, where
# the error of 1 - exp(-2 |x|) is half as many units in the last place as below.
_TANH_NEAR = 0.5625
_TANH = (-0.3333287537097931, 0.1331907957792282, -0.05256512016057968, 0.016232920810580254)


def topological(roots: Iterable[Expr]) -> list[Expr]:
    """Every node once, arguments before what uses them, in an order that depends on the expressions alone."""
    order: dict[Expr, None] = {}
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.setdefault(node)
        elif node not in order:
            stack.append((node, True))
            stack += [(arg, False) for arg in reversed(node.args)]
    return list(order)


def substitute(roots: Iterable[Expr], new: Mapping[Expr, Expr]) -> list[Expr]:
    """The expressions with variables (or any other parts) replaced: y of one chain becomes x of the next.

    What is put in is not searched again. Raises ValueError when a replacement is of another kind (float, condition,
    whole number).
    """
    for old, replacement in new.items():
        if old.kind != replacement.kind:
            raise ValueError(f"cannot replace {old!r} by {replacement!r}: they are of different kinds")
    roots = list(roots)
    done: dict[Expr, Expr] = {}
    for node in topological(roots):
        args = [done[arg] for arg in node.args]
        done[node] = new[node] if node in new else make(node.op, *args) if args else node
    return [done[root] for root in roots]


def named(roots: Iterable[Expr], op: str = "variable") -> list[str]:
    """Names of the variables (or, with op="whole", whole numbers) the expressions have, in order of appearance."""
    return [node.name for node in topological(roots) if node.op == op]


def expanded(roots: Iterable[Expr], keep: Container[str] = ()) -> list[Expr]:
    """The expressions with logistic, tanh, max and min written out in simpler operations: what is printed.

    keep: operations that stay what they are.
    """
    roots = list(roots)
    new: dict[Expr, Expr] = {}
    for node in topological(roots):
        args = [new[arg] for arg in node.args]
        if node.op in keep:
            new[node] = make(node.op, *args)
        elif node.op == "logistic":
            new[node] = where(args[0] > 0.0, 1.0 - logistic_tail(args[0]), logistic_tail(args[0]))
        elif node.op == "tanh":
            new[node] = _tanh(args[0])
        elif node.op in ("max", "min"):
            a, b = args
            new[node] = where(a < b if node.op == "max" else b < a, b, a)
        else:
            new[node] = make(node.op, *args) if args else node
    return [new[root] for root in roots]


def _tanh(x: Expr) -> Expr:
    """tanh(x): from exp(-2 |x|), which cannot overflow, but near 0, where that cancels, by a polynomial."""
    z = x * x
    factor: Expr | float = _TANH[-1]
    for number in (*reversed(_TANH[:-1]), 1.0):
        factor = fma(z, factor, number)
    e = exp(-2.0 * abs(x))
    size = (1.0 - e) / (1.0 + e)
    return where(abs(x) < _TANH_NEAR, x * factor, where(x < 0.0, -size, size))


def logistic_tail(x: Expr) -> Expr:
    """logistic(-|x|), what logistic(x) lacks to 0 or 1: nothing but 0 is divided where exp underflows."""
    e = exp(-abs(x))
    return e / (1.0 + e)


def is_float32(number: float) -> bool:
    """Whether float32 holds it exactly."""
    try:
        return not math.isfinite(number) or struct.unpack("<f", struct.pack("<f", number))[0] == number
    except OverflowError:
        return False
