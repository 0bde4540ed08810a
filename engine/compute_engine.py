"""The contract of every engine: the ops as methods, tensors, batches, memory statistics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .dtypes import check_dtype, dtype_of_array, numpy_dtype
from .host_copy import HostCopy
from .op import Cost, Op
from .step_parameters import StepParameters
from .tensor import Tensor, TensorSpec
from .verbs import OpVerbs


class Rule:
    """What an op's shape rule said for one combination of inputs and settings, kept because steps repeat."""

    __slots__ = ("cost", "outputs", "scratch")

    def __init__(self, op: Op, specs: Sequence[TensorSpec | None], settings: dict[str, Any]) -> None:
        self.outputs = tuple(op.outputs(*specs, **settings))
        self.scratch = tuple(op.scratch(*specs, **settings))
        self.cost: Cost = op.cost(*specs, **settings)


class ComputeEngine(OpVerbs, ABC):
    """Carries out ops on tensors. Use one as a context manager, or call `close()`.

    Ops are recorded; a batch opens by itself and is submitted by `flush_batch`, `end_batch` or a download. Values are
    the same whatever the batching.
    """

    name: str = ""
    computes: bool = True  # False: values are never looked at, only shapes (planning)

    def __init__(self) -> None:
        self._rules: dict[Any, Rule] = {}
        self.step_parameters = StepParameters()
        self.offloaded_bytes = 0  # copied to host memory by `offload` so far
        self.restored_bytes = 0  # copied back by `restore` so far
        self.closed = False

    # -- ops ---------------------------------------------------------------------------------------------------------
    def rule_of(self, op: Op, inputs: Sequence[Tensor | None], settings: dict[str, Any]) -> Rule:
        """Shape rule and cost of one call. Raises ValueError for shapes or engines that do not fit."""
        self.check_open()
        specs = [None if t is None else t.spec for t in inputs]
        key = (op, *specs, *settings.values())
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = Rule(op, specs, settings)
        for tensor in inputs:
            if tensor is not None and tensor.engine is not self:
                raise ValueError(f"{op.name}: an input lives on {tensor.engine.name}, this engine is {self.name}")
        return rule

    def check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError(f"the engine {self.name} is closed: its tensors are gone; make a new engine")

    @abstractmethod
    def execute(self, op: Op, inputs: tuple[Tensor | None, ...], **settings: Any) -> tuple[Tensor, ...]:
        """Carry out one op; returns its outputs. Ops' own functions call this."""

    # -- tensors -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """A tensor with undefined contents. Raises ValueError for a bad shape or dtype."""

    @abstractmethod
    def upload(self, tensor: Tensor, array: np.ndarray) -> None:
        """Overwrite a tensor with an array of its shape; the array may change as soon as this returns."""

    @abstractmethod
    def download(self, tensor: Tensor) -> np.ndarray:
        """The tensor's values as a fresh array. Submits what is recorded and waits for it."""

    def tensor(self, values: Any, dtype: str | None = None) -> Tensor:
        """A tensor with these values: float64 arrays become float32, every integer int32.

        Raises ValueError for a type that cannot be stored, or integers outside the type's range.
        """
        array = np.asarray(values)
        if array.dtype.kind == "b":
            raise ValueError("cannot store booleans: convert them to int32 or float32 first")
        dtype = check_dtype(dtype or dtype_of_array(array))
        if array.dtype.kind in "iu" and dtype in ("int32", "uint32") and array.size:
            info = np.iinfo(numpy_dtype(dtype))
            if array.min() < info.min or array.max() > info.max:
                raise ValueError(f"values {array.min()}..{array.max()} do not fit {dtype}")
        tensor = self.empty(array.shape, dtype)
        self.upload(tensor, array)
        return tensor

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """A tensor of zeros."""
        tensor = self.empty(shape, dtype)
        self.zero_(tensor)
        return tensor

    @staticmethod
    def checked_spec(shape: Sequence[int], dtype: str) -> TensorSpec:
        """A spec from user input. Raises ValueError for negative sizes or more than 2^32 - 1 elements."""
        sizes = tuple(int(n) for n in shape)
        if any(n < 0 for n in sizes):
            raise ValueError(f"negative size in shape {sizes}")
        if math.prod(sizes) >= 2**32:
            raise ValueError(f"shape {sizes} has 2^32 elements or more: kernels index with 32 bits; split the tensor")
        return TensorSpec(sizes, check_dtype(dtype))

    def checked_array(self, tensor: Tensor, array: np.ndarray) -> np.ndarray:
        """The array in the tensor's element type, contiguous. Raises ValueError when the shapes differ."""
        array = np.asarray(array)
        if array.shape != tensor.shape:
            raise ValueError(f"cannot upload an array of shape {array.shape} into a tensor of shape {tensor.shape}")
        return np.ascontiguousarray(array, dtype=numpy_dtype(tensor.dtype))

    # -- batches -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def begin_batch(self) -> None:
        """Start recording. Raises RuntimeError inside a batch that was begun and not ended."""

    @abstractmethod
    def flush_batch(self) -> None:
        """Submit what is recorded and go on recording; does not wait."""

    @abstractmethod
    def end_batch(self) -> None:
        """Submit, wait for everything submitted, and destroy what was waiting for that."""

    @contextmanager
    def batch(self) -> Iterator[None]:
        """`with engine.batch():` is begin_batch and end_batch."""
        self.begin_batch()
        try:
            yield
        finally:
            self.end_batch()

    def set_step_parameters(self, parameters: StepParameters) -> None:
        """Values that ops recorded from now on read: seed, step, micro-batch, learning rate, ..."""
        self.step_parameters = parameters

    # -- host memory -------------------------------------------------------------------------------------------------
    def offload(self, tensor: Tensor) -> HostCopy:
        """Copy a tensor's values to host memory; give the tensor up afterwards to free its device memory.

        Does not wait: the copy takes place in the order of recording.
        """
        copy = self._copy_to_host(tensor)
        self.offloaded_bytes += tensor.nbytes
        return copy

    def restore(self, copy: HostCopy) -> Tensor:
        """A tensor with the values that were offloaded. Does not wait.

        As long as that tensor exists, restoring again returns it and copies nothing.
        """
        tensor = copy.restored
        if tensor is None:
            tensor = copy.restored = self._copy_from_host(copy)
            self.restored_bytes += tensor.nbytes
        return tensor

    def start_copies(self) -> None:
        """Hand the copies recorded so far to the device now; later ones are then waited for apart from them."""

    @abstractmethod
    def _copy_to_host(self, tensor: Tensor) -> HostCopy:
        """Carry out `offload`."""

    @abstractmethod
    def _copy_from_host(self, copy: HostCopy) -> Tensor:
        """Carry out `restore`."""

    # -- memory ------------------------------------------------------------------------------------------------------
    def note_kind(self, tensor: Tensor, kind: str, label: str = "") -> None:
        """Say what a tensor is for, where an allocation ledger listens; nothing elsewhere."""

    @contextmanager
    def parameter_pool(self) -> Iterator[None]:
        """Tensors made inside live long (parameters, moments): they get a pool of their own."""
        yield

    @abstractmethod
    def pool_stats(self) -> dict[str, Any]:
        """Statistics of each pool by name. Never empty. "host" (of `offload`) is there once it was used."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start the peak statistics anew from what is live."""

    def finish_step(self) -> int:
        """To be called after each training step: keep the blocks it used, return other idle ones; bytes returned.

        Waits for nothing. What is kept changes no value and no placement of a step that is like the last one.
        """
        return 0

    def release_idle_pool_blocks(self) -> int:
        """Return wholly idle blocks to the driver; bytes returned. Waits for nothing: safe inside a batch."""
        return 0

    # -- life --------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Wait for the device and give everything back. Tensors of this engine are dead afterwards."""
        self.closed = True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"
