"""The check behind VKFOLD_CHECK_RECOMPUTE: is what was recomputed what it was?"""

from __future__ import annotations

import hashlib

from ..engine.errors import RecomputeMismatchError
from ..engine.tensor import Tensor


class RecomputeCheck:
    """Hashes of a forward's tensors, to compare with what recomputation makes of them. Waits for every tensor: slow.

    recomputing: whether what is seen now is compared instead of remembered.
    """

    def __init__(self) -> None:
        self.recomputing = False
        self.num_compared = 0
        self._hashes: dict[str, bytes] = {}

    def see(self, name: str, tensor: Tensor) -> None:
        """Remember a tensor, or while recomputing compare it."""
        if self.recomputing:
            self.compare(name, tensor)
        else:
            self._hashes[name] = _hash(tensor)

    def compare(self, name: str, tensor: Tensor) -> None:
        """Raise RecomputeMismatchError, naming the tensor, when it is not what was seen before."""
        known = self._hashes.get(name)
        if known is None:
            return
        self.num_compared += 1
        if known != _hash(tensor):
            raise RecomputeMismatchError(
                f"{name}, recomputed in backward, is not what forward made (shape {tensor.shape}): a weight, an input "
                f"or the step parameters changed between the two, or an op does not repeat its bits"
            )


def _hash(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.numpy().tobytes()).digest()
