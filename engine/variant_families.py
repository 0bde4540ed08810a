"""All families of kernels that have variants, for who asks about every one: the engine's start, profiles, tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .block_fold_choice import BlockFoldChooser
from .map_choice import MapChooser
from .map_variants import map_variants
from .matmul_choice import MatmulChooser
from .variant_choice import VariantChooser

if TYPE_CHECKING:
    from .recorder import Recorder

CHOOSERS: tuple[type[VariantChooser[Any]], ...] = (MatmulChooser, BlockFoldChooser, MapChooser)


def variant_names(gpu: Recorder) -> dict[str, list[str]]:
    """What VKFOLD_VARIANT calls a family whose variants are the same for all its kernels -> their names on this device,
    the base variant first."""
    return {"map": [choice.name for choice in reversed(map_variants("", gpu.max_invocations))]}


def check_forced(gpu: Recorder) -> None:
    """Raises BadInputError when VKFOLD_VARIANT names a variant that this device does not have."""
    for chooser in CHOOSERS:
        chooser.of(gpu).check_forced()


def variant_reasons(gpu: Recorder) -> dict[str, dict[str, str]]:
    """Piece of a kernel's name -> call -> variant and why it was chosen, of all families: what was chosen so far."""
    return {piece: dict(calls) for chooser in CHOOSERS for piece, calls in chooser.of(gpu).reasons.items()}
