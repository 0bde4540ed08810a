"""Conversion between element types. 16-bit types are for storage: kernels work on their bits, two elements a word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import bfloat16_bits, bfloat16_values, itemsize
from ..input_checks import require_tensors
from ..kernel import Kernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .piece_kernels import PieceCall, PieceOp, by_pieces

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3}  # as in the shader

KERNELS = {
    (source, target): by_pieces(
        f"cast_{source}_{target}",
        "cast.comp",
        "in u32 x[n + 1], out u32 y[n], uint n, uint source_start",
        lambda pieces: (pieces, {"n": 2 * pieces - 1, "source_start": 1}),
        SOURCE=_CODES[source],
        TARGET=_CODES[target],
    )
    for source in _CODES
    for target in _CODES
    if source != target
}


class CastOp(PieceOp):
    """The elements in another type."""

    name = "cast"

    def outputs(self, x: TensorSpec, *, source: str, dtype: str) -> Sequence[TensorSpec]:
        for name in (source, dtype):
            if name not in _CODES:
                raise ValueError(f"cast: cannot convert from or to {name!r}: use one of {', '.join(_CODES)}")
        return (TensorSpec(x.shape, dtype),)

    def flops(self, x: TensorSpec, *, source: str, dtype: str) -> int:
        return 0

    def reference(self, x: Any, *, source: str, dtype: str) -> Sequence[Any]:
        if source == dtype:
            return (x.copy(),)
        values = bfloat16_values(x) if source == "bfloat16" else x
        if dtype == "float32":
            return (values if values.dtype.kind == "f" else values.astype(np.float32),)
        if dtype == "bfloat16":
            return (bfloat16_bits(values.astype(np.float32)),)
        if dtype == "float16":
            return (values.astype(np.float32).astype(np.float16),)
        wide = np.nan_to_num(np.trunc(values.astype(np.float64)), nan=0.0, posinf=2.0**31, neginf=-(2.0**31))
        return (np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32),)

    def piece_call(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, source: str, dtype: str) -> PieceCall:
        (x,), (y,) = inputs, outputs
        start = x.address % 4 // 2 if itemsize(source) == 2 else 0
        return PieceCall(KERNELS[source, dtype], -(-x.size // 2), ((x, -2 * start), y), (x.size, start))

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **settings: Any) -> None:
        if settings["source"] == settings["dtype"]:
            gpu.copy(inputs[0], outputs[0], inputs[0].nbytes)
        else:
            super().launch(gpu, inputs, outputs, **settings)

    def kernels(self) -> Iterable[Kernel]:
        return KERNELS.values()


CAST = register(CastOp())


def cast(engine: ComputeEngine, x: Tensor, dtype: str) -> Tensor:
    """The elements of x as float32, float16, bfloat16 or int32, in a new tensor of the same shape.

    Floats are rounded to nearest even by way of float32; overflow gives infinity, NaN stays NaN. To int32: towards
    zero, saturating, NaN gives 0. Raises ValueError for another type.
    """
    require_tensors("cast", x=x)
    return engine.execute(CAST, (x,), source=x.dtype, dtype=dtype)[0]
