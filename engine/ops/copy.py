"""Copy a tensor into a new one, or into part of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..dtypes import itemsize
from ..op import Op, register
from ..tensor import Tensor, TensorSpec

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder


class CopyOp(Op):
    """A new tensor with the same elements."""

    name = "copy"

    def outputs(self, x: TensorSpec) -> Sequence[TensorSpec]:
        return (x,)

    def flops(self, x: TensorSpec) -> int:
        return 0

    def reference(self, x: Any) -> Sequence[Any]:
        return (x.copy(),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        gpu.copy(inputs[0], outputs[0], inputs[0].nbytes)


class CopyIntoOp(Op):
    """Elements of one tensor over a stretch of another."""

    name = "copy_into"
    writes = (0,)

    def outputs(self, target: TensorSpec, source: TensorSpec, *, offset: int) -> Sequence[TensorSpec]:
        if target.dtype != source.dtype:
            raise ValueError(f"copy_into: the target is {target.dtype}, the source {source.dtype}: cast it first")
        if not 0 <= offset <= target.size - source.size:
            raise ValueError(
                f"copy_into: {source.size} elements at offset {offset} do not fit a target of {target.size} elements"
            )
        return ()

    def written_bytes(self, position: int, *specs: TensorSpec | None, **settings: Any) -> tuple[int, int]:
        """The stretch that the source goes to: the source may be another part of the target."""
        source = specs[1]
        assert source is not None
        start = settings["offset"] * itemsize(source.dtype)
        return start, start + source.nbytes

    def flops(self, target: TensorSpec, source: TensorSpec, *, offset: int) -> int:
        return 0

    def reference(self, target: Any, source: Any, *, offset: int) -> Sequence[Any]:
        target.reshape(-1)[offset : offset + source.size] = source.reshape(-1)
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, offset: int) -> None:
        target, source = inputs
        start = target.offset + offset * itemsize(target.dtype)
        gpu.copy(source, Tensor(target.engine, source.spec, target.storage, start), source.nbytes)


COPY = register(CopyOp())
COPY_INTO = register(CopyIntoOp())


def copy(engine: ComputeEngine, x: Tensor) -> Tensor:
    """A new tensor with the shape, type and elements of x."""
    return engine.execute(COPY, (x,))[0]


def copy_into(engine: ComputeEngine, target: Tensor, source: Tensor, *, offset: int = 0) -> None:
    """Writes the elements of source over those of target from element `offset` on, both in row-major order.

    Raises ValueError for differing types, a source that does not fit, or two ranges of one storage that overlap.
    """
    engine.execute(COPY_INTO, (target, source), offset=offset)
