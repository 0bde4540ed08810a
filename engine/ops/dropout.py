"""Dropout (Srivastava et al. 2014) from a counter-based generator: a mask is recomputed where needed, never kept.

The generator is Philox4x32-10 (Salmon et al., SC 2011). Element e takes word e % 4 of the block with
counter = (e / 4, step, micro-batch, site) and key = the seed's two halves, so a mask depends on exactly these, whatever
the tensor's shape, the device or the order of work. The element is dropped when its word is below round(p * 2^32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..map_kernel import MapKernel
from ..op import register
from ..step_parameters import StepParameters
from ..tensor import Tensor, TensorSpec
from .elementwise import ElementwiseOp, check_same

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

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


def dropout_keep(size: int, p: float, site: int, step: StepParameters) -> np.ndarray:
    """Which of the first `size` elements are kept, as booleans."""
    counter = (np.arange(-(-size // 4)), step.step, step.micro_batch, site)
    words = philox(counter, (step.seed & 0xFFFFFFFF, (step.seed >> 32) & 0xFFFFFFFF))
    return words.reshape(-1)[:size] >= _threshold(p)


def _threshold(p: float) -> int:
    return min(round(p * 2**32), 2**32 - 1)


def _factor(p: float) -> float:
    return float(np.float32(1.0 / (1.0 - p)))


def _check(op: str, p: float, site: int) -> None:
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: p is {p}, it must be at least 0 and below 1")
    if not 0 <= site < 2**32:
        raise ValueError(f"{op}: site is {site}, it must fit 32 bits")


_CALL = "dropout(x, args.factor, args.step, args.site, index, args.threshold)"
_SCALARS = "float factor, uint site, uint threshold"


class DropoutOp(ElementwiseOp):
    """y = x / (1 - p) where kept, else 0."""

    name = "dropout"
    takes_step = True
    flops_per_element = 20
    kernel = MapKernel(
        "dropout", ("x",), ("y",), f"y = {_CALL};", scalars=_SCALARS, step=True, includes=("dropout.glsl",)
    )

    def outputs(self, x: TensorSpec, *, p: float, site: int) -> Sequence[TensorSpec]:
        _check(self.name, p, site)
        return (check_same(self.name, x=x),)

    def reference(self, x: Any, *, p: float, site: int, step: StepParameters) -> Sequence[Any]:
        keep = dropout_keep(x.size, p, site, step).reshape(x.shape)
        return (np.where(keep, x * x.dtype.type(_factor(p)), x.dtype.type(0)),)

    def launch(
        self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, p: float, site: int
    ) -> None:
        self.kernel.launch(gpu, outputs[0].size, *inputs, outputs[0], _factor(p), site, _threshold(p))


class DropoutAddOp(DropoutOp):
    """y = residual + dropout(x)."""

    name = "dropout_add"
    flops_per_element = 21
    kernel = MapKernel(
        "dropout_add",
        ("x", "residual"),
        ("y",),
        f"y = residual + {_CALL};",
        scalars=_SCALARS,
        step=True,
        includes=("dropout.glsl",),
    )

    def outputs(  # type: ignore[override]
        self, x: TensorSpec, residual: TensorSpec, *, p: float, site: int
    ) -> Sequence[TensorSpec]:
        _check(self.name, p, site)
        return (check_same(self.name, x=x, residual=residual),)

    def reference(  # type: ignore[override]
        self, x: Any, residual: Any, *, p: float, site: int, step: StepParameters
    ) -> Sequence[Any]:
        return (residual + super().reference(x, p=p, site=site, step=step)[0],)


DROPOUT = register(DropoutOp())
DROPOUT_ADD = register(DropoutAddOp())


def dropout(engine: ComputeEngine, x: Tensor, *, p: float, site: int) -> Tensor:
    """x / (1 - p) where the mask keeps it, 0 elsewhere; float32 of any shape. Its backward is dropout(dy, p, site).

    p: probability of dropping, 0 <= p < 1. site: a stable number of this dropout in the model. Seed, step and
    micro-batch come from the engine's step parameters. Raises ValueError for p or site out of range, or another type.
    """
    return engine.execute(DROPOUT, (x,), p=float(p), site=int(site))[0]


def dropout_add(engine: ComputeEngine, x: Tensor, residual: Tensor, *, p: float, site: int) -> Tensor:
    """residual + dropout(x), the same bits as dropout and then add. See `dropout`; shapes must be equal."""
    return engine.execute(DROPOUT_ADD, (x, residual), p=float(p), site=int(site))[0]
