"""A bigram model of bytes: what a trained model has to beat."""

from __future__ import annotations

import numpy as np


def bigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int = 256, add: float = 0.1) -> float:
    """Mean -log p(token | token before), in nats, of the held-out tokens after the first.

    Pairs are counted on the training tokens with `add` added to every count (add-k smoothing; Jurafsky and Martin,
    "Speech and language processing", chapter 3). Raises ValueError when the held-out part has no pair.
    """
    if len(held_out) < 2:
        raise ValueError("the held-out part needs at least two tokens")
    train, held_out = np.asarray(train, np.int64), np.asarray(held_out, np.int64)
    pairs = np.bincount(train[:-1] * vocab_size + train[1:], minlength=vocab_size * vocab_size)
    counts = pairs.reshape(vocab_size, vocab_size) + add
    log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_probability[held_out[:-1], held_out[1:]].mean())
