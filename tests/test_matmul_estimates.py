"""The model that ranks variants of matmul: what is kept of a variant on a device gives what the model says, to the bit.

The choice must not depend on how the model is worked out: a table of measured times is one of these choices.
"""

from __future__ import annotations

import random

import pytest

from vkfold.engine import matmul_variants
from vkfold.engine.capabilities import FRAGMENTS, Capabilities
from vkfold.engine.matmul_variants import (
    PRECISIONS,
    SUBGROUP_SIZES,
    Choice,
    Product,
    all_variants,
    candidates,
    estimate,
    least_estimate,
    rounded_choices,
    rounded_variants,
    split_of,
    tiles_of,
    variants,
)
from vkfold.engine.physical_device import MatrixShape


def modelled(device: Capabilities, product: Product, choice: Choice) -> float:
    """The model, written down from the start."""
    costs = matmul_variants._COSTS_GPU
    if device.driver == "llvmpipe":
        old = device.driver_major < 24
        costs = matmul_variants._COSTS_LAVAPIPE_OLD if old else matmul_variants._COSTS_LAVAPIPE
    elif device.driver == "SwiftShader":
        costs = matmul_variants._COSTS_SWIFTSHADER
    variant, size = choice.variant, device.subgroup_size
    down, across = tiles_of(device, product, choice)
    tiles = product.batch * down * across
    if variant.spread in ("shared", "matrix"):
        workgroup = variant.workgroup_tile
        shared, loaded = workgroup.cost(size)
        speed = {"llvmpipe": 0.5}.get(device.driver, 8.0) if variant.spread == "matrix" else 1.0
        step = workgroup.sums * (costs.multiply / speed) + shared * costs.spread + loaded * costs.load
        step += costs.round / variant.unroll
        waves = -(-tiles * (workgroup.invocations // size) // device.parallel)
        return waves * (product.k * step + workgroup.sums * costs.store)
    slots = -(-variant.tm // size)
    whole = not (product.m % 2 or product.n % 2 or product.k % variant.unroll)
    even = not (variant.unroll % 2 or slots % 2 or variant.tn % 2)
    load = costs.load
    if device.driver == "llvmpipe" and size == 8 and whole and even:
        load *= 0.55
    step = (variant.tn + slots) * load + variant.tm * costs.spread + costs.round / variant.unroll
    step += variant.tm * variant.tn * costs.multiply
    tile = step * product.k / variant.split + variant.tm * variant.tn * costs.store
    return -(-tiles * variant.split // device.parallel) * tile


def some_device(rng: random.Random) -> Capabilities:
    """Of any driver, subgroup size and limits."""
    size = rng.choice((*SUBGROUP_SIZES, 8, 8))
    known = [MatrixShape(p, *FRAGMENTS[size]) for p in PRECISIONS[1:]] if size in FRAGMENTS else []
    return Capabilities(
        size,
        rng.random() < 0.5,
        rng.choice(("llvmpipe", "llvmpipe", "SwiftShader", "a GPU")),
        rng.choice((5, 22, 23, 24, 26)),
        rng.choice((1, 2, 7, 16, 1024)),
        tuple(shape for shape in known if rng.random() < 0.5),
        rng.choice((128, 256, 1024)),
        rng.choice((16384, 32768, 49152)),
    )


def some_size(rng: random.Random) -> int:
    """Odd, even, or a power of two."""
    return rng.choice(
        (rng.randrange(1, 100), rng.randrange(1, 3000), 8 * rng.randrange(1, 600), 2 ** rng.randrange(14))
    )


@pytest.mark.parametrize("seed", range(4))
def test_choices_are_those_of_the_model(seed: int) -> None:
    """Products and devices at random: candidates, every estimate to the bit, and the least one."""
    rng = random.Random(seed)
    for _ in range(600):
        device = some_device(rng)
        product = Product(rng.choice((1, 1, 2, 12)), some_size(rng), some_size(rng), some_size(rng))
        family = [v for v in variants(device, split_of(device, product)) if not v.lacks(device)]
        turns = (False, True) if device.is_cpu else (False,)
        expected = [Choice(v, turn) for v in family if v.least_work <= product.work for turn in turns]
        choices = candidates(device, product)
        assert choices == expected
        times = [modelled(device, product, choice) for choice in expected]
        assert [estimate(device, product, choice) for choice in choices] == times
        assert least_estimate(device, product) == expected[times.index(min(times))]
        for precision in PRECISIONS[1:]:
            rounded = rounded_choices(device, precision, product)
            times = [modelled(device, product, choice) for choice in rounded]
            assert times == sorted(times) == [estimate(device, product, choice) for choice in rounded]


def test_equal_variants_have_equal_names_and_others_do_not() -> None:
    """A name that is kept is that of the fields; copies with other fields have their own."""
    for size in SUBGROUP_SIZES:
        family = (*all_variants(size), *rounded_variants(size))
        assert len({variant.name for variant in family}) == len(family)
        for variant in family:
            assert variant._replace(tm=variant.tm) == variant and repr(variant).startswith("Variant(spread=")
            assert variant._replace(tm=variant.tm).name == variant.name != variant._replace(tm=3 * variant.tm).name
            assert Choice(variant, True).name == variant.name + "_swapped" != Choice(variant).name
