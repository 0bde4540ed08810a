"""Models with a name: options of text_train, and the size of their vocabulary."""

from __future__ import annotations

import difflib
from typing import Any

from ..engine.errors import BadInputError

_GPT = {
    "norm": "layernorm",
    "activation": "gelu",
    "positions": "learned",
    "tie_head": True,
    "seq_len": 1024,
    "vocab_size": 50257,
    "batch_size": 1,
}
_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "tie_head": False, "batch_size": 1}


def _gpt(d_model: int, d_ff: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {**_GPT, "d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}


def _llama(d_model: int, d_ff: int, num_layers: int, num_heads: int, num_kv_heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": d_model, "d_ff": d_ff, "num_layers": num_layers, "num_heads": num_heads}
    return {**_LLAMA, **sizes, "num_kv_heads": num_kv_heads, **more}


# Sizes of the published models (Touvron et al. 2023; Grattafiori et al. 2024; Ben Allal et al. 2025) and of GPT-2
# (Radford et al. 2019) and a 2.7 billion one in its manner.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-236m": {**_gpt(1024, 4096, 16, 16), "vocab_size": 32782, "batch_size": 6},
    "small": _gpt(768, 3072, 12, 12),
    "medium": _gpt(1024, 4096, 24, 16),
    "large": _gpt(1280, 5120, 36, 20),
    "xl": _gpt(1600, 6400, 48, 25),
    "2.7b": _gpt(2560, 10240, 32, 32),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, vocab_size=49152, seq_len=2048, tie_head=True),
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, vocab_size=32000, seq_len=4096),
    "llama-3-8b": _llama(4096, 14336, 32, 32, 8, vocab_size=128256, seq_len=8192),
    "llama-3-70b": _llama(8192, 28672, 80, 64, 8, vocab_size=128256, seq_len=8192),
}


def preset(name: str) -> dict[str, Any]:
    """The options of a preset by name. Raises BadInputError, with the nearest name, for one that is not there."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInputError(f"--preset {name}: {hint}There are {', '.join(PRESETS)}")
    return dict(PRESETS[name])
