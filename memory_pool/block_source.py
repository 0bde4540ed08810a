"""Where a pool's blocks come from."""

from __future__ import annotations

from typing import Any, Protocol


class OutOfBlockMemory(MemoryError):
    """A source has no block of this size to give. The message says why: a budget, a limit, or the driver's answer.

    over_limit: no block of this size is ever given, however much memory there is.
    """

    def __init__(self, message: str, *, over_limit: bool = False) -> None:
        self.over_limit = over_limit
        super().__init__(message)


class BlockSource(Protocol):
    """What a pool asks of its source. A returned block may still be in use by a device: the source defers its end."""

    def allocate(self, nbytes: int) -> Any:
        """A handle of `nbytes` fresh bytes. Raises OutOfBlockMemory when there are none."""

    def free(self, handle: Any) -> None:
        """Take a block back."""


class NullBlockSource:
    """Blocks that exist in the books alone, for planning without a device. A handle is its number of bytes."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.total_blocks = 0

    def allocate(self, nbytes: int) -> int:
        """Enter a block into the books."""
        self.reserved_bytes += nbytes
        self.total_blocks += 1
        return nbytes

    def free(self, handle: int) -> None:
        """Strike a block out."""
        self.reserved_bytes -= handle
