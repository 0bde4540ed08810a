"""One block: a stretch of bytes, and an index of its holes that finds the first fit in O(log n)."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from typing import Any, Protocol

PAGE_UNITS = 1024  # alignment units a page: bounds the holes that one page can list by half of it


class Pin(Protocol):
    """Whoever relies on a block's address beyond its ranges."""

    def block_released(self) -> None:
        """The block is about to go back to the source. Must not allocate, free or release."""


class Block:
    """The holes of one block, in units of bytes; offsets and sizes are multiples of the alignment.

    A page lists the holes that start in it, in order. A binary tree over the pages holds the largest hole below each
    node, so `take` walks down to the first page with a large enough hole and then along its holes, of which there may
    be 512 but seldom are ten; both `take` and `give` cost O(log pages). Two tables, hole by start and hole by end,
    join neighbours at once.

    handle: what the source gave. live: start -> bytes of each taken range, which the pool enters. sequence: rank in
    first-fit order. slot: the pool's place for it. touched: a range came from it since the pool last finished a
    step. kept: the step that the pool last finished used it. pins: who must hear when it goes back to the source.
    """

    __slots__ = (
        "_ends",
        "_leaves",
        "_pages",
        "_shift",
        "_sizes",
        "handle",
        "kept",
        "live",
        "live_bytes",
        "nbytes",
        "num_ranges",
        "pins",
        "sequence",
        "slot",
        "touched",
        "tree",
    )

    def __init__(self, handle: Any, nbytes: int, sequence: int, slot: int, alignment: int) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.sequence = sequence
        self.slot = slot
        self.live: dict[int, int] = {}
        self.live_bytes = 0
        self.num_ranges = 0
        self.touched = self.kept = False
        self.pins: weakref.WeakSet[Pin] | None = None
        self._shift = (alignment * PAGE_UNITS).bit_length() - 1
        num_pages = (nbytes - 1 >> self._shift) + 1
        self._leaves = 1 << (num_pages - 1).bit_length()
        self._pages: list[list[int] | None] = [None] * num_pages
        self._pages[0] = [0]
        self._sizes = {0: nbytes}  # start of a hole -> its bytes
        self._ends = {nbytes: 0}  # end of a hole -> its start
        self.tree = [0] * (2 * self._leaves)  # tree[1] is the largest hole of the block
        self._set_leaf(self._leaves, nbytes)

    @property
    def largest_hole_bytes(self) -> int:
        """Bytes of the largest hole."""
        return self.tree[1]

    def holes(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each hole, by offset."""
        return sorted(self._sizes.items())

    def take(self, nbytes: int) -> int:
        """Offset of the first `nbytes` of the lowest hole that is large enough. The caller knows that there is one."""
        tree, leaves, sizes, shift = self.tree, self._leaves, self._sizes, self._shift
        leaf = 1
        while leaf < leaves:
            leaf <<= 1
            if tree[leaf] < nbytes:
                leaf += 1
        page: list[int] = self._pages[leaf - leaves]  # type: ignore[assignment]
        position = 0
        start = page[0]
        while sizes[start] < nbytes:
            position += 1
            start = page[position]
        size = sizes.pop(start)
        rest = start + nbytes
        if size == nbytes:
            del page[position]
            del self._ends[rest]
        else:
            self._ends[start + size] = rest
            sizes[rest] = size = size - nbytes
            rest_page = rest >> shift
            if rest_page == leaf - leaves:
                page[position] = rest
            else:
                # Nothing but the hole itself lies between the two pages' entries, so the rest comes first in its page.
                del page[position]
                listed = self._pages[rest_page]
                if listed:
                    listed.insert(0, rest)
                else:
                    self._pages[rest_page] = [rest]
                rest_leaf = leaves + rest_page
                if size > tree[rest_leaf]:
                    self._set_leaf(rest_leaf, size)
            size += nbytes
        if tree[leaf] == size:
            self._set_leaf(leaf, sizes[page[0]] if len(page) == 1 else max([sizes[hole] for hole in page], default=0))
        self.live_bytes += nbytes
        self.num_ranges += 1
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Make a taken range a hole again, joined with the holes that touch it."""
        tree, leaves, sizes, ends, pages, shift = (
            self.tree,
            self._leaves,
            self._sizes,
            self._ends,
            self._pages,
            self._shift,
        )
        end = start + nbytes
        right = sizes.pop(end, 0)
        left = ends.pop(start, -1)
        first = start if left < 0 else left
        number = first >> shift
        page = pages[number]
        if page is None:
            page = pages[number] = []
        if right:
            right_number = end >> shift
            if right_number != number:
                # Its page holds nothing before it: what lies between was this range, or the hole on the left.
                right_page: list[int] = pages[right_number]  # type: ignore[assignment]
                del right_page[0]
                if tree[leaves + right_number] == right:
                    self._set_leaf(leaves + right_number, max([sizes[hole] for hole in right_page], default=0))
                if left < 0:
                    page.append(start)
            elif left < 0:
                page[bisect_left(page, end)] = start
            else:
                del page[bisect_left(page, end)]
        elif left < 0:
            insort(page, start)
        last = end + right
        sizes[first] = size = last - first
        ends[last] = first
        if size > tree[leaves + number]:
            self._set_leaf(leaves + number, size)
        self.live_bytes -= nbytes
        self.num_ranges -= 1

    def mend(self) -> None:
        """Work out holes and counts from `live` alone: an interrupt broke off `take` or `give`."""
        self._pages = [None] * len(self._pages)
        self._sizes, self._ends = {}, {}
        self.tree = [0] * len(self.tree)
        end = 0
        for start, nbytes in (*sorted(self.live.items()), (self.nbytes, 0)):
            if start > end:
                number, size = end >> self._shift, start - end
                self._sizes[end], self._ends[start] = size, end
                page = self._pages[number]
                if page is None:
                    page = self._pages[number] = []
                page.append(end)
                if size > self.tree[self._leaves + number]:
                    self._set_leaf(self._leaves + number, size)
            end = start + nbytes
        self.live_bytes = sum(self.live.values())
        self.num_ranges = len(self.live)

    def _set_leaf(self, node: int, value: int) -> None:
        tree = self.tree
        tree[node] = value
        while node > 1:
            other = tree[node ^ 1]
            if other > value:
                value = other
            node >>= 1
            if tree[node] == value:
                return
            tree[node] = value

    def __repr__(self) -> str:
        return f"Block(sequence={self.sequence}, nbytes={self.nbytes}, live_bytes={self.live_bytes})"
