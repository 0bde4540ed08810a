"""The rule of elementwise neighbours: which two calls of map kernels can be one, and how."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from .fusion import Call, Merge, Range, can_move, extent, overlap
from .fusion_map_op import FusedMapOp, Plan, Slot, joint_op
from .kernel_registry import is_available
from .map_kernel import MapKernel, Operand
from .op import OPS, Cost
from .ops.elementwise import MapOp
from .tensor import Storage, Tensor, TensorSpec

RULE = "elementwise neighbours"

_ARGUMENT = re.compile(r"\bargs\.(\w+)")
_LOWER_HALF = re.compile(r"index \+ index / (args\.\w+) \* \1")
_UPPER_HALF = re.compile(r"index \+ \(index / (args\.\w+) \+ 1u\) \* \1")
_MOST_RECIPES = 4096
_NUMBERS = int, float, np.integer, np.floating, np.bool_
_MOST_PARTS = 6  # calls in one kernel: longer chains would be new kernels to compile for ever less gain


@dataclass(eq=False)
class Recipe:
    """How two calls become one, whatever their addresses: a function of both ops, specs, settings and aliases.

    order: where the joint op's tensors are among both calls' (inputs, then outputs, first call, then last). outputs:
    for each output, the call (0 or 1) and its output that it was; None for one that was there before.
    """

    op: FusedMapOp
    cost: Cost
    order: tuple[int, ...]
    settings: dict[str, Any]
    outputs: tuple[tuple[int, int] | None, ...]


_recipes: dict[tuple[Any, ...], Recipe | None] = {}


class Side(NamedTuple):
    """One of the two calls: its kernel, tensors by pointer name, scalar values, number of elements, width."""

    kernel: MapKernel
    tensors: dict[str, Tensor]
    values: tuple[float, ...]
    num_elements: int
    wide: bool

    @classmethod
    def of(cls, call: Call) -> Side | None:
        """None for a call that is not of expressions."""
        op = call.op
        if not isinstance(op, MapOp):
            return None
        tensors = [t for t in (*call.inputs, *call.outputs) if t is not None]
        if isinstance(op, FusedMapOp):
            settings = call.settings
            kernel, values = op.kernel, settings["values"]
            num_elements, wide = settings["num_elements"], settings["wide"]
        else:
            specs = [t.spec for t in call.inputs if t is not None]
            kernel = op.map_kernel(**call.settings)
            values = op.scalar_values(*specs, **call.settings)
            num_elements, wide = op.num_elements(*specs), op.allows_wide(*specs)
        if not kernel.expressions or len(tensors) != len(kernel.pointers):
            return None
        return cls(kernel, dict(zip(kernel.pointers, tensors, strict=True)), tuple(values), num_elements, wide)


def join(first: Call, last: Call) -> Call | None:
    """One call that does what two do, or None: nothing in common, aliases that do not line up, no bytes saved."""
    ours = [t for t in (*first.inputs, *first.outputs) if t is not None]
    tensors = [*ours, *(t for t in (*last.inputs, *last.outputs) if t is not None)]
    numbers: dict[Range, int] = {}
    pattern = tuple([numbers.setdefault(t.extent, len(numbers)) for t in tensors])
    if not set(pattern[: len(ours)]).intersection(pattern[len(ours) :]):
        return None  # nothing in common: nothing to save
    end = -1
    for start, stop in sorted(numbers):  # tensors that overlap in part
        if start < end:
            return None
        end = stop
    dead = tuple([first.is_dead(i) for i in range(first.num_outputs)])
    key: tuple[Any, ...] = first.identity, last.identity, pattern, dead
    if last.settings or (first.settings and type(first.identity) is not Recipe):  # a recipe has values of its own
        key = (*key, signs_of_zeros(first.settings.values()), signs_of_zeros(last.settings.values()))
    try:
        recipe = _recipes[key]
    except KeyError:
        recipe = make_recipe(first, last, pattern, dead)
        if recipe is not None and not all(is_available(kernel) for kernel in recipe.op.kernel.kernels()):
            recipe = None  # neither shipped nor cached, and there is no compiler
        if first.identity is not None and last.identity is not None:
            if len(_recipes) >= _MOST_RECIPES:
                _recipes.clear()
            _recipes[key] = recipe
    if recipe is None or recipe.cost.bytes_moved >= first.cost.bytes_moved + last.cost.bytes_moved:
        return None
    op, order = recipe.op, recipe.order
    both = first, last
    refs = [_alive if place is None else both[place[0]].alive[place[1]] for place in recipe.outputs]
    inputs = [tensors[i] for i in order[: op.num_inputs]]
    outputs = [tensors[i] for i in order[op.num_inputs :]]
    return Call(op, recipe.cost, inputs, outputs, len(outputs), recipe.settings, refs, identity=recipe)


def signs_of_zeros(values: Iterable[Any]) -> tuple[float, ...]:
    """Of settings, in order, those in tuples too: calls that differ in these signs alone have one identity."""
    signs: list[float] = []
    for value in values:
        if isinstance(value, _NUMBERS):
            if value == 0:  # 0 and False count, with which 0.0 and -0.0 compare equal: a place for each
                signs.append(math.copysign(1.0, value))
        elif isinstance(value, tuple):
            signs += signs_of_zeros(value)
    return tuple(signs)


def _alive() -> bool:
    return True


def make_recipe(first: Call, last: Call, pattern: tuple[int, ...], dead: tuple[bool, ...]) -> Recipe | None:
    """pattern: a number for each tensor of both calls, equal for equal bytes. dead: outputs nobody can read."""
    sides = Side.of(first), Side.of(last)
    if sides[0] is None or sides[1] is None or sides[0].num_elements != sides[1].num_elements:
        return None
    one, two = sides[0], sides[1]
    split = len(one.tensors)
    pointers = (
        dict(zip(one.kernel.pointers, pattern[:split], strict=True)),
        dict(zip(two.kernel.pointers, pattern[split:], strict=True)),
    )
    scalars: dict[tuple[str, str, float, float], int] = {}  # one of each name, type, value and sign
    numbers = [
        tuple(
            scalars.setdefault((name, kind, value, math.copysign(1.0, value)), len(scalars))
            for (name, kind), value in zip(side.kernel.scalars.items(), side.values, strict=True)
        )
        for side in (one, two)
    ]

    def slots(which: int, kernel: MapKernel, operands: Iterable[Operand]) -> tuple[Slot, ...]:
        new = {name: f"args.c{number}" for name, number in zip(kernel.scalars, numbers[which], strict=True)}
        return tuple(Slot(pointers[which][o.pointer], _renamed(o.place, new), o.one_for_four) for o in operands)

    reads = slots(0, one.kernel, one.kernel.inputs), slots(1, two.kernel, two.kernel.inputs)
    writes = slots(0, one.kernel, one.kernel.outputs), slots(1, two.kernel, two.kernel.outputs)
    if not _lines_up(reads, writes):
        return None
    made = pattern[len(first.inputs) : split]
    gone = {number for number, is_dead in zip(made, dead, strict=True) if is_dead}
    dropped = tuple(slot in writes[1] or (slot in reads[1] and slot.pointer in gone) for slot in writes[0])
    plan = Plan((first.op.name, last.op.name), reads, writes, (numbers[0], numbers[1]), dropped)
    op = joint_op(plan, one.kernel, two.kernel)
    if op is None:
        return None
    order = tuple(pattern.index(number) for number in op.pointer_numbers)
    tensors = [*one.tensors.values(), *two.tensors.values()]
    sizes = [tensors[i].nbytes for i in order]
    written = sum(sizes[op.num_inputs :]) + sum(sizes[i] for i in op.writes)
    cost = Cost(first.cost.flops + last.cost.flops, sum(sizes[: op.num_inputs]), written)
    settings = {
        "values": tuple(value for _, _, value, _ in scalars),
        "num_elements": one.num_elements,
        "wide": one.wide and two.wide,
    }
    origin = {number: (0, i) for i, number in enumerate(made)}
    origin |= {number: (1, i) for i, number in enumerate(pattern[split + len(last.inputs) :])}
    outputs = tuple(origin.get(number) for number in op.pointer_numbers[op.num_inputs :])
    return Recipe(op, cost, order, settings, outputs)


def _renamed(place: str, new: dict[str, str]) -> str:
    return _ARGUMENT.sub(lambda match: new[match.group(1)], place)


def _lines_up(
    reads: tuple[tuple[Slot, ...], tuple[Slot, ...]],
    writes: tuple[tuple[Slot, ...], tuple[Slot, ...]],
) -> bool:
    """Whether loading everything first and storing everything last, element by element, is what the two did.

    No element may read or write what another one writes: where two operands are of one tensor and one is written, they
    must be the same place of it, or places that never meet.
    """
    everything = {*reads[0], *reads[1], *writes[0], *writes[1]}
    for slot in (*writes[0], *writes[1]):
        for other in everything:
            same = slot.pointer == other.pointer
            if same and slot.place != other.place and not _never_meet(slot.place, other.place):
                return False
    return True


def _never_meet(one: str, other: str) -> bool:
    """Whether two places are the two halves of rows, as swiglu has them."""
    for lower, upper in ((one, other), (other, one)):
        low, high = _LOWER_HALF.fullmatch(lower), _UPPER_HALF.fullmatch(upper)
        if low and high and low.group(1) == high.group(1):
            return True
    return False


def elementwise_neighbours(calls: Sequence[Call]) -> Merge | None:
    """Two elementwise ops of one size that share a tensor, or of which the second reads what the first made."""
    last = calls[-1]
    for place in range(len(calls) - 2, -1, -1):
        first = calls[place]
        if not isinstance(first.op, MapOp) or len(first.parts) + len(last.parts) > _MOST_PARTS:
            continue
        merged = join(first, last)
        if merged is None:
            continue
        between = calls[place + 1 : -1]
        if can_move(first, between):
            return Merge(RULE, place, merged, at_first=False)
        unwritten = [some for some in first.writes() if some not in merged.writes()]
        if can_move(last, between) and not any(overlap(unwritten, call.reads()) for call in between):
            return Merge(RULE, place, merged, at_first=True)
    return None


def known_ops() -> Iterable[FusedMapOp]:
    """Joint ops that this package's layers lead to, to be compiled ahead of time: a feed-forward's backward (the
    activation's gradient, and the activation again, whose memory may be that of the gradient before it)."""
    for backward, forward, width, kinds in (
        ("activation_backward", "activation", 1, ({"kind": "relu"}, {"kind": "gelu"}, {"kind": "silu"})),
        ("swiglu_backward", "swiglu", 2, ({},)),
    ):
        for settings, reused in product(kinds, (False, True)):
            d_hidden, pre, d_pre = (_example(i, n) for i, n in enumerate((1, width, width)))
            hidden = d_hidden if reused else _example(3, 1)
            first = Call(OPS[backward], Cost(0, 0, 0), (d_hidden, pre), (d_pre,), 1, settings, (_alive,))
            last = Call(OPS[forward], Cost(0, 0, 0), (pre,), (hidden,), 1, settings, (_alive,))
            numbers: dict[Range, int] = {}
            tensors = (d_hidden, pre, d_pre, pre, hidden)
            pattern = tuple(numbers.setdefault(extent(t), len(numbers)) for t in tensors)
            recipe = make_recipe(first, last, pattern, (False,))
            assert recipe is not None
            yield recipe.op


def _example(number: int, width: int) -> Tensor:
    spec = TensorSpec((4, 8 * width))
    return Tensor(None, spec, Storage(None, spec.nbytes, 2**20 * (number + 1), None))  # type: ignore[arg-type]
