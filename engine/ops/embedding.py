"""Embedding: rows of a table by token id, and the gradient of the table, deterministic and without atomics.

The gradient chains the positions of each id in one pass over the tokens; the first position of an id then adds all its
rows in order. The cost depends on tokens and columns, not on the vocabulary (but for zeroing when not accumulating).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import Op, register
from ..tensor import Tensor, TensorSpec
from .piece_kernels import PieceCall, PieceOp, rows_by_pieces
from .row_kernels import (
    ROW_SUBGROUPS,
    RowKernels,
    check_dtype_of,
    check_spec,
    column_groups,
    flat_groups,
    row_groups,
    rows_and_columns,
)

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

MAX_BACKWARD_TOKENS = 2**17  # lavapipe 22.3 ends an invocation's loops after 65,535 rounds; at least 4 tokens a round

LOOK_UP = rows_by_pieces(
    "embedding",
    "embedding.comp",
    "in row table[vocabulary * cols], in i32 tokens[num_tokens], out row y[num_tokens * cols], uint num_tokens, "
    "uint cols, uint vocabulary",
    lambda pieces: (3 * (pieces // 3 + 1), {"num_tokens": pieces // 3 + 1, "cols": 12, "vocabulary": 5}),
)
LINKS = Kernel(
    "embedding_links",
    "embedding_links.comp",
    "in i32 tokens, inout u32 links, uint num_tokens, uint vocabulary",
    subgroups=ROW_SUBGROUPS,
)
BACKWARD = RowKernels(
    "embedding_backward",
    "embedding_backward.comp",
    "in row dy, in i32 tokens, in u32 links, inout row out_rows, uint num_tokens, uint cols, uint vocabulary, "
    "uint accumulate",
)


def _table_shape(op: str, name: str, table: TensorSpec) -> tuple[int, int]:
    rows, cols = rows_and_columns(op, name, table)
    if len(table.shape) != 2 or rows == 0:
        raise ValueError(f"{op}: {name} has shape {table.shape}, needed is [vocabulary, columns]")
    return rows, cols


class EmbeddingOp(PieceOp):
    """Rows of a table."""

    name = "embedding"

    def outputs(self, table: TensorSpec, tokens: TensorSpec) -> Sequence[TensorSpec]:
        _, cols = _table_shape(self.name, "table", table)
        check_dtype_of(self.name, "tokens", tokens, "int32")
        return (TensorSpec((*tokens.shape, cols)),)

    def flops(self, table: TensorSpec, tokens: TensorSpec) -> int:
        return 0

    def reference(self, table: Any, tokens: Any) -> Sequence[Any]:
        return (table[np.clip(tokens, 0, len(table) - 1)],)

    def piece_call(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **_: Any) -> PieceCall:
        (table, tokens), (y,) = inputs, outputs
        vocabulary, cols = table.shape
        pieces = tokens.size * column_groups(cols)
        return PieceCall(LOOK_UP.pick(cols, table, y), pieces, (table, tokens, y), (tokens.size, cols, vocabulary))

    def kernels(self) -> Iterable[Kernel]:
        return LOOK_UP.both()


class EmbeddingBackwardOp(Op):
    """Gradient of the table, written or added to a given tensor."""

    name = "embedding_backward"
    writes = (2,)

    def outputs(self, dy: TensorSpec, tokens: TensorSpec, out: TensorSpec, *, accumulate: bool) -> Sequence[TensorSpec]:
        _, cols = _table_shape(self.name, "out", out)
        check_dtype_of(self.name, "tokens", tokens, "int32")
        check_spec(self.name, "dy", dy, (*tokens.shape, cols))
        if tokens.size > MAX_BACKWARD_TOKENS:
            raise ValueError(
                f"embedding_backward: {tokens.size} tokens in one call, at most {MAX_BACKWARD_TOKENS}: "
                "use smaller micro-batches"
            )
        return ()

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        assert specs[1] is not None
        return (TensorSpec((specs[1].size, 2), "uint32"),)  # next position, not-the-first flag

    def flops(self, dy: TensorSpec, tokens: TensorSpec, out: TensorSpec, *, accumulate: bool) -> int:
        return dy.size

    def reference(self, dy: Any, tokens: Any, out: Any, *, accumulate: bool) -> Sequence[Any]:
        if not accumulate:
            out[...] = 0
        ids = np.clip(tokens, 0, len(out) - 1).reshape(-1)
        np.add.at(out, ids, dy.reshape(-1, out.shape[1]))
        return ()

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool) -> None:
        (dy, tokens, out), (links,) = inputs, outputs
        vocabulary, cols = out.shape
        count = tokens.size
        if not accumulate:
            gpu.fill_zero(out)
        if count == 0:
            return
        gpu.fill_zero(links)
        gpu.dispatch(LINKS, row_groups(gpu, LINKS, count), tokens, links, count, vocabulary)
        kernel = BACKWARD.pick(cols, dy, out)
        groups = flat_groups(count * column_groups(cols))
        gpu.dispatch(kernel, groups, dy, tokens, links, out, count, cols, vocabulary, int(accumulate))

    def kernels(self) -> Iterable[Kernel]:
        return (LINKS, *BACKWARD.both())


EMBEDDING = register(EmbeddingOp())
EMBEDDING_BACKWARD = register(EmbeddingBackwardOp())


def embedding(engine: ComputeEngine, table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of table [vocabulary, cols] by token id. tokens: int32 [...]; returns [..., cols].

    Ids outside 0..vocabulary-1 are clamped, never read out of range: check data before uploading it. Raises ValueError
    for shapes or types that do not fit.
    """
    return engine.execute(EMBEDDING, (table, tokens))[0]


def embedding_backward(
    engine: ComputeEngine, dy: Tensor, tokens: Tensor, out: Tensor, *, accumulate: bool = False
) -> None:
    """Writes d_table [vocabulary, cols] of `embedding` into out, from dy [..., cols] and tokens [...]; rows of ids that
    do not occur become 0. accumulate adds to what out holds instead.

    The rows of an id are added in the order of their positions. Raises ValueError for shapes or types that do not fit,
    or more than 131,072 tokens.
    """
    engine.execute(EMBEDDING_BACKWARD, (dy, tokens, out), accumulate=accumulate)
