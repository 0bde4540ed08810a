"""The engine that computes nothing: it allocates from the real pools without a device and adds up cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..memory_pool import DEFAULT_BLOCK_BYTES, NullBlockSource, PoolRange
from .compute_engine import Rule
from .dtypes import numpy_dtype
from .op import Cost, Op
from .pooled_engine import PooledEngine
from .tensor import Tensor


class PlanEngine(PooledEngine):
    """Plans a step of any model on any machine: same ops, same allocations as VulkanEngine, nothing computed.

    `computes` is False, so parameters skip drawing their starting values and a model of 70 billion parameters is
    planned in seconds. `cost` is the sum over all ops so far; `counts` how often each op ran. Downloads give zeros.
    """

    computes = False

    def __init__(self, *, block_bytes: int = DEFAULT_BLOCK_BYTES) -> None:
        super().__init__(NullBlockSource(), NullBlockSource(), block_bytes=block_bytes)
        self.name = "plan"
        self.cost = Cost(0, 0, 0)
        self.counts: dict[str, int] = {}
        self._in_batch = False

    def _address(self, range_: PoolRange) -> int:
        return 0

    def _launch(self, op: Op, rule: Rule, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any) -> None:
        self.cost = Cost(*(a + b for a, b in zip(self.cost, rule.cost, strict=True)))
        self.counts[op.name] = self.counts.get(op.name, 0) + 1

    def _write(self, tensor: Tensor, data: np.ndarray) -> None:
        pass  # nothing is stored

    def download(self, tensor: Tensor) -> np.ndarray:
        """Zeros of the tensor's shape."""
        return np.zeros(tensor.shape, numpy_dtype(tensor.dtype))

    def begin_batch(self) -> None:
        """Marks a batch."""
        if self._in_batch:
            raise RuntimeError("begin_batch inside a batch: call end_batch first")
        self._in_batch = True

    def flush_batch(self) -> None:
        """Nothing is ever pending here."""

    def end_batch(self) -> None:
        """Ends the batch."""
        self._in_batch = False
