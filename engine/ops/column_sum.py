"""Sum over rows (bias gradients), and the two-stage column reduction that norm weight gradients use too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .loop_kernels import LoopCall, LoopOp, every_text, launch_loops, rows_by_loops
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


@lru_cache(maxsize=4096)
def column_chunks(rows: int, cols: int) -> tuple[int, int]:
    """(chunks, rows a chunk) of a sum over rows. They fix the order of the sum, so they depend on the shape alone."""
    chunks = min(-(-rows // _ROWS_A_CHUNK), _MAX_CHUNKS, max(1, _PARTIAL_ELEMENTS // cols))
    chunks = max(1, chunks, -(-rows // _MAX_CHUNK_ROWS))
    chunk_rows = max(1, -(-rows // chunks))
    return max(1, -(-rows // chunk_rows)), chunk_rows


def check_output(op: str, name: str, spec: TensorSpec, cols: int) -> None:
    """Raises ValueError unless the spec is a float32 [cols]."""
    check_spec(op, name, spec, (cols,))


def column_partials(name: str, pointers: str, kind: int) -> RowKernels:
    """The kernel of `ColumnPartials`. pointers: with the extents of all."""
    args = pointers + ", uint rows, uint cols, uint chunks, uint chunk_rows"
    return rows_by_loops(name, "column_partials.comp", args, _case, KIND=kind)


def _case(pieces: int, width: int) -> tuple[int, dict[str, int]]:
    """Chunks of nine rows, but for the last."""
    cols, chunks = 8 + width, pieces // 3 + 1
    return 3 * chunks, {"rows": 9 * chunks - 2, "cols": cols, "chunks": chunks, "chunk_rows": 9}


def partials_call(kernel: Kernel, rows: int, cols: int, pointers: Sequence[Tensor]) -> LoopCall:
    """A call of such a kernel."""
    chunks, chunk_rows = column_chunks(rows, cols)
    pieces = chunks * column_groups(cols)
    return LoopCall(kernel, pieces, min(rows, chunk_rows), pointers, (rows, cols, chunks, chunk_rows))


class ColumnPartials:
    """First stage: partial sums of chunks of rows (shaders/column_partials.comp); second stage: their sum in order.

    kind: what is summed, as in the shader; pointers: its pointer arguments with their extents, x and partials among
    them. num_outputs: arrays of partials.
    """

    def __init__(self, name: str, pointers: str, *, kind: int, num_outputs: int = 1) -> None:
        self.stage = column_partials(name, pointers, kind)
        self.num_outputs = num_outputs

    def kernels(self) -> Iterable[Kernel]:
        """All kernels of both stages."""
        return (*every_text(self.stage.both()), *TOTAL.both())

    def scratch(self, x: TensorSpec) -> Sequence[TensorSpec]:
        """The partial sums, [num_outputs, chunks, cols]."""
        cols = x.shape[-1]
        return (TensorSpec((self.num_outputs, column_chunks(x.size // cols, cols)[0], cols)),)

    def loop_call(self, inputs: Sequence[Tensor], x: Tensor, partials: Tensor) -> LoopCall:
        """The first stage. inputs, x: as for `launch`."""
        # Tensors of one number a row are read element by element: their alignment does not matter.
        kernel = self.stage.pick(x.shape[-1], *[t for t in inputs if t.shape == x.shape])
        return partials_call(kernel, x.size // x.shape[-1], x.shape[-1], (*inputs, partials))

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
        call = self.loop_call(inputs, x, partials)
        cols, chunks = x.shape[-1], partials.shape[1]
        launch_loops(gpu, call)
        for i, out in enumerate(outputs):
            part = (partials, 4 * i * chunks * cols)
            gpu.dispatch(
                TOTAL.pick(cols, out), flat_groups(column_groups(cols)), part, out, cols, chunks, int(accumulate)
            )


COLUMN_SUM_PARTIALS = ColumnPartials("column_sum", "in row x[rows * cols], out row partials[chunks * cols]", kind=0)


class ColumnSumOp(LoopOp):
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

    def loop_calls(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **_: Any) -> Sequence[LoopCall]:
        return (COLUMN_SUM_PARTIALS.loop_call(inputs[:1], inputs[0], outputs[0]),)

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
