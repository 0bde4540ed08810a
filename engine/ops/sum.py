"""Sum of all elements, in a fixed order that depends on the size and the device's subgroup size alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import Op, register
from ..tensor import Tensor, TensorSpec
from .row_kernels import ROW_SUBGROUPS, RowKernels, check_dtype_of, row_groups

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_MIN_CHUNK = 4096  # elements
_MAX_PARTS = 16384

KERNELS = RowKernels("sum", "sum.comp", "in row x, out f32 y, uint n, uint parts, uint chunk", subgroups=ROW_SUBGROUPS)


def sum_parts(n: int) -> tuple[int, int]:
    """(parts, elements a part); a part is a multiple of four elements so that each starts on 16 bytes."""
    fours = -(-n // (4 * _MAX_PARTS))
    chunk = max(_MIN_CHUNK, 4 * fours)
    return max(1, -(-n // chunk)), chunk


class SumOp(Op):
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

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        x, target, last = (
            inputs[0],
            outputs[0],
            outputs[-1],
        )  # outputs: the sum, and partial sums where there are several
        parts, chunk = sum_parts(x.size)
        kernel = KERNELS.pick(x.size, x)
        gpu.dispatch(kernel, row_groups(gpu, kernel, parts), x, last, x.size, parts, chunk)
        if parts > 1:
            kernel = KERNELS.pick(parts, last)
            gpu.dispatch(kernel, 1, last, target, parts, 1, parts)

    def kernels(self) -> Iterable[Kernel]:
        return KERNELS.both()


SUM = register(SumOp())


def sum_all(engine: ComputeEngine, x: Tensor) -> Tensor:
    """The sum of all elements of a float32 x of any shape, as a tensor of shape [1]; 0 for an empty one.

    Raises ValueError for another element type.
    """
    return engine.execute(SUM, (x,))[0]
