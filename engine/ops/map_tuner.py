"""Measures the variants of a map kernel's call (engine/tuner.py)."""

from __future__ import annotations

from typing import NamedTuple

from ..map_choice import MapChooser, select_for, tuning_key
from ..map_kernel import MapKernel
from ..map_variants import MapVariant, map_variants, worth_measuring
from ..recorder import Recorder
from ..step_parameters import SIZE_BYTES
from ..tuner import HALF, Measured, keep_times, measure_in_turns
from .map_check import right_map


class MapCall(NamedTuple):
    """A call of a map kernel. sizes: bytes behind each of its pointers. scalars: their values."""

    kernels: MapKernel
    num_elements: int
    wide: bool
    sizes: tuple[int, ...]
    scalars: tuple[float, ...]

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return (self.kernels.wide if self.wide else self.kernels.narrow).name

    @property
    def width(self) -> int:
        """Elements a piece."""
        return 4 if self.wide else 1

    @property
    def key(self) -> str:
        """Its name in a table."""
        return tuning_key(self.kernel, self.num_elements)


def unmeasured_map(gpu: Recorder, call: MapCall) -> str:
    """Name of the variant that a call takes where nothing was measured."""
    chooser = MapChooser.of(gpu)
    where = call.kernel, call.num_elements, call.width, gpu.max_invocations
    return select_for(chooser.device, *where, chooser.table, tuned=False).choice.name


def tune_map(gpu: Recorder, call: MapCall, *, rounds: int = 5) -> Measured:
    """Measure a call's variants and keep the times.

    Every variant is compared with the base variant first, and left out when barred. Takes device memory for the
    operands. Raises OutOfDeviceMemoryError where there is too little.
    """
    chooser = MapChooser.of(gpu)
    kernels, num_elements, wide = call[:3]
    tail = num_elements % 4 != 0
    family = map_variants(call.kernel, gpu.max_invocations)
    family = family if kernels.has_variants(wide=wide) else family[-1:]
    worth = worth_measuring(-(-num_elements // call.width), family)
    usable = [choice for choice in worth if choice.barred_as not in chooser.table.barred]
    usable = [choice for choice in usable if right_map(gpu, chooser, kernels, choice, wide=wide, tail=tail)]
    aside = gpu.aside()
    try:
        aside.step_address = aside.own_buffer(SIZE_BYTES, host_visible=True).address
        addresses = []
        for nbytes in call.sizes:
            buffer = aside.own_buffer(max(4, nbytes), host_visible=False)
            aside.fill_buffer(buffer, 0, max(4, nbytes), HALF)
            addresses.append(buffer.address)

        def record(choice: MapVariant) -> None:
            groups = kernels.num_groups(choice, num_elements, wide=wide)
            kernel = kernels.variant(choice, wide=wide, tail=tail)
            aside.dispatch(kernel, groups, *addresses, *call.scalars, num_elements)

        return keep_times(chooser, Measured(call.key, measure_in_turns(aside, usable, record, rounds=rounds)))
    finally:
        aside.close()
