"""An input that an op writes must not share bytes with another: what is read then depends on who writes first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .input_checks import input_name_at

if TYPE_CHECKING:
    from .op import Op
    from .tensor import Tensor


def shares_storage(inputs: Sequence[Tensor | None]) -> bool:
    """Whether two inputs lie in one storage: seldom, and the only case in which they can overlap."""
    if len(inputs) == 2:  # the usual number, at a third of the time
        a, b = inputs
        return a is not None and b is not None and a.storage is b.storage
    storages = [tensor.storage for tensor in inputs if tensor is not None]
    return len(set(storages)) < len(storages)


def check_overlap(op: Op, writes: Sequence[int], inputs: Sequence[Tensor | None], settings: dict[str, Any]) -> None:
    """Raises ValueError where bytes of an input in `writes` are those of another input.

    The very same bytes are fine where only one of the two is written and `Op.may_coincide` says so.
    """
    specs = [None if tensor is None else tensor.spec for tensor in inputs]
    in_storage: dict[int, list[int]] = {}  # positions of the inputs, by their storage
    for position, tensor in enumerate(inputs):
        if tensor is not None:
            in_storage.setdefault(id(tensor.storage), []).append(position)
    for i in writes:
        target = inputs[i]
        if target is None:
            continue
        first, end = (target.offset + byte for byte in op.written_bytes(i, *specs, **settings))
        for j in in_storage[id(target.storage)]:
            other = inputs[j]
            assert other is not None
            start, stop = other.offset, other.offset + other.nbytes
            if j == i or max(first, start) >= min(end, stop):
                continue
            if (start, stop) == (first, end) and j not in writes and op.may_coincide(i, j, **settings):
                continue
            written, read = input_name_at(op, len(inputs), i), input_name_at(op, len(inputs), j)
            raise ValueError(
                f"{op.name}: {written} overlaps {read}: {written} of shape {target.shape} is changed in place and "
                f"shares memory with {read} of shape {other.shape}: copy one of them first, with engine.copy(...)"
            )
