"""The contract of every engine: the ops as methods, tensors, batches, memory statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .dtypes import numpy_dtype
from .host_copy import HostCopy
from .host_memory import process_bytes
from .host_values import array_of, checked_spec, stored
from .input_checks import check_inputs, described, input_name, not_a_tensor
from .never_made import NeverMade
from .one_thread import OneThread
from .op import Cost, Op
from .overlap_check import check_overlap, shares_storage
from .replay_stats import ReplayStats
from .setting_checks import check_settings, whole_settings
from .step_parameters import StepParameters
from .tensor import Tensor, TensorSpec
from .verbs import OpVerbs

_MOST_RULES = 8192
PROCESS, MEMORY_BUDGET = "process memory", "VK_EXT_memory_budget"


class DriverMemory(NamedTuple):
    """Bytes this process uses as somebody else counts them. source: "VK_EXT_memory_budget" or "process memory"."""

    source: str
    used_bytes: int


class Rule:
    """What an op's shape rule said for one combination of inputs and settings, kept because steps repeat."""

    __slots__ = (
        "choice_state",
        "cost",
        "made",
        "outputs",
        "ready",
        "ready_aligned",
        "scratch",
        "settings",
        "used",
        "whole",
        "writes",
    )

    def __init__(self, op: Op, specs: Sequence[TensorSpec | None], settings: dict[str, Any]) -> None:
        self.outputs = tuple(op.outputs(*specs, **settings))
        self.made = tuple((spec, spec.nbytes) for spec in self.outputs)  # with bytes, which each call asks for
        self.scratch = tuple(op.scratch(*specs, **settings))
        self.writes = tuple(op.written(len(specs), **settings))
        if type(op).cost is Op.cost:
            self.cost: Cost = op.cost_of(specs, settings, self.outputs, self.writes)
        else:
            self.cost = op.cost(*specs, **settings)
        self.ready: set[Any] = set()  # alignments of inputs for which the kernels are compiled; launcher.py
        self.ready_aligned = False  # whether they are compiled for inputs that all start on 16 bytes
        self.choice_state: Any = None  # for which that holds, of ops with variants; variant_choice.py
        # names; 2.0 finds the rule of 2, and no kernel takes it
        self.whole = tuple([name for name in whole_settings(op) if name in settings])
        self.settings = settings
        self.used = False  # whether a call asked for it since this was set to False; remembered_calls.py


class ComputeEngine(OpVerbs, OneThread, ABC):
    """Carries out ops on tensors. Use one as a context manager, or call `close()`.

    Ops are recorded; a batch opens by itself and is submitted by `flush_batch`, `end_batch` or a download. Values are
    the same whatever the batching. One engine serves one thread: see `take_over`.
    """

    computes: bool = True  # False: values are never looked at, only shapes (planning)

    def __init__(self) -> None:
        super().__init__()
        self.known_rules: dict[Any, Rule] = {}  # by op, specs of the inputs, names and values of the settings
        self.never_made: NeverMade | None = None  # tensors whose op failed after it was called; None: none ever
        self.step_parameters = StepParameters()
        self.offloaded_bytes = 0  # copied to host memory by `offload` so far
        self.restored_bytes = 0  # copied back by `restore` so far

    # -- ops ---------------------------------------------------------------------------------------------------------
    def rule_of(self, op: Op, inputs: Sequence[Tensor | None], settings: dict[str, Any]) -> Rule:
        """Shape rule and cost of one call.

        Raises ValueError for shapes or engines that do not fit, and for an input that is written and overlaps another;
        TypeError for inputs that are no tensors, and settings of the wrong type.
        """
        self.check_open()
        try:
            specs = [None if t is None else t.spec for t in inputs]
        except AttributeError:
            check_inputs(op, inputs)
            raise
        key = (op, *specs, *settings, *settings.values())
        try:
            rule = self.known_rules.get(key)
        except TypeError:  # a setting that cannot be hashed
            check_settings(op, settings)
            raise
        if rule is None:
            check_inputs(op, inputs)
            check_settings(op, settings)
            rule = Rule(op, specs, settings)
            if len(self.known_rules) >= _MOST_RULES:  # a setting that differs from call to call
                self.known_rules.clear()
            self.known_rules[key] = rule
        rule.used = True
        for name in rule.whole:
            if type(settings[name]) is not int:
                check_settings(op, settings)
        for tensor in inputs:
            if tensor is not None and tensor.engine is not self:
                raise ValueError(
                    f"{op.name}: {input_name(op, inputs, tensor)} lives on another engine, {tensor.engine.label}; this "
                    f"is {self.label}: copy it with engine.tensor(t.numpy())"
                )
        if rule.writes and shares_storage(inputs):
            check_overlap(op, rule.writes, inputs, settings)
        if self.never_made is not None:
            self.never_made.check(op.name, inputs)
        return rule

    @abstractmethod
    def execute(self, op: Op, inputs: tuple[Tensor | None, ...], **settings: Any) -> tuple[Tensor, ...]:
        """Carry out one op; returns its outputs. Ops' own functions call this."""

    def dispatch(self, kernel: Any, num_groups: int, *args: Any) -> None:
        """Run a kernel of your own; only VulkanEngine can. Raises NotImplementedError."""
        raise NotImplementedError(
            f"dispatch: {self.label} runs no hand-written kernels, which need a Vulkan device: use VulkanEngine(), "
            "or write the arithmetic as engine.map or engine.fold"
        )

    # -- tensors -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """A tensor with undefined contents. Raises ValueError for a bad shape or dtype."""

    @abstractmethod
    def download(self, tensor: Tensor) -> np.ndarray:
        """The tensor's values as a fresh array. Submits what is recorded and waits for it."""

    def tensor(self, values: Any, dtype: str | None = None) -> Tensor:
        """A tensor with these values: float64 arrays become float32, integers int32 (uint32 arrays uint32), a tensor is
        copied.

        Floats are rounded to nearest, integers above 2^24 that are stored as float32 too. bfloat16 takes floats, or its
        bits as uint16. Raises ValueError for booleans, complex numbers, strings and objects, for integers outside the
        type's range, for NaN and fractions stored as integers, and for finite floats that would become infinite.
        """
        array, dtype = array_of(values, dtype)
        spec = checked_spec(array.shape, dtype)
        data = stored(array, dtype, self._host_dtype(dtype))
        tensor = self.empty(spec.shape, dtype)
        self._write(tensor, data)
        return tensor

    def upload(self, tensor: Tensor, array: Any) -> None:
        """Overwrite a tensor with an array of its shape; the array may change as soon as this returns.

        Raises ValueError when the shapes differ, and for values that do not fit the tensor's type as `tensor` does.
        """
        self.check_open()
        self._write(tensor, self._stored_for(tensor, array))

    def upload_all(self, tensors: Mapping[str, Tensor], arrays: Mapping[str, Any]) -> None:
        """`upload` of each tensor's array of the same name: all of them, or nothing is changed.

        Raises what `upload` does, with the name, before the first is written.
        """
        self.check_open()
        data = {}
        for name, tensor in tensors.items():
            try:
                data[name] = self._stored_for(tensor, arrays[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from error
        for name, tensor in tensors.items():
            self._write(tensor, data[name])

    def _stored_for(self, tensor: Tensor, array: Any) -> np.ndarray:
        self.check_tensor("upload", tensor)
        array, _ = array_of(array, tensor.dtype)
        if array.shape != tensor.shape:
            raise ValueError(f"cannot upload an array of shape {array.shape} into a tensor of shape {tensor.shape}")
        return stored(array, tensor.dtype, self._host_dtype(tensor.dtype))

    def check_tensor(self, what: str, tensor: Any) -> None:
        """Raises TypeError for what is no tensor, ValueError for one of another engine."""
        if not isinstance(tensor, Tensor):
            raise not_a_tensor(what, "the argument", tensor)
        if tensor.engine is not self:
            raise ValueError(f"{what}: the tensor lives on another engine, {tensor.engine.label}; this is {self.label}")

    def check_made(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Raises NeverMadeError for a tensor whose op failed after it was called."""
        if self.never_made is not None:
            self.never_made.check(what, tensors)

    def _host_dtype(self, dtype: str) -> Any:
        """The NumPy type that tensors of this type are held in."""
        return numpy_dtype(dtype)

    @abstractmethod
    def _write(self, tensor: Tensor, data: np.ndarray) -> None:
        """Carry out `upload` with data that fits: shape, type, contiguous."""

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """A tensor of zeros."""
        tensor = self.empty(shape, dtype)
        self.zero_(tensor)
        return tensor

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
        self.check_open()
        if not isinstance(parameters, StepParameters):
            raise TypeError(f"set_step_parameters: {described(parameters)}, where StepParameters(...) are needed")
        self.step_parameters = parameters

    # -- host memory -------------------------------------------------------------------------------------------------
    def offload(self, tensor: Tensor) -> HostCopy:
        """Copy a tensor's values to host memory; give the tensor up afterwards to free its device memory.

        Does not wait: the copy takes place in the order of recording.
        """
        self.check_open()
        self.check_tensor("offload", tensor)
        self.check_made("offload", (tensor,))
        copy = self._copy_to_host(tensor)
        self.offloaded_bytes += tensor.nbytes
        return copy

    def restore(self, copy: HostCopy) -> Tensor:
        """A tensor with the values that were offloaded. Does not wait.

        As long as that tensor exists, restoring again returns it and copies nothing. Raises TypeError for what is no
        copy, ValueError for one of another engine.
        """
        self.check_open()
        if not isinstance(copy, HostCopy):
            raise TypeError(f"restore: {described(copy)}, where what engine.offload(tensor) returned is needed")
        if copy.engine is not self:
            raise ValueError(f"restore: the copy was made by another engine, {copy.engine.label}; this is {self.label}")
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

    def staging_bytes(self) -> int:
        """Bytes of device and driver memory beside the pools, never counted with theirs; 0 where there is none."""
        return 0

    def driver_memory(self) -> DriverMemory | None:
        """What others count of this process's memory, to be set beside `pool_stats`; None where nothing tells.

        It is more than the pools: staging, pipelines and command buffers are in it, and of process memory Python too.
        """
        used = process_bytes()
        return None if used is None else DriverMemory(PROCESS, used)

    @abstractmethod
    def reset_peak(self) -> None:
        """Start the peak statistics anew from what is live."""

    def replay_stats(self) -> ReplayStats:
        """How many training steps were recorded, captured and replayed (docs/replay.md). Only Vulkan replays."""
        return ReplayStats()

    def start_step(self) -> None:
        """A training step begins: the blocks it takes are told from those of other work. TrainingStep calls it."""

    def end_step(self) -> None:
        """A training step is over: idle blocks that it used are kept for the next. TrainingStep calls it."""

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
        return f"{type(self).__name__}({self.label})"
