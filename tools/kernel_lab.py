"""kernel_lab: one op at one shape: is it right, how fast is each of its variants, and what would the device allow?

The exit code is 0 when every result is right and all variants are equal, 1 when not.
"""

# ruff: noqa: RUF009 (option is dataclasses.field)

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ..engine.compute_engine import ComputeEngine
from ..engine.cpu_engine import CpuEngine
from ..engine.errors import BadInputError
from ..engine.matmul_choice import MatmulChooser
from ..engine.matmul_variants import Product, candidates
from ..engine.profiler import OpProfiler
from ..engine.tensor import Tensor
from ..engine.variant_choice import forced_variant
from ..engine.vulkan_engine import VulkanEngine
from .console import TableConsole, run_program
from .device_peaks import Peaks, measure_peaks
from .options import POSITIVE, option, parse_options

DESCRIPTION = """Check one op at one shape against float64, and measure it: `kernel_lab matmul 512x512x512`,
`kernel_lab rms_norm 4096x512`, `kernel_lab attention 1x4x512x64`. Matmul is measured with every variant, whose results
must be equal to the bit."""

_EPS = 2.0**-24
Call = Callable[..., Any]


class Subject(NamedTuple):
    """An op as the lab runs it: what a shape means, the inputs' shapes, the call, and how much error is allowed.

    bound: units of 2^-24 a result may be off, of its own size and at least 1; matmul counts |A| |B| instead.
    """

    meaning: str
    inputs: Callable[..., Sequence[tuple[int, ...]]]
    call: Call
    bound: Callable[..., float] = lambda *sizes: 64.0


def _rows(call: Call, *more: int) -> Subject:
    """An op over rows: x [rows, cols] and `more` vectors of cols."""
    return Subject("ROWSxCOLS", lambda r, c: [(r, c), *[(c,)] * len(more)], call, lambda r, c: 16.0 + 2 * c)


SUBJECTS: dict[str, Subject] = {
    "add": Subject("ROWSxCOLS", lambda r, c: [(r, c)] * 2, lambda e, x, y: e.add(x, y), lambda *s: 1.0),
    "multiply": Subject("ROWSxCOLS", lambda r, c: [(r, c)] * 2, lambda e, x, y: e.multiply(x, y), lambda *s: 1.0),
    "silu": Subject("ROWSxCOLS", lambda r, c: [(r, c)], lambda e, x: e.silu(x)),
    "gelu": Subject("ROWSxCOLS", lambda r, c: [(r, c)], lambda e, x: e.gelu(x)),
    "swiglu": Subject("ROWSxCOLS", lambda r, c: [(r, c)] * 2, lambda e, x, y: e.multiply(e.silu(x), y)),
    "softmax": _rows(lambda e, x: e.softmax(x)),
    "rms_norm": _rows(lambda e, x, w: e.rms_norm(x, w), 1),
    "layer_norm": _rows(lambda e, x, w, b: e.layer_norm(x, w, b), 1, 1),
    "attention": Subject(
        "BATCHxHEADSxSEQxHEAD_DIM",
        lambda b, h, s, d: [(b, s, h, d)] * 3,
        lambda e, q, k, v: e.attention(q, k, v, causal=True),
        lambda b, h, s, d: 64.0 + 8 * d,
    ),
}


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
    subject = subjects[name]
    wanted = len(subject.meaning.split("x"))
    sizes = shape.split("x")
    if len(sizes) != wanted or not all(size.isdigit() and int(size) for size in sizes):
        raise BadInputError(f"{shape!r} is no shape for {name}: write {subject.meaning} in numbers greater than 0")
    return name, subject, tuple(int(size) for size in sizes)


def matmul_subject(layout: str) -> Subject:
    """The product of A and B as they lie."""
    trans_a, trans_b = layout[0] == "T", layout[1] == "T"
    return Subject(
        "MxNxK",
        lambda m, n, k: [(k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)],
        lambda e, a, b: e.matmul(a, b, trans_a=trans_a, trans_b=trans_b),
    )


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def run_on(engine: ComputeEngine, subject: Subject, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The first output."""
    return _first(subject.call(engine, *[engine.tensor(a) for a in arrays])).numpy()


def allowed_error(name: str, subject: Subject, sizes: tuple[int, ...], arrays: Any, expected: np.ndarray) -> np.ndarray:
    """Absolute, element by element. Matmul: 2 k 2^-24 |A| |B| (Higham 2002, 3.5, with room for a change of order)."""
    if name != "matmul":
        return _EPS * subject.bound(*sizes) * np.maximum(1.0, np.abs(expected))
    m, _, k = sizes
    a, b = (np.abs(x.astype(np.float64)) for x in arrays)
    a, b = a if a.shape == (m, k) else a.T, b if b.shape[0] == k else b.T
    return 2 * k * _EPS * (a @ b)


def look(engine: VulkanEngine, config: LabConfig, peaks: Peaks | None) -> list[Result]:
    """Every variant, fastest first; peaks None measures nothing."""
    name, subject, sizes = subject_of(config)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in subject.inputs(*sizes)]
    expected = run_on(CpuEngine("float64"), subject, arrays)
    allowed = allowed_error(name, subject, sizes, arrays, expected)
    names = [""]
    if name == "matmul":
        chooser = MatmulChooser.of(engine.recorder)
        names = [chooser.choose(Product(1, *sizes), config.layout).name]
        names += [c.name for c in candidates(chooser.device, Product(1, *sizes)) if c.name != names[0]]
        names = [variant for variant in names if chooser.named(variant).variant.name not in chooser.table.barred]
    tensors = [engine.tensor(array) for array in arrays]
    results, first_bits = [], None
    samples: dict[str, Any] = {}
    for variant in names:
        with forced_variant(variant) if variant else nullcontext():
            got = _first(subject.call(engine, *tensors)).numpy()
        bits = got.view(np.uint32)
        first_bits = bits if first_bits is None else first_bits
        error = float(np.max(np.abs(got - expected) / allowed, initial=0.0))
        samples[variant] = (error, np.array_equal(bits, first_bits), [])
    if peaks is not None:
        profiler = OpProfiler(engine)
        profiler.attach()
        try:
            for _ in range(config.rounds):
                for variant in names:
                    with forced_variant(variant) if variant else nullcontext():
                        subject.call(engine, *tensors)
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


def _program(argv: Sequence[str]) -> int:
    config, _ = parse_options(LabConfig, argv, "kernel_lab", DESCRIPTION)
    name, _, sizes = subject_of(config)
    with VulkanEngine(config.device) as engine:
        peaks = None if config.check_only else measure_peaks(engine)
        results = look(engine, config, peaks)
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
