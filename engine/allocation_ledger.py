"""Books of every allocation and op of a run: what was live when, made by what, of which kind.

Attach one to a Vulkan or Plan engine and run a step; the live set at any moment, the peak and the op during which it
occurred can then be told to the byte, because the books hear of every event of the pools themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .op import Cost
from .tensor import Tensor

if TYPE_CHECKING:
    from .compute_engine import Rule
    from .op import Op
    from .pooled_engine import PooledEngine

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
ACTIVATIONS = "saved activations"
RECOMPUTED = "recomputed activations"
LOGITS = "logits"
TABLES = "tables"
TEMPORARY = "temporaries"
EARLIER = "earlier"
# Order of tables and pictures: what lives longest comes first.
KINDS = (EARLIER, PARAMETERS, OPTIMIZER, TABLES, GRADIENTS, ACTIVATIONS, RECOMPUTED, LOGITS, TEMPORARY)


@dataclass
class Allocation:
    """One range of a pool from its birth to its death.

    nbytes: with the pool's rounding. born, died: event numbers; died is None while it lives. op: number of the op that
    was running, or ran next, when it was born. shape: of an op's output, else empty. requested: bytes of the tensor,
    without rounding. block: sequence number of its block, -1 where unknown. aliases: further labels it was given: other
    names of the same bytes.
    """

    pool: str
    nbytes: int
    born: int
    op: int
    phase: str
    kind: str = TEMPORARY
    label: str = ""
    died: int | None = None
    shape: tuple[int, ...] = ()
    requested: int = 0
    block: int = -1
    aliases: list[str] = field(default_factory=list)


@dataclass
class BlockRecord:
    """One block of a pool from the event that added it to the one that released it; died is None while it is held."""

    pool: str
    sequence: int
    nbytes: int
    born: int
    died: int | None = None


@dataclass
class OpRecord:
    """One op call. event: number of the last event before its outputs and temporaries were freed again.

    live_bytes: with its outputs and temporaries. made: its outputs. read: its inputs, those that the ledger knows.
    """

    op: str
    phase: str
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    cost: Cost
    event: int = 0
    live_bytes: int = 0
    made: list[Allocation] = field(default_factory=list)
    read: list[Allocation] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        """Whether one of its outputs is kept for backward, or made again for it."""
        return any(allocation.kind in (ACTIVATIONS, RECOMPUTED) for allocation in self.made)


class AllocationLedger:
    """Hears every allocation and op of one engine while attached. Holds numbers only, never a tensor.

    What was live before `attach` is taken over as allocations of kind "earlier". peak_bytes: most bytes live at once
    over all pools; peak_event: when; step_event: when the search for it began; peak_reserved_bytes: most bytes
    reserved; reserved_at_peak: reserved when live bytes were at their peak. phase_bytes: live at the end of each
    phase's last run. Bytes of each range include the pool's rounding to its alignment.
    """

    def __init__(self, engine: PooledEngine) -> None:
        self.engine = engine
        self.allocations: list[Allocation] = []
        self.ops: list[OpRecord] = []
        self.blocks: list[BlockRecord] = []
        self.live: dict[tuple[str, int, int], Allocation] = {}
        self.live_bytes = 0
        self.reserved_bytes = 0
        self.events = 0
        self.phase = ""
        self.step_event = 0
        self.peak_bytes = 0
        self.peak_event = 0
        self.peak_op_number = 0
        self.peak_phase = ""
        self.peak_reserved_bytes = 0
        self.reserved_at_peak = 0
        self.phase_bytes: dict[str, int] = {}
        self._in_op = False
        self._default_kind = TEMPORARY

    def attach(self) -> None:
        """Start listening. Raises ValueError when the engine already has a ledger."""
        if self.engine.ledger is not None:
            raise ValueError("the engine already has an allocation ledger: detach that one first")
        self.engine.ledger = self
        for name, pool in self.engine.pools.items():
            if pool.live_bytes:
                self.live_bytes += pool.live_bytes
                self.allocations.append(Allocation(name, pool.live_bytes, 0, 0, "", EARLIER))
            self.reserved_bytes += pool.reserved_bytes
            self.blocks += [BlockRecord(name, block.sequence, block.nbytes, 0) for block in pool.blocks()]
            pool.observer = self._observer(name)
        self.start_peak()

    def detach(self) -> None:
        """Stop listening; what was heard stays."""
        self.engine.ledger = None
        for pool in self.engine.pools.values():
            pool.observer = None

    def start_peak(self) -> None:
        """Look for the peak anew, from what is live now."""
        self.step_event = self.events
        self._note_peak()
        self.peak_reserved_bytes = self.reserved_bytes

    def _note_peak(self) -> None:
        self.peak_bytes, self.peak_event, self.peak_phase = self.live_bytes, self.events, self.phase
        self.peak_op_number = self._op_number
        self.reserved_at_peak = self.reserved_bytes

    @property
    def _op_number(self) -> int:
        """Of the running op, else of the next: what is allocated between two ops is for the second."""
        return len(self.ops) - self._in_op

    def _observer(self, pool: str) -> Any:
        def heard(event: str, block: int, offset: int, nbytes: int) -> None:
            self.events += 1
            if event == "allocate":
                allocation = Allocation(pool, nbytes, self.events, self._op_number, self.phase, self._default_kind)
                allocation.block, allocation.requested = block, nbytes
                self.live[pool, block, offset] = allocation
                self.allocations.append(allocation)
                self.live_bytes += nbytes
                if self.live_bytes > self.peak_bytes:
                    self._note_peak()
            elif event == "free":
                known = self.live.pop((pool, block, offset), None)
                self.live_bytes -= nbytes
                if known is not None:
                    known.died = self.events
                else:  # it was there before: shrink what was taken over
                    earlier = next(a for a in self.allocations if a.kind == EARLIER and a.pool == pool)
                    self.allocations.append(Allocation(pool, nbytes, 0, 0, "", EARLIER, died=self.events))
                    earlier.nbytes -= nbytes
            elif event == "add_block":
                self.reserved_bytes += nbytes
                self.blocks.append(BlockRecord(pool, block, nbytes, self.events))
                self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
            elif event == "release_block":
                self.reserved_bytes -= nbytes
                held = (b for b in self.blocks if b.pool == pool and b.sequence == block and b.died is None)
                next(held).died = self.events

        return heard

    def note_requested(self, pool: str, block: int, offset: int, nbytes: int) -> None:
        """Called by the engine with the bytes it asked for, before the pool rounded them up."""
        allocation = self.live.get((pool, block, offset))
        if allocation is not None:
            allocation.requested = nbytes

    # -- ops ---------------------------------------------------------------------------------------------------------
    def begin_op(self, op: Op, inputs: Any, rule: Rule) -> None:
        """Called by the engine before an op allocates."""
        shapes = [tensor.shape for tensor in inputs if tensor is not None]
        outputs = [spec.shape for spec in rule.outputs]
        known = (self.live.get(_key(tensor)) for tensor in inputs if tensor is not None)
        read = [allocation for allocation in known if allocation is not None]
        self.ops.append(OpRecord(op.name, self.phase, shapes, outputs, rule.cost, read=read))
        self._in_op = True

    def end_op(self, made: list[Tensor]) -> None:
        """Called by the engine once an op has allocated what it makes."""
        self._in_op = False
        record = self.ops[-1]
        record.live_bytes, record.event = self.live_bytes, self.events
        for tensor in made:
            allocation = self.live.get(_key(tensor))
            if allocation is not None:
                allocation.shape = tensor.shape
                record.made.append(allocation)

    # -- kinds -------------------------------------------------------------------------------------------------------
    def label(self, tensor: Tensor, kind: str, label: str = "") -> None:
        """Say of which kind a live tensor is; the first word stands, later labels are aliases."""
        allocation = self.live.get(_key(tensor))
        if allocation is None:
            return
        if allocation.kind == TEMPORARY:
            allocation.kind, allocation.label = kind, label
        elif label and label != allocation.label and label not in allocation.aliases:
            allocation.aliases.append(label)

    def rename(self, tensor: Tensor, label: str) -> None:
        """Give a live tensor another label."""
        allocation = self.live.get(_key(tensor))
        if allocation is not None:
            allocation.label = label

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Everything allocated inside is of this kind."""
        before, self._default_kind = self._default_kind, kind
        try:
            yield
        finally:
            self._default_kind = before

    # -- what was live when ------------------------------------------------------------------------------------------
    @property
    def peak_op(self) -> str:
        """Name of the op during which live bytes were at their peak, "" before the first."""
        return self.ops[min(self.peak_op_number, len(self.ops) - 1)].op if self.ops else ""

    def live_at(self, event: int) -> list[Allocation]:
        """The allocations alive right after an event."""
        return [a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)]

    def by_kind(self, event: int | None = None) -> dict[str, int]:
        """Live bytes by kind right after an event, the peak unless given."""
        totals: dict[str, int] = {}
        for allocation in self.live_at(self.peak_event if event is None else event):
            totals[allocation.kind] = totals.get(allocation.kind, 0) + allocation.nbytes
        return {kind: totals[kind] for kind in KINDS if kind in totals}

    def curve(self, weights: dict[int, float] | None = None, kind: str | None = None) -> np.ndarray:
        """Live bytes after each event, float64 [events + 1], of one kind or of all.

        weights: by id of an allocation, what part of its bytes counts (1 where not named).
        """
        change = np.zeros(self.events + 2)
        for allocation in self.allocations:
            if kind is None or allocation.kind == kind:
                nbytes = allocation.nbytes * (1.0 if weights is None else weights.get(id(allocation), 1.0))
                change[allocation.born] += nbytes
                change[self.events + 1 if allocation.died is None else allocation.died] -= nbytes
        return np.cumsum(change)[:-1]

    @property
    def cost(self) -> Cost:
        """Sum over all ops heard."""
        columns = zip(*(op.cost for op in self.ops), strict=True)
        return Cost(*(sum(column) for column in columns)) if self.ops else Cost(0, 0, 0)


def _key(tensor: Tensor) -> tuple[str, int, int]:
    pool, range_ = tensor.storage.handle
    return pool.name, range_.block.sequence, range_.offset
