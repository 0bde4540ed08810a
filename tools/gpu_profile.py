"""gpu_profile: where a training step's time goes on the device, op by op, against what the device can do."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from ..engine.profiler import OpProfiler, OpSample
from ..engine.vulkan_engine import VulkanEngine
from .budget_option import within_memory_budget
from .checkpoint_sweep import draw_sweep, sweep_checkpoints
from .console import TableConsole, run_program
from .device_peaks import measure_peaks
from .memory_report import size
from .model_setup import budget_bytes, gpt_config, make_model, make_optimizer, make_training_step
from .options import NOT_NEGATIVE, POSITIVE, option
from .presets import PRESETS
from .profile_pictures import write_files
from .profile_reasons import kernel_reasons
from .profile_scopes import ModelScopes
from .profile_summary import Summary, kind_of, summarize
from .run_config import RunConfig, check_config
from .size_check import check_budget
from .step_options import parse_step_options, vocab_size_of

DESCRIPTION = """Profile training steps on the device: time of every op by timestamps, grouped by op, layer and phase,
against the device's measured peaks. Takes the options of text_train (inputs are not read: the tokens are random)
and writes roofline.png, profile.html, trace.json (for Perfetto) and profile.json."""

PROFILE = "profile"


@dataclass
class ProfileConfig(RunConfig):
    """The options of text_train, and what to profile."""

    preset: str | None = option(
        str, None, f"start from a model with a name, other options change it: {', '.join(PRESETS)}", group=PROFILE
    )
    steps: int = option(int, 3, "steps to profile; each op's time is the median", group=PROFILE, rule=POSITIVE)
    warmup: int = option(int, 2, "steps before them", group=PROFILE, rule=NOT_NEGATIVE)
    out: str = option(str, "gpu-profile", "folder for the files", group=PROFILE)
    json: bool = option(bool, False, "print one JSON object instead of tables", group=PROFILE)
    sweep_checkpoints: bool = option(
        bool, False, "also measure every number of blocks a checkpoint: peak memory, step time", group=PROFILE
    )


def profile_config(argv: Sequence[str]) -> tuple[ProfileConfig, int]:
    """The options, a preset's filled in, and the size of the vocabulary. Raises BadInputError for wrong options."""
    config, given = parse_step_options(ProfileConfig, argv, "gpu_profile", DESCRIPTION)
    check_config(config)
    gpt_config(config, 256)
    return config, vocab_size_of(config, given)


def profile_steps(engine: VulkanEngine, config: ProfileConfig, vocab_size: int) -> list[list[OpSample]]:
    """Samples of each profiled step."""
    model = make_model(engine, config, vocab_size)
    optimizer = make_optimizer(model, config)
    profiler = OpProfiler(engine)
    scopes = ModelScopes(profiler, model)
    step = make_training_step(model, optimizer, config, scopes.on_phase)
    rng = np.random.default_rng(config.seed)
    tokens = rng.integers(0, vocab_size, (config.batch_size, config.seq_len)).astype(np.int32)
    batches = [(tokens, np.roll(tokens, -1, axis=1))] * config.accum_steps
    for number in range(config.warmup):
        step(batches, step=number, learning_rate=config.lr)
    steps = []
    profiler.attach()
    try:
        with scopes:
            for number in range(config.warmup, config.warmup + config.steps):
                scopes.start(config.accum_steps)
                step(batches, step=number, learning_rate=config.lr)
                steps.append(profiler.take())
    finally:
        profiler.detach()
    return steps


def _print(console: Console, summary: Summary, reasons: Sequence[tuple[str, str]]) -> None:
    peaks = summary.peaks
    console.print(
        f"step {summary.step_seconds * 1e3:.2f} ms on the device, {summary.busy_seconds / summary.step_seconds:.0%} "
        f"of it in ops; MFU {summary.mfu:.1%}, MBU {summary.mbu:.1%}\nmeasured peaks: {peaks.flops / 1e9:.1f} GFLOP/s "
        f"(matmul {peaks.matmul_flops / 1e9:.1f}), {peaks.bandwidth / 1e9:.1f} GB/s",
        highlight=False,
    )
    views = {
        "kind": lambda s: kind_of(s.op),
        "op": lambda s: s.op,
        "phase": lambda s: s.scope.phase or "(none)",
        "layer": lambda s: s.scope.layer or "(none)",
    }
    for heading, key in views.items():
        table = Table(title=f"by {heading}")
        for i, column in enumerate((heading, "calls", "ms", "share", "GFLOP/s", "GB/s", "of the roof")):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in summary.grouped(key):
            seconds = max(row.seconds, 1e-12)
            table.add_row(
                row.name,
                str(row.calls),
                f"{row.seconds * 1e3:.3f}",
                f"{row.seconds / summary.busy_seconds:.1%}",
                f"{row.flops / seconds / 1e9:.2f}",
                f"{row.bytes_moved / seconds / 1e9:.2f}",
                f"{row.roofline_share(peaks):.0%}",
            )
        console.print(table)
    table = Table("kernel", "why it was chosen", title="kernels")
    for kernel, reason in reasons:
        table.add_row(kernel, reason)
    console.print(table)


def _program(argv: Sequence[str]) -> int:
    config, vocab_size = profile_config(argv)
    config, within = within_memory_budget(config, vocab_size)
    if within is not None:
        print(f"--memory-budget asks for: {within.mode}", file=sys.stderr)
    folder = Path(config.out)
    console = TableConsole(soft_wrap=False, stderr=config.json)
    with VulkanEngine(config.device) as engine:
        check_budget(config, vocab_size, budget_bytes(engine), automatic=within is not None)
        steps = profile_steps(engine, config, vocab_size)
        summary = summarize(steps, measure_peaks(engine))
        title = f"{config.preset or 'model'} on {engine.name}"
        reasons = kernel_reasons(summary.samples)
    paths = write_files(folder, summary, steps, title, reasons)
    result = summary.as_dict() | {"kernels": dict(reasons)}
    if not config.json:
        _print(console, summary, reasons)
    if config.sweep_checkpoints:
        points = sweep_checkpoints(config, vocab_size, config.device, config.steps)
        paths.append(folder / "checkpoints.png")
        draw_sweep(points, paths[-1], title)
        result["checkpoints"] = [vars(point) for point in points]
        table = Table("blocks a checkpoint", "planned peak", "step ms", "ratio", title="recomputation")
        for point in points:
            ratio = point.seconds / points[0].seconds
            table.add_row(str(point.blocks), size(point.peak_bytes), f"{point.seconds * 1e3:.1f}", f"{ratio:.2f}")
        console.print(table)
    if config.json:
        print(json.dumps(result, indent=1))
    for path in paths:
        print(f"written: {path}", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    return run_program("gpu_profile", _program, argv)


if __name__ == "__main__":
    sys.exit(main())
