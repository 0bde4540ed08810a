"""Variants of matmul: one accumulation order has one result to the bit; the choice is a pure function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from vkfold.engine.matmul_variants import (
    Capabilities,
    Choice,
    Product,
    Variant,
    all_variants,
    candidates,
    estimate,
    least_estimate,
    split_of,
    tiles_of,
    variants,
)
from vkfold.engine.ops.matmul_launch import matmul_kernel
from vkfold.engine.tensor import Tensor
from vkfold.engine.variant_choice import MatmulChooser, forced_by_switch, forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine

from .op_checks import EPS32

TRANSPOSES = list(itertools.product((False, True), repeat=2))
OLD, NEW = Capabilities(8, True, "llvmpipe", 22, 4), Capabilities(8, True, "llvmpipe", 25, 4)
SWIFTSHADER, GPU = Capabilities(4, True, "SwiftShader", 5, 4), Capabilities(32, False, "a GPU", 1)


class Case:
    """One product with everything around it, on tensors of the engine."""

    def __init__(self, engine: VulkanEngine, m: int, n: int, k: int, trans_a: bool, trans_b: bool, batch: int) -> None:
        rng = np.random.default_rng(m * n * k + batch)
        self.engine, self.trans_a, self.trans_b = engine, trans_a, trans_b
        lead = (batch,) if batch > 1 else ()
        a, b = ((k, m) if trans_a else (m, k)), ((n, k) if trans_b else (k, n))
        shapes = {"a": (*lead, *a), "b": (*lead, *b), "bias": (n,), "residual": (*lead, m, n), "out": (*lead, m, n)}
        self.arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}

    def results(self) -> Iterator[np.ndarray]:
        """Plain, with every epilogue, and accumulated."""
        t: dict[str, Tensor] = {name: self.engine.tensor(array) for name, array in self.arrays.items()}
        layout = {"trans_a": self.trans_a, "trans_b": self.trans_b}
        yield self.engine.matmul(t["a"], t["b"], **layout).numpy()
        yield self.engine.matmul(
            t["a"], t["b"], bias=t["bias"], activation="gelu", residual=t["residual"], **layout
        ).numpy()
        yield self.engine.matmul(
            t["a"], t["b"], bias=t["bias"], out=t["out"], accumulate=True, activation="relu", **layout
        ).numpy()

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """The plain product and |A| |B| in float64."""
        a, b = (self.arrays[name].astype(np.float64) for name in "ab")
        a, b = np.swapaxes(a, -1, -2) if self.trans_a else a, np.swapaxes(b, -1, -2) if self.trans_b else b
        return a @ b, np.abs(a) @ np.abs(b)


def own_choices(engine: VulkanEngine, m: int, n: int, k: int, batch: int) -> list[Choice]:
    """All variants of this device's order for a shape, swapped and not; the large ones too, which need more work."""
    device = MatmulChooser.of(engine.recorder).device
    family = variants(device, split_of(device, Product(batch, m, n, k)))
    return [Choice(variant, swapped) for variant in family for swapped in (False, True)]


@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
@pytest.mark.parametrize("m,n,k,batch", [(37, 70, 53, 1), (3, 5, 7, 1), (34, 17, 18, 3)])
def test_variants_agree_to_the_bit(
    vulkan: VulkanEngine, m: int, n: int, k: int, batch: int, trans_a: bool, trans_b: bool
) -> None:
    """Every tile, lanes along columns and along rows, whatever the layout, the epilogue, the batch."""
    case = Case(vulkan, m, n, k, trans_a, trans_b, batch)
    results = {}
    for choice in own_choices(vulkan, m, n, k, batch):
        with forced_variant(choice.name):
            results[choice.name] = list(case.results())
    assert len(results) > 4
    (first_name, first), *others = results.items()
    exact, magnitude = case.exact()
    assert np.all(np.abs(first[0] - exact) <= 2 * k * EPS32 * magnitude), first_name
    for name, other in others:
        for one, two in zip(first, other, strict=True):
            assert np.array_equal(one.view(np.uint32), two.view(np.uint32)), f"{name} differs from {first_name}"


def test_rounding_below_zero_keeps_its_sign(vulkan: VulkanEngine) -> None:
    """What a round reaches beyond k adds nothing: a sum of -0 stays -0, an infinity in B does not become NaN."""
    bits = []
    for choice in own_choices(vulkan, 9, 9, 5, 1):
        a, b = np.full((9, 5), -(2.0**-100), np.float32), np.full((5, 9), 2.0**-100, np.float32)
        b[4, 3] = np.inf
        with forced_variant(choice.name):
            result = (vulkan.tensor(a) @ vulkan.tensor(b)).numpy()
        assert np.isneginf(result[:, 3]).all()
        bits.append(result.view(np.uint32))
    assert all(np.array_equal(bits[0], other) for other in bits)


@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
def test_orders_of_other_devices_run_here(vulkan: VulkanEngine, trans_a: bool, trans_b: bool) -> None:
    """Split k, as a GPU may take it, and its plain tiles: right here too, and equal within an order."""
    size = vulkan.recorder.subgroup_size
    case = Case(vulkan, 21, 35, 77, trans_a, trans_b, 1)
    exact, magnitude = case.exact()
    by_order: dict[int, list[list[np.ndarray]]] = {}
    for variant in all_variants(size):
        if variant.spread == "broadcast" and variant.tm * variant.tn <= 32 and not variant.written:
            with forced_variant(variant.name):
                by_order.setdefault(variant.split, []).append(list(case.results()))
    assert len(by_order) == 2 and min(by_order) == 1
    for results in by_order.values():
        assert len(results) > 1
        assert np.all(np.abs(results[0][0] - exact) <= 2 * 77 * EPS32 * magnitude)
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert np.array_equal(one.view(np.uint32), two.view(np.uint32))


def test_choice_is_by_shape_and_device() -> None:
    """Large products take the largest tile, small ones fill the device with smaller ones; narrow ones turn around."""
    for device in (OLD, NEW, SWIFTSHADER, GPU):
        family = variants(device)
        large = least_estimate(device, Product(1, 4096, 4096, 64)).variant
        assert large.tm * large.tn == max(v.tm * v.tn for v in family)
        small = least_estimate(device, Product(1, 4, 8, 64))
        assert small.variant.tm * small.variant.tn < large.tm * large.tn
        assert least_estimate(device, Product(1, 4, 8, 64)) == small
    assert least_estimate(OLD, Product(1, 1000, 9, 257)).swapped
    assert not least_estimate(OLD, Product(1, 9, 1000, 257)).swapped
    assert not any(choice.swapped for choice in candidates(GPU, Product(1, 1000, 9, 257)))


def test_estimates_count_padding_and_tiles() -> None:
    """One row more than a tile holds costs a whole tile more."""
    choice = Choice(Variant("shuffle", 8, 8, 2))
    assert tiles_of(OLD, Product(1, 16, 64, 32), choice) == (2, 1)
    assert tiles_of(OLD, Product(1, 17, 65, 32), choice) == (3, 2)
    assert tiles_of(OLD, Product(1, 17, 65, 32), Choice(choice.variant, True)) == (9, 1)
    one, more = (estimate(OLD, Product(64, m, 64, 32), choice) for m in (8, 9))
    assert more == 2 * one


def test_order_is_a_function_of_shape_and_device() -> None:
    """k is split only on GPUs, for few and long sums; all candidates of a product have its order."""
    long = Product(1, 64, 64, 4096)
    assert [split_of(device, long) for device in (OLD, NEW, SWIFTSHADER, GPU)] == [1, 1, 1, 4]
    assert split_of(GPU, Product(1, 4096, 4096, 4096)) == split_of(GPU, Product(1, 64, 64, 64)) == 1
    assert split_of(GPU._replace(subgroup_size=64), long) == 2
    for device in (OLD, GPU, GPU._replace(subgroup_size=64)):
        for product in (long, Product(1, 512, 512, 512), Product(3, 5, 7, 9)):
            splits = {choice.variant.split for choice in candidates(device, product)}
            assert splits == {split_of(device, product)}


def test_forcing(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By context or by VKFOLD_VARIANT; an unknown name fails and says what there is."""
    chooser = MatmulChooser.of(vulkan.recorder)
    product = Product(1, 64, 64, 64)
    name = variants(chooser.device)[-1].name
    monkeypatch.setenv("VKFOLD_VARIANT", f"attention=x, matmul={name}_swapped")
    assert chooser.choose(product).name == f"{name}_swapped"
    with forced_variant(name):
        assert chooser.choose(product).name == name
    monkeypatch.setenv("VKFOLD_VARIANT", "matmul=square")
    with pytest.raises(ValueError, match=rf"no matmul variant 'square'.*{name}"):
        (vulkan.tensor(np.ones((2, 2))) @ vulkan.tensor(np.ones((2, 2)))).numpy()
    monkeypatch.setenv("VKFOLD_VARIANT", "matmul")
    with pytest.raises(ValueError, match="has no '='"):
        chooser.forced()
    monkeypatch.delenv("VKFOLD_VARIANT")
    assert chooser.forced() == ""
    assert forced_by_switch("matmul", "a=b,") == ""


def test_few_kernels() -> None:
    """A transposition is a matter of strides: no kernel for each; kernels of a name differ."""
    kernels = {
        (matmul_kernel(v, size, more).name, matmul_kernel(v, size, more).digest)
        for size in (4, 8, 16, 32, 64)
        for v in all_variants(size)
        for more in (False, True)
    }
    assert len({name for name, _ in kernels}) == len(kernels) < 200
