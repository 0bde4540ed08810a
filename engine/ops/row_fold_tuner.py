"""Measures the variants of a fold over rows (engine/tuner.py)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..fold_choice import RowFoldChooser, family_of, select_for
from ..fold_variants import RowVariant, worth_measuring
from ..recorder import Recorder
from ..step_parameters import SIZE_BYTES
from ..tuner import HALF, Measured, keep_times, measure_in_turns
from .row_fold import RowFold
from .row_fold_check import right_fold


class RowFoldCall(NamedTuple):
    """A call of a fold. shape: of its rows; wide: with 16-byte loads; scalars: their values."""

    fold: RowFold
    shape: tuple[int, ...]
    wide: bool
    scalars: tuple[float, ...]

    @property
    def key(self) -> str:
        """Its name in a table."""
        kernel, (*lead, cols) = self.fold.kernels()[not self.wide], self.shape
        return f"row_fold {kernel.name} {math.prod(lead)}x{cols}"


def unmeasured_fold(gpu: Recorder, call: RowFoldCall) -> str:
    """Name of the variant that a call takes where nothing was measured."""
    chooser, asked = RowFoldChooser.of(gpu), call.fold.call(gpu, call.shape, call.wide)
    return select_for(chooser.device, asked, chooser.table, tuned=False).choice.name


def tune_row_fold(gpu: Recorder, call: RowFoldCall, *, rounds: int = 5) -> Measured:
    """Measure a call's variants and keep the times.

    Every variant is compared with the base variant first, and left out when barred. Takes device memory for the
    operands. Raises OutOfDeviceMemoryError where there is too little.
    """
    chooser, fold, wide = RowFoldChooser.of(gpu), call.fold, call.wide
    asked = fold.call(gpu, call.shape, wide)
    rows, cols = asked.rows, asked.cols
    usable = [v for v in family_of(chooser.device, asked) if v.barred_as not in chooser.table.barred]
    usable = [v for v in worth_measuring(rows, usable) if right_fold(gpu, chooser, fold, v, wide=wide)]
    spec = fold.spec
    sizes = {"row": rows * cols, "column": cols, "value": rows, "whole": rows}
    elements = [sizes[spec.inputs[name]] for name in spec.tensor_inputs]
    elements += [rows * cols for name in spec.elements if name not in spec.inputs] + [rows for _ in spec.values]
    wholes = [spec.inputs[name] == "whole" for name in spec.tensor_inputs] + [False] * len(elements)
    aside = gpu.aside()
    try:
        aside.step_address = aside.own_buffer(SIZE_BYTES, host_visible=True).address
        addresses = []
        for size, is_whole in zip(elements, wholes, strict=False):
            buffer = aside.own_buffer(4 * size, host_visible=False)
            if is_whole:  # places in a row
                aside.write(buffer, 0, (np.arange(size) % cols).astype(np.int32))
            else:
                aside.fill_buffer(buffer, 0, 4 * size, HALF)
            addresses.append(buffer.address)

        def record(choice: RowVariant) -> None:
            kernel = fold.variant(choice, wide=wide)
            aside.dispatch(kernel, -(-rows // choice.rows), *addresses, rows, cols, *call.scalars)

        return keep_times(chooser, Measured(call.key, measure_in_turns(aside, usable, record, rounds=rounds)))
    finally:
        aside.close()
