"""Samples of several profiled steps, summed up: by op, by layer, by phase, against what the device can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.profiler import OpSample
from .device_peaks import Peaks

MATMUL, ATTENTION, ELEMENTWISE, OPTIMIZER, OTHER = "matmul", "attention", "elementwise", "optimizer", "other"
_ELEMENTWISE = (
    *(
        "add",
        "add_",
        "add_bias_",
        "multiply",
        "scale",
        "activation",
        "activation_backward",
        "swiglu",
        "swiglu_backward",
    ),
    *("dropout", "dropout_add", "cast", "copy", "copy_into", "zero_", "fill_", "rope_", "map"),
)
_OPTIMIZER = ("adamw", "sgd", "adafactor", "gradient_norm")


def kind_of(op: str) -> str:
    """The family that an op's time is counted under."""
    if op.startswith((MATMUL, ATTENTION)):
        return MATMUL if op.startswith(MATMUL) else ATTENTION
    if op.startswith(_OPTIMIZER):
        return OPTIMIZER
    return ELEMENTWISE if op in _ELEMENTWISE else OTHER


@dataclass
class Row:
    """A group of ops of one step: calls, device seconds, FLOPs, and bytes moved if every tensor moves once."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    flops: int = 0
    bytes_moved: int = 0

    def add(self, sample: OpSample) -> None:
        """Count one op."""
        self.calls += 1
        self.seconds += sample.seconds
        self.flops += sample.flops
        self.bytes_moved += sample.bytes_moved

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    def roofline_share(self, peaks: Peaks) -> float:
        """Least seconds the device's peaks allow, over the seconds it took (Williams et al. 2009, "Roofline")."""
        least = max(self.flops / peaks.flops, self.bytes_moved / peaks.bandwidth)
        return least / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Summary:
    """samples: of one step, each with its median time over the steps. step_seconds: median from the first op's start
    to the last one's end on the device. peaks: of the device.
    """

    samples: list[OpSample]
    step_seconds: float
    peaks: Peaks

    def grouped(self, key: Callable[[OpSample], Hashable]) -> list[Row]:
        """Rows by a key of the ops, the longest first."""
        rows: dict[Hashable, Row] = {}
        for sample in self.samples:
            name = key(sample)
            rows.setdefault(name, Row(str(name))).add(sample)
        return sorted(rows.values(), key=lambda row: -row.seconds)

    @property
    def busy_seconds(self) -> float:
        """The ops' own times; what is missing to step_seconds went between them (uploads, submits)."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: FLOPs of the step over what the device could have done meanwhile. Recomputation is
        left out, as in Chowdhery et al. 2022 ("PaLM", appendix B)."""
        flops = sum(s.flops for s in self.samples if s.scope.phase != "recompute")
        return flops / (self.step_seconds * self.peaks.flops)

    @property
    def mbu(self) -> float:
        """Memory bandwidth utilisation: bytes moved over what could have been moved meanwhile."""
        return sum(s.bytes_moved for s in self.samples) / (self.step_seconds * self.peaks.bandwidth)

    def share(self, kind: str) -> float:
        """Part of the ops' time that went to one family."""
        busy = self.busy_seconds
        return sum(s.seconds for s in self.samples if kind_of(s.op) == kind) / busy if busy else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""

        def rows(key: Callable[[OpSample], Hashable]) -> list[dict[str, Any]]:
            return [
                {**vars(row), "roofline_share": row.roofline_share(self.peaks), "intensity": row.intensity}
                for row in self.grouped(key)
            ]

        return {
            "step_seconds": self.step_seconds,
            "busy_seconds": self.busy_seconds,
            "mfu": self.mfu,
            "mbu": self.mbu,
            "peaks": self.peaks._asdict(),
            "shares": {kind: self.share(kind) for kind in (MATMUL, ATTENTION, ELEMENTWISE, OPTIMIZER, OTHER)},
            "by_op": rows(lambda s: s.op),
            "by_layer": rows(lambda s: s.scope.layer or "(none)"),
            "by_phase": rows(lambda s: s.scope.phase or "(none)"),
        }


def summarize(steps: Sequence[Sequence[OpSample]], peaks: Peaks) -> Summary:
    """Median over steps, op by op. Steps whose ops differ from the last one's are left out."""
    last = steps[-1]
    names = [sample.op for sample in last]
    alike = [step for step in steps if [sample.op for sample in step] == names]
    spans = [step[-1].start + step[-1].seconds - step[0].start for step in alike]
    samples = [
        sample._replace(seconds=statistics.median(step[i].seconds for step in alike)) for i, sample in enumerate(last)
    ]
    return Summary(samples, statistics.median(spans), peaks)
