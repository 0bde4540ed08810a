"""`vkfold tune`: measure the variants of matmul ahead of a run, for the products of a training step or for shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from ..engine.compute_engine import Rule
from ..engine.errors import BadInputError, OutOfDeviceMemoryError
from ..engine.op import Op
from ..engine.ops.matmul import MATMUL, layout_of
from ..engine.ops.matmul_launch import Layout
from ..engine.plan_engine import PlanEngine
from ..engine.tensor import Tensor, TensorSpec
from ..engine.tuner import Measured, tune_product
from ..engine.variant_choice import MatmulChooser, select, tuning_key
from ..engine.vulkan_engine import VulkanEngine
from .console import TableConsole, run_program
from .model_setup import gpt_config, make_model, make_optimizer, make_training_step
from .options import POSITIVE, option, parse_options
from .presets import PRESETS, preset
from .run_config import RunConfig, check_config

DESCRIPTION = """Measure the variants of every matmul that a training step does and keep the times, so that later runs
take the fastest. Takes the options of text_train (inputs are not read), or --shapes. Changes time and never bits."""

TUNE = "tune"
_SHAPE = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)x(\d+)(?::([NT][NT]))?")
Products = dict["tuple[Layout, str]", int]


@dataclass
class TuneConfig(RunConfig):
    """The options of text_train, and what to tune."""

    preset: str | None = option(
        str, None, f"start from a model with a name, other options change it: {', '.join(PRESETS)}", group=TUNE
    )
    shapes: str | None = option(
        str, None, "products instead of a model's: [BATCHx]MxNxK[:NN|NT|TN|TT], several with commas", group=TUNE
    )
    rounds: int = option(int, 5, "measurements of each variant, in turns; the least counts", group=TUNE, rule=POSITIVE)
    again: bool = option(bool, False, "measure also what has been measured before", group=TUNE)
    json: bool = option(bool, False, "print one JSON object instead of a table", group=TUNE)


class _Products(PlanEngine):
    """Counts the products of what runs on it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Products = {}

    def _launch(self, op: Op, rule: Rule, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any) -> None:
        super()._launch(op, rule, inputs, made, settings)
        if op is MATMUL:
            a, b = inputs[:2]
            assert a is not None and b is not None
            trans_a, trans_b = settings["trans_a"], settings["trans_b"]
            key = layout_of(a.spec, b.spec, trans_a, trans_b), f"{'NT'[trans_a]}{'NT'[trans_b]}"
            self.products[key] = self.products.get(key, 0) + 1


def products_of_step(config: RunConfig, vocab_size: int) -> Products:
    """(layout, letters) -> how often, of one training step. Raises BadInputError for sizes that cannot be."""
    engine = _Products()
    tokens = np.zeros((config.batch_size, config.seq_len), np.int32)
    try:
        model = make_model(engine, config, vocab_size)
        step = make_training_step(model, make_optimizer(model, config), config)
        step([(tokens, tokens)] * config.accum_steps, step=0, learning_rate=config.lr)
    except ValueError as error:
        raise BadInputError(f"these sizes are too large: {error}") from error
    return engine.products


def products_of_text(text: str) -> Products:
    """(layout, letters) -> 1, from "512x512x512, 8x64x64x32:NT". Raises BadInputError for anything else."""
    products: Products = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _SHAPE.fullmatch(part)
        if match is None or not all(int(size) for size in match.groups()[:4] if size is not None):
            raise BadInputError(
                f"{part!r} is no product: write MxNxK, BATCHxMxNxK, or either with :NN, :NT, :TN or :TT behind it"
            )
        batch, m, n, k = (int(size) if size else 0 for size in match.groups()[:4])
        letters = match[5] or "NN"
        lead = (batch,) if batch else ()
        trans_a, trans_b = letters[0] == "T", letters[1] == "T"
        a, b = ((k, m) if trans_a else (m, k)), ((n, k) if trans_b else (k, n))
        products[layout_of(TensorSpec((*lead, *a)), TensorSpec((*lead, *b)), trans_a, trans_b), letters] = 1
    if not products:
        raise BadInputError("--shapes names no product")
    return products


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return run_program("vkfold tune", _program, argv)


def _program(argv: Sequence[str]) -> int:
    config, given = parse_options(TuneConfig, argv, "vkfold tune", DESCRIPTION)
    if config.preset is not None:
        for name, value in preset(config.preset).items():
            if name not in given:
                setattr(config, name, value)
    if config.shapes is not None:
        products = products_of_text(config.shapes)
    else:
        check_config(config)
        gpt_config(config, 256)
        with_vocab = "vocab_size" in given or config.preset is not None
        products = products_of_step(config, config.vocab_size if with_vocab else 256)
    with VulkanEngine(config.device) as engine:
        rows = [_row(engine, config, layout, letters, times) for (layout, letters), times in products.items()]
        chooser = MatmulChooser.of(engine.recorder)
        if config.json:
            about = {"device": engine.name, "file": str(chooser.table.path), "barred": chooser.table.barred}
            print(json.dumps({**about, "products": rows}, indent=1))
            return 0
        _print(rows)
        for name, reason in chooser.table.barred.items():
            print(f"barred: {name}: {reason}")
        print(f"kept in {chooser.table.path}")
    return 0


def _row(engine: VulkanEngine, config: TuneConfig, layout: Layout, letters: str, times: int) -> dict[str, Any]:
    chooser = MatmulChooser.of(engine.recorder)
    key = tuning_key(layout.product, letters)
    estimated = _estimated(chooser, layout)
    seconds = {} if config.again else chooser.table.times.get(key, {})
    measured = Measured(key, seconds)
    note = "measured before" if seconds else ""
    if not seconds:
        try:
            measured = tune_product(engine.recorder, layout, letters, rounds=config.rounds)
        except OutOfDeviceMemoryError as error:
            return {"product": key, "times": times, "note": str(error)}
    best = measured.best
    return {
        "product": key,
        "times": times,
        "estimated": estimated,
        "best": best,
        "ms": 1e3 * measured.seconds[best],
        "gflops": 2e-9 * layout.product.work / measured.seconds[best],
        "gain": measured.seconds.get(estimated, float("nan")) / measured.seconds[best],
        "all_ms": {name: 1e3 * value for name, value in sorted(measured.seconds.items(), key=lambda item: item[1])},
        "note": note,
    }


def _estimated(chooser: MatmulChooser, layout: Layout) -> str:
    return select(chooser.device, layout.product, "", chooser.table).choice.name


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None)
    for heading in ("product", "a step", "estimate's choice", "fastest", "ms", "GFLOP/s", "gain", ""):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        if "best" not in row:
            table.add_row(row["product"], str(row["times"]), "", "", "", "", "", row["note"])
            continue
        gain = "" if row["gain"] != row["gain"] else f"{row['gain']:.2f}x"
        numbers = (f"{row['ms']:.3f}", f"{row['gflops']:.1f}", gain)
        table.add_row(row["product"], str(row["times"]), row["estimated"], row["best"], *numbers, row["note"])
    TableConsole(highlight=False).print(table)
