"""Expressions of elementwise arithmetic: written once, then evaluated in NumPy, derived, and printed as GLSL.

    x = variable("x")
    silu = x * logistic(x)

`simplify` (expr_simplify.py), `derivative` (expr_derivative.py), `evaluate` (expr_numpy.py) and `glsl_statements`
(expr_glsl.py) work on them. A value is a float or a condition (the result of a comparison, the first argument of
`where`). Equal expressions are one object, so `is` compares them and a common part is computed once.

What an expression means is fixed to the bit but for exp, log, rsqrt and division, whose error is the driver's: each
operator rounds once, nothing is reassociated, `fma` rounds once where the device has one. `maximum` and `minimum` are
a comparison and a choice, the same for NaN and signed zero everywhere.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from weakref import WeakValueDictionary

# operation -> what its arguments are: f float, b condition; the result is a condition for _COMPARISONS alone
SIGNATURES = {
    "variable": "",
    "constant": "",
    **dict.fromkeys(("neg", "abs", "exp", "log", "rsqrt", "logistic", "tanh", "float16", "bfloat16"), "f"),
    **dict.fromkeys(("add", "sub", "mul", "div", "max", "min", "lt", "le", "gt", "ge", "eq", "ne"), "ff"),
    "fma": "fff",
    "where": "bff",
}
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
_known: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()


class Expr:
    """A node: operation, arguments, and the name of a variable or the number of a constant.

    Made by the functions of this module and the operators + - * / < <= > >= and unary -; numbers become constants.
    `==` compares objects; the comparison of values is `equal`. An expression has no truth value: use `where`.
    """

    __slots__ = ("__weakref__", "args", "name", "number", "op")
    op: str
    args: tuple[Expr, ...]
    name: str
    number: float

    @property
    def is_condition(self) -> bool:
        """Whether it is true or false rather than a number."""
        return self.op in COMPARISONS

    def __add__(self, other: Expr | float) -> Expr:
        return make("add", self, other)

    def __radd__(self, other: float) -> Expr:
        return make("add", other, self)

    def __sub__(self, other: Expr | float) -> Expr:
        return make("sub", self, other)

    def __rsub__(self, other: float) -> Expr:
        return make("sub", other, self)

    def __mul__(self, other: Expr | float) -> Expr:
        return make("mul", self, other)

    def __rmul__(self, other: float) -> Expr:
        return make("mul", other, self)

    def __truediv__(self, other: Expr | float) -> Expr:
        return make("div", self, other)

    def __rtruediv__(self, other: float) -> Expr:
        return make("div", other, self)

    def __neg__(self) -> Expr:
        return make("neg", self)

    def __abs__(self) -> Expr:
        return make("abs", self)

    def __lt__(self, other: Expr | float) -> Expr:
        return make("lt", self, other)

    def __le__(self, other: Expr | float) -> Expr:
        return make("le", self, other)

    def __gt__(self, other: Expr | float) -> Expr:
        return make("gt", self, other)

    def __ge__(self, other: Expr | float) -> Expr:
        return make("ge", self, other)

    def __bool__(self) -> bool:
        raise TypeError("an expression has no truth value: choose with where(condition, a, b)")

    def __repr__(self) -> str:  # one level: written out, a shared part would be there over and over
        if self.op in ("variable", "constant"):
            return self.name if self.op == "variable" else repr(self.number)
        inner = ", ".join(arg.name or repr(arg.number) if not arg.args else f"{arg.op}(...)" for arg in self.args)
        return f"{self.op}({inner})"


def _node(op: str, args: tuple[Expr, ...], name: str, number: float) -> Expr:
    key = (op, args, name, struct.pack("<d", number))  # by bits: -0.0 is not 0.0, and NaN is itself
    node = _known.get(key)
    if node is None:
        node = Expr()
        node.op, node.args, node.name, node.number = op, args, name, number
        _known[key] = node
    return node


def make(op: str, *args: Expr | float) -> Expr:
    """The node of an operation of SIGNATURES. Raises ValueError for wrong arguments."""
    given = tuple(arg if isinstance(arg, Expr) else constant(arg) for arg in args)
    wanted = SIGNATURES.get(op)
    if not wanted or "".join("b" if arg.is_condition else "f" for arg in given) != wanted:
        raise ValueError(f"no operation {op!r} of {', '.join(map(repr, given))}: conditions go into where() alone")
    return _node(op, given, "", 0.0)


def variable(name: str) -> Expr:
    """A named input. Raises ValueError for a name that GLSL would not take."""
    if not name.isidentifier() or not name.isascii() or "__" in name or name.startswith("gl_"):
        raise ValueError(f"{name!r} cannot name a variable")
    return _node("variable", (), name, 0.0)


def variables(names: str) -> list[Expr]:
    """Several, from names with spaces between."""
    return [variable(name) for name in names.split()]


def constant(number: float) -> Expr:
    """A number; rounded to the type it is computed in, once, when it is used."""
    return _node("constant", (), "", float(number))


def fma(a: Expr | float, b: Expr | float, c: Expr | float) -> Expr:
    """a * b + c, rounded once where the device can."""
    return make("fma", a, b, c)


def exp(x: Expr | float) -> Expr:
    """e to the x; on the device 0 where that is below 2^-126."""
    return make("exp", x)


def log(x: Expr | float) -> Expr:
    """The natural logarithm: -inf at 0, NaN below."""
    return make("log", x)


def rsqrt(x: Expr | float) -> Expr:
    """1 / sqrt(x): inf at 0, NaN below."""
    return make("rsqrt", x)


def logistic(x: Expr | float) -> Expr:
    """1 / (1 + exp(-x)), without overflow and exactly 0 and 1 at the ends."""
    return make("logistic", x)


def tanh(x: Expr | float) -> Expr:
    """The hyperbolic tangent from exp(-2 |x|): never overflows. Its error is a few units of 1, not of the result."""
    return make("tanh", x)


def maximum(a: Expr | float, b: Expr | float) -> Expr:
    """b where a < b, else a: a NaN in a stays."""
    return make("max", a, b)


def minimum(a: Expr | float, b: Expr | float) -> Expr:
    """b where b < a, else a: a NaN in a stays."""
    return make("min", a, b)


def clamp(x: Expr | float, low: float, high: float) -> Expr:
    """x between two numbers; NaN stays."""
    return minimum(maximum(x, low), high)


def where(condition: Expr, a: Expr | float, b: Expr | float) -> Expr:
    """a where the condition holds, else b; the other is ignored even when it is NaN."""
    return make("where", condition, a, b)


def equal(a: Expr | float, b: Expr | float) -> Expr:
    """Whether two values are equal; NaN is not."""
    return make("eq", a, b)


def not_equal(a: Expr | float, b: Expr | float) -> Expr:
    """Whether two values differ; NaN does, from everything."""
    return make("ne", a, b)


def cast(x: Expr, dtype: str) -> Expr:
    """x as `dtype` holds it: rounded to "float16" or "bfloat16" (to nearest, ties to even; still computed with as
    float32), or a condition as 1.0 and 0.0 ("float32"). Raises ValueError for another type.
    """
    if dtype == "float32":
        return where(x, 1.0, 0.0) if x.is_condition else x
    if dtype not in ("float16", "bfloat16"):
        raise ValueError(f"cast to {dtype!r}: use float32, float16 or bfloat16")
    return make(dtype, cast(x, "float32"))


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


def expanded(roots: Iterable[Expr]) -> list[Expr]:
    """The expressions with logistic, tanh, max and min written out in simpler operations: what is printed."""
    roots = list(roots)
    new: dict[Expr, Expr] = {}
    for node in topological(roots):
        args = [new[arg] for arg in node.args]
        if node.op == "logistic":
            new[node] = where(args[0] > 0.0, 1.0 - logistic_tail(args[0]), logistic_tail(args[0]))
        elif node.op == "tanh":
            e = exp(-2.0 * abs(args[0]))
            size = (1.0 - e) / (1.0 + e)
            new[node] = where(args[0] < 0.0, -size, size)
        elif node.op in ("max", "min"):
            a, b = args
            new[node] = where(a < b if node.op == "max" else b < a, b, a)
        else:
            new[node] = make(node.op, *args) if args else node
    return [new[root] for root in roots]


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
