"""One training step for real, held against its plan to the byte: any options of memory_estimator that say
what is trained.

    python benchmarks/reference_step.py                                  gpt-236m, batch 6: up to an hour on 2 cores
    python benchmarks/reference_step.py --num-layers 1 --batch-size 1    the same widths in a minute or two
    python benchmarks/reference_step.py --preset small --num-layers 2 --seq-len 64 --checkpoint-every 1 --json

Prints planned and measured peak, the pools, what the driver was asked for, process memory, and the loss. Ends with exit
code 1 when a figure differs from the plan, 2 when the machine has too little memory.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from vkfold.engine.allocation_ledger import AllocationLedger
from vkfold.engine.errors import BadInputError
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools.budget_option import mode_json, within_memory_budget
from vkfold.tools.console import run_program
from vkfold.tools.memory_estimator import EstimateConfig, estimate_config, refuse_set
from vkfold.tools.memory_plan import TrainingPlan, plan_training
from vkfold.tools.memory_report import size
from vkfold.tools.memory_watch import MemoryWatch
from vkfold.tools.model_setup import budget_bytes, make_model, make_optimizer, make_training_step

_OF_REPORTS = ("ops", "saved", "attribution", "plot", "cards", "zero_stage", "tensor_parallel")
START = time.monotonic()


def say(text: str) -> None:
    """A line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - START:7.1f} s] {text}", file=sys.stderr, flush=True)


class DeviceMemory:
    """Adds up the sizes given to vkAllocateMemory for device memory."""

    def __init__(self, engine: VulkanEngine) -> None:
        self.bytes = self.most_bytes = 0
        device, counted = engine.device, set()
        create, destroy = device.create_buffer, device.destroy_buffer

        def create_buffer(nbytes: int, host_visible: bool) -> Any:
            buffer = create(nbytes, host_visible)
            if not host_visible:
                counted.add(id(buffer))
                self.bytes += buffer.memory_bytes
                self.most_bytes = max(self.most_bytes, self.bytes)
            return buffer

        def destroy_buffer(buffer: Any) -> None:
            if id(buffer) in counted:
                counted.remove(id(buffer))
                self.bytes -= buffer.memory_bytes
            destroy(buffer)

        device.create_buffer = create_buffer  # type: ignore[method-assign]
        device.destroy_buffer = destroy_buffer  # type: ignore[method-assign]


def driver_bytes(engine: VulkanEngine) -> int:
    """What the driver, or the operating system, counts for this process."""
    told = engine.driver_memory()
    return 0 if told is None else told.used_bytes


def measure(engine: VulkanEngine, config: EstimateConfig, vocab_size: int) -> dict[str, Any]:
    """Run the first step of a run on random tokens."""
    memory, before = DeviceMemory(engine), driver_bytes(engine)
    ledger = AllocationLedger(engine)
    ledger.attach()
    model = make_model(engine, config, vocab_size)
    optimizer = make_optimizer(model, config)
    watch = MemoryWatch(ledger, model, optimizer)
    used: dict[str, int] = {}

    def on_phase(phase: str, micro_batch: int) -> None:
        watch.on_phase(phase, micro_batch)
        say(f"{phase} recorded; live {size(ledger.live_bytes)}")
        engine.end_batch()  # the driver's count is that of what has run
        used[phase] = driver_bytes(engine) - before
        say(f"{phase} done; {size(used[phase])} more than before the model, as the driver counts")

    step = make_training_step(model, optimizer, config, on_phase)
    generator = np.random.default_rng(config.seed)
    shape = (config.accum_steps, 2, config.batch_size, config.seq_len)
    batches = [(tokens, targets) for tokens, targets in generator.integers(0, vocab_size, shape)]
    watch.start(config.accum_steps)
    say(f"{model.num_parameters:,} parameters made; the step begins")
    result = step(batches, step=0, learning_rate=config.lr)
    ledger.detach()
    engine.release_idle_pool_blocks()
    engine.end_batch()
    return {
        "peak_bytes": ledger.peak_bytes,
        "peak_op": ledger.peak_op,
        "by_kind": ledger.by_kind(),
        "peak_reserved_bytes": ledger.peak_reserved_bytes,
        "pool": {name: stats.as_dict() for name, stats in engine.pool_stats().items()},
        "allocated_bytes": memory.most_bytes,
        "driver_source": getattr(engine.driver_memory(), "source", None),
        "driver_bytes": used,
        "staging_bytes": engine.staging_bytes(),
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "updated": result.updated,
    }


def planned(plan: TrainingPlan) -> dict[str, Any]:
    """What the plan says of the same figures."""
    ledger = plan.ledger
    return {
        "peak_bytes": ledger.peak_bytes,
        "peak_op": ledger.peak_op,
        "by_kind": ledger.by_kind(),
        "peak_reserved_bytes": ledger.peak_reserved_bytes,
        "pool": {name: stats.as_dict() for name, stats in plan.pools.items()},
        "allocated_bytes": ledger.peak_reserved_bytes,
    }


def _program(argv: Sequence[str]) -> int:
    if not any(word == "--preset" or word.startswith("--preset=") for word in argv):
        argv = ["--preset", "gpt-236m", *argv]
    config, vocab_size = estimate_config(argv)
    if config.inference:
        raise BadInputError("--inference: this runs a training step; leave it out")
    refuse_set(config, _OF_REPORTS, "this runs one step on one card and compares; it has no effect")
    config, within = within_memory_budget(config, vocab_size)
    if within is not None:
        say(f"--memory-budget asks for: {within.mode}")
    plan = plan_training(config, vocab_size)
    expected = planned(plan)
    need = plan.ledger.peak_reserved_bytes + plan.host_bytes
    say(f"planned: peak {size(plan.peak_bytes)}, reserved {size(need)}, {plan.flops / 1e12:.3f} TFLOP")
    with VulkanEngine(config.device) as engine:
        if engine.debug >= 2:
            raise BadInputError(f"VKFOLD_DEBUG={engine.debug} puts guard words around tensors: set it to 0 or 1")
        if need > budget_bytes(engine):
            raise BadInputError(
                f"the step needs {need:,} bytes and {engine.name} gives {budget_bytes(engine):,}: "
                "a smaller --batch-size, --num-layers or --seq-len needs less"
            )
        found = measure(engine, config, vocab_size)
        device = engine.name
    wrong = [name for name, value in expected.items() if found[name] != value]
    if config.json:
        told = {"device": device, "planned": expected, "measured": found, "differ": wrong}
        if within is not None:
            told["memory_budget"] = mode_json(within.mode)
        print(json.dumps(told, indent=1))
    else:
        report(device, expected, found)
    for name in wrong:
        print(f"{name}: planned {expected[name]}, measured {found[name]}", file=sys.stderr)
    if not (math.isfinite(found["loss"]) and found["updated"]):
        print(f"the loss is {found['loss']} and the weights were not updated", file=sys.stderr)
        return 1
    return 1 if wrong else 0


def report(device: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """The figures as lines."""
    print(f"device: {device}")
    print(f"loss {found['loss']:.6f}, gradient norm {found['grad_norm']:.6f}")
    for name, what in (("peak_bytes", "peak of live bytes"), ("peak_reserved_bytes", "most reserved by the pools")):
        print(f"{what}: planned {expected[name]:,}, measured {found[name]:,}")
    print(f"most given by vkAllocateMemory at once: {found['allocated_bytes']:,}")
    print(f"the peak occurs in: planned {expected['peak_op']}, measured {found['peak_op']}")
    for name, pool in found["pool"].items():
        same = "as planned" if expected["pool"].get(name) == pool else f"planned {expected['pool'].get(name)}"
        figures = ", ".join(f"{key} {pool[key]:,}" for key in ("blocks", "allocated_bytes", "peak_live_bytes"))
        print(f"pool {name} after the step ({same}): {figures}, peak_reserved_bytes {pool['peak_reserved_bytes']:,}")
    print(f"staging and step parameters, beside the pools: {found['staging_bytes']:,} bytes")
    for phase, nbytes in found["driver_bytes"].items():
        print(f"{found['driver_source']} after {phase}: {nbytes:,} bytes more than before the model was made")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_program("reference_step", _program, argv)


if __name__ == "__main__":
    sys.exit(main())
