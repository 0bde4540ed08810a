"""What blocks keep for backward, in host memory between the two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..engine.allocation_ledger import ACTIVATIONS
from ..engine.compute_engine import ComputeEngine
from ..engine.host_copy import HostCopy
from ..engine.tensor import Tensor


@dataclass
class _Entry:
    """What one block kept: where each tensor belongs, its copy, and the tensor once it is restored."""

    places: list[tuple[dict[str, Tensor], str, HostCopy]]
    tensors: list[Tensor]


class ActivationOffload:
    """One entry a block, for the micro-batch under way.

    `store` moves kept tensors to the host, `prefetch` starts bringing a block's back, `bring_back` puts them where they
    were and forgets the entry, whose host memory is then free. A tensor kept under several names is copied once.

    Tensors that were stored last stay on the device until the next `store` or `settle`, so that their copies overlap
    what is computed meanwhile where the device has a queue for copies; elsewhere too, so that the plan is one.
    """

    def __init__(self, engine: ComputeEngine) -> None:
        self.engine = engine
        self._entries: dict[int, _Entry] = {}
        self._leaving: list[Tensor] = []  # stored last

    def store(self, index: int, kept: Iterable[tuple[str, dict[str, Tensor], str]]) -> None:
        """Move the tensors to the host: (label, the dict that holds it, its key), taken out of the dicts."""
        copies: dict[tuple[int, int, object], HostCopy] = {}
        places = []
        leaving = []
        for label, holder, name in kept:
            tensor = holder.pop(name)
            key = id(tensor.storage), tensor.offset, tensor.spec
            if key not in copies:
                self.engine.note_kind(tensor, ACTIVATIONS, label)
                copies[key] = self.engine.offload(tensor)
                leaving.append(tensor)
            places.append((holder, name, copies[key]))
        if places:
            self._entries[index] = _Entry(places, [])
        self._leaving = leaving  # what was in it is given up: the device waits for its copies before it goes on

    def settle(self) -> None:
        """Give up the tensors that were stored last."""
        self._leaving = []

    def prefetch(self, index: int) -> None:
        """Start bringing a block's tensors back. Harmless when done before, or when nothing was stored."""
        entry = self._entries.get(index)
        if entry is not None and not entry.tensors:
            entry.tensors = [self.engine.restore(copy) for _, _, copy in entry.places]
            for tensor in entry.tensors:
                self.engine.note_kind(tensor, ACTIVATIONS, "restored")

    def bring_back(self, index: int) -> None:
        """Put a block's tensors where `store` took them from. Harmless when nothing is stored, or not any more."""
        self.prefetch(index)
        entry = self._entries.pop(index, None)
        if entry is not None:
            self.engine.start_copies()  # the block prefetched next is not waited for with this one
            for (holder, name, _), tensor in zip(entry.places, entry.tensors, strict=True):
                holder[name] = tensor

    def clear(self) -> None:
        """Forget everything; the host memory is free."""
        self._entries.clear()
        self.settle()

    @property
    def nbytes(self) -> int:
        """Bytes held in host memory, each copy once."""
        copies = {id(copy): copy for entry in self._entries.values() for _, _, copy in entry.places}
        return sum(copy.nbytes for copy in copies.values())
