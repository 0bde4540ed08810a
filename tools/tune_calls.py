"""What `vkfold tune` measures: calls that have variants, of a training step or written as shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..engine.block_fold_call import BlockCall
from ..engine.block_fold_choice import BlockFoldChooser
from ..engine.block_fold_choice import select_for as select_tile
from ..engine.errors import BadInputError
from ..engine.fold_choice import RowFoldChooser
from ..engine.fusion import Call
from ..engine.fusion_map import Side
from ..engine.loop_choice import LoopChooser
from ..engine.map_choice import MapChooser
from ..engine.matmul_choice import MatmulChooser, select_for, tuning_key
from ..engine.ops.attention import attention_calls
from ..engine.ops.block_fold_launch import BlockFoldCalls
from ..engine.ops.block_fold_tuner import tune_block_fold
from ..engine.ops.loop_kernels import LoopCall, LoopOp, tune_loops, unmeasured_loops
from ..engine.ops.map_tuner import MapCall, tune_map, unmeasured_map
from ..engine.ops.matmul import MATMUL, layout_of
from ..engine.ops.matmul_launch import Layout
from ..engine.ops.matmul_tuner import tune_product
from ..engine.ops.piece_kernels import PieceCall, PieceOp, tune_pieces, unmeasured_pieces
from ..engine.ops.row_fold import RowFoldCalls
from ..engine.ops.row_fold_tuner import RowFoldCall, tune_row_fold, unmeasured_fold
from ..engine.recorder import Recorder
from ..engine.tensor import TensorSpec
from ..engine.tuner import Measured
from ..engine.variant_choice import VariantChooser
from .fused_plan import FusedPlan
from .model_setup import make_model, make_optimizer, make_training_step
from .run_config import RunConfig

_PRODUCT = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)x(\d+)(?::([NT][NT]))?")
_ATTENTION = re.compile(r"attention:(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)")


class TunedCall(Protocol):
    """One call, as it is measured."""

    @property
    def key(self) -> str:
        """Its name in a table."""

    @property
    def flops(self) -> float:
        """Floating-point operations."""

    def chooser(self, gpu: Recorder) -> VariantChooser[Any]:
        """Whose table holds it."""

    def unmeasured(self, gpu: Recorder) -> str:
        """Name of the variant that is taken where nothing was measured."""

    def tune(self, gpu: Recorder, rounds: int) -> Measured:
        """Measure it. Raises OutOfDeviceMemoryError where the operands do not fit."""


class ProductCall(NamedTuple):
    """A matrix product. letters: NN, NT, TN or TT."""

    layout: Layout
    letters: str

    @property
    def key(self) -> str:
        return tuning_key(self.layout.product, self.letters)

    @property
    def flops(self) -> float:
        return 2.0 * self.layout.product.work

    def chooser(self, gpu: Recorder) -> MatmulChooser:
        return MatmulChooser.of(gpu)

    def unmeasured(self, gpu: Recorder) -> str:
        chooser = self.chooser(gpu)
        return select_for(chooser.device, self.layout.product, self.key, chooser.table, tuned=False).choice.name

    def tune(self, gpu: Recorder, rounds: int) -> Measured:
        return tune_product(gpu, self.layout, self.letters, rounds=rounds)


class FoldCall(NamedTuple):
    """A fold over blocks: attention forward, or one of the two of its backward."""

    call: BlockCall

    @property
    def key(self) -> str:
        return self.call.key

    @property
    def flops(self) -> float:
        return float(self.call.flops)

    def chooser(self, gpu: Recorder) -> BlockFoldChooser:
        return BlockFoldChooser.of(gpu)

    def unmeasured(self, gpu: Recorder) -> str:
        chooser = self.chooser(gpu)
        return select_tile(chooser.device, self.call, chooser.table, tuned=False).choice.name

    def tune(self, gpu: Recorder, rounds: int) -> Measured:
        return tune_block_fold(gpu, self.call, rounds=rounds)


_FAMILIES: dict[type[Any], tuple[type[VariantChooser[Any]], Callable[..., str], Callable[..., Measured]]] = {
    MapCall: (MapChooser, unmeasured_map, tune_map),
    PieceCall: (MapChooser, unmeasured_pieces, tune_pieces),
    RowFoldCall: (RowFoldChooser, unmeasured_fold, tune_row_fold),
    LoopCall: (LoopChooser, unmeasured_loops, tune_loops),
}


class KernelCall(NamedTuple):
    """A kernel of elements (of one op or of several that are joined), of pieces, over rows, or that loops. work:
    operations."""

    call: MapCall | PieceCall | RowFoldCall | LoopCall
    work: int

    @property
    def key(self) -> str:
        return self.call.key

    @property
    def flops(self) -> float:
        return float(self.work)

    def chooser(self, gpu: Recorder) -> VariantChooser[Any]:
        return _FAMILIES[type(self.call)][0].of(gpu)

    def unmeasured(self, gpu: Recorder) -> str:
        return _FAMILIES[type(self.call)][1](gpu, self.call)

    def tune(self, gpu: Recorder, rounds: int) -> Measured:
        return _FAMILIES[type(self.call)][2](gpu, self.call, rounds=rounds)


class Calls:
    """Calls and how often each is there, by key: what has one key is measured once."""

    def __init__(self) -> None:
        self._calls: dict[str, TunedCall] = {}
        self.times: dict[str, int] = {}

    def add(self, call: TunedCall) -> None:
        """One more."""
        self._calls.setdefault(call.key, call)
        self.times[call.key] = self.times.get(call.key, 0) + 1

    def __len__(self) -> int:
        return len(self._calls)

    def items(self) -> list[tuple[TunedCall, int]]:
        """(call, times), in order of first use."""
        return [(call, self.times[key]) for key, call in self._calls.items()]


def _tuned_calls(call: Call) -> list[TunedCall]:
    """What of a call has variants."""
    if call.op is MATMUL:
        a, b = call.inputs[:2]
        assert a is not None and b is not None
        trans_a, trans_b = call.settings["trans_a"], call.settings["trans_b"]
        layout = layout_of(a.spec, b.spec, trans_a, trans_b)
        return [ProductCall(layout, f"{'NT'[trans_a]}{'NT'[trans_b]}")]
    if isinstance(call.op, BlockFoldCalls):
        return [FoldCall(fold) for fold in call.op.block_calls(call.inputs, call.settings)]
    if isinstance(call.op, PieceOp) and call.settings.get("source", "") != call.settings.get("dtype"):
        return [KernelCall(call.op.piece_call(call.inputs, call.outputs, **call.settings), call.cost.flops)]
    if isinstance(call.op, LoopOp):
        loops = call.op.loop_calls(call.inputs, call.made, **call.settings)
        return [KernelCall(of_loop, call.cost.flops // len(loops)) for of_loop in loops]
    if isinstance(call.op, RowFoldCalls):
        fold, inputs, scalars = call.op.fold_of_call(call.inputs, **call.settings)
        shape, aligned = fold.rows_of((*inputs, *call.outputs))
        return [KernelCall(RowFoldCall(fold, shape, aligned and shape[-1] % 4 == 0, scalars), call.cost.flops)]
    side = Side.of(call)
    if side is not None:
        sizes = tuple(tensor.nbytes for tensor in side.tensors.values())
        wide = side.wide and not any(tensor.address % 16 for tensor in side.tensors.values())
        of_map = MapCall(side.kernel, side.num_elements, wide, sizes, side.values)
        return [KernelCall(of_map, call.cost.flops)]
    return []


def calls_of_step(config: RunConfig, vocab_size: int) -> Calls:
    """Of one training step. Raises BadInputError for sizes that cannot be."""
    calls = Calls()

    def hear(call: Call) -> None:
        for tuned in _tuned_calls(call):
            calls.add(tuned)

    engine = FusedPlan(hear)
    tokens = np.zeros((config.batch_size, config.seq_len), np.int32)
    try:
        model = make_model(engine, config, vocab_size)
        step = make_training_step(model, make_optimizer(model, config), config)
        step([(tokens, tokens)] * config.accum_steps, step=0, learning_rate=config.lr)
    except ValueError as error:
        raise BadInputError(f"these sizes are too large: {error}") from error
    engine.flush_batch()
    return calls


def calls_of_text(text: str) -> Calls:
    """From "512x512x512, 8x64x64x32:NT, attention:1x4/2x512x64". Raises BadInputError for anything else."""
    calls = Calls()
    for part in filter(None, (part.strip() for part in text.split(","))):
        for call in _attention_of(part) if part.startswith("attention") else [_product_of(part)]:
            calls.add(call)
    if not len(calls):
        raise BadInputError("--shapes names no product and no attention")
    return calls


def _attention_of(text: str) -> list[TunedCall]:
    """Causal attention, forward and backward."""
    match = _ATTENTION.fullmatch(text)
    if match is None or not all(int(size) for size in match.groups() if size is not None):
        raise BadInputError(
            f"{text!r} is no attention: write attention:BATCHxHEADSxSEQxHEAD_DIM, or HEADS/KV_HEADS where they differ"
        )
    batch, heads, kv_heads, seq, head_dim = (int(size or match[2]) for size in match.groups())
    try:
        return [FoldCall(call) for call in attention_calls(batch, heads, seq, head_dim, kv_heads)]
    except ValueError as error:
        raise BadInputError(f"{text}: {error}") from error


def _product_of(text: str) -> ProductCall:
    match = _PRODUCT.fullmatch(text)
    if match is None or not all(int(size) for size in match.groups()[:4] if size is not None):
        raise BadInputError(
            f"{text!r} is no product: write MxNxK, BATCHxMxNxK, or either with :NN, :NT, :TN or :TT behind it"
        )
    batch, m, n, k = (int(size) if size else 0 for size in match.groups()[:4])
    letters = match[5] or "NN"
    lead = (batch,) if batch else ()
    trans_a, trans_b = letters[0] == "T", letters[1] == "T"
    a, b = ((k, m) if trans_a else (m, k)), ((n, k) if trans_b else (k, n))
    return ProductCall(layout_of(TensorSpec((*lead, *a)), TensorSpec((*lead, *b)), trans_a, trans_b), letters)
