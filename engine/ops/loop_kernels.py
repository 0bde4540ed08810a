"""Kernels by hand whose subgroups or invocations loop along a piece of work each: variants, check, tuning.

Of a kernel's text there is one for every number of turns (shaders/turns.glsl); the size of its workgroups is put in
when the pipeline is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..kernel import Kernel
from ..kernel_arguments import Argument
from ..loop_choice import LoopChooser, family_of, select_for
from ..loop_variants import FACTORS, TURNS, LoopVariant, LoopWork, tuning_key, worth_measuring
from ..op import Op
from ..step_parameters import SIZE_BYTES
from ..tuner import HALF, Measured, keep_times, measure_in_turns
from ..variant_check import difference, operands_of
from ..variant_choice import ask_state, choice_state
from .row_kernels import RowKernels
from .tensor_table import Place

if TYPE_CHECKING:
    from ..recorder import Recorder

_GUARD = 8192  # words around operands of a check

# Pieces that are asked for, and 4 or 1 as loads are of 16 bytes or not -> about so many pieces, and the case's scalars.
Case = Callable[[int, int], "tuple[int, Mapping[str, float]]"]


class OfTensors(NamedTuple):
    """How a kernel over a table of tensors runs in checks and measurements.

    per_row: tensors a row of the table, all of one size. prepare: given a recorder aside, the kernel, its turns, the
    rows and the address of more memory than one tensor takes, what records it.
    """

    per_row: int
    prepare: Callable[[Recorder, Kernel, int, Sequence[Sequence[Place]], int], Callable[[], None]]


class Loops(NamedTuple):
    """What is known of a kernel. written: its text with so many turns; factors, turns: of its variants."""

    written: Callable[[int], Kernel]
    factors: tuple[int, ...]
    turns: tuple[int, ...]
    case: Case | OfTensors


class LoopCall(NamedTuple):
    """A call of such a kernel; pieces and length as in `LoopWork`.

    pointers: tensors, or (tensor, byte offset); of a kernel over a table its tensors, in rows. scalars: what comes
    behind pointers.
    """

    kernel: Kernel
    pieces: int
    length: int
    pointers: Sequence[Any]
    scalars: Sequence[float] = ()

    @property
    def key(self) -> str:
        """Its name in a table of times."""
        return tuning_key(self.kernel.name, self.pieces, self.length)


class LoopPlan(NamedTuple):
    """What a call is dispatched with. a_group: pieces a workgroup."""

    kernel: Kernel
    a_group: int
    turns: int


class LoopOp(Op):
    """An op with such kernels; a subclass says which of its dispatches they are: `loop_calls(inputs, outputs,
    **settings)`, in order."""

    loop_calls: Callable[..., Sequence[LoopCall]]


_loops: dict[Kernel, Loops] = {}


def by_loops(
    written: Callable[[int], Kernel], case: Case | OfTensors, *, wide_groups: bool = True, turns: bool = True
) -> Kernel:
    """A kernel. written: given turns. wide_groups, turns: whether it has variants with more of them."""
    kernel = written(1)
    _loops[kernel] = Loops(cache(written), FACTORS if wide_groups else (1,), TURNS if turns else (1,), case)
    return kernel


def rows_by_loops(
    name: str, source: str, args: str, case: Case, *, subgroups: int = 0, turns: bool = True, **defines: int
) -> RowKernels:
    """A kernel in two widths. args: with the extents of all pointers; turns: whether its text knows TURNS."""

    @cache
    def both(turn: int) -> RowKernels:
        more = {**defines, "TURNS": turn} if turns else defines
        return RowKernels(name, source, args, subgroups=subgroups, more={"family": "loop"}, **more)

    kernels = both(1)
    for place in range(2):
        by_loops(lambda turn, place=place: both(turn).both()[place], case, turns=turns)  # type: ignore[misc]
    return kernels


def every_text(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """The kernels, and behind each what its variants have another text for."""
    for kernel in kernels:
        yield kernel
        for turn in _loops[kernel].turns[:-1]:
            yield variant_of(kernel, LoopVariant(kernel.name, 1, turn))


@cache
def variant_of(kernel: Kernel, choice: LoopVariant) -> Kernel:
    """The kernel of a variant."""
    written, factor = _loops[kernel].written(choice.turns), choice.factor
    return written.specialized(
        f"_{choice.name}", local_size=factor * kernel.local_size, subgroups=factor * kernel.subgroups
    )


def pieces_a_group(gpu: Recorder, kernel: Kernel) -> int:
    """Pieces a workgroup: one a subgroup, of other kernels one an invocation; of those over parts of tensors, one."""
    if not kernel.subgroups:
        return kernel.local_size
    return kernel.workgroup_size(gpu.subgroup_size, gpu.max_invocations) // gpu.subgroup_size


def work_of(gpu: Recorder, kernel: Kernel, pieces: int, length: int) -> LoopWork:
    """What the choice looks at."""
    loops, usual = _loops[kernel], kernel.local_size or kernel.subgroups * gpu.subgroup_size
    factors = tuple(factor for factor in loops.factors if factor == 1 or factor * usual <= gpu.max_invocations)
    longer = len(loops.factors) == 1
    a_group = 1 if longer else pieces_a_group(gpu, kernel)
    rounds, fours = (-(-length // (4 * gpu.subgroup_size)), 1) if kernel.subgroups else (length, 4)
    sizes = pieces, length, rounds, pieces * length * fours
    return LoopWork(kernel.name, *sizes, a_group, factors, loops.turns, longer)


def planned(gpu: Recorder, kernel: Kernel, pieces: int, length: int) -> LoopPlan:
    """The variant for a call, chosen and known to be right. Kept, since steps repeat."""
    chooser = gpu.choosers.get(LoopChooser)
    plan = chooser and chooser.plans.get((kernel, pieces, length, ask_state()))
    return plan or _plan(gpu, kernel, work_of(gpu, kernel, pieces, length))


def launch_loops(gpu: Recorder, call: LoopCall) -> None:
    """Record a call that is not over a table."""
    plan = planned(gpu, call.kernel, call.pieces, call.length)
    gpu.dispatch(plan.kernel, -(-call.pieces // plan.a_group), *call.pointers, *call.scalars)


def _plan(gpu: Recorder, kernel: Kernel, work: LoopWork) -> LoopPlan:
    chooser = LoopChooser.of(gpu)
    while True:
        choice = chooser.choose(work)
        if right_loops(gpu, chooser, kernel, choice):
            break
    variant = variant_of(kernel, choice)
    plan = LoopPlan(variant, pieces_a_group(gpu, variant), choice.turns)
    chooser.keep((kernel, work.pieces, work.length, choice_state()), plan, work.key, [variant])
    return plan


# -- the check ---------------------------------------------------------------------------------------------------------
def right_loops(gpu: Recorder, chooser: LoopChooser, kernel: Kernel, choice: LoopVariant) -> bool:
    """Whether a variant is known to be right: known, or compared now; a wrong one is barred."""
    base = LoopVariant(choice.kernel, 1, 1)
    if choice == base:
        return True
    variant = variant_of(kernel, choice)
    known = f"{variant.name} {gpu.pipelines.text_of(variant).digest[:12]}"
    if known in chooser.table.checked:
        return True
    case = _loops[kernel].case
    if isinstance(case, OfTensors):
        wrong = _compare_tensors(gpu, kernel, case, (choice, base))
    else:
        wrong = _compare(gpu, kernel, case, (choice, base))
    if wrong:
        chooser.bar(choice.barred_as, wrong)
        return False
    chooser.table.note_checked(known)
    return True


def _compare(gpu: Recorder, kernel: Kernel, case: Case, choices: tuple[LoopVariant, LoopVariant]) -> str:
    """Two workgroups, the second nearly empty: numbers above 0, ids one after the other."""
    whole = any(arg.is_pointer and arg.type == "f32x4" for arg in kernel.args)
    pieces, scalars = case(pieces_a_group(gpu, variant_of(kernel, choices[0])) + 3, 4 if whole else 1)

    def whole_numbers(arg: Argument, size: int) -> np.ndarray:
        first = int(scalars["vocabulary"])
        if arg.type == "i32":
            return (np.arange(size) % first).astype(np.int32)
        links = np.zeros((size // 2, 2), np.uint32)
        if arg.access == "in":  # as shaders/embedding_links.comp writes them for those ids; else it writes them over
            links[: len(links) - first, 0] = np.arange(first, len(links))
            links[first:, 1] = 1
        return links

    operands = operands_of(kernel, scalars, whole_numbers, np.random.default_rng(7))
    numbers = [scalars[arg.name] for arg in kernel.args if not arg.is_pointer]

    def record(aside: Recorder, choice: LoopVariant, at: Mapping[str, int]) -> None:
        variant = variant_of(kernel, choice)
        aside.dispatch(variant, -(-pieces // pieces_a_group(gpu, variant)), *at.values(), *numbers)

    return difference(gpu, operands, record, choices, shift=0 if whole else 1, guard=_GUARD)


def _compare_tensors(gpu: Recorder, kernel: Kernel, case: OfTensors, choices: tuple[LoopVariant, LoopVariant]) -> str:
    """A long tensor, a short one, and one that does not begin on 16 bytes."""
    sizes = {12 * 8192 + 37: 0, 5: 0, 3 * 8192 + 2: 1}
    rng = np.random.default_rng(7)
    operands = {
        f"{size}_{i}": np.abs(rng.standard_normal(size + shift)).astype(np.float32)
        for size, shift in sizes.items()
        for i in range(case.per_row)
    }
    operands["more"] = np.zeros(64, np.float32)

    def record(aside: Recorder, choice: LoopVariant, at: Mapping[str, int]) -> None:
        rows = [
            [Place(at[f"{size}_{i}"] + 4 * shift, size) for i in range(case.per_row)] for size, shift in sizes.items()
        ]
        case.prepare(aside, variant_of(kernel, choice), choice.turns, rows, at["more"])()

    return difference(gpu, operands, record, choices, guard=_GUARD)


# -- tuning ------------------------------------------------------------------------------------------------------------
def unmeasured_loops(gpu: Recorder, call: LoopCall) -> str:
    """Name of the variant that a call takes where nothing was measured."""
    chooser, work = LoopChooser.of(gpu), work_of(gpu, *call[:3])
    return select_for(chooser.device, work, chooser.table, tuned=False).choice.name


def tune_loops(gpu: Recorder, call: LoopCall, *, rounds: int = 5) -> Measured:
    """Measure a call's variants and keep the times; see `tune_map`. Tensors may be planned ones."""
    chooser, kernel, work = LoopChooser.of(gpu), call.kernel, work_of(gpu, *call[:3])
    usable = [choice for choice in family_of(work) if choice.barred_as not in chooser.table.barred]
    usable = [v for v in worth_measuring(work, usable) if right_loops(gpu, chooser, kernel, v)]
    aside = gpu.aside()
    try:
        aside.step_address = aside.own_buffer(SIZE_BYTES, host_visible=True).address

        def filled(nbytes: int, word: int) -> int:
            nbytes = max(16, (nbytes + 15) & ~15)
            buffer = aside.own_buffer(nbytes, host_visible=False)
            aside.fill_buffer(buffer, 0, nbytes, word)
            return buffer.address

        case = _loops[kernel].case
        records: dict[LoopVariant, Callable[[], None]] = {}
        if isinstance(case, OfTensors):
            rows = [[Place(filled(tensor.nbytes, HALF), tensor.size) for tensor in row] for row in call.pointers]
            more = filled(4 * call.pieces, HALF)
            for choice in usable:
                records[choice] = case.prepare(aside, variant_of(kernel, choice), choice.turns, rows, more)
        else:
            tensors = [pointer[0] if isinstance(pointer, tuple) else pointer for pointer in call.pointers]
            at = [filled(tensor.nbytes, HALF if tensor.dtype == "float32" else 0) for tensor in tensors]
            for choice in usable:
                records[choice] = _dispatch_of(aside, variant_of(kernel, choice), call, at)
        measured = measure_in_turns(aside, usable, lambda choice: records[choice](), rounds=rounds)
        return keep_times(chooser, Measured(work.key, measured))
    finally:
        aside.close()


def _dispatch_of(aside: Recorder, variant: Kernel, call: LoopCall, at: Sequence[int]) -> Callable[[], None]:
    groups = -(-call.pieces // pieces_a_group(aside, variant))
    return lambda: aside.dispatch(variant, groups, *at, *call.scalars)
