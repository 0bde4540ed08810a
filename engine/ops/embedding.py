"""Embedding: rows of a table by token id, and the gradient of the table, deterministic and without atomics.

The gradient chains the positions of each id in one pass over the tokens; the first position of an id then adds all its
rows in order. The cost depends on tokens and columns, not on the vocabulary (but for zeroing when not accumulating).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernel import Kernel
from ..op import register
from ..tensor import Tensor, TensorSpec
from .loop_kernels import LoopCall, LoopOp, by_loops, launch_loops, rows_by_loops
from .piece_kernels import PieceCall, PieceOp, rows_by_pieces
from .row_kernels import ROW_SUBGROUPS, check_dtype_of, check_spec, column_groups, rows_and_columns

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_LOOKED_AT = 32  # tokens before a position, about, until its id is found
MAX_BACKWARD_TOKENS = 2**17  # lavapipe 22.3 ends an invocation's loops after 65,535 rounds; at least 4 tokens a round

LOOK_UP = rows_by_pieces(
    "embedding",
    "embedding.comp",
    "in row table[vocabulary * cols], in i32 tokens[num_tokens], out row y[num_tokens * cols], uint num_tokens, "
    "uint cols, uint vocabulary",
    lambda pieces: (3 * (pieces // 3 + 1), {"num_tokens": pieces // 3 + 1, "cols": 12, "vocabulary": 5}),
)
LINKS = by_loops(
    lambda turns: Kernel(
        "embedding_links",
        "embedding_links.comp",
        "in i32 tokens[num_tokens], inout u32 links[2 * num_tokens], uint num_tokens, uint vocabulary",
        subgroups=ROW_SUBGROUPS,
        family="loop",
    ),
    lambda pieces, width: (pieces, {"num_tokens": pieces, "vocabulary": 5}),
    turns=False,
)
BACKWARD = rows_by_loops(
    "embedding_backward",
    "embedding_backward.comp",
    "in row dy[num_tokens * cols], in i32 tokens[num_tokens], in u32 links[2 * num_tokens], "
    "inout row out_rows[vocabulary * cols], uint num_tokens, uint cols, uint vocabulary, uint accumulate",
    lambda pieces, width: _backward_case(pieces // 3 + 1, 8 + width),
    turns=False,
)


def _backward_case(vocabulary: int, cols: int) -> tuple[int, dict[str, int]]:
    """Every id twice."""
    scalars = {"num_tokens": 2 * vocabulary, "cols": cols, "vocabulary": vocabulary, "accumulate": 0}
    return 2 * vocabulary * column_groups(cols), scalars


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


class EmbeddingBackwardOp(LoopOp):
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

    def loop_calls(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool
    ) -> Sequence[LoopCall]:
        (dy, tokens, out), (links,) = inputs, outputs
        (vocabulary, cols), count = out.shape, tokens.size
        scalars = (count, cols, vocabulary, int(accumulate))
        sums = LoopCall(BACKWARD.pick(cols, dy, out), count * column_groups(cols), 1, (dy, tokens, links, out), scalars)
        return LoopCall(LINKS, count, _LOOKED_AT, (tokens, links), (count, vocabulary)), sums

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, accumulate: bool) -> None:
        if not accumulate:
            gpu.fill_zero(inputs[2])
        if not inputs[1].size:
            return
        gpu.fill_zero(outputs[0])
        for call in self.loop_calls(inputs, outputs, accumulate=accumulate):
            launch_loops(gpu, call)

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
