"""aule-attention: attention on Vulkan, forward and backward. Its backward takes and gives host arrays only, so copies
of 2 MiB each way are inside its time."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
from aule.vulkan import Aule
from work import Attention, Unsupported, Work


class AttentionJob:
    """Forward with the log-sum-exp, then backward."""

    def __init__(self, aule: Aule, work: Attention) -> None:
        self.aule = aule
        self.q, self.k, self.v, self.d_o = work.inputs()

    def run(self) -> None:
        """Once."""
        self.o, lse = self.aule.attention_forward_with_lse(self.q, self.k, self.v, causal=True)
        self.gradients = self.aule.attention_backward(self.q, self.k, self.v, self.o, self.d_o, lse, causal=True)

    def results(self) -> dict[str, np.ndarray]:
        """o, d_q, d_k, d_v."""
        return dict(zip(("o", "d_q", "d_k", "d_v"), (self.o, *self.gradients), strict=True))


class Library:
    """See worker.Library."""

    def __init__(self) -> None:
        self.version = version("aule-attention")
        self.aule = Aule()
        self.device = self.aule.device_name

    def prepare(self, work: Work) -> AttentionJob:
        """Attention only."""
        if isinstance(work, Attention):
            return AttentionJob(self.aule, work)
        raise Unsupported("attention only")
