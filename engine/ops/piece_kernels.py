"""Kernels by hand that do one piece after the other (shaders/pieces.glsl): they have the variants of map kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..kernel import Kernel
from ..kernel_arguments import Argument
from ..map_choice import MapChooser, select_for, tuning_key
from ..map_variants import SIZES, MapVariant, map_variants, worth_measuring
from ..op import Op
from ..step_parameters import SIZE_BYTES
from ..tensor import Tensor
from ..tuner import HALF, Measured, keep_times, measure_in_turns
from ..variant_check import difference, operands_of
from ..variant_choice import ask_state, choice_state
from .row_kernels import RowKernels

if TYPE_CHECKING:
    from ..recorder import Recorder

# Pieces that are asked for -> those that a case has, not far from it, and the case's scalars by name.
Example = Callable[[int], "tuple[int, Mapping[str, float]]"]
OF_PIECES: dict[str, Any] = {"constants": {"STEPS": 1}, "family": "map"}  # of such a kernel
_examples: dict[Kernel, Example] = {}


class PieceCall(NamedTuple):
    """A call of such a kernel. pointers: tensors, or (tensor, byte offset); scalars: what comes behind them."""

    kernel: Kernel
    num_pieces: int
    pointers: Sequence[Tensor | tuple[Tensor, int]]
    scalars: Sequence[float]

    @property
    def key(self) -> str:
        """Its name in a table."""
        return tuning_key(self.kernel.name, self.num_pieces)


class PieceOp(Op):
    """An op of one such kernel; a subclass says which and with what: `piece_call(inputs, outputs, **settings)`."""

    piece_call: Callable[..., PieceCall]

    def launch(self, gpu: Recorder, inputs: Sequence[Any], outputs: Sequence[Tensor], **settings: Any) -> None:
        launch_pieces(gpu, self.piece_call(inputs, outputs, **settings))


def by_pieces(name: str, source: str, args: str, example: Example, **defines: int) -> Kernel:
    """A kernel without widths. args: with the extents of all pointers, which a case is made by."""
    kernel = Kernel(name, source, args, local_size=SIZES[-1], defines=dict(defines), **OF_PIECES)
    _examples[kernel] = example
    return kernel


def rows_by_pieces(name: str, source: str, args: str, example: Example, **defines: int) -> RowKernels:
    """A kernel in two widths. args: with the extents of all pointers."""
    kernels = RowKernels(name, source, args, more=OF_PIECES, **defines)
    _examples.update(dict.fromkeys(kernels.both(), example))
    return kernels


@cache
def variant_of(kernel: Kernel, choice: MapVariant) -> Kernel:
    """The kernel of a variant."""
    return kernel.specialized(f"_{choice.name}", local_size=choice.size, constants={"STEPS": choice.steps})


def launch_pieces(gpu: Recorder, call: PieceCall) -> None:
    """Record it."""
    chooser = gpu.choosers.get(MapChooser)
    plan = chooser and chooser.plans.get((call.kernel, call.num_pieces, ask_state()))
    kernel, num_groups = plan or _plan(gpu, call.kernel, call.num_pieces)
    gpu.dispatch(kernel, num_groups, *call.pointers, *call.scalars)


def _plan(gpu: Recorder, kernel: Kernel, num_pieces: int) -> tuple[Kernel, int]:
    """Choose a variant that is known to be right. Kept, since steps repeat."""
    chooser = MapChooser.of(gpu)
    while True:
        choice = chooser.choose(kernel.name, num_pieces, 1, gpu.max_invocations)
        if right_pieces(gpu, chooser, kernel, choice):
            break
    plan = variant_of(kernel, choice), -(-num_pieces // choice.pieces)
    chooser.keep((kernel, num_pieces, choice_state()), plan, tuning_key(kernel.name, num_pieces), plan[:1])
    return plan


# -- the check ---------------------------------------------------------------------------------------------------------
def right_pieces(gpu: Recorder, chooser: MapChooser, kernel: Kernel, choice: MapVariant) -> bool:
    """Whether a variant is known to be right: known, or compared now; a wrong one is barred."""
    base = map_variants(choice.kernel, gpu.max_invocations)[-1]
    if choice == base:
        return True
    known = f"{variant_of(kernel, choice).name} {gpu.pipelines.text_of(kernel).digest[:12]}"
    if known in chooser.table.checked:
        return True
    wrong = _compare(gpu, kernel, choice, base)
    if wrong:
        chooser.bar(choice.barred_as, wrong)
        return False
    chooser.table.note_checked(known)
    return True


def _compare(gpu: Recorder, kernel: Kernel, choice: MapVariant, base: MapVariant) -> str:
    """Two workgroups, the second nearly empty: numbers above 0, ids below 5, words of any bits."""
    num_pieces, scalars = _examples[kernel](choice.pieces + 7)
    rng = np.random.default_rng(7)

    def whole_numbers(arg: Argument, size: int) -> np.ndarray:
        if arg.type == "i32":
            return rng.integers(0, 5, size).astype(np.int32)
        return rng.integers(0, 2**32, size, np.uint32)

    operands = operands_of(kernel, scalars, whole_numbers, rng)
    numbers = [scalars[arg.name] for arg in kernel.args if not arg.is_pointer]

    def record(aside: Recorder, variant: MapVariant, at: Mapping[str, int]) -> None:
        groups = -(-num_pieces // variant.pieces)
        aside.dispatch(variant_of(kernel, variant), groups, *at.values(), *numbers)

    whole = any(arg.is_pointer and arg.type == "f32x4" for arg in kernel.args)
    return difference(gpu, operands, record, (choice, base), shift=0 if whole else 1)


# -- tuning ------------------------------------------------------------------------------------------------------------
def unmeasured_pieces(gpu: Recorder, call: PieceCall) -> str:
    """Name of the variant that a call takes where nothing was measured."""
    chooser = MapChooser.of(gpu)
    where = call.kernel.name, call.num_pieces, 1, gpu.max_invocations
    return select_for(chooser.device, *where, chooser.table, tuned=False).choice.name


def tune_pieces(gpu: Recorder, call: PieceCall, *, rounds: int = 5) -> Measured:
    """Measure a call's variants and keep the times; see `tune_map`. Tensors may be planned ones."""
    chooser, kernel = MapChooser.of(gpu), call.kernel
    family = worth_measuring(call.num_pieces, map_variants(kernel.name, gpu.max_invocations))
    usable = [choice for choice in family if choice.barred_as not in chooser.table.barred]
    usable = [choice for choice in usable if right_pieces(gpu, chooser, kernel, choice)]
    aside = gpu.aside()
    try:
        aside.step_address = aside.own_buffer(SIZE_BYTES, host_visible=True).address
        addresses = []
        for pointer in call.pointers:
            tensor = pointer[0] if isinstance(pointer, tuple) else pointer
            nbytes = (tensor.nbytes + 15) & ~15
            buffer = aside.own_buffer(max(16, nbytes), host_visible=False)
            aside.fill_buffer(buffer, 0, max(16, nbytes), 0 if tensor.dtype == "int32" else HALF)
            addresses.append(buffer.address)

        def record(choice: MapVariant) -> None:
            groups = -(-call.num_pieces // choice.pieces)
            aside.dispatch(variant_of(kernel, choice), groups, *addresses, *call.scalars)

        return keep_times(chooser, Measured(call.key, measure_in_turns(aside, usable, record, rounds=rounds)))
    finally:
        aside.close()
