"""Cross-entropy: as a layer on logits, and fused with the head matmul so that logits hardly exist."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .layer import Layer
from .parameter import Parameter

IGNORE_INDEX = -100
_ROWS = 64  # chunks are multiples of this many rows, so that every chunk starts on an aligned address


class LinearCrossEntropy(Layer):
    """Sum over rows of -log softmax(hidden W^T)[target], W = weight [vocab, d], in chunks of rows.

    When training, a chunk's logits become their own gradient at once, from it come the gradient of `hidden` and the
    chunk's part of W's gradient, and the logits are dead: [rows, vocab] exists for one chunk only, and the head matmul
    is never repeated. Gradients are scaled by the step parameters' loss_scale (1 / number of valid tokens of all
    micro-batches of the step), which must therefore be set before forward. Keeps d_hidden only.

    chunk_bytes: bytes of logits a chunk may take (0: one chunk). It decides the order of W's gradient sum, so it
    belongs to a run's saved settings.
    """

    recompute_supported = False

    def __init__(
        self, engine: ComputeEngine, weight: Parameter, *, chunk_bytes: int = 0, ignore_index: int = IGNORE_INDEX
    ) -> None:
        super().__init__(engine)
        if chunk_bytes < 0:
            raise ValueError(f"chunk_bytes is {chunk_bytes}, it must not be negative")
        self.head = weight
        self.chunk_bytes = chunk_bytes
        self.ignore_index = ignore_index

    def rows_of_chunk(self, num_rows: int) -> int:
        """Rows of each chunk but the last: a multiple of 64 whose logits fit chunk_bytes, but at least 64."""
        if not self.chunk_bytes:
            return num_rows
        rows = self.chunk_bytes // (4 * self.head.shape[0])
        return min(num_rows, max(_ROWS, rows // _ROWS * _ROWS))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [n, d], targets int32 [n] (ignore_index: no loss) -> sum of losses [1]."""
        self.start_forward()
        if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
            raise ValueError(f"hidden [n, d] and targets [n] expected, got {hidden.shape} and {targets.shape}")
        engine, weight = self.engine, self.head.data
        num_rows = hidden.shape[0]
        step = self.rows_of_chunk(num_rows)
        losses = engine.empty((num_rows,)) if step < num_rows else None
        d_hidden = engine.empty(hidden.shape) if self.training else None
        loss = None
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            rows, labels = hidden.rows(start, stop), targets.rows(start, stop)
            logits = engine.matmul(rows, weight, trans_b=True)
            loss, lse = engine.cross_entropy(logits, labels, ignore_index=self.ignore_index)
            if losses is not None:
                engine.copy_into(losses, loss, offset=start)
            if d_hidden is not None:
                engine.cross_entropy_backward_(logits, labels, lse, ignore_index=self.ignore_index)
                engine.matmul(logits, weight, out=d_hidden.rows(start, stop))
                out, accumulate = self.head.gradient()
                engine.matmul(logits, rows, trans_a=True, out=out, accumulate=accumulate)
            del logits, lse
        if d_hidden is not None:
            self.head.gradient_written()
            self.kept["d_hidden"] = d_hidden
        total = losses if losses is not None else loss
        assert total is not None
        return engine.sum(total)

    def backward(self, dy: Tensor | None = None) -> Tensor:
        """The gradient of loss_scale * (sum of losses) with respect to hidden, [n, d]. dy is not used."""
        return self.take("d_hidden")


class CrossEntropyLoss(Layer):
    """Mean over valid rows of -log softmax(logits)[target]. Keeps the logits, which backward overwrites.

    For training loops of one's own; `TrainingStep` and `GPTModel.loss` use LinearCrossEntropy.
    """

    recompute_supported = False

    def __init__(self, engine: ComputeEngine, *, ignore_index: int = IGNORE_INDEX) -> None:
        super().__init__(engine)
        self.ignore_index = ignore_index
        self._num_valid = 0

    def forward(self, logits: Tensor, targets: np.ndarray) -> Tensor:
        """logits [..., n], targets an integer array [...] of 0..n-1 or ignore_index -> mean loss [1].

        Raises ValueError for targets of another shape or out of range.
        """
        self.start_forward()
        targets = np.asarray(targets)
        valid = targets[targets != self.ignore_index]
        if targets.shape != logits.shape[:-1]:
            raise ValueError(f"targets {targets.shape} do not fit logits {logits.shape}")
        if valid.size and (valid.min() < 0 or valid.max() >= logits.shape[-1]):
            raise ValueError(f"targets {valid.min()}..{valid.max()} lie outside 0..{logits.shape[-1] - 1}")
        self._num_valid = int(valid.size)
        rows = logits.reshape(-1, logits.shape[-1])
        labels = self.engine.tensor(targets.reshape(-1).astype(np.int32))
        losses, lse = self.engine.cross_entropy(rows, labels, ignore_index=self.ignore_index)
        self.keep(logits=logits, labels=labels, lse=lse)
        return self.engine.scale(self.engine.sum(losses), 1.0 / max(1, self._num_valid))

    def backward(self, dy: None = None) -> Tensor:
        """The gradient of the mean loss with respect to the logits, in their memory. dy is not used."""
        logits, labels, lse = self.take("logits"), self.take("labels"), self.take("lse")
        scale = 1.0 / max(1, self._num_valid)
        if self.engine.step_parameters.loss_scale != scale:
            self.engine.set_step_parameters(replace(self.engine.step_parameters, loss_scale=scale))
        rows = logits.reshape(-1, logits.shape[-1])
        self.engine.cross_entropy_backward_(rows, labels, lse, ignore_index=self.ignore_index)
        return logits
