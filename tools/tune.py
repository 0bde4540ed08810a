"""`vkfold tune`: measure kernel variants ahead of a run, for the calls of a training step or for shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..engine.errors import OutOfDeviceMemoryError
from ..engine.recorder import Recorder
from ..engine.tuner import Measured
from ..engine.variant_families import CHOOSERS
from ..engine.vulkan_engine import VulkanEngine
from .console import TableConsole, run_program
from .model_setup import gpt_config
from .options import POSITIVE, option, parse_options
from .presets import PRESETS, preset
from .run_config import RunConfig, check_config
from .tune_calls import TunedCall, calls_of_step, calls_of_text

DESCRIPTION = """Measure the variants of every matmul that a training step does and keep the times, so that later runs
take the fastest. Takes the options of text_train (inputs are not read), or --shapes. Changes time and never bits."""

TUNE = "tune"


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
        calls = calls_of_text(config.shapes)
    else:
        check_config(config)
        gpt_config(config, 256)
        with_vocab = "vocab_size" in given or config.preset is not None
        calls = calls_of_step(config, config.vocab_size if with_vocab else 256)
    with VulkanEngine(config.device) as engine:
        rows = [_row(engine.recorder, config, call, times) for call, times in calls.items()]
        tables = [chooser.of(engine.recorder).table for chooser in CHOOSERS]
        barred = {name: reason for table in tables for name, reason in table.barred.items()}
        files = [str(table.path) for table in tables if table.times]
        if config.json:
            print(json.dumps({"device": engine.name, "files": files, "barred": barred, "calls": rows}, indent=1))
            return 0
        _print(rows)
        for name, reason in barred.items():
            print(f"barred: {name}: {reason}")
        for file in files:
            print(f"kept in {file}")
    return 0


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
            table.add_row(row["call"], str(row["times"]), "", "", "", "", "", row["note"])
            continue
        gain = "" if row["gain"] is None else f"{row['gain']:.2f}x"
        numbers = (f"{row['ms']:.3f}", f"{row['gflops']:.1f}", gain)
        table.add_row(row["call"], str(row["times"]), row["unmeasured"], row["best"], *numbers, row["note"])
    TableConsole(highlight=False).print(table)
