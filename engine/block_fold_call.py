"""One call of a block fold but for tensors and scalars: what its dispatches, its variant and its name rest on."""

from __future__ import annotations

from typing import NamedTuple

from .attention_masks import QUERIES_OF_KEYS, mask_flags, visible_range
from .block_fold import BlockFold
from .block_fold_glsl import OPTIONAL_SHIFT, strides_of


class BlockSizes(NamedTuple):
    """Sizes of one call of a block fold."""

    batch: int
    num_held: int
    num_streamed: int
    held_heads: int
    streamed_heads: int
    head_dim: int


class BlockCall(NamedTuple):
    """A fold, its sizes and settings.

    strides: elements from one row to the next, in the order of `strides_of`. given: inputs that are there, of those
    that may be left out. suffix: what is added to the kernel's name.
    """

    fold: BlockFold
    sizes: BlockSizes
    strides: tuple[int, ...]
    given: tuple[str, ...] = ()
    causal: bool = False
    window: int = 0
    suffix: str = ""

    @property
    def queries_and_keys(self) -> tuple[int, int]:
        """Rows of the sides as a mask sees them."""
        both = self.sizes.num_held, self.sizes.num_streamed
        return both[::-1] if self.fold.seen is QUERIES_OF_KEYS else both

    @property
    def many_heads(self) -> int:
        """Heads of the side that has more of them."""
        return max(self.sizes.held_heads, self.sizes.streamed_heads)

    @property
    def group(self) -> int:
        """Streamed heads that are folded into one held row."""
        return self.sizes.streamed_heads // self.sizes.held_heads if self.fold.shared == "held" else 1

    @property
    def flags(self) -> int:
        """The mask's and what is given, as a kernel takes them."""
        flags = sum((name in self.given) << (OPTIONAL_SHIFT + i) for i, name in enumerate(self.fold.absent))
        if self.fold.seen is None:
            return flags
        lengths, documents = (name in self.given for name in ("key_lengths", "documents"))
        return flags | mask_flags(
            *self.queries_and_keys, causal=self.causal, window=self.window, lengths=lengths, documents=documents
        )

    @property
    def key(self) -> str:
        """How it is called in a table, for example "attention_forward 1x4(2)x512x64 causal": batch, heads, those of
        the shared side where there are fewer, rows, those of the other side where they differ, head_dim."""
        sizes = self.sizes
        few = min(sizes.held_heads, sizes.streamed_heads)
        heads = f"{self.many_heads}" if few == self.many_heads else f"{self.many_heads}({few})"
        queries, keys = self.queries_and_keys
        rows = f"{queries}" if queries == keys else f"{queries}:{keys}"
        words = [*["causal"] * self.causal, *[f"window{self.window}"] * bool(self.window), *self.given]
        shape = f"{sizes.batch}x{heads}x{rows}x{sizes.head_dim}"
        return " ".join([self.fold.name + self.suffix, shape, *words])

    @property
    def flops(self) -> int:
        """Operations of its products and sums, of the pairs that causal and window let be."""
        pairs = self.sizes.num_held * self.sizes.num_streamed
        if self.fold.seen is not None:
            low, high = visible_range(*self.queries_and_keys, self.causal, self.window)
            pairs = int((high - low).sum())
        each = 2 * self.sizes.head_dim * (len(self.fold.products) + len(self.fold.sums))
        return each * pairs * self.sizes.batch * self.many_heads

    def elements(self) -> dict[str, int]:
        """Elements of every operand by name: inputs in the order of `tensor_inputs`, rows, values."""
        fold, sizes = self.fold, self.sizes
        strides = dict(zip(strides_of(fold), self.strides, strict=True))
        numbers = {
            "held": sizes.batch * sizes.held_heads * sizes.num_held,
            "streamed": sizes.batch * sizes.streamed_heads * sizes.num_streamed,
            "head": self.many_heads,
        }
        masks = {"key_lengths": sizes.batch, "documents": 2 * sizes.batch * self.queries_and_keys[1]}
        rows = {
            name: sizes.batch * num * strides[fold.stride_of(name)]
            for names, num in (((*fold.held, *fold.rows), sizes.num_held), (fold.streamed, sizes.num_streamed))
            for name in names
        }
        found = {**masks, **rows, **{name: numbers[kind] for name, kind in fold.numbers.items()}}
        found |= dict.fromkeys(fold.values, numbers["held"])
        return {name: found[name] for name in (*fold.tensor_inputs, *fold.rows, *fold.values)}
