"""Kernels of attention and how they are dispatched, for separate tensors and for one that holds q, k and v."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from ..kernel import Kernel
from ..tensor import Tensor
from .attention_rule import AttentionShape

KNOWN_HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128)  # compiled ahead of time; any other up to 256 at first use

_SIZES = (
    "uint num_queries, uint num_keys, uint num_heads, uint num_kv_heads, "
    "uint q_row, uint kv_row, uint o_row, uint tiles, uint window, uint flags, float scale"
)
_ARGS = {
    "forward": f"in f32 q, in f32 k, in f32 v, in i32 key_lengths, out f32 o, out f32 lse, {_SIZES}",
    "d_q": "in f32 q, in f32 k, in f32 v, in f32 o, in f32 d_o, in f32 lse, in i32 key_lengths, "
    f"out f32 d_q, out f32 delta, {_SIZES}",
    "d_kv": "in f32 q, in f32 k, in f32 v, in f32 d_o, in f32 lse, in f32 delta, in i32 key_lengths, "
    f"inout f32 d_k, inout f32 d_v, {_SIZES}, uint first_member, uint num_members",
}
_CAUSAL, _LENGTHS = 1, 2
MAX_ROUNDS = 65000  # lavapipe 22.3 ends an invocation's loops after 65,535 rounds in all


class Part(NamedTuple):
    """A pointer into a tensor: where q, k or v begins, in elements."""

    tensor: Tensor
    start: int = 0

    @property
    def pointer(self) -> tuple[Tensor, int]:
        """The (tensor, byte offset) pair a dispatch takes."""
        return self.tensor, 4 * self.start


def block_rows(head_dim: int, spread: int) -> int:
    """Rows of the other side in one block: part of the accumulation order, so a function of head_dim and device."""
    return min(spread, 8 if head_dim <= 32 else 4 if head_dim <= 128 else 2)


@cache
def kernel(kind: str, head_dim: int, spread: int, rows: int) -> Kernel:
    """The kernel for tiles of `rows` rows a lane on devices that spread loads over `spread` lanes."""
    return Kernel(
        f"attention_{kind}_{head_dim}_r{rows}",
        f"attention_{kind}.comp",
        _ARGS[kind],
        subgroups=1,
        defines={"HEAD_DIM": head_dim, "SPREAD": spread, "KEYS": block_rows(head_dim, spread), "ROWS": rows},
    )


def most_rows(head_dim: int) -> int:
    """Rows a lane of the widest tile. Wider ones spill more registers than they save loads, and compile for seconds."""
    return 4 if head_dim <= 48 else 2 if head_dim <= 96 else 1


def choose_rows(gpu: Any, head_dim: int, num_rows: int) -> int:
    """Rows a lane: wide tiles on CPU drivers, where loads are dear, unless the tile would stand mostly empty.

    GPUs hide loads behind other subgroups and have no registers to spare. The bits do not depend on this choice.
    """
    widest = most_rows(head_dim)
    return widest if gpu.is_cpu and num_rows > gpu.subgroup_size * widest // 2 else 1


def all_kernels(*kinds: str) -> Iterator[Kernel]:
    """Everything the launches ask for at the known head sizes."""
    for kind in kinds:
        for head_dim in KNOWN_HEAD_DIMS:
            for spread in (4, 8):
                for rows in sorted({1, most_rows(head_dim)}):
                    yield kernel(kind, head_dim, spread, rows)


def _run(
    gpu: Any, kind: str, shape: AttentionShape, heads: int, num_rows: int, pointers: tuple[Any, ...],
    lengths: Tensor | None, causal: bool, window: int, scale: float, *more: int,
) -> None:  # fmt: skip
    rows = choose_rows(gpu, shape.head_dim, num_rows)
    tiles = -(-num_rows // (gpu.subgroup_size * rows))
    gpu.dispatch(
        kernel(kind, shape.head_dim, min(gpu.subgroup_size, 8), rows),
        tiles * shape.batch * heads,
        *pointers,
        shape.num_queries,
        shape.num_keys,
        shape.num_heads,
        shape.num_kv_heads,
        shape.q_row,
        shape.kv_row,
        shape.o_row,
        tiles,
        min(window, shape.num_queries + shape.num_keys),
        _CAUSAL * causal + _LENGTHS * (lengths is not None),
        scale,
        *more,
    )


def launch_forward(
    gpu: Any, shape: AttentionShape, q: Part, k: Part, v: Part, o: Tensor, lse: Tensor, lengths: Tensor | None,
    causal: bool, window: int, scale: float,
) -> None:  # fmt: skip
    """Record attention forward: one dispatch."""
    pointers = (q.pointer, k.pointer, v.pointer, lse if lengths is None else lengths, o, lse)
    _run(gpu, "forward", shape, shape.num_heads, shape.num_queries, pointers, lengths, causal, window, scale)


def launch_backward(
    gpu: Any, shape: AttentionShape, d_o: Tensor, q: Part, k: Part, v: Part, o: Tensor, lse: Tensor,
    d_q: Part, d_k: Part, d_v: Part, delta: Tensor, lengths: Tensor | None, causal: bool, window: int, scale: float,
) -> None:  # fmt: skip
    """Record attention backward: dQ with rowsum(dO * O), then dK and dV, several query heads of a group at a time."""
    some = lse if lengths is None else lengths
    pointers = (q.pointer, k.pointer, v.pointer, o, d_o, lse, some, d_q.pointer, delta)
    _run(gpu, "d_q", shape, shape.num_heads, shape.num_queries, pointers, lengths, causal, window, scale)
    pointers = (q.pointer, k.pointer, v.pointer, d_o, lse, delta, some, d_k.pointer, d_v.pointer)
    group = shape.num_heads // shape.num_kv_heads
    rounds = -(-shape.num_queries // block_rows(shape.head_dim, min(gpu.subgroup_size, 8))) + 1
    step = max(1, min(group, MAX_ROUNDS // rounds))
    for first in range(0, group, step):
        members = (first, min(step, group - first))
        _run(gpu, "d_kv", shape, shape.num_kv_heads, shape.num_keys, pointers, lengths, causal, window, scale, *members)
