"""Drawing tokens: temperature, top_k, top_p, ties, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vkfold.engine.errors import BadInputError
from vkfold.nn import Sampler, generate

P = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = np.log(P)


def kept(logits: np.ndarray = LOGITS, **settings) -> list[int]:
    return np.flatnonzero(Sampler(**settings).probabilities(logits)).tolist()


@pytest.mark.parametrize("shift", [0.0, 7.5, -300.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_top_p(shift: float, dtype: type) -> None:
    logits = (LOGITS + (shift if dtype is np.float64 else 0)).astype(dtype)
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.500001) == [0, 1]
    assert kept(logits, top_p=1e-9) == [0]
    assert kept(logits, top_p=0.8) == [0, 1]
    assert kept(logits, top_p=0.95) == [0, 1, 2]
    assert kept(logits, top_p=1) == [0, 1, 2, 3]
    order = np.array([3, 1, 0, 2])
    assert kept(logits[order], top_p=0.6) == [1, 2]


def test_probabilities() -> None:
    np.testing.assert_allclose(Sampler().probabilities(LOGITS), P, rtol=1e-12)
    np.testing.assert_allclose(Sampler(top_k=2).probabilities(LOGITS), [0.625, 0.375, 0, 0], rtol=1e-12)
    np.testing.assert_allclose(Sampler(temperature=0.5).probabilities(LOGITS), P**2 / (P**2).sum(), rtol=1e-12)
    assert kept(top_k=0) == [0, 1, 2, 3]
    assert kept(top_k=9) == [0, 1, 2, 3]
    assert kept(np.full(4, 3.0), top_k=2) == [0, 1]
    assert kept(np.append(LOGITS, 50.0), vocab_size=4) == [0, 1, 2, 3]


def test_temperature_zero_is_argmax_lowest_index_on_ties() -> None:
    assert Sampler(temperature=0).draw(np.array([1.0, 5.0, 5.0, 2.0])) == 1
    assert Sampler(temperature=0, vocab_size=1).draw(np.array([1.0, 5.0])) == 0
    assert Sampler(temperature=1e-300).draw(np.array([1.0, 5.0, 4.999])) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"top_p": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": math.nan},
        {"top_k": 1.5},
        {"seed": -1},
    ],
)
def test_refused_settings(settings: dict) -> None:
    with pytest.raises(BadInputError):
        Sampler(**settings)


def test_nan_logits_are_refused() -> None:
    for bad in ([1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]):
        with pytest.raises(ValueError, match="nothing can be drawn"):
            Sampler().draw(np.array(bad))
    assert Sampler(vocab_size=1).draw(np.array([0.0, math.nan])) == 0


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    sampler = Sampler(seed=3)
    draws = [sampler.draw(LOGITS) for _ in range(4000)]
    counts = np.bincount(draws, minlength=4) / 4000
    assert np.abs(counts - P).max() < 4 * math.sqrt(0.25 / 4000)
    again = Sampler(seed=3)
    assert [again.draw(LOGITS) for _ in range(50)] == draws[:50]
    state = again.state_dict()
    expected = [again.draw(LOGITS) for _ in range(20)]
    other = Sampler(seed=99)
    other.load_state_dict(state)
    assert [other.draw(LOGITS) for _ in range(20)] == expected


def test_generate() -> None:
    seen = []

    def next_logits(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens.tolist())
        return np.eye(8)[(tokens[0, -1] + 1) % 8] * 9

    greedy = Sampler(temperature=0)
    assert generate(next_logits, [1, 2], 4, greedy, max_seq_len=3) == [3, 4, 5, 6]
    assert seen == [[[1, 2]], [[1, 2, 3]], [[2, 3, 4]], [[3, 4, 5]]]
    assert generate(next_logits, [1], 9, greedy, max_seq_len=3, stop_token=4) == [2, 3]
    assert generate(next_logits, [1], 0, greedy, max_seq_len=3) == []
    with pytest.raises(BadInputError, match="at least one token"):
        generate(next_logits, [], 4, greedy, max_seq_len=3)
    with pytest.raises(BadInputError, match="cannot generate"):
        generate(next_logits, [1], -4, greedy, max_seq_len=3)
