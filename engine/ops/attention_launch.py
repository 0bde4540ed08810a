"""How attention's block folds are launched, for separate tensors and for one that holds q, k and v."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..attention_folds import attention_d_kv, attention_d_q, attention_forward
from ..attention_scores import alibi
from ..block_fold import BlockFold
from ..block_fold_call import BlockCall, BlockSizes
from ..block_fold_glsl import block_fold_glsl, strides_of
from ..expr import Expr
from ..kernel import Kernel
from ..tensor import Tensor
from .attention_rule import AttentionShape, Mask
from .block_fold_dispatch import Pointer
from .block_fold_launch import known_kernels, launch_block_fold

if TYPE_CHECKING:
    from ..recorder import Recorder


class Part(NamedTuple):
    """A pointer into a tensor: where q, k or v begins, in elements."""

    tensor: Tensor
    start: int = 0

    @property
    def pointer(self) -> Pointer:
        """The (tensor, byte offset) pair a dispatch takes."""
        return self.tensor, 4 * self.start


def all_kernels(*folds: Callable[[Expr | None], BlockFold]) -> Iterator[Kernel]:
    """Everything the launches of these folds ask for at the known head sizes, with plain scores and with ALiBi."""
    for fold in folds:
        for continues in (False, True)[: 1 + (fold is attention_d_kv)]:
            for score in (None, alibi()):
                yield from known_kernels(fold(score), _name_of(fold(score), score), continues=continues)


@lru_cache(maxsize=256)
def _name_of(fold: BlockFold, score: Expr | None) -> str:
    """What a score adds to a kernel's name."""
    if score is None or score is alibi():
        return "" if score is None else "_alibi"
    return f"_{hashlib.sha256(block_fold_glsl(fold).encode()).hexdigest()[:8]}"


@lru_cache(maxsize=256)
def _call(
    fold: BlockFold,
    shape: AttentionShape,
    score: Expr | None,
    given: tuple[str, ...],
    causal: bool,
    window: int,
) -> BlockCall:
    """A fold at these sizes, with this mask."""
    sizes = BlockSizes(
        shape.batch, shape.num_queries, shape.num_keys, shape.num_heads, shape.num_kv_heads, shape.head_dim
    )
    if fold.shared == "held":
        sizes = sizes._replace(
            num_held=sizes.num_streamed,
            num_streamed=sizes.num_held,
            held_heads=sizes.streamed_heads,
            streamed_heads=sizes.held_heads,
        )
    by_name = {"q_row": shape.q_row, "kv_row": shape.kv_row, "o_row": shape.o_row}
    strides = tuple(by_name[name] for name in strides_of(fold))
    there = tuple(name for name in fold.optional_inputs if name in given)
    return BlockCall(fold, sizes, strides, there, causal, window, _name_of(fold, score))


def _calls(folds: Sequence[Callable[[Expr | None], BlockFold]], shape: AttentionShape, mask: Mask) -> list[BlockCall]:
    optional = (("sinks", mask.sinks), ("key_lengths", mask.lengths), ("documents", mask.documents))
    given = tuple(name for name, tensor in optional if tensor is not None)
    return [_call(fold(mask.score), shape, mask.score, given, mask.causal, mask.window) for fold in folds]


def forward_calls(shape: AttentionShape, mask: Mask) -> list[BlockCall]:
    """What `launch_forward` records."""
    return _calls((attention_forward,), shape, mask)


def backward_calls(shape: AttentionShape, mask: Mask) -> list[BlockCall]:
    """What `launch_backward` records."""
    return _calls((attention_d_q, attention_d_kv), shape, mask)


def _launch(gpu: Recorder, call: BlockCall, mask: Mask, inputs: Sequence[Pointer], outputs: Sequence[Pointer]) -> None:
    """Record one fold. inputs: its rows and its numbers but sinks and head values."""
    optional = {"sinks": mask.sinks, "head": mask.head_values}
    more = [optional[name] for name in call.fold.numbers if name in optional]
    launch_block_fold(gpu, call, [*inputs, *more, mask.lengths, mask.documents, *outputs], (mask.scale,))


def launch_forward(
    gpu: Recorder, shape: AttentionShape, mask: Mask, parts: Sequence[Part], o: Tensor, lse: Tensor
) -> None:
    """Record attention forward over the q, k and v of `parts`: one dispatch."""
    (call,) = forward_calls(shape, mask)
    _launch(gpu, call, mask, [part.pointer for part in parts], [o, lse])


def launch_backward(
    gpu: Recorder,
    shape: AttentionShape,
    mask: Mask,
    d_o: Tensor,
    parts: Sequence[Part],
    o: Tensor,
    lse: Tensor,
    gradients: Sequence[Part],
    delta: Tensor,
) -> None:
    """Record attention backward into the d_q, d_k and d_v of `gradients`: dQ with delta = rowsum(dO * O), then dK and
    dV, all query heads of a group at once, unless their loops would be longer than a driver runs.
    """
    q, k, v = (part.pointer for part in parts)
    d_q, d_k, d_v = (part.pointer for part in gradients)
    of_queries, of_keys = backward_calls(shape, mask)
    _launch(gpu, of_queries, mask, [q, d_o, o, k, v, lse], [d_q, delta])
    _launch(gpu, of_keys, mask, [k, v, q, d_o, lse, delta], [d_k, d_v])
