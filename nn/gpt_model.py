"""A decoder-only transformer language model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ..engine import switches
from ..engine.attention_scores import SCORE, alibi, alibi_slopes, document_ranges, softcap
from ..engine.compute_engine import ComputeEngine
from ..engine.errors import BadInputError
from ..engine.tensor import Tensor
from .activation_offload import ActivationOffload
from .attention import Attention
from .embedding import Embedding
from .feed_forward import FeedForward
from .gpt_block import GPTBlock, make_norm
from .gpt_config import GPTConfig
from .layer import Layer
from .losses import IGNORE_INDEX, LinearCrossEntropy
from .parameter import Parameter
from .recompute_check import RecomputeCheck
from .rms_norm import Stats
from .rope import Rope

HEAD = "head"
MAX_LENGTHS = 16  # of sequences, whose position ids are kept from step to step


class GPTModel(Layer):
    """Embedding, `num_layers` pre-norm blocks, a final norm, and a head [vocab, d] (the embedding itself when tied).

    Two ways to train: `loss(tokens, targets)` then `backward()`, whose logits exist only chunk by chunk; or
    `forward(tokens)`, a loss of your own, and `backward(d_logits)`.

    Weights start from normal(0, 0.02), those of the two residual projections from 0.02 / sqrt(2 num_layers) (Radford
    et al. 2019), biases from 0 and norms from 1: a function of `seed` and of each parameter's name alone.
    loss_chunk_bytes: see LinearCrossEntropy.
    """

    recompute_supported = False

    def __init__(
        self, engine: ComputeEngine, config: GPTConfig, *, seed: int | None = 0, loss_chunk_bytes: int = 0
    ) -> None:
        super().__init__(engine)
        self.config = config
        self._rope: Rope | None = None
        if config.positions == "rope":
            self._rope = Rope(
                engine,
                config.head_dim,
                config.max_seq_len,
                base=config.rope_base,
                scaling=config.rope_scaling,
                interleaved=config.rope_interleaved,
            )
        self.embedding = Embedding(engine, config.vocab_size, config.d_model, seed=None)
        if config.positions == "learned":
            self.positions = Embedding(engine, config.max_seq_len, config.d_model, seed=None)
        self._slopes: Tensor | None = None
        if config.positions == "alibi":
            with engine.parameter_pool():
                self._slopes = engine.tensor(alibi_slopes(config.num_heads))
        self.blocks = [self._make_block(i) for i in range(config.num_layers)]
        self.final_norm = make_norm(engine, config.norm, config.d_model, config.norm_eps)
        self.head = self.embedding.weight
        if config.tie_head:
            self.head.num_uses = 2
        else:
            self.head = Parameter(engine, (config.vocab_size, config.d_model))
        self.head_loss = LinearCrossEntropy(engine, self.head, chunk_bytes=loss_chunk_bytes)
        self.checkpoint_every = 0
        self.flush_interval = 0
        self.activation_offload = False
        self._offloaded = ActivationOffload(engine)
        self._position_ids: tuple[Tensor, ...] = ()  # [batch, seq], one a length, of the lengths trained at
        self.set_recompute_check(None)  # tells every layer its path
        self.initialize(seed)

    def _make_block(self, index: int) -> GPTBlock:
        config, engine = self.config, self.engine
        residual_std = 0.02 / math.sqrt(2 * config.num_layers)
        assert config.bias is not None
        score = alibi() if config.positions == "alibi" else None
        if config.attention_softcap:
            score = softcap(config.attention_softcap, SCORE if score is None else score)
        attention = Attention(
            engine,
            config.d_model,
            config.num_heads,
            config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.bias,
            rope=self._rope,
            window=config.window,
            score=score,
            head_values=self._slopes,
            sinks=config.attention_sinks,
            out_std=residual_std,
            seed=None,
        )
        feed_forward = FeedForward(
            engine,
            config.d_model,
            config.d_ff,
            activation=config.activation,
            bias=config.bias,
            down_std=residual_std,
            seed=None,
        )
        return GPTBlock(
            engine,
            attention,
            feed_forward,
            make_norm(engine, config.norm, config.d_model, config.norm_eps),
            make_norm(engine, config.norm, config.d_model, config.norm_eps),
            dropout=config.dropout,
            first_site=1 + 2 * index,
        )

    # -- memory modes ------------------------------------------------------------------------------------------------
    def set_checkpoint_every(self, num_blocks: int) -> None:
        """Keep only the input of each segment of num_blocks blocks; backward runs the segment again (0: off).

        Raises ValueError for a negative number.
        """
        if num_blocks < 0:
            raise ValueError(f"checkpoint_every is {num_blocks}, it must not be negative")
        self.checkpoint_every = num_blocks
        self.release_cache()
        for block in self.blocks:
            block.set_checkpoint_mode(num_blocks > 0)

    def set_checkpoint_mode(self, on: bool) -> None:
        """The contract's switch: segments of one block, or off."""
        self.set_checkpoint_every(1 if on else 0)

    def set_recompute(self, groups: Iterable[str], num_blocks: int | None = None) -> None:
        """Fine-grained recomputation in the first num_blocks blocks, all unless given: see GPTBlock.set_recompute."""
        chosen = tuple(groups)
        for i, block in enumerate(self.blocks):
            block.set_recompute(chosen if num_blocks is None or i < num_blocks else ())

    def set_documents(self, ids: np.ndarray | None) -> None:
        """Which document each token of the batches that follow belongs to: tokens attend within their own alone.

        ids: integers [batch, seq]; equal neighbours are one document. Positions (rope, learned) go on from one document
        to the next; ALiBi knows only distances. None: every row is one document. Raises ValueError for another shape.
        """
        ranges = None if ids is None else self.engine.tensor(document_ranges(ids))
        for block in self.blocks:
            block.attention.documents = ranges

    def set_activation_offload(self, on: bool) -> None:
        """Keep what blocks keep (the segments' inputs, when checkpointing) in host memory from forward to backward.

        Each block's tensors go after its forward, and come back before the backward of the block that follows it.
        """
        self.activation_offload = bool(on)
        self.release_cache()

    def set_flush_interval(self, num_blocks: int) -> None:
        """Submit what is recorded after every num_blocks blocks, forward and backward (0: never).

        Raises ValueError for a negative number.
        """
        if num_blocks < 0:
            raise ValueError(f"flush_interval is {num_blocks}, it must not be negative")
        self.flush_interval = num_blocks

    def start_forward(self) -> None:
        """Forget what an earlier forward kept, in host memory too."""
        super().start_forward()
        self._offloaded.clear()

    def release_cache(self) -> None:
        """Forget everything kept, in host memory too."""
        super().release_cache()
        self._offloaded.clear()

    def set_training(self, on: bool) -> None:
        """Off: no dropout, nothing kept, and what was kept is released."""
        super().set_training(on)
        self._offloaded.clear()

    # -- forward -----------------------------------------------------------------------------------------------------
    def forward(self, tokens: np.ndarray | Tensor) -> Tensor:
        """tokens integer [batch, seq] -> logits [batch, seq, vocab]. Raises BadInputError for bad tokens."""
        hidden = self._hidden(self.checked_tokens(tokens))
        rows = hidden.reshape(-1, self.config.d_model)
        logits = self.engine.matmul(rows, self.head.data, trans_b=True)
        self._offloaded.settle()
        return logits.reshape(*hidden.shape[:-1], self.config.vocab_size)

    def loss(self, tokens: np.ndarray | Tensor, targets: np.ndarray | Tensor) -> Tensor:
        """tokens, targets integer [batch, seq] (target -100: no loss) -> sum of losses [1], in nats.

        When training, the step parameters' loss_scale must be set before. Raises BadInputError for bad tokens.
        """
        tokens = self.checked_tokens(tokens)
        targets = self.checked_tokens(targets, ignore=True)
        if targets.shape != tokens.shape:
            raise BadInputError(f"targets {targets.shape} and tokens {tokens.shape} differ in shape")
        hidden = self._hidden(tokens)
        loss = self.head_loss.forward(hidden.reshape(-1, self.config.d_model), targets.reshape(-1))
        self._offloaded.settle()
        return loss

    def logits_last(self, tokens: np.ndarray | Tensor) -> Tensor:
        """Logits [batch, vocab] of the token that follows each row of tokens [batch, seq]. Keeps nothing."""
        tokens = self.checked_tokens(tokens)
        batch, seq = tokens.shape
        was_training = self.training
        self.set_training(False)
        try:
            x = self._trunk(tokens).reshape(batch * seq, self.config.d_model)
        finally:
            self.set_training(was_training)
        if batch == 1:
            last = x.rows(seq - 1, seq)
        else:  # an embedding look-up is a gather of rows
            last = self.engine.embedding(x, self.engine.tensor(np.arange(1, batch + 1, dtype=np.int32) * seq - 1))
        return self.engine.matmul(self.final_norm.normalize(last)[0], self.head.data, trans_b=True)

    def checked_tokens(self, tokens: np.ndarray | Tensor, *, ignore: bool = False) -> Tensor:
        """Tokens [batch, seq] as an int32 tensor; with `ignore`, -100 is allowed. A tensor's values are not looked at.

        Raises BadInputError for another rank or type, an empty array, a sequence longer than max_seq_len, or a token
        outside the vocabulary.
        """
        if not isinstance(tokens, Tensor):
            tokens = np.asarray(tokens)
        self._check_shape(tokens.shape)
        if isinstance(tokens, Tensor):
            if tokens.dtype != "int32":
                raise BadInputError(f"tokens must be int32, got {tokens.dtype}")
            return tokens
        self._check_values(tokens, ignore)
        return self.engine.tensor(tokens.astype(np.int32))

    def check_batch(self, tokens: np.ndarray, targets: np.ndarray) -> int:
        """Number of targets that are not -100. Raises what `loss` would raise, before anything is recorded."""
        shape = tokens.shape
        self._check_shape(shape)
        self._check_values(tokens, False)
        same = targets.shape == shape
        if not same:
            self._check_shape(targets.shape)
        num_ignored = self._check_values(targets, True)
        if not same:
            raise BadInputError(f"targets {targets.shape} and tokens {tokens.shape} differ in shape")
        return targets.size - num_ignored

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or 0 in shape:
            raise BadInputError(f"tokens must be [batch, seq] and not empty, got shape {tuple(shape)}")
        if shape[1] > self.config.max_seq_len:
            raise BadInputError(f"{shape[1]} tokens in a row, the model takes {self.config.max_seq_len}")

    def _check_values(self, tokens: np.ndarray, ignore: bool) -> int:
        """Number of ignored ones. tokens: not empty."""
        if tokens.dtype.kind not in "iu":
            raise BadInputError(f"tokens must be integers, got {tokens.dtype}")
        # `argmin` takes no longer than `min` for many numbers, and a fifth of the time for few.
        lowest, highest, last = tokens.item(tokens.argmin()), tokens.item(tokens.argmax()), self.config.vocab_size - 1
        if lowest >= 0 and highest <= last:
            return 0
        if ignore and lowest == IGNORE_INDEX and highest <= last:
            num_ignored = int(np.count_nonzero(tokens == IGNORE_INDEX))
            if num_ignored == np.count_nonzero(tokens < 0):
                return num_ignored
        looked_at = tokens[tokens != IGNORE_INDEX] if ignore else tokens
        if looked_at.size and (looked_at.min() < 0 or looked_at.max() > last):
            raise BadInputError(f"tokens {looked_at.min()}..{looked_at.max()} lie outside the vocabulary 0..{last}")
        return tokens.size - looked_at.size

    def _hidden(self, tokens: Tensor) -> Tensor:
        """The final norm's output [batch, seq, d]; its input and row scalars are kept."""
        x = self._trunk(tokens)
        hidden, stats = self.final_norm.normalize(x)
        self.keep_last(x, stats)
        return hidden

    def keep_last(self, x: Tensor, stats: Stats) -> None:
        """Keep the final norm's input and row scalars, in checkpoint mode too: they are the head's."""
        if self.training:
            self.kept["x"] = x
            self.kept.update({f"final_norm.{i}": scalar for i, scalar in enumerate(stats)})

    def _trunk(self, tokens: Tensor) -> Tensor:
        self.start_forward()
        self._start_check()
        engine = self.engine
        x = self.embedding.forward(tokens)
        if self.config.positions == "learned":
            x = engine.add(x, self.positions.forward(self._positions(*tokens.shape)))
        if self.training and self.config.dropout:
            x = engine.dropout(x, p=self.config.dropout, site=0)
        for i, block in enumerate(self.blocks):
            if self.training and self.checkpoint_every and i % self.checkpoint_every == 0:
                self.kept[f"segment.{i}"] = x
            x = block.forward(x)
            if self.activation_offload and self.training:
                self._offloaded.store(i, self._kept_of(i))
            self._maybe_flush(i)
        return x

    def _kept_of(self, index: int) -> Iterator[tuple[str, dict[str, Tensor], str]]:
        """(label, holder, key) of each tensor that one block keeps, or that is kept for its segment."""
        if f"segment.{index}" in self.kept:
            yield f"segment.{index}", self.kept, f"segment.{index}"
        layers: list[tuple[str, Layer]] = [(f"blocks.{index}", self.blocks[index])]
        for path, layer in layers:
            for name in list(layer.kept):
                yield f"{path}.{name}", layer.kept, name
            layers += [(f"{path}.{name}", child) for name, child in layer.children()]

    def _start_check(self) -> None:
        if self.training and self.engine.computes and switches.get("VKFOLD_CHECK_RECOMPUTE"):
            self.set_recompute_check(RecomputeCheck())
        elif self.recompute_check is not None:
            self.set_recompute_check(None)

    def _positions(self, batch: int, seq: int) -> Tensor:
        for kept in self._position_ids:
            if kept.shape[1] == seq and kept.shape[0] >= batch:
                return kept if kept.shape[0] == batch else kept.rows(0, batch)
        ids = np.broadcast_to(np.arange(seq, dtype=np.int32), (batch, seq))
        if not self.training:  # leaves nothing behind, so that training goes on as before
            return self.engine.tensor(ids)
        with self.engine.parameter_pool():
            made = self.engine.tensor(ids)
        others = [kept for kept in self._position_ids if kept.shape[1] != seq]
        self._position_ids = (*others[1 - MAX_LENGTHS :], made)
        return made

    def _maybe_flush(self, index: int) -> None:
        if self.flush_interval and (index + 1) % self.flush_interval == 0:
            self.engine.flush_batch()

    # -- backward ----------------------------------------------------------------------------------------------------
    def backward(self, dy: Tensor | None = None) -> None:
        """Add to the gradients of all parameters. dy: the gradient of forward's logits; None after `loss`.

        The step parameters must be those of the forward (dropout repeats its masks from them).
        Raises MissingActivationError when the last forward kept nothing or was already gone back through.
        """
        x = self.take("x")
        stats = tuple(self.take(f"final_norm.{i}") for i in range(self.final_norm.num_stats))
        d_hidden = (
            self.head_loss.backward() if dy is None else self._head_backward(dy, self.final_norm.rebuild(x, stats))
        )
        dx = self.final_norm.backward_from(d_hidden.reshape(*x.shape), x, stats)
        del d_hidden, x, stats
        stride = self.checkpoint_every or 1
        for start in reversed(range(0, len(self.blocks), stride)):
            segment = range(start, min(start + stride, len(self.blocks)))
            self._offloaded.bring_back(start)
            self._offloaded.prefetch(start - stride)
            if self.checkpoint_every:
                self._recompute_segment(segment)
            for i in reversed(segment):
                dx = self.blocks[i].backward(dx)
                self._maybe_flush(i)
        if self.config.dropout and self.training:
            dx = self.engine.dropout(dx, p=self.config.dropout, site=0)
        if self.config.positions == "learned":
            self.positions.backward(dx)
        self.embedding.backward(dx)

    def _head_backward(self, d_logits: Tensor, hidden: Tensor) -> Tensor:
        d_rows = d_logits.reshape(-1, self.config.vocab_size)
        d_hidden = self.engine.matmul(d_rows, self.head.data)
        out, accumulate = self.head.gradient()
        self.engine.matmul(
            d_rows, hidden.reshape(-1, self.config.d_model), trans_a=True, out=out, accumulate=accumulate
        )
        self.head.gradient_written()
        return d_hidden

    def _recompute_segment(self, segment: range) -> None:
        x = self.take(f"segment.{segment.start}")
        check = self.recompute_check
        if check is not None:
            check.recomputing = True
        for i in segment:
            x = self.blocks[i].forward_recompute(x, need_output=i != segment[-1])
        if check is not None:
            check.recomputing = False

    # -- values ------------------------------------------------------------------------------------------------------
    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite every parameter. A tied model takes a separate `head` only if it equals the embedding.

        Raises ValueError that lists missing and unexpected names and wrong shapes; nothing is changed then.
        """
        if self.config.tie_head and isinstance(state, Mapping) and HEAD in state:
            table = state.get("embedding.weight")
            if table is not None and not np.array_equal(np.asarray(state[HEAD]), np.asarray(table)):
                raise ValueError(
                    "the config ties head and embedding, but the state holds two different tensors for them: "
                    "use tie_head=False"
                )
            state = {name: value for name, value in state.items() if name != HEAD}
        super().load_state_dict(state)
