"""How a block fold (engine/block_fold.py) is launched: with a tile that is chosen for it and known to be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..block_fold import BlockFold
from ..block_fold_call import BlockCall
from ..block_fold_choice import BlockFoldChooser
from ..block_fold_glsl import Tile
from ..block_fold_variants import device_tile, family_rows
from ..capabilities import Capabilities
from ..kernel import Kernel
from ..op import Op
from ..variant_choice import choice_state, op_of_fold
from .block_fold_check import right_tile
from .block_fold_dispatch import (
    ROLLED_ROWS,
    BlockPlan,
    Pointer,
    are_aligned,
    kernel_of,
    plan_block_fold,
    run_block_fold,
)

if TYPE_CHECKING:
    from ..recorder import Recorder

KNOWN_HEAD_DIMS = (8, 16, 32, 64, 80, 96, 128)  # compiled ahead of time; any other up to 256 at first use
MAX_HEAD_DIM = 256
MAX_HEADS = 2**16 - 1
MAX_POSITIONS = 2**16 * 2 - 1024  # a kernel passes two positions a round, and no driver may cut its loop short


def known_kernels(fold: BlockFold, suffix: str = "", *, continues: bool = False) -> Iterator[Kernel]:
    """What launches ask for at the known head sizes: on GPUs, on lavapipe, and on SwiftShader without a compiler.

    Text that is written out for SwiftShader is too large to be shipped.
    """
    for head_dim in KNOWN_HEAD_DIMS:
        tiles = [Tile(4, ROLLED_ROWS, "rolled")]
        for size, driver in ((4, "a GPU"), (8, "a GPU"), (8, "llvmpipe")):
            for major in (22, 25):
                device = Capabilities(size, driver == "llvmpipe", driver, major)
                rows = family_rows(device, head_dim, fold.rows_in_registers)
                tiles += [device_tile(device, n)._replace(words=device.is_cpu) for n in rows]
        for tile in dict.fromkeys(tiles):
            yield kernel_of(fold, head_dim, tile, continues=continues, suffix=suffix)


class BlockFoldCalls(Op):
    """An op that is carried out by block folds."""

    def block_calls(self, inputs: Sequence[Any], settings: Mapping[str, Any]) -> list[BlockCall]:
        """The folds that a launch records, in order."""
        raise NotImplementedError


def _plan(gpu: Recorder, call: BlockCall, aligned: bool) -> BlockPlan:
    """Choose a variant that is known to be right, and work out its dispatches. Kept, since steps repeat."""
    chooser = BlockFoldChooser.of(gpu)
    key = (call, aligned, chooser.forced(op_of_fold(call.fold.name)), choice_state().tune)
    plan: BlockPlan | None = chooser.plans.get(key)
    while plan is None:
        choice = chooser.choose(call)
        tile = right_tile(gpu, chooser, call, choice, aligned=aligned)
        if tile is not None:
            plan = plan_block_fold(gpu, call, tile)
            chooser.keep(key, plan, call.key, [kernel for kernel, _ in plan.kernels])
    return plan


def launch_block_fold(
    gpu: Recorder, call: BlockCall, pointers: Sequence[Pointer | None], scalars: Sequence[float]
) -> None:
    """Record it: one dispatch, or, where groups are folded whose loops would be longer than a driver runs, several.

    pointers: inputs in the order of `tensor_inputs`, then rows, then values; None for an input that is not given.
    scalars: the fold's, in order.
    """
    run_block_fold(gpu, _plan(gpu, call, are_aligned(call, pointers)), pointers, scalars)
