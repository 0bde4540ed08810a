"""One Adafactor update of one parameter, in place: Shazeer & Stern 2018, "Adafactor"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import Op, register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .adamw import check_update, clipped
from .column_sum import column_chunks
from .gradient_norm import SQUARES, square_parts
from .row_kernels import (
    MAX_LOOP_COLUMNS,
    ROW_SUBGROUPS,
    RowKernels,
    check_spec,
    column_groups,
    flat_groups,
    row_groups,
    rows_and_columns,
)
from .sum import KERNELS as SUM

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_STATE = "in f32 state, step, "
ROWS = RowKernels(
    "adafactor_rows",
    "adafactor_rows.comp",
    f"in row g, inout f32 r, {_STATE}uint rows, uint cols, uint has_state, float eps",
    subgroups=ROW_SUBGROUPS,
)
COLUMN_SQUARES = RowKernels(
    "column_squares",
    "column_partials.comp",
    "in row x, out row partials, uint rows, uint cols, uint chunks, uint chunk_rows",
    KIND=3,
)
COLUMNS = RowKernels(
    "adafactor_columns",
    "adafactor_columns.comp",
    f"in row partials, inout row m, {_STATE}uint rows, uint cols, uint chunks, uint has_state, float eps",
)
VECTOR = RowKernels(
    "adafactor_vector",
    "adafactor_vector.comp",
    f"in row g, inout row v, out f32 squares, {_STATE}uint n, uint parts, uint chunk, uint has_state, float eps",
    subgroups=ROW_SUBGROUPS,
)
MATRIX_SQUARES = RowKernels(
    "adafactor_squares",
    "adafactor_update.comp",
    "in row g, in f32 r, in row m, in f32 r_sum, out f32 squares, in f32 state, uint rows, uint cols, uint has_state",
    subgroups=ROW_SUBGROUPS,
    FACTORED=1,
    APPLY=0,
)
_APPLY = (
    "in f32 update_sum, in f32 p_sum, in f32 state, step, uint rows, uint cols, uint n, uint has_state, "
    "uint relative, float eps, float threshold, float weight_decay"
)
MATRIX = RowKernels(
    "adafactor_matrix",
    "adafactor_update.comp",
    f"inout row p, in row g, in f32 r, in row m, in f32 r_sum, {_APPLY}",
    subgroups=ROW_SUBGROUPS,
    FACTORED=1,
    APPLY=1,
)
FLAT = RowKernels(
    "adafactor_flat",
    "adafactor_update.comp",
    f"inout row p, in row g, in row m, {_APPLY}",
    subgroups=ROW_SUBGROUPS,
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


class AdafactorOp(Op):
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
        p, g, first, second, given = inputs
        assert p is not None and g is not None and first is not None
        if not p.size:
            return
        sums, squares, rest = outputs[0], outputs[1], list(outputs[2:])
        state, has_state = (p, 0) if given is None else (given, 1)
        update_sum, p_sum = (sums, 4), (sums, 8)
        parts, chunk = square_parts(p.size)
        if relative is not None:
            p_squares = rest.pop(0)
            kernel = SQUARES.pick(p.size, p)
            gpu.dispatch(kernel, row_groups(gpu, kernel, parts), p, p_squares, p.size, parts, chunk)
            _total(gpu, p_squares, p_sum)
        last = (has_state, int(relative is not None), relative or 0.0, threshold, weight_decay)
        if second is None:
            kernel = VECTOR.pick(p.size, g, first)
            groups = row_groups(gpu, kernel, parts)
            gpu.dispatch(kernel, groups, g, first, squares, state, p.size, parts, chunk, has_state, eps)
            _total(gpu, squares, update_sum)
            kernel = FLAT.pick(p.size, p, g, first)
            gpu.dispatch(kernel, groups, p, g, first, update_sum, p_sum, state, parts, chunk, p.size, *last)
            return
        rows, cols = first.size, second.size
        kernel = ROWS.pick(cols, g)
        groups = row_groups(gpu, kernel, rows)
        gpu.dispatch(kernel, groups, g, first, state, rows, cols, has_state, eps)
        partials = rest.pop(0)
        chunks, chunk_rows = column_chunks(rows, cols)
        flat = flat_groups(chunks * column_groups(cols))
        gpu.dispatch(COLUMN_SQUARES.pick(cols, g), flat, g, partials, rows, cols, chunks, chunk_rows)
        kernel = COLUMNS.pick(cols, second)
        flat = flat_groups(column_groups(cols))
        gpu.dispatch(kernel, flat, partials, second, state, rows, cols, chunks, has_state, eps)
        _total(gpu, first, sums)
        kernel = MATRIX_SQUARES.pick(cols, g, second)
        gpu.dispatch(kernel, groups, g, first, second, sums, squares, state, rows, cols, has_state)
        _total(gpu, squares, update_sum)
        kernel = MATRIX.pick(cols, p, g, second)
        gpu.dispatch(kernel, groups, p, g, first, second, sums, update_sum, p_sum, state, rows, cols, p.size, *last)

    def kernels(self) -> Iterable[Kernel]:
        for family in (ROWS, COLUMN_SQUARES, COLUMNS, VECTOR, MATRIX_SQUARES, MATRIX, FLAT, SQUARES, SUM):
            yield from family.both()


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
