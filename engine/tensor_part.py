"""Which elements `tensor[key]` means, where they lie in one piece."""

from __future__ import annotations

import operator
from typing import Any


def contiguous_part(shape: tuple[int, ...], key: Any) -> tuple[int, tuple[int, ...]]:
    """(first element, shape) of the part of a row-major array that a NumPy basic index selects.

    key: whole numbers, slices and at most one Ellipsis, in a tuple or alone. Raises IndexError outside the shape,
    TypeError for another kind of index, ValueError for a part whose elements do not lie side by side.
    """
    first, part_shape = 0, []
    in_one_piece, many = True, False  # many: an earlier dimension has more than one index left
    stride = 1
    for size in shape:
        stride *= size
    for position, (size, k) in enumerate(zip(shape, _expanded(shape, key), strict=True)):
        stride = stride // size if size else 0
        if isinstance(k, slice):
            chosen = range(size)[k]
            first += chosen.start * stride if chosen else 0
            part_shape.append(len(chosen))
            if len(chosen) > 1:
                in_one_piece &= chosen.step == 1
            in_one_piece &= not many or len(chosen) == size
            many |= len(chosen) > 1
        else:
            if not -size <= k < size:
                raise IndexError(f"index {k} is outside dimension {position} of a tensor of shape {shape}")
            first += k % size * stride
            in_one_piece &= not many or size == 1
    if not in_one_piece and 0 not in part_shape:
        raise ValueError(
            f"[{_text(key)}] of a tensor of shape {shape} does not lie in one piece: a part is whole numbers, then one "
            "slice without a step; reshape, or take it from .numpy()"
        )
    return first, tuple(part_shape)


def _expanded(shape: tuple[int, ...], key: Any) -> list[int | slice]:
    """One index a dimension."""
    keys: list[Any] = []
    for k in key if isinstance(key, tuple) else (key,):
        if k is Ellipsis or isinstance(k, slice):
            keys.append(k)
            continue
        try:
            if isinstance(k, bool):
                raise TypeError
            keys.append(operator.index(k))
        except TypeError:
            raise TypeError(
                f"a tensor is indexed with whole numbers and slices, not with {type(k).__name__}: "
                "use engine.embedding(table, rows) to gather rows, or .numpy()"
            ) from None
    if keys.count(Ellipsis) > 1:
        raise IndexError("an index can have only one '...'")
    missing = len(shape) - sum(k is not Ellipsis for k in keys)
    if missing < 0:
        raise IndexError(f"{len(keys)} indices for a tensor of shape {shape}")
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    return [*keys[:at], *[slice(None)] * missing, *keys[at + 1 :]]


def _text(key: Any) -> str:
    keys = key if isinstance(key, tuple) else (key,)
    return ", ".join(
        ":".join("" if part is None else str(part) for part in ((k.start, k.stop, k.step)[: 2 + (k.step is not None)]))
        if isinstance(k, slice)
        else "..."
        if k is Ellipsis
        else str(k)
        for k in keys
    )
