"""Rotary position embedding: Su et al. 2021, "RoFormer", and the ways to stretch it to longer texts.

All angles, cosines and sines are worked out in float64 on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..engine.compute_engine import ComputeEngine
from ..engine.tensor import Tensor
from .mode_watch import Watched

KINDS = ("linear", "ntk", "dynamic", "yarn")


def inverse_frequencies(head_dim: int, base: float = 1e4) -> np.ndarray:
    """base^(-2i/head_dim) for i in 0..head_dim/2-1, float64.

    Raises ValueError for an odd head_dim, or a base that is not positive and finite.
    """
    if head_dim % 2:
        raise ValueError(f"RoPE rotates pairs: head_dim {head_dim} is odd")
    if not 0 < base < math.inf:
        raise ValueError(f"RoPE base {base}: it must be positive and finite")
    return float(base) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def ntk_base(base: float, factor: float, head_dim: int) -> float:
    """NTK-aware base: base * factor^(d / (d - 2))."""
    return base * factor ** (head_dim / (head_dim - 2))


def dynamic_ntk_base(base: float, factor: float, seq_len: int, original_seq_len: int, head_dim: int) -> float:
    """NTK base that grows with the sequence; `base` exactly up to the original length."""
    if seq_len <= original_seq_len:
        return base
    return ntk_base(base, factor * seq_len / original_seq_len - (factor - 1), head_dim)


def yarn_attention_factor(factor: float, attention_factor: float | None = None) -> float:
    """Scale of cos and sin: 0.1 ln(factor) + 1 (Peng et al. 2023, "YaRN", eq. 22); a given one wins."""
    if attention_factor is not None:
        return attention_factor
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeScaling:
    """How positions beyond the original length are handled.

    kind: linear (positions divided by factor), ntk, dynamic or yarn. Raises ValueError for anything else, a factor
    below 1, or numbers that are not finite and positive.
    """

    kind: str
    factor: float
    original_seq_len: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown RoPE scaling {self.kind!r}: use one of {', '.join(KINDS)}")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"RoPE scaling factor {self.factor}: it must be at least 1, and finite")
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"RoPE scaling {name} {value}: it must be positive and finite")
        if self.kind in ("dynamic", "yarn") and self.original_seq_len < 1:
            raise ValueError(f"RoPE scaling {self.kind!r} needs original_seq_len")


def yarn_inverse_frequencies(head_dim: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """NTK-by-parts (YaRN, section 3.2): fast pairs keep their frequency, slow ones are divided by the factor."""
    plain = inverse_frequencies(head_dim, base)

    def pair_of(rotations: float) -> float:  # the pair that turns this often within the original length
        return head_dim * math.log(scaling.original_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


class Rope(Watched):
    """cos and sin tables [max_seq_len, head_dim/2] on an engine, shared by all layers of a model.

    interleaved: pairs are neighbours (2i, 2i+1); otherwise halves (i, i + head_dim/2).
    """

    def __init__(
        self,
        engine: ComputeEngine,
        head_dim: int,
        max_seq_len: int,
        *,
        base: float = 1e4,
        scaling: RopeScaling | None = None,
        interleaved: bool = False,
    ) -> None:
        self.engine = engine
        self.head_dim = head_dim
        self.max_seq_len = max_seq_len
        self.base = base
        self.scaling = scaling
        self.interleaved = interleaved
        self._base_in_use = 0.0
        self.cos, self.sin = self._make(self._base_for(0))

    def _base_for(self, seq_len: int) -> float:
        scaling = self.scaling
        if scaling is None or scaling.kind in ("linear", "yarn"):
            return self.base
        if scaling.kind == "ntk":
            return ntk_base(self.base, scaling.factor, self.head_dim)
        return dynamic_ntk_base(self.base, scaling.factor, seq_len, scaling.original_seq_len, self.head_dim)

    def _make(self, base: float) -> tuple[Tensor, Tensor]:
        scaling = self.scaling
        scale, position_scale = 1.0, 1.0
        if scaling is not None and scaling.kind == "yarn":
            frequencies = yarn_inverse_frequencies(self.head_dim, base, scaling)
            scale = yarn_attention_factor(scaling.factor, scaling.attention_factor)
        else:
            frequencies = inverse_frequencies(self.head_dim, base)
            if scaling is not None and scaling.kind == "linear":
                position_scale = 1.0 / scaling.factor
        angles = np.outer(np.arange(self.max_seq_len) * position_scale, frequencies)
        self._base_in_use = base
        with self.engine.parameter_pool():
            return self.engine.tensor(np.cos(angles) * scale), self.engine.tensor(np.sin(angles) * scale)

    def rotate(self, x: Tensor, num_heads: int, *, position_offset: int = 0, inverse: bool = False) -> None:
        """Turn the first num_heads * head_dim columns of x [batch, seq, width] in place; inverse is the backward.

        Raises ValueError when a position lies beyond max_seq_len.
        """
        end = position_offset + x.shape[1]
        if end > self.max_seq_len:
            raise ValueError(f"position {end - 1} is beyond max_seq_len {self.max_seq_len}")
        base = self._base_for(end)
        if base != self._base_in_use:  # dynamic scaling: the tables follow the length
            self.cos, self.sin = self._make(base)
        self.engine.rope_(
            x,
            self.cos,
            self.sin,
            num_heads=num_heads,
            head_dim=self.head_dim,
            position_offset=position_offset,
            interleaved=self.interleaved,
            inverse=inverse,
        )
