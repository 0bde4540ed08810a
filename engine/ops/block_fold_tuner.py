"""Measures the variants of a block fold's call (engine/tuner.py)."""

from __future__ import annotations

import numpy as np

from ..block_fold_call import BlockCall
from ..block_fold_choice import BlockFoldChooser, family_of
from ..block_fold_variants import TileVariant, worth_measuring
from ..recorder import Recorder
from ..tuner import HALF, Measured, keep_times, measure_in_turns
from .block_fold_check import right_tile
from .block_fold_dispatch import Pointer, plan_block_fold, run_block_fold


def tune_block_fold(gpu: Recorder, call: BlockCall, *, rounds: int = 5) -> Measured:
    """Measure a call's variants and keep the times.

    Every variant is compared with the base variant first, and left out when barred. Key lengths and documents, if
    given, are those of whole sequences. Takes device memory for the operands. Raises OutOfDeviceMemoryError where there
    is too little.
    """
    chooser = BlockFoldChooser.of(gpu)
    sizes = call.sizes
    worth = worth_measuring(chooser.device, family_of(chooser.device, call), sizes.num_held)
    tiles = {
        choice: tile for choice in worth if (tile := right_tile(gpu, chooser, call, choice, aligned=True)) is not None
    }
    keys = call.queries_and_keys[1]
    masks = {
        "key_lengths": np.full(sizes.batch, keys, np.int32),
        "documents": np.tile(np.array([0, keys], np.int32), sizes.batch * keys),
    }
    aside = gpu.aside()
    try:
        pointers: list[Pointer | None] = []
        absent = set(call.fold.optional_inputs) - set(call.given)
        for name, elements in call.elements().items():
            if name in absent:
                pointers.append(None)
                continue
            nbytes = 4 * max(1, elements)
            buffer = aside.own_buffer(nbytes, host_visible=False)
            if name in masks and call.fold.seen is not None:
                aside.write(buffer, 0, masks[name])
            else:
                aside.fill_buffer(buffer, 0, nbytes, HALF)
            pointers.append(buffer.address)
        aside.op_work = float(call.flops)
        plans = {choice: plan_block_fold(aside, call, tile) for choice, tile in tiles.items()}

        def record(choice: TileVariant) -> None:
            run_block_fold(aside, plans[choice], pointers, [0.5] * len(call.fold.scalars))

        return keep_times(chooser, Measured(call.key, measure_in_turns(aside, list(plans), record, rounds=rounds)))
    finally:
        aside.close()
