"""A dictionary that can be asked cheaply whether it is as it was."""

from __future__ import annotations

import itertools
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
_versions = itertools.count()


class CountedDict(dict[K, V], Generic[K, V]):
    """A dict. version: a number that no other has, and another one after each change of its entries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version = next(_versions)

    def __setitem__(self, key: K, value: V) -> None:
        self.version = next(_versions)
        super().__setitem__(key, value)

    def __delitem__(self, key: K) -> None:
        self.version = next(_versions)
        super().__delitem__(key)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.version = next(_versions)
        return super().__ior__(other)

    def clear(self) -> None:
        """See dict."""
        self.version = next(_versions)
        super().clear()

    def pop(self, *args: Any) -> Any:
        """See dict."""
        self.version = next(_versions)
        return super().pop(*args)

    def popitem(self) -> tuple[K, V]:
        """See dict."""
        self.version = next(_versions)
        return super().popitem()

    def setdefault(self, *args: Any) -> Any:
        """See dict."""
        self.version = next(_versions)
        return super().setdefault(*args)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """See dict."""
        self.version = next(_versions)
        super().update(*args, **kwargs)
