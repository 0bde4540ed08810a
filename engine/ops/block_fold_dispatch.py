"""The dispatches of a block fold (engine/block_fold.py) with a given tile."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

from ..block_fold_call import BlockCall
from ..block_fold_glsl import BLOCK_ROWS, FOLD_ONCE, Tile, block_fold_kernel
from ..kernel import Kernel
from ..kernel_registry import is_available
from ..tensor import Tensor

if TYPE_CHECKING:
    from ..recorder import Recorder

ROLLED_ROWS = 4  # of a tile with rolled loops: it lies in memory, whatever its size
QUAD = 0x80  # VK_SUBGROUP_FEATURE_QUAD_BIT
MAX_ROUNDS = 65000  # lavapipe 22.3 ends an invocation's loops after 65,535 rounds in all

Pointer: TypeAlias = Union[Tensor, "tuple[Tensor, int]", int]  # as a dispatch takes it

kernel_of = cache(block_fold_kernel)


def _rounds(call: BlockCall) -> int:
    """Of a kernel's loop over the rows of one streamed head."""
    return -(-call.sizes.num_streamed // BLOCK_ROWS) + 1


def heads_a_dispatch(call: BlockCall) -> int:
    """Streamed heads of a group that a held row folds in one dispatch: all, unless their loops would be longer than a
    driver runs."""
    return max(1, min(call.group, MAX_ROUNDS // _rounds(call)))


def folds_again(driver: str, call: BlockCall, tile: Tile) -> bool:
    """Whether a tile whose sums are not finite can be folded again, one row at a time: not where lavapipe would end the
    loops before that is done. There, streamed rows that are not finite spoil the whole tile."""
    turns = 1 + tile.rows * tile.spread
    return driver != "llvmpipe" or turns * _rounds(call) * heads_a_dispatch(call) <= MAX_ROUNDS


class BlockPlan(NamedTuple):
    """All of a call's dispatches but pointers and scalars.

    kernels: each with the members of a group that it folds, where there are groups. sizes: numbers they all take.
    """

    kernels: tuple[tuple[Kernel, tuple[int, ...]], ...]
    num_groups: int
    sizes: tuple[int, ...]


def fitted(gpu: Recorder, call: BlockCall, tile: Tile, aligned: bool) -> Tile:
    """The tile as this call can have it; none of it changes a bit.

    On lavapipe rows are read as words where strides and addresses are even. Text that is written out is not shipped:
    where there is no compiler, or no quads, which it swaps lanes of, loops stay rolled. aligned: rows begin on 8 bytes.
    """
    if tile.loops == "written":
        kernel = kernel_of(call.fold, call.sizes.head_dim, tile, suffix=call.suffix)
        if not (gpu.device.physical.subgroup_operations & QUAD and is_available(kernel)):
            return tile._replace(loops="rolled", rows=ROLLED_ROWS)
    even = aligned and not any(stride % 2 for stride in call.strides)
    return tile._replace(words=even and gpu.in_words and tile.loops == "unrolled")


def plan_block_fold(gpu: Recorder, call: BlockCall, tile: Tile, *, continues: bool = False) -> BlockPlan:
    """The dispatches of a call with this tile, which changes no bit.

    continues: sums go on from what their outputs hold, as they do from the second dispatch on.
    """
    fold, sizes = call.fold, call.sizes
    tiles = -(-sizes.num_held // (gpu.subgroup_size * tile.rows))
    heads = call.many_heads | min(sizes.held_heads, sizes.streamed_heads) << 16
    flags = call.flags | (0 if folds_again(gpu.device.driver_name, call, tile) else FOLD_ONCE)
    numbers = (sizes.num_held, sizes.num_streamed, heads, *call.strides, flags)
    step = heads_a_dispatch(call)
    kernels = []
    for first in range(0, call.group, step):
        members = (first | min(step, call.group - first) << 16,) if fold.shared == "held" else ()
        kernel = kernel_of(fold, sizes.head_dim, tile, continues=continues or first > 0, suffix=call.suffix)
        kernels.append((kernel, members))
    return BlockPlan(tuple(kernels), tiles * sizes.batch * sizes.held_heads, numbers)


def run_block_fold(
    gpu: Recorder, plan: BlockPlan, pointers: Sequence[Pointer | None], scalars: Sequence[float]
) -> None:
    """Record a plan. pointers: inputs in the order of `tensor_inputs`, then rows, then values; None for an input that
    is not given. scalars: the fold's, in order.
    """
    some = next(pointer for pointer in reversed(pointers) if pointer is not None)  # nobody looks behind it
    arguments = [some if pointer is None else pointer for pointer in pointers]
    for kernel, members in plan.kernels:
        gpu.dispatch(kernel, plan.num_groups, *arguments, *plan.sizes, *scalars, *members)


def are_aligned(call: BlockCall, pointers: Sequence[Pointer | None]) -> bool:
    """Whether all rows begin on 8 bytes."""
    fold = call.fold
    inputs, outputs = len(fold.held) + len(fold.streamed), len(fold.tensor_inputs)
    rows = (*pointers[:inputs], *pointers[outputs : outputs + len(fold.rows)])
    return not any(_address(pointer) % 8 for pointer in rows)


def _address(pointer: Pointer | None) -> int:
    tensor, offset = pointer if isinstance(pointer, tuple) else (pointer, 0)
    return offset + (tensor.address if isinstance(tensor, Tensor) else tensor or 0)
