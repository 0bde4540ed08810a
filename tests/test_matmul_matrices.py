"""Cooperative matrices: the question, the request, and the kernel, on devices that do not have them with its fragments
written out as plain loops, which leaves all else of it (staging, tiles, edges, epilogue) as it is."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from variant_checks import damaged

from vkfold.engine import matmul_choice, matmul_variants, vulkan_device
from vkfold.engine.capabilities import Capabilities
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.dtypes import rounded
from vkfold.engine.errors import VulkanError
from vkfold.engine.expr import cast, exp, variable
from vkfold.engine.glsl_compiler import BFLOAT_PRAGMA
from vkfold.engine.kernel import Kernel
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import Choice, Product, Variant, rounded_choices, rounded_variants
from vkfold.engine.ops import matmul_launch
from vkfold.engine.ops.matmul_launch import PLAIN, Pairs, matmul_kernel
from vkfold.engine.ops.matmul_parts import USUAL, Parts, kernel_arguments
from vkfold.engine.physical_device import MatrixShape, PhysicalDevice
from vkfold.engine.vulkan_binding import binding
from vkfold.engine.vulkan_describe import _matrix_shapes
from vkfold.engine.vulkan_engine import VulkanEngine

from .op_checks import EPS32

# A fragment of A or B is where it lies in shared memory; of C, the 8 of 256 elements that an invocation of 32 holds.
FRAGMENTS = """
struct Fragment { float v[8]; uint start, row_step, column_step; };
Fragment zeros() { Fragment f; for (uint i = 0; i < 8; ++i) f.v[i] = 0.0; return f; }
uint element(uint i) { return gl_LocalInvocationIndex % 32u * 8u + i; }
Fragment multiplied(Fragment a, Fragment b, Fragment c) {
    for (uint i = 0; i < 8; ++i) {
        const uint row = a.start + element(i) / 16 * a.row_step, column = b.start + element(i) % 16 * b.column_step;
        for (uint k = 0; k < 16; ++k)
            c.v[i] = fma(VALUE(a_tiles[row + k * a.column_step]), VALUE(b_tiles[column + k * b.row_step]), c.v[i]);
    }
    return c;
}
#define LOAD(f, from, begin, pitch, down, right) { f.start = begin; f.row_step = down; f.column_step = right; }
#define STORE(f, to, begin, pitch) \\
    for (uint e = 0; e < 8; ++e) to[(begin) + element(e) / 16 * (pitch) + element(e) % 16] = f.v[e]
void main() {"""
VALUES = {
    "float16": "#define VALUE(x) float(x)",
    "bfloat16": "#define VALUE(x) uintBitsToFloat(packFloat2x16(f16vec2(x, x)) << 16)",
}
VARIANTS = [v for v in rounded_variants(32) if v.matrix is not None]
PRECISIONS = ["float16", "bfloat16"]


def written_out(variant: Variant, kernel: Kernel, parts: Parts) -> Kernel:
    """The kernel for subgroups of 32 with its cooperative matrices as arrays that every invocation holds in full."""
    text = kernel.glsl.partition("#line 1\n")[2].replace("#pragma use_vulkan_memory_model\n", "")
    text = text.replace(BFLOAT_PRAGMA, "")
    matrix = "coopmat<{}, gl_ScopeSubgroup, FRAGMENT_{}, FRAGMENT_{}, gl_MatrixUse{}>"
    accumulator = matrix.format("float", "M", "N", "Accumulator")
    for old, new in (
        (f"{accumulator}(0.0)", "zeros()"),
        (accumulator, "Fragment"),
        (matrix.format("float16_t", "M", "K", "A"), "Fragment"),
        (matrix.format("float16_t", "K", "N", "B"), "Fragment"),
        (", PITCH_B, gl_CooperativeMatrixLayoutRowMajor)", ", PITCH_B, PITCH_B, 1u)"),
        (", PITCH_A, gl_CooperativeMatrixLayoutColumnMajor)", ", PITCH_A, 1u, PITCH_A)"),
        (", FRAGMENT_N, gl_CooperativeMatrixLayoutRowMajor)", ", FRAGMENT_N)"),
        ("coopMatLoad", "LOAD"),
        ("coopMatMulAdd", "multiplied"),
        ("coopMatStore(", "STORE("),
        ("gl_SubgroupID", "(id / 32u)"),
        ("gl_SubgroupInvocationID", "(id % 32u)"),
        ("UNROLL for", "for"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    assert "coop" not in text.split("void main")[1].lower()
    text = text.replace("void main() {", VALUES[variant.precision] + FRAGMENTS)
    extensions = ["GL_EXT_shader_explicit_arithmetic_types_float16"]
    size = variant.workgroup_tile.invocations
    args = kernel_arguments(parts)
    return Kernel(kernel.name, text, args, local_size=size, defines=kernel.defines, extensions=extensions)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[VulkanEngine]:
    """An engine whose device seems to be a GPU that has cooperative matrices of both precisions."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    with VulkanEngine() as made:
        if "shaderFloat16" not in made.device.physical.features:
            pytest.skip(f"{made.name} has no float16 in shaders")
        chooser = MatmulChooser.of(made.recorder)
        shapes = tuple(MatrixShape(precision, 16, 16, 16) for precision in PRECISIONS)
        chooser.device = chooser.device._replace(matrices=shapes, invocations=256)
        monkeypatch.setattr(matmul_variants, "_MATRIX_SPEED", {})  # whose matrices are fast
        monkeypatch.setattr(matmul_variants, "_figures", matmul_variants._figures.__wrapped__)  # not those kept before

        def kernel(
            variant: Variant, subgroup_size: int, resumes: bool = False, pairs: Pairs = PLAIN, parts: Parts = USUAL
        ) -> Kernel:
            if variant.spread != "matrix":
                return matmul_kernel(variant, subgroup_size, resumes, pairs, parts)
            key = variant, resumes, parts
            if key not in kernels:
                kernels[key] = written_out(variant, matmul_kernel(variant, 32, resumes, parts=parts), parts)
            return kernels[key]

        kernels: dict[tuple[Variant, bool, Parts], Kernel] = {}
        monkeypatch.setattr(matmul_launch, "matmul_kernel", kernel)
        yield made


def force(monkeypatch: pytest.MonkeyPatch, variant: Variant) -> None:
    """One variant for all products of its precision; the emulation where it is barred."""

    def choices(device: Capabilities, precision: str, product: Product) -> list[Choice]:
        return [Choice(variant), rounded_choices(device._replace(matrices=()), precision, product)[0]]

    monkeypatch.setattr(matmul_choice, "rounded_choices", choices)


def compare(engine: VulkanEngine, oracle: CpuEngine, precision: str, trans_a: bool, trans_b: bool) -> None:
    """Within the bound of k sums around the product of rounded operands, at odd sizes, batched, accumulated."""
    rng = np.random.default_rng(11)
    for m, n, k, lead in ((70, 67, 35, ()), (5, 3, 16, (2,)), (64, 128, 33, ()), (200, 130, 8, ())):
        a = rng.standard_normal((*lead, *((k, m) if trans_a else (m, k)))).astype(np.float32)
        b = rng.standard_normal((*lead, *((n, k) if trans_b else (k, n)))).astype(np.float32)
        bias, out = rng.standard_normal(n).astype(np.float32), rng.standard_normal((*lead, m, n)).astype(np.float32)
        results = []
        for each in (engine, oracle):
            x, y, c = each.tensor(a), each.tensor(b), each.tensor(out)
            settings: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "precision": precision}
            plain = each.matmul(x, y, **settings).numpy()
            each.matmul(x, y, bias=each.tensor(bias), activation="relu", out=c, accumulate=True, **settings)
            results.append((plain, c.numpy()))
        size = np.abs(np.swapaxes(a, -1, -2) if trans_a else a) @ np.abs(np.swapaxes(b, -1, -2) if trans_b else b)
        for got, expected in zip(*results, strict=True):
            assert np.all(np.abs(got - expected) <= 2 * (k + 3) * EPS32 * 1.01 * (size + np.abs(out) + np.abs(bias)))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_tiles_edges_and_epilogue(
    engine: VulkanEngine, oracle: CpuEngine, monkeypatch: pytest.MonkeyPatch, variant: Variant
) -> None:
    """Every tile, both precisions, every transposition."""
    force(monkeypatch, variant)
    chooser = MatmulChooser.of(engine.recorder)
    for trans_a, trans_b in itertools.product((False, True), repeat=2):
        compare(engine, oracle, variant.precision, trans_a, trans_b)
    assert sum("matrix" in name for name in chooser.table.checked) == 2  # plain, and accumulating
    assert not chooser.table.barred


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiles_have_equal_bits(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Fragments go along k in the same order in all tiles."""
    rng = np.random.default_rng(17)
    a, b = (engine.tensor(rng.standard_normal(shape)) for shape in ((70, 100), (100, 67)))
    results = []
    for variant in (v for v in VARIANTS if v.precision == precision):
        force(monkeypatch, variant)
        MatmulChooser.of(engine.recorder).plans.clear()
        results.append(engine.matmul(a, b, precision=precision).numpy().view(np.uint32))
    assert len(results) == 3 and all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_a_number(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Infinities, NaN and subnormals keep their kind when operands are rounded; ties go to even."""
    force(monkeypatch, next(v for v in VARIANTS if v.precision == precision))
    values = np.array([np.inf, -np.inf, np.nan, 1 + 2.0**-9, 1 + 3 * 2.0**-9, 65520.0, 2.0**-24], np.float32)
    nan = np.array([0x7F800001], np.uint32).view(np.float32)  # whose payload is lost when 16 bits are cut off
    column = np.concatenate([values, nan])[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        got = engine.matmul(engine.tensor(column), engine.tensor(np.ones((1, 1))), precision=precision).numpy()
        expected = rounded(column, precision)
    assert np.array_equal(got, expected, equal_nan=True)
    assert any("matrix" in name for name in MatmulChooser.of(engine.recorder).table.checked)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_epilogue_of_your_own(engine: VulkanEngine, precision: str) -> None:
    """Printed into the kernel: the bits of the product and the expression apart."""
    total = variable("sum")
    ending = exp(total) * cast(total, "bfloat16")
    a, b = (engine.tensor(np.random.default_rng(3).standard_normal(shape)) for shape in ((20, 40), (40, 70)))
    product = engine.matmul(a, b, precision=precision)
    made = engine.matmul(a, b, precision=precision, epilogue=ending)
    assert np.array_equal(made.numpy(), engine.map(ending, sum=product).numpy())
    assert any("matrix" in name for name in MatmulChooser.of(engine.recorder).table.checked)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_matrices_of_this_device(
    vulkan: VulkanEngine, oracle: CpuEngine, monkeypatch: pytest.MonkeyPatch, trans_a: bool, trans_b: bool
) -> None:
    """Where the driver has them (Mesa's llvmpipe has, from 26 at the latest), its own: not written out."""
    shapes = MatmulChooser.of(vulkan.recorder).device.matrices
    if not shapes:
        pytest.skip(f"{vulkan.name} has no cooperative matrices that there are kernels for")
    for shape in shapes:
        for variant in (v for v in rounded_variants(vulkan.recorder.subgroup_size) if v.matrix == shape):
            force(monkeypatch, variant)
            compare(vulkan, oracle, shape.precision, trans_a, trans_b)
            assert variant.name not in MatmulChooser.of(vulkan.recorder).table.barred


@pytest.mark.parametrize("precision", PRECISIONS)
def test_wrong_matrices_give_way_to_the_emulation(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, precision: str
) -> None:
    """A device whose cooperative matrices compute something else: barred, and the product is right all the same."""
    good = matmul_launch.matmul_kernel

    def bad(
        variant: Variant, subgroup_size: int, resumes: bool = False, pairs: Pairs = PLAIN, parts: Parts = USUAL
    ) -> Kernel:
        kernel = good(variant, subgroup_size, resumes, pairs, parts)
        if variant.spread == "matrix":
            return damaged(kernel, "element(i) % 16 * b", "(element(i) + 1) % 16 * b")
        return kernel

    monkeypatch.setattr(matmul_launch, "matmul_kernel", bad)
    variant = next(v for v in VARIANTS if v.precision == precision)
    force(monkeypatch, variant)
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = engine.tensor(a)
    assert np.array_equal(engine.matmul(x, x, trans_b=True, precision=precision).numpy(), a @ a.T)
    assert f"matmul variant {variant.name} is barred" in caplog.text
    chosen = MatmulChooser.of(engine.recorder).choose(Product(1, 3, 3, 4), precision=precision)
    assert chosen.variant.spread == "shared" and chosen.variant.precision == precision


def test_shapes_are_read_from_the_driver(vulkan: VulkanEngine) -> None:
    """Only operands of less than float32 with float32 sums at subgroup scope count."""
    lib, ffi, _, null = binding()
    half, bfloat, single, scope = (
        lib.VK_COMPONENT_TYPE_FLOAT16_KHR,
        1000141000,  # VK_COMPONENT_TYPE_BFLOAT16_KHR
        lib.VK_COMPONENT_TYPE_FLOAT32_KHR,
        lib.VK_SCOPE_SUBGROUP_KHR,
    )
    offered = [(16, 16, 16, half, single, scope), (16, 8, 16, half, single, scope), (8, 8, 8, half, half, scope)]
    offered += [(32, 32, 32, half, single, scope + 1), (16, 16, 16, bfloat, single, scope)]
    offered += [(16, 16, 16, bfloat, bfloat, scope), (16, 16, 32, lib.VK_COMPONENT_TYPE_SINT8_KHR, single, scope)]
    asked: list[str] = []

    @ffi.callback("VkResult(VkPhysicalDevice, uint32_t*, VkCooperativeMatrixPropertiesKHR*)")
    def properties(device: Any, count: Any, array: Any) -> int:
        if array != null:
            assert count[0] == len(offered)
            for i, (m, n, k, operand, result, at) in enumerate(offered):
                assert array[i].sType == lib.VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR
                array[i].MSize, array[i].NSize, array[i].KSize, array[i].scope = m, n, k, at
                array[i].AType = array[i].BType = operand
                array[i].CType = array[i].ResultType = result
        count[0] = len(offered)
        return 0

    def function(name: str) -> Any:
        asked.append(name)
        return properties

    assert _matrix_shapes(vulkan.device.physical.handle, function) == (
        MatrixShape("float16", 16, 16, 16),
        MatrixShape("float16", 16, 8, 16),
        MatrixShape("bfloat16", 16, 16, 16),
    )
    assert asked == ["vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_extensions_are_asked_for_where_reported(
    vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """A driver that does not have them says so when a device that claims to is made."""
    if any(shape.precision == precision for shape in vulkan.device.physical.matrices):
        pytest.skip(f"this device has cooperative matrices of {precision}")
    monkeypatch.setattr(PhysicalDevice, "matrices", (MatrixShape(precision, 16, 16, 16),))
    with pytest.raises(VulkanError, match="EXTENSION_NOT_PRESENT"):
        VulkanEngine()


def test_bfloat16_is_asked_about_and_enabled_by_its_own_struct(
    vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every struct behind the device's features: type, members, and what they are set to; PyVulkan does not have it."""
    features = {"cooperativeMatrix", "vulkanMemoryModel", "shaderBFloat16Type", "shaderBFloat16CooperativeMatrix"}
    physical = dataclasses.replace(
        vulkan.device.physical,
        matrix_shapes=(MatrixShape("bfloat16", 16, 16, 16),),
        features=vulkan.device.physical.features | features,
    )
    seen: dict[int, list[int]] = {}
    lib, ffi, *_ = binding()

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        @staticmethod
        def vkCreateDevice(handle: Any, info: Any, allocator: Any, out: Any) -> int:
            names = {ffi.string(info.ppEnabledExtensionNames[i]).decode() for i in range(info.enabledExtensionCount)}
            assert {"VK_KHR_cooperative_matrix", "VK_KHR_shader_bfloat16"} <= names
            each = ffi.cast("uint64_t*", info.pNext)
            while each != ffi.NULL:
                seen[int(ffi.cast("uint32_t*", each)[0])] = list(ffi.cast("uint32_t*", each)[4:7])
                each = ffi.cast("uint64_t*", each[1])
            return -3  # VK_ERROR_INITIALIZATION_FAILED

    monkeypatch.setattr(vulkan_device, "binding", lambda: binding()._replace(lib=Library()))
    with pytest.raises(VulkanError, match="INITIALIZATION_FAILED"):
        vulkan_device.Device(vulkan.device.instance, physical)
    assert seen[1000141000] == [1, 0, 1]  # VkPhysicalDeviceShaderBfloat16FeaturesKHR: type, dot product, matrices
    assert seen[lib.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR][0] == 1
