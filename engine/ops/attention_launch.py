"""Kernels of attention and how they are dispatched, for separate tensors and for one that holds q, k and v."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

from ..attention_scores import alibi, attention_glsl
from ..expr import Expr
from ..kernel import Kernel, read_shader
from ..tensor import Tensor
from .attention_rule import AttentionShape, Mask

if TYPE_CHECKING:
    from ..recorder import Recorder

KNOWN_HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128)  # compiled ahead of time; any other up to 256 at first use

_SIZES = (
    "uint num_queries, uint num_keys, uint heads, uint q_row, uint kv_row, uint o_row, uint window_flags, float scale"
)
_ARGS = {  # PER_HEAD is there for scores that are expressions
    "forward": "in f32 q, in f32 k, in f32 v, in i32 key_lengths, in i32 documents, in f32 sinks, PER_HEAD "
    f"out f32 o, out f32 lse, {_SIZES}",
    "d_q": "in f32 q, in f32 k, in f32 v, in f32 o, in f32 d_o, in f32 lse, in i32 key_lengths, in i32 documents, "
    f"PER_HEAD out f32 d_q, out f32 delta, {_SIZES}",
    "d_kv": "in f32 q, in f32 k, in f32 v, in f32 d_o, in f32 lse, in f32 delta, in i32 key_lengths, "
    f"in i32 documents, PER_HEAD inout f32 d_k, inout f32 d_v, {_SIZES}, uint members",
}
_CAUSAL, _LENGTHS, _DOCUMENTS, _SINKS = 1, 2, 4, 8
MAX_ROUNDS = 65000  # lavapipe 22.3 ends an invocation's loops after 65,535 rounds in all


Pointer: TypeAlias = Union[Tensor, "tuple[Tensor, int]"]  # as a dispatch takes it


class Part(NamedTuple):
    """A pointer into a tensor: where q, k or v begins, in elements."""

    tensor: Tensor
    start: int = 0

    @property
    def pointer(self) -> Pointer:
        """The (tensor, byte offset) pair a dispatch takes."""
        return self.tensor, 4 * self.start


def mask_pointers(mask: Mask, some: Pointer, *, sinks: bool = False) -> list[Pointer]:
    """What kernels take of a mask. some: stands for what is absent; a kernel looks only at what is flagged."""
    found: list[Pointer] = [some if t is None else t for t in (mask.lengths, mask.documents)]
    if sinks:
        found.append(some if mask.sinks is None else mask.sinks)
    if mask.score is not None:
        found.append(some if mask.head_values is None else mask.head_values)
    return found


def block_rows(head_dim: int, spread: int) -> int:
    """Rows of the other side in one block: part of the accumulation order, so a function of head_dim and device.

    Few, so that scores and gradients of a block stay in registers beside the tile: two took 0.6 of the time of four
    at head_dim 64 on lavapipe 22.3.
    """
    return min(spread, 4 if head_dim <= 16 else 2)


class Tile(NamedTuple):
    """How a kernel cuts its work. No choice but `spread`, which the device gives, changes a bit of the results.

    spread: lanes that share the loads of a block. rows: query (or key) rows a lane. rolled: loops are left to the
    driver, for one that cannot bear to see them unrolled.
    """

    spread: int
    rows: int
    rolled: bool


@cache
def kernel(kind: str, head_dim: int, tile: Tile, score: Expr | None = None) -> Kernel:
    """The kernel for one tile. kind: forward, d_q, d_kv, or d_kv_more, which goes on with what d_kv left."""
    source, continues = ("d_kv", 1) if kind == "d_kv_more" else (kind, 0)
    name = f"attention_{kind}_{head_dim}_r{tile.rows}{'_rolled' * tile.rolled}"
    return Kernel(
        name if score is None else f"{name}_{_name_of(score)}",
        attention_glsl(score) + read_shader(f"attention_{source}.comp"),
        _ARGS[source].replace("PER_HEAD ", "" if score is None else "in f32 per_head, "),
        subgroups=1,
        defines={
            "HEAD_DIM": head_dim,
            "SPREAD": tile.spread,
            "KEYS": block_rows(head_dim, tile.spread),
            "ROWS": tile.rows,
            "ROLLED": int(tile.rolled),
            "CONTINUES": continues,
            "MODIFIED": int(score is not None),
        },
    )


def _name_of(score: Expr) -> str:
    return "alibi" if score is alibi() else hashlib.sha256(attention_glsl(score).encode()).hexdigest()[:8]


def most_rows(head_dim: int, rolled: bool) -> int:
    """Rows a lane of the widest tile. Wider ones spill more registers than they save loads, and compile for seconds."""
    if rolled:  # the tile lies in memory, whatever its size
        return 4
    return 4 if head_dim <= 16 else 2 if head_dim <= 96 else 1


def choose_tile(gpu: Recorder, head_dim: int, num_rows: int) -> Tile:
    """Wide tiles on CPU drivers, where loads are dear, unless they would stand mostly empty.

    GPUs hide loads behind other subgroups and have no registers to spare: one row a lane.
    """
    rolled = gpu.driver == "SwiftShader"
    widest = most_rows(head_dim, rolled)
    rows = widest if gpu.is_cpu and num_rows > gpu.subgroup_size * widest // 2 else 1
    return Tile(min(gpu.subgroup_size, 8), rows, rolled)


def all_kernels(*kinds: str) -> Iterator[Kernel]:
    """Everything the launches ask for at the known head sizes."""
    for kind in kinds:
        for head_dim in KNOWN_HEAD_DIMS:
            for spread, rolled in ((4, True), (4, False), (8, False)):
                for rows in sorted({1, most_rows(head_dim, rolled)}):
                    for score in (None, alibi()):
                        yield kernel(kind, head_dim, Tile(spread, rows, rolled), score)


def _run(
    gpu: Recorder,
    kind: str,
    shape: AttentionShape,
    mask: Mask,
    heads: int,
    num_rows: int,
    pointers: Sequence[Pointer],
    *more: int,
) -> None:
    tile = choose_tile(gpu, shape.head_dim, num_rows)
    tiles = -(-num_rows // (gpu.subgroup_size * tile.rows))
    present = {_CAUSAL: mask.causal, _LENGTHS: mask.lengths, _DOCUMENTS: mask.documents, _SINKS: mask.sinks}
    flags = sum(flag for flag, what in present.items() if what is not None and what is not False)
    gpu.dispatch(
        kernel(kind, shape.head_dim, tile, mask.score),
        tiles * shape.batch * heads,
        *pointers,
        shape.num_queries,
        shape.num_keys,
        shape.num_heads | shape.num_kv_heads << 16,
        shape.q_row,
        shape.kv_row,
        shape.o_row,
        min(mask.window, shape.num_queries + shape.num_keys) | flags << 24,
        mask.scale,
        *more,
    )


def launch_forward(
    gpu: Recorder, shape: AttentionShape, mask: Mask, parts: Sequence[Part], o: Tensor, lse: Tensor
) -> None:
    """Record attention forward over the q, k and v of `parts`: one dispatch."""
    q, k, v = (part.pointer for part in parts)
    pointers: list[Pointer] = [q, k, v, *mask_pointers(mask, lse, sinks=True), o, lse]
    _run(gpu, "forward", shape, mask, shape.num_heads, shape.num_queries, pointers)


def launch_backward(
    gpu: Recorder,
    shape: AttentionShape,
    mask: Mask,
    d_o: Tensor,
    parts: Sequence[Part],
    o: Tensor,
    lse: Tensor,
    gradients: Sequence[Part],
    delta: Tensor,
) -> None:
    """Record attention backward into the d_q, d_k and d_v of `gradients`.

    First dQ with delta = rowsum(dO * O), then dK and dV: all query heads of a group at once, unless their loops would
    be longer than a driver runs.
    """
    q, k, v = (part.pointer for part in parts)
    d_q, d_k, d_v = (part.pointer for part in gradients)
    pointers: list[Pointer] = [q, k, v, o, d_o, lse, *mask_pointers(mask, lse), d_q, delta]
    _run(gpu, "d_q", shape, mask, shape.num_heads, shape.num_queries, pointers)
    group = shape.num_heads // shape.num_kv_heads
    rounds = -(-shape.num_queries // block_rows(shape.head_dim, min(gpu.subgroup_size, 8))) + 1
    step = max(1, min(group, MAX_ROUNDS // rounds))
    pointers = [q, k, v, d_o, lse, delta, *mask_pointers(mask, lse), d_k, d_v]
    for first in range(0, group, step):
        kind, members = "d_kv_more" if first else "d_kv", min(step, group - first)
        _run(gpu, kind, shape, mask, shape.num_kv_heads, shape.num_keys, pointers, first | members << 16)
