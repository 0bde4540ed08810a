"""Two map kernels as one: their expressions put together, each value loaded once and kept in a register."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .expr import Expr, variable, whole
from .expr_walk import substitute
from .map_kernel import MapKernel, Operand
from .ops.elementwise import MapOp
from .tensor import Tensor

if TYPE_CHECKING:
    from .recorder import Recorder

Names = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]  # of inputs, outputs; scalars with types


class Slot(NamedTuple):
    """One value an element has: the pointer it lies behind (a number), its place there, and whether it is written."""

    pointer: int
    place: str
    one_for_four: bool


class Plan(NamedTuple):
    """How two kernels go together, without addresses: the same plan is the same kernel.

    reads, writes: of each kernel, a slot for each operand; pointers are numbered over both, those of one tensor equal.
    scalars: for each kernel, the number of each scalar among those of the joint kernel. dropped: outputs of the first
    that are not written.
    """

    names: tuple[str, str]
    reads: tuple[tuple[Slot, ...], tuple[Slot, ...]]
    writes: tuple[tuple[Slot, ...], tuple[Slot, ...]]
    scalars: tuple[tuple[int, ...], tuple[int, ...]]
    dropped: tuple[bool, ...]


class FusedMapOp(MapOp):
    """The joint op. Not registered: it exists because a rule made it, and its settings are those values."""

    def __init__(self, name: str, kernel: MapKernel, pointers: Sequence[int]) -> None:
        self.name = name
        self.kernel = kernel
        self.takes_step = kernel.takes_step
        read = list(dict.fromkeys(operand.pointer for operand in kernel.inputs))
        written = {operand.pointer for operand in kernel.outputs}
        self.writes = tuple(i for i, pointer in enumerate(read) if pointer in written)
        self.num_inputs = len(read)
        self.pointer_numbers = tuple(pointers)  # of the plan, in the order of the kernel's pointers

    def reference(self, *arrays: Any, values: tuple[float, ...], num_elements: int, **settings: Any) -> Sequence[Any]:
        """The outputs, flat; inputs that are written change in place. `wide` is of no matter."""
        step = {"step": settings["step"]} if self.takes_step else {}
        kernel = self.kernel
        scalars = dict(zip(kernel.scalars, values, strict=True))
        index = np.arange(num_elements)
        memory = {pointer: array.reshape(-1) for pointer, array in zip(kernel.pointers, arrays, strict=False)}
        inputs = {o.name: memory[o.pointer][o.indices(index, scalars)] for o in kernel.inputs}
        numbers = {
            name: int(value) if kernel.scalars[name] == "uint" else np.float32(value) for name, value in scalars.items()
        }
        results = kernel.reference(**inputs, **numbers, **step)
        made = []
        for pointer in kernel.pointers[self.num_inputs :]:
            memory[pointer] = np.empty(
                num_elements * sum(o.pointer == pointer for o in kernel.outputs), results[0].dtype
            )
            made.append(memory[pointer])
        for operand, value in zip(kernel.outputs, results, strict=True):
            memory[operand.pointer][operand.indices(index, scalars)] = value
        return made

    def launch(  # type: ignore[override]
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        values: tuple[float, ...],
        num_elements: int,
        wide: bool,
    ) -> None:
        """Record it."""
        self.kernel.launch(gpu, num_elements, *inputs, *outputs, *values, wide=wide)


def joint_op(plan: Plan, one: MapKernel, two: MapKernel) -> FusedMapOp | None:
    """The op of a plan, made once; None where it would take more arguments than a dispatch does."""
    return _make_op(plan, tuple(one.expressions.items()), tuple(two.expressions.items()), _names(one), _names(two))


def _names(kernel: MapKernel) -> Names:
    names = tuple(o.name for o in kernel.inputs), tuple(o.name for o in kernel.outputs)
    return (*names, tuple(kernel.scalars.items()))


@lru_cache(maxsize=512)
def _make_op(
    plan: Plan,
    first: tuple[tuple[str, Expr], ...],
    last: tuple[tuple[str, Expr], ...],
    *signatures: Names,
) -> FusedMapOp | None:
    kinds: dict[int, str] = {}
    values: dict[Slot, Expr] = {}  # what a slot holds, in a register, once the first op has run
    loaded: dict[Slot, str] = {}  # slots that are read from memory, and the names of their values
    results: dict[Slot, Expr] = {}
    for which, (outputs, (inputs, names, scalars)) in enumerate(zip((first, last), signatures, strict=True)):
        new: dict[Expr, Expr] = {}
        for (name, kind), number in zip(scalars, plan.scalars[which], strict=True):
            kinds[number] = kind
            new |= {whole(name): whole(f"c{number}")} if kind == "uint" else {variable(name): variable(f"c{number}")}
        for name, slot in zip(inputs, plan.reads[which], strict=True):
            if slot not in values:
                loaded[slot] = f"x{len(loaded)}"
                values[slot] = variable(loaded[slot])
            new[variable(name)] = values[slot]
        found = dict(zip((name for name, _ in outputs), substitute([root for _, root in outputs], new), strict=True))
        for name, slot in zip(names, plan.writes[which], strict=True):
            results[slot] = values[slot] = found[name]
    for slot, drop in zip(plan.writes[0], plan.dropped, strict=True):
        if drop and slot not in plan.writes[1]:
            del results[slot]
    stored = {slot: loaded.get(slot, f"y{i}") for i, slot in enumerate(results)}
    kernel_scalars = ", ".join(f"{kinds[number]} c{number}" for number in sorted(kinds))
    name = "__".join(plan.names)
    try:
        kernel = MapKernel(
            name,
            [_operand(slot, value) for slot, value in loaded.items()],
            [_operand(slot, value) for slot, value in stored.items()],
            {value: results[slot] for slot, value in stored.items()},
            scalars=kernel_scalars,
        )
    except ValueError:  # more arguments than a dispatch takes
        return None
    return FusedMapOp(name, kernel, [int(pointer[1:]) for pointer in kernel.pointers])


def _operand(slot: Slot, name: str) -> Operand:
    return Operand(name, f"p{slot.pointer}", slot.place, slot.one_for_four)
