"""Rotary position embedding, in place on the query and key heads of a fused projection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .piece_kernels import PieceCall, PieceOp, rows_by_pieces
from .row_kernels import column_groups

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine

_HEADS = 8  # that one invocation rotates
_SCALARS = "uint num_rows, uint half_dim, uint num_heads, uint seq, uint width, uint position_offset, float direction"
_X, _TABLE = "inout row x[num_rows * width]", "[seq * half_dim + position_offset * half_dim]"


def _example(pieces: int) -> tuple[int, Mapping[str, float]]:
    """Rows of two groups of heads, the second with two; heads of 8, which is two pieces, and more columns behind."""
    rows = pieces // 4 + 1
    sizes = {"num_rows": rows, "half_dim": 8, "num_heads": _HEADS + 2, "seq": 7, "width": 16 * (_HEADS + 2) + 4}
    return 4 * rows, {**sizes, "position_offset": 3, "direction": -1.0}


KERNELS = {
    False: rows_by_pieces(
        "rope",
        "rope.comp",
        f"{_X}, in row cos_table{_TABLE}, in row sin_table{_TABLE}, {_SCALARS}",
        _example,
        INTERLEAVED=0,
        HEADS=_HEADS,
    ),
    True: rows_by_pieces(
        "rope_interleaved",
        "rope.comp",
        f"{_X}, in f32 cos_table{_TABLE}, in f32 sin_table{_TABLE}, {_SCALARS}",
        lambda pieces: (8 * (pieces // 8 + 1), {**_example(pieces)[1], "num_rows": pieces // 8 + 1}),
        INTERLEAVED=1,
        HEADS=_HEADS,
    ),
}


class RopeOp(PieceOp):
    """x [batch, seq, width] is rotated in its first num_heads * head_dim columns."""

    name = "rope_"
    writes = (0,)

    def outputs(
        self,
        x: TensorSpec,
        cos: TensorSpec,
        sin: TensorSpec,
        *,
        num_heads: int,
        head_dim: int,
        position_offset: int,
        interleaved: bool,
        inverse: bool,
    ) -> Sequence[TensorSpec]:
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"rope_: head_dim is {head_dim}; it rotates pairs, so it must be even")
        if len(x.shape) != 3 or num_heads < 1 or num_heads * head_dim > x.shape[2]:
            raise ValueError(f"rope_: x of shape {x.shape} is not [batch, seq, at least {num_heads} x {head_dim}]")
        if cos.shape != sin.shape or len(cos.shape) != 2 or cos.shape[1] != head_dim // 2:
            raise ValueError(f"rope_: tables of shapes {cos.shape} and {sin.shape} are not [max_seq, {head_dim // 2}]")
        if position_offset < 0 or position_offset + x.shape[1] > cos.shape[0]:
            raise ValueError(
                f"rope_: positions {position_offset}..{position_offset + x.shape[1] - 1} pass the "
                f"{cos.shape[0]} of the tables: make longer tables"
            )
        for spec in (x, cos, sin):
            if spec.dtype != "float32":
                raise ValueError(f"rope_: float32 expected, got {spec.dtype}")
        return ()

    def flops(self, x: TensorSpec, *rest: TensorSpec, num_heads: int, head_dim: int, **settings: Any) -> int:
        return 3 * x.shape[0] * x.shape[1] * num_heads * head_dim

    def reference(
        self,
        x: Any,
        cos: Any,
        sin: Any,
        *,
        num_heads: int,
        head_dim: int,
        position_offset: int,
        interleaved: bool,
        inverse: bool,
    ) -> Sequence[Any]:
        batch, seq, _ = x.shape
        heads = x[:, :, : num_heads * head_dim].reshape(batch, seq, num_heads, head_dim)
        if interleaved:
            a, b = heads[..., 0::2].copy(), heads[..., 1::2].copy()
        else:
            a, b = heads[..., : head_dim // 2].copy(), heads[..., head_dim // 2 :].copy()
        c = cos[position_offset : position_offset + seq][None, :, None, :]
        s = sin[position_offset : position_offset + seq][None, :, None, :] * (-1 if inverse else 1)
        rotated = np.empty_like(heads)
        first, second = a * c - b * s, a * s + b * c
        if interleaved:
            rotated[..., 0::2], rotated[..., 1::2] = first, second
        else:
            rotated[..., : head_dim // 2], rotated[..., head_dim // 2 :] = first, second
        x[:, :, : num_heads * head_dim] = rotated.reshape(batch, seq, -1)
        return ()

    def piece_call(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        num_heads: int,
        head_dim: int,
        position_offset: int,
        interleaved: bool,
        inverse: bool,
    ) -> PieceCall:
        x, cos, sin = inputs
        batch, seq, width = x.shape
        half = head_dim // 2
        if interleaved:
            cols, read_wide = head_dim, [x]
        else:
            cols, read_wide = half, [x, cos, sin]
        kernel = KERNELS[interleaved].pick(cols if width % 4 == 0 else 1, *read_wide)
        direction = -1.0 if inverse else 1.0
        pieces = batch * seq * -(-num_heads // _HEADS) * column_groups(cols)
        sizes = batch * seq, half, num_heads, seq, width, position_offset, direction
        return PieceCall(kernel, pieces, (x, cos, sin), sizes)

    def kernels(self) -> Iterable[Kernel]:
        return (kernel for family in KERNELS.values() for kernel in family.both())


ROPE = register(RopeOp())


def rope_(
    engine: ComputeEngine,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    position_offset: int = 0,
    interleaved: bool = False,
    inverse: bool = False,
) -> None:
    """Rotate pairs of columns of x [batch, seq, width] in place, in its first num_heads * head_dim columns.

    cos, sin [max_seq, head_dim / 2]: of position times frequency; row `i` of x takes row position_offset + i. Pairs are
    columns (i, i + head_dim / 2) of a head, or (2i, 2i + 1) when interleaved. inverse rotates back, which is the
    backward: the rotation is orthogonal. Su et al. 2021, "RoFormer", equation 34.

    Raises ValueError for an odd head_dim, shapes that do not fit, or positions beyond the tables.
    """
    engine.execute(
        ROPE,
        (x, cos, sin),
        num_heads=num_heads,
        head_dim=head_dim,
        position_offset=position_offset,
        interleaved=interleaved,
        inverse=inverse,
    )
