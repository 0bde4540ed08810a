"""Takes a joined call apart again when it, or one of its parts, can never be made: what can is launched by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .fusion import Call, Range, overlap, without
from .tensor import Tensor, TensorSpec


class Apart(NamedTuple):
    """kept: calls to launch in the joined call's place, in order. given_up: parts that read what was never made.
    never_made: the bytes that hold no values behind them.
    """

    kept: list[Call]
    given_up: list[Call]
    never_made: list[Range]


def take_apart(
    joint: Call, held_back: Sequence[Call], never_made: Sequence[Range], allocate: Callable[[TensorSpec], Tensor]
) -> Apart:
    """The ops that were joined, each on its own again; those that need what was never made are given up.

    What the joined call left out writing, since nobody holds it any more, goes to fresh memory: its own may serve
    another tensor by now, which is already written. Fresh is what no call that is held back touches either, since those
    own nothing: what they will read may be free.
    """
    rebuild = _Rebuild(joint, held_back, never_made, allocate)
    kept, given_up, lost = [], [], list(never_made)
    for part in joint.single_calls():
        call = rebuild.call(part)
        stored = [t.extent for t in part.written() if rebuild.is_stored(t)]
        if call is None:
            given_up.append(part)
            lost += stored
        else:
            kept.append(call)
            lost = without(lost, stored)
    return Apart(kept, given_up, lost)


def _within(some: Range, ranges: Sequence[Range]) -> bool:
    return any(start <= some[0] and some[1] <= stop for start, stop in ranges)


class _Rebuild:
    """Makes the parts of a joined call, in order, into calls that may take its place.

    Tensors are told apart by their storage: two may have had the same bytes one after the other.
    """

    def __init__(
        self,
        joint: Call,
        held_back: Sequence[Call],
        never_made: Sequence[Range],
        allocate: Callable[[TensorSpec], Tensor],
    ) -> None:
        self._never_made, self._reads, self._writes = never_made, joint.reads(), joint.writes()
        self._last_written = [t for part in joint.single_calls() for t in part.written()][::-1]
        calls = [*held_back, *(part for call in held_back for part in call.single_calls())]
        self._touched = [some for call in calls for some in (*call.reads(), *call.writes())]
        self._refused: list[Tensor] = []  # kept, not to be given them again
        self._allocate = allocate
        # What parts so far have written, latest first, and where it is now; None: nowhere.
        self._known: list[tuple[Tensor, Tensor | None]] = []

    def is_stored(self, tensor: Tensor) -> bool:
        """Whether the joined call writes this tensor of a part: its bytes are, and are not another's by then."""
        last = next(t for t in self._last_written if overlap([t.extent], [tensor.extent]))
        return last.storage is tensor.storage and _within(tensor.extent, self._writes)

    def call(self, part: Call) -> Call | None:
        """The next part; None where what it reads was never made, or there is no memory for what it makes."""
        inputs = [None if t is None else self._found(t) for t in part.inputs]
        written = part.written()
        changed = written[: len(written) - len(part.made)]
        makes = all(t is None or found is not None for t, found in zip(part.inputs, inputs, strict=True))
        # An input that changes where it is must be one that the joined call changes.
        makes &= all(_within(t.extent, self._writes) or self._found(t) is not t for t in changed)
        made: list[Tensor] = []
        try:
            if makes:
                made = [t if self.is_stored(t) else self._fresh(t.spec) for t in part.made]
        except Exception:  # no memory: one more that is not made
            makes = False
        if not makes:
            self._known[:0] = [(t, None) for t in written]
            return None
        self._known[:0] = [*((t, self._found(t)) for t in changed), *zip(part.made, made, strict=True)]
        found = Call(
            part.op, part.cost, inputs, made, part.num_outputs, part.settings, part.alive, identity=part.identity
        )
        found.scope, found.choices, found.examined = part.scope, part.choices, True
        return found

    def _fresh(self, spec: TensorSpec) -> Tensor:
        while overlap([(tensor := self._allocate(spec)).extent], self._touched):
            self._refused.append(tensor)
        return tensor

    def _found(self, tensor: Tensor) -> Tensor | None:
        start, stop = tensor.extent
        for known, place in self._known:
            if known.storage is tensor.storage and overlap([known.extent], [tensor.extent]):
                if place is None or start < known.extent[0] or known.extent[1] < stop:
                    return None
                if place.storage is tensor.storage:
                    return tensor
                return Tensor(tensor.engine, tensor.spec, place.storage, place.offset + start - known.extent[0])
        there = _within(tensor.extent, self._reads) and not overlap([tensor.extent], self._never_made)
        return tensor if there else None
