"""Cross-entropy of logits against target ids, one row a token, and its gradient in place of the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..expr import below, constant, equal, exp, log, same, variables, where, whole
from ..fold import FoldSpec, Walk, online_softmax, softmax_shift
from ..op import register
from ..tensor import Tensor, TensorSpec
from .row_fold import RowFold, RowFoldOp
from .row_kernels import check_spec, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_LOGITS, _LARGEST, _TOTAL, _PICKED, _LSE, _SCALE, _FACTOR = variables(
    "logits largest total picked lse loss_scale factor"
)
_TARGET, _NUM_COLS, _COLUMN = whole("targets"), whole("num_cols"), whole("column")
_NAN = constant(math.nan)
_VALID = below(_TARGET, _NUM_COLS)  # a target outside the row has no loss: NaN, which stops the step
_IGNORED = same(_TARGET, whole("ignore_index"))

FORWARD = RowFold(
    FoldSpec(
        "cross_entropy",
        {"logits": "row", "targets": "whole"},
        picks={"picked": ("logits", _TARGET)},
        skip=_IGNORED,
        walks=[online_softmax(_LOGITS)],
        values={
            "loss": (softmax_shift(_LARGEST) - where(_VALID, _PICKED, _NAN)) + log(_TOTAL),
            "lse": softmax_shift(_LARGEST) + log(_TOTAL),
        },
        scalars="int ignore_index",
    )
)
# -inf has no share, also where the whole row is -inf
_SHARE = where(equal(_LOGITS, constant(-math.inf)), 0.0, exp(_LOGITS - _LSE, nonpositive=True))
BACKWARD = RowFold(
    FoldSpec(
        "cross_entropy_backward",
        {"logits": "row", "targets": "whole", "lse": "value", "loss_scale": "step"},
        skip=_IGNORED,
        walks=[Walk([], {"factor": where(_VALID, _SCALE, _NAN)})],
        elements={"logits": (_SHARE - where(same(_COLUMN, _TARGET), 1.0, 0.0)) * _FACTOR},
        scalars="int ignore_index",
    )
)


def _check(op: str, logits: TensorSpec, targets: TensorSpec) -> int:
    rows, _ = rows_and_columns(op, "logits", logits, loops=1)
    if len(logits.shape) != 2:
        raise ValueError(f"{op}: logits have shape {logits.shape}, needed is [rows, vocabulary]")
    check_spec(op, "targets", targets, (rows,), "int32")
    return rows


class CrossEntropyOp(RowFoldOp):
    """Loss and log-sum-exp of each row."""

    name = "cross_entropy"
    fold = FORWARD

    def outputs(self, logits: TensorSpec, targets: TensorSpec, *, ignore_index: int) -> Sequence[TensorSpec]:
        rows = _check(self.name, logits, targets)
        return TensorSpec((rows,)), TensorSpec((rows,))

    def flops(self, logits: TensorSpec, targets: TensorSpec, *, ignore_index: int) -> int:
        return 4 * logits.size

    def scalar_values(self, *, ignore_index: int) -> tuple[float, ...]:  # type: ignore[override]
        return (ignore_index,)


class CrossEntropyBackwardOp(RowFoldOp):
    """Logits become their gradient."""

    name = "cross_entropy_backward_"
    writes = (0,)
    takes_step = True
    fold = BACKWARD

    def outputs(
        self, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec, *, ignore_index: int
    ) -> Sequence[TensorSpec]:
        rows = _check(self.name, logits, targets)
        check_spec(self.name, "lse", lse, (rows,))
        return ()

    def flops(self, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec, *, ignore_index: int) -> int:
        return 4 * logits.size

    def scalar_values(self, *, ignore_index: int) -> tuple[float, ...]:  # type: ignore[override]
        return (ignore_index,)


CROSS_ENTROPY = register(CrossEntropyOp())
CROSS_ENTROPY_BACKWARD = register(CrossEntropyBackwardOp())


def cross_entropy(
    engine: ComputeEngine, logits: Tensor, targets: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats: loss = lse - logits[target], lse = log(sum(exp(logits))), computed without overflow by a
    running maximum (Milakov & Gimelshein 2018).

    logits: [rows, vocabulary]; targets: int32 [rows]. Returns (loss [rows], lse [rows]). Rows whose target is
    ignore_index give 0 in both, whatever their logits. A logit of -inf has probability 0; a row of -inf alone, a NaN
    or +inf in a row, and a target outside the vocabulary give a NaN loss. Raises ValueError for shapes or types that
    do not fit.
    """
    loss, lse = engine.execute(CROSS_ENTROPY, (logits, targets), ignore_index=ignore_index)
    return loss, lse


def cross_entropy_backward_(
    engine: ComputeEngine, logits: Tensor, targets: Tensor, lse: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """Turns logits [rows, vocabulary] into the gradient of the summed loss times the step's loss_scale, in place:
    (exp(logits - lse) - onehot(target)) * loss_scale, exactly 0 in ignored rows, NaN in rows whose target is outside
    the vocabulary. The probabilities have the relative error of rounding lse: half a unit in its last place, 4e-6
    where it is around 100. Returns logits.

    targets: int32 [rows]; lse [rows] from `cross_entropy`. loss_scale comes from the engine's StepParameters. Raises
    ValueError for shapes or types that do not fit.
    """
    engine.execute(CROSS_ENTROPY_BACKWARD, (logits, targets, lse), ignore_index=ignore_index)
    return logits
