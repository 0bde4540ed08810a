"""All families of kernels that have variants, for who asks about every one: the engine's start, profiles, tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .block_fold_choice import BlockFoldChooser
from .fold_choice import RowFoldChooser
from .fold_variants import row_variants
from .map_choice import MapChooser
from .map_variants import map_variants
from .matmul_choice import MatmulChooser
from .variant_choice import VariantChooser

if TYPE_CHECKING:
    from .recorder import Recorder

CHOOSERS: tuple[type[VariantChooser[Any]], ...] = (MatmulChooser, BlockFoldChooser, MapChooser, RowFoldChooser)


def variant_names(gpu: Recorder, cols: int) -> dict[str, list[str]]:
    """What VKFOLD_VARIANT calls a family whose variants are the same for all its kernels -> their names on this device
    for rows of so many columns, the base variant first."""
    of_rows = row_variants(RowFoldChooser.of(gpu).device, "", cols, gpu.max_invocations)
    return {
        "map": [choice.name for choice in reversed(map_variants("", gpu.max_invocations))],
        "row_fold": [choice.name for choice in reversed(of_rows)],
    }


def check_forced(gpu: Recorder) -> None:
    """Raises BadInputError when VKFOLD_VARIANT names a variant that this device does not have."""
    for chooser in CHOOSERS:
        chooser.of(gpu).check_forced()


def variant_reasons(gpu: Recorder) -> dict[str, dict[str, str]]:
    """Piece of a kernel's name -> call -> variant and why it was chosen, of all families: what was chosen so far."""
    return {piece: dict(calls) for chooser in CHOOSERS for piece, calls in chooser.of(gpu).reasons.items()}
