"""What ops over the rows of a float32 array share: shape checks, and a kernel in two load widths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..kernel import Kernel
from ..kernel_text import KernelText
from ..tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from ..recorder import Recorder

# lavapipe 22.3 ends an invocation's loops after 65,535 rounds in all, nested or one after the other; a round of a loop
# over a row takes 4 columns x at least 4 lanes.
MAX_LOOP_COLUMNS = 2**20 - 16
ROW_SUBGROUPS = 4  # rows a workgroup
FLAT_SIZE = 64  # invocations a workgroup of kernels without rows


def rows_and_columns(op: str, name: str, spec: TensorSpec, *, loops: int = 0) -> tuple[int, int]:
    """(rows, columns) of a float32 array whose last dimension is the row.

    loops: how often the op's kernels run over a row. Raises ValueError for another type, no dimension, no column, or
    more columns than so many loops can pass.
    """
    check_dtype_of(op, name, spec, "float32")
    most = MAX_LOOP_COLUMNS // loops if loops else 2**32 - 1
    if not spec.shape or not 0 < spec.shape[-1] <= most:
        raise ValueError(f"{op}: {name} of shape {spec.shape} needs 1 to {most} columns")
    return math.prod(spec.shape[:-1]), spec.shape[-1]


def check_dtype_of(op: str, name: str, spec: TensorSpec, dtype: str) -> None:
    """Raises ValueError when the element type is not `dtype`."""
    if spec.dtype != dtype:
        raise ValueError(f"{op}: {name} is {spec.dtype}, needed is {dtype}")


def check_spec(op: str, name: str, spec: TensorSpec, shape: tuple[int, ...], dtype: str = "float32") -> None:
    """Raises ValueError when the shape or the element type differs."""
    check_dtype_of(op, name, spec, dtype)
    if spec.shape != shape:
        raise ValueError(f"{op}: {name} has shape {spec.shape}, needed is {shape}")


class RowKernels:
    """One kernel with 16-byte loads and with 4-byte loads; both add in the same order, so the choice changes no bit.

    args: as for `Kernel`, with "row" for pointers that shaders/rows.glsl reads and writes by load4 and store4.
    subgroups: rows a workgroup, one a subgroup; 0 for kernels that go by invocation, `FLAT_SIZE` a workgroup. more:
    what else a `Kernel` is given.
    """

    def __init__(
        self,
        name: str,
        source: str | KernelText,
        args: str,
        *,
        subgroups: int = 0,
        more: Mapping[str, Any] | None = None,
        **defines: int,
    ) -> None:
        given = dict(more or {})

        def make(suffix: str, vec4: int) -> Kernel:
            values: dict[str, Any] = {"VEC4": vec4, **defines}
            typed = args.replace(" row ", " f32x4 " if vec4 else " f32 ")
            if subgroups:
                return Kernel(name + suffix, source, typed, subgroups=subgroups, defines=values, **given)
            return Kernel(name + suffix, source, typed, local_size=FLAT_SIZE, defines=values, **given)

        self.wide = make("_vec4", 1)
        self.narrow = make("_scalar", 0)

    def both(self) -> tuple[Kernel, Kernel]:
        """The two kernels."""
        return self.wide, self.narrow

    def pick(self, cols: int, *tensors: Tensor) -> Kernel:
        """The wide kernel where every row of every tensor starts on 16 bytes."""
        if cols % 4 == 0 and not any(t.address % 16 for t in tensors):
            return self.wide
        return self.narrow


def row_groups(gpu: Recorder, kernel: Kernel, rows: int) -> int:
    """Workgroups for one subgroup a row."""
    return -(-rows // (kernel.workgroup_size(gpu.subgroup_size, gpu.max_invocations) // gpu.subgroup_size))


def flat_groups(invocations: int) -> int:
    """Workgroups for so many invocations of a flat kernel."""
    return -(-invocations // FLAT_SIZE)


def column_groups(cols: int) -> int:
    """Groups of four columns in a row."""
    return -(-cols // 4)
