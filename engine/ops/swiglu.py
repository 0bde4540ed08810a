"""SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): silu(gate) * up, side by side in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..expr import variables
from ..map_kernel import MapKernel, Operand
from ..op import register
from ..tensor import Tensor, TensorSpec
from .activation import activation_of, activation_slope, clamped
from .elementwise import MapOp, check_same

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_DY, _GATE_VALUE, _UP_VALUE = variables("dy gate up")

# Element `index` of [rows, width] lies at index + row * width in [rows, 2 * width], and its other half width further.
_GATE = "index + index / args.width * args.width"
_UP = "index + (index / args.width + 1u) * args.width"


def _half(op: str, gate_up: TensorSpec) -> TensorSpec:
    check_same(op, gate_up=gate_up)
    if not gate_up.shape or gate_up.shape[-1] % 2:
        raise ValueError(f"{op}: gate_up of shape {gate_up.shape} needs an even last dimension: gate, then up")
    return TensorSpec((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


class _HalvesOp(MapOp):
    """What the two share: one element for each pair of gate and up; gate_up is the last input."""

    def scalar_values(self, *specs: TensorSpec) -> tuple[float, ...]:
        return (specs[-1].shape[-1] // 2,)

    def num_elements(self, *specs: TensorSpec) -> int:
        return specs[-1].size // 2

    def allows_wide(self, *specs: TensorSpec) -> bool:
        return specs[-1].shape[-1] % 8 == 0


class SwigluOp(_HalvesOp):
    """y = silu(gate) * up."""

    name = "swiglu"
    flops_per_element = 4  # of gate_up, which has two for one of y
    kernel = MapKernel(
        "swiglu",
        (Operand("gate", "gate_up", _GATE), Operand("up", "gate_up", _UP)),
        ("y",),
        {"y": activation_of(_GATE_VALUE, "silu") * _UP_VALUE},
        scalars="uint width",
    )

    def outputs(self, gate_up: TensorSpec) -> Sequence[TensorSpec]:
        return (_half(self.name, gate_up),)

    def reference(self, gate_up: Any) -> Sequence[Any]:
        gate, up = np.split(gate_up, 2, axis=-1)
        return self.kernel.reference(gate=gate, up=up)


class SwigluBackwardOp(_HalvesOp):
    """d_gate = dy * up * silu'(gate), d_up = dy * silu(gate)."""

    name = "swiglu_backward"
    flops_per_element = 16
    kernel = MapKernel(
        "swiglu_backward",
        ("dy", Operand("gate", "gate_up", _GATE), Operand("up", "gate_up", _UP)),
        (Operand("d_gate", "d_gate_up", _GATE), Operand("d_up", "d_gate_up", _UP)),
        {
            "d_gate": _DY * _UP_VALUE * activation_slope(_GATE_VALUE, "silu"),
            "d_up": _DY * activation_of(_GATE_VALUE, "silu", clamped(_GATE_VALUE, "silu")),  # shares its exp
        },
        scalars="uint width",
    )

    def outputs(self, dy: TensorSpec, gate_up: TensorSpec) -> Sequence[TensorSpec]:
        half = _half(self.name, gate_up)
        if dy != half:
            raise ValueError(f"{self.name}: dy is {dy.dtype} {dy.shape}, needed is float32 {half.shape}")
        return (gate_up,)

    def reference(self, dy: Any, gate_up: Any) -> Sequence[Any]:
        gate, up = np.split(gate_up, 2, axis=-1)
        return (np.concatenate(self.kernel.reference(dy=dy, gate=gate, up=up), axis=-1),)


SWIGLU = register(SwigluOp())
SWIGLU_BACKWARD = register(SwigluBackwardOp())


def swiglu(engine: ComputeEngine, gate_up: Tensor) -> Tensor:
    """silu(gate_up[..., :f]) * gate_up[..., f:] of a float32 [..., 2 f]; gives [..., f].

    Raises ValueError for another type or an odd last dimension.
    """
    return engine.execute(SWIGLU, (gate_up,))[0]


def swiglu_backward(engine: ComputeEngine, dy: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient [..., 2 f] of `swiglu` from dy [..., f]. Raises ValueError for shapes or types that do not fit."""
    return engine.execute(SWIGLU_BACKWARD, (dy, gate_up))[0]
