"""Expressions in NumPy: the reference of whatever is printed from them, in float32 or (as the oracle) float64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from .expr import RANDOM, Expr
from .expr_walk import expanded, topological
from .philox import random_words
from .step_parameters import StepParameters


def evaluate(roots: Iterable[Expr], *, step: StepParameters | None = None, **arrays: Any) -> list[np.ndarray]:
    """The values of expressions, each an array of the common shape.

    arrays: one array or number for each variable and whole number; they are broadcast. All is computed in the type of
    the arrays: float32 when none is float64. step: what random numbers depend on. Raises ValueError for a name without
    a value, or random numbers without a step.
    """
    roots = expanded(roots, keep={"tanh"})  # NumPy's own is as good in float64, in which the device's is not
    order = topological(roots)
    held = {name: np.asarray(array) for name, array in arrays.items()}
    dtype = np.result_type(np.float32, *[a.dtype for a in held.values() if a.ndim and a.dtype.kind == "f"])
    shape = np.broadcast_shapes(*[array.shape for array in held.values()])
    last_use = {arg: node for node in order for arg in node.args}  # values are dropped after it
    values: dict[Expr, Any] = {}
    with np.errstate(all="ignore"):
        for node in order:
            if node.name and node.name not in arrays:
                raise ValueError(f"no value for variable {node.name!r}")
            if node.op == "variable":
                values[node] = held[node.name].astype(dtype, copy=False)
            elif node.op == "constant":
                values[node] = dtype.type(node.number)
            elif node.kind == "u":
                values[node] = _whole(arrays[node.name] if node.name else node.number)
            elif node.op in RANDOM:
                values[node] = _random(node.op, [values[arg] for arg in node.args], shape, step, dtype)
            else:
                values[node] = _apply(node.op, [values[arg] for arg in node.args])
            for arg in node.args:
                if last_use[arg] is node and arg not in roots:
                    values.pop(arg, None)
    made = [np.asarray(values[root]) for root in roots]
    return [value if value.shape == shape else np.broadcast_to(value, shape).copy() for value in made]


def _whole(values: Any) -> Any:
    return (np.asarray(values).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


def _random(op: str, args: list[Any], shape: tuple[int, ...], step: StepParameters | None, dtype: Any) -> Any:
    if step is None:
        raise ValueError("an expression with random numbers is evaluated with step=StepParameters(...)")
    words = random_words(math.prod(shape), int(args[-1]), step).reshape(shape)
    return words < args[0] if op == "random_below" else (words >> 8).astype(dtype) * dtype.type(2.0**-24)


def _apply(op: str, args: list[Any]) -> Any:
    if op == "neg":
        return np.negative(args[0])
    if op == "abs":
        return np.abs(args[0])
    if op in ("exp", "exp_nonpositive"):
        return np.exp(args[0])
    if op == "tanh":
        return np.tanh(args[0])
    if op == "log":
        return np.log(args[0])
    if op == "rsqrt":
        return 1 / np.sqrt(args[0] + 0)  # + 0: inf at -0 as well
    if op == "add":
        return args[0] + args[1]
    if op == "sub":
        return args[0] - args[1]
    if op == "mul":
        return args[0] * args[1]
    if op == "div":
        return args[0] / args[1]
    if op == "fma":
        return _fma(*args)
    if op == "where":
        return np.where(*args)
    if op in ("same", "below"):
        return (np.equal if op == "same" else np.less)(*args)
    if op in ("and", "or"):
        return (np.logical_and if op == "and" else np.logical_or)(*args)
    if op == "not":
        return np.logical_not(args[0])
    if op == "float16":
        return args[0].astype(np.float16).astype(args[0].dtype)
    if op == "bfloat16":
        return _bfloat16(args[0])
    return _COMPARE[op](*args)


_COMPARE = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def _fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c: rounded once for float32, twice (product, sum) for float64, which is exact enough for an oracle."""
    dtype = np.result_type(a, b, c)
    if dtype != np.float32:
        return a * b + c
    product, addend = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)  # exact
    total = np.asarray(product + addend)
    # Rounded to odd (Boldo & Melquiond 2008): rounding that to float32 gives the rounding of the exact sum.
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
    return np.where(inexact & even, np.nextafter(total, towards), total).astype(np.float32)


def _bfloat16(x: Any) -> Any:
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32)).astype(x.dtype)
