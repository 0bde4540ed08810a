"""kernel_lab: one op at one shape: is it right, how fast is each of its variants, and what would the device allow?

The exit code is 0 when every result is right and all variants are equal, 1 when not, 2 when the op cannot be run so.
"""

# ruff: noqa: RUF009 (option is dataclasses.field)

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ..engine.block_fold_choice import BlockFoldChooser, family_of
from ..engine.compute_engine import ComputeEngine
from ..engine.cpu_engine import CpuEngine
from ..engine.errors import BadInputError, OutOfDeviceMemoryError
from ..engine.matmul_choice import MatmulChooser
from ..engine.matmul_variants import Product, candidates
from ..engine.profiler import OpProfiler
from ..engine.tensor import Tensor
from ..engine.variant_choice import forced_variant
from ..engine.variant_families import variant_names as variant_names_of
from ..engine.vulkan_engine import VulkanEngine
from .console import TableConsole, run_program
from .device_peaks import Peaks, measure_peaks
from .lab_ops import SUBJECTS, matmul_subject
from .lab_subject import STEP, Subject
from .options import POSITIVE, option, parse_options

DESCRIPTION = """Check one op at one shape against float64, and measure it: `kernel_lab matmul 512x512x512`,
`kernel_lab rms_norm 4096x512`, `kernel_lab attention 1x8(2)x512x64` (8 heads of queries, 2 of keys and values). A
product of [M, K] and [K, N] is MxNxK here and in `vkfold tune`; `./run bench` writes MxKxN. Ops that have variants are
measured with every one of them, whose results must be equal to the bit."""

SMALLEST = 2.0**-149  # of float32


@dataclass
class LabConfig:
    """What to look at."""

    words: list[str] = option(str, None, "the op and its shape", repeated=True)
    layout: str = option(str, "NN", "of matmul's operands", choices=("NN", "NT", "TN", "TT"))
    rounds: int = option(int, 7, "measurements of each variant, in turns; the median counts", rule=POSITIVE)
    check_only: bool = option(bool, False, "compare results, measure nothing")
    device: str | None = option(str, None, "device: index, part of its name, or UUID")
    json: bool = option(bool, False, "print one JSON object instead of tables")


class Result(NamedTuple):
    """One variant: largest error in units of what is allowed (at most 1 is right), seconds, work a second."""

    variant: str
    error: float
    same_bits: bool
    seconds: float
    flops_per_second: float
    bytes_per_second: float
    of_roof: float


def subject_of(config: LabConfig) -> tuple[str, Subject, tuple[int, ...]]:
    """Name, subject and sizes. Raises BadInputError for an op there is not, or a shape that does not fit it."""
    if len(config.words or []) != 2:
        raise BadInputError("kernel_lab takes an op and a shape, for example: kernel_lab matmul 512x512x512")
    name, shape = config.words
    subjects = {**SUBJECTS, "matmul": matmul_subject(config.layout)}
    if name not in subjects:
        raise BadInputError(f"no op {name!r} in the lab: there are {', '.join(sorted(subjects))}")
    if config.layout != "NN" and name != "matmul":
        raise BadInputError(f"--layout {config.layout} is how matmul's operands lie, {name} has none: leave it out")
    subject = subjects[name]
    sizes = _sizes_of(subject.meaning, shape)
    if sizes is None:
        raise BadInputError(f"{shape!r} is no shape for {name}: write {subject.meaning} in numbers greater than 0")
    return name, subject, sizes


def _sizes_of(meaning: str, shape: str) -> tuple[int, ...] | None:
    """The sizes that a shape gives; None where it does not fit. Of "HEADS(KV_HEADS)" the second is the first unless
    it is given."""
    words, texts = meaning.split("x"), shape.split("x")
    if len(words) != len(texts):
        return None
    sizes: list[int] = []
    for word, text in zip(words, texts, strict=True):
        found = re.fullmatch(r"([0-9]+)(?:\(([0-9]+)\))?", text)
        if found is None or (found[2] is not None and "(" not in word):
            return None
        sizes += [int(found[1]), int(found[2] or found[1])][: word.count("(") + 1]
    return tuple(sizes) if all(sizes) else None


def run_on(
    engine: ComputeEngine, subject: Subject, arrays: Sequence[np.ndarray], sizes: tuple[int, ...]
) -> list[np.ndarray]:
    """The outputs."""
    result = subject.call(engine, *[engine.tensor(array) for array in arrays], **subject.settings(*sizes))
    return [output.numpy() for output in ((result,) if isinstance(result, Tensor) else result)]


def variant_names(engine: VulkanEngine, name: str, subject: Subject, sizes: tuple[int, ...], layout: str) -> list[str]:
    """All variants of the accumulation order that are not barred, the chosen one first; [""]: there is one kernel."""
    if name == "matmul":
        chooser = MatmulChooser.of(engine.recorder)
        product = Product(1, *sizes)
        chosen = chooser.choose(product, layout)
        choices = [c for c in candidates(chooser.device, product) if c.barred_as not in chooser.table.barred]
        return list(dict.fromkeys(c.name for c in (chosen, *choices)))
    of_family = variant_names_of(engine.recorder, sizes[-1]).get(subject.forced)
    if of_family is not None:
        return of_family
    calls = subject.folds(*sizes)
    if not calls:
        return [""]
    folds = BlockFoldChooser.of(engine.recorder)
    family = [v for call in calls for v in family_of(folds.device, call) if v.barred_as not in folds.table.barred]
    return list(dict.fromkeys(v.name for v in (folds.choose(calls[0]), *family)))


def look(engine: VulkanEngine, config: LabConfig, peaks: Peaks | None) -> list[Result]:
    """Every variant, fastest first; peaks None measures nothing."""
    name, subject, sizes = subject_of(config)
    rng = np.random.default_rng(0)
    oracle = CpuEngine("float64")
    for each in (oracle, engine):
        each.set_step_parameters(STEP)
    try:
        arrays = subject.inputs(rng, *sizes)
        expected = run_on(oracle, subject, arrays, sizes)
    except ValueError as refusal:  # of the shape
        raise _cannot_run(config, refusal) from refusal
    allowed = [np.maximum(bound, SMALLEST) for bound in subject.bounds(arrays, expected)]
    names = variant_names(engine, name, subject, sizes, config.layout)
    results: list[Result] = []
    first_bits: list[np.ndarray] | None = None
    samples: dict[str, Any] = {}

    def forced(variant: str) -> AbstractContextManager[None]:
        return forced_variant(variant, subject.forced) if variant else nullcontext()

    for variant in names:
        with forced(variant):
            got = run_on(engine, subject, arrays, sizes)
        bits = [output.view(np.uint32) for output in got]
        first_bits = bits if first_bits is None else first_bits
        errors = [np.max(np.abs(g - e) / a, initial=0.0) for g, e, a in zip(got, expected, allowed, strict=True)]
        same = all(np.array_equal(one, two) for one, two in zip(bits, first_bits, strict=True))
        samples[variant] = (float(max(errors)), same, [])
    if peaks is not None:
        tensors = [engine.tensor(array) for array in arrays]
        profiler = OpProfiler(engine)
        profiler.attach()
        try:
            for _ in range(config.rounds):
                for variant in names:
                    with forced(variant):
                        subject.call(engine, *tensors, **subject.settings(*sizes))
                        samples[variant][2].append(profiler.take())
        finally:
            profiler.detach()
    for variant, (error, same, runs) in samples.items():
        if not runs:
            results.append(Result(variant, error, same, 0.0, 0.0, 0.0, 0.0))
            continue
        assert peaks is not None
        seconds = max(statistics.median(sum(op.seconds for op in run) for run in runs), 1e-9)
        flops, moved = (sum(getattr(op, field) for op in runs[0]) for field in ("flops", "bytes_moved"))
        roof = max(flops / peaks.flops, moved / peaks.bandwidth)
        results.append(Result(variant, error, same, seconds, flops / seconds, moved / seconds, roof / seconds))
    return sorted(results, key=lambda result: result.seconds)


def _cannot_run(config: LabConfig, error: Exception) -> BadInputError:
    return BadInputError(f"{' '.join(config.words)} cannot be run here: {error}")


def _program(argv: Sequence[str]) -> int:
    config, _ = parse_options(LabConfig, argv, "kernel_lab", DESCRIPTION)
    name, _, sizes = subject_of(config)
    with VulkanEngine(config.device) as engine:
        peaks = None if config.check_only else measure_peaks(engine)
        try:
            results = look(engine, config, peaks)
        except (MemoryError, OutOfDeviceMemoryError) as error:
            raise _cannot_run(config, error) from error
        where = f"{engine.name} ({engine.device.physical.driver_info})"
    right = all(result.error <= 1 and result.same_bits for result in results)
    if config.json:
        rows = [result._asdict() for result in results]
        about = {"op": name, "sizes": sizes, "device": where, "peaks": None if peaks is None else peaks._asdict()}
        print(json.dumps({**about, "right": right, "results": rows}, indent=1))
        return 0 if right else 1
    layout = f" {config.layout}" if name == "matmul" else ""
    print(f"{name} {'x'.join(map(str, sizes))}{layout} on {where}")
    if peaks is not None:
        print(f"roof: {peaks.flops / 1e9:.1f} GFLOP/s, {peaks.bandwidth / 1e9:.1f} GB/s")
    _print(results)
    return 0 if right else 1


def _print(results: Sequence[Result]) -> None:
    table = Table(box=None)
    for heading in ("variant", "error / allowed", "bits", "ms", "GFLOP/s", "GB/s", "of the roof"):
        table.add_column(heading, no_wrap=True)
    for result in results:
        table.add_row(
            result.variant or "(the only one)",
            f"{result.error:.3f}{'' if result.error <= 1 else ' WRONG'}",
            "equal" if result.same_bits else "DIFFERENT",
            *(
                ("", "", "", "")
                if not result.seconds
                else (
                    f"{1e3 * result.seconds:.3f}",
                    f"{result.flops_per_second / 1e9:.1f}",
                    f"{result.bytes_per_second / 1e9:.2f}",
                    f"{result.of_roof:.0%}",
                )
            ),
        )
    TableConsole(highlight=False).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    return run_program("kernel_lab", _program, argv)


if __name__ == "__main__":
    sys.exit(main())
