"""A tensor's values in host memory, until they are wanted on the device again."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from .tensor import Storage, Tensor, TensorSpec

if TYPE_CHECKING:
    from .compute_engine import ComputeEngine


class HostCopy:
    """What `engine.offload(tensor)` returns and `engine.restore(copy)` takes. Never changes.

    The last reference that goes away gives the host memory back. `restored` is the tensor that was made from it, as
    long as somebody holds that: restoring again gives the same one.
    """

    __slots__ = ("_restored", "engine", "spec", "storage")

    def __init__(self, engine: ComputeEngine, spec: TensorSpec, storage: Storage) -> None:
        self.engine = engine
        self.spec = spec
        self.storage = storage
        self._restored: weakref.ref[Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.spec.nbytes

    @property
    def restored(self) -> Tensor | None:
        """The tensor made from this copy, where it still exists."""
        return None if self._restored is None else self._restored()

    @restored.setter
    def restored(self, tensor: Tensor) -> None:
        self._restored = weakref.ref(tensor)

    def __repr__(self) -> str:
        return f"HostCopy(shape={self.spec.shape}, dtype={self.spec.dtype})"
