"""Attention over the one tensor a q/k/v projection gives: no copies to split it, none to join its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..attention_folds import attention_d_kv, attention_d_q, attention_forward
from ..block_fold_call import BlockCall
from ..expr import Expr
from ..kernel import Kernel
from ..op import register
from ..setting_checks import is_whole
from ..tensor import Tensor, TensorSpec
from . import attention_launch as launcher
from . import attention_rule as rule
from .attention_launch import Part
from .attention_rule import AttentionShape, Mask
from .block_fold_launch import BlockFoldCalls

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder


def _shape_of(qkv: Any, settings: Any) -> AttentionShape:
    """Sizes from a tensor, an array or a spec."""
    spec = qkv if isinstance(qkv, TensorSpec) else TensorSpec(qkv.shape)
    return rule.fused_shape(spec, settings["num_heads"], settings["num_kv_heads"])


def _parts(qkv: Tensor, shape: AttentionShape) -> tuple[Part, Part, Part]:
    start_k = shape.num_heads * shape.head_dim
    return Part(qkv), Part(qkv, start_k), Part(qkv, start_k + shape.num_kv_heads * shape.head_dim)


def _split(qkv: np.ndarray, shape: AttentionShape) -> list[np.ndarray]:
    heads = qkv.reshape(shape.batch, shape.num_queries, -1, shape.head_dim)
    return np.split(heads, [shape.num_heads, shape.num_heads + shape.num_kv_heads], axis=2)


_SETTING_TYPES = {**rule.SETTING_TYPES, "num_heads": "int", "num_kv_heads": "int"}


class AttentionQkvOp(BlockFoldCalls):
    """o, lse = attention_qkv(qkv, key_lengths, documents, sinks, head_values)."""

    name = "attention_qkv"
    setting_types = _SETTING_TYPES

    def outputs(self, qkv: TensorSpec, *optional: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        shape = _shape_of(qkv, settings)
        rule.check_mask(shape, Mask.of(optional, settings))
        return TensorSpec((shape.batch, shape.num_queries, shape.o_row)), shape.lse

    def flops(self, *specs: Any, **settings: Any) -> int:
        return rule.flops(_shape_of(specs[0], settings), settings["causal"], settings["window"], products=2)

    def reference(self, *arrays: Any, **settings: Any) -> Sequence[np.ndarray]:
        shape = _shape_of(arrays[0], settings)
        o, lse = rule.reference_forward(shape, Mask.of(arrays[1:], settings), *_split(arrays[0], shape))
        return o.reshape(shape.batch, shape.num_queries, shape.o_row), lse

    def launch(self, gpu: Recorder, inputs: Sequence[Any], outputs: Sequence[Tensor], **settings: Any) -> None:
        shape = _shape_of(inputs[0], settings)
        o, lse = outputs
        launcher.launch_forward(gpu, shape, Mask.of(inputs[1:], settings), _parts(inputs[0], shape), o, lse)

    def block_calls(self, inputs: Sequence[Any], settings: Mapping[str, Any]) -> list[BlockCall]:
        return launcher.forward_calls(_shape_of(inputs[0], settings), Mask.of(inputs[1:], settings))

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels(attention_forward)


class AttentionQkvBackwardOp(BlockFoldCalls):
    """d_qkv = attention_qkv_backward(d_o, qkv, o, lse, key_lengths, documents, sinks, head_values)."""

    name = "attention_qkv_backward"
    setting_types = _SETTING_TYPES

    def outputs(
        self,
        d_o: TensorSpec,
        qkv: TensorSpec,
        o: TensorSpec,
        lse: TensorSpec,
        *optional: TensorSpec | None,
        **settings: Any,
    ) -> Sequence[TensorSpec]:
        shape = _shape_of(qkv, settings)
        rule.check_mask(shape, Mask.of(optional, settings))
        rule.check_backward(shape, d_o, o, lse)
        return (qkv,)

    def scratch(self, *specs: TensorSpec | None, **settings: Any) -> Sequence[TensorSpec]:
        lse = specs[3]
        assert lse is not None
        return (lse,)  # rowsum(dO * O)

    def flops(self, *specs: Any, **settings: Any) -> int:
        return rule.flops(_shape_of(specs[1], settings), settings["causal"], settings["window"], products=7)

    def reference(self, *arrays: Any, **settings: Any) -> Sequence[np.ndarray]:
        d_o, qkv, o, lse = arrays[:4]
        shape = _shape_of(qkv, settings)
        q, k, v = _split(qkv, shape)
        d_o, o = d_o.reshape(q.shape), o.reshape(q.shape)
        parts = rule.reference_backward(shape, Mask.of(arrays[4:], settings), d_o, q, k, v, o, lse)
        return (np.concatenate(parts, axis=2).reshape(qkv.shape),)

    def launch(self, gpu: Recorder, inputs: Sequence[Any], outputs: Sequence[Tensor], **settings: Any) -> None:
        d_o, qkv, o, lse = inputs[:4]
        d_qkv, delta = outputs
        shape = _shape_of(qkv, settings)
        mask = Mask.of(inputs[4:], settings)
        launcher.launch_backward(gpu, shape, mask, d_o, _parts(qkv, shape), o, lse, _parts(d_qkv, shape), delta)

    def block_calls(self, inputs: Sequence[Any], settings: Mapping[str, Any]) -> list[BlockCall]:
        return launcher.backward_calls(_shape_of(inputs[1], settings), Mask.of(inputs[4:], settings))

    def kernels(self) -> Iterable[Kernel]:
        return launcher.all_kernels(attention_d_q, attention_d_kv)


ATTENTION_QKV = register(AttentionQkvOp())
ATTENTION_QKV_BACKWARD = register(AttentionQkvBackwardOp())


def attention_qkv(
    engine: ComputeEngine,
    qkv: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window: int = 0,
    key_lengths: Tensor | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    score: Expr | None = None,
    head_values: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` on one tensor: each position holds num_heads query heads, then num_kv_heads of k, then of v.

    qkv: [b, s, (num_heads + 2 num_kv_heads) * D]. Masks, sinks, score and scale as for `attention`.
    Returns o [b, s, num_heads * D] and lse [b, num_heads, s]. Raises ValueError for shapes or types that do not fit.
    """
    settings = rule.settings_of(_head_dim(qkv, num_heads, num_kv_heads), causal, window, scale, score)
    inputs = (qkv, key_lengths, documents, sinks, head_values)
    o, lse = engine.execute(ATTENTION_QKV, inputs, num_heads=num_heads, num_kv_heads=num_kv_heads, **settings)
    return o, lse


def attention_qkv_backward(
    engine: ComputeEngine,
    d_o: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    causal: bool = True,
    window: int = 0,
    key_lengths: Tensor | None = None,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    score: Expr | None = None,
    head_values: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Gradient of `attention_qkv` for qkv, in its shape. d_o: [b, s, num_heads * D]; o, lse: what forward gave.

    Raises ValueError for shapes or types that do not fit.
    """
    settings = rule.settings_of(_head_dim(qkv, num_heads, num_kv_heads), causal, window, scale, score)
    inputs = (d_o, qkv, o, lse, key_lengths, documents, sinks, head_values)
    (d_qkv,) = engine.execute(
        ATTENTION_QKV_BACKWARD, inputs, num_heads=num_heads, num_kv_heads=num_kv_heads, **settings
    )
    return d_qkv


def _head_dim(qkv: Tensor, num_heads: int, num_kv_heads: int) -> int:
    if not (is_whole(num_heads) and is_whole(num_kv_heads)):
        return 0  # refused by their type
    return rule.last_size(qkv) // max(num_heads + 2 * num_kv_heads, 1)
