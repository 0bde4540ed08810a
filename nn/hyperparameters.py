"""Rates, decays and the like, checked where they are given: every message has the name, the value and the rule."""

from __future__ import annotations

import math
from typing import Any

from ..engine.errors import BadInputError
from ..engine.input_checks import described
from ..engine.setting_checks import check_float32, is_number, is_whole
from ..engine.step_parameters import LARGEST


def finite(name: str, value: Any) -> float:
    """The number. Raises BadInputError for what is no finite number, or none in float32."""
    if not is_number(value) or not math.isfinite(value):
        raise BadInputError(f"{name} is {described(value)}: it must be a finite number")
    try:
        return check_float32(name, name, value)
    except ValueError as error:
        raise BadInputError(str(error)) from None


def check_not_negative(name: str, value: Any) -> None:
    """Raises BadInputError unless it is finite and at least 0."""
    if type(value) is float and 0.0 <= value <= LARGEST:  # a step's learning rate, mostly
        return
    if finite(name, value) < 0:
        raise BadInputError(f"{name} is {value}, it must not be negative")


def check_positive(name: str, value: Any) -> None:
    """Raises BadInputError unless it is finite and above 0."""
    if finite(name, value) <= 0:
        raise BadInputError(f"{name} is {value}, it must be positive")


def check_fraction(name: str, value: Any) -> None:
    """Raises BadInputError unless it is at least 0 and below 1."""
    if not 0 <= finite(name, value) < 1:
        raise BadInputError(f"{name} is {value}, it must be at least 0 and below 1")


def check_whole(name: str, value: Any, past: int) -> None:
    """Raises BadInputError unless it is a whole number of 0..past - 1."""
    if type(value) is not int and not is_whole(value):
        raise BadInputError(f"{name} is {described(value)}: it must be a whole number")
    if not 0 <= value < past:
        raise BadInputError(f"{name} is {value}, it must be 0 to {past - 1}")
