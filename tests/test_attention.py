"""Fold attention: every mask, odd sizes, grouped heads, gradients, and that nothing seq x seq is ever allocated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from op_checks import ODD_SIZES, check_gradient, check_op, run, sampled_sizes

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.ops.attention import ATTENTION, ATTENTION_BACKWARD
from vkfold.engine.ops.attention_qkv import ATTENTION_QKV, ATTENTION_QKV_BACKWARD
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.tensor import TensorSpec
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools.attention_bounds import backward_bounds, forward_bounds

Arrays = list[np.ndarray]


def make(batch: int, s: int, t: int, heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> Arrays:
    """q, k, v and d_o in float32."""
    rng = np.random.default_rng([batch, s, t, heads, kv_heads, head_dim, seed])
    shapes = [(batch, s, heads, head_dim)] + [(batch, t, kv_heads, head_dim)] * 2 + [(batch, s, heads, head_dim)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def mask_of(s: int, t: int, batch: int, *, causal: bool, window: int, lengths: np.ndarray | None) -> np.ndarray:
    """[b, 1, s, t]: the mask, pair by pair as the docstring tells it."""
    seen = np.zeros((batch, 1, s, t), bool)
    for b in range(batch):
        limit = t if lengths is None else lengths[b]
        for i in range(s):
            position = t - s + i
            for j in range(limit):
                past = not causal or j <= position
                near = window == 0 or (j > position - window and j < position + window)
                seen[b, 0, i, j] = past and near
    return seen


def check(
    vulkan: VulkanEngine,
    oracle: CpuEngine,
    arrays: Arrays,
    *,
    causal: bool = True,
    window: int = 0,
    lengths: np.ndarray | None = None,
    scale: float | None = None,
) -> None:
    """Forward and backward against the oracle, and the oracle's mask against `mask_of`."""
    q, k, v, d_o = arrays
    settings: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    factor = q.shape[3] ** -0.5 if scale is None else scale
    seen = mask_of(q.shape[1], k.shape[1], q.shape[0], causal=causal, window=window, lengths=lengths)
    extra = [] if lengths is None else [lengths]

    def forward(engine: ComputeEngine, *tensors: Any) -> Any:
        return engine.attention(*tensors[:3], key_lengths=tensors[3] if extra else None, **settings)

    def backward(engine: ComputeEngine, *tensors: Any) -> Any:
        return engine.attention_backward(*tensors[:6], key_lengths=tensors[6] if extra else None, **settings)

    o, lse = check_op(vulkan, oracle, forward, [q, k, v, *extra], lambda _: forward_bounds(q, k, v, seen, factor))
    empty = ~np.broadcast_to(seen, (*lse.shape, k.shape[1])).any(axis=-1)
    assert np.array_equal(np.isneginf(lse), empty)
    assert not o[np.moveaxis(empty, 1, 2)].any()
    inputs = [d_o, q, k, v, o, lse, *extra]
    check_op(vulkan, oracle, backward, inputs, lambda _: backward_bounds(d_o, q, k, v, o, lse, seen, factor))


PAIRS = sampled_sizes(2, 24, seed=11, sizes=[n for n in ODD_SIZES if n < 200])


@pytest.mark.parametrize(("s", "t"), PAIRS)
@pytest.mark.parametrize("causal", [True, False])
def test_odd_sizes(vulkan: VulkanEngine, oracle: CpuEngine, s: int, t: int, causal: bool) -> None:
    check(vulkan, oracle, make(1, s, t, 2, 1, 8), causal=causal)


@pytest.mark.parametrize(("s", "t"), [(300, 1000), (1000, 300)])
def test_long(vulkan: VulkanEngine, oracle: CpuEngine, s: int, t: int) -> None:
    check(vulkan, oracle, make(1, s, t, 1, 1, 64), causal=False)


@pytest.mark.parametrize(
    "head_dim",
    [1, 2, 3, 7, 16, 33, 64, 98, 128, *(pytest.param(n, marks=pytest.mark.slow) for n in (130, 255, 256))],
)
def test_head_dims(vulkan: VulkanEngine, oracle: CpuEngine, head_dim: int) -> None:
    check(vulkan, oracle, make(1, 37, 37, 2, 2, head_dim))
    check(vulkan, oracle, make(1, 3, 21, 2, 1, head_dim), causal=False)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 3), (5, 1), (8, 1)])
def test_grouped_heads(vulkan: VulkanEngine, oracle: CpuEngine, heads: int, kv_heads: int) -> None:
    check(vulkan, oracle, make(2, 19, 19, heads, kv_heads, 8))


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 16, 31, 1000])
@pytest.mark.parametrize("causal", [True, False])
def test_sliding_window(vulkan: VulkanEngine, oracle: CpuEngine, window: int, causal: bool) -> None:
    check(vulkan, oracle, make(1, 65, 65, 1, 1, 8), causal=causal, window=window)
    check(vulkan, oracle, make(1, 20, 45, 1, 1, 8), causal=causal, window=window)
    check(vulkan, oracle, make(1, 45, 20, 1, 1, 8), causal=causal, window=window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 5])
def test_key_padding(vulkan: VulkanEngine, oracle: CpuEngine, causal: bool, window: int) -> None:
    lengths = np.array([0, 1, 7, 8, 9, 15, 16, 17, 32, 33], np.int32)  # masked blocks at every tile edge
    check(vulkan, oracle, make(10, 33, 33, 2, 1, 8), causal=causal, window=window, lengths=lengths)


def test_padding_is_never_used(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Keys past the length may hold anything: a cache that is longer than what was written to it."""
    q, k, v, d_o = make(2, 9, 40, 2, 1, 8)
    lengths = np.array([13, 24], np.int32)
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = np.nan
    for engine in (vulkan, oracle):
        o, lse = run(engine, lambda e, *x: e.attention(*x[:3], key_lengths=x[3], causal=False), [q, k, v, lengths])
        assert np.isfinite(o).all() and np.isfinite(lse).all()
        gradients = run(
            engine,
            lambda e, *x: e.attention_backward(*x[:6], key_lengths=x[6], causal=False),
            [d_o, q, k, v, o, lse, lengths],
        )
        assert all(np.isfinite(g).all() for g in gradients)
        for b, n in enumerate(lengths):
            assert not gradients[1][b, n:].any() and not gradients[2][b, n:].any()


def test_given_scale_and_large_scores(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    q, k, v, d_o = make(1, 40, 40, 1, 1, 16)
    check(vulkan, oracle, [q, k, v, d_o], scale=0.0)
    check(vulkan, oracle, [q, k, v, d_o], scale=-0.3)
    check(vulkan, oracle, [q * 12, k * 12, v, d_o])  # nearly one-hot; exp of anything unshifted would overflow


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("factor", [1e5, 1e6, 1e7, 1e30])
@pytest.mark.parametrize("engine_name", ["cpu", "vulkan"])
def test_scores_whose_rounding_is_large(
    request: pytest.FixtureRequest, oracle: CpuEngine, engine_name: str, factor: float, causal: bool
) -> None:
    """Backward computes the scores as forward did, to the bit, or exp(score - lse) is anything; so with dO v^T - delta,
    which a large q multiplies. From 1e7 on such a row sees one key alone, so that more changes no gradient.
    """
    q, k, v, d_o = make(2, 23, 29, 4, 2, 33)

    def gradients(engine: ComputeEngine, factor: float) -> Arrays:
        larger = q.copy()
        larger[0, 7] *= factor
        larger[1, 11, 2, 5] = factor
        held = [engine.tensor(x) for x in (larger, k, v)]
        made = engine.attention_backward(
            engine.tensor(d_o), *held, *engine.attention(*held, causal=causal, window=17), causal=causal, window=17
        )
        return [gradient.numpy() for gradient in made]

    wanted = gradients(oracle, min(factor, 1e7))
    for got, want in zip(gradients(request.getfixturevalue(engine_name), factor), wanted, strict=True):
        assert np.abs(got - want).max() < 2e-6 * np.abs(want).max()


def test_nan_stays_in_its_row(vulkan: VulkanEngine) -> None:
    q, k, v, _ = make(1, 20, 20, 1, 1, 8)
    q[0, 5] = np.nan
    (o, lse) = run(vulkan, lambda e, *x: e.attention(*x), [q, k, v])
    assert np.isnan(o[0, 5]).all() and np.isnan(lse[0, 0, 5])
    assert np.isfinite(np.delete(o, 5, axis=1)).all() and np.isfinite(np.delete(lse, 5, axis=2)).all()


def test_group_reads_its_own_value_head(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Four query heads on two key/value heads, values 1 and 2; gradients are sums over the group."""
    q, k, v, d_o = make(1, 9, 9, 4, 2, 8)
    v[:, :, 0], v[:, :, 1] = 1, 2
    wide_k, wide_v = np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)
    for engine in (vulkan, oracle):
        o, lse = run(engine, lambda e, *x: e.attention(*x), [q, k, v])
        for head, value in enumerate([1, 1, 2, 2]):
            assert np.abs(o[0, :, head] - value).max() < 1e-6
        _, d_k, d_v = run(engine, lambda e, *x: e.attention_backward(*x), [d_o, q, k, v, o, lse])
        _, each_k, each_v = run(engine, lambda e, *x: e.attention_backward(*x), [d_o, q, wide_k, wide_v, o, lse])
        assert np.allclose(d_k, each_k.reshape(1, 9, 2, 2, 8).sum(axis=3), atol=1e-5)
        assert np.allclose(d_v, each_v.reshape(1, 9, 2, 2, 8).sum(axis=3), atol=1e-5)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("causal", "window", "padded"), [(True, 0, False), (False, 0, True), (True, 3, True), (False, 3, False)]
)
@pytest.mark.parametrize(("s", "t"), [(6, 6), (4, 7), (7, 4)])
def test_gradient(oracle: CpuEngine, s: int, t: int, causal: bool, window: int, padded: bool) -> None:
    q, k, v, _ = make(2, s, t, 4, 2, 3)
    lengths = oracle.tensor(np.array([t, max(t - 3, 0)], np.int32)) if padded else None
    settings: dict[str, Any] = {"causal": causal, "window": window, "key_lengths": lengths}

    def backward(engine: ComputeEngine, d_o: Any, *inputs: Any) -> Any:
        o, lse = engine.attention(*inputs, **settings)
        return engine.attention_backward(d_o, *inputs, o, lse, **settings)

    check_gradient(oracle, lambda e, *x: e.attention(*x, **settings), backward, [q, k, v], samples=20)


# -- one tensor for q, k and v -----------------------------------------------------------------------------------------
def join(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[b, s, (H + 2 Hkv) D]."""
    return np.ascontiguousarray(np.concatenate([q, k, v], axis=2).reshape(*q.shape[:2], -1))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 8), (4, 2, 7), (3, 1, 16)])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_tensor_gives_the_same_bits(
    vulkan: VulkanEngine, oracle: CpuEngine, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> None:
    q, k, v, d_o = make(2, 33, 33, heads, kv_heads, head_dim)
    lengths = np.array([20, 33], np.int32)
    sizes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads, "causal": causal, "window": 9}
    flat = (2, 33, heads * head_dim)
    for engine in (vulkan, oracle):
        o, lse = run(
            engine, lambda e, *x: e.attention(*x[:3], key_lengths=x[3], causal=causal, window=9), [q, k, v, lengths]
        )
        parts = run(
            engine,
            lambda e, *x: e.attention_backward(*x[:6], key_lengths=x[6], causal=causal, window=9),
            [d_o, q, k, v, o, lse, lengths],
        )
        fused = run(engine, lambda e, x, n: e.attention_qkv(x, key_lengths=n, **sizes), [join(q, k, v), lengths])
        assert np.array_equal(fused[0], o.reshape(flat)) and np.array_equal(fused[1], lse)
        (d_qkv,) = run(
            engine,
            lambda e, *x: e.attention_qkv_backward(*x[:4], key_lengths=x[4], **sizes),
            [d_o.reshape(flat), join(q, k, v), o.reshape(flat), lse, lengths],
        )
        assert np.array_equal(d_qkv, join(*parts))


def test_fused_gradient(oracle: CpuEngine) -> None:
    q, k, v, _ = make(1, 5, 5, 4, 2, 3)
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}

    def backward(engine: ComputeEngine, d_o: Any, qkv: Any) -> Any:
        o, lse = engine.attention_qkv(qkv, **sizes)
        return engine.attention_qkv_backward(d_o, qkv, o, lse, **sizes)

    check_gradient(oracle, lambda e, x: e.attention_qkv(x, **sizes), backward, [join(q, k, v)])


# -- promises ----------------------------------------------------------------------------------------------------------
def results(engine: ComputeEngine, arrays: Arrays) -> Arrays:
    """o, lse and the three gradients."""

    def call(e: ComputeEngine, q: Any, k: Any, v: Any, d_o: Any) -> Any:
        o, lse = e.attention(q, k, v)
        return (o, lse, *e.attention_backward(d_o, q, k, v, o, lse))

    return run(engine, call, arrays)


def test_same_bits_again(vulkan: VulkanEngine) -> None:
    arrays = make(2, 65, 65, 4, 2, 16)
    for first, second in zip(results(vulkan, arrays), results(vulkan, arrays), strict=True):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("head_dim", [7, 33])
def test_tile_width_changes_no_bit(vulkan: VulkanEngine, head_dim: int) -> None:
    arrays = make(1, 70, 70, 2, 1, head_dim)
    expected = results(vulkan, arrays)
    for rows in (1, 2):
        with forced_variant(f"rows{rows}", "attention"):
            for first, second in zip(expected, results(vulkan, arrays), strict=True):
                assert np.array_equal(first, second)


def test_batch_items_do_not_touch(vulkan: VulkanEngine) -> None:
    """An item's bits are those it has alone."""
    arrays = make(3, 17, 17, 2, 1, 8)
    together = results(vulkan, arrays)
    for b in range(3):
        alone = results(vulkan, [a[b : b + 1] for a in arrays])
        assert all(np.array_equal(whole[b : b + 1], one) for whole, one in zip(together, alone, strict=True))


def test_more_rounds_than_a_driver_runs(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """lavapipe 22.3 ends loops after 65,535 rounds: the query heads of a group are then taken in several dispatches."""
    q, k, v, d_o = make(1, 4200, 3, 128, 1, 1)
    o, lse = run(oracle, lambda e, *x: e.attention(*x, causal=False), [q, k, v])
    inputs = [a.astype(np.float32) for a in (d_o, q, k, v, o, lse)]
    seen = np.ones((1, 1, 4200, 3), bool)
    check_op(
        vulkan,
        oracle,
        lambda e, *x: e.attention_backward(*x, causal=False),
        inputs,
        lambda _: backward_bounds(*inputs, seen, 1.0),
    )


def specs() -> Iterator[tuple[list[TensorSpec], int]]:
    """Outputs and temporaries of each op at sequence 1,024, head_dim 64, and the bytes of O."""
    q = TensorSpec((1, 1024, 4, 64))
    lse = TensorSpec((1, 4, 1024))
    settings: dict[str, Any] = {"causal": True, "window": 0, "scale": 0.125}
    yield [*ATTENTION.outputs(q, q, q, None, **settings), *ATTENTION.scratch(q, q, q, None, **settings)], q.nbytes
    inputs = (q, q, q, q, q, lse, None)
    yield [*ATTENTION_BACKWARD.outputs(*inputs, **settings), *ATTENTION_BACKWARD.scratch(*inputs, **settings)], q.nbytes
    qkv, flat = TensorSpec((1, 1024, 768)), TensorSpec((1, 1024, 256))
    settings |= {"num_heads": 4, "num_kv_heads": 4}
    yield [*ATTENTION_QKV.outputs(qkv, None, **settings), *ATTENTION_QKV.scratch(qkv, None, **settings)], q.nbytes
    fused = (flat, qkv, flat, lse, None)
    made = [*ATTENTION_QKV_BACKWARD.outputs(*fused, **settings), *ATTENTION_QKV_BACKWARD.scratch(*fused, **settings)]
    assert made.pop(0) == qkv  # the gradient of the one tensor is as large as the tensor
    yield made, q.nbytes


def test_no_allocation_is_larger_than_o() -> None:
    for made, o_bytes in specs():
        assert all(spec.nbytes <= o_bytes for spec in made)


def test_memory_grows_with_the_sequence_alone() -> None:
    """Forward and backward of 65,536 positions, planned: scores would take 16 GiB a head."""
    with PlanEngine() as plan:
        q = plan.empty((1, 65536, 2, 64))
        k, v, d_o = plan.empty(q.shape), plan.empty(q.shape), plan.empty(q.shape)
        o, lse = plan.attention(q, k, v)
        plan.attention_backward(d_o, q, k, v, o, lse)
        assert plan.pool_stats()["step"].peak_live_bytes <= 8 * q.nbytes + 2 * lse.nbytes


def test_cost_counts_seen_pairs_only() -> None:
    q = TensorSpec((2, 8, 3, 5))
    pair = 2 * 2 * 2 * 3 * 5  # two products of 2 FLOPs, batch, heads, head_dim
    assert ATTENTION.flops(q, q, q, None, causal=True, window=0, scale=1.0) == pair * 36
    assert ATTENTION.flops(q, q, q, None, causal=False, window=0, scale=1.0) == pair * 64
    assert ATTENTION.flops(q, q, q, None, causal=True, window=3, scale=1.0) == pair * (1 + 2 + 3 * 6)


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        ([(1, 4, 8), (1, 4, 2, 4), (1, 4, 2, 4)], {}, "q must be"),
        ([(1, 4, 3, 4), (1, 4, 2, 4), (1, 4, 2, 4)], {}, "cannot share"),
        ([(1, 4, 2, 4), (1, 4, 2, 4), (1, 5, 2, 4)], {}, "one shape"),
        ([(1, 4, 2, 4), (1, 4, 2, 8), (1, 4, 2, 8)], {}, "differ in batch or head_dim"),
        ([(1, 4, 2, 300)] * 3, {}, "head_dim 300"),
        ([(1, 4, 2, 4)] * 3, {"window": -1}, "window -1"),
    ],
)
def test_what_does_not_fit(cpu: CpuEngine, shapes: list[tuple[int, ...]], settings: Any, message: str) -> None:
    tensors = [cpu.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        cpu.attention(*tensors, **settings)


def test_lengths_must_be_integers_of_the_batch(cpu: CpuEngine) -> None:
    q = cpu.zeros((2, 4, 2, 4))
    with pytest.raises(ValueError, match="key_lengths"):
        cpu.attention(q, q, q, key_lengths=cpu.zeros((3,), "int32"))
    with pytest.raises(ValueError, match="key_lengths"):
        cpu.attention(q, q, q, key_lengths=cpu.zeros((2,)))


def test_width_must_divide(cpu: CpuEngine) -> None:
    with pytest.raises(ValueError, match="no multiple"):
        cpu.attention_qkv(cpu.zeros((1, 4, 10)), num_heads=2, num_kv_heads=1)
