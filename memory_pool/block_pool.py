"""Ranges of bytes out of large blocks, first fit."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from .block import Block, Pin
from .block_source import BlockSource, OutOfBlockMemory
from .pool_errors import PoolExhaustedError
from .pool_stats import PoolStats, fragmentation_of

DEFAULT_BLOCK_BYTES = 32 * 2**20  # measured: planned steps of 100M to 1.5B parameters reserve least around this size
SMALLEST_BLOCK_BYTES = 2**20  # when memory runs short, blocks get smaller down to this before the pool gives up
SMALL_SHARE = 16  # requests of at least 1/16 of a block get a block that whole multiples of them fill

# (event, block sequence number, offset, bytes); events: allocate, free, add_block, release_block
Observer = Callable[[str, int, int, int], None]


def fitted_block_bytes(request: int, block_bytes: int) -> int:
    """Bytes of the block made for a request that fits nowhere: `block_bytes`, or the request itself where larger.

    A request of at least 1/16 of a block gets the largest multiple of itself that is no more than `block_bytes`: the
    tensors of a transformer come in a few sizes, many of each, and 24 MiB tensors would leave 8 of 32 MiB empty.
    """
    if request >= block_bytes:
        return request
    return block_bytes if request < block_bytes // SMALL_SHARE else block_bytes // request * request


class PoolRange:
    """Bytes offset..offset+nbytes-1 of a block. nbytes: a multiple of the alignment. requested: what was asked for."""

    __slots__ = ("block", "live", "nbytes", "offset", "requested")

    def __init__(self, block: Block, offset: int, nbytes: int, requested: int) -> None:
        self.block = block
        self.offset = offset
        self.nbytes = nbytes
        self.requested = requested
        self.live = True

    def __repr__(self) -> str:
        state = "" if self.live else ", freed"
        return f"PoolRange(block={self.block.sequence}, offset={self.offset}, nbytes={self.nbytes}{state})"


class BlockPool:
    """Gives ranges first fit by (block sequence number, offset) and takes blocks from `source` when none fits.

    block_bytes: most bytes of a block, but a request above it gets a block of its exact (aligned) size; see
    `fitted_block_bytes`. alignment: a power of two; every range starts and ends on it. budget_bytes: most bytes to
    reserve from the source, None for no limit of the pool's own. observer: called after every event, for traces.

    Where a range lies depends on nothing but the order of calls. A freed range is reusable at once. Not thread-safe; a
    `free` that a garbage collection runs in the middle of another call is put off to that call's end. A call that an
    interrupt (Ctrl-C) breaks off has made no range, or has freed it, and the pool goes on as if nothing had been.
    """

    def __init__(
        self,
        source: BlockSource,
        *,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        alignment: int = 256,
        name: str = "",
        budget_bytes: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two")
        if block_bytes < alignment:
            raise ValueError(f"block_bytes {block_bytes} is less than the alignment {alignment}")
        self.source = source
        self.alignment = alignment
        self.block_bytes = self._aligned(block_bytes)
        self.name = name
        self.budget_bytes = budget_bytes
        self.observer = observer
        self.retain_free_bytes = 0
        self.generation = 0
        self.live_bytes = 0
        self.reserved_bytes = 0
        self.peak_live_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_ranges = 0
        self.live_signature = 0  # xor of a hash of every live range
        self.total_allocations = 0
        self.total_blocks = 0
        self._slots: list[Block] = []  # by sequence number
        self._leaves = 1
        self._tree = [0, 0]  # largest hole below each node; leaf _leaves + slot is a block
        self._busy = False
        self._broken_off = False  # a call under way, or what an interrupt left of one: see _mend
        self._put_off: list[PoolRange] = []
        self._step_finished = False
        self._destroyed = False

    def _aligned(self, nbytes: int) -> int:
        mask = self.alignment - 1
        return (nbytes + mask) & ~mask or self.alignment

    # -- ranges ------------------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int) -> PoolRange:
        """A range of at least `nbytes` bytes and at least one alignment unit; its contents are undefined.

        Raises ValueError for a negative size, PoolExhaustedError when nothing fits and the source or the budget allows
        no further block.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        size = (nbytes + self.alignment - 1) & -self.alignment or self.alignment
        if self._broken_off:
            self._mend()
        try:
            self._busy = self._broken_off = True
            tree, leaves = self._tree, self._leaves
            if tree[1] < size:
                self._add_block(size)
                tree, leaves = self._tree, self._leaves
            node = 1
            while node < leaves:
                node <<= 1
                if tree[node] < size:
                    node += 1
            block = self._slots[node - leaves]
            offset = block.take(size)
            range_ = PoolRange(block, offset, size, nbytes)
            block.touched = True
            self.live_signature ^= hash((block.sequence, offset, size))
            largest = block.tree[1]
            if node == 1:  # the only block
                tree[1] = largest
            elif tree[node] != largest:
                self._set_leaf(node, largest)
            self.num_ranges += 1
            self.total_allocations += 1
            self.live_bytes = live = self.live_bytes + size
            if live > self.peak_live_bytes:
                self.peak_live_bytes = live
            if self.observer is not None:
                self.observer("allocate", block.sequence, range_.offset, size)
            block.live[offset] = size
            self._busy = self._broken_off = False
        except PoolExhaustedError:
            self._broken_off = False
            raise
        finally:
            self._busy = False
            if self._put_off:
                self._free_put_off()
        return range_

    def free(self, range_: PoolRange) -> None:
        """Give a range back; holes beside it join it at once.

        Raises ValueError when it was freed before or belongs to another pool. After `destroy` it does nothing.
        """
        if self._busy:
            self._put_off.append(range_)
            return
        block = range_.block
        if not range_.live:
            if self._destroyed:
                return
            raise ValueError(f"double free of {range_} in memory pool {self.name!r}")
        slot = block.slot
        if slot >= len(self._slots) or self._slots[slot] is not block:
            if self._destroyed:
                return
            raise ValueError(f"{range_} is not of memory pool {self.name!r}")
        if self._broken_off:
            self._mend()
        try:
            self._busy = self._broken_off = True
            size, offset = range_.nbytes, range_.offset
            range_.live = False
            del block.live[offset]
            block.give(offset, size)
            self.live_signature ^= hash((block.sequence, offset, size))
            node, tree, largest = self._leaves + slot, self._tree, block.tree[1]
            if node == 1:
                tree[1] = largest
            elif tree[node] != largest:
                self._set_leaf(node, largest)
            self.num_ranges -= 1
            self.live_bytes -= size
            if self.observer is not None:
                self.observer("free", block.sequence, range_.offset, size)
            self._busy = self._broken_off = False
        except BaseException:
            if not range_.live:
                block.live.pop(range_.offset, None)
            raise
        finally:
            self._busy = False
            if self._put_off:
                self._free_put_off()

    def _mend(self) -> None:
        """Work out everything from the live ranges of each block: an interrupt broke off `allocate` or `free`."""
        try:
            self._busy = True
            signature = 0
            for block in self._slots:
                block.mend()
                for offset, size in block.live.items():
                    signature ^= hash((block.sequence, offset, size))
            self.live_signature = signature
            self.num_ranges = sum(block.num_ranges for block in self._slots)
            self.live_bytes = sum(block.live_bytes for block in self._slots)
            self.reserved_bytes = sum(block.nbytes for block in self._slots)
            self._rebuild()
            self._busy = self._broken_off = False
        finally:
            self._busy = False
            if self._put_off:
                self._free_put_off()

    def _settle(self) -> None:
        """Before counts are read: what an interrupt broke off."""
        if self._broken_off and not self._busy:
            self._mend()

    def _free_put_off(self) -> None:
        while self._put_off:
            self.free(self._put_off.pop(0))

    # -- blocks ------------------------------------------------------------------------------------------------------
    def blocks(self) -> list[Block]:
        """The blocks in first-fit order."""
        self._settle()
        return list(self._slots)

    def _add_block(self, size: int) -> None:
        """A block with room for `size`; smaller than block_bytes where the budget or the source is nearly used up."""
        if self._destroyed:
            raise RuntimeError(f"memory pool {self.name!r} is destroyed")
        nbytes = fitted_block_bytes(size, self.block_bytes)
        if self.budget_bytes is not None:
            rest = (self.budget_bytes - self.reserved_bytes) & -self.alignment
            if rest < size:
                reason = f"the pool's budget of {self.budget_bytes} bytes leaves {max(rest, 0)} to reserve"
                raise PoolExhaustedError(self.name, size, self.budget_bytes, self.stats(), reason)
            nbytes = min(nbytes, rest)
        smallest = min(nbytes, max(size, SMALLEST_BLOCK_BYTES))
        while True:
            try:
                handle = self.source.allocate(nbytes)
                break
            except OutOfBlockMemory as error:
                if nbytes == smallest:
                    budget = self.budget_bytes
                    if budget is None:
                        budget = getattr(self.source, "budget_bytes", None)
                    raise PoolExhaustedError(
                        self.name, size, budget, self.stats(), str(error), over_limit=error.over_limit
                    ) from error
                nbytes = max(smallest, self._aligned(nbytes // 2))
        block = Block(handle, nbytes, self.total_blocks, len(self._slots), self.alignment)
        self.total_blocks += 1
        self._slots.append(block)
        if len(self._slots) > self._leaves:
            self._rebuild()
        else:
            self._set_leaf(self._leaves + block.slot, nbytes)
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if self.observer is not None:
            self.observer("add_block", block.sequence, 0, nbytes)

    def _set_leaf(self, node: int, value: int) -> None:
        tree = self._tree
        tree[node] = value
        while node > 1:
            value = max(value, tree[node ^ 1])
            node >>= 1
            if tree[node] == value:
                return
            tree[node] = value

    def _rebuild(self) -> None:
        count = len(self._slots)
        self._leaves = leaves = 1 << max(0, count - 1).bit_length()
        tree = [0] * (2 * leaves)
        for slot, block in enumerate(self._slots):
            block.slot = slot
            tree[leaves + slot] = block.tree[1]
        for node in range(leaves - 1, 0, -1):
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
        self._tree = tree

    def set_retain_free_bytes(self, nbytes: int) -> None:
        """Idle bytes that `release_idle_blocks` keeps, so that steady work does not ask the driver again each step.

        Raises ValueError for a negative number.
        """
        if nbytes < 0:
            raise ValueError(f"retain_free_bytes {nbytes} is negative")
        self.retain_free_bytes = nbytes

    def start_step(self) -> None:
        """A step begins: what came from the blocks before is no part of it."""
        for block in self._slots:
            block.touched = False
        self._step_finished = False

    def finish_step(self) -> int:
        """A step is over: the blocks it used are what the next one will use. Returns their bytes.

        A step's use is every block that a range came from since `start_step`, or that still has one. Retaining the
        number returned, `release_idle_blocks` gives back all other blocks and steady steps never ask the source again.
        A second call changes nothing until the next step starts, or a further range is made.
        """
        self._settle()
        if not self._step_finished or any(block.touched for block in self._slots):
            for block in self._slots:
                block.kept = block.touched or block.num_ranges > 0
                block.touched = False
            self._step_finished = True
        return sum(block.nbytes for block in self._slots if block.kept)

    def release_idle_blocks(self, *, keep_retained: bool = True) -> int:
        """Return blocks without any range to the source, latest first; returns the bytes given back.

        A block stays while the idle bytes left without it would be fewer than `retain_free_bytes`; with
        `keep_retained=False` every idle block goes. Blocks that the last finished step used go after all others.
        """
        self._settle()
        idle = [block for block in self._slots if not block.num_ranges]
        keep = self.retain_free_bytes if keep_retained else 0
        left = sum(block.nbytes for block in idle)
        released = []
        for block in sorted(idle, key=lambda block: (block.kept, -block.slot)):
            if left - block.nbytes >= keep:
                left -= block.nbytes
                released.append(block)
        self._release(released)
        return sum(block.nbytes for block in released)

    def _release(self, released: list[Block]) -> None:
        if not released:
            return
        self._busy = True
        try:
            self.generation += 1
            gone = {block.sequence for block in released}
            self._slots = [block for block in self._slots if block.sequence not in gone]
            self._rebuild()
            for block in released:
                for pin in list(block.pins or ()):
                    pin.block_released()
                self.reserved_bytes -= block.nbytes
                self.source.free(block.handle)
                if self.observer is not None:
                    self.observer("release_block", block.sequence, 0, block.nbytes)
        finally:
            self._busy = False
            if self._put_off:
                self._free_put_off()

    def destroy(self) -> None:
        """Return every block to the source, in use or not. Later frees do nothing, allocations raise RuntimeError."""
        self._destroyed = True
        self.live_bytes = self.num_ranges = self.live_signature = 0
        self._release(list(self._slots))

    # -- placement ---------------------------------------------------------------------------------------------------
    @property
    def placement(self) -> tuple[int, int, int]:
        """Equal for equal sets of live ranges, in O(1): the same calls then place the same ranges, as long as the
        blocks they come from are held."""
        self._settle()
        return self.live_signature, self.num_ranges, self.live_bytes

    def pin_step(self, pin: Pin) -> list[Block]:
        """Have `pin` hear when a block goes back that has a range, or gave one since `start_step`.

        The pin is held weakly. Returns the blocks.
        """
        self._settle()
        pinned = [block for block in self._slots if block.touched or block.num_ranges]
        for block in pinned:
            if block.pins is None:
                block.pins = weakref.WeakSet()
            block.pins.add(pin)
        return pinned

    # -- statistics --------------------------------------------------------------------------------------------------
    def stats(self) -> PoolStats:
        """A snapshot."""
        self._settle()
        free, largest = self.reserved_bytes - self.live_bytes, self._tree[1]
        return PoolStats(
            name=self.name,
            blocks=len(self._slots),
            allocated_bytes=self.reserved_bytes,
            live_bytes=self.live_bytes,
            free_bytes=free,
            largest_hole_bytes=largest,
            fragmentation=fragmentation_of(free, largest),
            idle_bytes=sum(block.nbytes for block in self._slots if not block.num_ranges),
            peak_live_bytes=self.peak_live_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            num_ranges=self.num_ranges,
            total_allocations=self.total_allocations,
            total_blocks=self.total_blocks,
            retain_free_bytes=self.retain_free_bytes,
            generation=self.generation,
        )

    def reset_peak(self) -> None:
        """Start both peaks anew from what is live and reserved."""
        self.peak_live_bytes = self.live_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def __str__(self) -> str:
        return str(self.stats())

    def __repr__(self) -> str:
        return f"BlockPool({self.stats()})"
