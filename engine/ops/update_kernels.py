"""Kernels that update many tensors in one dispatch (shaders/update_many.comp): variants take longer parts of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..tensor import Tensor
from .loop_kernels import LoopCall, OfTensors, by_loops, planned
from .row_kernels import FLAT_SIZE
from .tensor_table import CHUNK, UPDATE_WORDS, Place, own_table, update_table, write_table

if TYPE_CHECKING:
    from ..recorder import Recorder

_ARGS = "in u32x4 table, in f32 state, step, uint num_tensors, uint has_state"


def update_kernel(name: str, scalars: str, case: Sequence[float], per_row: int, **defines: int) -> Kernel:
    """One with scalars behind those of all; case: their values in checks; per_row: tensors a parameter."""

    def written(turns: int) -> Kernel:
        sizes: dict[str, Any] = {**defines, "CHUNK": CHUNK * turns}
        args = f"{_ARGS}, {scalars}" if scalars else _ARGS
        return Kernel(name, "update_many.comp", args, local_size=FLAT_SIZE, defines=sizes, family="loop")

    def prepare(
        aside: Recorder, kernel: Kernel, turns: int, rows: Sequence[Sequence[Place]], more: int
    ) -> Callable[[], None]:
        words, groups = update_table(rows, [0.125] * len(rows), turns)
        table, count = own_table(aside, words), len(words) // (UPDATE_WORDS // 2)
        return lambda: aside.dispatch(kernel, groups, table, table, count, 0, *case)

    return by_loops(written, OfTensors(per_row, prepare), wide_groups=False)


def update_call(kernel: Kernel, tensors: Sequence[Sequence[Tensor]], scalars: Sequence[float]) -> LoopCall:
    """tensors: of each parameter; scalars: those behind has_state."""
    chunks = sum(-(-row[0].size // CHUNK) for row in tensors)
    return LoopCall(kernel, chunks, CHUNK // 4, tensors, scalars)


def launch_updates(
    gpu: Recorder, call: LoopCall, table: Tensor, state: Tensor | None, weight_decays: Sequence[float]
) -> None:
    """Record it: the table, for the variant that is chosen, and the dispatch."""
    plan = planned(gpu, *call[:3])
    rows, groups = update_table(call.pointers, weight_decays, plan.turns)
    write_table(gpu, table, rows)
    count, has_state = len(rows) // (UPDATE_WORDS // 2), state is not None
    gpu.dispatch(plan.kernel, groups, table, state if has_state else table, count, int(has_state), *call.scalars)
