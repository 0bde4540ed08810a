"""NaN and infinities in block folds: they reach what sees them and nothing else, whatever the variant."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from test_block_fold import NEAR, SQUARED, on
from variant_checks import HEADS, MASKS, SEQ

from vkfold.engine.attention_folds import attention_d_kv, attention_forward
from vkfold.engine.attention_masks import KEYS_OF_QUERIES
from vkfold.engine.block_fold import BlockFold, RowSum
from vkfold.engine.block_fold_call import BlockCall, BlockSizes
from vkfold.engine.block_fold_choice import BlockFoldChooser
from vkfold.engine.block_fold_glsl import Tile
from vkfold.engine.block_fold_variants import tile_variants
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.expr import variable, variables
from vkfold.engine.ops import block_fold_dispatch
from vkfold.engine.ops.block_fold_dispatch import folds_again
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine

Arrays = dict[str, np.ndarray]
KV_HEADS = 2


def inputs(head_dim: int, keys: int = SEQ, seed: int = 0) -> Arrays:
    rng = np.random.default_rng([head_dim, keys, seed])
    sizes = {"q": (SEQ, HEADS), "k": (keys, KV_HEADS), "v": (keys, KV_HEADS), "d_o": (SEQ, HEADS)}
    return {name: rng.standard_normal((1, *size, head_dim)).astype(np.float32) for name, size in sizes.items()}


def spoil(arrays: Arrays, count: int, seed: int) -> None:
    """NaN and infinities at a few places of any of the arrays: single elements, or a whole row of a head."""
    rng = np.random.default_rng([count, seed])
    for _ in range(count):
        array = arrays[rng.choice(list(arrays))]
        row, head, element = (int(rng.integers(n)) for n in array.shape[1:])
        where = slice(None) if rng.random() < 0.3 else element
        array[0, row, head, where] = rng.choice([math.nan, math.inf, -math.inf])


def attention(engine: ComputeEngine, arrays: Arrays, **mask: Any) -> list[np.ndarray]:
    """o, lse and the three gradients."""
    q, k, v, d_o = (engine.tensor(arrays[name]) for name in ("q", "k", "v", "d_o"))
    mask = {name: engine.tensor(x) if isinstance(x, np.ndarray) else x for name, x in mask.items() if name != "keys"}
    o, lse = engine.attention(q, k, v, **mask)
    return [made.numpy() for made in (o, lse, *engine.attention_backward(d_o, q, k, v, o, lse, **mask))]


def names_of(engine: VulkanEngine, head_dim: int) -> list[str]:
    device = BlockFoldChooser.of(engine.recorder).device
    return [variant.name for variant in tile_variants(device, "attention_forward", head_dim)]


def check(engine: VulkanEngine, oracle: CpuEngine, arrays: Arrays, **mask: Any) -> None:
    """All variants to the same bits, NaN apart, whose bits say nothing; not finite where the reference is not."""
    found = []
    for name in names_of(engine, arrays["q"].shape[3]):
        with forced_variant(name, "attention"):
            found.append(attention(engine, arrays, **mask))
    assert len(found) >= 3
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert np.array_equal(one, two, equal_nan=True)
    for made, want in zip(found[0], attention(oracle, arrays, **mask), strict=True):
        assert np.array_equal(np.isfinite(made), np.isfinite(want))
        seen = np.isfinite(want)
        assert np.allclose(made[seen], want[seen], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MASKS)
def test_attention(vulkan: VulkanEngine, oracle: CpuEngine, name: str) -> None:
    """One bad number, then several, at any place of q, k, v and d_o, forward and backward."""
    mask = MASKS[name]
    for seed, count in enumerate([1, 1, 1, 1, 2, 3, 8]):
        arrays = inputs(12, mask.get("keys", SEQ), seed)
        spoil(arrays, count, seed)
        check(vulkan, oracle, arrays, **mask)


def test_attention_in_words(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Rows that lavapipe reads two numbers at a time."""
    arrays = inputs(16)
    spoil(arrays, 3, 0)
    check(vulkan, oracle, arrays)


# A pair counts by numbers of both sides, which is known of no held row or streamed row alone.
WEIGHT, OWN, THEIRS = variables("qk own theirs")
CHOSEN = BlockFold(
    "chosen_pairs",
    held=["q"],
    streamed=["k", "v"],
    products={"qk": ("q", "k")},
    sums=[RowSum("of_v", "v", WEIGHT), RowSum("of_k", "k", WEIGHT * WEIGHT)],
    rows={"of_v": variable("of_v"), "of_k": variable("of_k")},
    numbers={"own": "held", "theirs": "streamed"},
    unseen=THEIRS < OWN,
    seen=KEYS_OF_QUERIES,
)


def fold_inputs(spec: BlockFold, dim: int, seed: int) -> dict[str, Any]:
    """Of 37 held and 45 streamed rows, 2 held heads; spoiled in streamed rows."""
    rng = np.random.default_rng([dim, seed])

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    held, streamed = (37, 2), (45, 6 if spec.shared == "held" else 1)
    arrays: dict[str, Any] = {name: normal(1, *held, dim) for name in spec.held}
    rows = {name: normal(1, *streamed, dim) for name in spec.streamed}
    spoil(rows, 1 + seed, seed)
    shapes = {"held": (1, *held[::-1]), "streamed": (1, *streamed[::-1]), "head": (6,)}
    return arrays | rows | {name: normal(*shapes[kind]) for name, kind in spec.numbers.items()}


@pytest.mark.parametrize(("spec", "heads"), [(SQUARED, 1), (CHOSEN, 1), (NEAR, 3), (NEAR, 1)])
def test_folds_of_your_own(
    vulkan: VulkanEngine, oracle: CpuEngine, monkeypatch: pytest.MonkeyPatch, spec: BlockFold, heads: int
) -> None:
    """Conditions of pairs, and sums that go on from what an earlier dispatch wrote. Infinities stay what they are."""
    monkeypatch.setattr(block_fold_dispatch, "heads_a_dispatch", lambda call: heads)
    plans = BlockFoldChooser.of(vulkan.recorder).plans
    for seed in range(6):
        arrays = fold_inputs(spec, 7, seed)
        plans.clear()
        found = []
        for name in names_of(vulkan, 7):
            with forced_variant(name, "block_fold"):
                found.append(on(vulkan, spec, arrays, causal=True, window=20))
        for made in found:
            for one, two, want in zip(made, found[0], on(oracle, spec, arrays, causal=True, window=20), strict=True):
                assert np.array_equal(one, two, equal_nan=True)
                finite = np.isfinite(want)
                assert np.array_equal(one[~finite], want[~finite], equal_nan=True)
                assert np.allclose(one[finite], want[finite], rtol=1e-3, atol=1e-3)
    plans.clear()


def test_loops_that_would_be_cut_short(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On lavapipe a tile is folded once where its turns are more rounds than a driver runs; what is finite has the same
    bits, and what sees a bad number is not finite."""
    call = BlockCall(attention_forward(), BlockSizes(1, 40, 3900, 4, 2, 64), (256, 128, 128))
    for rows, most in [(4, 3900), (2, 7600), (1, 14400)]:
        tile = Tile(8, rows, "unrolled")
        for streamed, fits in [(most, True), (most + 200, False)]:
            long = call._replace(sizes=call.sizes._replace(num_streamed=streamed))
            assert folds_again("llvmpipe", long, tile) == fits
            assert folds_again("a GPU", long, tile)
    group = BlockCall(attention_d_kv(), BlockSizes(1, 40, 2000, 2, 4, 64), (128, 256, 256))
    assert not folds_again("llvmpipe", group, Tile(8, 4, "unrolled"))  # two heads, one after the other
    arrays = inputs(12)
    arrays["v"][0, 20, 0, 3] = math.nan
    plans = BlockFoldChooser.of(vulkan.recorder).plans
    results = []
    for once in (False, True):
        plans.clear()
        monkeypatch.setattr(block_fold_dispatch, "folds_again", lambda *of, once=once: not once)
        results.append(attention(vulkan, arrays)[0])
    plans.clear()
    bad = np.isnan(results[0])
    assert np.argwhere(bad)[:, 1].min() == 20 and bad[0, 20:, :2, 3].all() and bad.sum() == 40
    assert np.isnan(results[1])[bad].all()
    good = np.isfinite(results[1])
    assert np.array_equal(results[0][good], results[1][good])
