"""Measures the variants of a call on the device, in turns, for the table where the choice finds them.

Only variants of the call's own accumulation order take part: tuning changes time and never bits. What a call is, an op
says: `ops/matmul_tuner.py`, `ops/block_fold_tuner.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .recorder import Recorder
from .switches import logger
from .variant_choice import V, VariantChooser
from .vulkan_api import QueryPool

WORTH = 4.0  # variants whose estimate, or first time, is more than this many times the least are left out
HALF = 0x3F000000  # 0.5 in float32: what operands are filled with
_SHORTEST = 2e-4  # seconds of one measurement: shorter calls are repeated
_SHORTEST_CALL = 1e-9  # seconds: a clock too coarse to see a call


class Timer:
    """Device time of what is recorded: by timestamps, else (or with no_timestamps) by the host's clock."""

    def __init__(self, gpu: Recorder, *, no_timestamps: bool = False) -> None:
        self._gpu = gpu
        self._pool: QueryPool | None = None
        if gpu.device.physical.timestamp_bits and not no_timestamps:
            self._pool = gpu.device.create_query_pool(2)

    def seconds(self, record: Callable[[], None]) -> float:
        """Record, submit and wait; seconds between what came before and the end of what was recorded."""
        gpu, pool = self._gpu, self._pool
        if pool is None:
            start = time.perf_counter()
            record()
            gpu.submit()
            gpu.wait()
            return time.perf_counter() - start
        gpu.reset_queries(pool)
        gpu.write_timestamp(pool, 0)
        record()
        gpu.write_timestamp(pool, 1)
        gpu.submit()
        gpu.wait()
        first, second = pool.seconds()
        return second - first

    def close(self) -> None:
        """Give the query pool back, once nothing uses it: an interrupt may have left the device at work."""
        if self._pool is not None:
            self._gpu.finish()
            self._pool.destroy()


class Measured(NamedTuple):
    """What tuning one call gave: variant -> seconds, of all that were worth measuring; best: the fastest."""

    key: str
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        """Name of the fastest."""
        return min(self.seconds, key=lambda name: self.seconds[name])


def measure_in_turns(
    gpu: Recorder, choices: Sequence[V], record: Callable[[V], None], *, rounds: int
) -> dict[str, float]:
    """Least seconds of each choice, measured in turns, `rounds` times each after one to compile: whatever else the
    machine does only adds. Those that are hopeless at first sight are left out.

    gpu: a recorder aside, that `record` records one call of a choice with.
    """
    timer = Timer(gpu)

    def once(choice: V, repeats: int) -> float:
        def several() -> None:
            for _ in range(repeats):
                record(choice)

        return timer.seconds(several) / repeats

    try:
        first: dict[str, float] = {}
        for choice in choices:
            once(choice, 1)  # compiles
            first[choice.name] = min(once(choice, 1), once(choice, 1))
        least = min(first.values(), default=0.0)
        kept = [choice for choice in choices if first[choice.name] <= WORTH * least]
        repeats = 1 + int(_SHORTEST / max(least, 1e-7))
        samples: dict[str, list[float]] = {choice.name: [] for choice in kept}
        for _ in range(rounds):
            for choice in kept:
                samples[choice.name].append(once(choice, repeats))
        return {name: max(min(seconds), _SHORTEST_CALL) for name, seconds in samples.items()}
    finally:
        timer.close()


def keep_times(chooser: VariantChooser[V], measured: Measured) -> Measured:
    """Put what was measured into the chooser's table, for its next choice; returns it."""
    if measured.seconds:
        chooser.table.note_times(measured.key, measured.seconds)
        chooser.plans.clear()
        logger.info("%s: tuned, %s is the fastest of %d", measured.key, measured.best, len(measured.seconds))
    return measured
