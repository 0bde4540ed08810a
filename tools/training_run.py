"""The training loop: steps, log, held-out losses, saves, and stopping in good order."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..engine.compute_engine import ComputeEngine
from ..engine.errors import VkfoldError
from ..nn.fused_update import OVERFLOWS
from ..nn.gpt_model import GPTModel
from ..nn.optimizers import Optimizer
from ..nn.schedules import Schedule
from ..nn.training_step import MicroBatch, evaluate_loss
from .memory_timeline import MemoryTimeline
from .model_setup import make_training_step
from .progress import JsonLog, LogError, Progress
from .run_config import RunConfig
from .run_state import RunState
from .saves import write_save
from .text_data import ShuffledWindows
from .training_data import TrainingData


class NonFiniteError(VkfoldError):
    """A loss or gradient that is NaN or infinite. The weights are those before the step."""


@dataclasses.dataclass
class Outcome:
    """How a run ended. held_out_loss: nats a byte, None without a held-out part."""

    step: int
    stopped_by: str | None
    held_out_loss: float | None
    last_save: Path | None


class TrainingRun:
    """Everything a run consists of, and the loop over its steps.

    step: optimizer steps done so far. windows: where the next batch comes from. root: folder of saves, or None.
    timeline: written after the first step.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        model: GPTModel,
        optimizer: Optimizer,
        schedule: Schedule,
        windows: ShuffledWindows,
        *,
        step: int,
        num_steps: int,
        root: Path | None,
        timeline: MemoryTimeline | None = None,
    ) -> None:
        self.config = config
        self.data = data
        self.model = model
        self.engine: ComputeEngine = model.engine
        self.optimizer = optimizer
        self.schedule = schedule
        self.windows = windows
        self.step = step
        self.num_steps = num_steps
        self.root = root
        self.timeline = timeline
        self._pool_stats: dict[str, Any] = {}
        self._ahead: tuple[ShuffledWindows, list[MicroBatch]] | None = None  # the next step's, loaded during this one
        self._training_step = make_training_step(model, optimizer, config, on_pools=self._sample_pools)

    # -- the loop ----------------------------------------------------------------------------------------------------
    def run(self) -> Outcome:
        """Train until the last step, a signal, or a loss that is not finite.

        SIGINT and SIGTERM end the run after the step in progress, with a save. Raises NonFiniteError, after a save of
        the weights before that step, naming the tensor.
        """
        config = self.config
        progress = Progress(self.step, self.num_steps, config.log_interval)
        log = JsonLog(self._log_path(), self.step)
        last_save: Path | None = None
        saved_step, held_out_step, loss = self.step, -1, None
        try:
            with _signals() as stopped_by:
                while self.step < self.num_steps and not stopped_by():
                    self._one_step(progress, log)
                    if config.eval_interval and self.step % config.eval_interval == 0:
                        loss, held_out_step = self._held_out(progress, log, stopped_by), self.step
                    if self.root and config.save_interval and self.step % config.save_interval == 0:
                        last_save, saved_step = self.save(), self.step
                if self.root and saved_step != self.step:
                    last_save = self.save()
                if stopped_by():
                    return Outcome(self.step, stopped_by(), None, last_save)
                if held_out_step != self.step:
                    loss = self._held_out(progress, log, stopped_by)
                return Outcome(self.step, None, loss, last_save)
        except LogError as error:
            if self.root is None or saved_step == self.step:
                raise
            raise LogError(f"{error}; the state after step {self.step} is saved in {self.save()}") from error
        finally:
            progress.close()
            log.close()

    def _one_step(self, progress: Progress, log: JsonLog) -> None:
        config, started = self.config, time.perf_counter()
        self.engine.reset_peak()
        cursor = self.windows.epoch, self.windows.index
        self.windows, micro_batches = self._ahead or self._load()
        self._ahead = None
        rate = self.schedule(self.step)
        if self.timeline is not None:
            self.timeline.start(self.model, self.optimizer, len(micro_batches))
        result = self._training_step(micro_batches, step=self.step, learning_rate=rate, while_running=self._load_ahead)
        if not result.finite:
            name = result.non_finite or ""
            what = name if name in ("loss", "global gradient norm") else f"gradient of {name}"
            if name.startswith(OVERFLOWS):
                what = f"norm of the gradient of {name.removeprefix(OVERFLOWS)}"
            value = result.loss if result.non_finite == "loss" else result.grad_norm
            if result.updated:
                kept = (
                    "other weights were updated before it was known (--fused-update), so this state is not saved: "
                    + ("resume from the last save" if self.root else "start again")
                )
            else:
                self.windows = ShuffledWindows(len(self.data.train), config.seed, *cursor)
                saved = f"; the state before it is saved in {self.save()}" if self.root else ""
                kept = f"the weights were not updated{saved}"
            raise NonFiniteError(
                f"step {self.step + 1}: the {what} is not finite ({'loss' if what == 'loss' else 'norm'} {value}), "
                f"{kept}. {self._hint_for_non_finite()}"
            )
        if self.timeline is not None:
            self.timeline.finish(
                f"step {self.step + 1}, {self.model.num_parameters:,} parameters on {self.engine.name}"
            )
            self.timeline = None
        self.engine.finish_step()
        self.step += 1
        seconds = time.perf_counter() - started
        speed = config.batch_size * config.accum_steps * config.seq_len / seconds
        driver = self.engine.driver_memory()
        log.write(
            step=self.step,
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            time=seconds,
            tokens_per_s=speed,
            epoch=cursor[0],
            replayed=result.replayed,
            pool_stats=self._pool_stats,
            driver_memory=None if driver is None else driver._asdict(),
            staging_bytes=self.engine.staging_bytes(),
        )
        progress.step(self.step, result.loss, rate, result.grad_norm, speed)

    def _load(self) -> tuple[ShuffledWindows, list[MicroBatch]]:
        """The next step's data, and the windows as they are once it was drawn; `windows` stay where they are."""
        config, windows = self.config, copy.copy(self.windows)
        numbers = windows.draw(config.batch_size * config.accum_steps)
        parts = range(0, len(numbers), config.batch_size)
        return windows, [self.data.train.batch(numbers[i : i + config.batch_size]) for i in parts]

    def _load_ahead(self) -> None:
        if self.step + 1 < self.num_steps:
            self._ahead = self._load()
            self._training_step.prepare(self._ahead[1])

    def _hint_for_non_finite(self) -> str:
        """What to try, of what these options do not do already."""
        config, options = self.config, ["a smaller --lr"]
        if config.warmup_steps < self.num_steps // 10:
            options.append("a longer --warmup-steps")
        if not config.max_norm and not config.fused_update:
            options.append("--max-norm 1")
        start = " or ".join([", ".join(options[:-1]), options[-1]]) if options[1:] else options[0]
        return f"{start[0].upper()}{start[1:]} may help"

    def _held_out(self, progress: Progress, log: JsonLog, stopped_by: Callable[[], str | None]) -> float | None:
        """Held-out loss in nats a byte, shown and logged; None without such text, or when a signal came meanwhile."""
        if not len(self.data.held_out):
            return None
        batches = self.data.held_out.batches(self.config.batch_size)
        per_token = evaluate_loss(self.model, itertools.takewhile(lambda _: not stopped_by(), batches))
        self.engine.release_idle_pool_blocks()
        if stopped_by():
            return None
        per_byte = per_token / self.data.held_out_bytes_per_token()
        log.write(step=self.step, held_out_loss=per_token, held_out_loss_per_byte=per_byte)
        progress.say(f"step {self.step}/{self.num_steps}  held-out loss {per_byte:.4f} nats/byte")
        return per_byte

    def _sample_pools(self, phase: str, micro_batch: int, stats: dict[str, Any]) -> None:
        """Pool statistics after a phase; with several micro-batches, after the last one's."""
        if self.timeline is not None:
            self.timeline.on_phase(phase, micro_batch)
        self._pool_stats[phase] = {name: _as_dict(each) for name, each in stats.items()}

    def _log_path(self) -> str | None:
        if self.config.log_file is None and self.root is not None:
            return str(self.root / "log.jsonl")
        return self.config.log_file

    # -- saves -------------------------------------------------------------------------------------------------------
    def save(self) -> Path:
        """Save the state after the steps done so far. Raises BadInputError when the disk is full."""
        assert self.root is not None
        state = RunState(
            config=dataclasses.asdict(self.config),
            num_steps=self.num_steps,
            schedule=self.schedule.state_dict(),
            seed=self.windows.seed,
            epoch=self.windows.epoch,
            index=self.windows.index,
            num_windows=self.windows.num_windows,
            fingerprint=self.data.fingerprint,
            tokenizer_kind=self.data.tokenizer.kind,
            vocab_size=self.data.tokenizer.vocab_size,
            engine=self.engine.name,
        )
        return write_save(
            self.root,
            self.step,
            self.model.state_dict,
            self.optimizer.state_dict,
            state.to_dict(),
            self.data.tokenizer,
            self.config.keep,
        )


def _as_dict(stats: Any) -> dict[str, Any]:
    values = stats.as_dict() if hasattr(stats, "as_dict") else dict(vars(stats))
    return {name: value for name, value in values.items() if not isinstance(value, float) or math.isfinite(value)}


@contextmanager
def _signals() -> Iterator[Callable[[], str | None]]:
    """Until the end of the block, SIGINT and SIGTERM are only noted; a second one acts as it did before.

    Gives a function that returns the name of the signal that came, or None. Outside the main thread nothing is changed.
    """
    came: list[str] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        came.append(signal.Signals(number).name)
        for each, handler in before.items():
            signal.signal(each, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    try:
        yield lambda: came[0] if came else None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
