"""The types of what describes a fold, looked at when it is described: later it would be an error of a kernel's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def mistyped(owner: str, what: str, value: Any, needed: str) -> TypeError:
    """The error for a part of a description. owner: "fold 'softmax'"."""
    return TypeError(f"{owner}: {what} is {value!r}, needed is {needed}")


def require_name(kind: str, name: Any) -> None:
    """Raises TypeError for a description's name that is no str, ValueError for one that no kernel could have."""
    if not isinstance(name, str):
        raise TypeError(f"{kind}: name is {name!r}, needed is a str, such as 'my_fold'")
    if not (name.isidentifier() and name.isascii()):
        raise ValueError(
            f"{kind}: name is {name!r}, and kernels are called by it: use ASCII letters, digits and underscores, no "
            "digit first"
        )


def require_mapping(owner: str, what: str, value: Any) -> None:
    """Raises TypeError for what should have been a dict by name."""
    if not isinstance(value, Mapping):
        raise mistyped(owner, what, value, "a dict by name")


def require_sequence(owner: str, what: str, value: Any, example: str, kind: type | None = None) -> None:
    """Raises TypeError for what is no list or tuple, and for a part of it that is not of that kind."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise mistyped(owner, what, value, f"a list, such as {example}")
    for part in value:
        if kind is not None and not isinstance(part, kind):
            raise mistyped(owner, f"one of {what}", part, f"a {kind.__name__}" + ("" if kind is str else "(...)"))
