"""Hears of every change to the attributes of a model's parts: what decides which ops a step records.

A walk over a model of 48 layers would take longer than a whole replayed step may, so the parts report instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

_PLAIN = (bool, int, float, str, bytes, type(None))
_OWN_MODULES = __name__.rpartition(".")[0] + "."  # layers of this package do what their attributes say
_MISSING = object()


class Watched:
    """Base of the parts of a model: assigning or deleting an attribute is told to the watch, where there is one."""

    _watch: ModeWatch | None = None
    unwatched: frozenset[str] = frozenset()  # attributes that decide nothing

    def __setattr__(self, name: str, value: Any) -> None:
        if self._watch is not None:
            self._watch.note(self, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._watch is not None:
            self._watch.note(self, name, _MISSING)
        super().__delattr__(name)


class ModeWatch:
    """The attributes of one model's parts that differ now from what they were when the watch began.

    changed: (id of the part, attribute) -> what it is now, as a token. Equal dictionaries mean equal modes. Holds no
    tensor and no part. ended: another watch has taken over one of its parts.
    """

    def __init__(self, model: Watched) -> None:
        self.model = weakref.ref(model)
        self.changed: dict[tuple[int, str], Any] = {}
        self.ended = False
        self._began: dict[tuple[int, str], Any] = {}  # what the attributes in `changed` were
        for part in parts_of(model):
            earlier = part._watch
            if earlier is not None:
                earlier.ended = True
            object.__setattr__(part, "_watch", self)

    def note(self, part: Watched, name: str, value: Any) -> None:
        """Called before an attribute changes."""
        if name in part.unwatched:
            return
        key = id(part), name
        if key not in self.changed:
            before = vars(part).get(name, _MISSING)
            if before is value:
                return
            self._began[key] = _token(before)
        now = _token(value)
        if now == self._began[key]:
            self.changed.pop(key, None)
            del self._began[key]
        else:
            self.changed[key] = now


class _Identity:
    """Equal as long as it stands for the same living object."""

    __slots__ = ("reference",)

    def __init__(self, value: Any) -> None:
        try:
            self.reference: Any = weakref.ref(value)
        except TypeError:  # a list or dict, say: never equal to anything, so the mode counts as changed for good
            self.reference = lambda: None

    def __eq__(self, other: object) -> bool:
        mine = self.reference()
        return isinstance(other, _Identity) and mine is not None and mine is other.reference()

    __hash__ = None  # type: ignore[assignment]


def _token(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN or value is _MISSING:
        return kind, value  # 1, 1.0 and True are not the same
    if kind in (tuple, frozenset):
        return kind, [_token(item) for item in (value if kind is tuple else sorted(value, key=repr))]
    return _Identity(value)


def parts_of(model: Watched) -> Iterator[Watched]:
    """Layers, parameters and other watched objects in the attributes of a model, each once; the model first."""
    seen = {id(model)}
    waiting = [model]
    for part in waiting:
        yield part
        for value in list(vars(part).values()):
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, Watched) and id(item) not in seen:
                    seen.add(id(item))
                    waiting.append(item)


class Unreported:
    """What a watch does not hear of, compared before each step instead, which takes some microseconds: what lists of
    parts hold, the attributes of this package's classes (methods that were replaced), and those of settings that cannot
    change by assignment (a config, changed by object.__setattr__).
    """

    def __init__(self, model: Watched | None = None, optimizer: object = None) -> None:
        parts: list[Any] = [] if model is None else [*parts_of(model), optimizer]
        values = [value for part in parts for value in vars(part).values()]
        self._lists = [(value, tuple(value)) for value in values if isinstance(value, list)]
        settings = {id(value): value for value in values if _is_frozen(value)}
        bases = (cls for part in parts for cls in type(part).__mro__)
        classes = dict.fromkeys(cls for cls in bases if cls.__module__.startswith(_OWN_MODULES))
        self._spaces = [(vars(what), dict(vars(what))) for what in (*settings.values(), *classes)]

    def is_same(self) -> bool:
        """Whether nothing has changed."""
        for space, before in self._spaces:
            if space != before:
                return False
        return all(tuple(now) == before for now, before in self._lists)


def _is_frozen(value: object) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen and hasattr(value, "__dict__")


def does_what_it_says(part: object) -> bool:
    """Whether a part's attributes and inputs alone decide which ops it records.

    So it is for the classes of this package, and for those that say `replay_supported = True` themselves (a subclass
    must say so again), as long as no method is replaced: on the instance, or in a class of this package by a function
    from elsewhere.
    """
    cls = type(part)
    if not vars(cls).get("replay_supported", cls.__module__.startswith(_OWN_MODULES)):
        return False
    for each in cls.__mro__:
        if each.__module__.startswith(_OWN_MODULES):
            for value in vars(each).values():
                if isinstance(value, FunctionType) and not value.__module__.startswith(_OWN_MODULES):
                    return False
    return not any(callable(getattr(cls, name, None)) for name in vars(part))
