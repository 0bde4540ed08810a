"""Tensors whose op failed after it was called: nobody shall take what lies in their memory for their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .errors import NeverMadeError
from .tensor import Storage, Tensor

if TYPE_CHECKING:
    from .fusion import Call


class NeverMade:
    """Tensors whose op failed after it was called, for an error of their own when somebody uses them."""

    def __init__(self) -> None:
        self._reasons: WeakKeyDictionary[Storage, str] = WeakKeyDictionary()

    def __bool__(self) -> bool:
        return len(self._reasons) > 0

    def note(self, calls: Sequence[Call], error: BaseException) -> None:
        """These calls will not be launched (again)."""
        what = f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]
        for call in calls:
            for tensor in (tensor for part in call.single_calls() for tensor in part.written()):
                origin = tensor.storage.origin
                storage = None if origin is None else origin()
                if storage is not None:
                    self._reasons[storage] = f"{' + '.join(call.parts)} failed ({what:.200})"

    def check(self, what: str, tensors: Sequence[Tensor | None]) -> None:
        """Raises NeverMadeError for a tensor whose values are not there."""
        for tensor in tensors:
            if tensor is not None and (reason := self._reasons.get(tensor.storage)):
                raise NeverMadeError(
                    f"{what}: the values of a tensor {tensor.dtype} {tensor.shape} were never made, since {reason}: "
                    "make it again, or upload values"
                )

    def overwritten(self, tensor: Tensor) -> None:
        """All of a tensor is written from the host."""
        if tensor.nbytes == tensor.storage.nbytes:
            self._reasons.pop(tensor.storage, None)
