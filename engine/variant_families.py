"""All families of kernels that have variants, for who asks about every one: the engine's start, profiles, tuning."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from .block_fold_choice import BlockFoldChooser
from .fold_choice import RowFoldChooser
from .fold_variants import row_variants
from .loop_choice import LoopChooser
from .loop_variants import variant_names as loop_names
from .map_choice import MapChooser
from .map_variants import map_variants
from .matmul_choice import MatmulChooser
from .variant_choice import ChoosingAs, VariantChooser

if TYPE_CHECKING:
    from .fusion import Call
    from .recorder import Recorder

CHOOSERS: tuple[type[VariantChooser[Any]], ...] = (
    MatmulChooser,
    BlockFoldChooser,
    MapChooser,
    RowFoldChooser,
    LoopChooser,
)


def variant_names(gpu: Recorder, cols: int) -> dict[str, list[str]]:
    """What VKFOLD_VARIANT calls a family whose variants are the same for all its kernels -> their names on this device
    for rows of so many columns, the base variant first."""
    of_rows = row_variants(RowFoldChooser.of(gpu).device, "", cols, gpu.max_invocations)
    return {
        "map": [choice.name for choice in reversed(map_variants("", gpu.max_invocations))],
        "row_fold": [choice.name for choice in reversed(of_rows)],
        "loop": loop_names()[::-1],
    }


def check_forced(gpu: Recorder) -> None:
    """Raises BadInputError when VKFOLD_VARIANT names a variant that this device does not have."""
    for chooser in CHOOSERS:
        chooser.of(gpu).check_forced()


def variant_reasons(gpu: Recorder) -> dict[str, dict[str, str]]:
    """Name of a kernel -> call -> variant and why it was chosen, of all families: what was planned so far, with what
    was only rehearsed or launched joined to another call."""
    return {kernel: dict(calls) for chooser in CHOOSERS for kernel, calls in chooser.of(gpu).reasons.items() if calls}


def reasons_of(gpu: Recorder, call: Call) -> dict[str, dict[str, str]]:
    """The same, of one call as it is launched: it is rehearsed, with all its choices made again."""
    with ExitStack() as stack:
        for chooser in CHOOSERS:
            stack.enter_context(chooser.of(gpu).anew())
        stack.enter_context(ChoosingAs(call.choices))
        gpu.rehearse(lambda: call.op.launch(gpu, call.inputs, call.made, **call.settings))
        return variant_reasons(gpu)
