"""What tests of kernel variants share: attention under every kind of mask, and kernels with a fault."""

from __future__ import annotations

from typing import Any

import numpy as np

from vkfold.engine.attention_scores import alibi, softcap
from vkfold.engine.kernel import Kernel

SEQ, HEADS = 40, 4
# Name -> settings of attention over SEQ queries; "keys": how many there are, if not as many.
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "everything": {"causal": False},
    "window": {"window": 7},
    "both sides": {"causal": False, "window": 5},
    "more keys": {"keys": 53},
    "more queries": {"keys": 11},
    "padding": {"key_lengths": np.array([29], np.int32)},
    "documents": {"documents": np.array([[[0, 15]] * 15 + [[15, 40]] * 25], np.int32), "causal": False},
    "sinks": {"sinks": np.linspace(-1, 2, HEADS, dtype=np.float32)},
    "alibi": {"score": alibi(), "head_values": np.linspace(0.1, 0.5, HEADS, dtype=np.float32), "window": 11},
    "softcap": {"score": softcap(3.0), "window": 9},
}


def damaged(kernel: Kernel, old: str, new: str) -> Kernel:
    """A kernel of the same name with something else in its text, or in its file's."""
    twin = kernel.specialized("")
    for name in ("glsl", "key", "_printed"):
        twin.__dict__.pop(name, None)
    text = twin.body
    assert old in text
    twin._source = text.replace(old, new)
    return twin
