"""Sum over rows (bias gradients), and the two-stage column reduction that norm weight gradients use too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import Op, register
from ..tensor import Tensor, TensorSpec
from .row_kernels import RowKernels, check_spec, column_groups, flat_groups, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_ROWS_A_CHUNK = 32  # at least, while there are fewer than _MAX_CHUNKS
_MAX_CHUNKS = 128
_PARTIAL_ELEMENTS = 2**18  # bounds the scratch at 1 MiB an array, one row of partials at least
_MAX_CHUNK_ROWS = 2**15  # lavapipe 22.3 ends an invocation's loops after 65,535 rounds

TOTAL = RowKernels(
    "column_total", "column_total.comp", "in row partials, inout row y, uint cols, uint chunks, uint accumulate"
)


def column_chunks(rows: int, cols: int) -> tuple[int, int]:
    """(chunks, rows a chunk) of a sum over rows. They fix the order of the sum, so they depend on the shape alone."""
    chunks = min(-(-rows // _ROWS_A_CHUNK), _MAX_CHUNKS, max(1, _PARTIAL_ELEMENTS // cols))
    chunks = max(1, chunks, -(-rows // _MAX_CHUNK_ROWS))
    chunk_rows = max(1, -(-rows // chunks))
    return max(1, -(-rows // chunk_rows)), chunk_rows


def check_output(op: str, name: str, spec: TensorSpec, cols: int) -> None:
    """Raises ValueError unless the spec is a float32 [cols]."""
    check_spec(op, name, spec, (cols,))


class ColumnPartials:
    """First stage: partial sums of chunks of rows (shaders/column_partials.comp); second stage: their sum in order.

    kind: what is summed, as in the shader; pointers: its pointer arguments, x and partials among them. num_outputs:
    arrays of partials.
    """

    def __init__(self, name: str, pointers: str, *, kind: int, num_outputs: int = 1) -> None:
        args = pointers + ", uint rows, uint cols, uint chunks, uint chunk_rows"
        self.stage = RowKernels(name, "column_partials.comp", args, KIND=kind)
        self.num_outputs = num_outputs

    def kernels(self) -> Iterable[Kernel]:
        """All kernels of both stages."""
        return (*self.stage.both(), *TOTAL.both())

    def scratch(self, x: TensorSpec) -> Sequence[TensorSpec]:
        """The partial sums, [num_outputs, chunks, cols]."""
        cols = x.shape[-1]
        return (TensorSpec((self.num_outputs, column_chunks(x.size // cols, cols)[0], cols)),)

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Tensor],
        x: Tensor,
        partials: Tensor,
        outputs: Sequence[Tensor],
        accumulate: bool,
    ) -> None:
        """Record both stages. inputs: the kernel's pointers before partials; x: the one of them with all rows."""
        cols = x.shape[-1]
        rows = x.size // cols
        chunks, chunk_rows = column_chunks(rows, cols)
        # Tensors of one number a row are read element by element: their alignment does not matter.
        kernel = self.stage.pick(cols, *[t for t in inputs if t.shape == x.shape])
        groups = flat_groups(chunks * column_groups(cols))
        gpu.dispatch(kernel, groups, *inputs, partials, rows, cols, chunks, chunk_rows)
        for i, out in enumerate(outputs):
            part = (partials, 4 * i * chunks * cols)
            gpu.dispatch(
                TOTAL.pick(cols, out), flat_groups(column_groups(cols)), part, out, cols, chunks, int(accumulate)
            )


COLUMN_SUM_PARTIALS = ColumnPartials("column_sum", "in row x, out row partials", kind=0)


class ColumnSumOp(Op):
    """Sum over all dimensions but the last, written or added to a given tensor."""

    name = "column_sum"
    writes = (1,)

    def outputs(self, x: TensorSpec, out: TensorSpec, *, accumulate: bool) -> Sequence[TensorSpec]:
        _, cols = rows_and_columns(self.name, "x", x)
        check_output(self.name, "out", out, cols)
        return ()

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        assert specs[0] is not None
        return COLUMN_SUM_PARTIALS.scratch(specs[0])

    def flops(self, x: TensorSpec, out: TensorSpec, *, accumulate: bool) -> int:
        return x.size

    def reference(self, x: Any, out: Any, *, accumulate: bool) -> Sequence[Any]:
        total = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(axis=0)
        out[...] = out + total if accumulate else total
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool) -> None:
        (x, out), (partials,) = inputs, outputs
        COLUMN_SUM_PARTIALS.launch(gpu, (x,), x, partials, (out,), accumulate)

    def kernels(self) -> Iterable[Kernel]:
        return COLUMN_SUM_PARTIALS.kernels()


COLUMN_SUM = register(ColumnSumOp())


def column_sum(engine: ComputeEngine, x: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """Writes the sum of x [..., cols] over all rows into out [cols]; accumulate adds it to what out holds.

    Summed in a fixed order that depends on the shape alone. Raises ValueError for shapes or types that do not fit.
    """
    engine.execute(COLUMN_SUM, (x, out), accumulate=accumulate)
