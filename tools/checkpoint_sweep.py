"""Blocks per checkpoint against peak memory and step time: what recomputation costs and gives back."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import BadInputError
from ..engine.vulkan_engine import VulkanEngine
from .memory_plan import plan_training
from .model_setup import make_model, make_optimizer, make_training_step
from .run_config import RunConfig


@dataclass
class SweepPoint:
    """blocks: a checkpoint, 0 is no recomputation. peak_bytes: planned. seconds: median of the steps."""

    blocks: int
    peak_bytes: int
    seconds: float


def sweep_checkpoints(config: RunConfig, vocab_size: int, device: str | None, rounds: int) -> list[SweepPoint]:
    """Every number of blocks a checkpoint from 0 to num_layers. Steps of all settings take turns, so that a busy
    machine slows all of them alike."""
    strides = range(config.num_layers + 1)
    configs = [
        dataclasses.replace(config, checkpoint_every=stride, recompute="", memory_budget=None) for stride in strides
    ]
    peaks = [plan_training(each, vocab_size).peak_bytes for each in configs]
    with VulkanEngine(device) as engine:
        step = _stepper(engine, config, vocab_size)
        times: list[list[float]] = [[] for _ in strides]
        for number in range(rounds + 1):
            for stride in strides:
                seconds = step(stride, number)
                if number:  # the first round compiles
                    times[stride].append(seconds)
    return [SweepPoint(stride, peaks[stride], statistics.median(times[stride])) for stride in strides]


def _stepper(engine: VulkanEngine, config: RunConfig, vocab_size: int) -> Callable[[int, int], float]:
    model = make_model(engine, config, vocab_size)
    model.set_recompute(())
    training_step = make_training_step(model, make_optimizer(model, config), config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (config.batch_size, config.seq_len)).astype(np.int32)
    batches = [(tokens, np.roll(tokens, -1, axis=1))] * config.accum_steps

    def run(stride: int, number: int) -> float:
        model.set_checkpoint_every(stride)
        start = time.perf_counter()
        training_step(batches, step=number, learning_rate=config.lr)
        return time.perf_counter() - start

    return run


def draw_sweep(points: list[SweepPoint], path: Path, title: str) -> None:
    """Write a PNG: peak memory and step time over blocks a checkpoint. Raises BadInputError when it cannot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    other: Any = axes.twinx()
    x = [point.blocks for point in points]
    axes.plot(x, [point.peak_bytes / 1e6 for point in points], "o-", color="#5e81ac", label="planned peak, MB")
    other.plot(
        x, [point.seconds / points[0].seconds for point in points], "s--", color="#bf616a", label="step time, ratio"
    )
    axes.set(xlabel="blocks a checkpoint (0: no recomputation)", ylabel="MB", title=title, ylim=(0, None))
    other.set(ylabel="step time against no recomputation", ylim=(0, None))
    figure.legend(loc="lower center", bbox_to_anchor=(0.5, 0.12))
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise BadInputError(f"cannot write the picture {path}: {error.strerror or error}") from error
