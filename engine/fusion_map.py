"""Two elementwise ops as one: their expressions put together, each value loaded once and kept in a register."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from .expr import Expr, variable, whole
from .expr_walk import substitute
from .fusion import Call, Merge, Range, can_move, extent, overlap
from .kernel import Kernel
from .kernel_registry import is_available
from .map_kernel import MapKernel, Operand
from .op import OPS, Cost
from .ops.elementwise import MapOp
from .tensor import Storage, Tensor, TensorSpec

if TYPE_CHECKING:
    from .recorder import Recorder

RULE = "elementwise neighbours"

_ARGUMENT = re.compile(r"\bargs\.(\w+)")
_LOWER_HALF = re.compile(r"index \+ index / (args\.\w+) \* \1")
_UPPER_HALF = re.compile(r"index \+ \(index / (args\.\w+) \+ 1u\) \* \1")


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

    def launch(
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


class _Side(NamedTuple):
    """One of the two calls: its kernel, tensors by pointer name, scalar values, number of elements, width."""

    kernel: MapKernel
    tensors: dict[str, Tensor]
    values: tuple[float, ...]
    num_elements: int
    wide: bool

    @classmethod
    def of(cls, call: Call) -> _Side | None:
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


def join(first: Call, last: Call, *, only_known: bool = True) -> Call | None:
    """One call that does what two do, or None where that cannot be: other sizes, aliases that do not line up.

    only_known: None, too, where the kernel is not shipped or cached and there is no compiler.
    """
    sides = _Side.of(first), _Side.of(last)
    if sides[0] is None or sides[1] is None or sides[0].num_elements != sides[1].num_elements:
        return None
    one, two = sides[0], sides[1]
    pointers: dict[tuple[int, int], int] = {}
    tensors: list[Tensor] = []
    for side in (one, two):
        for tensor in side.tensors.values():
            if extent(tensor) not in pointers:
                pointers[extent(tensor)] = len(tensors)
                tensors.append(tensor)
    scalars: dict[tuple[str, str, float], int] = {}  # one of each name, type and value
    numbers = tuple(
        tuple(
            scalars.setdefault((name, kind, value), len(scalars))
            for (name, kind), value in zip(side.kernel.scalars.items(), side.values, strict=True)
        )
        for side in (one, two)
    )

    def slots(side: _Side, which: int, operands: Iterable[Operand]) -> tuple[Slot, ...]:
        new = {name: f"args.c{number}" for name, number in zip(side.kernel.scalars, numbers[which], strict=True)}
        return tuple(
            Slot(pointers[extent(side.tensors[o.pointer])], _renamed(o.place, new), o.one_for_four) for o in operands
        )

    reads = slots(one, 0, one.kernel.inputs), slots(two, 1, two.kernel.inputs)
    writes = slots(one, 0, one.kernel.outputs), slots(two, 1, two.kernel.outputs)
    dead = {i for i in range(first.num_outputs) if first.is_dead(i)}
    made = [extent(t) for i, t in enumerate(first.outputs) if i in dead]
    dropped = tuple(
        slot in writes[1] or (slot in reads[1] and extent(tensors[slot.pointer]) in made) for slot in writes[0]
    )
    if not _lines_up(reads, writes, [extent(t) for t in tensors]):
        return None
    plan = Plan((first.op.name, last.op.name), reads, writes, (numbers[0], numbers[1]), dropped)
    op = _joint_op(plan, one.kernel, two.kernel)
    if op is None or (only_known and not all(is_available(kernel) for kernel in op.kernel.kernels())):
        return None
    of_op = [tensors[number] for number in op.pointer_numbers]
    inputs, outputs = of_op[: op.num_inputs], of_op[op.num_inputs :]
    cost = Cost(
        first.cost.flops + last.cost.flops,
        sum(t.nbytes for t in inputs),
        sum(t.nbytes for t in (*outputs, *(inputs[i] for i in op.writes))),
    )
    alive = {extent(t): ref for call in (first, last) for t, ref in zip(call.outputs, call.alive, strict=True)}
    settings = {
        "values": tuple(value for _, _, value in scalars),
        "num_elements": one.num_elements,
        "wide": one.wide and two.wide,
    }
    refs = [alive.get(extent(t), _alive) for t in outputs]
    return Call(op, cost, inputs, outputs, len(outputs), settings, refs)


def _alive() -> bool:
    return True


def _renamed(place: str, new: dict[str, str]) -> str:
    return _ARGUMENT.sub(lambda match: new[match.group(1)], place)


def _lines_up(
    reads: tuple[tuple[Slot, ...], tuple[Slot, ...]],
    writes: tuple[tuple[Slot, ...], tuple[Slot, ...]],
    extents: list[tuple[int, int]],
) -> bool:
    """Whether loading everything first and storing everything last, element by element, is what the two did.

    No element may read or write what another one writes: where bytes of two operands overlap and one is written, both
    must be the same place of the same tensor, or places that never meet.
    """
    everything = {*reads[0], *reads[1], *writes[0], *writes[1]}
    for slot in (*writes[0], *writes[1]):
        for other in everything:
            if slot.pointer == other.pointer:
                if slot.place != other.place and not _never_meet(slot.place, other.place):
                    return False
            elif overlap([extents[slot.pointer]], [extents[other.pointer]]):
                return False
    return True


def _never_meet(one: str, other: str) -> bool:
    """Whether two places are the two halves of rows, as swiglu has them."""
    for lower, upper in ((one, other), (other, one)):
        low, high = _LOWER_HALF.fullmatch(lower), _UPPER_HALF.fullmatch(upper)
        if low and high and low.group(1) == high.group(1):
            return True
    return False


def _joint_op(plan: Plan, one: MapKernel, two: MapKernel) -> FusedMapOp | None:
    return _make_op(plan, tuple(one.expressions.items()), tuple(two.expressions.items()), _names(one), _names(two))


def _names(kernel: MapKernel) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]:
    names = tuple(o.name for o in kernel.inputs), tuple(o.name for o in kernel.outputs)
    return (*names, tuple(kernel.scalars.items()))


@lru_cache(maxsize=512)
def _make_op(
    plan: Plan,
    first: tuple[tuple[str, Expr], ...],
    last: tuple[tuple[str, Expr], ...],
    *signatures: tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]],
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


def elementwise_neighbours(calls: Sequence[Call]) -> Merge | None:
    """Two elementwise ops of one size that share a tensor, or of which the second reads what the first made."""
    last = calls[-1]
    for place in range(len(calls) - 2, -1, -1):
        if not isinstance(calls[place].op, MapOp):
            continue
        between = calls[place + 1 : -1]
        delayed, advanced = can_move(calls[place], between), can_move(last, between)
        if not (delayed or advanced):
            continue
        if not overlap(_bytes_of(calls[place]), _bytes_of(last)):
            continue  # nothing in common: nothing to save
        merged = join(calls[place], last)
        if merged is not None:
            return Merge(RULE, place, merged, at_first=not delayed)
    return None


def _bytes_of(call: Call) -> list[Range]:
    return [*call.reads(), *call.writes()]


def known_kernels() -> Iterable[Kernel]:
    """Joint kernels that this package's layers lead to, to be compiled ahead of time: a feed-forward's backward (the
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
            joint = join(first, last, only_known=False)
            assert joint is not None and isinstance(joint.op, FusedMapOp)
            yield from joint.op.kernel.kernels()


def _example(number: int, width: int) -> Tensor:
    spec = TensorSpec((4, 8 * width))
    return Tensor(None, spec, Storage(None, spec.nbytes, 2**20 * (number + 1), None))  # type: ignore[arg-type]
