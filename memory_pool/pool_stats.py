"""What a pool tells about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .block_pool import BlockPool


@dataclass(frozen=True)
class PoolStats:
    """A snapshot of one pool; bytes include the rounding of every range up to the alignment.

    blocks: held from the source. allocated_bytes: reserved from the source. live_bytes: in ranges. free_bytes: reserved
    and in no range. largest_hole_bytes: most that one range can get without another block. fragmentation:
    1 - largest hole / free bytes (0 when nothing is free). idle_bytes: in blocks without any range.
    peak_live_bytes, peak_reserved_bytes: highest since the last `reset_peak`. num_ranges: alive. total_allocations,
    total_blocks: ever made. retain_free_bytes: idle bytes that `release_idle_blocks` keeps. generation: rises
    whenever blocks go back to the source.
    """

    name: str
    blocks: int
    allocated_bytes: int
    live_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    fragmentation: float
    idle_bytes: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    num_ranges: int
    total_allocations: int
    total_blocks: int
    retain_free_bytes: int
    generation: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a log line."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.name or 'pool'}{{ blocks={self.blocks} allocated_bytes={self.allocated_bytes} "
            f"live_bytes={self.live_bytes} free_bytes={self.free_bytes} largest_hole_bytes={self.largest_hole_bytes} "
            f"fragmentation={self.fragmentation:.3f} peak_live_bytes={self.peak_live_bytes} "
            f"peak_reserved_bytes={self.peak_reserved_bytes} num_ranges={self.num_ranges} }}"
        )


@dataclass(frozen=True)
class BlockStats:
    """One block of a pool. holes: (offset, bytes) of each, by offset."""

    sequence: int
    nbytes: int
    live_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    fragmentation: float
    num_ranges: int
    holes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PoolDebugStats(PoolStats):
    """PoolStats and each block, in first-fit order."""

    block_details: tuple[BlockStats, ...] = ()

    def __str__(self) -> str:
        lines = [super().__str__()]
        lines += [
            f"  block {b.sequence}: nbytes={b.nbytes} live_bytes={b.live_bytes} free_bytes={b.free_bytes} "
            f"largest_hole_bytes={b.largest_hole_bytes} fragmentation={b.fragmentation:.3f} "
            f"num_ranges={b.num_ranges} num_holes={len(b.holes)}"
            for b in self.block_details
        ]
        return "\n".join(lines)


def fragmentation_of(free_bytes: int, largest_hole_bytes: int) -> float:
    """1 - largest hole / free bytes; 0 when nothing is free."""
    return 1.0 - largest_hole_bytes / free_bytes if free_bytes else 0.0


def pool_debug_stats(pool: BlockPool) -> PoolDebugStats:
    """Statistics of a pool with each block's own; walks every hole, so not for the hot path."""
    details = []
    for block in pool.blocks():
        free, largest = block.nbytes - block.live_bytes, block.largest_hole_bytes
        details.append(
            BlockStats(
                block.sequence,
                block.nbytes,
                block.live_bytes,
                free,
                largest,
                fragmentation_of(free, largest),
                block.num_ranges,
                tuple(block.holes()),
            )
        )
    return PoolDebugStats(**pool.stats().as_dict(), block_details=tuple(details))
