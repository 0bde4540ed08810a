"""Measures the variants of a product (engine/tuner.py)."""

from __future__ import annotations

from collections.abc import Sequence

from ..matmul_choice import MatmulChooser, tuning_key
from ..matmul_variants import Choice, candidates, estimate
from ..recorder import Recorder
from ..tuner import HALF, WORTH, Measured, keep_times, measure_in_turns
from .matmul_check import checked
from .matmul_launch import Epilogue, Layout, pairs_of, plan_of, run_plan


def tune_product(gpu: Recorder, layout: Layout, letters: str, *, rounds: int = 5) -> Measured:
    """Measure a product's candidates and keep the times.

    letters: NN, NT, TN or TT, as in the table's key. Every candidate is compared with the base variant first, and left
    out when barred. Takes device memory for the operands. Raises OutOfDeviceMemoryError where there is too little.
    """
    chooser = MatmulChooser.of(gpu)
    product = layout.product
    choices = candidates(chooser.device, product)
    estimates = {choice: estimate(chooser.device, product, choice) for choice in choices}
    worth = [choice for choice in choices if estimates[choice] <= WORTH * min(estimates.values())]
    usable = [choice for choice in worth if choice.barred_as not in chooser.table.barred]
    usable = [choice for choice in usable if checked(gpu, chooser, choice.variant, False)]
    times = _measure(gpu, layout, usable, rounds=rounds)
    return keep_times(chooser, Measured(tuning_key(product, letters), times))


def _measure(gpu: Recorder, layout: Layout, choices: Sequence[Choice], *, rounds: int) -> dict[str, float]:
    device = MatmulChooser.of(gpu).device
    batch, m, n, k = layout.product
    aside = gpu.aside()
    try:
        buffers = []
        for elements in (layout.batch_a * (batch - 1) + m * k, layout.batch_b * (batch - 1) + k * n, batch * m * n):
            nbytes = 4 * max(1, elements)
            buffers.append(aside.own_buffer(nbytes, host_visible=False))
            aside.fill_buffer(buffers[-1], 0, nbytes, HALF)
        a, b, c = (buffer.address for buffer in buffers)
        aside.op_work = 2.0 * layout.product.work
        plans = {choice: plan_of(aside, device, layout, choice, pairs_of(gpu, layout, choice)) for choice in choices}

        def record(choice: Choice) -> None:
            run_plan(aside, plans[choice], layout, a, b, c, Epilogue())

        return measure_in_turns(aside, choices, record, rounds=rounds)
    finally:
        aside.close()
