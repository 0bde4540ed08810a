"""Texts of kernels that are printed when they are needed, and what is remembered of those that were printed before.

A text made from a description (a fold, a chain of operations) has a key: all that the description says, in short. What
compiled kernel belongs to a key is remembered from run to run (pipeline_memory.py), so that a program that runs again
finds its kernels without printing them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

import numpy as np

from .expr import Expr, fingerprint

_MOST_KNOWN, _MOST_REMEMBERED = 4096, 1024


class KernelText:
    """GLSL with a `void main()`, printed when it is first read.

    what: all that decides the text, as `key_of` takes it, the name of whoever prints it in front. write: prints it,
    whenever that may be: it depends on nothing but `what`, as it is now, and this package's own sources.
    """

    def __init__(self, what: Any, write: Callable[[], str]) -> None:
        self.key = key_of(what)
        self._write = write

    @cached_property
    def text(self) -> str:
        """The text itself."""
        return self._write()


def key_of(what: Any) -> str:
    """A text that differs for different descriptions: expressions, strings, numbers (NumPy's as Python's), None, and
    of these mappings, sequences and data classes, whose order counts. Raises TypeError for anything else.
    """
    if type(what) in (str, int, float, bool, NoneType):
        return repr(what)
    if isinstance(what, Expr):
        return fingerprint(what).hex()
    if isinstance(what, Mapping):
        return f"{{{','.join([f'{key_of(name)}:{key_of(value)}' for name, value in what.items()])}}}"
    if isinstance(what, (str, Integral, Real)):
        return repr(str(what) if isinstance(what, str) else int(what) if isinstance(what, Integral) else float(what))
    if isinstance(what, Sequence) and not isinstance(what, (bytes, bytearray)):
        kind = type(what).__name__ if hasattr(what, "_fields") else ""
        return f"{kind}({','.join([key_of(value) for value in what])})"
    if is_dataclass(what):
        return f"{type(what).__name__}({','.join([key_of(getattr(what, each.name)) for each in fields(what)])})"
    raise TypeError(f"{what!r} of type {type(what).__name__} cannot be part of what a kernel is printed from")


def frozen(value: Any) -> Any:
    """A copy that nobody changes, of mappings and sequences and what they hold; NumPy's numbers become Python's.

    A text is printed long after it was described, and by another key if the description had changed meanwhile.
    """
    if isinstance(value, Mapping):
        return MappingProxyType({name: frozen(each) for name, each in value.items()})
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, (str, tuple)):
        return tuple(frozen(each) for each in value)
    if type(value) is tuple:
        return tuple(frozen(each) for each in value)
    return value


def freeze(description: Any) -> None:
    """Make the fields of a frozen data class `frozen`."""
    for each in fields(description):
        object.__setattr__(description, each.name, frozen(getattr(description, each.name)))


class Printed(NamedTuple):
    """What is known of a kernel's text. has_words: whether it has places for 64-bit words (shaders/words.glsl)."""

    digest: str
    has_words: bool

    @classmethod
    def of(cls, glsl: str) -> Printed:
        """What the text says."""
        return cls(hashlib.sha256(glsl.encode()).hexdigest()[:32], "WORDS64" in glsl)


_known: dict[str, Printed] = {}  # by the kernel's key


def known_text(key: str) -> Printed | None:
    """What was printed for a kernel's key, in this run or in one that was remembered."""
    return _known.get(key)


def note_text(key: str, printed: Printed) -> None:
    """Keep what was printed for a kernel's key."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[key] = printed


def last_texts() -> dict[str, Printed]:
    """The last of what was printed or remembered, by key: more than one program asks for."""
    return dict(list(_known.items())[-_MOST_REMEMBERED:])


def hash_of_sources() -> str:
    """Of all that prints kernels, as it lies on disk now. "" where it cannot be read, as in a frozen program."""
    engine = Path(__file__).resolve().parent
    modules = [*engine.glob("*.py"), *engine.glob("ops/*.py")]
    if not modules:
        return ""
    digest = hashlib.sha256()
    for path in sorted([*modules, *(engine.parent / "shaders").glob("*.*")]):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


# As they were imported: what another version printed for a key is not what this one would. Taken now, since files may
# change while a program runs.
SOURCES = hash_of_sources()
