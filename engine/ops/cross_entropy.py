"""Cross-entropy of logits against target ids, one row a token, and its gradient in place of the logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import Op, register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .row_kernels import ROW_SUBGROUPS, RowKernels, check_spec, row_groups, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

FORWARD = RowKernels(
    "cross_entropy",
    "cross_entropy.comp",
    "in row logits, in i32 targets, out f32 loss, out f32 lse, uint rows, uint cols, int ignore_index",
    subgroups=ROW_SUBGROUPS,
)
BACKWARD = RowKernels(
    "cross_entropy_backward",
    "cross_entropy_backward.comp",
    "inout row logits, in i32 targets, in f32 lse, step, uint rows, uint cols, int ignore_index",
    subgroups=ROW_SUBGROUPS,
)


def _check(op: str, logits: TensorSpec, targets: TensorSpec) -> int:
    rows, _ = rows_and_columns(op, "logits", logits, loops=1)
    if len(logits.shape) != 2:
        raise ValueError(f"{op}: logits have shape {logits.shape}, needed is [rows, vocabulary]")
    check_spec(op, "targets", targets, (rows,), "int32")
    return rows


class CrossEntropyOp(Op):
    """Loss and log-sum-exp of each row."""

    name = "cross_entropy"

    def outputs(self, logits: TensorSpec, targets: TensorSpec, *, ignore_index: int) -> Sequence[TensorSpec]:
        rows = _check(self.name, logits, targets)
        return TensorSpec((rows,)), TensorSpec((rows,))

    def flops(self, logits: TensorSpec, targets: TensorSpec, *, ignore_index: int) -> int:
        return 4 * logits.size

    def reference(self, logits: Any, targets: Any, *, ignore_index: int) -> Sequence[Any]:
        rows, cols = logits.shape
        largest = logits.max(axis=1, initial=-np.inf)
        largest = np.where(np.isneginf(largest), 0, largest)
        log_sum = np.log(np.exp(logits - largest[:, None]).sum(axis=1))
        valid = (targets >= 0) & (targets < cols)
        picked = np.where(valid, logits[np.arange(rows), np.where(valid, targets, 0)], np.nan)
        ignored = targets == ignore_index
        return np.where(ignored, 0, (largest - picked) + log_sum), np.where(ignored, 0, largest + log_sum)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, ignore_index: int) -> None:
        (logits, targets), (loss, lse) = inputs, outputs
        rows, cols = logits.shape
        kernel = FORWARD.pick(cols, logits)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rows), logits, targets, loss, lse, rows, cols, ignore_index)

    def kernels(self) -> Iterable[Kernel]:
        return FORWARD.both()


class CrossEntropyBackwardOp(Op):
    """Logits become their gradient."""

    name = "cross_entropy_backward_"
    writes = (0,)
    takes_step = True

    def outputs(
        self, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec, *, ignore_index: int
    ) -> Sequence[TensorSpec]:
        rows = _check(self.name, logits, targets)
        check_spec(self.name, "lse", lse, (rows,))
        return ()

    def flops(self, logits: TensorSpec, targets: TensorSpec, lse: TensorSpec, *, ignore_index: int) -> int:
        return 4 * logits.size

    def reference(
        self, logits: Any, targets: Any, lse: Any, *, ignore_index: int, step: StepParameters
    ) -> Sequence[Any]:
        rows, cols = logits.shape
        valid = (targets >= 0) & (targets < cols)
        gradient = np.where(np.isneginf(logits), 0, np.exp(logits - lse[:, None]))
        gradient[np.arange(rows)[valid], targets[valid]] -= 1
        gradient = np.where(valid[:, None], gradient * logits.dtype.type(step.loss_scale), np.nan)
        logits[...] = np.where((targets == ignore_index)[:, None], 0, gradient)
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, ignore_index: int) -> None:
        logits, targets, lse = inputs
        rows, cols = logits.shape
        kernel = BACKWARD.pick(cols, logits)
        gpu.dispatch(kernel, row_groups(gpu, kernel, rows), logits, targets, lse, rows, cols, ignore_index)

    def kernels(self) -> Iterable[Kernel]:
        return BACKWARD.both()


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
    the vocabulary. Returns logits.

    targets: int32 [rows]; lse [rows] from `cross_entropy`. loss_scale comes from the engine's StepParameters. Raises
    ValueError for shapes or types that do not fit.
    """
    engine.execute(CROSS_ENTROPY_BACKWARD, (logits, targets, lse), ignore_index=ignore_index)
    return logits
