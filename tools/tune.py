"""`vkfold tune`: measure kernel variants ahead of a run, for the calls of a training step or for shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..engine.errors import BadInputError, OutOfDeviceMemoryError
from ..engine.recorder import Recorder
from ..engine.tuner import Measured
from ..engine.variant_families import CHOOSERS
from ..engine.vulkan_engine import VulkanEngine
from .console import TableConsole, run_program
from .model_setup import gpt_config
from .options import POSITIVE, flag, option
from .presets import PRESETS
from .run_config import RunConfig, check_config
from .step_options import parse_step_options, vocab_size_of
from .tune_calls import TunedCall, calls_of_step, calls_of_text

DESCRIPTION = """Measure the variants of every kernel of a training step that has some and keep the times, so that
later runs take the fastest. Takes the options of text_train (inputs are not read) or --shapes.
Changes time, never bits."""

TUNE = "tune"
WITH_SHAPES = {"shapes", "rounds", "again", "json", "device", "engine", "config"}


@dataclass
class TuneConfig(RunConfig):
    """The options of text_train, and what to tune."""

    preset: str | None = option(
        str, None, f"start from a model with a name, other options change it: {', '.join(PRESETS)}", group=TUNE
    )
    shapes: str | None = option(
        str,
        None,
        "instead of a model's: products [BATCHx]MxNxK[:NN|NT|TN|TT] (of [M, K] and [K, N]; ./run bench writes MxKxN) "
        "and causal attention:BATCHxHEADS[/KV_HEADS]xSEQxHEAD_DIM, several with commas",
        group=TUNE,
    )
    rounds: int = option(int, 5, "measurements of each variant, in turns; the least counts", group=TUNE, rule=POSITIVE)
    again: bool = option(bool, False, "measure also what has been measured before", group=TUNE)
    json: bool = option(bool, False, "print one JSON object instead of a table", group=TUNE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code: 1 when nothing could be measured, or not be kept."""
    return run_program("vkfold tune", _program, argv)


def _program(argv: Sequence[str]) -> int:
    config, given = parse_step_options(TuneConfig, argv, "vkfold tune", DESCRIPTION)
    if config.shapes is not None:
        if others := sorted(given - WITH_SHAPES):
            raise BadInputError(
                f"--shapes says what is measured, {flag(others[0])} what a model does: give one of them"
            )
        calls = calls_of_text(config.shapes)
    else:
        check_config(config)
        gpt_config(config, 256)
        calls = calls_of_step(config, vocab_size_of(config, given))
    with VulkanEngine(config.device) as engine:
        rows = [_row(engine.recorder, config, call, times) for call, times in calls.items()]
        tables = [chooser.of(engine.recorder).table for chooser in CHOOSERS]
        where = engine.name
    barred = {name: reason for table in tables for name, reason in table.barred.items()}
    files = [str(table.path) for table in tables if table.times and not table.unsaved]
    if config.json:
        print(json.dumps({"device": where, "files": files, "barred": barred, "calls": rows}, indent=1))
    else:
        _print(rows)
        for name, reason in barred.items():
            print(f"barred: {name}: {reason}")
        for file in files:
            print(f"kept in {file}")
    lost = [table for table in tables if table.unsaved]
    for table in lost:
        print(f"vkfold tune: warning: nothing was kept: {table.unsaved}", file=sys.stderr)
    return 0 if not lost and any("best" in row for row in rows) else 1


def _row(gpu: Recorder, config: TuneConfig, call: TunedCall, times: int) -> dict[str, Any]:
    seconds = {} if config.again else call.chooser(gpu).table.times.get(call.key, {})
    measured = Measured(call.key, seconds)
    note = "measured before" if seconds else ""
    if not seconds:
        try:
            measured = call.tune(gpu, config.rounds)
        except OutOfDeviceMemoryError as error:
            return {"call": call.key, "times": times, "note": str(error)}
    if not measured.seconds:
        return {"call": call.key, "times": times, "note": "the variants worth measuring are barred"}
    best, unmeasured = measured.best, call.unmeasured(gpu)
    return {
        "call": call.key,
        "times": times,
        "unmeasured": unmeasured,
        "best": best,
        "ms": 1e3 * measured.seconds[best],
        "gflops": 1e-9 * call.flops / measured.seconds[best],
        "gain": measured.seconds[unmeasured] / measured.seconds[best] if unmeasured in measured.seconds else None,
        "all_ms": {name: 1e3 * value for name, value in sorted(measured.seconds.items(), key=lambda item: item[1])},
        "note": note,
    }


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None)
    for heading in ("call", "a step", "unmeasured", "fastest", "ms", "GFLOP/s", "gain", ""):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        if "best" not in row:
            table.add_row(row["call"], str(row["times"]), "", "", "", "", "", "not measured")
            continue
        gain = "" if row["gain"] is None else f"{row['gain']:.2f}x"
        numbers = (f"{row['ms']:.3f}", f"{row['gflops']:.1f}", gain)
        table.add_row(row["call"], str(row["times"]), row["unmeasured"], row["best"], *numbers, row["note"])
    TableConsole(highlight=False).print(table)
    for row in rows:
        if "best" not in row:
            print(f"not measured: {row['call']}: {row['note']}")
