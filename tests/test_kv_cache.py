"""Generation with kept keys and values gives what a pass over the whole text gives."""

from __future__ import annotations

import numpy as np
import pytest
from layer_checks import randomize

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import GPTConfig, GPTModel, KVCache, Sampler, generate

CONFIGS = [
    GPTConfig(13, 12, 16, 4, 2, num_kv_heads=2, d_ff=12),
    GPTConfig(13, 12, 16, 2, 2, d_ff=12, norm="layernorm", activation="gelu", positions="learned"),
    GPTConfig(13, 12, 12, 4, 1, d_ff=12, window=3, positions="learned"),
    GPTConfig(13, 12, 16, 4, 2, d_ff=12, positions="alibi", attention_softcap=2.0, attention_sinks=True),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_same_logits_as_without(oracle: CpuEngine, config: GPTConfig) -> None:
    model = GPTModel(oracle, config)
    randomize(model, scale=0.4)
    tokens = np.random.default_rng(0).integers(0, 13, (1, 12))
    cache = KVCache(model)
    for length in (3, 4, 5, 9, 12, 12, 7, 8):  # continued, in a longer piece, repeated, started anew
        np.testing.assert_allclose(
            cache.next_logits(tokens[:, :length]),
            model.logits_last(tokens[:, :length]).numpy()[0],
            rtol=1e-9,
            atol=1e-9,
        )
    other = tokens.copy()
    other[0, 2] = (other[0, 2] + 1) % 13
    np.testing.assert_allclose(cache.next_logits(other), model.logits_last(other).numpy()[0], rtol=1e-9, atol=1e-9)


def test_generation(vulkan: VulkanEngine) -> None:
    model = GPTModel(vulkan, CONFIGS[0])
    randomize(model, scale=0.4)
    cache = KVCache(model)
    assert cache.nbytes == 12 * 2 * 2 * 2 * 4 * 4  # tokens, layers, k and v, heads, head_dim, bytes

    def plain(tokens: np.ndarray) -> np.ndarray:
        return model.logits_last(tokens).numpy()[0]

    def texts(next_logits) -> list[int]:
        return generate(next_logits, [1, 2], 16, Sampler(seed=5), max_seq_len=12)

    assert texts(cache.next_logits) == texts(plain)


def test_bad_input(cpu: CpuEngine) -> None:
    cache = KVCache(GPTModel(cpu, CONFIGS[0]))
    with pytest.raises(BadInputError, match="one sequence"):
        cache.next_logits(np.zeros((2, 3), int))
    cache.next_logits(np.zeros((1, 12), int))
    with pytest.raises(BadInputError, match="the model takes 12"):
        cache.next_logits(np.zeros((1, 13), int))
    cache.reset()
    assert cache.tokens == []
