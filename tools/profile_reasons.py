"""Why each kernel of a profile was the one that ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..engine.profiler import OpSample

_LOADS = {
    "vec4": "16-byte loads: every row starts on 16 bytes",
    "scalar": "4-byte loads: some row does not start on 16 bytes",
}


def kernel_reasons(samples: Sequence[OpSample]) -> list[tuple[str, str]]:
    """(kernel, reason) of every kernel that ran, in order of first use: of one with variants, every call it ran for."""
    ran: dict[str, list[OpSample]] = {}
    for sample in samples:
        for kernel in sample.kernels:
            ran.setdefault(kernel, []).append(sample)
    return [(kernel, _reason(kernel, those)) for kernel, those in ran.items()]


def _reason(kernel: str, samples: Sequence[OpSample]) -> str:
    calls = {call: why for sample in samples for call, why in sample.reasons.get(kernel, {}).items()}
    words = [f"{call}: {why}" for call, why in calls.items()]
    words += [text for width, text in _LOADS.items() if f"_{width}_" in f"{kernel}_"]
    if not words:
        words = [f"the only kernel of {samples[0].op} for these settings"]
    fused = Counter(" + ".join(sample.parts) for sample in samples if len(sample.parts) > 1)
    for parts, times in fused.items():
        each = "one launch" if times == len(samples) else f"{times} of {len(samples)} ops that ran it: one launch"
        words.append(f"{each} for {parts} (fusion)")
    return "; ".join(words)
