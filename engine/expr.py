"""Expressions of elementwise arithmetic: written once, then evaluated in NumPy, derived, and printed as GLSL.

    x = variable("x")
    silu = x * logistic(x)

`simplify` (expr_simplify.py), `derivative` (expr_derivative.py), `evaluate` (expr_numpy.py), `glsl_statements`
(expr_glsl.py) and `substitute` (expr_walk.py) work on them. A value is a float, a condition (what comparisons give and
`where` takes) or a whole number of 32 bits (random numbers, indices). Equal expressions are one object, so `is`
compares them and a common part is computed once.

What an expression means is fixed to the bit but for exp, log, rsqrt, tanh and division, whose error is the driver's:
each operator rounds once, nothing is reassociated, `fma` rounds once where the device has one. `maximum` and `minimum`
are a comparison and a choice, the same for NaN and signed zero everywhere.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

# operation -> its arguments and, after the arrow, its result: f float, b condition, u whole number
SIGNATURES = {
    "variable": "->f",
    "constant": "->f",
    "whole": "->u",
    "number": "->u",
    **dict.fromkeys(
        ("neg", "abs", "exp", "exp_nonpositive", "log", "rsqrt", "logistic", "tanh", "float16", "bfloat16"), "f->f"
    ),
    **dict.fromkeys(("add", "sub", "mul", "div", "max", "min"), "ff->f"),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), "ff->b"),
    **dict.fromkeys(("same", "below"), "uu->b"),
    **dict.fromkeys(("and", "or"), "bb->b"),
    "not": "b->b",
    "fma": "fff->f",
    "where": "bff->f",
    "random_below": "uu->b",
    "uniform": "u->f",
}
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
RANDOM = frozenset({"random_below", "uniform"})
RESERVED_NAMES = frozenset({"args", "index", "step"})  # what kernels and `evaluate` call their own
_known: WeakValueDictionary[tuple, Expr] = WeakValueDictionary()


class Expr:
    """A node: operation, arguments, and the name of a variable or the number of a constant.

    Made by the functions of this module, the operators + - * / < <= > >= and unary -, and & | ~ of conditions; numbers
    become constants.
    `==` compares objects; the comparison of values is `equal`. An expression has no truth value: use `where`.
    """

    __slots__ = ("__weakref__", "_fingerprint", "args", "name", "number", "op")
    op: str
    args: tuple[Expr, ...]
    name: str
    number: float
    _fingerprint: bytes

    @property
    def is_condition(self) -> bool:
        """Whether it is true or false rather than a number."""
        return self.kind == "b"

    @property
    def kind(self) -> str:
        """What it is: "f" a float, "b" a condition, "u" a whole number."""
        return SIGNATURES[self.op][-1]

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

    def __and__(self, other: Expr) -> Expr:
        return make("and", self, other)

    def __or__(self, other: Expr) -> Expr:
        return make("or", self, other)

    def __invert__(self) -> Expr:
        return make("not", self)

    def __bool__(self) -> bool:
        raise TypeError("an expression has no truth value: choose with where(condition, a, b)")

    def __repr__(self) -> str:  # one level: written out, a shared part would be there over and over
        if not self.args:
            return self.name or repr(self.number)
        inner = ", ".join(arg.name or repr(arg.number) if not arg.args else f"{arg.op}(...)" for arg in self.args)
        return f"{self.op}({inner})"


def _node(op: str, args: tuple[Expr, ...], name: str, number: float) -> Expr:
    key = (op, args, name, struct.pack("<d", number))  # by bits: -0.0 is not 0.0, and NaN is itself
    node = _known.get(key)
    if node is None:
        node = Expr()
        node.op, node.args, node.name, node.number, node._fingerprint = op, args, name, number, b""
        _known[key] = node
    return node


def fingerprint(root: Expr) -> bytes:
    """16 bytes that differ for different expressions, and are the same in every process (BLAKE2b)."""
    stack = [root]
    while stack:
        node = stack[-1]
        missing = [arg for arg in node.args if not arg._fingerprint]
        if missing:
            stack += missing
            continue
        stack.pop()
        if not node._fingerprint:
            parts = b"".join([arg._fingerprint for arg in node.args])
            own = f"{node.op} {node.name} ".encode() + struct.pack("<d", node.number)
            node._fingerprint = hashlib.blake2b(own + parts, digest_size=16).digest()
    return root._fingerprint


def make(op: str, *args: Expr | float) -> Expr:
    """The node of an operation of SIGNATURES. Raises ValueError for wrong arguments."""
    given = tuple(arg if isinstance(arg, Expr) else constant(arg) for arg in args)
    wanted = SIGNATURES.get(op, "").split("->")[0]
    if not wanted or "".join(arg.kind for arg in given) != wanted:
        raise ValueError(
            f"no operation {op!r} of {', '.join(map(repr, given))}: conditions go into where(), &, | and ~, whole "
            "numbers into same(), below() and random ones; values are compared with equal(), not =="
        )
    return _node(op, given, "", 0.0)


def variable(name: str) -> Expr:
    """A named input. Raises ValueError for a name that GLSL would not take, or one of RESERVED_NAMES."""
    return _node("variable", (), checked_name(name), 0.0)


def checked_name(name: str) -> str:
    """The name. Raises ValueError for one that cannot be that of a variable."""
    plain = isinstance(name, str) and name.isidentifier() and name.isascii() and "__" not in name
    if not plain or name.startswith("gl_") or name in RESERVED_NAMES:
        raise ValueError(
            f"{name!r} cannot name a variable: use ASCII letters, digits and single underscores, not "
            f"gl_ in front, and none of {', '.join(sorted(RESERVED_NAMES))}"
        )
    return name


def whole(what: str | int) -> Expr:
    """A whole number of 32 bits, by name (a kernel's uint) or value.

    Raises ValueError for what is no whole number, or does not fit.
    """
    if isinstance(what, str):
        return _node("whole", (), checked_name(what), 0.0)
    if not isinstance(what, (int, np.integer)) or isinstance(what, bool):
        raise ValueError(
            f"{what!r} is no whole number: give an int, or the name of one; a probability p is a threshold "
            "of round(p * 2**32)"
        )
    if not 0 <= what < 2**32:
        raise ValueError(f"{what} does not fit 32 bits: give a whole number from 0 to 2^32 - 1")
    return _node("number", (), "", float(what))


def variables(names: str) -> list[Expr]:
    """Several, from names with spaces between."""
    return [variable(name) for name in names.split()]


def constant(number: float) -> Expr:
    """A number; rounded to the type it is computed in, once, when it is used."""
    return _node("constant", (), "", float(number))


def fma(a: Expr | float, b: Expr | float, c: Expr | float) -> Expr:
    """a * b + c, rounded once where the device can."""
    return make("fma", a, b, c)


def exp(x: Expr | float, *, nonpositive: bool = False) -> Expr:
    """e to the x; on the device exactly 0 for x below -87, where the result is below 1.4 * 2^-126.

    nonpositive: x is at most 0 or so, which is cheaper.
    """
    return make("exp_nonpositive" if nonpositive else "exp", x)


def log(x: Expr | float) -> Expr:
    """The natural logarithm: -inf at 0, NaN below."""
    return make("log", x)


def rsqrt(x: Expr | float) -> Expr:
    """1 / sqrt(x): inf at 0 of either sign, NaN below."""
    return make("rsqrt", x)


def logistic(x: Expr | float) -> Expr:
    """1 / (1 + exp(-x)), without overflow and exactly 0 and 1 at the ends."""
    return make("logistic", x)


def tanh(x: Expr | float) -> Expr:
    """The hyperbolic tangent: never overflows. Its error is at most about 4 units in the last place of the result;
    subnormals are x or, on a device that flushes them, 0; -0 stays -0. On the device it is x times a polynomial of x^2
    for |x| < 9/16, beyond that made from exp(-2 |x|).
    """
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


def select(conditions: Sequence[Expr], values: Sequence[Expr | float], default: Expr | float) -> Expr:
    """The value of the first condition that holds, else the default. Raises ValueError for lists of other lengths."""
    result = default if isinstance(default, Expr) else constant(default)
    for condition, value in reversed(list(zip(conditions, values, strict=True))):
        result = where(condition, value, result)
    return result


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


def same(a: Expr | int, b: Expr | int) -> Expr:
    """Whether two whole numbers are equal."""
    return make("same", *_wholes(a, b))


def below(a: Expr | int, b: Expr | int) -> Expr:
    """Whether the whole number a is below b, both taken as unsigned: a negative int32 is above all others."""
    return make("below", *_wholes(a, b))


def _wholes(*numbers: Expr | int) -> list[Expr]:
    return [number if isinstance(number, Expr) else whole(number) for number in numbers]


def random_below(threshold: Expr | int, site: Expr | int) -> Expr:
    """Whether the element's random 32 bits are below `threshold`: with probability p for round(p * 2**32).

    The bits are word e % 4 of the Philox block with counter (e / 4, step, micro-batch, site) and the seed as key (see
    engine/philox.py), e being the element's index in the output: they depend on nothing else, and computing them again
    gives them again. threshold, site: `whole` numbers, or ints of 0 to 2^32 - 1. Raises ValueError for others.
    """
    return make("random_below", *_wholes(threshold, site))


def uniform(site: Expr | int) -> Expr:
    """A random number for each element, a multiple of 2^-24 in 0 <= u < 1: the upper 24 of `random_below`'s bits."""
    return make("uniform", *_wholes(site))
