"""Element types a tensor can have, and what they are called in NumPy and GLSL."""

from __future__ import annotations

from typing import Any

import numpy as np

# name -> (bytes an element, NumPy type that holds the same bits)
DTYPES: dict[str, tuple[int, Any]] = {
    "float32": (4, np.dtype(np.float32)),
    "int32": (4, np.dtype(np.int32)),
    "uint32": (4, np.dtype(np.uint32)),
    "float16": (2, np.dtype(np.float16)),
    "bfloat16": (2, np.dtype(np.uint16)),  # NumPy has no bfloat16: the raw upper half of a float32
}

_FROM_NUMPY = {
    "float64": "float32",
    "float32": "float32",
    "float16": "float16",
    "int32": "int32",
    "uint32": "uint32",
    "int64": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "int16": "int32",
    "int8": "int32",
}


def check_dtype(name: str) -> str:
    """Return `name` if it is a known element type; raise ValueError with the list otherwise."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: use one of {', '.join(DTYPES)}")
    return name


def itemsize(name: str) -> int:
    """Bytes of one element."""
    return DTYPES[name][0]


def numpy_dtype(name: str) -> Any:
    """The NumPy type that holds the same bits."""
    return DTYPES[name][1]


def dtype_of_array(array: np.ndarray) -> str:
    """The tensor type an array is stored as: float64 becomes float32, every integer int32."""
    try:
        return _FROM_NUMPY[array.dtype.name]
    except KeyError:
        raise ValueError(
            f"cannot store an array of dtype {array.dtype}: convert it to one of {', '.join(_FROM_NUMPY)} first"
        ) from None


def bfloat16_bits(values: Any) -> Any:
    """float32 values as the upper half of their bits, rounded to nearest even; NaN stays a quiet NaN."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, bits >> 16 | 0x40, rounded).astype(np.uint16)


def bfloat16_values(bits: Any) -> Any:
    """The float32 values of bfloat16 bits."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def rounded(values: Any, precision: str) -> Any:
    """Floats rounded to float32, float16 or bfloat16 (to nearest even), in the array's own type."""
    if precision == "float32":
        return values
    short = values.astype(np.float32)
    short = short.astype(np.float16) if precision == "float16" else bfloat16_values(bfloat16_bits(short))
    return short.astype(values.dtype)
