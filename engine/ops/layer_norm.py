"""LayerNorm (Ba, Kiros & Hinton 2016) over the last dimension: (x - mean) / sqrt(variance + eps) * weight + bias.

Two passes with a correction (Chan, Golub & LeVeque 1983): the first sums what the row is beyond its first element, so
that equal elements have no error; the second sums the deviations from that mean, and their squares. The deviations' own
mean takes out what rounding did, so the mean is right to half a unit in its last place however far it lies from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..expr import fma, rsqrt, variables, where, whole
from ..fold import FoldSpec, State, Walk
from ..kernel import Kernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .column_sum import ColumnPartials, check_output
from .loop_kernels import LoopCall, LoopOp
from .row_fold import RowFold, RowFoldOp
from .row_kernels import check_spec, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_X, _DY, _WEIGHT, _BIAS, _INTO, _MEAN, _RSTD, _EPS = variables("x dy weight bias into mean rstd eps")
_COLS, _FIRST, _SUM, _FIRST_MEAN = variables("cols first sum first_mean")
_DEVIATIONS, _SQUARES, _CORRECTION, _VARIANCE = variables("deviations squares correction variance")
_TOTAL, _DOT, _MEAN_G, _MEAN_DOT = variables("total dot mean_g mean_dot")
_DEVIATION = _X - _FIRST_MEAN
_XHAT = (_X - _MEAN) * _RSTD
_Y = fma(_XHAT, _WEIGHT, _BIAS)
_G = _DY * _WEIGHT
_DX = _RSTD * ((_G - _MEAN_G) - _XHAT * _MEAN_DOT)
_BACKWARD_INPUTS = {"dy": "row", "x": "row", "weight": "column", "mean": "value", "rstd": "value"}
_BACKWARD_WALK = Walk(
    [State("total", "sum", _G), State("dot", "sum", _G * _XHAT)],
    {"mean_g": _TOTAL / _COLS, "mean_dot": _DOT / _COLS},
)

_STATS_WALKS = [
    Walk([State("sum", "sum", _X - _FIRST)], {"first_mean": _FIRST + _SUM / _COLS}),
    Walk(
        [State("deviations", "sum", _DEVIATION), State("squares", "sum", _DEVIATION * _DEVIATION)],
        {
            "correction": _DEVIATIONS / _COLS,
            "mean": _FIRST_MEAN + _CORRECTION,
            "variance": fma(-_CORRECTION, _CORRECTION, _SQUARES / _COLS),  # a little below 0 by rounding
            "rstd": rsqrt(where(_VARIANCE < 0.0, 0.0, _VARIANCE) + _EPS),
        },
    ),
]

FORWARD = RowFold(
    FoldSpec(
        "layer_norm",
        {"x": "row", "weight": "column", "bias": "column"},
        picks={"first": ("x", whole(0))},
        walks=_STATS_WALKS,
        elements={"y": _Y},
        values={"mean": _MEAN, "rstd": _RSTD},
        scalars="float eps",
    )
)
STATS = RowFold(
    FoldSpec(
        "layer_norm_stats",
        {"x": "row"},
        picks={"first": ("x", whole(0))},
        walks=_STATS_WALKS,
        values={"mean": _MEAN, "rstd": _RSTD},
        scalars="float eps",
    )
)
APPLY = RowFold(
    FoldSpec(
        "layer_norm_apply",
        {"x": "row", "weight": "column", "bias": "column", "mean": "value", "rstd": "value"},
        elements={"y": _Y},
    )
)
BACKWARD = RowFold(FoldSpec("layer_norm_backward", _BACKWARD_INPUTS, walks=[_BACKWARD_WALK], elements={"dx": _DX}))
BACKWARD_INTO = RowFold(
    FoldSpec(
        "layer_norm_backward_into",
        {**_BACKWARD_INPUTS, "into": "row"},
        walks=[_BACKWARD_WALK],
        elements={"into": _INTO + _DX},
    )
)
WEIGHT_BACKWARD = ColumnPartials(
    "layer_norm_weight_backward",
    "in row dy[rows * cols], in row x[rows * cols], in f32 mean[rows], in f32 rstd[rows], "
    "out row partials[2 * chunks * cols]",
    kind=2,
    num_outputs=2,
)


def _check(op: str, x: TensorSpec, **others: TensorSpec) -> None:
    _, cols = rows_and_columns(op, "x", x, loops=3)
    shapes = {"dy": x.shape, "mean": x.shape[:-1], "rstd": x.shape[:-1]}
    for name, spec in others.items():
        check_spec(op, name, spec, shapes.get(name, (cols,)))


class LayerNormOp(RowFoldOp):
    """y, and mean and reciprocal standard deviation of each row."""

    name = "layer_norm"
    fold = FORWARD

    def outputs(self, x: TensorSpec, weight: TensorSpec, bias: TensorSpec, *, eps: float) -> Sequence[TensorSpec]:
        _check(self.name, x, weight=weight, bias=bias)
        if not 0 <= eps < math.inf:
            raise ValueError(f"layer_norm: eps is {eps}, it must be finite and not negative")
        return x, TensorSpec(x.shape[:-1]), TensorSpec(x.shape[:-1])

    def flops(self, x: TensorSpec, weight: TensorSpec, bias: TensorSpec, *, eps: float) -> int:
        return 10 * x.size

    def scalar_values(self, *, eps: float) -> tuple[float, ...]:  # type: ignore[override]
        return (eps,)


class LayerNormStatsOp(RowFoldOp):
    """The mean and rstd of `layer_norm`, to the bit, without y."""

    name = "layer_norm_stats"
    fold = STATS

    def outputs(self, x: TensorSpec, *, eps: float) -> Sequence[TensorSpec]:
        _check(self.name, x)
        return TensorSpec(x.shape[:-1]), TensorSpec(x.shape[:-1])

    def flops(self, x: TensorSpec, *, eps: float) -> int:
        return 6 * x.size

    def scalar_values(self, *, eps: float) -> tuple[float, ...]:  # type: ignore[override]
        return (eps,)


class LayerNormApplyOp(RowFoldOp):
    """y again, from the kept mean and rstd."""

    name = "layer_norm_apply"
    fold = APPLY

    def outputs(
        self, x: TensorSpec, weight: TensorSpec, bias: TensorSpec, mean: TensorSpec, rstd: TensorSpec
    ) -> Sequence[TensorSpec]:
        _check(self.name, x, weight=weight, bias=bias, mean=mean, rstd=rstd)
        return (x,)

    def flops(self, x: TensorSpec, *others: TensorSpec) -> int:
        return 4 * x.size


class LayerNormBackwardOp(RowFoldOp):
    """Gradient of x, added to `into` where that is given."""

    name = "layer_norm_backward"
    fold, fold_into = BACKWARD, BACKWARD_INTO
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


class LayerNormWeightBackwardOp(LoopOp):
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

    def loop_calls(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **_: Any) -> Sequence[LoopCall]:
        return (WEIGHT_BACKWARD.loop_call(inputs[:4], inputs[1], outputs[0]),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool) -> None:
        dy, x, mean, rstd, out_weight, out_bias = inputs
        WEIGHT_BACKWARD.launch(gpu, (dy, x, mean, rstd), x, outputs[0], (out_weight, out_bias), accumulate)

    def kernels(self) -> Iterable[Kernel]:
        return WEIGHT_BACKWARD.kernels()


LAYER_NORM = register(LayerNormOp())
LAYER_NORM_STATS = register(LayerNormStatsOp())
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
