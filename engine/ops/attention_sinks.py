"""Gradient of attention's sinks: one score a head that takes part in the softmax and has no value behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..input_checks import require_tensors
from ..kernel import Kernel, read_shader
from ..op import register
from ..tensor import Tensor, TensorSpec
from .loop_kernels import LoopCall, LoopOp, by_loops, launch_loops
from .row_kernels import ROW_SUBGROUPS, check_spec

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

KERNEL = by_loops(
    lambda turns: Kernel(
        "attention_sink_terms",
        read_shader("exp.glsl") + read_shader("attention_sinks.comp"),
        "in f32 d_o[rows * head_dim], in f32 o[rows * head_dim], in f32 lse[rows], in f32 sinks[num_heads], "
        "out f32 terms[rows], uint rows, uint head_dim, uint num_heads, uint num_queries",
        subgroups=ROW_SUBGROUPS,
        family="loop",
    ),
    lambda pieces, width: (3 * pieces, {"rows": 3 * pieces, "head_dim": 70, "num_heads": 3, "num_queries": pieces}),
    turns=False,
)


class AttentionSinkTermsOp(LoopOp):
    """terms [b, s, H]: what each query row adds to its head's d_sink."""

    name = "attention_sink_terms"

    def outputs(self, d_o: TensorSpec, o: TensorSpec, lse: TensorSpec, sinks: TensorSpec) -> Sequence[TensorSpec]:
        if len(lse.shape) != 3:
            raise ValueError(f"{self.name}: lse has shape {lse.shape}, needed is [batch, heads, queries]")
        batch, heads, queries = lse.shape
        check_spec(self.name, "lse", lse, lse.shape)
        check_spec(self.name, "sinks", sinks, (heads,))
        if o.shape[:2] != (batch, queries) or o.size % max(1, lse.size):
            raise ValueError(f"{self.name}: o {o.shape} does not belong to lse {lse.shape}")
        check_spec(self.name, "o", o, o.shape)
        check_spec(self.name, "d_o", d_o, o.shape)
        return (TensorSpec((batch, queries, heads)),)

    def flops(self, d_o: TensorSpec, o: TensorSpec, lse: TensorSpec, sinks: TensorSpec) -> int:
        return 2 * o.size

    def reference(self, d_o: Any, o: Any, lse: Any, sinks: Any) -> Sequence[Any]:
        batch, heads, queries = lse.shape
        delta = (d_o * o).reshape(batch, queries, heads, -1).sum(axis=-1)
        rows = np.moveaxis(lse, 1, 2)
        return (-np.where(np.isneginf(rows), 0, np.exp(sinks - rows)) * delta,)

    def loop_calls(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[LoopCall]:
        _, o, lse, _ = inputs
        rows = lse.size
        _, heads, queries = lse.shape
        head_dim = o.size // max(1, rows)
        return (LoopCall(KERNEL, rows, head_dim, (*inputs, *outputs), (rows, head_dim, heads, queries)),)

    def launch(self, gpu: Recorder, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        (call,) = self.loop_calls(inputs, outputs)
        launch_loops(gpu, call)

    def kernels(self) -> Iterable[Kernel]:
        return (KERNEL,)


ATTENTION_SINK_TERMS = register(AttentionSinkTermsOp())


def attention_sinks_backward(
    engine: ComputeEngine,
    d_o: Tensor,
    o: Tensor,
    lse: Tensor,
    sinks: Tensor,
    out: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Writes the gradient of `attention`'s sinks [H] into out: -sum of exp(sink - lse) * rowsum(dO * O) over all rows.

    d_o, o: [b, s, H, D] or [b, s, H * D]; lse: [b, H, s] as `attention` gave it. accumulate adds to what out holds.
    Raises ValueError for shapes or types that do not fit.
    """
    require_tensors("attention_sinks_backward", out=out)
    (terms,) = engine.execute(ATTENTION_SINK_TERMS, (d_o, o, lse, sinks))
    engine.column_sum(terms, out, accumulate=accumulate)
