"""Random numbers from a counter: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011) in NumPy.

Element e of a tensor takes word e % 4 of the block with counter = (e / 4, step, micro-batch, site) and key = the seed's
two halves, so it depends on exactly these, whatever the tensor's shape, the device or the order of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .step_parameters import StepParameters

_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


def philox(counter: Sequence[Any], key: Sequence[int]) -> np.ndarray:
    """Philox4x32-10: counter of four uint32 arrays or numbers, key of two numbers; four words in the last dimension."""
    c0, c1, c2, c3 = np.broadcast_arrays(*[np.asarray(c, dtype=np.uint64) for c in counter])
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (product1 >> _SHIFT32) ^ c1 ^ np.uint64(k0), (product0 >> _SHIFT32) ^ c3 ^ np.uint64(k1)
        c1, c3 = product1 & _MASK32, product0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_words(size: int, site: int, step: StepParameters) -> np.ndarray:
    """The word of each of the first `size` elements, uint32."""
    counter = (np.arange(-(-size // 4)), step.step, step.micro_batch, site)
    return philox(counter, (step.seed & 0xFFFFFFFF, (step.seed >> 32) & 0xFFFFFFFF)).reshape(-1)[:size]
