"""One Adafactor update of one parameter, in place: Shazeer & Stern 2018, "Adafactor"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .adamw import check_update, clipped
from .column_sum import column_chunks, column_partials, partials_call
from .gradient_norm import SQUARES, square_parts, squares_call
from .loop_kernels import LoopCall, LoopOp, every_text, launch_loops, rows_by_loops
from .row_kernels import (
    MAX_LOOP_COLUMNS,
    ROW_SUBGROUPS,
    RowKernels,
    check_spec,
    column_groups,
    flat_groups,
    rows_and_columns,
)
from .sum import KERNELS as SUM
from .sum import parts_of

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_STATE = "in f32 state[4], step, "


def _of_rows(pieces: int, width: int) -> tuple[int, dict[str, float]]:
    """A case of so many rows, with all that any of the kernels is told."""
    cols = 2052 + width
    settings = {"has_state": 0, "eps": 1e-3, "relative": 1, "threshold": 1.0, "weight_decay": 0.125}
    return pieces, {"rows": pieces, "cols": cols, "n": pieces * cols, **settings}


ROWS = rows_by_loops(
    "adafactor_rows",
    "adafactor_rows.comp",
    f"in row g[rows * cols], inout f32 r[rows], {_STATE}uint rows, uint cols, uint has_state, float eps",
    _of_rows,
    subgroups=ROW_SUBGROUPS,
)
COLUMN_SQUARES = column_partials("column_squares", "in row x[rows * cols], out row partials[chunks * cols]", kind=3)
COLUMNS = RowKernels(
    "adafactor_columns",
    "adafactor_columns.comp",
    f"in row partials, inout row m, {_STATE}uint rows, uint cols, uint chunks, uint has_state, float eps",
)
VECTOR = rows_by_loops(
    "adafactor_vector",
    "adafactor_vector.comp",
    f"in row g[n], inout row v[n], out f32 squares[parts], {_STATE}uint n, uint parts, uint chunk, uint has_state, "
    "float eps",
    lambda pieces, width: (pieces, {**parts_of(pieces, width)[1], "has_state": 0, "eps": 1e-3}),
    subgroups=ROW_SUBGROUPS,
    turns=False,
)
MATRIX_SQUARES = rows_by_loops(
    "adafactor_squares",
    "adafactor_update.comp",
    "in row g[rows * cols], in f32 r[rows], in row m[cols], in f32 r_sum[1], out f32 squares[rows], in f32 state[4], "
    "uint rows, uint cols, uint has_state",
    _of_rows,
    subgroups=ROW_SUBGROUPS,
    turns=False,
    FACTORED=1,
    APPLY=0,
)
_APPLY = (
    "in f32 update_sum[1], in f32 p_sum[1], in f32 state[4], step, uint rows, uint cols, uint n, uint has_state, "
    "uint relative, float eps, float threshold, float weight_decay"
)
MATRIX = rows_by_loops(
    "adafactor_matrix",
    "adafactor_update.comp",
    f"inout row p[n], in row g[n], in f32 r[rows], in row m[cols], in f32 r_sum[1], {_APPLY}",
    _of_rows,
    subgroups=ROW_SUBGROUPS,
    turns=False,
    FACTORED=1,
    APPLY=1,
)
FLAT = rows_by_loops(
    "adafactor_flat",
    "adafactor_update.comp",
    f"inout row p[n], in row g[n], in row m[n], {_APPLY}",
    lambda pieces, width: (pieces, {**_of_rows(pieces, width)[1], "n": pieces * (2052 + width) - 1000}),
    subgroups=ROW_SUBGROUPS,
    turns=False,
    FACTORED=0,
    APPLY=1,
)


def factored_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the moments of a parameter: ([rows], [columns]) from two dimensions on, the parameter's own below.

    All dimensions but the last count as rows.
    """
    if len(shape) < 2:
        return (shape,)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return (rows,), (shape[-1],)


class AdafactorOp(LoopOp):
    """p and its moments change in place. second is None for a parameter of fewer than two dimensions."""

    name = "adafactor_"
    writes = (0, 2, 3)
    takes_step = True

    def outputs(
        self,
        p: TensorSpec,
        g: TensorSpec,
        first: TensorSpec,
        second: TensorSpec | None,
        state: TensorSpec | None,
        *,
        eps: float,
        threshold: float,
        weight_decay: float,
        relative: float | None,
    ) -> Sequence[TensorSpec]:
        check_update(self.name, p, state, g=g)
        shapes = factored_shapes(p.shape)
        if (second is None) != (len(shapes) == 1):
            raise ValueError(f"{self.name}: p of shape {p.shape} has {len(shapes)} moments")
        check_spec(self.name, "first", first, shapes[0])
        if second is not None:
            check_spec(self.name, "second", second, shapes[1])
            rows, _ = rows_and_columns(self.name, "p", p, loops=1)
            if rows > MAX_LOOP_COLUMNS:
                raise ValueError(f"{self.name}: p of shape {p.shape} has more than {MAX_LOOP_COLUMNS} rows")
        relative_ok = relative is None or 0 < relative < math.inf
        if not (0 < eps < math.inf and threshold > 0 and 0 <= weight_decay < math.inf and relative_ok):
            raise ValueError(
                f"{self.name}: eps {eps}, threshold {threshold} and relative {relative} must be positive, "
                f"weight_decay {weight_decay} not negative; all but the threshold finite"
            )
        return ()

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        p = specs[0]
        assert p is not None
        # [sum of r, sum of squares of the update, of p], a row's squares, squares of p, squares of columns
        parts = square_parts(p.size)[0]
        made = [TensorSpec((3,)), TensorSpec((parts if specs[3] is None else p.size // max(1, p.shape[-1]),))]
        if settings["relative"] is not None:
            made.append(TensorSpec((parts,)))
        if specs[3] is not None:
            cols = p.shape[-1]
            made.append(TensorSpec((column_chunks(p.size // cols, cols)[0], cols)))
        return made

    def flops(self, p: TensorSpec, *others: TensorSpec | None, **settings: Any) -> int:
        return 16 * p.size

    def reference(
        self,
        p: Any,
        g: Any,
        first: Any,
        second: Any,
        state: Any,
        *,
        eps: float,
        threshold: float,
        weight_decay: float,
        relative: float | None,
        step: StepParameters,
    ) -> Sequence[Any]:
        g = clipped(g, state)
        if g is None or not p.size:
            return ()
        weight = step.square_weight
        squares = np.square(g) + eps
        if second is None:
            first[...] = (1 - weight) * first + weight * squares
            update = g / np.sqrt(first)
        else:
            squares = squares.reshape(first.size, second.size)
            first[...] = (1 - weight) * first + weight * squares.mean(axis=1)
            second[...] = (1 - weight) * second + weight * squares.mean(axis=0)
            row = np.sqrt(first.mean()) / np.sqrt(first)
            update = (g.reshape(squares.shape) * row[:, None] / np.sqrt(second)).reshape(p.shape)
        rate = step.learning_rate
        if relative is not None:
            rate = rate * max(relative, np.sqrt(np.mean(np.square(p))))
        scaled = rate / max(1.0, np.sqrt(np.mean(np.square(update))) / threshold)
        p[...] = p - (rate * weight_decay * p + scaled * update)
        return ()

    def loop_calls(
        self,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        eps: float,
        threshold: float,
        weight_decay: float,
        relative: float | None,
    ) -> Sequence[LoopCall]:
        p, g, first, second, given = inputs
        assert p is not None and g is not None and first is not None
        sums, squares, rest = outputs[0], outputs[1], list(outputs[2:])
        state, has_state = (p, 0) if given is None else (given, 1)
        update_sum, p_sum = (sums, 4), (sums, 8)
        of_p = [squares_call(p, rest.pop(0))] if relative is not None else []
        last = (has_state, int(relative is not None), relative or 0.0, threshold, weight_decay)
        if second is None:
            parts, chunk = square_parts(p.size)
            work = parts, min(p.size, chunk)
            numbers: tuple[float, ...] = (p.size, parts, chunk, has_state, eps)
            moment = LoopCall(VECTOR.pick(p.size, g, first), *work, (g, first, squares, state), numbers)
            pointers: tuple[Any, ...] = (p, g, first, update_sum, p_sum, state)
            update = LoopCall(FLAT.pick(p.size, p, g, first), *work, pointers, (parts, chunk, p.size, *last))
            return *of_p, moment, update
        rows, cols = work = first.size, second.size
        numbers = (rows, cols, has_state)
        of_rows = LoopCall(ROWS.pick(cols, g), *work, (g, first, state), (*numbers, eps))
        of_columns = partials_call(COLUMN_SQUARES.pick(cols, g), rows, cols, (g, rest.pop(0)))
        pointers = (g, first, second, sums, squares, state)
        of_update = LoopCall(MATRIX_SQUARES.pick(cols, g, second), *work, pointers, numbers)
        pointers = (p, g, first, second, sums, update_sum, p_sum, state)
        update = LoopCall(MATRIX.pick(cols, p, g, second), *work, pointers, (rows, cols, p.size, *last))
        return *of_p, of_rows, of_columns, of_update, update

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor],
        *,
        eps: float,
        threshold: float,
        weight_decay: float,
        relative: float | None,
    ) -> None:
        p, _, first, second, given = inputs
        assert p is not None and first is not None
        if not p.size:
            return
        calls = self.loop_calls(
            inputs, outputs, eps=eps, threshold=threshold, weight_decay=weight_decay, relative=relative
        )
        sums, squares = outputs[:2]
        update_sum, p_sum = (sums, 4), (sums, 8)
        if relative is not None:
            launch_loops(gpu, calls[0])
            _total(gpu, outputs[2], p_sum)
            calls = calls[1:]
        if second is None:
            moment, update = calls
            launch_loops(gpu, moment)
        else:
            of_rows, of_columns, of_update, update = calls
            launch_loops(gpu, of_rows)
            launch_loops(gpu, of_columns)
            rows, cols, chunks, _ = of_columns.scalars
            state, has_state = (p, 0) if given is None else (given, 1)
            groups = flat_groups(column_groups(second.size))
            pointers = (of_columns.pointers[-1], second, state)
            gpu.dispatch(COLUMNS.pick(second.size, second), groups, *pointers, rows, cols, chunks, has_state, eps)
            _total(gpu, first, sums)
            launch_loops(gpu, of_update)
        _total(gpu, squares, update_sum)
        launch_loops(gpu, update)

    def kernels(self) -> Iterable[Kernel]:
        for family in (ROWS, COLUMN_SQUARES, VECTOR, MATRIX_SQUARES, MATRIX, FLAT, SQUARES, SUM):
            yield from every_text(family.both())
        yield from COLUMNS.both()


def _total(gpu: Recorder, x: Tensor, target: Any) -> None:
    """Sum of a small tensor, by one subgroup."""
    work, gpu.op_work = gpu.op_work, 0.0
    gpu.dispatch(SUM.pick(x.size, x), 1, x, target, x.size, 1, x.size)
    gpu.op_work = work


ADAFACTOR = register(AdafactorOp())


def adafactor_(
    engine: ComputeEngine,
    p: Tensor,
    g: Tensor,
    first: Tensor,
    second: Tensor | None = None,
    state: Tensor | None = None,
    *,
    eps: float = 1e-30,
    threshold: float = 1.0,
    weight_decay: float = 0.0,
    relative: float | None = None,
) -> None:
    """One step of Adafactor on p (Shazeer & Stern 2018, algorithms 4 and 5, without a first moment); p and its moments
    change in place, all float32.

    p, g: one shape. Of two dimensions or more they count as [rows, cols] (cols the last), and first [rows], second
    [cols] are moving averages of the means of squares; of fewer, first is the second moment itself, of p's shape, and
    second is left out. With c the clip factor of `state` (from `gradient_norm`; 1 without state), w the step
    parameters' square_weight (1 - beta2_t) and lr their learning rate:
    s = (c g)^2 + eps, first = (1 - w) first + w mean_over_columns(s), second likewise over rows;
    u = c g / sqrt(first second / mean(first)), or c g / sqrt(first);
    p = p (1 - lr weight_decay) - lr u / max(1, rms(u) / threshold), the decay decoupled.
    relative: lr is multiplied by max(relative, rms(p)), the paper's relative step (its eps2); None leaves lr as it is.
    Nothing changes when the state's finite flag is 0. Sums are taken in an order that depends on the shape and the
    device's subgroup size alone.

    Raises ValueError for shapes or types that do not fit, rows or columns beyond 2^20 - 16, or settings out of range.
    """
    engine.execute(
        ADAFACTOR,
        (p, g, first, second, state),
        eps=eps,
        threshold=threshold,
        weight_decay=weight_decay,
        relative=relative,
    )
