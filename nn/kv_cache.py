"""Generation that computes each token once: keys and values of earlier tokens are kept."""

from __future__ import annotations

import numpy as np

from ..engine.errors import BadInputError
from ..engine.tensor import Tensor
from .attention import Attention
from .gpt_model import GPTModel


class KVCache:
    """Keys and values [max_seq_len, num_kv_heads, head_dim] of every block, for one sequence.

    `cache.next_logits(tokens)` can stand wherever a function from tokens [1, n] to the logits of the next token is
    asked for: tokens that continue those of the last call cost one pass over the new ones only, anything else starts
    anew. The model's weights must not change in between (call `reset` when they do). Takes
    2 * num_layers * num_kv_heads * head_dim * 4 bytes a token.
    """

    def __init__(self, model: GPTModel) -> None:
        config, engine = model.config, model.engine
        self.model = model
        self.tokens: list[int] = []
        shape = (config.max_seq_len, config.num_kv_heads, config.head_dim)
        with engine.parameter_pool():
            self.entries = [(engine.empty(shape), engine.empty(shape)) for _ in model.blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.entries)

    def reset(self) -> None:
        """Forget the sequence."""
        self.tokens = []

    def next_logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [vocab] of the token that follows tokens [1, n]. Raises BadInputError for more than one sequence."""
        if tokens.shape[0] != 1:
            raise BadInputError(f"a KV cache holds one sequence, got tokens of shape {tokens.shape}")
        wanted = [int(token) for token in tokens[0]]
        known = len(self.tokens)
        if known >= len(wanted) or wanted[:known] != self.tokens:
            known = 0
        self.tokens = []  # nothing is trusted until the pass below is recorded
        logits = self._advance(self.model.checked_tokens(tokens[:, known:]), known)
        self.tokens = wanted
        values = logits.numpy()[0]
        self.model.engine.end_batch()
        return values

    def _advance(self, tokens: Tensor, start: int) -> Tensor:
        """Logits [1, vocab] after `tokens` [1, n], whose first stands at position `start`."""
        model, engine = self.model, self.model.engine
        count = tokens.shape[1]
        if start + count > model.config.max_seq_len:
            raise BadInputError(f"{start + count} tokens in a row, the model takes {model.config.max_seq_len}")
        x = engine.embedding(model.embedding.weight.data, tokens)
        if model.config.positions == "learned":
            ids = np.arange(start, start + count, dtype=np.int32).reshape(1, -1)
            x = engine.add(x, engine.embedding(model.positions.weight.data, engine.tensor(ids)))
        for block, (keys, values) in zip(model.blocks, self.entries, strict=True):
            normed, _ = block.norm1.normalize(x)
            qkv = block.attention.project(normed, start)
            q = self._append(block.attention, qkv, keys, values, start)
            end = start + count
            o, _ = engine.attention(
                q,
                keys.rows(0, end).reshape(1, end, *keys.shape[1:]),
                values.rows(0, end).reshape(1, end, *values.shape[1:]),
                **block.attention.options() | {"documents": None},  # a cache holds one document
            )
            mid = block.attention.out.apply(o.reshape(1, count, -1), x)
            branch, _ = block.norm2.normalize(mid)
            x = block.feed_forward.apply(branch, mid)
        last = x.reshape(count, -1).rows(count - 1, count)
        return engine.matmul(model.final_norm.normalize(last)[0], model.head.data, trans_b=True)

    def _append(self, attention: Attention, qkv: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """Copy the new keys and values behind the old ones; returns q [1, n, num_heads, head_dim]."""
        engine = self.model.engine
        heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        count, per_row = qkv.shape[1], heads + 2 * kv_heads
        table = qkv.reshape(count * per_row, head_dim)

        def part(first: int, num: int) -> Tensor:
            if count == 1:
                return table.rows(first, first + num)
            ids = np.arange(count)[:, None] * per_row + first + np.arange(num)
            return engine.embedding(table, engine.tensor(ids.astype(np.int32)))  # a gather of head rows

        offset = start * kv_heads * head_dim
        engine.copy_into(keys, part(heads, kv_heads), offset=offset)
        engine.copy_into(values, part(heads + kv_heads, kv_heads), offset=offset)
        return part(0, heads).reshape(1, count, heads, head_dim)
