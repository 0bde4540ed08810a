"""Any block fold as one op: compiled when first seen, then kept in memory and on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..attention_masks import KEYS_OF_QUERIES, QUERIES_OF_KEYS, seen_pairs
from ..block_fold import BlockFold
from ..block_fold_call import BlockCall, BlockSizes
from ..block_fold_glsl import strides_of
from ..expr_walk import topological
from ..input_checks import described
from ..op import register
from ..setting_checks import check_setting
from ..tensor import Tensor, TensorSpec
from .block_fold_dispatch import MAX_ROUNDS
from .block_fold_launch import MAX_HEAD_DIM, MAX_HEADS, MAX_POSITIONS, BlockFoldCalls, launch_block_fold
from .row_kernels import check_spec

if TYPE_CHECKING:
    from ..compute_engine import ComputeEngine
    from ..recorder import Recorder

_OWN = {"causal": "bool", "window": "int"}  # what the verb takes besides a fold's inputs


def _sizes(spec: BlockFold, given: dict[str, Any]) -> BlockSizes:
    """Sizes from tensors, arrays or specs by name."""
    batch, num_held, held_heads, head_dim = given[spec.held[0]].shape
    _, num_streamed, streamed_heads, _ = given[spec.streamed[0]].shape
    return BlockSizes(batch, num_held, num_streamed, held_heads, streamed_heads, head_dim)


def _queries_and_keys(spec: BlockFold, sizes: BlockSizes) -> tuple[int, int]:
    both = sizes.num_held, sizes.num_streamed
    return both[::-1] if spec.seen is QUERIES_OF_KEYS else both


def _few_and_many(spec: BlockFold, sizes: BlockSizes) -> tuple[int, int]:
    """Heads of the side that is shared, and of the other."""
    both = sizes.streamed_heads, sizes.held_heads
    return both if spec.shared == "streamed" else both[::-1]


def _strides(spec: BlockFold, sizes: BlockSizes) -> dict[str, int]:
    """Elements from one row to the next, by the stride's name. Raises ValueError where one name is two numbers."""
    strides: dict[str, int] = {}
    for name in (*spec.held, *spec.streamed, *spec.rows):
        heads = sizes.streamed_heads if name in spec.streamed else sizes.held_heads
        if strides.setdefault(spec.stride_of(name), heads * sizes.head_dim) != heads * sizes.head_dim:
            raise ValueError(
                f"block fold {spec.name!r}: rows of both sides share the stride {spec.stride_of(name)}, which needs "
                "as many heads on both"
            )
    return strides


def _check_rows(spec: BlockFold, given: dict[str, TensorSpec]) -> None:
    """Raises ValueError where the rows of a side are not one shape of float32, or those of both differ in batch or
    head_dim.
    """
    what = f"block fold {spec.name!r}"
    first, batch, head_dim = spec.held[0], 0, 0
    for side in (spec.held, spec.streamed):
        for name in side:
            shape = given[name].shape
            if len(shape) != 4:
                raise ValueError(f"{what}: {name} has shape {shape}, not [batch, rows, heads, head_dim]")
            check_spec(what, name, given[name], given[side[0]].shape)
            if name == first:
                batch, head_dim = shape[0], shape[3]
            elif (shape[0], shape[3]) != (batch, head_dim):
                raise ValueError(f"{what}: {first} {given[first].shape} and {name} {shape} differ in batch or head_dim")


def _check_sizes(spec: BlockFold, sizes: BlockSizes) -> None:
    """Raises ValueError for heads that do not go into each other and for more than a kernel can do."""
    what = f"block fold {spec.name!r}"
    few, many = _few_and_many(spec, sizes)
    if few < 1 or many % few or many > MAX_HEADS:
        raise ValueError(
            f"{what}: {sizes.held_heads} heads of held rows and {sizes.streamed_heads} of streamed ones; those of the "
            f"{spec.shared} side must divide the others, at most {MAX_HEADS}"
        )
    if not 1 <= sizes.head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{what}: head_dim {sizes.head_dim} is not within 1..{MAX_HEAD_DIM}")
    if max(sizes.num_held, sizes.num_streamed) > MAX_POSITIONS:
        raise ValueError(
            f"{what}: {sizes.num_held} and {sizes.num_streamed} rows; at most {MAX_POSITIONS} are possible"
        )
    rounds = many // few * (sizes.num_streamed // 2 + 2) if spec.shared == "held" else 0
    if rounds > MAX_ROUNDS and not spec.can_continue:
        raise ValueError(
            f"{what}: {many // few} streamed heads of {sizes.num_streamed} rows are too many for one held row: at most "
            f"{2 * MAX_ROUNDS} rows; fold fewer heads at a time, or have plain sums as outputs"
        )


def _check_numbers(spec: BlockFold, given: dict[str, TensorSpec], sizes: BlockSizes) -> None:
    """Raises ValueError where numbers or what the mask reads have another shape or type."""
    what = f"block fold {spec.name!r}"
    shapes: dict[str, tuple[int, ...]] = {
        "held": (sizes.batch, sizes.held_heads, sizes.num_held),
        "streamed": (sizes.batch, sizes.streamed_heads, sizes.num_streamed),
        "head": _few_and_many(spec, sizes)[1:],
    }
    for name, kind in spec.numbers.items():
        if name in given:
            check_spec(what, name, given[name], shapes[kind])
    masks: dict[str, tuple[int, ...]] = {
        "key_lengths": (sizes.batch,),
        "documents": (sizes.batch, _queries_and_keys(spec, sizes)[1], 2),
    }
    for name, shape in masks.items():
        if spec.seen is not None and name in given:
            check_spec(what, name, given[name], shape, "int32")


class BlockFoldOp(BlockFoldCalls):
    """Outputs of a block fold: rows, then values."""

    name = "block_fold"
    setting_types = _OWN

    def outputs(self, *specs: TensorSpec | None, spec: BlockFold, **settings: Any) -> Sequence[TensorSpec]:
        given = {name: s for name, s in zip(spec.tensor_inputs, specs, strict=True) if s is not None}
        _check_rows(spec, given)
        sizes = _sizes(spec, given)
        _check_sizes(spec, sizes)
        _check_numbers(spec, given, sizes)
        if settings["window"] < 0:
            raise ValueError(f"block fold {spec.name!r}: window {settings['window']} is negative; 0 means no window")
        _strides(spec, sizes)
        batch, num_held, _, held_heads, _, _ = sizes
        values = TensorSpec((batch, held_heads, num_held))
        return (*(given[spec.held[0]] for _ in spec.rows), *(values for _ in spec.values))

    def flops(self, *specs: Any, spec: BlockFold, **_: Any) -> int:
        sizes = _sizes(spec, dict(zip(spec.tensor_inputs, specs, strict=True)))
        roots = [row_sum.weight for row_sum in spec.sums] + [state.contribution for state in spec.walk.states]
        each = 2 * sizes.head_dim * (len(spec.products) + len(spec.sums))
        each += sum(bool(node.args) for node in topological(roots))
        return each * sizes.batch * max(sizes.held_heads, sizes.streamed_heads) * sizes.num_held * sizes.num_streamed

    def reference(
        self, *arrays: Any, spec: BlockFold, scalars: tuple[float, ...], causal: bool, window: int
    ) -> Sequence[Any]:
        given = dict(zip(spec.tensor_inputs, arrays, strict=True))
        seen = None
        if spec.seen is not None:
            sizes = _sizes(spec, given)
            lengths, documents = given.pop("key_lengths"), given.pop("documents")
            seen = seen_pairs(
                sizes.batch,
                *_queries_and_keys(spec, sizes),
                causal=causal,
                window=window,
                lengths=lengths,
                documents=documents,
            )
            seen = seen.swapaxes(1, 2) if spec.seen is QUERIES_OF_KEYS else seen
        return spec.reference(seen, **given, **dict(zip(spec.scalars, scalars, strict=True)))

    def launch(
        self,
        gpu: Recorder,
        inputs: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        spec: BlockFold,
        scalars: tuple[float, ...],
        causal: bool,
        window: int,
    ) -> None:
        settings = {"spec": spec, "causal": causal, "window": window}
        (call,) = self.block_calls(inputs, settings)
        launch_block_fold(gpu, call, [*inputs, *outputs], scalars)

    def block_calls(self, inputs: Sequence[Any], settings: Mapping[str, Any]) -> list[BlockCall]:
        spec, causal, window = (settings[name] for name in ("spec", "causal", "window"))
        given = dict(zip(spec.tensor_inputs, inputs, strict=True))
        sizes = _sizes(spec, given)
        strides = _strides(spec, sizes)
        there = tuple(name for name in spec.optional_inputs if given[name] is not None)
        in_order = tuple(strides[name] for name in strides_of(spec))
        return [BlockCall(spec, sizes, in_order, there, causal, window)]


BLOCK_FOLD = register(BlockFoldOp())


def block_fold(
    engine: ComputeEngine,
    spec: BlockFold,
    /,
    *,
    causal: bool = False,
    window: int = 0,
    **inputs: Tensor | float | None,
) -> dict[str, Tensor]:
    """A fold over blocks of your own (engine/block_fold.py) in one dispatch; the kernel is compiled at first use, kept.

    inputs: a tensor for each row [batch, rows, heads, head_dim up to 256] and number of the spec, a float for each
    scalar. Of a spec with the mask KEYS_OF_QUERIES or QUERIES_OF_KEYS (engine/attention_masks.py): causal, window,
    key_lengths and documents, as for `attention`; nothing that is not seen is visited. Returns the outputs by name.
    Keep the spec: another one, however equal, is printed again. Raises ValueError for names, shapes or types that do
    not fit.
    """
    if not isinstance(spec, BlockFold):
        raise TypeError(
            f"block_fold: {described(spec)} is no BlockFold: describe it with vkfold.engine.block_fold.BlockFold(...)"
        )
    what = f"block fold {spec.name!r}"
    if spec.seen not in (None, KEYS_OF_QUERIES, QUERIES_OF_KEYS):
        raise ValueError(
            f"{what}: seen must be KEYS_OF_QUERIES or QUERIES_OF_KEYS of engine/attention_masks.py, or None"
        )
    if spec.seen is None and (causal or window):
        raise ValueError(f"{what} has no mask: give the spec seen=KEYS_OF_QUERIES to call it with causal or window")
    optional = set(spec.optional_inputs)
    wanted = [*spec.tensor_inputs, *spec.scalars]
    taken = [name for name in wanted if name in _OWN]
    if taken:
        raise ValueError(f"{what}: {', '.join(taken)} cannot name an input of a fold that is called this way")
    missing, unknown = sorted(set(wanted) - set(inputs) - optional), sorted(set(inputs) - set(wanted))
    if missing or unknown:
        wrong = f"no value for {', '.join(missing)}" if missing else f"nothing is called {', '.join(unknown)}"
        raise ValueError(f"{what}: {wrong}; it takes {', '.join(wanted)}")
    tensors: list[Any] = [inputs.get(name) for name in spec.tensor_inputs]
    for name, tensor in zip(spec.tensor_inputs, tensors, strict=True):
        if not isinstance(tensor, Tensor) and not (tensor is None and name in optional):
            raise ValueError(f"{what}: {name} is {described(tensor)}, needed is a tensor")
    scalars: list[Any] = [inputs[name] for name in spec.scalars]
    for name, value in zip(spec.scalars, scalars, strict=True):
        check_setting(what, name, value, "float")
    settings = {"spec": spec, "scalars": tuple(scalars), "causal": causal, "window": window}
    return dict(zip((*spec.rows, *spec.values), engine.execute(BLOCK_FOLD, tuple(tensors), **settings), strict=True))
