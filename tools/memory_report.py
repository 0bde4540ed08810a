"""A memory plan as tables and as one JSON object."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from ..engine.allocation_ledger import ACTIVATIONS, KINDS, LOGITS, TEMPORARY
from ..engine.pool_account import pool_account
from .inference_plan import InferencePlan
from .memory_plan import TrainingPlan, matmul_parameters, op_rows, rule_flops_per_token
from .several_cards import CardPlan


def size(nbytes: float) -> str:
    """Bytes for people: decimal GB or MB, or the number of bytes below 0.1 MB."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:,.3f} GB"
    return f"{nbytes / 1e6:,.2f} MB" if nbytes >= 1e5 else f"{nbytes:,.0f} B"


def _table(console: Console, title: str, *headings: str, left: tuple[str, ...] = ()) -> Table:
    """A table whose title, printed at once, is not wrapped to the table's width. Columns not in `left` are numbers."""
    console.print(f"\n{title}", markup=False, highlight=False, style="bold")
    table = Table()
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 or heading in left else "right")
    return table


# -- training ----------------------------------------------------------------------------------------------------------
def training_json(plan: TrainingPlan, card: CardPlan | None, *, with_ops: bool) -> dict[str, Any]:
    """All figures of a training plan; bytes are integers, FLOPs too.

    flops_per_token is the rule (6 P, 8 P with full recomputation), flops_per_token_exact counts every op.
    """
    ledger, model = plan.ledger, plan.model
    record = ledger.ops[min(ledger.peak_op_number, len(ledger.ops) - 1)]
    result: dict[str, Any] = {
        "peak_bytes": plan.peak_bytes,
        "peak_op": ledger.peak_op,
        "peak_phase": ledger.peak_phase,
        "peak_op_inputs": [list(shape) for shape in record.inputs],
        "by_kind": ledger.by_kind(),
        "host_bytes": plan.host_bytes,
        "most_by_kind": {kind: plan.bytes_of(kind) for kind in KINDS if plan.bytes_of(kind)},
        "saved_by_layer": plan.saved_by_layer(),
        "flops_per_step": plan.flops,
        "matmul_attention_flops_per_step": plan.matmul_attention_flops,
        "flops_per_token": rule_flops_per_token(model, full_recompute=bool(plan.config.checkpoint_every)),
        "flops_per_token_exact": plan.flops / plan.num_tokens,
        "tokens_per_step": plan.num_tokens,
        "num_parameters": model.num_parameters,
        "matmul_parameters": matmul_parameters(model),
        "pool": {name: stats.as_dict() for name, stats in plan.pools.items()},
        "reserved_bytes_at_peak": ledger.reserved_at_peak,
        "peak_reserved_bytes": ledger.peak_reserved_bytes,
        "account_at_peak": dataclasses.asdict(pool_account(ledger)),
        "pool_overhead_bytes": ledger.reserved_at_peak - plan.peak_bytes,
        "model": model.to_dict(),
    }
    if card is not None:
        result["card"] = dataclasses.asdict(card) | {"states_bytes": card.states_bytes}
    if with_ops:
        result["ops"] = op_rows(plan)
    return result


def print_training(console: Console, plan: TrainingPlan, card: CardPlan | None, *, with_ops: bool) -> None:
    """The same figures as tables."""
    _print_kinds(console, plan)
    _print_saved(console, plan)
    _print_flops(console, plan)
    if card is not None:
        _print_card(console, card)
    if with_ops:
        _print_ops(console, plan)


def _print_kinds(console: Console, plan: TrainingPlan) -> None:
    ledger, model, config = plan.ledger, plan.model, plan.config
    title = (
        f"{model.num_parameters:,} parameters, {config.accum_steps} x [{config.batch_size} x {config.seq_len}] tokens "
        f"a step, {config.optimizer}"
    )
    table = _table(console, title, "kind", "at the peak", "at most")
    at_peak = ledger.by_kind()
    for kind in KINDS:
        most = plan.bytes_of(kind)
        if most or kind in (LOGITS, TEMPORARY):
            table.add_row(kind, size(at_peak.get(kind, 0)), size(most))
    table.add_section()
    table.add_row("peak of live bytes", size(plan.peak_bytes), size(plan.peak_bytes))
    overhead = ledger.reserved_at_peak - plan.peak_bytes
    table.add_row("pool overhead", size(overhead), size(ledger.peak_reserved_bytes - plan.peak_bytes))
    table.add_row("reserved from the driver", size(ledger.reserved_at_peak), size(ledger.peak_reserved_bytes))
    if plan.host_bytes:
        table.add_row("host memory", "", size(plan.host_bytes))
    console.print(table)
    console.print(f"At the peak: {pool_account(ledger)}.", markup=False, highlight=False)
    record = ledger.ops[min(ledger.peak_op_number, len(ledger.ops) - 1)]
    shapes = ", ".join(str(list(shape)) for shape in record.inputs)
    console.print(
        f"The peak of {plan.peak_bytes:,} bytes occurs during {ledger.peak_phase}, in {ledger.peak_op} on {shapes}."
        f" After the step: {'; '.join(str(stats) for stats in plan.pools.values())}",
        markup=False,
        highlight=False,
    )


def _print_saved(console: Console, plan: TrainingPlan) -> None:
    layers = plan.saved_by_layer()
    table = _table(console, f"{ACTIVATIONS}, bytes of one micro-batch", "layer", "kept", "bytes", left=("kept",))
    for layer, names, count in _alike(layers):
        for i, (name, nbytes) in enumerate(names.items()):
            table.add_row(layer if i == 0 else "", name, f"{nbytes:,}")
        table.add_row("", "a layer" if count > 1 else "together", f"{sum(names.values()):,}")
        table.add_section()
    table.add_row("all", "", f"{sum(sum(names.values()) for names in layers.values()):,}")
    console.print(table)


def _alike(layers: dict[str, dict[str, int]]) -> list[tuple[str, dict[str, int], int]]:
    """(name, what is kept, number of layers) of runs of layers that keep the same."""
    runs: list[tuple[list[str], dict[str, int]]] = []
    for layer, names in layers.items():
        if runs and runs[-1][1] == names:
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], names))
    return [(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}", names, len(group)) for group, names in runs]


def _print_flops(console: Console, plan: TrainingPlan) -> None:
    full = bool(plan.config.checkpoint_every)
    rule = rule_flops_per_token(plan.model, full_recompute=full)
    table = _table(console, "FLOPs", "", "a token", "a step")
    factor = "8 P (full recomputation)" if full else "6 P"
    table.add_row(f"{factor}, P = {matmul_parameters(plan.model):,}", f"{rule:,}", f"{rule * plan.num_tokens:,}")
    exact = plan.matmul_attention_flops
    table.add_row("matmul and attention", f"{exact / plan.num_tokens:,.0f}", f"{exact:,}")
    table.add_row("every op", f"{plan.flops / plan.num_tokens:,.0f}", f"{plan.flops:,}")
    console.print(table)


def _print_card(console: Console, card: CardPlan) -> None:
    title = (
        f"one of {card.cards * card.tensor_parallel} cards: {card.cards} data-parallel with ZeRO stage "
        f"{card.zero_stage}, {card.tensor_parallel} tensor-parallel"
    )
    table = _table(console, title, "kind", "a card")
    table.add_row("parameters", size(card.parameter_bytes))
    table.add_row("gradients", size(card.gradient_bytes))
    table.add_row("optimizer states", size(card.optimizer_bytes))
    table.add_row("all three", size(card.states_bytes))
    table.add_row("gathered layer", size(card.gathered_bytes))
    table.add_section()
    table.add_row("peak", size(card.peak_bytes))
    console.print(table)


def _print_ops(console: Console, plan: TrainingPlan) -> None:
    left = ("op", "inputs", "outputs", "kept")
    headings = ("phase", "op", "inputs", "outputs", "FLOPs", "bytes", "live", "kept")
    table = _table(console, "ops of a step", *headings, left=left)
    for row in op_rows(plan):
        shapes = (" ".join("x".join(map(str, shape)) for shape in row[name]) for name in ("inputs", "outputs"))
        table.add_row(
            row["phase"],
            row["op"],
            *shapes,
            f"{row['flops']:,}",
            size(row["bytes"]),
            size(row["live_bytes"]),
            "yes" if row["kept"] else "",
        )
    console.print(table)


# -- inference ---------------------------------------------------------------------------------------------------------
def inference_json(plan: InferencePlan, num_parameters: int) -> dict[str, Any]:
    """All figures of an inference plan."""
    more = {"kv_bytes": plan.kv_bytes, "total_bytes": plan.total_bytes, "num_parameters": num_parameters}
    return dataclasses.asdict(plan) | more


def print_inference(console: Console, plan: InferencePlan, num_parameters: int) -> None:
    """The same figures as a table."""
    cards = f", one of {plan.tensor_parallel} cards" if plan.tensor_parallel > 1 else ""
    table = _table(console, f"generation: {num_parameters:,} parameters in {plan.dtype}{cards}", "", "bytes")
    table.add_row("weights", size(plan.weight_bytes))
    table.add_row("keys and values of a token", f"{plan.kv_bytes_per_token:,} B")
    table.add_row(f"keys and values of {plan.batch_size} x {plan.seq_len:,} tokens", size(plan.kv_bytes))
    table.add_row("temporaries of a prompt", size(plan.workspace_bytes))
    table.add_section()
    table.add_row("together", size(plan.total_bytes))
    if plan.largest_batch is not None:
        table.add_row(f"largest batch of {plan.seq_len:,} tokens that fits", f"{plan.largest_batch:,}")
    console.print(table)
