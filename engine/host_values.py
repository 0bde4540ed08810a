"""What a NumPy array becomes on its way into a tensor: the same values in the tensor's type, or an error."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .dtypes import bfloat16_bits, check_dtype, dtype_of_array, numpy_dtype
from .tensor import Tensor, TensorSpec


def checked_spec(shape: Sequence[int] | int, dtype: str) -> TensorSpec:
    """A spec from user input; a number alone is one dimension.

    Raises TypeError for sizes that are no integers, ValueError for negative ones or more than 2^32 - 1 elements.
    """
    try:
        sizes = tuple(operator.index(n) for n in (shape if isinstance(shape, Sequence) else np.atleast_1d(shape)))
    except TypeError:
        raise TypeError(f"shape {shape!r:.60}: the sizes must be whole numbers") from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"negative size in shape {sizes}")
    if math.prod(sizes) >= 2**32:
        raise ValueError(f"shape {sizes} has 2^32 elements or more: kernels index with 32 bits; split the tensor")
    return TensorSpec(sizes, check_dtype(dtype))


def array_of(values: Any, dtype: str | None = None) -> tuple[np.ndarray, str]:
    """An array of numbers, and the tensor type it is stored as unless `dtype` says otherwise.

    Raises TypeError for a masked array, ValueError for what is not made of real numbers.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("cannot store a masked array: the mask would be lost; fill it first (array.filled(value))")
    if isinstance(values, Tensor) and dtype is None:
        dtype = values.dtype
    array = np.asarray(values)
    if array.dtype.kind == "b":
        raise ValueError("cannot store booleans: convert them to int32 or float32 first")
    if array.dtype.kind not in "iuf":
        hint = {"c": "take its real or imaginary part", "O": "are the rows of equal length, and all numbers?"}
        raise ValueError(
            f"cannot store an array of dtype {array.dtype}: real numbers are needed"
            + (f" ({hint[array.dtype.kind]})" if array.dtype.kind in hint else "")
        )
    return array, check_dtype(dtype) if dtype is not None else dtype_of_array(array)


def stored(array: np.ndarray, dtype: str, held: Any = None) -> np.ndarray:
    """The values of an array of numbers in a tensor's type, contiguous, in this machine's byte order.

    Floats are rounded to nearest; int32 and uint32 take whole numbers in range; bfloat16 takes floats, or its bits as
    uint16. held: NumPy type to use in place of the tensor type's own (the float64 oracle).

    Raises ValueError for values that do not fit.
    """
    if dtype == "bfloat16" and array.dtype != np.uint16:
        if array.dtype.kind != "f":
            raise ValueError(f"cannot store {array.dtype} as bfloat16: give floats, or the bits as uint16")
        array = bfloat16_bits(_rounded(array, np.dtype(np.float32), dtype))
    elif dtype in ("int32", "uint32"):
        _check_whole(array, dtype)
    return _rounded(array, numpy_dtype(dtype) if held is None else held, dtype)


def _check_whole(array: np.ndarray, dtype: str) -> None:
    info = np.iinfo(dtype)
    if not array.size or (array.dtype.kind in "iu" and np.can_cast(array.dtype, info.dtype)):
        return
    low, high = array.min().item(), array.max().item()  # NaN where there is one
    if not (info.min <= low and high <= info.max):
        raise ValueError(f"values {low}..{high} do not fit {dtype}")
    if array.dtype.kind == "f":
        broken = array != np.trunc(array)
        if broken.any():
            raise ValueError(
                f"cannot store {array[broken][0]} as {dtype}: round the array first (numpy.rint), or leave it float32"
            )


def _rounded(array: np.ndarray, target: Any, dtype: str) -> np.ndarray:
    # Casts say by way of the error state when a finite value becomes infinite.
    try:
        with np.errstate(over="raise", invalid="ignore", under="ignore"):
            return np.asarray(array, dtype=target, order="C")
    except FloatingPointError:
        raise ValueError(f"a value of the array is too large for {dtype}: clip it first (numpy.clip)") from None
