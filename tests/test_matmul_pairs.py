"""Matmul kernels that read neighbours in pairs: the same bits, only where sizes and addresses allow it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from vkfold.engine.capabilities import Capabilities
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import Choice, Product, Variant, variants
from vkfold.engine.ops import matmul_launch
from vkfold.engine.ops.matmul import MATMUL
from vkfold.engine.ops.matmul_launch import (
    ACROSS,
    ALL_PAIRS,
    ALONG_K,
    PAIRS_SUBGROUP,
    PLAIN,
    Layout,
    Pairs,
    has_pairs,
    matmul_kernel,
    pairs_of,
)
from vkfold.engine.tensor import Tensor
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine

LARGE = Variant("shuffle", 32, 8, 2)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[VulkanEngine, VulkanEngine]]:
    """One that reads pairs and one that does not."""
    with VulkanEngine() as pairs, VulkanEngine() as plain:
        if not pairs.recorder.in_words or pairs.recorder.subgroup_size != PAIRS_SUBGROUP:
            pytest.skip("this device does not read in pairs")
        plain.recorder.in_words = False
        yield pairs, plain


def used(engine: VulkanEngine) -> set[str]:
    """Names of the kernels of the products so far."""
    return {plan.kernel.name for plan in MatmulChooser.of(engine.recorder).plans.values()}


@pytest.mark.parametrize("letters", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("swapped", ["", "_swapped"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    # the last: groups of eight rows of tiles, one not full, by three columns; lines touched in two batches of three
    [(66, 130, 64), (34, 258, 36), (128, 64, 200), (2, 1030, 128), (298, 130, 132)],
)
def test_same_bits(
    engines: tuple[VulkanEngine, VulkanEngine], letters: str, swapped: str, m: int, n: int, k: int
) -> None:
    rng = np.random.default_rng(m)
    trans_a, trans_b = letters[0] == "T", letters[1] == "T"
    arrays = [
        rng.standard_normal((k, m) if trans_a else (m, k)),
        rng.standard_normal((n, k) if trans_b else (k, n)),
        rng.standard_normal(n),
        rng.standard_normal((m, n)),
    ]
    results: list[list[bytes]] = []
    for engine in engines:
        a, b, bias, residual = (engine.tensor(array) for array in arrays)
        results.append([])
        for variant in variants(Capabilities.of(engine.recorder)):
            with forced_variant(variant.name + swapped):
                y = engine.matmul(
                    a, b, trans_a=trans_a, trans_b=trans_b, bias=bias, activation="silu", residual=residual
                )
                out = engine.copy(residual)
                engine.matmul(a, b, trans_a=trans_a, trans_b=trans_b, out=out, accumulate=True)
                results[-1] += [y.numpy().tobytes(), out.numpy().tobytes()]
        del a, b, bias, residual, y, out
    assert results[0] == results[1]
    assert len(set(results[0])) == 2  # every variant of one order gives the same
    assert any("pairs" in name for name in used(engines[0]))
    assert not any("pairs" in name for name in used(engines[1]))


def test_batches_and_views(engines: tuple[VulkanEngine, VulkanEngine]) -> None:
    rng = np.random.default_rng(0)
    batched, shared = rng.standard_normal((3, 64, 48)), rng.standard_normal((48, 66))
    long = rng.standard_normal(64 * 64 + 1)
    results = []
    for engine in engines:
        x, w, flat = engine.tensor(batched), engine.tensor(shared), engine.tensor(long)
        even, odd = flat.rows(0, 4096).reshape(64, 64), flat.rows(1, 4097).reshape(64, 64)
        made: list[Tensor] = [engine.matmul(x, w), engine.matmul(even, even), engine.matmul(odd, even)]
        results.append([y.numpy().tobytes() for y in made])
        del x, w, flat, even, odd, made
    assert results[0] == results[1]
    plans = MatmulChooser.of(engines[0].recorder).plans
    aligned = {
        key[5]: "pairs" in plan.kernel.name for key, plan in plans.items() if key[0].product.m == 64 == key[0].product.k
    }
    assert aligned == {True: True, False: False}


@pytest.mark.parametrize(
    ("layout", "swapped", "expected"),
    [
        (Layout(Product(1, 64, 64, 64), 0, 0, 64, 1, 1, 64), False, Pairs(ALONG_K, ACROSS)),
        (Layout(Product(1, 64, 64, 64), 0, 0, 64, 1, 1, 64), True, Pairs(ACROSS, ALONG_K)),
        (Layout(Product(1, 64, 64, 64), 0, 0, 64, 1, 64, 1), False, Pairs(ALONG_K, ALONG_K)),
        (Layout(Product(1, 64, 64, 64), 0, 0, 1, 64, 1, 64), False, Pairs(ACROSS, ACROSS)),
        (Layout(Product(1, 64, 65, 64), 0, 0, 64, 1, 1, 65), False, PLAIN),  # odd rows of B
        (Layout(Product(1, 65, 64, 64), 0, 0, 64, 1, 1, 64), False, Pairs(ALONG_K, ACROSS)),
        (Layout(Product(1, 65, 64, 64), 0, 0, 1, 65, 1, 64), False, PLAIN),
        (Layout(Product(1, 64, 64, 63), 0, 0, 63, 1, 1, 64), False, PLAIN),
        (Layout(Product(2, 64, 64, 64), 4097, 0, 64, 1, 1, 64), False, PLAIN),
        (Layout(Product(1, 8, 8, 8), 0, 0, 8, 1, 1, 8), False, PLAIN),  # too small to pay
    ],
)
def test_which_products_are_read_so(
    engines: tuple[VulkanEngine, VulkanEngine], layout: Layout, swapped: bool, expected: Pairs
) -> None:
    assert pairs_of(engines[0].recorder, layout, Choice(LARGE, swapped)) == expected
    assert pairs_of(engines[1].recorder, layout, Choice(LARGE, swapped)) == PLAIN


def test_which_tiles_can_be_read_so() -> None:
    assert all(has_pairs(LARGE, pairs) for pairs in ALL_PAIRS)
    small = Variant("shuffle", 8, 1, 2)  # one slot of rows, one column
    assert [pairs for pairs in ALL_PAIRS if has_pairs(small, pairs)] == [Pairs(ALONG_K, ALONG_K)]
    assert not has_pairs(Variant("broadcast", 32, 8, 2), ALL_PAIRS[0])
    assert not has_pairs(Variant("shuffle", 32, 8, 1), ALL_PAIRS[0])


def test_they_are_compiled_ahead_of_time() -> None:
    digests = {kernel.digest for kernel in MATMUL.kernels()}
    for variant in variants(Capabilities(PAIRS_SUBGROUP, True, "llvmpipe", 25)):
        for pairs in ALL_PAIRS:
            if has_pairs(variant, pairs):
                assert matmul_kernel(variant, PAIRS_SUBGROUP, True, pairs).digest in digests


@pytest.mark.parametrize(("k", "slices"), [(1100, 1), (2200, 2), (4720, 5)])
def test_slices_of_k_change_no_bit(monkeypatch: pytest.MonkeyPatch, k: int, slices: int) -> None:
    """On lavapipe a large product goes through a long k in parts of about 1,024, each of which goes on with C."""
    rng = np.random.default_rng(k)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((33, k), (k, 70)))
    bias = rng.standard_normal(70).astype(np.float32)
    bits, dispatched = [], []
    for least_work in (2**62, 0):
        monkeypatch.setattr(matmul_launch, "_SLICING_PAYS", least_work)
        with VulkanEngine() as engine:
            x, y, z = engine.tensor(a), engine.tensor(b), engine.tensor(bias)
            engine.matmul(x, y, bias=z, activation="gelu")  # compares the kernels first
            engine.flush_batch()
            kernels: list[str] = []
            engine.recorder.trace = kernels.append
            made = engine.matmul(x, y, bias=z, activation="gelu")
            engine.flush_batch()
            engine.recorder.trace = None
            bits.append(made.numpy().view(np.uint32))
            dispatched.append(len(kernels))
            sliced = engine.recorder.driver == "llvmpipe"
    assert dispatched == [1, slices if sliced else 1]
    assert np.array_equal(*bits)
