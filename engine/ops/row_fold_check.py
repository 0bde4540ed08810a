"""Before a variant of a fold over rows is first used on a device: does it give what the base variant gives?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ..fold_choice import RowFoldChooser
from ..fold_variants import ROWS, RowVariant
from ..variant_check import difference

if TYPE_CHECKING:
    from ..recorder import Recorder
    from .row_fold import RowFold

_SPECIAL = np.array([np.nan, -np.inf, 0.0, -0.0, np.inf], np.float32)


def right_fold(gpu: Recorder, chooser: RowFoldChooser, fold: RowFold, choice: RowVariant, *, wide: bool) -> bool:
    """Whether a variant is known to be right: known, or compared now; a wrong one is barred."""
    base = RowVariant(choice.kernel, ROWS[-1])
    if choice == base:
        return True
    kernel = fold.variant(choice, wide=wide)
    known = f"{kernel.name} {gpu.pipelines.text_of(kernel).digest[:12]}"  # folds of one name may differ
    if known in chooser.table.checked:
        return True
    wrong = _compare(gpu, fold, choice, base, wide)
    if wrong:
        chooser.bar(choice.barred_as, wrong)
        return False
    chooser.table.note_checked(known)
    return True


def _compare(gpu: Recorder, fold: RowFold, choice: RowVariant, base: RowVariant, wide: bool) -> str:
    """Two workgroups, the second nearly empty, and rows whose last round is; what lies between operands must stay."""
    spec, rows = fold.spec, choice.rows + 3
    cols = 4 * gpu.subgroup_size * ((choice.rounds or 3) - 1) + (4 if wide else 3)
    rng = np.random.default_rng(7)
    sizes = {"row": (rows, cols), "column": (cols,), "value": (rows,), "whole": (rows,)}
    operands: dict[str, np.ndarray] = {}
    for name in spec.tensor_inputs:
        kind = spec.inputs[name]
        values = rng.standard_normal(sizes[kind]).astype(np.float32)
        if kind == "row":
            values[-1] = np.resize(_SPECIAL, cols)
            values[-2, ::3] = -np.inf
        operands[name] = rng.integers(0, cols, rows).astype(np.int32) if kind == "whole" else values.ravel()
    made = {name: rows * cols for name in spec.elements if name not in spec.inputs} | dict.fromkeys(spec.values, rows)
    operands |= {name: np.zeros(size, np.float32) for name, size in made.items()}
    scalars = [0.5 if kind == "float" else 1 for kind in spec.scalar_kinds.values()]

    def record(aside: Recorder, variant: RowVariant, at: Mapping[str, int]) -> None:
        aside.dispatch(fold.variant(variant, wide=wide), -(-rows // variant.rows), *at.values(), rows, cols, *scalars)

    return difference(gpu, operands, record, (choice, base), shift=0 if wide else 1, guard=max(1024, 2 * cols))
