"""LayerNorm (Ba, Kiros & Hinton 2016) over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias."""

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
    "layer_norm",
    "layer_norm.comp",
    "in row x, in row weight, in row bias, out row y, out f32 mean, out f32 rstd, uint rows, uint cols, float eps",
    subgroups=ROW_SUBGROUPS,
    APPLY=0,
)
APPLY = RowKernels(
    "layer_norm_apply",
    "layer_norm.comp",
    "in row x, in row weight, in row bias, in f32 mean, in f32 rstd, out row y, uint rows, uint cols",
    subgroups=ROW_SUBGROUPS,
    APPLY=1,
)
BACKWARD = RowKernels(
    "layer_norm_backward",
    "layer_norm_backward.comp",
    "in row dy, in row x, in row weight, in f32 mean, in f32 rstd, inout row dx, uint rows, uint cols, uint accumulate",
    subgroups=ROW_SUBGROUPS,
)
WEIGHT_BACKWARD = ColumnPartials(
    "layer_norm_weight_backward",
    "in row dy, in row x, in f32 mean, in f32 rstd, out row partials",
    kind=2,
    num_outputs=2,
)


def _check(op: str, x: TensorSpec, **others: TensorSpec) -> None:
    _, cols = rows_and_columns(op, "x", x, loops=3)
    shapes = {"dy": x.shape, "mean": x.shape[:-1], "rstd": x.shape[:-1]}
    for name, spec in others.items():
        check_spec(op, name, spec, shapes.get(name, (cols,)))


class LayerNormOp(Op):
    """y, and mean and reciprocal standard deviation of each row."""

    name = "layer_norm"

    def outputs(self, x: TensorSpec, weight: TensorSpec, bias: TensorSpec, *, eps: float) -> Sequence[TensorSpec]:
        _check(self.name, x, weight=weight, bias=bias)
        if not eps >= 0:
            raise ValueError(f"layer_norm: eps must be 0 or more, not {eps}")
        return x, TensorSpec(x.shape[:-1]), TensorSpec(x.shape[:-1])

    def flops(self, x: TensorSpec, weight: TensorSpec, bias: TensorSpec, *, eps: float) -> int:
        return 10 * x.size

    def reference(self, x: Any, weight: Any, bias: Any, *, eps: float) -> Sequence[Any]:
        mean = x[..., 0] + (x - x[..., :1]).mean(axis=-1)
        mean = mean + (x - mean[..., None]).mean(axis=-1)
        deviation = x - mean[..., None]
        rstd = 1 / np.sqrt(np.square(deviation).mean(axis=-1) + x.dtype.type(eps))
        return deviation * rstd[..., None] * weight + bias, mean, rstd

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, eps: float) -> None:
        (x, weight, bias), (y, mean, rstd) = inputs, outputs
        rows, cols = mean.size, x.shape[-1]
        kernel = FORWARD.pick(cols, x, weight, bias, y)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rows), x, weight, bias, y, mean, rstd, rows, cols, eps)

    def kernels(self) -> Iterable[Kernel]:
        return FORWARD.both()


class LayerNormApplyOp(Op):
    """y again, from the kept mean and rstd."""

    name = "layer_norm_apply"

    def outputs(
        self, x: TensorSpec, weight: TensorSpec, bias: TensorSpec, mean: TensorSpec, rstd: TensorSpec
    ) -> Sequence[TensorSpec]:
        _check(self.name, x, weight=weight, bias=bias, mean=mean, rstd=rstd)
        return (x,)

    def flops(self, x: TensorSpec, *others: TensorSpec) -> int:
        return 4 * x.size

    def reference(self, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any) -> Sequence[Any]:
        return ((x - mean[..., None]) * rstd[..., None] * weight + bias,)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        (x, weight, bias, mean, rstd), (y,) = inputs, outputs
        rows, cols = mean.size, x.shape[-1]
        kernel = APPLY.pick(cols, x, weight, bias, y)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rows), x, weight, bias, mean, rstd, y, rows, cols)

    def kernels(self) -> Iterable[Kernel]:
        return APPLY.both()


class LayerNormBackwardOp(Op):
    """Gradient of x, added to `into` where that is given."""

    name = "layer_norm_backward"
    writes = (5,)

    def outputs(
        self,
        dy: TensorSpec,
        x: TensorSpec,
        weight: TensorSpec,
        mean: TensorSpec,
        rstd: TensorSpec,
        into: TensorSpec | None,
    ) -> Sequence[TensorSpec]:
        _check(self.name, x, dy=dy, weight=weight, mean=mean, rstd=rstd)
        if into is not None:
            check_spec(self.name, "into", into, x.shape)
            return ()
        return (x,)

    def flops(self, dy: TensorSpec, *others: TensorSpec | None) -> int:
        return 13 * dy.size

    def reference(self, dy: Any, x: Any, weight: Any, mean: Any, rstd: Any, into: Any) -> Sequence[Any]:
        scale = rstd[..., None]
        g, xhat = dy * weight, (x - mean[..., None]) * scale
        inner = g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True)
        if into is None:
            return (scale * inner,)
        into += scale * inner
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        dy, x, weight, mean, rstd, into = inputs
        dx = into if into is not None else outputs[0]
        rows, cols = mean.size, x.shape[-1]
        kernel = BACKWARD.pick(cols, dy, x, weight, dx)
        groups = row_groups(gpu, kernel, rows)
        gpu.dispatch(kernel, groups, dy, x, weight, mean, rstd, dx, rows, cols, int(into is not None))

    def kernels(self) -> Iterable[Kernel]:
        return BACKWARD.both()


class LayerNormWeightBackwardOp(Op):
    """Gradients of weight and bias, written or added to given tensors."""

    name = "layer_norm_weight_backward"
    writes = (4, 5)

    def outputs(
        self,
        dy: TensorSpec,
        x: TensorSpec,
        mean: TensorSpec,
        rstd: TensorSpec,
        out_weight: TensorSpec,
        out_bias: TensorSpec,
        *,
        accumulate: bool,
    ) -> Sequence[TensorSpec]:
        _check(self.name, x, dy=dy, mean=mean, rstd=rstd)
        check_output(self.name, "out_weight", out_weight, x.shape[-1])
        check_output(self.name, "out_bias", out_bias, x.shape[-1])
        return ()

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        assert specs[1] is not None
        return WEIGHT_BACKWARD.scratch(specs[1])

    def flops(self, dy: TensorSpec, *others: TensorSpec, accumulate: bool) -> int:
        return 5 * dy.size

    def reference(
        self, dy: Any, x: Any, mean: Any, rstd: Any, out_weight: Any, out_bias: Any, *, accumulate: bool
    ) -> Sequence[Any]:
        cols = x.shape[-1]
        xhat = (x - mean[..., None]) * rstd[..., None]
        for out, product in ((out_weight, dy * xhat), (out_bias, dy)):
            total = product.reshape(-1, cols).sum(axis=0)
            out[...] = out + total if accumulate else total
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool) -> None:
        dy, x, mean, rstd, out_weight, out_bias = inputs
        WEIGHT_BACKWARD.launch(gpu, (dy, x, mean, rstd), x, outputs[0], (out_weight, out_bias), accumulate)

    def kernels(self) -> Iterable[Kernel]:
        return WEIGHT_BACKWARD.kernels()


LAYER_NORM = register(LayerNormOp())
LAYER_NORM_APPLY = register(LayerNormApplyOp())
LAYER_NORM_BACKWARD = register(LayerNormBackwardOp())
LAYER_NORM_WEIGHT_BACKWARD = register(LayerNormWeightBackwardOp())


def layer_norm(
    engine: ComputeEngine, x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm (Ba, Kiros & Hinton 2016, equation 4, with eps under the root).

    x: [..., cols]; weight, bias: [cols]. Returns (y [..., cols], mean [...], rstd [...]),
    rstd = 1 / sqrt(mean((x - mean)^2) + eps). The error of y is that of rounding `mean` to float32, however large it is
    beside the deviations (corrected two-pass algorithm, Chan, Golub & LeVeque 1983).

    Raises ValueError for other shapes or types, or a negative eps.
    """
    y, mean, rstd = engine.execute(LAYER_NORM, (x, weight, bias), eps=eps)
    return y, mean, rstd


def layer_norm_apply(
    engine: ComputeEngine, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor
) -> Tensor:
    """The y of `layer_norm`, to the bit, rebuilt from its mean and rstd [...]. x: [..., cols]; weight, bias: [cols].

    Raises ValueError for shapes or types that do not fit.
    """
    return engine.execute(LAYER_NORM_APPLY, (x, weight, bias, mean, rstd))[0]


def layer_norm_backward(
    engine: ComputeEngine,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    into: Tensor | None = None,
) -> Tensor:
    """d_x [..., cols] of `layer_norm` from dy [..., cols], its inputs, and its mean and rstd [...].

    into [..., cols]: d_x is added to it, and it is returned. It must not overlap an input.
    Raises ValueError for shapes or types that do not fit.
    """
    made = engine.execute(LAYER_NORM_BACKWARD, (dy, x, weight, mean, rstd, into))
    return made[0] if into is None else into


def layer_norm_weight_backward(
    engine: ComputeEngine,
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Writes d_weight and d_bias [cols] of `layer_norm`; accumulate adds them to what the outputs hold.

    Raises ValueError for shapes or types that do not fit.
    """
    engine.execute(LAYER_NORM_WEIGHT_BACKWARD, (dy, x, mean, rstd, out_weight, out_bias), accumulate=accumulate)
