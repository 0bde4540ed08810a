"""Hears of every change to the attributes of a model's parts: what decides which ops a step records.

A walk over a model of 48 layers would take longer than a whole replayed step may, so the parts report instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
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
    tensor and no part. ended: another watch has taken over one of its parts. parts: of the model, `parts_of` it.
    """

    def __init__(self, model: Watched, parts: Iterable[Watched]) -> None:
        self.model = weakref.ref(model)
        self.changed: dict[tuple[int, str], Any] = {}
        self.ended = False
        self._began: dict[tuple[int, str], Any] = {}  # what the attributes in `changed` were
        for part in parts:
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
    change by assignment (a config, changed by object.__setattr__). parts: the model's, and the optimizer.
    """

    def __init__(self, parts: Sequence[object] = ()) -> None:
        values = [value for part in parts for value in vars(part).values()]
        # Lists of what is and of what was: one comparison each, which looks at nothing twice and mostly at no item.
        self._lists = [value for value in values if isinstance(value, list)]
        self._contents = [list(value) for value in self._lists]
        frozen = {cls for cls in {type(value) for value in values} if _is_frozen(cls)}
        settings = {id(value): value for value in values if type(value) in frozen and hasattr(value, "__dict__")}
        classes = [cls for cls in _bases(parts) if cls.__module__.startswith(_OWN_MODULES)]
        self._spaces: list[Any] = [vars(what) for what in (*settings.values(), *classes)]
        self._entries = [dict(space) for space in self._spaces]

    def is_same(self) -> bool:
        """Whether nothing has changed."""
        return self._spaces == self._entries and self._lists == self._contents


def _is_frozen(cls: type) -> bool:
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _bases(parts: Iterable[object]) -> dict[type, None]:
    """Their classes, and those that these come from, each once."""
    return dict.fromkeys([base for cls in dict.fromkeys(map(type, parts)) for base in cls.__mro__])


def do_what_they_say(parts: Sequence[object]) -> bool:
    """Whether the attributes and inputs of the parts alone decide which ops they record.

    So it is for the classes of this package, and for those that say `replay_supported = True` themselves (a subclass
    must say so again), as long as no method is replaced: on the instance, or in a class of this package by a function
    from elsewhere.
    """
    for cls in set(map(type, parts)):
        if not vars(cls).get("replay_supported", cls.__module__.startswith(_OWN_MODULES)):
            return False
    for base in _bases(parts):
        if base.__module__.startswith(_OWN_MODULES):
            for value in vars(base).values():
                if isinstance(value, FunctionType) and not value.__module__.startswith(_OWN_MODULES):
                    return False
    attributes = {(type(part), name) for part in parts for name in vars(part)}
    return not any(callable(getattr(cls, name, None)) for cls, name in attributes)
