"""Why each kernel of a profile was the one that ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..engine.profiler import OpSample


def kernel_reasons(samples: Sequence[OpSample], matmul: Mapping[str, str]) -> list[tuple[str, str]]:
    """(kernel, reason) of every kernel that ran, in order of first use. matmul: variant -> why it was last chosen."""
    reasons: dict[str, str] = {}
    for sample in samples:
        for kernel in sample.kernels:
            reasons.setdefault(kernel, _reason(kernel, sample, matmul))
    return list(reasons.items())


def _reason(kernel: str, sample: OpSample, matmul: Mapping[str, str]) -> str:
    fused = f"; one launch for {' + '.join(sample.parts)} (fusion)" if len(sample.parts) > 1 else ""
    if kernel.startswith("matmul"):
        named = [f"{variant}: {why}" for variant, why in matmul.items() if variant.removesuffix("_swapped") in kernel]
        return ("; ".join(named) or "the tile for this shape and device, see docs/kernels.md") + fused
    if kernel.endswith("_vec4"):
        return f"16-byte loads: every row starts on 16 bytes{fused}"
    if kernel.endswith("_scalar"):
        return f"4-byte loads: some row does not start on 16 bytes{fused}"
    return f"the only kernel of {sample.op} for these settings{fused}"
