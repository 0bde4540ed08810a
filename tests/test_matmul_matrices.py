"""Cooperative matrices without a device that has them: the question, the request, and the kernel with fragments written
out as plain loops, which leaves all else of it (staging, tiles, edges, epilogue) as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import VulkanError
from vkfold.engine.kernel import Kernel
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import Variant, rounded_choices
from vkfold.engine.ops import matmul_launch
from vkfold.engine.ops.matmul_launch import PLAIN, Pairs, matmul_kernel
from vkfold.engine.ops.matmul_parts import USUAL, Parts
from vkfold.engine.physical_device import PhysicalDevice
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
            c.v[i] = fma(float(a_tiles[row + k * a.column_step]), float(b_tiles[column + k * b.row_step]), c.v[i]);
    }
    return c;
}
#define LOAD(f, from, begin, pitch, down, right) { f.start = begin; f.row_step = down; f.column_step = right; }
#define STORE(f, to, begin, pitch) \\
    for (uint e = 0; e < 8; ++e) to[(begin) + element(e) / 16 * (pitch) + element(e) % 16] = f.v[e]
void main() {"""


def written_out(kernel: Kernel) -> Kernel:
    """The kernel for subgroups of 32 with its cooperative matrices as arrays that every invocation holds in full."""
    text = kernel.glsl.partition("#line 1\n")[2].replace("#pragma use_vulkan_memory_model\n", "")
    accumulator = "coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>"
    for old, new in (
        (f"{accumulator}(0.0)", "zeros()"),
        (accumulator, "Fragment"),
        ("coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>", "Fragment"),
        ("coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>", "Fragment"),
        (", PITCH, gl_CooperativeMatrixLayoutRowMajor)", ", PITCH, PITCH, 1u)"),
        (", PITCH, gl_CooperativeMatrixLayoutColumnMajor)", ", PITCH, 1u, PITCH)"),
        ("coopMatLoad", "LOAD"),
        ("coopMatMulAdd", "multiplied"),
        ("coopMatStore(", "STORE("),
        ("gl_SubgroupID", "(id / 32u)"),
        ("UNROLL for", "for"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    text = text.replace("TILE,\n                         gl_CooperativeMatrixLayoutRowMajor)", "TILE)")
    assert "coop" not in text.split("void main")[1].lower()
    text = text.replace("void main() {", FRAGMENTS)
    extensions = ["GL_EXT_shader_explicit_arithmetic_types_float16"]
    args = matmul_launch._ARGS
    return Kernel(kernel.name, text, args, local_size=128, defines=kernel.defines, extensions=extensions)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[VulkanEngine]:
    """An engine whose device seems to have cooperative matrices."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    with VulkanEngine() as made:
        if "shaderFloat16" not in made.device.physical.features:
            pytest.skip(f"{made.name} has no float16 in shaders")
        chooser = MatmulChooser.of(made.recorder)
        chooser.device = chooser.device._replace(matrix=True)

        def kernel(
            variant: Variant, subgroup_size: int, resumes: bool = False, pairs: Pairs = PLAIN, parts: Parts = USUAL
        ) -> Kernel:
            if variant.spread != "matrix":
                return matmul_kernel(variant, subgroup_size, resumes, pairs, parts)
            if resumes not in kernels:
                kernels[resumes] = written_out(matmul_kernel(variant, 32, resumes))
            return kernels[resumes]

        kernels: dict[bool, Kernel] = {}
        monkeypatch.setattr(matmul_launch, "matmul_kernel", kernel)
        yield made


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_tiles_edges_and_epilogue(engine: VulkanEngine, oracle: CpuEngine, trans_a: bool, trans_b: bool) -> None:
    """Within the bound of k sums around the product of rounded operands, at odd sizes, batched, accumulated."""
    chooser = MatmulChooser.of(engine.recorder)
    rng = np.random.default_rng(11)
    for m, n, k, lead in ((70, 67, 35, ()), (5, 3, 16, (2,)), (64, 128, 33, ())):
        a = rng.standard_normal((*lead, *((k, m) if trans_a else (m, k)))).astype(np.float32)
        b = rng.standard_normal((*lead, *((n, k) if trans_b else (k, n)))).astype(np.float32)
        bias, out = rng.standard_normal(n).astype(np.float32), rng.standard_normal((*lead, m, n)).astype(np.float32)
        results = []
        for each in (engine, oracle):
            x, y, c = each.tensor(a), each.tensor(b), each.tensor(out)
            settings: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "precision": "float16"}
            plain = each.matmul(x, y, **settings).numpy()
            each.matmul(x, y, bias=each.tensor(bias), activation="relu", out=c, accumulate=True, **settings)
            results.append((plain, c.numpy()))
        size = np.abs(np.swapaxes(a, -1, -2) if trans_a else a) @ np.abs(np.swapaxes(b, -1, -2) if trans_b else b)
        for got, expected in zip(*results, strict=True):
            assert np.all(np.abs(got - expected) <= 2 * (k + 3) * EPS32 * 1.01 * (size + np.abs(out) + np.abs(bias)))
    assert sum("matrix" in name for name in chooser.table.checked) == 2  # plain, and accumulating
    assert not chooser.table.barred


def test_wrong_matrices_give_way_to_the_emulation(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device whose cooperative matrices compute something else: barred, and the product is right all the same."""
    good = matmul_launch.matmul_kernel

    def bad(
        variant: Variant, subgroup_size: int, resumes: bool = False, pairs: Pairs = PLAIN, parts: Parts = USUAL
    ) -> Kernel:
        kernel = good(variant, subgroup_size, resumes, pairs, parts)
        if variant.spread == "matrix":
            kernel._source = kernel._source.replace("element(i) % 16 * b", "(element(i) + 1) % 16 * b")
        return kernel

    monkeypatch.setattr(matmul_launch, "matmul_kernel", bad)
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = engine.tensor(a)
    assert np.array_equal(engine.matmul(x, x, trans_b=True, precision="float16").numpy(), a @ a.T)
    assert "matmul variant matrix_64x64_float16 is barred" in caplog.text
    chooser = MatmulChooser.of(engine.recorder)
    remaining = [c for c in rounded_choices(chooser.device, "float16") if c.variant.name not in chooser.table.barred]
    assert [choice.variant.spread for choice in remaining] == ["shared"]


def test_shapes_are_read_from_the_driver(vulkan: VulkanEngine) -> None:
    """Only float16 operands with float32 sums at subgroup scope count."""
    lib, ffi, _, null = binding()
    half, single, scope = (
        lib.VK_COMPONENT_TYPE_FLOAT16_KHR,
        lib.VK_COMPONENT_TYPE_FLOAT32_KHR,
        lib.VK_SCOPE_SUBGROUP_KHR,
    )
    offered = [(16, 16, 16, half, single, scope), (16, 8, 16, half, single, scope), (8, 8, 8, half, half, scope)]
    offered.append((32, 32, 32, half, single, scope + 1))
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

    assert _matrix_shapes(vulkan.device.physical.handle, function) == ((16, 16, 16), (16, 8, 16))
    assert asked == ["vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"]


def test_the_extension_is_asked_for_where_reported(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not have it says so when a device that claims to is made."""
    if vulkan.device.physical.multiplies_matrices:
        pytest.skip("this device has cooperative matrices")
    monkeypatch.setattr(PhysicalDevice, "multiplies_matrices", True)
    with pytest.raises(VulkanError, match="EXTENSION_NOT_PRESENT"):
        VulkanEngine()
