"""Captured steps: recorded once as plain data, then submitted again with new inputs and no Python for any op.

A capture owns the command buffers of a whole step and the host memory for all that the step uploads. It relies on
addresses in pool blocks; the pools tell it when one of those blocks goes back to the driver, and it is then dropped: a
stale address is never submitted. Who captures (nn/step_replay.py) decides when a step is the same as a captured one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..memory_pool import BlockPool, PoolStats
from .kernel_text import last_texts
from .pipeline_memory import load_program, program_path, save_program
from .recorder import Recorder, place_of
from .remembered_calls import CallKind
from .replay_stats import ReplayStats
from .step_stream import WRITE, Input, StepStream, encode
from .tensor import Tensor
from .variant_families import CHOOSERS
from .vulkan_api import Buffer, CommandBuffer, Pipeline, PreparedSubmit

_ALIGNMENT = 64  # of each piece of host data


class PoolUse:
    """What a step does to a pool's statistics; it leaves no range behind. peak_before: of live bytes, before it."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.peak_before = pool.peak_live_bytes
        self.first_allocation = pool.total_allocations
        self.generation = pool.generation
        self.peak = self.num_allocations = 0
        pool.peak_live_bytes = pool.live_bytes

    def finish(self) -> None:
        """The step is over."""
        pool = self.pool
        self.peak = pool.peak_live_bytes
        self.num_allocations = pool.total_allocations - self.first_allocation
        pool.peak_live_bytes = max(self.peak, self.peak_before)


class StepInputs(NamedTuple):
    """Host memory for what differs from step to step, by micro-batch: int32 arrays, and memory for step parameters."""

    tokens: dict[int, np.ndarray]
    targets: dict[int, np.ndarray]
    parameters: dict[int, memoryview]


class _Encoding:
    """One set of host memory and the command buffers that use it."""

    def __init__(self, recorder: Recorder, stream: StepStream) -> None:
        self.recorder = recorder
        places, end = [], 0
        writes = [command for command in stream.commands if command[0] == WRITE]
        for nbytes in [write[3] for write in writes] + [result[2] for result in stream.results]:
            places.append(end)
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.staging: Buffer = recorder.device.create_buffer(max(end, _ALIGNMENT), host_visible=True)
        mapping = self.staging.mapping
        self.inputs = StepInputs({}, {}, {})
        for (_, _, _, nbytes, what), place in zip(writes, places, strict=False):
            view = mapping[place : place + nbytes]
            if isinstance(what, Input):
                of_kind: dict[int, Any] = getattr(self.inputs, what.kind)
                is_array = what.kind != "parameters"
                of_kind[what.micro_batch] = np.frombuffer(view, np.int32).reshape(what.shape) if is_array else view
            else:
                view[:] = what
        self.results = [
            mapping[place : place + result[2]].cast("f")
            for result, place in zip(stream.results, places[len(writes) :], strict=True)
        ]
        self.commands: list[CommandBuffer] = encode(recorder.device, stream, self.staging, places)
        self.prepared = PreparedSubmit(self.commands)

    def destroy(self) -> None:
        """Give everything back once the device has done with it."""
        for of_kind in self.inputs:
            of_kind.clear()
        self.results.clear()
        for commands in self.commands:
            self.recorder.retire(commands)
        self.recorder.retire(self.staging)


class Capture:
    """One step that can be submitted again. uses: what it does to the statistics of each pool. sent: a new list before
    each submit, and all that leads to it; [0] once the device has the step, whatever `submit` raised.

    Raises OutOfDeviceMemoryError when there is no room for its host memory.
    """

    def __init__(self, replayer: StepReplayer, stream: StepStream, uses: Sequence[PoolUse]) -> None:
        self.dropped = ""
        self.sent: list[int] = []
        self._replayer = replayer
        self._recorder = replayer.recorder
        self._uses = uses
        self._stream = stream
        self._encodings = [_Encoding(self._recorder, stream)]
        self._next = 0  # of the encodings: what the next submit uses
        self._fence = self._recorder.device.create_fence()
        self._blocks = [block for use in uses for block in use.pool.pin_step(self)]

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory it owns."""
        return sum(encoding.staging.nbytes for encoding in self._encodings)

    @property
    def inputs(self) -> StepInputs:
        """What the next submit takes.

        Waits where a submit under way still reads them.
        """
        if self._recorder.is_in_flight(self._fence):  # only after an interrupt, or an error while waiting
            self._recorder.wait()
        return self._encodings[self._next].inputs

    @property
    def inputs_ahead(self) -> StepInputs:
        """The same of another set, which no submit uses before `turn`: it may be written while one is under way.

        Raises OutOfDeviceMemoryError when there is no room for it.
        """
        if len(self._encodings) == 1:
            self._encodings.append(_Encoding(self._recorder, self._stream))
        return self._encodings[1 - self._next].inputs

    def turn(self) -> None:
        """From now on submits take the set that was `inputs_ahead`."""
        self._next = 1 - self._next

    def submit(self) -> list[memoryview]:
        """Hand the step to the device; does not wait. The inputs are written before. Returns where results, float32,
        will be."""
        assert not self.dropped
        encoding = self._encodings[self._next]
        self._recorder.resubmit(encoding.prepared, self._fence, self.sent)
        for use in self._uses:
            pool = use.pool
            pool.total_allocations += use.num_allocations
            use.peak_before = pool.peak_live_bytes
            pool.peak_live_bytes = max(pool.peak_live_bytes, use.peak)
            pool.start_step()
        for block in self._blocks:
            block.touched = True
        return encoding.results

    def in_replay(self, stats: dict[str, PoolStats]) -> dict[str, PoolStats]:
        """Statistics taken when the step was recorded, as recording it now would show them. After `submit`."""
        shown = {}
        for use in self._uses:
            pool, then = use.pool, stats.get(use.pool.name)
            if then is not None:
                shown[pool.name] = replace(
                    then,
                    peak_live_bytes=max(then.peak_live_bytes, use.peak_before),
                    total_allocations=then.total_allocations
                    - use.first_allocation
                    + pool.total_allocations
                    - use.num_allocations,
                    peak_reserved_bytes=pool.peak_reserved_bytes,
                    total_blocks=pool.total_blocks,
                    retain_free_bytes=pool.retain_free_bytes,
                    generation=pool.generation,
                )
        return shown

    def block_released(self) -> None:
        """A block whose addresses it uses goes back to the driver."""
        self.drop("a block it uses was released")

    def drop(self, reason: str) -> None:
        """Never submit it again. Harmless a second time."""
        if self.dropped:
            return
        self.dropped = reason
        self._blocks.clear()
        self._replayer.retire((reason, self._encodings, self._fence))

    def __del__(self) -> None:
        # The garbage collector may be at work in any thread; only the engine's own may touch the recorder.
        if not getattr(self, "dropped", "never made"):
            self.dropped = "its training step is gone"
            self._replayer.give_back((self.dropped, self._encodings, self._fence), self._replayer.retire)


class StepReplayer:
    """Takes down the steps of one VulkanEngine and keeps account of what was captured.

    give_back(what, free): calls free(what), now in the engine's own thread, at its next call in another.
    obstacle: set it to a reason (a profiler that wants every op, say) and nothing is captured or replayed.
    """

    def __init__(
        self,
        recorder: Recorder,
        pools: Sequence[BlockPool],
        give_back: Callable[[Any, Callable[[Any], None]], None],
    ) -> None:
        self.recorder = recorder
        self.pools = tuple(pools)
        self.give_back = give_back
        self.stats = ReplayStats()
        self.obstacle = ""
        self._closed = False
        self._captures: weakref.WeakSet[Capture] = weakref.WeakSet()
        self._uses: list[PoolUse] = []

    def recall(self, program: str) -> list[CallKind]:
        """Make the pipelines that a step of this program used the last time it ran, and read what is known of variants;
        returns the kinds of calls that the step made.

        program: any text that tells what the step records.
        """
        recorder = self.recorder
        for chooser in CHOOSERS:
            chooser.of(recorder)
        remembered = load_program(program_path(recorder.device, program))
        recorder.make_ahead(remembered.recipes)
        return remembered.calls

    def remember(self, program: str, stream: StepStream | None, calls: Sequence[CallKind]) -> None:
        """Remember the pipelines and the kinds of calls of a recorded step for the next run of the program.

        stream: None where the step was not taken down; then all pipelines that this engine ever used.
        """
        pipelines = self.recorder.pipelines
        used: list[Pipeline] = list(pipelines.by_kernel.values())
        if stream is not None:
            used = [command[0] for command in stream.commands if not isinstance(command[0], str)]
        save_program(program_path(self.recorder.device, program), pipelines.recipes(used), last_texts(), calls)

    def placement(self) -> tuple[tuple[int, int, int], ...]:
        """Equal when the live ranges of all pools are the same."""
        return tuple([pool.placement for pool in self.pools])

    def start(self) -> None:
        """A step begins: take down what is recorded from now on."""
        self.recorder.submit()
        self._uses = [PoolUse(pool) for pool in self.pools]
        self.recorder.stream = StepStream()

    def bring(self, kind: str, micro_batch: int, shape: tuple[int, ...] = ()) -> None:
        """The next upload differs from step to step."""
        if self.recorder.stream is not None:
            self.recorder.next_input = Input(kind, micro_batch, shape)

    def finish(self, results: Sequence[Tensor] = ()) -> tuple[StepStream, list[PoolUse]]:
        """All commands of the step are recorded; what comes now is no part of it. results: what is read back."""
        self.recorder.before_recording()
        stream, self.recorder.stream = self.recorder.stream, None
        assert stream is not None
        stream.results = [place_of(tensor) for tensor in results]
        for use in self._uses:
            use.finish()
        uses, self._uses = self._uses, []
        if any(use.pool.generation != use.generation for use in uses):
            stream.obstacle = "blocks went back to the driver during the step"  # it may use one that is gone
        return stream, uses

    def abandon(self) -> None:
        """The step ended in an error, or is not to be captured. Harmless when none was begun."""
        if self.recorder.stream is not None:
            self.recorder.stream = None  # calls that are held back may be what failed: they are left alone
            for use in self._uses:
                use.finish()
            self._uses = []
        self.recorder.next_input = None

    def capture(self, stream: StepStream, uses: Sequence[PoolUse]) -> Capture:
        """Keep a step that was just recorded. Raises OutOfDeviceMemoryError."""
        made = Capture(self, stream, uses)
        self._captures.add(made)
        self.stats.captured += 1
        return made

    def retire(self, owned: tuple[str, list[_Encoding], Any]) -> None:
        """Give back what a capture owned: why it goes, its encodings and its fence."""
        if self._closed:  # with everything that was recorded
            return
        reason, encodings, fence = owned
        self.stats.dropped[reason] += 1
        for encoding in encodings:
            encoding.destroy()
        encodings.clear()
        self.recorder.retire(fence)

    def in_step(self, stats: dict[str, PoolStats]) -> dict[str, PoolStats]:
        """Statistics taken while a step is recorded, with the peaks that are put aside meanwhile."""
        before = {use.pool.name: use.peak_before for use in self._uses}
        return {
            name: replace(each, peak_live_bytes=max(each.peak_live_bytes, before.get(name, 0)))
            for name, each in stats.items()
        }

    def close(self) -> None:
        """Drop every capture."""
        for capture in list(self._captures):
            capture.drop("the engine was closed")
        self._closed = True
