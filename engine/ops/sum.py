"""Sum of all elements, in a fixed order that depends on the size and the device's subgroup size alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .loop_kernels import LoopCall, LoopOp, every_text, launch_loops, rows_by_loops
from .row_kernels import ROW_SUBGROUPS, check_dtype_of

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_MIN_CHUNK = 4096  # elements
_MAX_PARTS = 16384


@lru_cache(maxsize=4096)
def sum_parts(n: int) -> tuple[int, int]:
    """(parts, elements a part); a part is a multiple of four elements so that each starts on 16 bytes."""
    fours = -(-n // (4 * _MAX_PARTS))
    chunk = max(_MIN_CHUNK, 4 * fours)
    return max(1, -(-n // chunk)), chunk


def parts_of(pieces: int, width: int) -> tuple[int, dict[str, int]]:
    """A case for kernels that sum parts of a flat array: the last part ends early."""
    return pieces, {"n": pieces * 2060 - (29 - width), "parts": pieces, "chunk": 2060}


PARTS_ARGS = "in row x[n], out f32 y[parts], uint n, uint parts, uint chunk"
KERNELS = rows_by_loops("sum", "sum.comp", PARTS_ARGS, parts_of, subgroups=ROW_SUBGROUPS)


class SumOp(LoopOp):
    """Sum of all elements."""

    name = "sum"

    def outputs(self, x: TensorSpec) -> Sequence[TensorSpec]:
        check_dtype_of(self.name, "x", x, "float32")
        return (TensorSpec((1,)),)

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        assert specs[0] is not None
        parts, _ = sum_parts(specs[0].size)
        return (TensorSpec((parts,)),) if parts > 1 else ()

    def flops(self, x: TensorSpec) -> int:
        return x.size

    def reference(self, x: Any) -> Sequence[Any]:
        return (np.sum(x, keepdims=True).reshape(1),)

    def loop_calls(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[LoopCall]:
        (x,), last = inputs, outputs[-1]  # outputs: the sum, and partial sums where there are several
        parts, chunk = sum_parts(x.size)
        return (LoopCall(KERNELS.pick(x.size, x), parts, min(x.size, chunk), (x, last), (x.size, parts, chunk)),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        (call,), target, last = self.loop_calls(inputs, outputs), outputs[0], outputs[-1]
        launch_loops(gpu, call)
        if call.pieces > 1:
            gpu.dispatch(KERNELS.pick(call.pieces, last), 1, last, target, call.pieces, 1, call.pieces)

    def kernels(self) -> Iterable[Kernel]:
        return every_text(KERNELS.both())


SUM = register(SumOp())


def sum_all(engine: ComputeEngine, x: Tensor) -> Tensor:
    """The sum of all elements of a float32 x of any shape, as a tensor of shape [1]; 0 for an empty one.

    Raises ValueError for another element type.
    """
    return engine.execute(SUM, (x,))[0]
