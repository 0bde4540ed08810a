"""Measures the variants of a product on the device and puts the times into its table, where the choice finds them.

Only variants of the product's own accumulation order take part: tuning changes time and never bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from .matmul_variants import Choice, candidates, estimate
from .ops.matmul_check import checked
from .ops.matmul_launch import Epilogue, Layout, pairs_of, plan_of, run_plan
from .recorder import Recorder
from .switches import logger
from .variant_choice import MatmulChooser, tuning_key
from .vulkan_api import QueryPool

_WORTH = 4.0  # candidates whose estimate, or first time, is more than this many times the least are left out
_HALF = 0x3F000000  # 0.5 in float32: what operands are filled with
_SHORTEST = 2e-4  # seconds of one measurement: shorter products are repeated


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
        """Give the query pool back."""
        if self._pool is not None:
            self._pool.destroy()


class Measured(NamedTuple):
    """What tuning one product gave: variant -> seconds, of all that were worth measuring; best: the fastest."""

    key: str
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        """Name of the fastest."""
        return min(self.seconds, key=lambda name: self.seconds[name])


def tune_product(gpu: Recorder, layout: Layout, letters: str, *, rounds: int = 5) -> Measured:
    """Measure a product's candidates in turns, `rounds` times each after one to compile; keep the least:
    whatever else the machine does only adds.

    letters: NN, NT, TN or TT, as in the table's key. Every candidate is compared with the base variant first, and left
    out when barred. Takes device memory for the operands. Raises OutOfDeviceMemoryError where there is too little.
    """
    chooser = MatmulChooser.of(gpu)
    product = layout.product
    choices = candidates(chooser.device, product)
    estimates = {choice: estimate(chooser.device, product, choice) for choice in choices}
    worth = [choice for choice in choices if estimates[choice] <= _WORTH * min(estimates.values())]
    usable = [choice for choice in worth if choice.variant.name not in chooser.table.barred]
    usable = [choice for choice in usable if checked(gpu, chooser, choice.variant, False)]
    times = measure(gpu, layout, usable, rounds=rounds)
    measured = Measured(tuning_key(product, letters), times)
    if times:
        chooser.table.note_times(measured.key, times)
        chooser.plans.clear()
        logger.info("%s: tuned, %s is the fastest of %d", measured.key, measured.best, len(times))
    return measured


def measure(gpu: Recorder, layout: Layout, choices: Sequence[Choice], *, rounds: int) -> dict[str, float]:
    """Least seconds of each choice, measured in turns; those that are hopeless at first sight are left out."""
    device = MatmulChooser.of(gpu).device
    batch, m, n, k = layout.product
    with ExitStack() as stack:
        aside = gpu.aside()
        timer = Timer(aside)
        stack.callback(aside.close)
        stack.callback(timer.close)
        places = []
        for elements in (layout.batch_a * (batch - 1) + m * k, layout.batch_b * (batch - 1) + k * n, batch * m * n):
            nbytes = 4 * max(1, elements)
            buffer = gpu.device.create_buffer(nbytes, host_visible=False)
            stack.callback(gpu.device.destroy_buffer, buffer)
            aside.fill_buffer(buffer, 0, nbytes, _HALF)
            places.append(buffer.address)
        aside.op_work = 2.0 * layout.product.work

        def once(choice: Choice, repeats: int) -> float:
            plan = plan_of(aside, device, layout, choice, pairs_of(gpu, layout, choice))

            def record() -> None:
                for _ in range(repeats):
                    run_plan(aside, plan, layout, places[0], places[1], places[2], Epilogue())

            return timer.seconds(record) / repeats

        first: dict[Choice, float] = {}
        for choice in choices:
            once(choice, 1)  # compiles
            first[choice] = min(once(choice, 1), once(choice, 1))
        least = min(first.values(), default=0.0)
        kept = [choice for choice in choices if first[choice] <= _WORTH * least]
        repeats = 1 + int(_SHORTEST / max(least, 1e-7))
        samples: dict[Choice, list[float]] = {choice: [] for choice in kept}
        for _ in range(rounds):
            for choice in kept:
                samples[choice].append(once(choice, repeats))
        return {choice.name: min(seconds) for choice, seconds in samples.items()}
