"""Two kernels of a family on the same memory: every word is compared, those between the operands too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from .step_parameters import SIZE_BYTES, StepParameters

if TYPE_CHECKING:
    from .kernel import Kernel
    from .kernel_arguments import Argument
    from .recorder import Recorder

_GUARD = 1024  # words around every operand, at least
_STEP = StepParameters(9, 3, 1, 0.01, 0.5, 0.1, 0.2, 0.3)
T = TypeVar("T")

Record = Callable[["Recorder", T, "Mapping[str, int]"], None]  # aside, with one kernel, at the operands' addresses


def operands_of(
    kernel: Kernel, scalars: Mapping[str, float], whole: Callable[[Argument, int], np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """What lies behind a kernel's pointers, of the extents that it declares for these scalars: numbers above 0, and
    where they are no float32, `whole` of the argument and the number of words."""
    operands = {}
    for arg in kernel.args:
        if arg.is_pointer and arg.type != "step":
            size = arg.elements({name: int(value) for name, value in scalars.items()}) * arg.element_bytes // 4
            is_float = arg.type.startswith("f32")
            operands[arg.name] = (
                np.abs(rng.standard_normal(size)).astype(np.float32) if is_float else whole(arg, size).ravel()
            )
    return operands


def difference(
    gpu: Recorder,
    operands: Mapping[str, np.ndarray],
    record: Record[T],
    kernels: tuple[T, T],
    *,
    shift: int = 0,
    guard: int = _GUARD,
) -> str:
    """What differs after `record` with the first kernel from after it with the second, in words; "" for nothing.

    operands: float32 or int32, inputs and outputs alike: what a kernel does not write must stay as it is. They begin on
    16 bytes, and `shift` words behind that. guard: words around each, more than a kernel of this check could miss its
    place by. NaN equals NaN.
    """
    starts: dict[str, int] = {}
    total = SIZE_BYTES // 4 + guard
    for name, array in operands.items():
        starts[name] = total + shift
        total += -(-(array.size + shift) // 4) * 4 + guard
    begin = np.random.default_rng(7).standard_normal(total).astype(np.float32)
    begin[: SIZE_BYTES // 4].view(np.uint8)[: len(_STEP.pack())] = np.frombuffer(_STEP.pack(), np.uint8)
    for name, array in operands.items():
        begin[starts[name] : starts[name] + array.size].view(array.dtype)[:] = array
    got, expected = (_after(gpu, begin, starts, record, kernel) for kernel in kernels)
    equal = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    wrong = np.flatnonzero(~equal)
    if not len(wrong):
        return ""
    word = int(wrong[0])
    name = [name for name, start in starts.items() if start <= word + guard // 2][-1]
    values = f"{name}[{word - starts[name]}]: {got[word]!r} instead of {expected[word]!r}"
    return f"{len(wrong)} words differ from the base variant's, the first at {values}"


def _after(gpu: Recorder, begin: np.ndarray, starts: Mapping[str, int], record: Record[T], kernel: T) -> np.ndarray:
    """All words after a run. begin: before it."""
    aside = gpu.aside()
    try:
        buffer = aside.own_buffer(begin.nbytes, host_visible=True)
        memory = np.frombuffer(buffer.mapping, np.float32, begin.size)
        memory[:] = begin
        aside.step_address = buffer.address
        record(aside, kernel, {name: buffer.address + 4 * start for name, start in starts.items()})
        aside.submit()
        aside.wait()
        return memory.copy()
    finally:
        aside.close()
