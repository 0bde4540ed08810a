"""Parameters of a function, as `inspect.signature` has them but at a fraction of its time: each op's are asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple

POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
POSITIONAL_OR_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD
VAR_POSITIONAL = inspect.Parameter.VAR_POSITIONAL
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
_TAKES_ARGS, _TAKES_KEYWORDS = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS


class Parameter(NamedTuple):
    """Of a function. kind: a constant of `inspect.Parameter`. annotation: its text."""

    name: str
    kind: Any
    annotation: str


def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...]:
    """The parameters of a function or bound method (without `self`), in order, or of anything else that is called."""
    plain, bound = function, 0
    if type(function) is MethodType:
        plain, bound = function.__func__, 1
    # A function with attributes may be a wrapper (__wrapped__) or say what it takes (__signature__).
    if type(plain) is not FunctionType or plain.__dict__ or plain.__code__.co_argcount < bound:
        return tuple(
            Parameter(p.name, p.kind, str(p.annotation)) for p in inspect.signature(function).parameters.values()
        )
    return _of_function(plain)[bound:]


@lru_cache(maxsize=1024)
def _of_function(function: FunctionType) -> tuple[Parameter, ...]:
    code, annotations = function.__code__, function.__annotations__
    num_positional, num_keyword = code.co_argcount, code.co_kwonlyargcount
    kinds: list[Any] = [POSITIONAL_ONLY] * code.co_posonlyargcount
    kinds += [POSITIONAL_OR_KEYWORD] * (num_positional - len(kinds))
    names = list(code.co_varnames[:num_positional])
    behind = num_positional + num_keyword
    if code.co_flags & _TAKES_ARGS:
        kinds.append(VAR_POSITIONAL)
        names.append(code.co_varnames[behind])
        behind += 1
    kinds += [KEYWORD_ONLY] * num_keyword
    names += code.co_varnames[num_positional : num_positional + num_keyword]
    if code.co_flags & _TAKES_KEYWORDS:
        kinds.append(VAR_KEYWORD)
        names.append(code.co_varnames[behind])
    return tuple(
        Parameter(name, kind, str(annotations.get(name, inspect.Parameter.empty)))
        for name, kind in zip(names, kinds, strict=True)
    )
