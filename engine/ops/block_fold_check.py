"""Before a kernel of a block fold is first used on a device: does it give what the base variant gives?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..block_fold_call import BlockCall, BlockSizes
from ..block_fold_choice import BlockFoldChooser, family_of
from ..block_fold_glsl import Tile, strides_of
from ..block_fold_variants import TileVariant
from .block_fold_dispatch import fitted, heads_a_dispatch, kernel_of, plan_block_fold, run_block_fold

if TYPE_CHECKING:
    from ..recorder import Recorder

_GUARD = 64  # words around every operand


def right_tile(
    gpu: Recorder, chooser: BlockFoldChooser, call: BlockCall, choice: TileVariant, *, aligned: bool
) -> Tile | None:
    """A variant's tile as a call can have it and as it is known to be right: with rows read as words, else one by
    one. None when the variant is barred, which it is by now if it was found wrong. aligned: as for `fitted`."""
    for in_pairs in (aligned, False):
        tile = fitted(gpu, call, choice.tile, in_pairs)
        name = choice.barred_as + "_pairs" * (tile.words)
        if name not in chooser.table.barred and _checked(gpu, chooser, call, tile, name):
            return tile
    return None


def _checked(gpu: Recorder, chooser: BlockFoldChooser, call: BlockCall, tile: Tile, name: str) -> bool:
    """Whether a tile's kernels for a call are right: known, or compared now; wrong ones are barred by this name."""
    base = fitted(gpu, call, family_of(chooser.device, call)[-1].tile, aligned=False)
    if tile == base:
        return True
    several = heads_a_dispatch(call) < call.group
    for continues in (False, True)[: 1 + several]:
        kernel = kernel_of(call.fold, call.sizes.head_dim, tile, continues=continues, suffix=call.suffix)
        known = f"{kernel.name} {kernel.digest[:12]}"  # folds of one name may differ
        if known in chooser.table.checked:
            continue
        wrong = _compare(gpu, call, tile, base, continues)
        if wrong:
            chooser.bar(name, wrong)
            return False
        chooser.table.note_checked(known)
    return True


def _cases(call: BlockCall, lanes: int, rows: int) -> list[BlockCall]:
    """Two tiles, the second nearly empty, of two batches and of heads that share: with every number and part of the
    mask given in one of two cases, and not in the other."""
    fold, num_held = call.fold, lanes * rows + 5
    held, streamed = (2, 1) if fold.shared == "streamed" else (1, 2)
    sizes = BlockSizes(2, num_held, num_held - 2, held, streamed, call.sizes.head_dim)
    case = call._replace(sizes=sizes, strides=(2 * sizes.head_dim,) * len(strides_of(fold)), causal=False, window=0)
    mask = fold.seen is not None
    first = case._replace(given=tuple(fold.absent), causal=mask, window=num_held // 3 * mask)
    if not mask:
        return [first, case._replace(given=())] if fold.absent else [first]
    return [first, case._replace(given=("key_lengths", "documents"))]


def _compare(gpu: Recorder, call: BlockCall, tile: Tile, base: Tile, continues: bool) -> str:
    """What differs, in words; "" when nothing does. Inputs and what lies between operands must stay as they are."""
    for case in _cases(call, gpu.subgroup_size, tile.rows):
        starts, total = {}, _GUARD
        for name, size in case.elements().items():
            starts[name] = total
            total += -(-size // 4) * 4 + _GUARD
        begin = _words(case, starts, total)
        got, expected = (_memory_after(gpu, case, t, continues, begin, starts) for t in (tile, base))
        equal = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
        differs = np.flatnonzero(~equal)
        if len(differs):
            word = int(differs[0])
            name = [name for name, start in starts.items() if start <= word + _GUARD // 2][-1]
            values = f"{name}[{word - starts[name]}]: {got[word]!r} instead of {expected[word]!r}"
            return f"{len(differs)} words differ from rows{base.rows}, the first at {values}"
    return ""


def _memory_after(
    gpu: Recorder, case: BlockCall, tile: Tile, continues: bool, begin: np.ndarray, starts: dict[str, int]
) -> np.ndarray:
    """All words after a run. begin: before it; starts: word that an operand begins at."""
    absent = set(case.fold.optional_inputs) - set(case.given)
    aside = gpu.aside()
    try:
        buffer = aside.own_buffer(begin.nbytes, host_visible=True)
        memory = np.frombuffer(buffer.mapping, np.float32, begin.size)
        memory[:] = begin
        pointers = [None if name in absent else buffer.address + 4 * start for name, start in starts.items()]
        plan = plan_block_fold(aside, case, tile, continues=continues)
        run_block_fold(aside, plan, pointers, [0.5] * len(case.fold.scalars))
        aside.submit()
        aside.wait()
        return memory.copy()
    finally:
        aside.close()


def _words(case: BlockCall, starts: dict[str, int], total: int) -> np.ndarray:
    """Memory before a run: numbers of any kind at least 1, so that scores mostly lie below a log-sum-exp among them."""
    elements = case.elements()
    rng = np.random.default_rng(7)
    words = (0.5 * rng.standard_normal(total)).astype(np.float32)
    for name in case.fold.numbers:
        part = slice(starts[name], starts[name] + elements[name])
        words[part] = 1 + np.abs(words[part])
    keys = case.queries_and_keys[1]
    lengths = np.full(case.sizes.batch, keys - 3, np.int32)
    split = np.where(np.arange(keys)[:, None] < keys // 3, (0, keys // 3), (keys // 3, keys)).astype(np.int32)
    masks = {"key_lengths": lengths, "documents": np.tile(split, (case.sizes.batch, 1)).ravel()}
    for name, values in masks.items():
        if name in starts:
            words[starts[name] : starts[name] + elements[name]] = values.view(np.float32)
    return words
