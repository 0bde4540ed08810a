"""What elementwise ops share: the shape rule of equal shapes, and one FLOP an element unless they say otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..kernel import Kernel
from ..map_kernel import MapKernel
from ..op import Op
from ..tensor import TensorSpec


def check_same(op: str, **specs: TensorSpec) -> TensorSpec:
    """The common spec of float32 tensors of one shape. Raises ValueError that names the one that differs."""
    (first_name, first), *others = specs.items()
    if first.dtype != "float32":
        raise ValueError(f"{op}: {first_name} is {first.dtype}, needed is float32")
    for name, spec in others:
        if spec != first:
            raise ValueError(
                f"{op}: {name} is {spec.dtype} {spec.shape}, {first_name} is {first.dtype} {first.shape}: "
                "types and shapes must be equal"
            )
    return first


class ElementwiseOp(Op):
    """An op with one map kernel."""

    kernel: MapKernel
    flops_per_element = 1

    def flops(self, x: TensorSpec, *specs: Any, **settings: Any) -> int:
        return self.flops_per_element * x.size

    def kernels(self) -> Iterable[Kernel]:
        return self.kernel.kernels()
