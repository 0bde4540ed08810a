"""What ops and hand-written kernels were given, checked before anything is recorded."""

from __future__ import annotations

import numbers
import operator
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import itemsize
from .kernel import Kernel
from .kernel_arguments import Argument
from .signatures import POSITIONAL_OR_KEYWORD, VAR_POSITIONAL, parameters_of
from .tensor import Tensor

if TYPE_CHECKING:
    from .op import Op

_ELEMENT = {"f32": "float32", "f32x4": "float32", "i32": "int32"}  # pointers to words, u32..., take any type
_RANGES = {"uint": (0, 2**32 - 1), "int": (-(2**31), 2**31 - 1)}


def described(value: Any) -> str:
    """A value for a message: its type, and the shape where it has one."""
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {value.shape}"
    if value is None:
        return "None"
    return f"{value!r:.40} of type {type(value).__name__}"


@lru_cache(maxsize=1024)
def _parameters(op: Op, count: int) -> list[tuple[str, bool]]:
    """(name, may be None) of the inputs, from the op's shape rule."""
    found: list[tuple[str, bool]] = []
    for name, kind, annotation in parameters_of(op.outputs):
        optional = "None" in annotation or "Any" in annotation
        if kind is VAR_POSITIONAL:
            found += [(f"input {i}", optional) for i in range(len(found), count)]
        elif kind is POSITIONAL_OR_KEYWORD:
            found.append((name, optional))
    return found


def input_name(op: Op, inputs: Sequence[Any], value: Any) -> str:
    """What the op calls this input."""
    return input_name_at(op, len(inputs), next(i for i, candidate in enumerate(inputs) if candidate is value))


def input_name_at(op: Op, count: int, position: int) -> str:
    """What the op calls the input at this position of `count`."""
    return _parameters(op, count)[position][0]


def check_inputs(op: Op, inputs: Sequence[Any]) -> None:
    """Raises TypeError for an input that is no tensor, and for None where one is needed."""
    if set(map(type, inputs)) == {Tensor}:
        return
    for value, (name, optional) in zip(inputs, _parameters(op, len(inputs)), strict=False):
        if not isinstance(value, Tensor) and not (value is None and optional):
            raise not_a_tensor(op.name, name, value)


def require_tensors(op: str, **values: Any) -> None:
    """For verbs that look at a tensor before its op does. Raises TypeError for a value that is none."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise not_a_tensor(op, name, value)


def require_list(op: str, name: str, value: Any) -> None:
    """Raises TypeError for what should have been a list, of tensors or of numbers."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{op}: {name} is {described(value)}, a list is needed")


def not_a_tensor(op: str, name: str, value: Any) -> TypeError:
    """The error for an input that should have been a tensor."""
    remedy = "" if value is None else ": make one with engine.tensor(...)"
    return TypeError(f"{op}: {name} is {described(value)}, a tensor is needed{remedy}")


def check_dispatch(engine: Any, kernel: Kernel, num_groups: Any, args: Sequence[Any]) -> None:
    """Arguments of a hand-written kernel against what it declares.

    Raises TypeError for a value of the wrong kind or element type, ValueError for a number out of range, a tensor of
    another engine, or one that is smaller than the kernel declares; each names kernel, argument, value and remedy.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"dispatch: the kernel is {described(kernel)}: make one with Kernel(name, source, args, ...)")
    declared = [argument for argument in kernel.args if argument.type != "step"]
    if len(args) != len(declared):
        names = ", ".join(argument.name for argument in declared)
        raise TypeError(f"kernel {kernel.name!r} takes {len(declared)} arguments ({names}), {len(args)} were given")
    if not isinstance(num_groups, (int, np.integer)):
        raise TypeError(f"kernel {kernel.name!r}: the number of workgroups is {described(num_groups)}: give an int")
    for argument, value in zip(declared, args, strict=True):
        where = f"kernel {kernel.name!r}: argument {argument.name!r}"
        if argument.is_pointer:
            _check_pointer(engine, where, argument, value)
        else:
            _check_scalar(where, argument, value)
    scalars = {argument.name: value for argument, value in zip(declared, args, strict=True) if not argument.is_pointer}
    for argument, value in zip(declared, args, strict=True):
        if argument.extent:
            _check_extent(f"kernel {kernel.name!r}: argument {argument.name!r}", argument, value, scalars)


def _check_pointer(engine: Any, where: str, argument: Argument, value: Any) -> None:
    tensor, offset = value if isinstance(value, tuple) and len(value) == 2 else (value, 0)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{where} is {described(tensor)}, declared {argument.access} {argument.type}: give a tensor "
            "(engine.tensor(...)) or a pair of a tensor and an offset in bytes"
        )
    if tensor.engine is not engine:
        raise ValueError(f"{where} lives on another engine, {tensor.engine.label}; this is {engine.label}")
    wanted = _ELEMENT.get(argument.type)
    if wanted is not None and tensor.dtype != wanted:
        raise TypeError(
            f"{where} is declared {argument.type} and got a {tensor.dtype} tensor of shape {tensor.shape}: "
            f"cast it to {wanted}, or declare the argument u32 to work on its bits"
        )
    if not isinstance(offset, (int, np.integer)):
        raise TypeError(f"{where}: the offset is {described(offset)}: give an int, in bytes")
    if not 0 <= offset <= tensor.nbytes or offset % itemsize(tensor.dtype):
        raise ValueError(
            f"{where}: offset {offset} of a tensor of {tensor.nbytes} bytes: it must lie in the tensor and be a "
            f"multiple of {itemsize(tensor.dtype)}"
        )


def _check_scalar(where: str, argument: Argument, value: Any) -> None:
    if argument.type == "float":
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{where} is declared float and got {described(value)}: give a number")
        try:
            struct.pack("<f", float(value))
        except OverflowError:
            raise ValueError(f"{where} is declared float and got {value!r:.40}: it does not fit float32") from None
        return
    low, high = _RANGES[argument.type]
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{where} is declared {argument.type} and got {described(value)}: give an int") from None
    if not low <= number <= high:
        raise ValueError(f"{where} is declared {argument.type} and got {number}: it must be {low} to {high}")


def _check_extent(where: str, argument: Argument, value: Any, scalars: dict[str, Any]) -> None:
    tensor, offset = value if isinstance(value, tuple) else (value, 0)
    needed = argument.elements(scalars)
    has_bytes = tensor.nbytes - offset
    if needed * argument.element_bytes > has_bytes:
        given = ", ".join(f"{name} = {scalars[name]}" for name in argument.extent_names)
        raise ValueError(
            f"{where} is declared with {argument.extent} elements of {argument.type}"
            f"{f', {given}: {needed}' if given else ''}; the tensor of shape {tensor.shape} has "
            f"{has_bytes // argument.element_bytes} from there on: give a larger tensor or smaller sizes"
        )
