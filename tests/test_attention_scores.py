"""Documents, sinks and scores that are expressions: against the oracle, plain NumPy and finite differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from op_checks import EPS32, check_gradient, check_op

from vkfold.engine.attention_scores import (
    HEAD,
    KEY,
    NEVER,
    QUERY,
    SCORE,
    alibi,
    alibi_slopes,
    document_ranges,
    softcap,
)
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr import tanh, uniform, variable, where
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine

OPTIONAL = ("key_lengths", "documents", "sinks", "head_values")
BOTH = softcap(2.0, alibi())
PREFIX = where((KEY <= QUERY) | (KEY < 5.0), SCORE, NEVER)


def make(b: int, s: int, t: int, heads: int, kv_heads: int, dim: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng([b, s, t, heads, dim, seed])
    shapes = [(b, s, heads, dim), (b, t, kv_heads, dim), (b, t, kv_heads, dim), (b, s, heads, dim)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def document_ids(b: int, t: int, seed: int = 3) -> np.ndarray:
    """Runs of random lengths, one of length 1 at each end."""
    rng = np.random.default_rng([b, t, seed])
    cuts = rng.random((b, t)) < 0.15
    cuts[:, 1:2] = cuts[:, -1:] = True
    return np.cumsum(cuts, axis=1)


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, scores: Any, seen: np.ndarray, sinks: Any = None) -> np.ndarray:
    """One query head per kv head, all in float64, with the whole score matrix; nothing of the engine is in it."""
    q, k, v = (np.moveaxis(x.astype(np.float64), 2, 1) for x in (q, k, v))
    s = np.where(seen, scores(q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])), -np.inf)
    if sinks is not None:
        s = np.concatenate([s, np.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:, :, :1])], axis=2)
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = p.sum(axis=-1, keepdims=True)
    return np.moveaxis(p / np.where(total == 0, 1, total) @ v, 1, 2)


def check(
    vulkan: VulkanEngine, oracle: CpuEngine, arrays: list[np.ndarray], given: dict[str, np.ndarray], **settings: Any
) -> np.ndarray:
    """Forward and backward against the oracle; the bound is generous to sums over keys, tight against a wrong mask."""
    q, k, v, d_o = arrays
    names, extra = list(given), list(given.values())
    bound = (k.shape[1] + q.shape[3] + 60) * 8 * EPS32

    def options(tensors: Any) -> dict[str, Any]:
        return dict(zip(names, tensors, strict=True)) | settings

    def forward(engine: ComputeEngine, q: Any, k: Any, v: Any, *more: Any) -> Any:
        return engine.attention(q, k, v, **options(more))

    def backward(engine: ComputeEngine, d: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *more: Any) -> Any:
        return engine.attention_backward(d, q, k, v, o, lse, **options(more))

    o, lse = check_op(vulkan, oracle, forward, [q, k, v, *extra], bound)
    check_op(vulkan, oracle, backward, [d_o, q, k, v, o, lse, *extra], bound * q.shape[1])
    return o


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (7, 7), (33, 33), (70, 70), (20, 45), (45, 20)])
def test_documents(vulkan: VulkanEngine, oracle: CpuEngine, s: int, t: int, window: int, causal: bool) -> None:
    """A query sees keys of its own document only, with every other mask; one dispatch is checked pair by pair."""
    arrays, ids = make(2, s, t, 2, 2, 8), document_ids(2, t)
    lengths = np.array([t, max(1, t - 5)], np.int32)
    given = {"documents": document_ranges(ids), "key_lengths": lengths}
    o = check(vulkan, oracle, arrays, given, causal=causal, window=window)
    position, key = t - s + np.arange(s)[:, None], np.arange(t)
    seen = (ids[:, np.clip(position, 0, None)] == ids[:, None, :]) & (position >= 0) & (key < lengths[:, None, None])
    seen &= (key <= position) | (not causal)
    seen &= (np.abs(position - key) < window) | (window == 0)
    want = plain(*arrays[:3], lambda x: x, seen[:, None])
    assert np.allclose(o, want, atol=2e-5)


def test_a_document_is_computed_as_if_alone(vulkan: VulkanEngine) -> None:
    """Packed behind another one that fills whole blocks, a document has the bits it has by itself."""
    (q, k, v, _), length = make(1, 64, 64, 2, 1, 16), 40
    ids = np.array([[0] * (64 - length) + [1] * length])
    packed = vulkan.attention(*map(vulkan.tensor, (q, k, v)), documents=vulkan.tensor(document_ranges(ids)))[0].numpy()
    alone = vulkan.attention(*(vulkan.tensor(x[:, -length:].copy()) for x in (q, k, v)))[0].numpy()
    assert np.array_equal(packed[:, -length:], alone)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("score", "heads"),
    [(alibi(), True), (softcap(1.5), False), (BOTH, True), (PREFIX, False), (tanh(SCORE) * HEAD + 0.01 * KEY, True)],
    ids=["alibi", "softcap", "both", "prefix", "own"],
)
def test_scores(vulkan: VulkanEngine, oracle: CpuEngine, score: Any, heads: bool, causal: bool) -> None:
    given = {"head_values": alibi_slopes(4)} if heads else {}
    check(vulkan, oracle, make(2, 37, 37, 4, 2, 8), given, causal=causal, score=score)


@pytest.mark.parametrize(("s", "t", "dim"), [(9, 40, 17), (40, 9, 16), (65, 65, 40)])
def test_scores_in_other_tiles(vulkan: VulkanEngine, oracle: CpuEngine, s: int, t: int, dim: int) -> None:
    given = {"head_values": alibi_slopes(4)}
    check(vulkan, oracle, make(1, s, t, 4, 2, dim), given, score=alibi())


def test_alibi_is_the_papers(vulkan: VulkanEngine) -> None:
    """-m * distance added to the scores, with the slopes of the paper's section 3."""
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert np.allclose(alibi_slopes(12), [*(2.0**-i for i in range(1, 9)), *(2.0 ** (-i / 2) for i in (1, 3, 5, 7))])
    q, k, v, _ = make(1, 50, 50, 8, 8, 16)
    key = np.arange(50)
    distance = key[:, None] - key
    want = plain(q, k, v, lambda x: x - alibi_slopes(8)[:, None, None] * np.abs(distance), distance >= 0)
    slopes = vulkan.tensor(alibi_slopes(8))
    got = vulkan.attention(*map(vulkan.tensor, (q, k, v)), score=alibi(), head_values=slopes)[0].numpy()
    assert np.allclose(got, want, atol=2e-5)


def test_an_expression_that_changes_nothing_changes_no_bit(vulkan: VulkanEngine) -> None:
    """SCORE itself gives the bits of the plain kernels, and causality as an expression those of the mask."""
    q, k, v, d_o = map(vulkan.tensor, make(1, 41, 41, 2, 1, 16))
    runs: list[dict[str, Any]] = [
        {"causal": True},
        {"causal": True, "score": SCORE},
        {"causal": False, "score": where(KEY <= QUERY, SCORE, NEVER)},
    ]
    results = []
    for settings in runs:
        o, lse = vulkan.attention(q, k, v, **settings)
        results.append([x.numpy() for x in (o, lse, *vulkan.attention_backward(d_o, q, k, v, o, lse, **settings))])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_sinks(vulkan: VulkanEngine, oracle: CpuEngine, causal: bool) -> None:
    """A sink takes its share of the softmax and gives nothing; -inf is no sink; no key: lse is the sink."""
    arrays = make(2, 33, 33, 4, 4, 8)
    sinks = np.array([0.5, -30.0, 4.0, -np.inf], np.float32)
    lengths = np.array([33, 0], np.int32)
    o = check(vulkan, oracle, arrays, {"sinks": sinks, "key_lengths": lengths}, causal=causal)
    key = np.arange(33)
    seen = ((key <= key[:, None]) | (not causal)) & (key < lengths[:, None, None])
    assert np.allclose(o, plain(*arrays[:3], lambda x: x, seen[:, None], sinks.astype(np.float64)), atol=2e-5)
    q, k, v, _ = map(vulkan.tensor, arrays)
    extra = {"sinks": vulkan.tensor(sinks), "key_lengths": vulkan.tensor(lengths)}
    o_none, lse = vulkan.attention(q, k, v, causal=causal, **extra)
    assert not o_none.numpy()[1].any() and np.array_equal(lse.numpy()[1], np.repeat(sinks[:, None], 33, axis=1))


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_with_everything(oracle: CpuEngine, vulkan: VulkanEngine, fused: bool) -> None:
    """Finite differences of q, k, v and the sinks through documents, ALiBi, softcap and grouped heads together."""
    q, k, v, _ = make(2, 9, 9, 4, 2, 3)
    sinks = np.array([0.3, -0.5, 1.0, 0.0])
    ranges, slopes = document_ranges(document_ids(2, 9)), alibi_slopes(4)

    def options(engine: ComputeEngine, sink: Any) -> dict[str, Any]:
        return {
            "documents": engine.tensor(ranges), "head_values": engine.tensor(slopes), "sinks": sink, "score": BOTH,
        }  # fmt: skip

    heads = {"num_heads": 4, "num_kv_heads": 2}

    def forward(engine: ComputeEngine, *tensors: Any) -> Any:
        *parts, sink = tensors
        if fused:
            return engine.attention_qkv(parts[0], **heads, **options(engine, sink))
        return engine.attention(*parts, **options(engine, sink))

    def backward(engine: ComputeEngine, d_o: Any, *tensors: Any) -> Any:
        *parts, sink = tensors
        o, lse = forward(engine, *tensors)
        d_sinks = engine.empty((4,))
        engine.attention_sinks_backward(d_o, o, lse, sink, d_sinks)
        if fused:
            grads = (engine.attention_qkv_backward(d_o, parts[0], o, lse, **heads, **options(engine, sink)),)
        else:
            grads = engine.attention_backward(d_o, *parts, o, lse, **options(engine, sink))
        return (*grads, d_sinks)

    arrays = [np.concatenate([x.reshape(2, 9, -1) for x in (q, k, v)], axis=2)] if fused else [q, k, v]
    check_gradient(oracle, forward, backward, [*arrays, sinks])
    d_o = np.random.default_rng(8).standard_normal((2, 9, 12) if fused else q.shape).astype(np.float32)
    check_op(vulkan, oracle, backward, [d_o, *arrays, sinks.astype(np.float32)], 400 * EPS32)


def test_sink_gradient_accumulates(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Over many rows, into what is there; a row without keys and without a sink adds nothing."""
    q, k, v, d_o = make(3, 130, 130, 2, 1, 40)
    sinks = np.array([0.7, -np.inf], np.float32)
    lengths = np.array([130, 0, 50], np.int32)
    totals = []
    for engine in (vulkan, oracle):
        tensors = [engine.tensor(x) for x in (q, k, v)]
        s = engine.tensor(sinks)
        o, lse = engine.attention(*tensors, sinks=s, key_lengths=engine.tensor(lengths))
        out = engine.tensor(np.array([5.0, 6.0]))
        engine.attention_sinks_backward(engine.tensor(d_o), o, lse, s, out, accumulate=True)
        totals.append(out.numpy())
    assert np.allclose(totals[0], totals[1], rtol=1e-4, atol=1e-4) and totals[0][1] == 6.0


def test_document_ranges() -> None:
    assert document_ranges(np.array([[7, 7, 3, 3, 3, 7]])).tolist() == [
        [[0, 2], [0, 2], [2, 5], [2, 5], [2, 5], [5, 6]]
    ]
    with pytest.raises(ValueError, match=r"needed is \[batch, seq\]"):
        document_ranges(np.zeros(3, int))


def test_nothing_more_is_allocated() -> None:
    """Nothing is allocated for masks or scores: the plan with everything on is that of plain attention."""
    peaks = []
    for on in (False, True):
        plan = PlanEngine()
        q, k, v = (plan.empty((1, 256, 4, 32)) for _ in range(3))
        more: dict[str, Any] = {}
        if on:
            more = {"score": alibi(), "head_values": plan.empty((4,)), "documents": plan.empty((1, 256, 2), "int32")}
        o, lse = plan.attention(q, k, v, **more)
        plan.attention_backward(o, q, k, v, o, lse, **more)
        live = plan.pool_stats()["step"]
        peaks.append(live.peak_live_bytes - sum(t.nbytes for t in more.values() if isinstance(t, Tensor)))
    assert abs(peaks[0] - peaks[1]) < 512  # the small tensors take whole 256 bytes each


def test_misuse_is_refused(cpu: CpuEngine) -> None:
    q = cpu.tensor(np.zeros((1, 4, 2, 8)))
    two = cpu.tensor(np.zeros(2))
    for more, message in [
        ({"documents": cpu.tensor(np.zeros((1, 4), np.int32))}, r"documents must be int32 \[1, 4, 2\], not int32"),
        ({"sinks": cpu.tensor(np.zeros(3))}, r"sinks must be float32 \[2\]"),
        ({"score": alibi()}, "give both or neither"),
        ({"score": SCORE, "head_values": two}, "give both or neither"),
        ({"head_values": two}, "without a score"),
        ({"score": SCORE * variable("temperature")}, "the score has temperature; known are score, query, key, head"),
        ({"score": SCORE < 1.0}, "needed is an expression"),
        ({"score": SCORE + uniform(3)}, "random numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpu.attention(q, q, q, **more)
    for limit in (0.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"the limit is {limit}, it must be positive and finite"):
            softcap(limit)
    with pytest.raises(ValueError, match="does not belong"):
        cpu.attention_sinks_backward(q, q, cpu.tensor(np.zeros((1, 2, 5))), two, two)
