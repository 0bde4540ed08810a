"""The engine that runs the NumPy references: float32 for use, float64 as the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..memory_pool import DirectLedger
from .compute_engine import ComputeEngine
from .dtypes import numpy_dtype
from .host_copy import HostCopy
from .host_values import checked_spec
from .op import Op
from .tensor import Storage, Tensor, TensorSpec


class CpuEngine(ComputeEngine):
    """Carries out every op at once with its reference.

    dtype: "float32", or "float64" to hold and compute every float32 tensor in double precision.
    Raises ValueError for another dtype.
    """

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        if dtype not in ("float32", "float64"):
            raise ValueError(f"CpuEngine computes in float32 or float64, not {dtype!r}")
        self.name = "cpu" if dtype == "float32" else "cpu-float64"
        self._float = np.dtype(dtype)
        self.ledger = DirectLedger()
        self.host_ledger = DirectLedger()  # of `offload`
        self._in_batch = False

    def _host_dtype(self, dtype: str) -> Any:
        return self._float if dtype == "float32" else numpy_dtype(dtype)

    def _wrap(self, spec: TensorSpec, array: np.ndarray) -> Tensor:
        if array.shape != spec.shape:
            raise AssertionError(f"reference gave shape {array.shape}, the shape rule said {spec.shape}")
        held = np.ascontiguousarray(array, dtype=self._host_dtype(spec.dtype)).reshape(-1)
        if held.base is not None or held is array:  # an op's output never shares memory with another tensor
            held = held.copy()
        self.ledger.allocate(held.nbytes)
        return Tensor(self, spec, Storage(held, held.nbytes, 0, self._give_back))

    def _give_back(self, storage: Storage) -> None:
        self._return(storage, self._free)

    def _free(self, storage: Storage) -> None:
        self.ledger.free(storage.nbytes)

    def _view(self, tensor: Tensor) -> np.ndarray:
        flat = tensor.storage.handle
        # Offsets count bytes of the declared type; the oracle holds float32 in 8 bytes an element.
        start = tensor.offset // numpy_dtype(tensor.dtype).itemsize
        return flat[start : start + tensor.size].reshape(tensor.shape)

    def execute(self, op: Op, inputs: tuple[Tensor | None, ...], **settings: Any) -> tuple[Tensor, ...]:
        """Run the op's reference."""
        rule = self.rule_of(op, inputs, settings)
        arrays = [None if t is None else self._view(t) for t in inputs]
        if op.takes_step:
            settings["step"] = self.step_parameters
        with np.errstate(all="ignore"):
            results = op.reference(*arrays, **settings)
        return tuple(self._wrap(spec, np.asarray(a)) for spec, a in zip(rule.outputs, results, strict=True))

    def empty(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """A tensor; filled with NaN (or the largest integer) so that a read before the first write shows."""
        self.check_open()
        spec = checked_spec(shape, dtype)
        held = self._host_dtype(dtype)
        fill = np.nan if held.kind == "f" else np.iinfo(held).max
        return self._wrap(spec, np.full(spec.shape, fill, held))

    def _write(self, tensor: Tensor, data: np.ndarray) -> None:
        self._view(tensor)[...] = data

    def download(self, tensor: Tensor) -> np.ndarray:
        """A copy of the tensor's values (float64 on the oracle)."""
        self.check_open()
        return self._view(tensor).copy()

    def _copy_to_host(self, tensor: Tensor) -> HostCopy:
        held = self._view(tensor).copy()
        self.host_ledger.allocate(held.nbytes)
        return HostCopy(self, tensor.spec, Storage(held, held.nbytes, 0, self._give_back_host))

    def _give_back_host(self, storage: Storage) -> None:
        self._return(storage, self._free_host)

    def _free_host(self, storage: Storage) -> None:
        self.host_ledger.free(storage.nbytes)

    def _copy_from_host(self, copy: HostCopy) -> Tensor:
        return self._wrap(copy.spec, copy.storage.handle.copy())

    def begin_batch(self) -> None:
        """Marks a batch; ops run at once all the same."""
        if self._in_batch:
            raise RuntimeError("begin_batch inside a batch: call end_batch first")
        self._in_batch = True

    def flush_batch(self) -> None:
        """Nothing is ever pending here."""

    def end_batch(self) -> None:
        """Ends the batch."""
        self._in_batch = False

    def pool_stats(self) -> dict[str, Any]:
        """The ledger of arrays, under "direct"; that of offloaded ones under "host", once there was one."""
        self._settle_frees()
        stats = {"direct": self.ledger.stats()}
        if self.host_ledger.total_blocks:
            stats["host"] = self.host_ledger.stats()
        return stats

    def reset_peak(self) -> None:
        """Start the peak anew from what is live."""
        self.ledger.reset_peak()
        self.host_ledger.reset_peak()
