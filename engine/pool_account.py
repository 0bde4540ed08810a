"""Where every reserved byte of the pools is at one moment: tensors by kind, rounding, holes, idle blocks."""

from __future__ import annotations

from dataclasses import dataclass

from .allocation_ledger import EARLIER, KINDS, AllocationLedger


@dataclass(frozen=True)
class PoolAccount:
    """All fields in bytes; `reserved_bytes` is the sum of the others, and what the pools hold from the driver.

    by_kind: tensors as asked for. alignment_bytes: what rounding each up to the pool's alignment adds.
    fragmentation_bytes: holes in blocks that hold at least one tensor. idle_bytes: blocks that hold none.
    """

    by_kind: dict[str, int]
    alignment_bytes: int
    fragmentation_bytes: int
    idle_bytes: int
    reserved_bytes: int

    @property
    def live_bytes(self) -> int:
        """Tensors with their rounding: what the pool calls live."""
        return sum(self.by_kind.values()) + self.alignment_bytes

    def __str__(self) -> str:
        return (
            f"{sum(self.by_kind.values()):,} of tensors + {self.alignment_bytes:,} of alignment + "
            f"{self.fragmentation_bytes:,} of fragmentation + {self.idle_bytes:,} of idle blocks = "
            f"{self.reserved_bytes:,} bytes reserved"
        )


def pool_account(ledger: AllocationLedger, event: int | None = None, pool: str | None = None) -> PoolAccount:
    """The account right after an event (the peak of live bytes unless given), of one pool or of all device pools.

    Raises ValueError when the ledger was attached after tensors were made: in which blocks those lie is not known.
    """
    if any(allocation.kind == EARLIER for allocation in ledger.allocations):
        raise ValueError("no account can be given: the ledger was attached after tensors were made")
    event = ledger.peak_event if event is None else event
    kinds: dict[str, int] = {}
    used: set[tuple[str, int]] = set()
    live = 0
    for allocation in ledger.live_at(event):
        if pool is None or allocation.pool == pool:
            kinds[allocation.kind] = kinds.get(allocation.kind, 0) + allocation.requested
            live += allocation.nbytes
            used.add((allocation.pool, allocation.block))
    reserved = idle = 0
    for block in ledger.blocks:
        if (pool is None or block.pool == pool) and block.born <= event and (block.died is None or block.died > event):
            reserved += block.nbytes
            idle += block.nbytes if (block.pool, block.sequence) not in used else 0
    by_kind = {kind: kinds[kind] for kind in KINDS if kind in kinds}
    return PoolAccount(by_kind, live - sum(kinds.values()), reserved - live - idle, idle, reserved)
