"""Tells an allocation ledger what the tensors of a training step are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..engine.allocation_ledger import (
    ACTIVATIONS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTED,
    TABLES,
    TEMPORARY,
    AllocationLedger,
)
from ..engine.pooled_engine import PARAMETER
from ..nn.gpt_model import GPTModel
from ..nn.layer import Layer
from ..nn.optimizers import Optimizer


class MemoryWatch:
    """Labels by kind, phase by phase. Give `on_phase` to the TrainingStep, and call `start` before each step.

    The ledger must be attached before the model is made, or parameters count as what was there earlier. Kinds are told
    once a tensor's purpose is known, for its whole life: what is kept at the end of forward was an activation from its
    first byte.
    """

    def __init__(self, ledger: AllocationLedger, model: GPTModel, optimizer: Optimizer) -> None:
        self.ledger = ledger
        self.model = model
        for name, parameter in model.named_parameters().items():
            ledger.label(parameter.data, PARAMETERS, name)
        for name, moment in optimizer.named_moments().items():
            ledger.label(moment, OPTIMIZER, name)
        for i, block in enumerate(model.blocks):
            self._watch_recompute(f"blocks.{i}", block)
        self._num_micro_batches = 1

    def start(self, num_micro_batches: int) -> None:
        """A step of so many micro-batches begins."""
        self._num_micro_batches = num_micro_batches
        self.ledger.phase = "forward"
        self._label_tables()
        self.ledger.start_peak()

    def on_phase(self, phase: str, micro_batch: int) -> None:
        """A phase was recorded: label what it left behind, and name the next one."""
        self.ledger.phase_bytes[phase] = self.ledger.live_bytes
        if phase == "forward":
            self._label_tables()
            self._label_kept(ACTIVATIONS, "", self.model)
            self._label_logits()
            self.ledger.phase = "backward"
        elif phase == "backward":
            for name, parameter in self.model.named_parameters().items():
                if parameter.grad is not None:
                    self.ledger.rename(parameter.grad, name)
            self.ledger.phase = "forward" if micro_batch + 1 < self._num_micro_batches else "optimizer"
        else:
            self.ledger.phase = ""

    def _label_kept(self, kind: str, prefix: str, layer: Layer) -> None:
        for name, tensor in layer.activation_cache().items():
            self.ledger.label(tensor, kind, prefix + name)

    def _label_tables(self) -> None:
        for allocation in self.ledger.live.values():
            if allocation.pool == PARAMETER and allocation.kind == TEMPORARY:
                allocation.kind = TABLES  # rotation tables, position numbers

    def _label_logits(self) -> None:
        head = self.model.head.shape
        for record in reversed(self.ledger.ops):
            if record.phase != "forward":
                break
            if record.op == "matmul" and head in record.inputs and record.outputs and record.outputs[0][-1] == head[0]:
                for allocation in record.made:
                    if allocation.kind == TEMPORARY:
                        allocation.kind = LOGITS

    def _watch_recompute(self, name: str, block: Any) -> None:
        plain: Callable[..., Any] = block.forward_recompute

        def watched(*inputs: Any, **settings: Any) -> Any:
            output = plain(*inputs, **settings)
            self._label_kept(RECOMPUTED, f"{name}.", block)
            return output

        block.forward_recompute = watched
