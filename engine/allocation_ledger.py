"""Books of every allocation and op of a run: what was live when, made by what, of which kind.

Attach one to a Vulkan or Plan engine and run a step; the live set at any moment, the peak and the op during which it
occurred can then be told to the byte, because the books hear of every event of the pools themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .op import Cost
from .tensor import Tensor

if TYPE_CHECKING:
    from .compute_engine import Rule
    from .op import Op
    from .pooled_engine import PooledEngine

TEMPORARY = "temporaries"


@dataclass
class Allocation:
    """One range of a pool from its birth to its death. Times are event numbers; died is None while it lives."""

    pool: str
    nbytes: int
    born: int
    op: str
    phase: str
    kind: str = TEMPORARY
    label: str = ""
    died: int | None = None


@dataclass
class OpRecord:
    """One op call. event: number of its first event; live_bytes: once its outputs and temporaries are allocated."""

    op: str
    phase: str
    event: int
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    cost: Cost
    live_bytes: int = 0
    made: list[Allocation] = field(default_factory=list)


class AllocationLedger:
    """Hears every allocation and op of one engine while attached.

    What was live before `attach` is taken over as allocations of kind "earlier". Raises ValueError when the engine
    already has a ledger.
    """

    def __init__(self, engine: PooledEngine) -> None:
        self.engine = engine
        self.allocations: list[Allocation] = []
        self.ops: list[OpRecord] = []
        self.live: dict[tuple[str, int, int], Allocation] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_event = 0
        self.peak_op = ""
        self.peak_phase = ""
        self.events = 0
        self.phase = ""
        self._op = ""
        self._default_kind = TEMPORARY

    def attach(self) -> None:
        """Start listening."""
        if self.engine.ledger is not None:
            raise ValueError("the engine already has an allocation ledger: detach that one first")
        self.engine.ledger = self
        for name, pool in self.engine.pools.items():
            if pool.live_bytes:
                self.live_bytes += pool.live_bytes
                self.allocations.append(Allocation(name, pool.live_bytes, 0, "", "", "earlier"))
            pool.observer = self._observer(name)
        self.peak_bytes = self.live_bytes

    def detach(self) -> None:
        """Stop listening; what was heard stays."""
        self.engine.ledger = None
        for pool in self.engine.pools.values():
            pool.observer = None

    def _observer(self, pool: str) -> Any:
        def heard(event: str, block: int, offset: int, nbytes: int) -> None:
            self.events += 1
            key = (pool, block, offset)
            if event == "allocate":
                allocation = Allocation(pool, nbytes, self.events, self._op, self.phase, self._default_kind)
                self.live[key] = allocation
                self.allocations.append(allocation)
                self.live_bytes += nbytes
                if self.live_bytes > self.peak_bytes:
                    self.peak_bytes, self.peak_event = self.live_bytes, self.events
                    self.peak_op, self.peak_phase = self._op, self.phase
            elif event == "free":
                known = self.live.pop(key, None)
                self.live_bytes -= nbytes
                if known is not None:
                    known.died = self.events

        return heard

    # -- ops ---------------------------------------------------------------------------------------------------------
    def begin_op(self, op: Op, inputs: Any, rule: Rule) -> None:
        """Called by the engine before an op allocates."""
        self._op = op.name
        shapes = [tensor.shape for tensor in inputs if tensor is not None]
        outputs = [spec.shape for spec in rule.outputs]
        self.ops.append(OpRecord(op.name, self.phase, self.events, shapes, outputs, rule.cost))

    def end_op(self, made: list[Tensor]) -> None:
        """Called by the engine once an op has allocated what it makes."""
        record = self.ops[-1]
        record.live_bytes = self.live_bytes
        record.made = [self.live[key] for key in map(_key, made) if key in self.live]
        self._op = ""

    # -- kinds -------------------------------------------------------------------------------------------------------
    def label(self, tensor: Tensor, kind: str, label: str = "") -> None:
        """Say of which kind a live tensor is; the first word stands."""
        allocation = self.live.get(_key(tensor))
        if allocation is not None and allocation.kind == TEMPORARY:
            allocation.kind, allocation.label = kind, label

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Everything allocated inside is of this kind."""
        before, self._default_kind = self._default_kind, kind
        try:
            yield
        finally:
            self._default_kind = before

    def live_at(self, event: int) -> list[Allocation]:
        """The allocations alive right after an event."""
        return [a for a in self.allocations if a.born <= event and (a.died is None or a.died > event)]

    def by_kind(self, event: int | None = None) -> dict[str, int]:
        """Live bytes by kind right after an event, the peak unless given."""
        totals: dict[str, int] = {}
        for allocation in self.live_at(self.peak_event if event is None else event):
            totals[allocation.kind] = totals.get(allocation.kind, 0) + allocation.nbytes
        return totals

    @property
    def cost(self) -> Cost:
        """Sum over all ops heard."""
        return Cost(*(sum(column) for column in zip(*(op.cost for op in self.ops), strict=True))) if self.ops else Cost(0, 0, 0)


def _key(tensor: Tensor) -> tuple[str, int, int]:
    pool, range_ = tensor.storage.handle
    return pool.name, range_.block.sequence, range_.offset
