"""Block folds: attention's descriptions against attention written out, others on the device, what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from op_checks import EPS32, check_op

from vkfold.engine.attention_folds import attention_d_kv, attention_d_q, attention_forward
from vkfold.engine.attention_masks import KEYS_OF_QUERIES, QUERIES_OF_KEYS, seen_pairs
from vkfold.engine.attention_scores import alibi, softcap
from vkfold.engine.block_fold import BlockFold, RowSum, SeenRows
from vkfold.engine.block_fold_glsl import LOOPS, Tile, block_fold_glsl
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr import equal, exp, maximum, uniform, variable, variables, where
from vkfold.engine.fold import State, Walk
from vkfold.engine.kernel import Kernel
from vkfold.engine.ops import block_fold_dispatch, block_fold_launch
from vkfold.engine.ops.block_fold_dispatch import fitted, plan_block_fold
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine

QK, W, TOTAL, LARGEST, OLD = variables("qk w total largest old_largest")
NOTHING = equal(TOTAL, 0.0)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([*shape, seed]).standard_normal(shape).astype(np.float32)


# -- attention's descriptions against attention written out ------------------------------------------------------------
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("s", "t"), [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("scored", [False, True])
def test_attention_is_what_it_says(s: int, t: int, causal: bool, scored: bool) -> None:
    """Forward, dQ with delta, dK and dV in float64: one query and head at a time, from the definition of softmax."""
    heads, kv_heads, dim, scale = 4, 2, 5, 0.4
    rng = np.random.default_rng([s, t])
    q, d_o = (rng.standard_normal((1, s, heads, dim)) for _ in range(2))
    k, v = (rng.standard_normal((1, t, kv_heads, dim)) for _ in range(2))
    sinks, slopes = rng.standard_normal(heads), rng.random(heads)
    score = softcap(1.5, alibi()) if scored else None
    o, lse, delta = np.zeros_like(q), np.full((1, heads, s), -np.inf), np.zeros((1, heads, s))
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h in range(heads):
        keys, values = k[0, :, h // 2], v[0, :, h // 2]
        for i in range(s):
            position = t - s + i
            seen = [j for j in range(t) if not causal or j <= position]
            x = np.array([scale * q[0, i, h] @ keys[j] for j in seen])
            y, slope = x, np.ones_like(x)
            if scored:
                y = 1.5 * np.tanh((x - slopes[h] * np.abs(position - np.array(seen))) / 1.5)
                slope = 1 - (y / 1.5) ** 2
            lse[0, h, i] = np.log(np.exp(y).sum() + np.exp(sinks[h]))
            p = np.exp(y - lse[0, h, i])
            o[0, i, h] = p @ values[seen]
            delta[0, h, i] = d_o[0, i, h] @ o[0, i, h]
            d_p = values[seen] @ d_o[0, i, h]  # of the softmax: p * (d_p - sum p d_p), the sink has no value
            d_x = p * (d_p - p @ d_p) * slope * scale
            d_q[0, i, h] = d_x @ keys[seen]
            d_k[0, seen, h // 2] += d_x[:, None] * q[0, i, h]
            d_v[0, seen, h // 2] += p[:, None] * d_o[0, i, h]
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "scale": scale, "head": slopes}
    pairs = seen_pairs(1, s, t, causal=causal, window=0)
    got = attention_forward(score).reference(pairs, sinks=sinks, **given)
    got += attention_d_q(score).reference(pairs, d_o=d_o, o=o, lse=lse, **given)
    got += attention_d_kv(score).reference(pairs.swapaxes(1, 2), d_o=d_o, lse=lse, delta=delta, **given)
    names = ["o", "lse", "d_q", "delta", "d_k", "d_v"]
    for name, mine, want in zip(names, got, (o, lse, d_q, delta, d_k, d_v), strict=True):
        assert mine.dtype == np.float64
        assert np.allclose(mine, want, rtol=1e-11, atol=1e-12), name


def test_the_verb_runs_attention_to_the_same_bits(vulkan: VulkanEngine) -> None:
    q, k, v, d_o = (vulkan.tensor(normal(2, 21, heads, 9, seed=heads)) for heads in (4, 2, 2, 4))
    lengths = vulkan.tensor(np.array([21, 13], np.int32))
    mask: dict[str, Any] = {"causal": True, "window": 8, "key_lengths": lengths}
    o, lse = vulkan.attention(q, k, v, scale=0.3, **mask)
    made = vulkan.block_fold(attention_forward(), q=q, k=k, v=v, scale=0.3, **mask)
    assert np.array_equal(made["o"].numpy(), o.numpy()) and np.array_equal(made["lse"].numpy(), lse.numpy())
    want = vulkan.attention_backward(d_o, q, k, v, o, lse, scale=0.3, **mask)
    rest: dict[str, Any] = {"q": q, "k": k, "v": v, "d_o": d_o, "lse": lse, "scale": 0.3, **mask}
    got = vulkan.block_fold(attention_d_q(), o=o, **rest)
    got |= vulkan.block_fold(attention_d_kv(), delta=got["delta"], **rest)
    for name, gradient in zip(("d_q", "d_k", "d_v"), want, strict=True):
        assert np.array_equal(got[name].numpy(), gradient.numpy())


# -- other folds, on the device against their reference and against NumPy ----------------------------------------------
SQUARED = BlockFold(  # attention without softmax: weights are squares of products
    "squared",
    held=["q"],
    streamed=["k", "v"],
    products={"qk": ("q", "k")},
    walk=Walk([State("total", "sum", QK * QK)]),
    sums=[RowSum("y", "v", QK * QK)],
    rows={"y": variable("y") / maximum(TOTAL, 1e-6)},
    values={"mass": TOTAL},
    seen=KEYS_OF_QUERIES,
)
# Nadaraya-Watson: the mean of v weighted by exp(-|q - k|^2 / (2 width^2)), as q.q - 2 q.k + k.k
_DISTANCE = variable("qq") - 2.0 * QK + variable("kk")
_LOG_WEIGHT = -_DISTANCE / (2.0 * variable("width") * variable("width"))
_DECAY = exp(OLD - LARGEST, nonpositive=True)
GAUSSIAN = BlockFold(
    "gaussian",
    held=["q"],
    streamed=["k", "v"],
    products={"qk": ("q", "k")},
    walk=Walk(
        [
            State("largest", "max", _LOG_WEIGHT),
            State("total", "sum", exp(_LOG_WEIGHT - LARGEST, nonpositive=True), aligned=TOTAL * _DECAY),
        ],
        {"one_over": 1.0 / TOTAL},
    ),
    sums=[RowSum("y", "v", exp(_LOG_WEIGHT - LARGEST, nonpositive=True), aligned=_DECAY * variable("y"))],
    rows={"y": variable("y") * variable("one_over"), "residual": variable("q") - variable("y") * variable("one_over")},
    numbers={"kk": "streamed"},
    scalars=["width"],
    dots={"qq": ("q", "q")},
)
# nothing is summed: the best and the worst product, and the mean of those above a bar of the head, if one is given
BEST = BlockFold(
    "best",
    held=["q", "other"],
    streamed=["k"],
    products={"qk": ("q", "k"), "ok": ("other", "k")},
    walk=Walk([State("largest", "max", QK), State("lowest", "max", -variable("ok")), State("total", "sum", 1.0 * QK)]),
    values={"largest": LARGEST, "lowest": -variable("lowest"), "mean": where(NOTHING, 0.0, TOTAL / LARGEST)},
    numbers={"bar": "head", "own": "held", "theirs": "streamed"},
    absent={"bar": -math.inf, "theirs": 2.0},
    unseen=(variable("bar") > variable("own")) | (variable("theirs") < variable("own")),
)
# two sums of the same streamed row, positions in the weights, folded over all heads of a group
NEAR = BlockFold(
    "near",
    held=["k"],
    streamed=["q"],
    products={"qk": ("k", "q")},
    sums=[
        RowSum("up", "q", where(variable("at") < variable("place"), QK, 0.0) * W),
        RowSum("down", "q", maximum(QK, 0.0) * variable("at") * 0.01),
    ],
    rows={"up": variable("up"), "down": variable("down")},
    numbers={"w": "head"},
    positions={"at": "held", "place": "streamed_end"},
    seen=QUERIES_OF_KEYS,
    shared="held",
)


def on(engine: ComputeEngine, spec: BlockFold, arrays: dict[str, Any], **settings: Any) -> list[np.ndarray]:
    tensors = {name: engine.tensor(a) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}
    return [made.numpy() for made in engine.block_fold(spec, **tensors, **settings).values()]


def compare(vulkan: VulkanEngine, oracle: CpuEngine, spec: BlockFold, arrays: dict[str, Any], **settings: Any) -> Any:
    """What the device gives, after it was held against the reference in float64; sums of n terms: n roundings."""
    names = list(arrays)
    plain = {name: a for name, a in arrays.items() if not isinstance(a, np.ndarray)}
    arrays_only = [a for a in arrays.values() if isinstance(a, np.ndarray)]
    tensors_of = [name for name in names if name not in plain]

    def call(engine: ComputeEngine, *tensors: Any) -> Any:
        made = engine.block_fold(spec, **dict(zip(tensors_of, tensors, strict=True)), **plain, **settings)
        return list(made.values())

    sizes = [n for a in arrays_only if a.ndim == 4 for n in a.shape]
    return check_op(vulkan, oracle, call, arrays_only, 64 * max(sizes) ** 2 * EPS32)


SIZES = [(1, 1, 1), (5, 17, 3), (17, 5, 7), (33, 70, 33), (70, 33, 16), (9, 40, 19)]


@pytest.mark.parametrize(("s", "t", "dim"), SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_squared_attention(vulkan: VulkanEngine, oracle: CpuEngine, s: int, t: int, dim: int, causal: bool) -> None:
    q, k, v = normal(2, s, 4, dim) / dim, normal(2, t, 2, dim), normal(2, t, 2, dim, seed=1)
    y, mass = compare(vulkan, oracle, SQUARED, {"q": q, "k": k, "v": v}, causal=causal)
    seen = (np.arange(t) <= t - s + np.arange(s)[:, None]) | (not causal)
    k, v = (np.repeat(np.moveaxis(x.astype(np.float64), 2, 1), 2, axis=1) for x in (k, v))
    weights = np.where(seen, (np.moveaxis(q.astype(np.float64), 2, 1) @ k.swapaxes(-1, -2)) ** 2, 0)
    assert np.allclose(mass, weights.sum(axis=-1), rtol=1e-4, atol=1e-6)
    want = np.moveaxis(weights @ v / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-6), 1, 2)
    assert np.allclose(y, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("s", "t", "dim"), SIZES)
def test_gaussian_regression(vulkan: VulkanEngine, oracle: CpuEngine, s: int, t: int, dim: int) -> None:
    q, k, v = normal(1, s, 3, dim), normal(1, t, 3, dim), normal(1, t, 3, dim, seed=1)
    kk = np.moveaxis((k**2).sum(axis=-1), 2, 1).astype(np.float32)
    width = math.sqrt(dim)
    y, residual = compare(vulkan, oracle, GAUSSIAN, {"q": q, "k": k, "v": v, "kk": kk, "width": width})
    distance = ((q[:, :, None].astype(np.float64) - k[:, None]) ** 2).sum(axis=-1)
    weights = np.exp(-distance / (2 * width**2))
    want = np.einsum("bsth,bthd->bshd", weights, v.astype(np.float64)) / weights.sum(axis=2)[..., None]
    assert np.allclose(y, want, rtol=1e-3, atol=1e-4) and np.allclose(residual, q - want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("s", "t", "dim"), SIZES)
def test_best_products(vulkan: VulkanEngine, oracle: CpuEngine, s: int, t: int, dim: int) -> None:
    q, other, k = normal(2, s, 2, dim), normal(2, s, 2, dim, seed=1), normal(2, t, 1, dim)
    own = np.abs(normal(2, 2, s))
    arrays: dict[str, Any] = {"q": q, "other": other, "k": k, "own": own}
    bar, theirs = np.array([0.5, -3.0], np.float32), np.abs(normal(2, 1, t, seed=5))
    for given in ({}, {"bar": bar}, {"theirs": theirs}, {"bar": bar, "theirs": theirs}):
        largest, lowest, _ = compare(vulkan, oracle, BEST, arrays | given)
        seen = given.get("theirs", np.full((2, 1, t), 2.0))[:, :, None, :] >= own[..., None]
        seen = seen & (given.get("bar", np.full(2, -np.inf))[:, None, None] <= own[..., None])
        qk, ok = (np.einsum("bshd,btgd->bhst", x.astype(np.float64), k) for x in (q, other))
        assert np.allclose(largest, np.where(seen, qk, -np.inf).max(axis=-1), rtol=1e-4, atol=1e-4)
        assert np.allclose(lowest, np.where(seen, ok, np.inf).min(axis=-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("s", "t", "dim"), SIZES)
def test_groups_and_positions(
    vulkan: VulkanEngine, oracle: CpuEngine, monkeypatch: pytest.MonkeyPatch, s: int, t: int, dim: int
) -> None:
    """Held heads fold over their group, in one dispatch or, to the same bits, in several; every tile has those bits."""
    k, q, w = normal(2, t, 2, dim), normal(2, s, 6, dim, seed=1), normal(6)
    lengths = np.array([t, max(t - 3, 1)], np.int32)
    arrays: dict[str, Any] = {"k": k, "q": q, "w": w, "key_lengths": lengths}
    made = compare(vulkan, oracle, NEAR, arrays, causal=True, window=20)
    for rows in (1, 2):
        with monkeypatch.context() as patch, forced_variant(f"rows{rows}", "block_fold"):
            patch.setattr(block_fold_dispatch, "MAX_ROUNDS", 1)  # one head of the group a dispatch
            again = on(vulkan, NEAR, arrays, causal=True, window=20)
        assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    """Every block fold takes this tile, as its call can have it, unchecked."""
    monkeypatch.setattr(
        block_fold_launch,
        "_plan",
        lambda gpu, call, aligned: plan_block_fold(gpu, call, fitted(gpu, call, tile, aligned)),
    )


@pytest.mark.parametrize("dim", [12, 16, 24])
def test_kernels_of_other_drivers_have_the_same_bits(
    vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    """Loops unrolled, rolled, written out; rows read as words and fetched ahead, one by one, from odd addresses. With
    a NaN, for which tiles are folded again."""
    arrays = {"q": normal(2, 37, 2, dim), "k": normal(2, 45, 2, dim), "v": normal(2, 45, 2, dim, seed=1)}
    arrays["v"][1, 30, 0, 3] = math.nan
    results = [on(vulkan, SQUARED, arrays, causal=True)]
    assert np.isnan(results[0][0]).any(axis=(0, 2, 3)).tolist() == [row >= 22 for row in range(37)]
    later = {name: vulkan.tensor(np.append(0.0, x))[1:].reshape(x.shape) for name, x in arrays.items()}
    assert all(tensor.address % 8 == 4 for tensor in later.values())
    results.append([made.numpy() for made in vulkan.block_fold(SQUARED, **later, causal=True).values()])
    for words in {False, vulkan.recorder.in_words}:
        monkeypatch.setattr(vulkan.recorder, "in_words", words)
        for loops in LOOPS:
            use_tile(monkeypatch, Tile(min(vulkan.recorder.subgroup_size, 8), 1, loops))
            results.append(on(vulkan, SQUARED, arrays, causal=True))
    for other in results[1:]:
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results[0], other, strict=True))


def launched(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that are dispatched from now on."""
    kernels: list[Kernel] = []
    dispatch = engine.recorder.dispatch

    def noted(kernel: Kernel, *args: Any) -> None:
        if kernel not in kernels:  # a dispatch may be recorded in parts
            kernels.append(kernel)
        dispatch(kernel, *args)

    monkeypatch.setattr(engine.recorder, "dispatch", noted)
    return kernels


def test_without_a_compiler_loops_stay_rolled(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written-out kernels are not shipped: where they cannot be compiled, one with the same bits stands in."""
    arrays = {"q": normal(1, 20, 2, 8), "k": normal(1, 31, 2, 8), "v": normal(1, 31, 2, 8, seed=1)}
    tile = Tile(min(vulkan.recorder.subgroup_size, 8), 2, "written")
    use_tile(monkeypatch, tile)
    kernels = launched(vulkan, monkeypatch)
    made = on(vulkan, SQUARED, arrays)
    monkeypatch.setattr(block_fold_dispatch, "is_available", lambda kernel: "written" not in kernel.name)
    again = on(vulkan, SQUARED, arrays)
    assert [kernel.name for kernel in kernels] == ["squared_8_r2_written", "squared_8_r4_rolled"]
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))


def test_pairs_are_read_where_everything_is_even(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a driver that gains by it; an odd head_dim, or an odd place in a tensor, is read one by one."""
    kernels = launched(vulkan, monkeypatch)
    for dim in (16, 7):
        on(vulkan, SQUARED, {"q": normal(1, 3, 2, dim), "k": normal(1, 3, 2, dim), "v": normal(1, 3, 2, dim, seed=1)})
    vulkan.attention_qkv(vulkan.tensor(normal(1, 5, 3 * 9)), num_heads=1, num_kv_heads=1)[0].numpy()
    assert [kernel.defines["PAIRS"] for kernel in kernels] == [vulkan.recorder.in_words, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_nobody_sees_are_not_read(vulkan: VulkanEngine, oracle: CpuEngine, bad: float) -> None:
    """Queries before the first key and keys past the length may hold anything, at odd and even places."""
    for s, t, length in [(12, 3, 3), (13, 3, 3), (4, 9, 5), (4, 9, 6)]:
        q, k, v, d_o = (normal(1, rows, 2, 8, seed=i) for i, rows in enumerate((s, t, t, s)))
        q[:, : max(s - t, 0)], d_o[:, : max(s - t, 0)] = bad, bad
        k[:, length:], v[:, length:] = bad, bad
        found = []
        for engine in (vulkan, oracle):
            x = [engine.tensor(a) for a in (q, k, v, d_o)]
            mask: dict[str, Any] = {"causal": True, "key_lengths": engine.tensor(np.array([length], np.int32))}
            o, lse = engine.attention(*x[:3], **mask)
            found.append([a.numpy() for a in engine.attention_backward(x[3], *x[:3], o, lse, **mask)[1:]])
        for made, want in zip(*found, strict=True):
            assert np.isfinite(made).all() and np.allclose(made, want, rtol=1e-4, atol=1e-5)


def test_the_reference_adds_what_is_seen_only(cpu: CpuEngine) -> None:
    q, k, v = (normal(1, 6, 1, 4, seed=i) for i in range(3))
    v[0, 3, 0, 1], v[0, 5, 0, 0] = math.nan, math.inf
    o = cpu.attention(*(cpu.tensor(a) for a in (q, k, v)), causal=True)[0].numpy()[0, :, 0]
    assert np.argwhere(np.isnan(o)).tolist() == [[3, 1], [4, 1], [5, 1]]
    assert np.argwhere(np.isinf(o)).tolist() == [[5, 0]]


# -- what is refused ---------------------------------------------------------------------------------------------------
def spec_with(**more: Any) -> BlockFold:
    base: dict[str, Any] = {"held": ["q"], "streamed": ["k"], "products": {"qk": ("q", "k")}, "values": {"y": TOTAL}}
    base["walk"] = Walk([State("total", "sum", QK)])
    return BlockFold("mine", **base | more)


def test_descriptions_that_cannot_be() -> None:
    y, soft = variable("y"), Walk([State("largest", "max", QK)])
    for change, message in [
        ({"values": {"y": QK}}, "y depends on qk; known there are total"),
        ({"walk": Walk([State("total", "mean", QK)])}, "state total is a sum, or a max"),
        ({"walk": Walk([State("total", "sum", variable("z"))])}, "total depends on z"),
        ({"walk": Walk([*soft.states, State("total", "sum", QK * LARGEST)])}, "total depends on largest"),
        ({"walk": Walk([State("total", "sum", QK * uniform(1))])}, "random numbers"),
        ({"walk": Walk([State("total", "sum", equal(QK, 0.0))])}, "needed is a number"),
        ({"unseen": QK}, "needed is a condition"),
        ({"unseen": equal(QK, 0.0)}, "unseen depends on qk"),
        ({"products": {"qk": ("k", "q")}}, "needed are a held and a streamed row"),
        ({"products": {}}, "needs a held row, a streamed row and a product"),
        ({"values": {}}, "no output"),
        ({"shared": "both"}, "shared is 'both'"),
        ({"numbers": {"w": "row"}}, "w is 'row', not one of held, streamed, head"),
        ({"positions": {"at": "here"}}, "at is 'here', not one of held, streamed"),
        ({"numbers": {"q": "held"}}, "q names more than one thing"),
        ({"values": {"q": TOTAL}}, "q names more than one thing"),
        ({"numbers": {"_w": "held"}}, "underscore"),
        ({"absent": {"w": 1.0}}, "absent is of w"),
        ({"dots": {"qq": ("q", "k")}}, "needed are two held rows"),
        ({"start": {"w": TOTAL}}, "start is given for 'w'"),
        ({"sums": [RowSum("y", "q", QK)]}, "no streamed row"),
        (
            {"sums": [RowSum("y", "k", QK, aligned=y + LARGEST)], "walk": soft, "values": {"z": LARGEST}},
            "y \\* a factor",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            spec_with(**change)
    with pytest.raises(ValueError, match="cannot go on"):
        block_fold_glsl(spec_with(), continues=True)


def test_sums_are_aligned_by_a_maximum_only() -> None:
    """Else each block would multiply the sum, and results would depend on how rows are cut."""
    y, soft = variable("y"), State("largest", "max", QK)
    for walk in ([State("total", "sum", QK, TOTAL * 2.0)], [soft, State("total", "sum", QK, TOTAL * 2.0)]):
        with pytest.raises(ValueError, match=r"total is aligned by .* depends on no maximum: name a max state before"):
            spec_with(walk=Walk(walk))
    with pytest.raises(ValueError, match=r"y is aligned by .* depends on no maximum"):
        spec_with(sums=[RowSum("y", "k", QK, y * 2.0)])


@pytest.mark.parametrize("name", ["flags", "num_held", "num_streamed", "heads", "members", "p_q", "_x", "a b", ""])
def test_strides_that_cannot_be(name: str) -> None:
    with pytest.raises(ValueError, match=f"block fold 'mine': stride of q.*{name}"):
        spec_with(strides={"q": name})


def test_strides_belong_to_rows() -> None:
    assert spec_with(strides={"q": "q_row"}).stride_of("q") == "q_row"
    with pytest.raises(ValueError, match="strides are given for 'zz', which is no row; those are q, k"):
        spec_with(strides={"zz": "held_row"})
    with pytest.raises(TypeError, match="stride of q is 3, needed is a name"):
        spec_with(strides={"q": 3})


def test_descriptions_of_the_wrong_type() -> None:
    for change, message in [
        ({"values": "tt"}, "values is 'tt', needed is a dict"),
        ({"values": {"y": "tt"}}, "y is 'tt', needed is an expression"),
        ({"sums": [RowSum("y", "k", 3.0)]}, "y is 3.0, needed is an expression"),  # type: ignore[arg-type]
        ({"sums": [RowSum("y", "k", QK, 2.0)]}, "aligned of y is 2.0, needed"),  # type: ignore[arg-type]
        ({"sums": [QK]}, "one of sums is .*, needed is a RowSum"),
        ({"sums": QK}, "sums is .*, needed is a list"),
        ({"walk": [State("total", "sum", QK)]}, "walk is .*, needed is a Walk"),
        ({"walk": Walk([QK])}, "one of walk.states is .*, needed is a State"),  # type: ignore[list-item]
        ({"numbers": ["n"]}, "numbers is .*'n'.*, needed is a dict"),
        ({"seen": "causal"}, "seen is 'causal', needed is a SeenRows such as KEYS_OF_QUERIES"),
        ({"numbers": {"n": "held"}, "absent": {"n": "x"}}, "absent of n is 'x', needed is a number"),
        ({"held": "q"}, "held is 'q', needed is a list"),
        ({"streamed": "k"}, "streamed is 'k', needed is a list"),
        ({"unseen": True}, "unseen is True, needed is an expression"),
        ({"walk": Walk(5)}, "walk.states is 5, needed is a list"),  # type: ignore[arg-type]
        ({"walk": Walk([], ["r"])}, "walk.results is .*'r'.*, needed is a dict"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(TypeError, match=message):
            spec_with(**change)
    with pytest.raises(ValueError, match=r"products: qk is .*, needed are the names of two rows"):
        spec_with(products={"qk": ("q", "k", "k")})
    for change in ({"numbers": {"n": ["held"]}}, {"positions": {"n": ["held"]}}):
        with pytest.raises(ValueError, match=r"n is \['held'\], not one of held, streamed"):
            spec_with(**change)
    with pytest.raises(ValueError, match="absent is of 5: at most 4 numbers"):
        spec_with(absent={5: 1.0})
    for change, message in [
        ({"tensors": "key_lengths"}, "seen: tensors is 'key_lengths', needed is a list, such as"),
        ({"tensors": [5]}, "seen: one of tensors is 5, needed is a str"),
        ({"defines": ["A"]}, "seen: defines is .*'A'.*, needed is a dict by name"),
        ({"defines": {"A": "x"}}, "seen: define A is 'x', needed is a whole number by name"),
    ]:
        with pytest.raises(TypeError, match=message):
            SeenRows("attention_masks.glsl", **change)  # type: ignore[arg-type]
    one: dict[str, Any] = {"held": ["q"], "streamed": ["k"], "products": {"qk": ("q", "k")}}
    with pytest.raises(TypeError, match="name is 5, needed is a str"):
        BlockFold(5, **one)  # type: ignore[arg-type]
    for name in ("", "../x", "a\n*/b"):
        with pytest.raises(ValueError, match=r"name is .* use ASCII letters"):
            BlockFold(name, **one)


def test_misuse_of_the_verb(cpu: CpuEngine) -> None:
    q, k = cpu.tensor(normal(1, 3, 4, 5)), cpu.tensor(normal(1, 6, 2, 5))
    spec = spec_with(numbers={"w": "streamed"}, scalars=["by"])
    good: dict[str, Any] = {"q": q, "k": k, "w": cpu.tensor(normal(1, 2, 6)), "by": 1.0}
    for change, message in [
        ({"w": cpu.tensor(normal(1, 6, 2))}, r"w has shape \(1, 6, 2\), needed is \(1, 2, 6\)"),
        ({"w": None}, "w is None, needed is a tensor"),
        ({"k": cpu.tensor(normal(1, 6, 3, 5)), "w": cpu.tensor(normal(1, 3, 6))}, "4 heads of held rows and 3"),
        ({"k": cpu.tensor(normal(6, 2, 5))}, "not \\[batch, rows, heads, head_dim\\]"),
        ({"k": cpu.tensor(normal(1, 6, 2, 4))}, "differ in batch or head_dim"),
        ({"q": cpu.zeros((1, 3, 4, 5), "int32")}, "q is int32, needed is float32"),
        ({"z": q}, "nothing is called z; it takes q, k, w, by"),
        ({"causal": True}, "has no mask"),
        ({"by": 1e300}, "does not fit float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            cpu.block_fold(spec, **good | change)
    with pytest.raises(ValueError, match="no value for by, w"):
        cpu.block_fold(spec, q=q, k=k)
    with pytest.raises(TypeError, match="is no BlockFold"):
        cpu.block_fold("attention", q=q)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window -1 is negative"):
        cpu.block_fold(SQUARED, q=q, k=k, v=k, window=-1)
    with pytest.raises(ValueError, match="key_lengths has shape"):
        cpu.block_fold(SQUARED, q=q, k=k, v=k, key_lengths=cpu.zeros((2,), "int32"))
    with pytest.raises(ValueError, match="causal cannot name"):
        cpu.block_fold(spec_with(scalars=["causal"]), q=q, k=k)
