"""How a block fold (engine/block_fold.py) is dispatched: its tile on a device, its sizes, its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

from ..block_fold import BlockFold
from ..block_fold_glsl import OPTIONAL_SHIFT, Tile, block_fold_kernel, block_rows, strides_of
from ..kernel import Kernel
from ..tensor import Tensor

if TYPE_CHECKING:
    from ..recorder import Recorder

KNOWN_HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128)  # compiled ahead of time; any other up to 256 at first use
MAX_HEAD_DIM = 256
MAX_HEADS = 2**16 - 1
MAX_ROUNDS = 65000  # lavapipe 22.3 ends an invocation's loops after 65,535 rounds in all
MAX_POSITIONS = 2**16 * 2 - 1024  # a kernel passes two positions a round, and no driver may cut its loop short

Pointer: TypeAlias = Union[Tensor, "tuple[Tensor, int]"]  # as a dispatch takes it


class BlockSizes(NamedTuple):
    """Sizes of one call of a block fold."""

    batch: int
    num_held: int
    num_streamed: int
    held_heads: int
    streamed_heads: int
    head_dim: int


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


_kernel = cache(block_fold_kernel)


def known_kernels(fold: BlockFold, suffix: str = "", *, continues: bool = False) -> Iterator[Kernel]:
    """Everything that a launch asks for at the known head sizes."""
    for head_dim in KNOWN_HEAD_DIMS:
        for spread, rolled in ((4, True), (4, False), (8, False)):
            for rows in sorted({1, most_rows(head_dim, rolled)}):
                yield _kernel(fold, head_dim, Tile(spread, rows, rolled), continues=continues, suffix=suffix)


def launch_block_fold(
    gpu: Recorder,
    fold: BlockFold,
    sizes: BlockSizes,
    strides: Mapping[str, int],
    pointers: Sequence[Pointer | None],
    scalars: Sequence[float] = (),
    *,
    flags: int = 0,
    suffix: str = "",
) -> None:
    """Record it: one dispatch, or, where groups are folded whose loops would be longer than a driver runs, several.

    pointers: inputs in the order of `tensor_inputs`, then rows, then values; None for an input that is not given.
    strides: elements from one row to the next by name. flags: what the mask takes. suffix: of the kernel's name.
    """
    tile = choose_tile(gpu, sizes.head_dim, sizes.num_held)
    tiles = -(-sizes.num_held // (gpu.subgroup_size * tile.rows))
    some = next(pointer for pointer in reversed(pointers) if pointer is not None)  # nobody looks behind it
    for i, name in enumerate(fold.absent):
        flags |= (pointers[fold.tensor_inputs.index(name)] is not None) << (OPTIONAL_SHIFT + i)
    heads = sorted((sizes.held_heads, sizes.streamed_heads))
    arguments = [some if pointer is None else pointer for pointer in pointers]
    numbers = (
        sizes.num_held,
        sizes.num_streamed,
        heads[1] | heads[0] << 16,
        *(strides[name] for name in strides_of(fold)),
        flags,
        *scalars,
    )
    group = sizes.streamed_heads // sizes.held_heads if fold.shared == "held" else 1
    rounds = -(-sizes.num_streamed // block_rows(sizes.head_dim, tile.spread)) + 1
    step = max(1, min(group, MAX_ROUNDS // rounds))
    for first in range(0, group, step):
        members = (first | min(step, group - first) << 16,) if fold.shared == "held" else ()
        kernel = _kernel(fold, sizes.head_dim, tile, continues=bool(first), suffix=suffix)
        gpu.dispatch(kernel, tiles * sizes.batch * sizes.held_heads, *arguments, *numbers, *members)
