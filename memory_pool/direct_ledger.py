"""Books of an engine that allocates from the host directly."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class DirectStats:
    """blocks, live_bytes: alive now. peak_bytes: most alive at once. total_blocks, total_bytes: ever allocated."""

    blocks: int
    live_bytes: int
    peak_bytes: int
    total_blocks: int
    total_bytes: int

    def as_dict(self) -> dict[str, int]:
        """The fields, for a log line."""
        return asdict(self)

    def __str__(self) -> str:
        return "direct{ " + " ".join(f"{name}={value}" for name, value in asdict(self).items()) + " }"


class DirectLedger:
    """Counts allocations and frees of host arrays; `str` and `stats()` report them."""

    __slots__ = ("blocks", "live_bytes", "peak_bytes", "total_blocks", "total_bytes")

    def __init__(self) -> None:
        self.blocks = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self.total_blocks = 0
        self.total_bytes = 0

    def allocate(self, nbytes: int) -> None:
        """Enter an allocation."""
        self.blocks += 1
        self.total_blocks += 1
        self.total_bytes += nbytes
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    def free(self, nbytes: int) -> None:
        """Enter a free. Raises ValueError when more is freed than is alive."""
        if self.blocks <= 0 or nbytes > self.live_bytes:
            raise ValueError(f"free of {nbytes} bytes, but {self.blocks} blocks of {self.live_bytes} bytes are alive")
        self.blocks -= 1
        self.live_bytes -= nbytes

    def reset_peak(self) -> None:
        """Start the peak anew from what is alive."""
        self.peak_bytes = self.live_bytes

    def stats(self) -> DirectStats:
        """A snapshot."""
        return DirectStats(self.blocks, self.live_bytes, self.peak_bytes, self.total_blocks, self.total_bytes)

    def __str__(self) -> str:
        return str(self.stats())
