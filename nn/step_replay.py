"""Which steps of a TrainingStep are the same as one before, and are submitted again instead of being recorded.

A step is captured when two recorded steps had the same key and handed the same stream of commands to the device, others
in between or not. From then on it is replayed whenever its key comes up: shapes, optimizer and its settings, every
attribute of the model's parts (nn/mode_watch.py), every VKFOLD_* switch, and the live ranges of all memory pools. With
equal live ranges the memory that the captured step writes is free, or is what recording would write.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ..engine import switches
from ..engine.errors import OutOfDeviceMemoryError
from ..engine.remembered_calls import calls_since, prepare_calls, start_counting
from ..engine.replay import Capture, StepInputs, StepReplayer
from ..engine.step_parameters import StepParameters
from ..engine.step_stream import StepStream
from ..engine.tensor import Tensor
from .counted_dict import CountedDict
from .mode_watch import ModeWatch, Unreported, Watched, do_what_they_say, parts_of

MAX_CAPTURES = 8  # of one TrainingStep: sequence lengths that alternate, say
MAX_SEEN = 8  # recorded steps of other keys that are remembered until they come up again
_NOT_SETTINGS = ("num_updates", "learning_rate")  # of an optimizer: they reach the device as step parameters

MicroBatch = tuple[np.ndarray, np.ndarray]
Sample = tuple[str, int, dict[str, Any]]  # phase, micro-batch, pool statistics


@dataclass
class Captured:
    """A captured step: its key, and what Python does in such a step beside recording."""

    key: tuple[Any, ...]
    watch: ModeWatch
    changed: dict[tuple[int, str], Any]
    stream: StepStream
    capture: Capture | None = None
    names: Any = None  # whatever the caller needs to make sense of the results
    samples: list[Sample] = field(default_factory=list)
    offloaded_bytes: int = 0
    restored_bytes: int = 0

    def is_like(self, key: tuple[Any, ...], watch: ModeWatch) -> bool:
        """Whether a step with this key, started now, would be the same."""
        return self.watch is watch and not watch.ended and self.key == key and self.changed == watch.changed


class StepReplay:
    """The captures of one TrainingStep. recording: whether the step under way is taken down.

    settings, in its methods: what decides which ops a step records, beside model, optimizer and engine.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.engine = model.engine
        self.engine.check_open()  # before work on the device, which belongs to one thread
        self.replayer: StepReplayer = self.engine.replayer
        self._captured: list[Captured] = []  # the last used first
        self._seen: list[Captured] = []  # recorded and not captured, the last first
        self._now: Captured | None = None  # the step being recorded
        self._unreported = Unreported()
        self._program = self._describe()
        self._remembered = False  # whether the next run will know this step's pipelines and calls
        if prepare_calls(self.engine, self.replayer.recall(self._program)):
            _collect_once()
        self._ahead: tuple[Capture, Sequence[MicroBatch]] | None = None  # whose data already lies in the other set

    def _describe(self) -> str:
        """What this step will record, as far as it matters to which kernels it needs."""
        shapes = {name: p.shape for name, p in self.model.named_parameters().items()}
        return f"{type(self.model).__qualname__} {getattr(self.model, 'config', '')} {type(self.optimizer)} {shapes}"

    # -- is it the same ----------------------------------------------------------------------------------------------
    def find(self, settings: tuple[Any, ...]) -> Captured | None:
        """The captured step that is the same as the one about to be made, if any."""
        if not self._captured or self.engine.replay_obstacle():
            return None
        watch = self._watch()
        if watch is None:
            return None
        key = self._key(settings)
        for i, captured in enumerate(self._captured):
            assert captured.capture is not None
            if captured.is_like(key, watch) and not captured.capture.dropped:
                if i:
                    self._captured.insert(0, self._captured.pop(i))
                return captured
        return None

    def _watch(self) -> ModeWatch | None:
        """The model's watch, None where there is none or layers were exchanged."""
        watch = getattr(self.model, "_watch", None)
        if watch is None or watch.ended or watch.model() is not self.model:
            return None
        return watch if self._unreported.is_same() else None

    def _start_watch(self) -> ModeWatch | None:
        """A watch over all parts there are now; None when some part cannot be relied on."""
        model, optimizer = self.model, self.optimizer
        self._seen.clear()
        if not isinstance(model, Watched):
            return None
        parts = list(parts_of(model))
        if not do_what_they_say((optimizer, *parts)):
            return None
        self._unreported = Unreported((*parts, optimizer))
        return ModeWatch(model, parts)

    def _key(self, settings: tuple[Any, ...]) -> tuple[Any, ...]:
        optimizer = [
            _identity(value) if isinstance(value, dict) else value
            for name, value in vars(self.optimizer).items()
            if name not in _NOT_SETTINGS
        ]
        return settings, optimizer, switches.snapshot(), self.replayer.placement()

    # -- recording ---------------------------------------------------------------------------------------------------
    def start(self, settings: tuple[Any, ...], obstacle: str) -> None:
        """A step is about to be recorded; no gradient is left from the one before. obstacle: to its capture, or ""."""
        stats = self.replayer.stats
        stats.recorded += 1
        self._now = None
        if not self._remembered:
            start_counting(self.engine)
        reason = obstacle or self.engine.replay_obstacle()
        if not reason:
            watch = self._watch() or self._start_watch()
            if watch is not None:
                self._now = Captured(self._key(settings), watch, dict(watch.changed), StepStream())
                self._now.offloaded_bytes = -self.engine.offloaded_bytes
                self._now.restored_bytes = -self.engine.restored_bytes
                self.replayer.start()
                return
            reason = "a layer or the optimizer is not known to record the same ops each time (replay_supported)"
        stats.not_captured[reason] += 1

    @property
    def recording(self) -> bool:
        return self._now is not None

    def set_parameters(self, parameters: StepParameters) -> None:
        """Put the step parameters of a micro-batch in force."""
        self.replayer.bring("parameters", parameters.micro_batch)
        self.engine.set_step_parameters(parameters)

    def upload(self, kind: str, micro_batch: int, array: np.ndarray) -> Tensor:
        """An int32 tensor with the values of an array that differs from step to step."""
        tensor: Tensor = self.engine.empty(array.shape, "int32")
        self.replayer.bring(kind, micro_batch, array.shape)
        self.engine.upload(tensor, array)
        return tensor

    def sample(self, phase: str, micro_batch: int, stats: dict[str, Any]) -> dict[str, Any]:
        """Note statistics of a phase; returns them as they would be without replay."""
        if self._now is None:
            return stats
        self._now.samples.append((phase, micro_batch, stats))
        return self.replayer.in_step(stats)

    def finish(self, results: Sequence[Any], names: Any) -> None:
        """Everything is recorded; `results` are the tensors about to be read."""
        now = self._now
        if now is None:
            self._remember(None)
            return
        now.names = names
        now.offloaded_bytes += self.engine.offloaded_bytes
        now.restored_bytes += self.engine.restored_bytes
        now.stream, uses = self.replayer.finish(results)
        self.engine.flush_batch()  # the device works while what follows is looked at
        self._remember(now.stream)
        self._now = None
        reason = now.stream.obstacle
        if not reason and now.changed != now.watch.changed:
            reason = "a layer's attributes changed during the step"
        if reason:
            self.replayer.stats.not_captured[reason] += 1
            return
        before = next((each for each in self._seen if each.is_like(now.key, now.watch)), None)
        if before is not None:
            self._seen.remove(before)
            if before.stream.same_as(now.stream):
                self._capture(now, uses)
                return
        self._seen = [now, *self._seen[: MAX_SEEN - 1]]

    def _remember(self, stream: StepStream | None) -> None:
        """What the next run prepares. stream: of the step, where it was taken down."""
        if not self._remembered:
            self._remembered = True
            self.engine.flush_batch()
            self.replayer.remember(self._program, stream, calls_since(self.engine))

    def _capture(self, now: Captured, uses: Any) -> None:
        try:
            now.capture = self.replayer.capture(now.stream, uses)
        except OutOfDeviceMemoryError:
            self.replayer.stats.not_captured["no memory for its host data"] += 1
            return
        kept = [each for each in self._captured if each.capture is not None and not each.capture.dropped]
        self._captured = [now, *kept[: MAX_CAPTURES - 1]]
        for each in kept[MAX_CAPTURES - 1 :]:
            assert each.capture is not None
            each.capture.drop("more steps of other shapes or settings than are kept")

    def abandon(self) -> None:
        """The step ended in an error. Harmless when it did not."""
        if self._now is not None:
            self._now = None
            self.replayer.abandon()

    # -- data of the next step ---------------------------------------------------------------------------------------
    def prepare(self, settings: tuple[Any, ...], batches: Sequence[MicroBatch]) -> None:
        """Put the data of the next step where the device will take it from, if that step is likely a replay.

        May be called while a step runs: each capture has two sets of host memory, used in turn.
        """
        self._ahead = None
        for captured in self._captured:
            capture = captured.capture
            if captured.key[0] == settings and capture is not None and not capture.dropped:
                try:
                    _write(capture.inputs_ahead, batches)
                except OutOfDeviceMemoryError:
                    return
                self._ahead = capture, batches
                return

    def discard(self, reason: str) -> None:
        """Drop all captures, and what could become one."""
        self._ahead = None
        self._seen.clear()
        captured, self._captured = self._captured, []
        for each in captured:
            assert each.capture is not None
            each.capture.drop(reason)

    # -- replaying ---------------------------------------------------------------------------------------------------
    def run(
        self,
        captured: Captured,
        batches: Sequence[MicroBatch],
        parameters: StepParameters,
        on_pools: Callable[[str, int, dict[str, Any]], None] | None,
        while_running: Callable[[], object] | None,
    ) -> list[memoryview]:
        """Submit a captured step with new inputs, wait for it; its results, float32, to be read before the next step.

        parameters: of the last micro-batch; those of the others differ in nothing but its number. Counts the update as
        the device makes it, also where an interrupt comes in between.
        """
        capture, engine = captured.capture, self.engine
        assert capture is not None
        capture.sent = []
        ahead, self._ahead = self._ahead, None
        is_written = ahead is not None and ahead[0] is capture and ahead[1] is batches
        if is_written:
            capture.turn()
        inputs = capture.inputs
        if not is_written:
            _write(inputs, batches)
        parameters.pack_into(inputs.parameters)
        try:
            results = capture.submit()
        finally:
            if capture.sent == [0]:
                self.optimizer.num_updates += 1
                engine.step_parameters = parameters
        self.replayer.stats.replayed += 1
        engine.offloaded_bytes += captured.offloaded_bytes
        engine.restored_bytes += captured.restored_bytes
        if on_pools is not None:
            for phase, micro_batch, stats in captured.samples:
                on_pools(phase, micro_batch, capture.in_replay(stats))
        if while_running is not None:
            while_running()
        engine.end_batch()
        engine.end_step()
        return results


@cache
def _collect_once() -> None:
    """Python's full collection of garbage. Imports make one due, which would come in the middle of some early step."""
    if gc.isenabled():
        gc.collect()


def _identity(value: dict[Any, Any]) -> Any:
    """Which an optimizer's parameters or moments are."""
    if type(value) is CountedDict:
        return value.version
    groups = [group if isinstance(group, tuple) else (group,) for group in value.values()]
    return tuple(value), [[(id(each), getattr(each, "address", 0)) for each in group] for group in groups]


def _write(inputs: StepInputs, batches: Sequence[MicroBatch]) -> None:
    """The shapes are those of the captured step, which its key says."""
    for i, (tokens, targets) in enumerate(batches):
        inputs.tokens[i][...] = tokens
        inputs.targets[i][...] = targets
