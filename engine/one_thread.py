"""One engine, one thread at a time: whose it is, how it is handed over, and what other threads give back meanwhile."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

_numbers = itertools.count(1)
_NOBODY, _FORKED = 0, -1  # in place of a thread's id


class OneThread:
    """Base of the engines. The first thread that uses an engine owns it, until it ends or another calls `take_over`.

    A call from any other thread raises. Tensors may be dropped in any thread: the garbage collector chooses its own.
    What another thread drops is put aside and given back at the owner's next call.
    """

    name: str = ""
    uses_device: bool = False  # a device is lost to a forked child

    def __init__(self) -> None:
        self.number = next(_numbers)  # tells engines of one name apart
        self.closed = False
        self._thread_id = _NOBODY
        self._thread: weakref.ref[threading.Thread] | None = None
        self._changing_hands = threading.Lock()
        self._put_aside: deque[tuple[Callable[[Any], None], Any]] = deque()
        if self.uses_device:
            _with_device.add(self)

    @property
    def label(self) -> str:
        """The name with the engine's number, for messages."""
        return f"{self.name} (engine {self.number})"

    def check_open(self) -> None:
        """Raises RuntimeError after `close`, in a thread that does not own the engine, and in a forked child."""
        if self._thread_id != get_ident() or self.closed or self._put_aside:
            self._settle()

    def check_thread(self) -> None:
        """`check_open` where a closed engine does no harm."""
        if not self.closed:
            self.check_open()

    def take_over(self) -> None:
        """Make the engine the calling thread's. Sound once the thread that used it no longer does.

        Raises RuntimeError in a forked child, where the device cannot be used.
        """
        with self._changing_hands:
            self._check_fork()
            self._own()
            # From here on finalizers in other threads put aside; one that asked before may still be freeing.
            here = get_ident()
            while any(_is_giving_back(frame) for thread, frame in sys._current_frames().items() if thread != here):
                time.sleep(1e-4)

    def _settle(self) -> None:
        """The rare cases of `check_open`: closed, not owned yet, the owner has ended, another's, things put aside."""
        if self.closed:
            raise RuntimeError(f"the engine {self.label} is closed: its tensors are gone; make a new engine")
        if self._thread_id != get_ident():
            with self._changing_hands:
                self._check_fork()
                if not self._is_free():
                    owner = self._thread() if self._thread is not None else None
                    here = threading.current_thread()
                    raise RuntimeError(
                        f"the engine {self.label} belongs to thread {owner.name if owner else '?'!r} "
                        f"(id {self._thread_id}) and was called from thread {here.name!r} (id {get_ident()}): an "
                        "engine serves one thread at a time. Make an engine for each thread, or call "
                        "engine.take_over() here once the other thread has finished with it"
                    )
                self._own()
        self._free_put_aside()

    def _is_free(self) -> bool:
        if self._thread_id == _NOBODY:
            return True
        owner = self._thread() if self._thread is not None else None
        return owner is None or not owner.is_alive()

    def _own(self) -> None:
        self._thread = weakref.ref(threading.current_thread())
        self._thread_id = get_ident()

    @property
    def is_forked(self) -> bool:
        """Whether this is a child process's copy of an engine of its parent."""
        return self._thread_id == _FORKED

    def _check_fork(self) -> None:
        if self.is_forked:
            raise RuntimeError(f"the engine {self.label} was made before a fork: make an engine in the child process")

    def _after_fork(self) -> None:
        self._thread_id = _FORKED
        self._changing_hands = threading.Lock()  # perhaps held by a thread that the child does not have

    # -- what is given back ------------------------------------------------------------------------------------------
    def _return(self, storage: Any, free: Callable[[Any], None]) -> None:
        """Call `free(storage)`, now in the owner's thread, at the owner's next call elsewhere.

        Runs in finalizers: it neither waits nor takes a lock.
        """
        if self._thread_id == get_ident():
            free(storage)
        else:
            self._put_aside.append((free, storage))

    def _free_put_aside(self) -> None:
        while self._put_aside:
            free, storage = self._put_aside.popleft()
            free(storage)

    def _settle_frees(self) -> None:
        """Before statistics, which any thread may read: count what was put aside where that is this thread's to do."""
        if self._put_aside and not self.closed and (self._thread_id == get_ident() or self._is_free()):
            self._settle()


def _is_giving_back(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is OneThread._return.__code__:
            return True
        frame = frame.f_back
    return False


_with_device: weakref.WeakSet[OneThread] = weakref.WeakSet()


def _lose_devices() -> None:
    for engine in _with_device:
        engine._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_devices)
