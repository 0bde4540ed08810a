"""RMSNorm (Zhang & Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..expr import rsqrt, variables
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

_X, _DY, _WEIGHT, _INTO, _RSTD, _EPS = variables("x dy weight into rstd eps")
_COLS, _SQUARES, _DOT, _MEAN_DOT = variables("cols squares dot mean_dot")
_Y = _X * _RSTD * _WEIGHT
_G, _XHAT = _DY * _WEIGHT, _X * _RSTD
_DX = _RSTD * (_G - _XHAT * _MEAN_DOT)
_BACKWARD_INPUTS = {"dy": "row", "x": "row", "weight": "column", "rstd": "value"}
_BACKWARD_WALK = Walk([State("dot", "sum", _G * _XHAT)], {"mean_dot": _DOT / _COLS})

FORWARD = RowFold(
    FoldSpec(
        "rms_norm",
        {"x": "row", "weight": "column"},
        walks=[Walk([State("squares", "sum", _X * _X)], {"rstd": rsqrt(_SQUARES / _COLS + _EPS)})],
        elements={"y": _Y},
        values={"rstd": _RSTD},
        scalars="float eps",
    )
)
STATS = RowFold(
    FoldSpec(
        "rms_norm_stats",
        {"x": "row"},
        walks=[Walk([State("squares", "sum", _X * _X)], {"rstd": rsqrt(_SQUARES / _COLS + _EPS)})],
        values={"rstd": _RSTD},
        scalars="float eps",
    )
)
APPLY = RowFold(FoldSpec("rms_norm_apply", {"x": "row", "weight": "column", "rstd": "value"}, elements={"y": _Y}))
BACKWARD = RowFold(FoldSpec("rms_norm_backward", _BACKWARD_INPUTS, walks=[_BACKWARD_WALK], elements={"dx": _DX}))
BACKWARD_INTO = RowFold(
    FoldSpec(
        "rms_norm_backward_into",
        {**_BACKWARD_INPUTS, "into": "row"},
        walks=[_BACKWARD_WALK],
        elements={"into": _INTO + _DX},
    )
)
WEIGHT_BACKWARD = ColumnPartials(
    "rms_norm_weight_backward",
    "in row dy[rows * cols], in row x[rows * cols], in f32 rstd[rows], out row partials[chunks * cols]",
    kind=1,
)


class RmsNormOp(RowFoldOp):
    """y and the reciprocal root mean square of each row."""

    name = "rms_norm"
    fold = FORWARD

    def outputs(self, x: TensorSpec, weight: TensorSpec, *, eps: float) -> Sequence[TensorSpec]:
        _, cols = rows_and_columns(self.name, "x", x, loops=2)
        check_spec(self.name, "weight", weight, (cols,))
        if not 0 <= eps < math.inf:
            raise ValueError(f"rms_norm: eps is {eps}, it must be finite and not negative")
        return x, TensorSpec(x.shape[:-1])

    def flops(self, x: TensorSpec, weight: TensorSpec, *, eps: float) -> int:
        return 4 * x.size

    def scalar_values(self, *, eps: float) -> tuple[float, ...]:  # type: ignore[override]
        return (eps,)


class RmsNormStatsOp(RowFoldOp):
    """The rstd of `rms_norm`, to the bit, without y."""

    name = "rms_norm_stats"
    fold = STATS

    def outputs(self, x: TensorSpec, *, eps: float) -> Sequence[TensorSpec]:
        rows_and_columns(self.name, "x", x, loops=2)
        return (TensorSpec(x.shape[:-1]),)

    def flops(self, x: TensorSpec, *, eps: float) -> int:
        return 2 * x.size

    def scalar_values(self, *, eps: float) -> tuple[float, ...]:  # type: ignore[override]
        return (eps,)


class RmsNormApplyOp(RowFoldOp):
    """y again, from the kept rstd."""

    name = "rms_norm_apply"
    fold = APPLY

    def outputs(self, x: TensorSpec, weight: TensorSpec, rstd: TensorSpec) -> Sequence[TensorSpec]:
        _, cols = rows_and_columns(self.name, "x", x, loops=2)
        check_spec(self.name, "weight", weight, (cols,))
        check_spec(self.name, "rstd", rstd, x.shape[:-1])
        return (x,)

    def flops(self, x: TensorSpec, weight: TensorSpec, rstd: TensorSpec) -> int:
        return 2 * x.size


class RmsNormBackwardOp(RowFoldOp):
    """Gradient of x, added to `into` where that is given."""

    name = "rms_norm_backward"
    fold, fold_into = BACKWARD, BACKWARD_INTO
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


class RmsNormWeightBackwardOp(LoopOp):
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

    def loop_calls(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **_: Any) -> Sequence[LoopCall]:
        return (WEIGHT_BACKWARD.loop_call(inputs[:3], inputs[1], outputs[0]),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool) -> None:
        (dy, x, rstd, out), (partials,) = inputs, outputs
        WEIGHT_BACKWARD.launch(gpu, (dy, x, rstd), x, partials, (out,), accumulate)

    def kernels(self) -> Iterable[Kernel]:
        return WEIGHT_BACKWARD.kernels()


RMS_NORM = register(RmsNormOp())
RMS_NORM_STATS = register(RmsNormStatsOp())
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
