"""Text from a model, token after token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..nn.gpt_model import GPTModel
from ..nn.sampling import Sampler, generate
from .tokenizers import Tokenizer

START = b"\n"  # what an empty prompt becomes: a model needs a token to go on from


def generate_bytes(
    model: GPTModel, tokenizer: Tokenizer, prompt: bytes, num_tokens: int, sampler: Sampler
) -> Iterator[bytes]:
    """Yield the bytes of num_tokens tokens that follow the prompt, one token at a time.

    A token may end inside a character: join the bytes, or decode them incrementally. The model sees the last
    max_seq_len tokens.
    """
    max_seq_len = model.config.max_seq_len
    context = [int(token) for token in tokenizer.encode(prompt or START)][-max_seq_len:]

    def next_logits(tokens: np.ndarray) -> np.ndarray:
        logits = model.logits_last(tokens).numpy()[0]
        model.engine.end_batch()
        return logits

    for _ in range(num_tokens):
        context += generate(next_logits, context, 1, sampler, max_seq_len=max_seq_len)
        yield tokenizer.decode(context[-1:])
        context = context[-max_seq_len:]
