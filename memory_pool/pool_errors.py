"""What a pool raises when it has no range to give."""

from __future__ import annotations

from .pool_stats import PoolStats


def _mib(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes < 2**20 else f"{nbytes / 2**20:.1f} MiB ({nbytes} bytes)"


class PoolExhaustedError(MemoryError):
    """No hole is large enough and no block could be added.

    pool: its name. requested: bytes of the range, aligned. budget: most bytes the pool or its source may reserve, None
    where nobody set one. reserved, live, free, largest_hole: bytes at that moment. fragmentation: 1 - largest/free.
    is_fragmented: the bytes are there (free or not reserved yet), only not in one piece. reason: why no block came.
    over_limit: no single block may be this large, however much memory there is.
    """

    def __init__(
        self, pool: str, requested: int, budget: int | None, stats: PoolStats, reason: str, *, over_limit: bool = False
    ) -> None:
        self.pool = pool
        self.requested = requested
        self.budget = budget
        self.reserved = stats.allocated_bytes
        self.live = stats.live_bytes
        self.free = stats.free_bytes
        self.largest_hole = stats.largest_hole_bytes
        self.fragmentation = stats.fragmentation
        self.reason = reason
        unreserved = 0 if budget is None else max(0, budget - self.reserved)
        self.over_limit = over_limit
        self.is_fragmented = not over_limit and self.free + unreserved >= requested
        if over_limit:
            what, hint = f"a limit: {reason}", "a tensor split in two, "
        elif self.is_fragmented:
            what = "fragmentation: enough bytes are free, but not in one piece"
            hint = "release idle blocks or tensors that lie between holes; "
        else:
            what = "exhaustion: fewer bytes are free than requested"
            hint = ""
        super().__init__(
            f"memory pool {pool!r} cannot give {_mib(requested)}, by {what}. "
            f"requested={requested} budget={'none' if budget is None else budget} reserved={self.reserved} "
            f"live={self.live} free={self.free} largest_hole={self.largest_hole} "
            f"fragmentation={self.fragmentation:.3f}. No block could be added: {reason}. "
            f"What helps: {hint}a smaller batch or sequence length, or --checkpoint-every 1"
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Built from several arguments, so the default (class, message) would not survive pickling.
        return (_rebuild, (self.__dict__.copy(), self.args))


def _rebuild(fields: dict[str, object], args: tuple[object, ...]) -> PoolExhaustedError:
    error = PoolExhaustedError.__new__(PoolExhaustedError, *args)
    error.__dict__.update(fields)
    return error
