"""What changes from step to step, kept in a small device buffer so that a step's dispatches never do."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Field order is the buffer's layout (std430): GLSL and struct format below must agree.
GLSL_STRUCT = """
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer StepParameters {
    uint seed_low;
    uint seed_high;
    uint step;
    uint micro_batch;
    float learning_rate;
    float loss_scale;
    float bias_correction1;
    float bias_correction2;
    float square_weight;
};
"""
_FORMAT = struct.Struct("<IIIIfffff")
SIZE_BYTES = 256
LARGEST = 3.4028234e38  # of float32


@dataclass(frozen=True)
class StepParameters:
    """Values the kernels of one micro-batch read.

    seed: 64-bit seed of the dropout generator. step: optimizer steps done before this one. micro_batch: index within
    the step. learning_rate: of this step. loss_scale: 1 / number of valid tokens of all micro-batches of the step.
    bias_correction1/2: 1 - beta^t of Adam (Kingma & Ba 2015, section 3), worked out in float64 on the host.
    square_weight: share of the new squares in Adafactor's second moment, 1 - beta2_t.

    Raises ValueError for a step or micro_batch outside 32 bits, and for rates and factors that are not finite float32.
    """

    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    learning_rate: float = 0.0
    loss_scale: float = 1.0
    bias_correction1: float = 1.0
    bias_correction2: float = 1.0
    square_weight: float = 1.0

    def __post_init__(self) -> None:
        if (  # nearly always, and as long as it is, few steps of Python
            (type(self.step) is int and 0 <= self.step < 2**32)
            and (type(self.micro_batch) is int and 0 <= self.micro_batch < 2**32)
            and (abs(self.learning_rate) <= LARGEST and abs(self.loss_scale) <= LARGEST)
            and (abs(self.bias_correction1) <= LARGEST and abs(self.bias_correction2) <= LARGEST)
            and abs(self.square_weight) <= LARGEST
        ):
            return
        for name in ("step", "micro_batch"):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or not 0 <= value < 2**32:
                raise ValueError(f"step parameter {name} is {value!r:.40}, it must be a whole number below 2^32")
        for name in ("learning_rate", "loss_scale", "bias_correction1", "bias_correction2", "square_weight"):
            value = getattr(self, name)
            if not abs(value) <= LARGEST:
                raise ValueError(f"step parameter {name} is {value!r:.40}, it must be a finite number of float32")

    def pack(self) -> bytes:
        """The bytes of the device buffer."""
        place = bytearray(_FORMAT.size)
        self.pack_into({self.micro_batch: place})
        return bytes(place)

    def pack_into(self, places: Mapping[int, Any]) -> None:
        """Write the bytes of several micro-batches that differ in nothing else. places: micro-batch -> memory."""
        before = self.seed & 0xFFFFFFFF, (self.seed >> 32) & 0xFFFFFFFF, self.step
        after = (
            self.learning_rate,
            self.loss_scale,
            self.bias_correction1,
            self.bias_correction2,
            self.square_weight,
        )
        for micro_batch, place in places.items():
            _FORMAT.pack_into(place, 0, *before, micro_batch, *after)
