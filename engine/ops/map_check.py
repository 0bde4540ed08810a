"""Before a variant of a map kernel is first used on a device: does it give what the base variant gives?"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..map_choice import MapChooser
from ..map_variants import SIZES, STEPS, MapVariant, map_variants
from ..variant_check import difference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..kernel import Kernel
    from ..map_kernel import MapKernel, Operand
    from ..recorder import Recorder

_SPECIAL = np.array([0.0, -0.0, np.inf, np.nan, -np.inf, 1e-3, 1e4], np.float32)
_LIKELY = 2**31  # a threshold of random numbers that half of them pass
_MORE = 7  # pieces in the second workgroup of a check
_LONGEST = 4 * (SIZES[0] * STEPS[0] + _MORE) + 3  # elements of the longest check: their places are looked at
_FURTHEST = 16 * _LONGEST  # places
_ARGUMENT = re.compile(r"\bargs\.(\w+)")
_PERIOD = {True: 12, False: 5}  # of places, with and without 16-byte loads


def right_map(
    gpu: Recorder, chooser: MapChooser, kernels: MapKernel, choice: MapVariant, *, wide: bool, tail: bool
) -> bool:
    """Whether a variant is known to be right: known, or compared now; a wrong one is barred.

    tail: whether the number of elements is no multiple of four.
    """
    base = map_variants(choice.kernel, gpu.max_invocations)[-1]
    if choice == base:
        return True
    kernel = kernels.variant(choice, wide=wide, tail=tail)
    known = f"{kernel.name} {gpu.pipelines.text_of(kernel).digest[:12]}"  # kernels of one name may differ
    if known in chooser.table.checked:
        return True
    wrong = _compare(gpu, kernels, choice, base, wide, tail)
    if wrong:
        chooser.bar(choice.barred_as, wrong)
        return False
    chooser.table.note_checked(known)
    return True


def has_variants(kernels: MapKernel, *, wide: bool) -> bool:
    """Whether the check knows which elements a kernel reads and writes; if not, there is the base variant alone.

    It does not where statements reach for pointers themselves, where a place is no arithmetic that Python shares with
    GLSL, lies outside what the check would allocate, or, as an output's, is one for several elements.
    """
    if kernels.reaches_pointers:
        return False
    if all(operand.place == "index" for operand in (*kernels.inputs, *kernels.outputs)):
        return True
    try:
        scalars = _scalars(kernels, wide) | {"num_elements": _LONGEST}
        inputs, outputs = (
            [_reach(_with_numbers(one, scalars)) for one in some] for some in (kernels.inputs, kernels.outputs)
        )
    except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError):
        return False
    return all(reach.apart for reach in outputs) and all(
        low >= 0 and high < _FURTHEST for low, high, _ in inputs + outputs
    )


class Reach(NamedTuple):
    """The least and the greatest of the places of _LONGEST elements, and whether no two of them are the same."""

    least: int
    greatest: int
    apart: bool


def _with_numbers(operand: Operand, scalars: Mapping[str, float]) -> Operand:
    """The operand with the scalars' values in its place, and nothing of its own: those of several kernels are equal."""
    place = _ARGUMENT.sub(lambda match: f"{int(scalars[match.group(1)])}u", operand.place)
    return operand._replace(name="", pointer="", place=place, one_for_four=False)


@lru_cache(maxsize=256)
def _reach(operand: Operand) -> Reach:
    places = operand.indices(np.arange(_LONGEST), {})
    least, greatest = places.min(), places.max()
    if places.dtype.kind in "iu" and least >= 0 and greatest < _FURTHEST:  # marking takes a tenth of sorting's time
        taken = np.zeros(greatest + 1, bool)
        taken[places] = True
        return Reach(least, greatest, int(np.count_nonzero(taken)) == places.size)
    return Reach(least, greatest, bool((np.diff(np.sort(places)) > 0).all()))


def _compare(gpu: Recorder, kernels: MapKernel, choice: MapVariant, base: MapVariant, wide: bool, tail: bool) -> str:
    """Two workgroups, the second nearly empty; what lies between operands must stay as it is."""
    num_elements = (4 if wide else 1) * (choice.pieces + _MORE) + 3 * tail
    scalars = _scalars(kernels, wide)
    rng = np.random.default_rng(7)
    operands: dict[str, np.ndarray] = {}
    for pointer in kernels.pointers:
        values = rng.standard_normal(_size_of(kernels, pointer, num_elements, scalars)).astype(np.float32)
        values[::11] = np.resize(_SPECIAL, values[::11].size)
        operands[pointer] = values

    def record(aside: Recorder, variant: MapVariant, at: Mapping[str, int]) -> None:
        kernel: Kernel = kernels.variant(variant, wide=wide, tail=tail)
        groups = kernels.num_groups(variant, num_elements, wide=wide)
        aside.dispatch(kernel, groups, *at.values(), *scalars.values(), num_elements)

    return difference(gpu, operands, record, (choice, base), shift=0 if wide else 1)


def _scalars(kernels: MapKernel, wide: bool) -> dict[str, float]:
    """Values by name: those that places are worked out with are periods, as wide as the loads."""
    places = " ".join(operand.place for operand in (*kernels.inputs, *kernels.outputs))
    in_places = set(_ARGUMENT.findall(places))
    whole = {name: _PERIOD[wide] if name in in_places else _LIKELY for name in kernels.scalars}
    return {name: whole[name] if kind == "uint" else 0.5 for name, kind in kernels.scalars.items()}


def _size_of(kernels: MapKernel, pointer: str, num_elements: int, scalars: Mapping[str, float]) -> int:
    index = np.arange(num_elements)
    values = {**scalars, "num_elements": num_elements}
    operands = [operand for operand in (*kernels.inputs, *kernels.outputs) if operand.pointer == pointer]
    return 1 + max(int(operand.indices(index, values).max()) for operand in operands)
