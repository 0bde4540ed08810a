"""A tensor: shape, element type, and a share in one storage of one engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .dtypes import itemsize

if TYPE_CHECKING:
    from .compute_engine import ComputeEngine


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

    __slots__ = ("__weakref__", "_give_back", "address", "handle", "nbytes", "tag", "twin")

    def __init__(self, handle: Any, nbytes: int, address: int, give_back: Any) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.address = address
        self.tag = ""
        self.twin: Storage | None = None  # the same bytes without owning them; see fusion.py
        self._give_back = give_back

    def __del__(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self)


class Tensor:
    """A dense row-major array on an engine. Made by `engine.tensor(array)` and by every op; never resized.

    `a + b`, `a * b`, `a * 2.0`, `a @ b` record the op of that name on the tensor's engine.
    """

    __slots__ = ("__weakref__", "address", "engine", "offset", "spec", "storage")

    def __init__(self, engine: ComputeEngine, spec: TensorSpec, storage: Storage, offset: int = 0) -> None:
        self.engine = engine
        self.spec = spec
        self.storage = storage
        self.offset = offset  # bytes into the storage
        self.address = storage.address + offset

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

    def reshape(self, *shape: int) -> Tensor:
        """The same bytes under another shape of equal size; one -1 is worked out. Shares the storage.

        Raises ValueError when the sizes differ.
        """
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
        """The values as a fresh NumPy array. Submits what is recorded and waits for it."""
        return self.engine.download(self)

    def item(self) -> float:
        """The only element as a Python number. Raises ValueError when there is more than one."""
        if self.size != 1:
            raise ValueError(f"item() needs a tensor of one element, this one has shape {self.shape}")
        return self.numpy().reshape(-1)[0].item()

    def __add__(self, other: Tensor) -> Tensor:
        return self.engine.add(self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self.engine.multiply(self, other)
        return self.engine.scale(self, other)

    __rmul__ = __mul__

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.engine.matmul(self, other)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype}, device={self.engine.name})"
