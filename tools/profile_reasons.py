"""Why each kernel of a profile was the one that ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..engine.profiler import OpSample

Variants = Mapping[str, Mapping[str, str]]  # piece of a kernel's name -> call -> variant and why it was chosen
_LOADS = {
    "vec4": "16-byte loads: every row starts on 16 bytes",
    "scalar": "4-byte loads: some row does not start on 16 bytes",
}


def kernel_reasons(samples: Sequence[OpSample], variants: Variants) -> list[tuple[str, str]]:
    """(kernel, reason) of every kernel that ran, in order of first use."""
    reasons: dict[str, str] = {}
    for sample in samples:
        for kernel in sample.kernels:
            reasons.setdefault(kernel, _reason(kernel, sample, variants))
    return list(reasons.items())


def _reason(kernel: str, sample: OpSample, variants: Variants) -> str:
    fused = f"; one launch for {' + '.join(sample.parts)} (fusion)" if len(sample.parts) > 1 else ""
    pieces = [piece for piece in variants if f"_{piece}_" in f"_{kernel}_"]
    if pieces:
        calls = variants[max(pieces, key=len)]  # one name may begin another: shuffle_4x4 and shuffle_4x4_split2
        loads = [text for width, text in _LOADS.items() if f"_{width}_" in f"{kernel}_"]
        return "; ".join([f"{call}: {why}" for call, why in calls.items()] + loads) + fused
    if kernel.startswith("matmul"):
        return f"the tile for this shape and device, see docs/kernels.md{fused}"
    for width, text in _LOADS.items():
        if kernel.endswith(f"_{width}"):
            return f"{text}{fused}"
    return f"the only kernel of {sample.op} for these settings{fused}"
