"""Recomputation changes no bit, and really gives memory back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

NUM_STEPS = 3
SIZES = {"vocab_size": 19, "max_seq_len": 8, "d_model": 8, "num_heads": 2, "d_ff": 12}
KINDS = {
    "llama": {"num_kv_heads": 1, "tie_head": False},
    "gpt": {"norm": "layernorm", "activation": "gelu", "positions": "learned"},
    "alibi": {"positions": "alibi", "attention_sinks": True, "attention_softcap": 20.0, "num_kv_heads": 1},
}


def micro_batches(step: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(step)
    pairs = [tuple(rng.integers(0, 19, (2, 3, 7))) for _ in range(count)]
    pairs[0][1][1, :3] = -100
    return pairs


def train(
    engine: ComputeEngine,
    kind: str,
    num_layers: int,
    *,
    dropout: float = 0.1,
    accumulate: int = 1,
    every: int = 0,
    groups: tuple[str, ...] = (),
    flush: int = 0,
    chunk_bytes: int = 0,
) -> dict[str, np.ndarray]:
    """Losses, gradients of every step, and the weights and moments at the end."""
    config = GPTConfig(**SIZES, num_layers=num_layers, dropout=dropout, **KINDS[kind])
    model = GPTModel(engine, config, seed=2, loss_chunk_bytes=chunk_bytes)
    model.set_checkpoint_every(every)
    model.set_recompute(groups)
    model.set_flush_interval(flush)
    optimizer = AdamW(model)
    step = TrainingStep(model, optimizer, max_norm=0.5, seed=11, keep_gradients=True)
    seen: dict[str, np.ndarray] = {}
    for n in range(NUM_STEPS):
        result = step(micro_batches(n, accumulate), step=n, learning_rate=1e-2)
        seen[f"loss {n}"] = np.array([result.loss, result.grad_norm])
        for name, parameter in model.named_parameters().items():
            assert parameter.grad is not None
            seen[f"grad {n} {name}"] = parameter.grad.numpy()
    model.clear_gradients()
    seen.update({f"weight {name}": value for name, value in model.state_dict().items()})
    seen.update({f"moment {name}": value for name, value in optimizer.state_dict().items()})
    return seen


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name, value in expected.items() if not np.array_equal(actual[name], value)]
    assert not different, f"{len(different)} of {len(expected)} differ, the first: {different[0]}"
    assert all(np.isfinite(value).all() for value in expected.values())


@pytest.mark.parametrize("num_layers", [1, 2, 4, 8])
def test_every_stride_gives_the_bits_of_the_baseline(vulkan: VulkanEngine, num_layers: int) -> None:
    kind = "llama" if num_layers != 4 else "gpt"
    baseline = train(vulkan, kind, num_layers)
    for every in (1, 2, 3, 4):
        assert_same_bits(train(vulkan, kind, num_layers, every=every), baseline)


def pairwise(axes: dict[str, list]) -> list[dict]:
    """Few combinations in which every value of every axis meets every value of every other (greedy)."""
    names = list(axes)
    open_pairs = {
        (a, va, b, vb)
        for a, b in itertools.combinations(names, 2)
        for va in range(len(axes[a]))
        for vb in range(len(axes[b]))
    }
    chosen = []
    everything = list(itertools.product(*[range(len(axes[name])) for name in names]))
    while open_pairs:

        def pairs_of(row: tuple[int, ...]) -> set:
            return {(names[i], row[i], names[j], row[j]) for i, j in itertools.combinations(range(len(names)), 2)}

        best = max(everything, key=lambda row: len(pairs_of(row) & open_pairs))
        open_pairs -= pairs_of(best)
        chosen.append({name: axes[name][i] for name, i in zip(names, best, strict=True)})
    return chosen


MODES = [
    {},
    {"every": 1},
    {"every": 2},
    {"every": 3},
    {"groups": ("mlp",)},
    {"groups": ("qkv",)},
    {"groups": ("attention",)},
    {"groups": ("norm", "activation")},
    {"groups": ("mlp", "qkv")},
    {"groups": ("norm", "activation", "attention", "qkv", "mlp")},
    {"groups": ("mlp", "attention"), "every": 2},
]
MATRIX = pairwise(
    {"mode": MODES, "flush": [0, 1, 2], "accumulate": [1, 3], "dropout": [0.0, 0.1], "kind": ["gpt", "llama"]}
)


@pytest.fixture(scope="module")
def baselines() -> dict:
    return {}


@pytest.mark.parametrize("cell", MATRIX, ids=lambda cell: "-".join(str(value) for value in cell.values()))
def test_memory_modes_change_no_bit(vulkan: VulkanEngine, baselines: dict, cell: dict) -> None:
    plain = {"dropout": cell["dropout"], "accumulate": cell["accumulate"], "chunk_bytes": 64 * 4 * 19 // 2}
    key = (cell["kind"], cell["dropout"], cell["accumulate"])
    if key not in baselines:
        baselines[key] = train(vulkan, cell["kind"], 3, **plain)
    assert_same_bits(train(vulkan, cell["kind"], 3, flush=cell["flush"], **cell["mode"], **plain), baselines[key])


def live_bytes_after_forward(engine: ComputeEngine, model: GPTModel, tokens: np.ndarray) -> int:
    pools = engine.pool_stats()
    before = pools["step"].live_bytes
    model.loss(tokens, tokens)
    live = engine.pool_stats()["step"].live_bytes - before
    model.backward()
    model.clear_gradients()
    assert engine.pool_stats()["step"].live_bytes == before
    return live


def test_checkpointing_gives_the_memory_back(vulkan: VulkanEngine) -> None:
    """Between forward and backward: one input a segment, what the head needs, and small change."""
    num_layers, batch, seq, d, vocab = 4, 2, 256, 128, 64
    config = GPTConfig(vocab, seq, d, 4, num_layers)
    model = GPTModel(vulkan, config)
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, seq))
    hidden = batch * seq * d * 4
    # The head's: the last block's output, the gradient of the hidden states, and its own weight's gradient.
    head = 2 * hidden + vocab * d * 4
    live = {}
    for every in (0, 1, 2, 3, 4):
        model.set_checkpoint_every(every)
        live[every] = live_bytes_after_forward(vulkan, model, tokens)
    for every, segments in ((1, 4), (2, 2), (3, 2), (4, 1)):
        assert live[every] <= segments * hidden + head + 2**20
        assert live[every] >= segments * hidden + head
    assert live[1] <= num_layers * batch * seq * d * 4 + head + 2**20
    # Without recomputation a block keeps x, q, k, v, O, mid, the pre-activation, and scalars a row.
    block = 6 * hidden + batch * seq * 2 * config.d_ff * 4
    assert num_layers * block + head <= live[0] <= num_layers * block + head + 2**20


def test_fine_grained_recomputation_gives_the_memory_back(vulkan: VulkanEngine) -> None:
    num_layers, batch, seq, d, vocab = 2, 2, 128, 64, 64
    config = GPTConfig(vocab, seq, d, 4, num_layers)
    model = GPTModel(vulkan, config)
    tokens = np.random.default_rng(0).integers(0, vocab, (batch, seq))
    hidden, rows = batch * seq * d * 4, batch * seq * 4
    plain = live_bytes_after_forward(vulkan, model, tokens)
    savings = {
        "mlp": batch * seq * 2 * config.d_ff * 4,
        "qkv": 3 * hidden,
        "attention": hidden + 4 * rows,
        "norm": 2 * rows,
        "activation": 0,
    }
    for group, expected in savings.items():
        model.set_recompute([group])
        assert plain - live_bytes_after_forward(vulkan, model, tokens) == num_layers * expected
    model.set_recompute(savings)
    assert plain - live_bytes_after_forward(vulkan, model, tokens) == num_layers * sum(savings.values())


def test_sinks_and_scores_recompute_to_the_same_bits(vulkan: VulkanEngine) -> None:
    """ALiBi, a softcap and sinks, over accumulated micro-batches: attention is rebuilt as it was."""
    baseline = train(vulkan, "alibi", 2, accumulate=2)
    assert "grad 0 blocks.1.attention.sinks" in baseline
    assert_same_bits(train(vulkan, "alibi", 2, accumulate=2, every=2), baseline)
    assert_same_bits(train(vulkan, "alibi", 2, accumulate=2, groups=("norm", "attention", "qkv", "mlp")), baseline)
