"""What a GPT model is made of, and checks that name what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..engine.errors import BadInputError
from ..engine.ops.attention_rule import MAX_HEAD_DIM
from ..engine.setting_checks import check_setting
from .feed_forward import ACTIVATIONS, default_width
from .rope import RopeScaling

POSITIONS = ("rope", "learned", "alibi")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and parts of a decoder-only transformer.

    num_kv_heads, head_dim, d_ff: 0 stands for num_heads, d_model / num_heads, and the feed-forward's default width.
    norm: rmsnorm or layernorm. activation: swiglu, gelu, relu or silu. positions: rope, learned or alibi (Press et al.
    2022). bias: None is true with layernorm. dropout: on the embeddings and on both branches of each block. window:
    keys each query sees, itself included (0: all before it). attention_softcap: scores s become cap * tanh(s / cap)
    (Gemma 2; 0: off). attention_sinks: one trainable score a head with no value behind it.

    Raises BadInputError (a ValueError) that lists everything that is wrong.
    """

    vocab_size: int
    max_seq_len: int
    d_model: int
    num_heads: int
    num_layers: int
    num_kv_heads: int = 0
    head_dim: int = 0
    d_ff: int = 0
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    positions: str = "rope"
    tie_head: bool = True
    dropout: float = 0.0
    bias: bool | None = None
    norm_eps: float = 1e-5
    rope_base: float = 1e4
    rope_interleaved: bool = False
    rope_scaling: RopeScaling | None = None
    window: int = 0
    attention_softcap: float = 0.0
    attention_sinks: bool = False

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise BadInputError("; ".join(problems))
        resolved = {
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "head_dim": self.head_dim or self.d_model // self.num_heads,
            "d_ff": self.d_ff or default_width(self.d_model, self.activation),
            "bias": self.norm == "layernorm" if self.bias is None else self.bias,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    def _wrong_types(self) -> list[str]:
        found = []
        for field in fields(self):
            try:
                check_setting("GPTConfig", field.name, getattr(self, field.name), str(field.type))
            except (TypeError, ValueError) as error:
                found.append(str(error))
        return found

    def _problems(self) -> list[str]:
        problems = self._wrong_types()
        if problems:
            return problems
        problems = [
            f"{name} is {getattr(self, name)}, it must be at least 1"
            for name in ("vocab_size", "max_seq_len", "d_model", "num_heads", "num_layers")
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)}, it must not be negative"
            for name in ("num_kv_heads", "head_dim", "d_ff", "window")
            if getattr(self, name) < 0
        ]
        for name, choices in (
            ("norm", ("rmsnorm", "layernorm")),
            ("activation", ACTIVATIONS),
            ("positions", POSITIONS),
        ):
            if getattr(self, name) not in choices:
                problems.append(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(choices)}")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}, it must be at least 0 and below 1")
        if not 0 <= self.attention_softcap < math.inf:
            problems.append(f"attention_softcap is {self.attention_softcap}, it must be 0 (off) or positive and finite")
        if not 0 < self.norm_eps < math.inf:
            problems.append(f"norm_eps is {self.norm_eps}, it must be positive and finite")
        if not 0 < self.rope_base < math.inf:
            problems.append(f"rope_base is {self.rope_base}, it must be positive and finite")
        if problems:
            return problems
        if not self.head_dim and self.d_model % self.num_heads:
            problems.append(f"num_heads {self.num_heads} does not divide d_model {self.d_model}")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            problems.append(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        head_dim = self.head_dim or self.d_model // self.num_heads
        if head_dim > MAX_HEAD_DIM:
            problems.append(f"head_dim {head_dim} is over {MAX_HEAD_DIM}, the most attention takes: use more num_heads")
        if not problems and self.positions == "rope" and head_dim % 2:
            problems.append(f"head_dim {head_dim} is odd: RoPE rotates pairs; use learned positions or other num_heads")
        return problems

    @property
    def num_parameters(self) -> int:
        """Trainable values of the model, worked out without building it; a tied head counts once."""
        d, width = self.d_model, self.num_heads * self.head_dim
        qkv_width = width + 2 * self.num_kv_heads * self.head_dim
        up_width = self.d_ff * (2 if self.activation == "swiglu" else 1)
        norm = d * (2 if self.norm == "layernorm" else 1)
        block = d * qkv_width + width * d + d * up_width + self.d_ff * d + 2 * norm
        if self.bias:
            block += qkv_width + d + up_width + d
        if self.attention_sinks:
            block += self.num_heads
        total = self.vocab_size * d * (1 if self.tie_head else 2) + self.num_layers * block + norm
        return total + (self.max_seq_len * d if self.positions == "learned" else 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a config file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPTConfig:
        """The inverse of to_dict. Raises BadInputError for an unknown or missing name."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise BadInputError(f"unknown model settings: {', '.join(unknown)}")
        settings = dict(values)
        scaling = settings.get("rope_scaling")
        if isinstance(scaling, Mapping):
            settings["rope_scaling"] = RopeScaling(**scaling)
        try:
            return cls(**settings)
        except TypeError as error:
            raise BadInputError(f"model settings: {error}") from None
