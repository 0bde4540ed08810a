"""The types of ops' settings, by the annotations of their shape rules."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .input_checks import described
from .signatures import KEYWORD_ONLY, parameters_of

if TYPE_CHECKING:
    from .op import Op

_FLOAT32_OVERFLOW = (2 - 2.0**-24) * 2.0**127  # the least number that rounds to infinity


def is_whole(value: Any) -> bool:
    """Whether this is a whole number of Python or NumPy; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether this is a real number; True and False are none."""
    return type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, (bool, np.bool_)), "True or False"),
    "int": (is_whole, "a whole number"),
    "float": (is_number, "a number"),
    "finite": (is_number, "a number"),
    "str": (lambda value: isinstance(value, str), "a string"),
}
_ITSELF = {"bool": bool, "str": str}  # annotations of which nothing but the type is checked: most settings


@lru_cache(maxsize=1024)
def _types_of(op: Op) -> Mapping[str, str]:
    """Setting -> its annotation."""
    found = {name: annotation for name, kind, annotation in parameters_of(op.outputs) if kind is KEYWORD_ONLY}
    return {**found, **op.setting_types}


@lru_cache(maxsize=1024)
def whole_settings(op: Op) -> tuple[str, ...]:
    """Names of the settings that are whole numbers."""
    return tuple(name for name, annotation in _types_of(op).items() if annotation == "int")


def check_settings(op: Op, settings: Mapping[str, Any]) -> None:
    """Raises TypeError for a setting of another type than the shape rule says, ValueError for a finite number that is
    none in float32; each names op, setting and value."""
    for name, annotation in _types_of(op).items():
        if name not in settings:
            continue
        value = settings[name]
        if type(value) is not _ITSELF.get(annotation):
            check_setting(op.name, name, value, annotation)


def check_setting(op: str, name: str, value: Any, annotation: str) -> None:
    """The same for one setting.

    annotation: "bool", "int" (of 32 bits), "float", "finite" (a float that is no NaN and not infinite) or "str", with
    " | None" where it may be left out; or a tuple of floats.
    """
    if annotation == "tuple[float, ...]":
        for i, number in enumerate(value):
            check_float32(op, f"{name}[{i}]", number)
        return
    kind, _, optional = annotation.partition(" | ")
    if kind not in _KINDS or (value is None and optional == "None"):
        return
    fits, needed = _KINDS[kind]
    if not fits(value):
        raise TypeError(f"{op}: {name} is {described(value)}, needed is {needed}{' or None' if optional else ''}")
    if kind == "float":
        check_float32(op, name, value)
    elif kind == "finite":
        check_finite(op, name, value)
    elif kind == "int" and not -(2**31) <= value < 2**32:
        raise ValueError(f"{op}: {name} is {value!r:.40}, which does not fit 32 bits")


def check_finite(op: str, name: str, value: Any) -> float:
    """The number. Raises what `check_float32` does, and ValueError for NaN and infinities."""
    number = check_float32(op, name, value)
    if not math.isfinite(number):
        raise ValueError(f"{op}: {name} is {number}, it must be finite")
    return number


def check_float32(op: str, name: str, value: Any) -> float:
    """The number. Raises TypeError for what is none, ValueError for a finite one that float32 cannot hold."""
    if not is_number(value):
        raise TypeError(f"{op}: {name} is {described(value)}, needed is a number")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond float64
        number = _FLOAT32_OVERFLOW
    if math.isfinite(number) and abs(number) >= _FLOAT32_OVERFLOW:
        raise ValueError(f"{op}: {name} is {value!r:.40}, which does not fit float32 (at most 3.4028235e38)")
    return number
