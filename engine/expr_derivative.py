"""Symbolic derivatives of expressions, in forms that stay finite and accurate where a formula of the book would not.

A branch that `where`, `maximum` or `minimum` does not take contributes exactly 0, even when what would multiply it is
infinite: a function clamped where it is flat has derivative 0 there, not infinity times 0. For that a slope carries the
condition under which nothing but such branches is left, and is put to 0 there when all is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
    return _resolved(_slope_of(root, of))


class _Slope(NamedTuple):
    """A derivative: `value`, but exactly 0 where the condition `dead` holds (None: nowhere).

    A slope that is None is that of what does not depend on the variable.
    """

    value: Expr
    dead: Expr | None = None

    @property
    def whole(self) -> Expr:
        """Both in one."""
        return self.value if self.dead is None else where(self.dead, 0.0, self.value)


def _resolved(slope: _Slope | None) -> Expr:
    return constant(0.0) if slope is None else simplify(slope.whole)


def _slope_of(root: Expr, of: Expr) -> _Slope | None:
    slopes: dict[Expr, _Slope | None] = {}
    for node in topological([root]):
        slopes[node] = _Slope(_ONE) if node is of else _slope(node, [slopes[arg] for arg in node.args])
    return slopes[root]


class Gradients(dict[str, Expr]):
    """Expressions by name, of a chain with these `inputs`, of which some may not appear in any of them.

    `engine.map` takes all the inputs nevertheless: for their shape, and so that a backward need not know which ones
    a derivative happens to leave out.
    """

    def __init__(self, expressions: Mapping[str, Expr], inputs: Iterable[str]) -> None:
        super().__init__(expressions)
        self.inputs = tuple(inputs)


def pullback(outputs: Expr | Mapping[str, Expr], names: str) -> Gradients:
    """Gradients of a chain for some of its inputs, as expressions for the backward's kernel.

    outputs: as `engine.map` takes them; names: of inputs, with spaces between. Gives for each input `x` an
    expression called "d_x" of the chain's inputs and of the outputs' gradients, which are variables "d_" + output; "dy"
    is that of a single expression without a name. `engine.map` takes all of those names for it, and needs the ones that
    the expressions still have: of x * 2.0 the gradient is that of dy alone. Raises ValueError for a name that no output
    depends on, or when an input is called as a gradient would be, TypeError for other things than these.
    """
    if not isinstance(outputs, (Expr, Mapping)):
        raise TypeError(f"pullback: {outputs!r:.40} is no expression: give one, or a dict of name -> expression")
    if not isinstance(names, str):
        raise TypeError(f"pullback: {names!r:.40} names no inputs: give one string, with spaces between names")
    by_name = {"dy": outputs} if isinstance(outputs, Expr) else {f"d_{name}": root for name, root in outputs.items()}
    used = named(by_name.values())
    taken = sorted(set(by_name) & set(used))
    if taken:
        raise ValueError(f"pullback: inputs are called {', '.join(taken)}, as gradients of outputs are")
    gradients = {}
    for name in names.split():
        if name not in used:
            raise ValueError(f"pullback: {name!r} is not among {', '.join(used)}")
        total: _Slope | None = None
        for given, root in by_name.items():
            total = _sum(total, _times(variable(given), _slope_of(root, variable(name))))
        gradients[f"d_{name}"] = _resolved(total)
    return Gradients(gradients, (*by_name, *used, *named(by_name.values(), "whole")))


def _slope(node: Expr, slopes: list[_Slope | None]) -> _Slope | None:
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


def _choose(condition: Expr, a: _Slope | None, b: _Slope | None) -> _Slope | None:
    if a is None or b is None:
        there, gone = (b, condition) if a is None else (a, ~condition)
        return None if there is None else _Slope(there.value, gone if there.dead is None else gone | there.dead)
    value = where(condition, a.value, b.value)
    if a.dead is b.dead:
        return _Slope(value, a.dead)
    dead_a = None if a.dead is None else condition & a.dead
    dead_b = None if b.dead is None else ~condition & b.dead
    if dead_a is not None and dead_b is not None:
        return _Slope(value, dead_a | dead_b)
    return _Slope(value, dead_b if dead_a is None else dead_a)


def _times(factor: Expr, slope: _Slope | None) -> _Slope | None:
    if slope is None:
        return None
    return _Slope(factor if slope.value is _ONE else factor * slope.value, slope.dead)


def _sum(a: _Slope | None, b: _Slope | None) -> _Slope | None:
    if a is None or b is None:
        return b if a is None else a
    if a.dead is b.dead:
        return _Slope(a.value + b.value, a.dead)
    return _Slope(a.whole + b.whole, None if a.dead is None or b.dead is None else a.dead & b.dead)


def _product(a: Expr, slope_b: _Slope | None, b: Expr, slope_a: _Slope | None) -> _Slope | None:
    """a * slope_b + b * slope_a, in one fma where both are 0 in the same places."""
    if slope_a is None or slope_b is None or slope_a.dead is not slope_b.dead:
        return _sum(_times(a, slope_b), _times(b, slope_a))
    return _Slope(fma(a, slope_b.value, b if slope_a.value is _ONE else b * slope_a.value), slope_a.dead)
