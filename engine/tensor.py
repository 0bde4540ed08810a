"""A tensor: shape, element type, and a share in one storage of one engine."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .dtypes import bfloat16_values, itemsize
from .tensor_part import contiguous_part

if TYPE_CHECKING:
    from .compute_engine import ComputeEngine


_FLOAT32_OVERFLOW = (2 - 2.0**-24) * 2.0**127  # the least number that rounds to infinity


class TensorSpec(NamedTuple):
    """Shape and element type: what a shape rule sees of a tensor, and what it returns."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without alignment."""
        return math.prod(self.shape) * itemsize(self.dtype)


class Storage:
    """Owned bytes of one engine. The last reference that goes away gives them back.

    `handle` is the engine's own: a pool range on Vulkan and Plan, an array on the CPU. `address` is the device
    address of the first byte (0 where there is none).
    """

    __slots__ = ("__weakref__", "_give_back", "address", "handle", "nbytes", "origin", "tag", "twin")

    def __init__(self, handle: Any, nbytes: int, address: int, give_back: Any) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.address = address
        self.tag = ""
        self.twin: Storage | None = None  # the same bytes without owning them; see fusion.py
        self.origin: Any = None  # of a twin: gives the storage that owns the bytes, None once that is gone
        self._give_back = give_back

    def __del__(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self)


class Tensor:
    """A dense row-major array on an engine. Made by `engine.tensor(array)` and by every op; never resized.

    `a + b`, `a - b`, `a * b`, `a / b`, `a @ b` and `-a` record ops on the tensor's engine; b is a tensor of one shape
    with a, or a number (but for @). `a == b` asks whether they are one object: tensors are keys of dicts. Compare
    values with NumPy: `np.asarray(a)` copies the values; NumPy's functions of two arrays refuse tensors.
    """

    __slots__ = ("__weakref__", "_extent", "address", "engine", "offset", "spec", "storage", "twin")
    __array_ufunc__ = None  # `array + tensor` comes here, to say what to do, instead of copying to the host unseen

    def __init__(self, engine: ComputeEngine, spec: TensorSpec, storage: Storage, offset: int = 0) -> None:
        self.engine = engine
        self.spec = spec
        self.storage = storage
        self.offset = offset  # bytes into the storage
        self.address = storage.address + offset
        self.twin: Tensor | None = None  # the same bytes without a share in the storage; see fusion.py
        self._extent: tuple[int, int] | None = None

    @property
    def extent(self) -> tuple[int, int]:
        """Address of the first byte and of the byte behind the last."""
        found = self._extent
        if found is None:
            found = self._extent = self.address, self.address + self.spec.nbytes
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions, slowest first."""
        return self.spec.shape

    @property
    def dtype(self) -> str:
        """Element type, a key of `vkfold.engine.dtypes.DTYPES`."""
        return self.spec.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without alignment."""
        return self.spec.nbytes

    def reshape(self, *shape: int | tuple[int, ...]) -> Tensor:
        """The same bytes under another shape of equal size, numbers or one tuple; one -1 is worked out.

        Shares the storage. Raises ValueError when the sizes differ.
        """
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return self._reshaped(tuple(operator.index(n) for n in wanted))  # type: ignore[arg-type]

    def _reshaped(self, shape: tuple[int, ...]) -> Tensor:
        if shape.count(-1) == 1:
            known = -math.prod(shape)
            if known > 0 and self.size % known == 0:
                shape = tuple(self.size // known if n == -1 else n for n in shape)
        if any(n < 0 for n in shape) or math.prod(shape) != self.size:
            raise ValueError(f"cannot reshape {self.shape} ({self.size} elements) to {shape}: the sizes differ")
        return Tensor(self.engine, TensorSpec(shape, self.dtype), self.storage, self.offset)

    def rows(self, start: int, stop: int) -> Tensor:
        """Elements start..stop-1 of the first dimension. Shares the storage.

        Raises IndexError when the range is empty or outside the tensor.
        """
        if not self.shape or not 0 <= start < stop <= self.shape[0]:
            raise IndexError(f"rows {start}:{stop} of a tensor of shape {self.shape}")
        row_bytes = self.nbytes // self.shape[0]
        spec = TensorSpec((stop - start, *self.shape[1:]), self.dtype)
        return Tensor(self.engine, spec, self.storage, self.offset + start * row_bytes)

    def numpy(self) -> np.ndarray:
        """The values as a fresh NumPy array; bfloat16 as its bits, in uint16. Submits what is recorded and waits."""
        return self.engine.download(self)

    def item(self) -> float:
        """The only element as a Python number. Raises ValueError when there is more than one, or none."""
        if self.size != 1:
            raise ValueError(f"one element is needed to make a number, this tensor has shape {self.shape}")
        return self._values().reshape(-1)[0].item()

    # -- Python's operators ------------------------------------------------------------------------------------------
    def __add__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.engine.add(self, other)
        return self.engine.affine(self, 1.0, _number("+", other))

    __radd__ = __add__

    def __sub__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.engine.subtract(self, other)
        return self.engine.affine(self, 1.0, -_number("-", other))

    def __rsub__(self, other: float) -> Tensor:
        return self.engine.affine(self, -1.0, _number("-", other))

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.engine.multiply(self, other)
        return self.engine.scale(self, _number("*", other))

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.engine.divide(self, other)
        return self.engine.divide_by(self, _number("/", other))

    def __rtruediv__(self, other: float) -> Tensor:
        return self.engine.divide_into(self, _number("/", other))

    def __neg__(self) -> Tensor:
        return self.engine.scale(self, -1.0)

    def __pos__(self) -> Tensor:
        return self

    def __matmul__(self, other: Tensor) -> Tensor:
        if not isinstance(other, Tensor):
            raise _no_operand("@", other)
        return self.engine.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        raise _no_operand("@", other)

    # -- parts -------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __getitem__(self, key: Any) -> Tensor:
        """A part that lies in one piece, as a view: whole numbers first, then at most one slice, without a step.

        `x[2]`, `x[-1]`, `x[1:3]`, `x[0, 4]`, `x[0, 1:3]`, `x[...]`. Shares the storage: writing to the part in place
        writes to the tensor. Raises IndexError outside the shape, ValueError for a part that does not lie in one piece
        (a step, columns), TypeError for other kinds of index.
        """
        first, shape = contiguous_part(self.shape, key)
        offset = self.offset + first * itemsize(self.dtype)
        return Tensor(self.engine, TensorSpec(shape, self.dtype), self.storage, offset)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Overwrite a part (as `self[key]`) with a number, with a tensor of its shape, or with an array of its shape.

        Raises ValueError when the shapes differ and for values that do not fit the type.
        """
        part = self[key]
        if isinstance(value, numbers.Real):
            self.engine.fill_(part, value)  # type: ignore[arg-type]
        elif not isinstance(value, Tensor):
            self.engine.upload(part, value)
        elif value.shape != part.shape:
            raise ValueError(f"cannot put a tensor of shape {value.shape} into a part of shape {part.shape}")
        else:
            self.engine.copy_into(part, value)

    def __iter__(self) -> Iterator[Tensor]:
        """The rows, as views."""
        return (self[i] for i in range(len(self)))

    # -- numbers and arrays ------------------------------------------------------------------------------------------
    def __bool__(self) -> bool:
        """Whether the only element is not 0. Raises ValueError for any other number of elements."""
        if self.size != 1:
            raise ValueError(
                f"the truth of a tensor of shape {self.shape} is not defined: use `is None`, `len(t)` or `t.size`"
            )
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The values for NumPy, always a copy; bfloat16 as float32. Raises ValueError for copy=False."""
        if copy is False:
            raise ValueError("a tensor's values lie on the device: numpy.asarray(tensor) has to copy them")
        values = self._values()
        return values if dtype is None else values.astype(dtype, copy=False)

    def _values(self) -> np.ndarray:
        return bfloat16_values(self.numpy()) if self.dtype == "bfloat16" else self.numpy()

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, device={self.engine.name})"


def _number(sign: str, value: Any) -> float:
    """A number for an operator. Raises TypeError for anything else, ValueError for one beyond float32."""
    if not isinstance(value, numbers.Real):
        raise _no_operand(sign, value)
    number = float(value)
    if math.isfinite(number) and abs(number) >= _FLOAT32_OVERFLOW:
        raise ValueError(f"{sign} {value}: the number does not fit float32")
    return number


def _no_operand(sign: str, value: Any) -> TypeError:
    if isinstance(value, (np.ndarray, list, tuple)):
        return TypeError(
            f"{sign} of a tensor and a {type(value).__name__}: make it a tensor first, with engine.tensor(...)"
        )
    expected = "a tensor" if sign == "@" else "a tensor or a number"
    return TypeError(f"{sign} of a tensor and {type(value).__name__}: {expected} is needed")


def nowhere(engine: ComputeEngine, specs: Sequence[TensorSpec], behind: Sequence[Tensor | None] = ()) -> list[Tensor]:
    """Tensors with addresses that are aligned and apart, and no memory: for launches that record nothing.

    behind: others of the kind, at lower addresses.
    """
    step = 256
    address = max([tensor.address + tensor.spec.nbytes for tensor in behind if tensor is not None], default=0)
    tensors = []
    for spec in specs:
        address = (address // step + 1) * step
        tensors.append(Tensor(engine, spec, Storage(None, spec.nbytes, address, None)))
        address += spec.nbytes
    return tensors
