"""Symbolic derivatives of expressions, in forms that stay finite and accurate where a formula of the book would not.

A branch that `where`, `maximum` or `minimum` does not take contributes exactly 0, even when what would multiply it is
infinite: a function clamped where it is flat has derivative 0 there, not infinity times 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from .expr import Expr, constant, fma, variable, where
from .expr_simplify import simplify
from .expr_walk import logistic_tail, named, topological

_ONE = constant(1.0)


def derivative(root: Expr, of: Expr) -> Expr:
    """The derivative of an expression by one of its variables.

    At a corner it is that of the branch taken there: `where` by its condition, `maximum` and `minimum` by their first
    argument when both are equal, |x| by that of x when x >= 0. Casts count as the identity (straight-through estimate,
    Bengio et al. 2013). Raises ValueError when `of` is no variable.
    """
    if of.op != "variable":
        raise ValueError(f"derivative by {of!r}, which is no variable")
    slopes: dict[Expr, Expr | None] = {}  # None: does not depend on it
    for node in topological([root]):
        slopes[node] = _ONE if node is of else _slope(node, [slopes[arg] for arg in node.args])
    found = slopes[root]
    return constant(0.0) if found is None else simplify(found)


def pullback(outputs: Expr | Mapping[str, Expr], names: str) -> dict[str, Expr]:
    """Gradients of a chain for some of its inputs, as expressions for the backward's kernel.

    outputs: as `engine.map` takes them; names: of inputs, with spaces between. Gives for each input `x` an
    expression called "d_x" of the chain's inputs and of the outputs' gradients, which are variables "d_" + output; "dy"
    is that of a single expression without a name. Raises ValueError for a name that no output depends on, or when an
    input is called as a gradient would be.
    """
    if not isinstance(outputs, (Expr, Mapping)):
        raise TypeError(f"pullback: {outputs!r:.40} is no expression: give one, or a dict of name -> expression")
    by_name = {"dy": outputs} if isinstance(outputs, Expr) else {f"d_{name}": root for name, root in outputs.items()}
    used = named(by_name.values())
    taken = sorted(set(by_name) & set(used))
    if taken:
        raise ValueError(f"pullback: inputs are called {', '.join(taken)}, as gradients of outputs are")
    gradients = {}
    for name in names.split():
        if name not in used:
            raise ValueError(f"pullback: {name!r} is not among {', '.join(used)}")
        parts = [(variable(given), derivative(root, variable(name))) for given, root in by_name.items()]
        terms = [_times(dy, slope) for dy, slope in parts if not _is_zero(slope)]
        total: Expr | None = None
        for term in terms:
            total = _sum(total, term)
        gradients[f"d_{name}"] = constant(0.0) if total is None else simplify(total)
    return gradients


def _slope(node: Expr, slopes: list[Expr | None]) -> Expr | None:
    if node.is_condition or all(slope is None for slope in slopes):
        return None
    op, args = node.op, node.args
    if op == "where":
        return _choose(args[0], slopes[1], slopes[2])
    if op == "max":
        return _choose(args[0] < args[1], slopes[1], slopes[0])
    if op == "min":
        return _choose(args[1] < args[0], slopes[1], slopes[0])
    if op == "add":
        return _sum(slopes[0], slopes[1])
    if op == "sub":
        return _sum(slopes[0], _times(constant(-1.0), slopes[1]))
    if op == "mul":
        return _product(args[0], slopes[1], args[1], slopes[0])
    if op == "fma":
        return _sum(_product(args[0], slopes[1], args[1], slopes[0]), slopes[2])
    if op == "div":
        return _sum(_times(1.0 / args[1], slopes[0]), _times(-(node / args[1]), slopes[1]))
    return _times(_outer(node), slopes[0])


def _outer(node: Expr) -> Expr:
    """The derivative of a function of one argument by that argument."""
    x = node.args[0]
    if node.op == "neg":
        return constant(-1.0)
    if node.op == "abs":
        return where(x < 0.0, -1.0, 1.0)
    if node.op in ("exp", "exp_nonpositive"):
        return node
    if node.op == "log":
        return 1.0 / x
    if node.op == "rsqrt":
        return -0.5 * node / x
    if node.op == "logistic":
        tail = logistic_tail(x)
        return tail * (1.0 - tail)
    if node.op == "tanh":
        tail = logistic_tail(2.0 * x)  # 1 - tanh(x)^2 = 4 tail (1 - tail), without cancellation
        return 4.0 * (tail * (1.0 - tail))
    return _ONE  # a cast


def _choose(condition: Expr, a: Expr | None, b: Expr | None) -> Expr | None:
    if a is None and b is None:
        return None
    zero = constant(0.0)
    return where(condition, zero if a is None else a, zero if b is None else b)


def _times(factor: Expr, slope: Expr | None) -> Expr | None:
    """factor * slope, with the product inside the branches of a choice and 0 left alone."""
    if slope is None or slope is constant(0.0):
        return slope
    if slope is _ONE:
        return factor
    if slope.op == "where":
        return _choose(slope.args[0], _times(factor, slope.args[1]), _times(factor, slope.args[2]))
    return factor * slope


def _sum(a: Expr | None, b: Expr | None) -> Expr | None:
    if _is_zero(a) or _is_zero(b):
        return a if b is None or (a is not None and _is_zero(b)) else b
    assert a is not None and b is not None
    if a.op == b.op == "where" and a.args[0] is b.args[0]:
        return _choose(a.args[0], _sum(a.args[1], b.args[1]), _sum(a.args[2], b.args[2]))
    return a + b


def _product(a: Expr, slope_b: Expr | None, b: Expr, slope_a: Expr | None) -> Expr | None:
    """a * slope_b + b * slope_a, in one fma where no choice is left outside."""
    if _is_zero(slope_a) or _is_zero(slope_b):
        return _sum(_times(a, slope_b), _times(b, slope_a))
    assert slope_a is not None and slope_b is not None
    if slope_a.op == slope_b.op == "where" and slope_a.args[0] is slope_b.args[0]:
        first, second = (_product(a, slope_b.args[i], b, slope_a.args[i]) for i in (1, 2))
        return _choose(slope_a.args[0], first, second)
    if "where" in (slope_a.op, slope_b.op):
        return _sum(_times(a, slope_b), _times(b, slope_a))
    return fma(a, slope_b, b if slope_a is _ONE else b * slope_a)


def _is_zero(slope: Expr | None) -> bool:
    return slope is None or slope is constant(0.0)
