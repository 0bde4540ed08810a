"""Variants of matmul: one accumulation order has one result to the bit; the choice is a pure function."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vkfold.engine.capabilities import Capabilities
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import (
    Choice,
    Product,
    Variant,
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
from vkfold.engine.ops import matmul as matmul_op
from vkfold.engine.ops.matmul_launch import PLAIN, matmul_kernel
from vkfold.engine.physical_device import MatrixShape, PhysicalDevice
from vkfold.engine.tensor import Tensor
from vkfold.engine.variant_choice import forced_by_switch, forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.engine.workgroup_tile import WorkgroupTile

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


@pytest.mark.parametrize("k", [77, 82])  # parts of 20 and 21: the second is no whole number of rounds of 2 or 4
@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
def test_orders_of_other_devices_run_here(vulkan: VulkanEngine, trans_a: bool, trans_b: bool, k: int) -> None:
    """Split k, as a GPU may take it, and its plain tiles: right here too, and equal within an order."""
    size = vulkan.recorder.subgroup_size
    case = Case(vulkan, 21, 35, k, trans_a, trans_b, 1)
    exact, magnitude = case.exact()
    by_order: dict[int, list[list[np.ndarray]]] = {}
    for variant in all_variants(size):
        small = variant.spread == "broadcast" and variant.tm * variant.tn <= 32 and not variant.written
        # SwiftShader takes minutes to unroll the tile of a workgroup, and has one that is not unrolled.
        if small or (variant.spread == "shared" and variant.written == (size == 4)):
            with forced_variant(variant.name):
                by_order.setdefault(variant.split, []).append(list(case.results()))
    assert len(by_order) == 2 and min(by_order) == 1
    for results in by_order.values():
        assert len(results) > 1
        assert np.all(np.abs(results[0][0] - exact) <= 2 * k * EPS32 * magnitude)
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert np.array_equal(one.view(np.uint32), two.view(np.uint32))


def test_choice_is_by_shape_and_device() -> None:
    """Large products take the largest tile, small ones fill the device with smaller ones; narrow ones turn around."""
    for device in (OLD, NEW, SWIFTSHADER, GPU):
        family = variants(device)
        areas = [math.prod(v.tile(device.subgroup_size)) for v in family]
        large = math.prod(least_estimate(device, Product(1, 4096, 4096, 64)).variant.tile(device.subgroup_size))
        assert large >= max(areas) / 2 and large > min(areas)
        small = least_estimate(device, Product(1, 4, 8, 64))
        assert math.prod(small.variant.tile(device.subgroup_size)) < large
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
    monkeypatch.setenv("VKFOLD_VARIANT", f" matmul = {name}_swapped ,")
    assert chooser.choose(product).name == f"{name}_swapped"
    with forced_variant(name):
        assert chooser.choose(product).name == name
    monkeypatch.setenv("VKFOLD_VARIANT", "matmul=square")
    with pytest.raises(BadInputError, match=rf"no matmul variant 'square'.*{name}"):
        (vulkan.tensor(np.ones((2, 2))) @ vulkan.tensor(np.ones((2, 2)))).numpy()
    monkeypatch.setenv("VKFOLD_VARIANT", "matmul")
    with pytest.raises(BadInputError, match="has no '='"):
        chooser.forced()
    monkeypatch.delenv("VKFOLD_VARIANT")
    assert chooser.forced() == ""
    assert forced_by_switch("") == {}
    with pytest.raises(BadInputError, match="'matmull' has no variants; these ops have: matmul"):
        forced_by_switch("matmul=a, matmull=b,")


def test_few_kernels() -> None:
    """A transposition is a matter of strides: no kernel for each; kernels of a name differ."""
    kernels = {
        (matmul_kernel(v, size, more).name, matmul_kernel(v, size, more).digest)
        for size in (4, 8, 16, 32, 64)
        for v in (*all_variants(size), *rounded_variants(size))
        for more in (False, True)
    }
    assert len({name for name, _ in kernels}) == len(kernels) < 270


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
def test_lower_precision(vulkan: VulkanEngine, oracle: CpuEngine, precision: str, trans_a: bool, trans_b: bool) -> None:
    """Operands rounded to nearest even, sums float32: the bound of k sums around the product of rounded operands."""
    for m, n, k, batch in ((70, 67, 35, 1), (3, 5, 40, 2), (130, 64, 16, 1)):
        case = Case(vulkan, m, n, k, trans_a, trans_b, batch)
        a, b = case.arrays["a"], case.arrays["b"]

        def product(engine: ComputeEngine, a: np.ndarray = a, b: np.ndarray = b) -> np.ndarray:
            x, y = engine.tensor(a), engine.tensor(b)
            return engine.matmul(x, y, trans_a=trans_a, trans_b=trans_b, precision=precision).numpy()

        exact, magnitude = case.exact()
        got = product(vulkan)
        assert np.all(np.abs(got - product(oracle)) <= 2 * (k + 1) * EPS32 * 1.01 * magnitude)
        # and it is not the product of operands as they were
        assert np.max(np.abs(got - exact) / magnitude) > 2.0**-14


def test_lower_precision_at_the_ends(vulkan: VulkanEngine) -> None:
    """Ties to even, overflow of float16 to infinity from 65,520, subnormals kept."""
    values = np.array([[1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, 2.0**-24, 2.0**-26]], np.float32).T
    one = np.ones((1, 1), np.float32)

    def product(precision: str) -> list[float]:
        return vulkan.matmul(vulkan.tensor(values), vulkan.tensor(one), precision=precision).numpy().ravel().tolist()

    assert product("float16") == [1.0, 1 + 2.0**-9, 65504.0, np.inf, 2.0**-24, 0.0]
    assert product("bfloat16") == [1.0, 1.0, 65536.0, 65536.0, 2.0**-24, 2.0**-26]
    assert product("float32") == values.ravel().tolist()


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_lower_precision_has_epilogue_and_accumulation(vulkan: VulkanEngine, oracle: CpuEngine, precision: str) -> None:
    case = Case(vulkan, 33, 18, 21, False, False, 1)
    engines: tuple[ComputeEngine, ...] = (vulkan, oracle)
    results = []
    for engine in engines:
        t = {name: engine.tensor(array) for name, array in case.arrays.items()}
        first = engine.matmul(
            t["a"], t["b"], bias=t["bias"], activation="gelu", residual=t["residual"], precision=precision
        ).numpy()
        engine.matmul(t["a"], t["b"], bias=t["bias"], out=t["out"], accumulate=True, precision=precision)
        results.append((first, t["out"].numpy()))
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=1e-5)


def test_matrices_are_used_where_reported_and_asked_for(vulkan: VulkanEngine) -> None:
    """Cooperative matrices of the precision asked for where a GPU has them, never for float32."""
    large = Product(1, 4096, 4096, 4096)

    def spreads(device: Capabilities, precision: str) -> list[str]:
        choices = rounded_choices(device, precision, large)
        assert all(choice.variant.precision == precision for choice in choices)
        return [choice.variant.spread for choice in choices]

    for precision, other in (("float16", "bfloat16"), ("bfloat16", "float16")):
        with_matrices = GPU._replace(matrices=(MatrixShape(precision, 16, 16, 16),), shared_bytes=49152)
        assert spreads(with_matrices, precision) == ["matrix", "matrix", "matrix", "shared"]
        assert spreads(with_matrices, other) == spreads(GPU, precision) == ["shared"]
        for product in (large, Product(1, 64, 64, 4096)):
            assert {choice.variant.precision for choice in candidates(with_matrices, product)} == {"float32"}
    # llvmpipe's matrices take longer than the emulation
    assert spreads(NEW._replace(matrices=(MatrixShape("float16", 8, 8, 8),)), "float16") == ["shared", "matrix"]
    with pytest.raises(ValueError, match="unknown precision 'fp8': use one of float32, float16, bfloat16"):
        vulkan.matmul(vulkan.tensor(np.ones((2, 2))), vulkan.tensor(np.ones((2, 2))), precision="fp8")


def test_matrices_need_their_features() -> None:
    """Listed shapes count where the features of their precision are there, and a kernel for the shape."""
    half, bfloat = MatrixShape("float16", 16, 16, 16), MatrixShape("bfloat16", 16, 16, 16)
    device = PhysicalDevice(0, "one", "discrete", matrix_shapes=(MatrixShape("float16", 16, 8, 16), half, bfloat))
    common = {"cooperativeMatrix", "vulkanMemoryModel"}
    bfloats = {"shaderBFloat16Type", "shaderBFloat16CooperativeMatrix"}
    for features, expected in (
        (common | {"shaderFloat16"}, device.matrix_shapes[:2]),
        (common | bfloats, (bfloat,)),
        (common | bfloats | {"shaderFloat16"}, device.matrix_shapes),
        (common | {"shaderBFloat16Type"}, ()),
        ({"cooperativeMatrix", "shaderFloat16"} | bfloats, ()),
    ):
        assert dataclasses.replace(device, features=frozenset(features)).matrices == expected
    able = dataclasses.replace(
        device, features=frozenset(common | bfloats | {"shaderFloat16"}), max_shared_bytes=49152, subgroup_size=32
    )
    recorder: Any = SimpleNamespace(
        is_cpu=False, driver="a GPU", subgroup_size=32, device=SimpleNamespace(physical=able)
    )
    assert Capabilities.of(recorder).matrices == (half, bfloat)
    assert Capabilities.of(recorder).shared_bytes == 49152
    recorder.subgroup_size = 8
    assert Capabilities.of(recorder).matrices == ()


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_tiles_of_a_workgroup_are_chosen_by_size_and_limits(precision: str) -> None:
    """Large products take large tiles, those with few tiles small ones; what a device cannot hold is no candidate."""
    matrices = MatrixShape("float16", 16, 16, 16), MatrixShape("bfloat16", 16, 16, 16)
    device = GPU._replace(matrices=matrices, shared_bytes=49152)

    def taken(device: Capabilities, size: int) -> tuple[int, int]:
        product = Product(1, size, size, size)
        if precision == "float32":
            choices = [choice for choice in candidates(device, product) if choice.variant.spread == "shared"]
            variant = least_estimate(device, product, choices).variant
        else:
            variant = rounded_choices(device, precision, product)[0].variant
            assert variant.spread == "matrix"
        return variant.tm, variant.tn

    assert taken(device, 4096) == (128, 128)
    assert taken(device, 1024) == taken(device, 768) == (64, 64)
    assert taken(device._replace(invocations=128), 4096) == (128, 64)
    least = device._replace(shared_bytes=16384)  # of any Vulkan device
    assert taken(least, 4096) == ((128, 64) if precision == "float32" else (64, 64))
    assert least_estimate(device, Product(1, 4096, 4096, 4096)).variant.spread == "shared"
    if precision != "float32":
        assert rounded_choices(least._replace(shared_bytes=9216), precision, Product(1, 9, 9, 9))  # the emulation


def test_tiles_of_a_workgroup_are_divided_evenly() -> None:
    """All invocations load the same; fragments fill the tile; shared memory is what the shader declares."""
    for size in (8, 32, 64):
        for variant in (v for v in (*all_variants(size), *rounded_variants(size)) if v.whole_workgroup):
            tile = variant.workgroup_tile
            quads = 4 * tile.invocations
            assert tile.tm * tile.depth % quads == tile.tn * tile.depth % quads == 0
            told, staged = tile.defines(size), 2 * tile.depth * (tile.tm + tile.tn + 2 * tile.padding)
            if tile.matrix is None:
                assert tile.shared_bytes(size) == 4 * staged
                continue
            down, across = tile.waves(size)
            assert down * across * size == tile.invocations
            assert int(told["FRAGMENTS_M"]) * tile.matrix.m * down == tile.tm
            assert int(told["FRAGMENTS_N"]) * tile.matrix.n * across == tile.tn
            assert tile.shared_bytes(size) == 2 * staged + 4 * down * across * tile.matrix.m * tile.matrix.n
    with pytest.raises(ValueError, match="does not divide into fragments"):
        WorkgroupTile(64, 64, 16, MatrixShape("float16", 48, 16, 16)).waves(32)


def test_a_forced_variant_is_for_its_own_precision(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are chosen as ever; what needs matrices is refused where there are none."""
    chooser, product = MatmulChooser.of(vulkan.recorder), Product(1, 64, 64, 64)
    monkeypatch.setattr(chooser, "device", GPU._replace(matrices=(MatrixShape("float16", 16, 16, 16),)))
    with forced_variant("matrix_128x64u16_float16"):
        assert chooser.choose(product, precision="float16").name == "matrix_128x64u16_float16"
        assert chooser.choose(product, precision="bfloat16").name == "shared_64x64u8_bfloat16"
        assert chooser.choose(product).variant.precision == "float32"
    with forced_variant("shared_128x64u8"):
        assert chooser.choose(product).name == "shared_128x64u8"
        assert chooser.choose(product, precision="float16").variant.spread == "matrix"
    with (
        forced_variant("matrix_64x64u16_bfloat16"),
        pytest.raises(BadInputError, match="needs cooperative matrices of"),
    ):
        chooser.choose(product)


def test_a_tile_that_does_not_fit_is_not_forced(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    chooser = MatmulChooser.of(vulkan.recorder)
    monkeypatch.setattr(chooser, "device", chooser.device._replace(shared_bytes=16384))
    with pytest.raises(BadInputError, match="needs 16896 bytes of shared memory, the device has 16384"):
        chooser.named("shared_128x128u8")
    monkeypatch.setattr(chooser, "device", chooser.device._replace(shared_bytes=32768, invocations=128))
    with pytest.raises(BadInputError, match="needs 256 invocations a workgroup, the device allows 128"):
        chooser.named("shared_128x128u8")


@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
@pytest.mark.parametrize("m,n,k,batch", [(66, 70, 72, 1), (34, 66, 68, 2)])
def test_pairs_agree_to_the_bit(
    vulkan: VulkanEngine,
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    batch: int,
    trans_a: bool,
    trans_b: bool,
) -> None:
    """Neighbours read as one word, and rows fetched together, where they lie across k: the bits of single loads."""
    case = Case(vulkan, m, n, k, trans_a, trans_b, batch)
    chooser = MatmulChooser.of(vulkan.recorder)
    choices = [c for c in own_choices(vulkan, m, n, k, batch) if c.variant.tm * c.variant.tn >= 32]
    chooser.plans.clear()
    results = {}
    for choice in choices:
        with forced_variant(choice.name):
            results[choice.name] = list(case.results())
    in_pairs = [plan.kernel.name for plan in chooser.plans.values() if "pairs" in plan.kernel.name]
    assert bool(in_pairs) == vulkan.recorder.in_words
    monkeypatch.setattr(matmul_op, "pairs_of", lambda gpu, layout, choice: PLAIN)
    chooser.plans.clear()
    with forced_variant(choices[-1].name):
        singly = list(case.results())
    assert not any("pairs" in plan.kernel.name for plan in chooser.plans.values())
    chooser.plans.clear()
    for name, result in results.items():
        for one, two in zip(singly, result, strict=True):
            assert np.array_equal(one.view(np.uint32), two.view(np.uint32)), name


@pytest.mark.parametrize("trans_a,trans_b", TRANSPOSES)
def test_long_sums_of_aligned_operands(vulkan: VulkanEngine, trans_a: bool, trans_b: bool) -> None:
    """More than a slice of k where rows are fetched together: the rounds of all loops stay below 65,535."""
    k = 2**15 + 64
    a, b = np.ones((k, 32) if trans_a else (32, k), np.float32), np.ones((8, k) if trans_b else (k, 8), np.float32)
    result = vulkan.matmul(vulkan.tensor(a), vulkan.tensor(b), trans_a=trans_a, trans_b=trans_b)
    assert (result.numpy() == k).all()
