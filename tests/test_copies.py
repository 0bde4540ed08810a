"""Zero, fill, copy and cast: exact, on any size, and on 16-bit views that share a word with their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from op_checks import ODD_SIZES

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.dtypes import DTYPES, numpy_dtype
from vkfold.engine.ops.cast import bfloat16_bits, bfloat16_values
from vkfold.engine.vulkan_engine import VulkanEngine

SIZES = [0, *ODD_SIZES]


def random_floats(count: int, seed: int = 0) -> np.ndarray:
    """float32 of every magnitude: random bits, then what is special."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    near_half = np.random.default_rng(seed + 1).uniform(-7e4, 7e4, count).astype(np.float32)
    small = np.random.default_rng(seed + 2).uniform(-1e-4, 1e-4, count).astype(np.float32)
    specials = [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 2**-24, 2**-25, 1.5 * 2**-25]
    specials += [2**-14, 2**-14 - 2**-25, 3.0e38, 3.4e38, 1e-45, 2**31, -(2**31), 2147483520, 1 + 2**-8, 1 + 3 * 2**-8]
    return np.concatenate([bits.view(np.float32), near_half, small, np.array(specials, np.float32)])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, any NaN equal to any other."""
    assert a.dtype == b.dtype
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    words = f"u{a.dtype.itemsize}"
    return bool(np.all((a.view(words) == b.view(words)) | (np.isnan(a) & np.isnan(b))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_fill(vulkan: VulkanEngine, dtype: str) -> None:
    for n in SIZES:
        x = vulkan.empty((n,), dtype)
        vulkan.fill_(x, 3)
        expected = bfloat16_bits(np.float32(3)) if dtype == "bfloat16" else 3
        assert np.array_equal(x.numpy(), np.full(n, expected, numpy_dtype(dtype)))
        assert vulkan.zero_(x) is x
        assert not x.numpy().any()


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 2), (1, 3), (2, 5), (0, 5)])
def test_fill_of_a_16_bit_view_spares_its_neighbours(
    vulkan: VulkanEngine, cpu: CpuEngine, start: int, stop: int
) -> None:
    for engine in (vulkan, cpu):
        x = engine.tensor(np.ones((5, 3), np.float16))
        engine.fill_(x.rows(start, stop), -2.5)
        expected = np.ones((5, 3), np.float16)
        expected[start:stop] = -2.5
        assert np.array_equal(x.numpy(), expected)


def test_fill_values(vulkan: VulkanEngine, cpu: CpuEngine, oracle: CpuEngine) -> None:
    for engine in (vulkan, cpu, oracle):
        for value, dtype, expected in (
            (0.1, "float32", np.float32(0.1)),
            (-np.inf, "float32", -np.inf),
            (np.nan, "float32", np.nan),
            (0.1, "float16", np.float16(0.1)),
            (65519.0, "float16", 65504.0),
            (-7, "int32", -7),
            (2**32 - 1, "uint32", 2**32 - 1),
            (1 + 2**-8, "bfloat16", 0x3F80),
        ):
            x = engine.fill_(engine.empty((3,), dtype), value)
            assert np.array_equal(x.numpy(), np.full(3, expected), equal_nan=True), (engine.name, value, dtype)
    too_large = ((1e6, "float16"), (1e39, "float32"), (3.4e38 * 1.01, "bfloat16"))
    for value, dtype in ((1.5, "int32"), (2**31, "int32"), (-1, "uint32"), *too_large):
        with pytest.raises(ValueError, match=r"fill_: .* (is no|does not fit)"):
            vulkan.fill_(vulkan.empty((3,), dtype), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy(vulkan: VulkanEngine, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for n in SIZES:
        array = rng.integers(0, 1000, n).astype(numpy_dtype(dtype))
        x = vulkan.tensor(array, dtype)
        y = vulkan.copy(x)
        vulkan.zero_(x)
        assert np.array_equal(y.numpy(), array)
        assert y.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_into(vulkan: VulkanEngine, cpu: CpuEngine, dtype: str) -> None:
    kind = numpy_dtype(dtype)
    for offset, n in ((0, 1), (1, 1), (1, 4), (3, 7), (9, 4), (0, 13), (13, 0)):
        expected = np.full(13, 7, kind)
        expected[offset : offset + n] = np.arange(n).astype(kind)
        for engine in (vulkan, cpu):
            target, source = engine.tensor(np.full(13, 7, kind), dtype), engine.tensor(np.arange(n).astype(kind), dtype)
            engine.copy_into(target, source, offset=offset)
            assert np.array_equal(target.numpy(), expected)


def test_copy_into_what_does_not_fit(cpu: CpuEngine) -> None:
    target = cpu.zeros((4, 3))
    for offset, source in ((10, cpu.zeros((3,))), (-1, cpu.zeros((3,))), (0, cpu.zeros((13,)))):
        with pytest.raises(ValueError, match="do not fit"):
            cpu.copy_into(target, source, offset=offset)
    with pytest.raises(ValueError, match="cast it first"):
        cpu.copy_into(target, cpu.zeros((3,), "int32"))
    with pytest.raises(ValueError, match="overlap"):
        cpu.copy_into(target, target.rows(1, 3), offset=1)
    cpu.copy_into(target, target.rows(2, 4))


def test_every_half_becomes_its_float(vulkan: VulkanEngine) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert same(vulkan.cast(vulkan.tensor(halves), "float32").numpy(), halves.astype(np.float32))
    bits = np.arange(2**16, dtype=np.uint16)
    values = vulkan.cast(vulkan.tensor(bits, "bfloat16"), "float32").numpy()
    assert same(values, (bits.astype(np.uint32) << 16).view(np.float32))


def test_floats_become_halves(vulkan: VulkanEngine) -> None:
    x = random_floats(20_001)
    with np.errstate(over="ignore"):
        assert same(vulkan.cast(vulkan.tensor(x), "float16").numpy(), x.astype(np.float16))
    bits = vulkan.cast(vulkan.tensor(x), "bfloat16").numpy()
    assert np.array_equal(bits, bfloat16_bits(x))


def test_bfloat16_rounds_to_nearest_even() -> None:
    """The reference itself, on values worked out by hand: 8 bits of significand."""
    for value, expected in (
        (1 + 2**-8, 1.0),  # tie: to even, down
        (1 + 3 * 2**-8, 1 + 2**-6),  # tie: to even, up
        (1 + 2**-8 + 2**-20, 1 + 2**-7),
        (3.4e38, np.inf),
        (-np.inf, -np.inf),
        (1.0, 1.0),
    ):
        assert bfloat16_values(bfloat16_bits(np.float32(value))) == expected
    payload = np.array([0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(bfloat16_values(bfloat16_bits(payload))).all()


def test_floats_become_integers(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    x = np.array([0, -0.5, 0.99, -1.99, 7.5, 1e9 + 64, 2**31, -(2**31), 3e38, -np.inf, np.inf, np.nan], np.float32)
    low, high = -(2**31), 2**31 - 1
    expected = [0, 0, 0, -1, 7, 1_000_000_064, high, low, high, low, high, 0]
    for engine in (vulkan, cpu):
        assert engine.cast(engine.tensor(x), "int32").numpy().tolist() == expected
    x = random_floats(2000)
    assert np.array_equal(vulkan.cast(vulkan.tensor(x), "int32").numpy(), cpu.cast(cpu.tensor(x), "int32").numpy())


def test_integers_become_floats(vulkan: VulkanEngine) -> None:
    rng = np.random.default_rng(4)
    x = np.concatenate([rng.integers(-(2**31), 2**31, 5001), rng.integers(-(2**25), 2**25, 5000), [0, 1, -1]])
    x = np.concatenate([x, [2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**31 - 1, -(2**31)]]).astype(np.int32)
    assert same(vulkan.cast(vulkan.tensor(x), "float32").numpy(), x.astype(np.float32))


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16", "int32"])
def test_every_pair_on_odd_sizes(vulkan: VulkanEngine, cpu: CpuEngine, source: str, target: str) -> None:
    rng = np.random.default_rng(6)

    def cast(engine: ComputeEngine, array: np.ndarray) -> np.ndarray:
        return engine.cast(engine.tensor(array, source), target).numpy()

    for n in SIZES:
        values = (rng.standard_normal(n) * 100).astype(np.float32)
        array = bfloat16_bits(values) if source == "bfloat16" else values.astype(numpy_dtype(source))
        assert same(cast(vulkan, array), cast(cpu, array)), n


@pytest.mark.parametrize("rows", [(1, 2), (1, 4), (2, 3)])
def test_cast_of_a_16_bit_view(vulkan: VulkanEngine, rows: tuple[int, int]) -> None:
    array = np.arange(15, dtype=np.float16).reshape(5, 3)
    view = vulkan.tensor(array).rows(*rows)
    assert np.array_equal(vulkan.cast(view, "float32").numpy(), array[slice(*rows)])
    assert np.array_equal(vulkan.cast(view, "float16").numpy(), array[slice(*rows)])


def test_cast_to_what_does_not_exist(cpu: CpuEngine) -> None:
    with pytest.raises(ValueError, match="uint32"):
        cpu.cast(cpu.zeros((2,)), "uint32")
    with pytest.raises(ValueError, match="float8"):
        cpu.cast(cpu.zeros((2,)), "float8")
