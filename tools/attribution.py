"""What each saving is worth: the same step planned with that one turned off, all others as they are.

Savings that are options are turned off in the options. Those that are built in (tensors changed in place, outputs that
are rebuilt, attention without a score matrix, gradients that exist only once backward gets there) are turned off by an
engine or a watch that allocates what a plainer program would.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from ..engine.allocation_ledger import ACTIVATIONS, GRADIENTS
from ..engine.op import Op
from ..engine.plan_engine import PlanEngine
from ..engine.tensor import Storage, Tensor
from ..nn.parameter import Parameter
from .memory_plan import TrainingPlan, plan_training
from .memory_watch import MemoryWatch
from .run_config import RunConfig, recompute_groups

_IN_PLACE = ("add_", "rope_", "cross_entropy_backward_")
_ACTIVATION_OPS = ("activation", "swiglu")


class _CopyingEngine(PlanEngine):
    """Ops that change an activation or its gradient in place write a fresh tensor instead."""

    def execute(self, op: Op, inputs: tuple[Tensor | None, ...], **settings: Any) -> tuple[Tensor, ...]:
        target = inputs[0]
        if op.name in _IN_PLACE and target is not None and target.nbytes == target.storage.nbytes:
            # The caller's tensor moves to the fresh bytes; the old ones are free once nothing else refers to them.
            target.storage = self.empty(target.shape, target.dtype).storage
        return super().execute(op, inputs, **settings)


class _KeepingEngine(PlanEngine):
    """Keeps for backward what is otherwise rebuilt, as long as what it is rebuilt from is kept.

    keep_norms: outputs of norms. keep_activations: outputs of activation functions. keep_scores: the softmax matrix of
    attention [batch, heads, seq, keys].
    """

    def __init__(self, *, keep_norms: bool = False, keep_activations: bool = False, keep_scores: bool = False) -> None:
        super().__init__()
        self.keep_norms, self.keep_activations, self.keep_scores = keep_norms, keep_activations, keep_scores
        self._held: weakref.WeakKeyDictionary[Storage, Tensor] = weakref.WeakKeyDictionary()

    def execute(self, op: Op, inputs: tuple[Tensor | None, ...], **settings: Any) -> tuple[Tensor, ...]:
        source = self._source(op, inputs)
        if source is not None and source in self._held:
            return (self._held[source],)
        made = super().execute(op, inputs, **settings)
        if self.keep_norms and op.name in ("rms_norm", "layer_norm"):
            self._hold(made[-1].storage, made[0], "norm output")
        elif source is not None:
            self._hold(source, made[0], "activation output")
        elif self.keep_scores and op.name == "attention_qkv":
            lse = made[1]
            self._hold(lse.storage, self.empty((*lse.shape, lse.shape[-1])), "scores")
        return made

    def _source(self, op: Op, inputs: tuple[Tensor | None, ...]) -> Storage | None:
        """The storage by which an output that can be rebuilt is known."""
        if self.keep_norms and op.name in ("rms_norm_apply", "layer_norm_apply"):
            assert inputs[-1] is not None
            return inputs[-1].storage
        if self.keep_activations and op.name in _ACTIVATION_OPS and inputs[0] is not None:
            return inputs[0].storage
        return None

    def _hold(self, source: Storage, tensor: Tensor, label: str) -> None:
        self._held[source] = tensor
        self.note_kind(tensor, ACTIVATIONS, label)


class _EarlyGradients(MemoryWatch):
    """All gradients exist from the start of the step."""

    def start(self, num_micro_batches: int) -> None:
        for parameter in self.model.named_parameters().values():
            self._reserve(parameter)
        super().start(num_micro_batches)

    def _reserve(self, parameter: Parameter) -> None:
        engine, plain = parameter.engine, parameter.gradient
        reserved = [engine.empty(parameter.shape)]
        engine.note_kind(reserved[0], GRADIENTS)

        def gradient() -> tuple[Tensor, bool]:
            reserved.clear()
            return plain()

        parameter.gradient = gradient  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True)
class Contribution:
    """What one saving is worth. Bytes: how much more there is without it; flops: how many more there are with it.

    peak_bytes: at the peak of the step. forward_bytes: at the end of the last forward, which a saving may lower though
    the peak is elsewhere. reserved_bytes: reserved from the driver, at most. Rounding and first fit can make small
    negative numbers.
    """

    saving: str
    peak_bytes: int
    forward_bytes: int
    reserved_bytes: int
    flops: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


Off = tuple[str, Callable[[], TrainingPlan]]


def savings(config: RunConfig, vocab_size: int) -> Iterator[Off]:
    """(name, plan without it) of each saving that is on in this run."""

    def changed(**values: Any) -> Callable[[], TrainingPlan]:
        return lambda: plan_training(dataclasses.replace(config, **values), vocab_size)

    def built_in(engine: Callable[[], PlanEngine] = PlanEngine, **more: Any) -> Callable[[], TrainingPlan]:
        return lambda: plan_training(config, vocab_size, engine=engine(), **more)

    if config.loss_chunk_bytes:
        yield "loss chunks", changed(loss_chunk_bytes=0)
    if config.checkpoint_every:
        yield f"checkpoint every {config.checkpoint_every}", changed(checkpoint_every=0)
    groups = recompute_groups(config)
    for name in groups:
        yield f"recompute {name}", changed(recompute=",".join(other for other in groups if other != name))
    if config.activation_offload:
        yield "activation offload", changed(activation_offload=False)
    if config.fused_update:
        yield "fused update", changed(fused_update=False)
    yield "in-place ops", built_in(_CopyingEngine)
    if not config.activation_offload:
        yield "norm outputs rebuilt", built_in(lambda: _KeepingEngine(keep_norms=True))
        yield "activation outputs rebuilt", built_in(lambda: _KeepingEngine(keep_activations=True))
        yield "no score matrix", built_in(lambda: _KeepingEngine(keep_scores=True))
    if not config.fused_update:
        yield "gradients made late", built_in(watch_type=_EarlyGradients)


def left_out(config: RunConfig) -> dict[str, str]:
    """Savings that are on, but cannot be turned off alone: name -> why."""
    if not config.activation_offload:
        return {}
    why = "what is kept leaves the device and comes back as another tensor, so that what it saves is not told apart"
    return dict.fromkeys(("norm outputs rebuilt", "activation outputs rebuilt", "no score matrix"), why)


def attribute(plan: TrainingPlan, vocab_size: int) -> list[Contribution]:
    """Turn each saving of a planned run off alone, and compare. Raises as `plan_training` does."""
    result = []
    for name, plan_without in savings(plan.config, vocab_size):
        without = plan_without()
        result.append(
            Contribution(
                name,
                without.peak_bytes - plan.peak_bytes,
                _forward_bytes(without) - _forward_bytes(plan),
                without.ledger.peak_reserved_bytes - plan.ledger.peak_reserved_bytes,
                plan.flops - without.flops,
            )
        )
    return result


def _forward_bytes(plan: TrainingPlan) -> int:
    """Live bytes at the end of the last forward."""
    return plan.ledger.phase_bytes["forward"]


def print_attribution(console: Console, plan: TrainingPlan, contributions: list[Contribution]) -> None:
    """As a table."""
    console.print(
        "\nwhat each saving is worth: without it alone, the step takes so many more bytes and so many fewer FLOPs",
        markup=False,
        highlight=False,
        style="bold",
    )
    table = Table("saving")
    for heading in ("peak", "end of forward", "reserved", "FLOPs it costs", "of all"):
        table.add_column(heading, justify="right")
    for row in contributions:
        counts = (row.peak_bytes, row.forward_bytes, row.reserved_bytes, row.flops)
        table.add_row(row.saving, *(f"{count:,}" for count in counts), f"{row.flops / plan.flops:.1%}")
    table.add_section()
    ledger = plan.ledger
    totals = (plan.peak_bytes, _forward_bytes(plan), ledger.peak_reserved_bytes, plan.flops)
    table.add_row("the run", *(f"{count:,}" for count in totals), "")
    console.print(table)
    missing = left_out(plan.config)
    if missing:
        console.print(f"Left out with --activation-offload: {', '.join(missing)}: {next(iter(missing.values()))}.")
