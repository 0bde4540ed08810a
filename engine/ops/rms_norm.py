"""RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import Op, register
from ..tensor import Tensor, TensorSpec
from .column_sum import ColumnPartials, check_output
from .row_kernels import ROW_SUBGROUPS, RowKernels, check_spec, row_groups, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

FORWARD = RowKernels(
    "rms_norm",
    "rms_norm.comp",
    "in row x, in row weight, out row y, out f32 rstd, uint rows, uint cols, float eps",
    subgroups=ROW_SUBGROUPS,
    APPLY=0,
)
APPLY = RowKernels(
    "rms_norm_apply",
    "rms_norm.comp",
    "in row x, in row weight, in f32 rstd, out row y, uint rows, uint cols",
    subgroups=ROW_SUBGROUPS,
    APPLY=1,
)
BACKWARD = RowKernels(
    "rms_norm_backward",
    "rms_norm_backward.comp",
    "in row dy, in row x, in row weight, in f32 rstd, inout row dx, uint rows, uint cols, uint accumulate",
    subgroups=ROW_SUBGROUPS,
)
WEIGHT_BACKWARD = ColumnPartials(
    "rms_norm_weight_backward", "in row dy, in row x, in f32 rstd, out row partials", kind=1
)


class RmsNormOp(Op):
    """y and the reciprocal root mean square of each row."""

    name = "rms_norm"

    def outputs(self, x: TensorSpec, weight: TensorSpec, *, eps: float) -> Sequence[TensorSpec]:
        _, cols = rows_and_columns(self.name, "x", x, loops=2)
        check_spec(self.name, "weight", weight, (cols,))
        if not eps >= 0:
            raise ValueError(f"rms_norm: eps must be 0 or more, not {eps}")
        return x, TensorSpec(x.shape[:-1])

    def flops(self, x: TensorSpec, weight: TensorSpec, *, eps: float) -> int:
        return 4 * x.size

    def reference(self, x: Any, weight: Any, *, eps: float) -> Sequence[Any]:
        rstd = 1 / np.sqrt(np.square(x).mean(axis=-1) + x.dtype.type(eps))
        return x * rstd[..., None] * weight, rstd

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, eps: float) -> None:
        (x, weight), (y, rstd) = inputs, outputs
        cols = x.shape[-1]
        kernel = FORWARD.pick(cols, x, weight, y)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rstd.size), x, weight, y, rstd, rstd.size, cols, eps)

    def kernels(self) -> Iterable[Kernel]:
        return FORWARD.both()


class RmsNormApplyOp(Op):
    """y again, from the kept rstd."""

    name = "rms_norm_apply"

    def outputs(self, x: TensorSpec, weight: TensorSpec, rstd: TensorSpec) -> Sequence[TensorSpec]:
        _, cols = rows_and_columns(self.name, "x", x, loops=2)
        check_spec(self.name, "weight", weight, (cols,))
        check_spec(self.name, "rstd", rstd, x.shape[:-1])
        return (x,)

    def flops(self, x: TensorSpec, weight: TensorSpec, rstd: TensorSpec) -> int:
        return 2 * x.size

    def reference(self, x: Any, weight: Any, rstd: Any) -> Sequence[Any]:
        return (x * rstd[..., None] * weight,)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        (x, weight, rstd), (y,) = inputs, outputs
        cols = x.shape[-1]
        kernel = APPLY.pick(cols, x, weight, y)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rstd.size), x, weight, rstd, y, rstd.size, cols)

    def kernels(self) -> Iterable[Kernel]:
        return APPLY.both()


class RmsNormBackwardOp(Op):
    """Gradient of x, added to `into` where that is given."""

    name = "rms_norm_backward"
    writes = (4,)

    def outputs(
        self, dy: TensorSpec, x: TensorSpec, weight: TensorSpec, rstd: TensorSpec, into: TensorSpec | None
    ) -> Sequence[TensorSpec]:
        _, cols = rows_and_columns(self.name, "x", x, loops=2)
        check_spec(self.name, "dy", dy, x.shape)
        check_spec(self.name, "weight", weight, (cols,))
        check_spec(self.name, "rstd", rstd, x.shape[:-1])
        if into is not None:
            check_spec(self.name, "into", into, x.shape)
            return ()
        return (x,)

    def flops(self, dy: TensorSpec, x: TensorSpec, *others: TensorSpec | None) -> int:
        return 9 * x.size

    def reference(self, dy: Any, x: Any, weight: Any, rstd: Any, into: Any) -> Sequence[Any]:
        scale = rstd[..., None]
        g, xhat = dy * weight, x * scale
        dx = scale * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True))
        if into is None:
            return (dx,)
        into += dx
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        dy, x, weight, rstd, into = inputs
        dx = into if into is not None else outputs[0]
        cols = x.shape[-1]
        kernel = BACKWARD.pick(cols, dy, x, weight, dx)
        groups = row_groups(gpu, kernel, rstd.size)
        gpu.dispatch(kernel, groups, dy, x, weight, rstd, dx, rstd.size, cols, int(into is not None))

    def kernels(self) -> Iterable[Kernel]:
        return BACKWARD.both()


class RmsNormWeightBackwardOp(Op):
    """Gradient of weight, written or added to a given tensor."""

    name = "rms_norm_weight_backward"
    writes = (3,)

    def outputs(
        self, dy: TensorSpec, x: TensorSpec, rstd: TensorSpec, out: TensorSpec, *, accumulate: bool
    ) -> Sequence[TensorSpec]:
        _, cols = rows_and_columns(self.name, "x", x, loops=2)
        check_spec(self.name, "dy", dy, x.shape)
        check_spec(self.name, "rstd", rstd, x.shape[:-1])
        check_output(self.name, "out", out, cols)
        return ()

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        assert specs[1] is not None
        return WEIGHT_BACKWARD.scratch(specs[1])

    def flops(self, dy: TensorSpec, x: TensorSpec, rstd: TensorSpec, out: TensorSpec, *, accumulate: bool) -> int:
        return 3 * x.size

    def reference(self, dy: Any, x: Any, rstd: Any, out: Any, *, accumulate: bool) -> Sequence[Any]:
        total = (dy * (x * rstd[..., None])).reshape(-1, x.shape[-1]).sum(axis=0)
        out[...] = out + total if accumulate else total
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool) -> None:
        (dy, x, rstd, out), (partials,) = inputs, outputs
        WEIGHT_BACKWARD.launch(gpu, (dy, x, rstd), x, partials, (out,), accumulate)

    def kernels(self) -> Iterable[Kernel]:
        return WEIGHT_BACKWARD.kernels()


RMS_NORM = register(RmsNormOp())
RMS_NORM_APPLY = register(RmsNormApplyOp())
RMS_NORM_BACKWARD = register(RmsNormBackwardOp())
RMS_NORM_WEIGHT_BACKWARD = register(RmsNormWeightBackwardOp())


def rms_norm(engine: ComputeEngine, x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """RMSNorm (Zhang & Sennrich 2019, equation 4, with eps under the root).

    x: [..., cols]; weight: [cols]. Returns (y [..., cols], rstd [...]), rstd = 1 / sqrt(mean(x^2) + eps).
    Raises ValueError for other shapes or types, or a negative eps.
    """
    y, rstd = engine.execute(RMS_NORM, (x, weight), eps=eps)
    return y, rstd


def rms_norm_apply(engine: ComputeEngine, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """x * rstd * weight: the y of `rms_norm`, to the bit, rebuilt from its rstd. x: [..., cols]; rstd: [...]."""
    return engine.execute(RMS_NORM_APPLY, (x, weight, rstd))[0]


def rms_norm_backward(
    engine: ComputeEngine, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, into: Tensor | None = None
) -> Tensor:
    """d_x [..., cols] of `rms_norm` from dy [..., cols], its inputs and its rstd [...].

    into [..., cols]: d_x is added to it, and it is returned. It must not overlap an input.
    Raises ValueError for shapes or types that do not fit.
    """
    made = engine.execute(RMS_NORM_BACKWARD, (dy, x, weight, rstd, into))
    return made[0] if into is None else into


def rms_norm_weight_backward(
    engine: ComputeEngine, dy: Tensor, x: Tensor, rstd: Tensor, out: Tensor, *, accumulate: bool = False
) -> None:
    """Writes d_weight [cols] of `rms_norm` into out; accumulate adds it to what out holds.

    Raises ValueError for shapes or types that do not fit.
    """
    engine.execute(RMS_NORM_WEIGHT_BACKWARD, (dy, x, rstd, out), accumulate=accumulate)
