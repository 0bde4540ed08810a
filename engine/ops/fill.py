"""Set every element of a tensor to one value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import bfloat16_bits, itemsize
from ..input_checks import described, require_tensors
from ..kernel import Kernel
from ..op import Op, register
from ..setting_checks import is_number
from ..tensor import Tensor, TensorSpec
from .row_kernels import FLAT_SIZE, flat_groups

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

HALVES = Kernel(
    "fill_halves", "fill_halves.comp", "inout u32 y, uint n, uint start, uint pattern", local_size=FLAT_SIZE
)


def record_fill(gpu: Recorder, x: Tensor, element_bits: int) -> None:
    """Record a fill with the bits of one element. A 16-bit view may share its first and last word with a neighbour."""
    if itemsize(x.dtype) == 4:
        gpu.fill(x, element_bits)
        return
    if x.size:
        start = x.address % 4 // 2
        words = -(-(start + x.size) // 2)
        gpu.dispatch(HALVES, flat_groups(words), (x, -2 * start), x.size, start, element_bits * 0x10001)


class FillOp(Op):
    """x = value."""

    name = "fill_"
    writes = (0,)

    def outputs(self, x: TensorSpec, *, bits: int) -> Sequence[TensorSpec]:
        return ()

    def flops(self, x: TensorSpec, *, bits: int) -> int:
        return 0

    def reference(self, x: Any, *, bits: int) -> Sequence[Any]:
        # The oracle holds float32 in eight bytes: read the bits as the declared type first.
        raw = np.uint32(bits)
        if x.dtype == np.float16:
            x[...] = np.uint16(bits).view(np.float16)
        elif x.dtype.kind == "f":
            x[...] = raw.view(np.float32)
        else:
            x[...] = np.uint16(bits) if x.dtype.itemsize == 2 else raw.view(x.dtype)
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, bits: int) -> None:
        record_fill(gpu, inputs[0], bits)

    def kernels(self) -> Iterable[Kernel]:
        return (HALVES,)


FILL = register(FillOp())


def element_bits(value: float, dtype: str) -> int:
    """The bits of a value as one element, rounded to nearest even. Raises ValueError for a value that does not fit."""
    if not is_number(value):
        raise TypeError(f"fill_: the value is {described(value)}, needed is a number")
    if dtype in ("int32", "uint32"):
        info = np.iinfo(dtype)
        if not math.isfinite(value) or int(value) != value or not info.min <= value <= info.max:
            raise ValueError(f"fill_: {value} is no {dtype}")
        return int(value) & 0xFFFFFFFF
    with np.errstate(over="ignore"):
        rounded = np.float16(value) if dtype == "float16" else np.float32(value)
    if np.isinf(rounded) and not math.isinf(value):
        raise ValueError(f"fill_: {value} does not fit {dtype}")
    if dtype == "bfloat16":
        return int(bfloat16_bits(rounded))
    return int(rounded.view(np.uint16 if dtype == "float16" else np.uint32))


def fill_(engine: ComputeEngine, x: Tensor, value: float) -> Tensor:
    """Sets every element of x, of any shape and type, to value, in place; returns x.

    Raises ValueError when x holds integers and value is none, and for a value out of range of the type.
    """
    require_tensors("fill_", x=x)
    engine.execute(FILL, (x,), bits=element_bits(value, x.dtype))
    return x
