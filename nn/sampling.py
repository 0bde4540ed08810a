"""Drawing the next token: temperature, top-k, top-p, seed. Worked out in float64 on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engine.errors import BadInputError


class Sampler:
    """Draws tokens from logits.

    temperature: 0 takes the likeliest token, the lowest index on ties. top_k: 0 is off; else the k likeliest stay.
    top_p (Holtzman et al. 2020, nucleus sampling): the fewest likeliest tokens whose probabilities reach top_p stay,
    always at least one. vocab_size: tokens from here on are padding and are never drawn (0: all may be).

    Raises BadInputError for NaN, infinite or negative settings, or top_p outside 0 < top_p <= 1.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        vocab_size: int = 0,
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise BadInputError(f"temperature is {temperature}, it must be finite and not negative")
        if not (math.isfinite(top_k) and top_k >= 0 and float(top_k).is_integer()):
            raise BadInputError(f"top_k is {top_k}, it must be a whole number, 0 (off) or more")
        if not 0 < top_p <= 1:
            raise BadInputError(f"top_p is {top_p}, it must be above 0 and at most 1")
        if seed < 0:
            raise BadInputError(f"seed is {seed}, it must not be negative")
        self.temperature = temperature
        self.top_k = int(top_k)
        self.top_p = top_p
        self.vocab_size = vocab_size
        self._generator = np.random.Generator(np.random.Philox(seed))

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Probabilities [n] (float64) after all settings, for logits [n].

        Raises BadInputError for logits with NaN, or without a finite value.
        """
        scores = np.asarray(logits, np.float64).reshape(-1).copy()
        if self.vocab_size:
            scores[self.vocab_size :] = -np.inf
        if np.isnan(scores).any() or not np.isfinite(scores.max()):
            raise BadInputError(
                "logits hold NaN or no finite value, so nothing can be drawn from them: are the weights damaged?"
            )
        order = np.argsort(-scores, kind="stable")  # likeliest first, the lower index first on ties
        result = np.zeros_like(scores)
        if self.temperature == 0:
            result[order[0]] = 1.0
            return result
        if self.top_k:
            order = order[: self.top_k]
        with np.errstate(over="ignore"):  # a temperature near 0 leaves -inf, weight 0
            weights = np.exp((scores[order] - scores[order[0]]) / self.temperature)
        weights /= weights.sum()
        # A token stays while those before it have not reached top_p. Logits are float32: a sum that differs from
        # top_p by their rounding has reached it.
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        stays = before < self.top_p * (1 - 2e-7)
        stays[0] = True
        if self.top_p == 1:
            stays[:] = True
        weights = np.where(stays, weights, 0.0)
        result[order] = weights / weights.sum()
        return result

    def draw(self, logits: np.ndarray) -> int:
        """One token from logits [n]."""
        probabilities = self.probabilities(logits)
        chosen = np.flatnonzero(probabilities)
        edges = np.cumsum(probabilities[chosen])
        place = int(np.searchsorted(edges, self._generator.random() * edges[-1], side="right"))
        return int(chosen[min(place, len(chosen) - 1)])

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._generator.bit_generator.state = state["generator"]


def generate(
    next_logits: Callable[[np.ndarray], np.ndarray],
    prompt: Sequence[int],
    num_tokens: int,
    sampler: Sampler,
    *,
    max_seq_len: int,
    stop_token: int | None = None,
) -> list[int]:
    """Tokens drawn after the prompt, at most num_tokens; the stop token, if drawn, ends it and is not returned.

    next_logits(tokens [1, n]) gives the logits of the token that follows; it sees the last max_seq_len tokens.
    Raises BadInputError for an empty prompt or a negative number.
    """
    if len(prompt) == 0:
        raise BadInputError("generation needs at least one token to start from")
    if num_tokens < 0:
        raise BadInputError(f"cannot generate {num_tokens} tokens")
    tokens, drawn = [int(token) for token in prompt], []
    for _ in range(num_tokens):
        window = np.asarray(tokens[-max_seq_len:], np.int32).reshape(1, -1)
        token = sampler.draw(next_logits(window))
        if token == stop_token:
            break
        tokens.append(token)
        drawn.append(token)
    return drawn
