"""Ops whose whole arithmetic is expressions: reference, kernel and launch follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..expr import Expr
from ..kernel import Kernel
from ..map_kernel import MapKernel
from ..op import Op
from ..tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from ..recorder import Recorder


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


class MapOp(Op):
    """An op with a map kernel of expressions; a subclass gives the kernel and the shape rule.

    Its tensors are the kernel's pointers in order: the op's inputs, then its outputs; inputs that the kernel writes are
    in `writes`. Whoever wants to join ops asks `expressions`, `map_kernel` (operands, scalars) and `scalar_values`.
    """

    kernel: MapKernel
    flops_per_element = 1

    def map_kernel(self, **settings: Any) -> MapKernel:
        """The kernel for these settings."""
        return self.kernel

    def expressions(self, **settings: Any) -> Mapping[str, Expr]:
        """What the op computes for each element, by output: expressions of the inputs' and scalars' names."""
        return self.map_kernel(**settings).expressions

    def may_coincide(self, written: int, read: int, **settings: Any) -> bool:
        """True for inputs that lie at the same place: an element is read and written by one invocation."""
        operands = self.map_kernel(**settings).inputs
        return operands[written].place == operands[read].place

    def scalar_values(self, *specs: Any, **settings: Any) -> tuple[float, ...]:
        """Values of the kernel's scalars, in order."""
        return ()

    def num_elements(self, *specs: TensorSpec) -> int:
        """Elements the kernel works on; as many as the first input has, unless overridden."""
        return specs[0].size

    def allows_wide(self, *specs: TensorSpec) -> bool:
        """Whether the kernel may go by four elements, alignment apart."""
        return True

    def flops(self, x: TensorSpec, *specs: Any, **settings: Any) -> int:
        return self.flops_per_element * x.size

    def reference(self, *arrays: Any, **settings: Any) -> Sequence[Any]:
        step = {"step": settings.pop("step")} if self.takes_step else {}
        kernel = self.map_kernel(**settings)
        specs = [TensorSpec(array.shape) for array in arrays]
        values = self.scalar_values(*specs, **settings)
        scalars = {  # as the device gets them
            name: int(value) if kind == "uint" else np.float32(value)
            for (name, kind), value in zip(kernel.scalars.items(), values, strict=True)
        }
        inputs = dict(zip((operand.name for operand in kernel.inputs), arrays, strict=True))
        made = []
        results = kernel.reference(**inputs, **scalars, **step)
        for operand, value in zip(kernel.outputs, results, strict=True):
            if operand.name in inputs:
                inputs[operand.name][...] = value
            else:
                made.append(value)
        return made

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **settings: Any) -> None:
        specs = [tensor.spec for tensor in inputs]
        self.map_kernel(**settings).launch(
            gpu,
            self.num_elements(*specs),
            *inputs,
            *outputs,
            *self.scalar_values(*specs, **settings),
            wide=self.allows_wide(*specs),
        )

    def kernels(self) -> Iterable[Kernel]:
        return self.kernel.kernels()
