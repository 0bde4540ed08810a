"""Tables of tensors in device memory: addresses and sizes for kernels that work on many tensors in one dispatch.

A table is a temporary of the op (planned and counted like any other) and is written by a recorded copy on every call,
so a step's stream holds all it needs: neither replay nor another step in between can meet stale addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..input_checks import require_list
from ..tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from ..recorder import Recorder

MAX_TENSORS = 65_535  # lavapipe 22.3 ends an invocation's loops after so many rounds
CHUNK = 2048  # elements a workgroup of the update kernels takes: a part of a multiple of 32 for every 8 invocations
UPDATE_WORDS = 12  # a row: four addresses; elements, first workgroup, weight decay, elements to be read 16 bytes a time
SQUARES_WORDS = 8  # a row: address, elements, elements to be read 16 bytes a time; first part, parts, part size, 0


def table_spec(num_tensors: int, words: int) -> TensorSpec:
    """The table of so many tensors, `words` a row."""
    return TensorSpec((num_tensors, words), "uint32")


def by_parameter(flat: Sequence[Any], count: int) -> Iterator[Sequence[Any]]:
    """The inputs of an op, `count` a parameter."""
    return (flat[i : i + count] for i in range(0, len(flat), count))


def check_lists(op: str, **lists: Sequence[Any]) -> None:
    """Raises TypeError for what is no list, ValueError unless all are as long as the first, and not too long."""
    for name, entries in lists.items():
        require_list(op, name, entries)
    (what, first), *others = lists.items()
    check_count(op, f"entries of {what}", len(first))
    for name, entries in others:
        if len(entries) != len(first):
            raise ValueError(f"{op}: {len(first)} entries of {what}, but {len(entries)} of {name}: give one for each")


def check_count(op: str, what: str, count: int) -> None:
    """Raises ValueError for no tensor, or more than a table holds."""
    if not 0 < count <= MAX_TENSORS:
        raise ValueError(f"{op}: {count} {what} were given, needed are 1 to {MAX_TENSORS}")


class Place(NamedTuple):
    """What a table holds of a tensor."""

    address: int
    size: int


def update_table(
    tensors: Iterable[Sequence[Tensor | Place]], decays: Sequence[float], turns: int = 1
) -> tuple[np.ndarray, int]:
    """(rows, workgroups) for shaders/update_many.comp.

    tensors: for each parameter two to four tensors of its size, itself first; empty parameters get no row. turns: how
    often CHUNK elements a workgroup takes.
    """
    rows = []
    group = 0
    for group_of, decay in zip(tensors, decays, strict=True):
        size = group_of[0].size
        if size:
            addresses = [tensor.address for tensor in group_of]
            wide = 0 if any(address % 16 for address in addresses) else size & ~3
            addresses += [0] * (4 - len(addresses))
            rows.append((*addresses, size | group << 32, int(np.float32(decay).view(np.uint32)) | wide << 32))
            group += -(-size // (CHUNK * turns))
    return np.array(rows, "<u8").reshape(-1), group


def squares_table(tensors: Sequence[Tensor | Place], parts: Sequence[tuple[int, int]]) -> np.ndarray:
    """Rows for shaders/square_sums_many.comp. parts: (parts, elements a part) of each tensor."""
    rows = []
    first = 0
    for tensor, (count, chunk) in zip(tensors, parts, strict=True):
        address, size = tensor.address, tensor.size
        wide = 0 if address % 16 else size & ~3
        rows.append((address, size | wide << 32, first | count << 32, chunk))
        first += count
    return np.array(rows, "<u8").reshape(-1)


def own_table(aside: Recorder, rows: np.ndarray) -> int:
    """The address of a table in memory of the recorder's own."""
    buffer = aside.own_buffer(rows.nbytes, host_visible=True)
    aside.write(buffer, 0, rows)
    return buffer.address


def write_table(gpu: Recorder, table: Tensor, rows: np.ndarray) -> None:
    """Record the copy of the rows to the start of the table."""
    if rows.size:
        gpu.write_tensor(table, rows.tobytes())
