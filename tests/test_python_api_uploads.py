"""What becomes of an array on its way into a tensor: the same values, or an error."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.vulkan_engine import VulkanEngine


@pytest.fixture(params=["vulkan", "cpu"])
def engine(request: pytest.FixtureRequest) -> ComputeEngine:
    """Both engines that compute."""
    return request.getfixturevalue(request.param)


REFUSED: list[tuple[Any, str | None, str]] = [
    ([1.5, 2.0], "int32", "1.5.*int32.*rint"),
    ([3.7], "uint32", "3.7.*uint32"),
    ([np.nan], "int32", "nan.*do not fit int32"),
    ([1.0, np.nan, 2.0], "int32", "nan"),
    ([np.inf], "int32", "inf.*do not fit"),
    ([1e20], "int32", r"1e\+20.*do not fit int32"),
    (np.float32([2.0**31]), "int32", "do not fit int32"),
    ([-1.0], "uint32", "-1.0.*do not fit uint32"),
    ([-1], "uint32", "do not fit uint32"),
    ([2**31], "int32", "do not fit int32"),
    (np.array([2**32], np.uint64), "uint32", "do not fit uint32"),
    (np.array([-1], np.int8), "uint32", "do not fit uint32"),
    ([1e39], None, "too large for float32"),
    ([-1e300, 0.0], "float32", "too large for float32"),
    ([65520.0], "float16", "too large for float16"),
    ([70000], "float16", "too large for float16"),
    ([3.4e38 * 1.01], "bfloat16", "too large"),
    ([1, 2], "bfloat16", "int64 as bfloat16.*uint16"),
    ([1 + 2j], None, "complex.*real"),
    ([1 + 2j], "float32", "complex.*real"),
    (["1.5"], "float32", "real numbers"),
    ("text", None, "real numbers"),
    (b"text", "int32", "real numbers"),
    ([None], "float32", "object.*numbers"),
    ([object()], "float32", "object"),
    (np.array([1, "x"], object), "int32", "object"),
    (np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")]), None, "real numbers"),
    (np.array([datetime.datetime(2020, 1, 1)], "datetime64[s]"), "int32", "real numbers"),
    ([True, False], None, "booleans"),
    ([True, False], "float32", "booleans"),
    ([1.0], "float8", "unknown dtype"),
    ([[1.0], [1.0, 2.0]], None, "inhomogeneous|sequence"),
    (np.array([1], np.uint64), None, "uint64"),
]


@pytest.mark.parametrize(("values", "dtype", "message"), REFUSED)
def test_what_cannot_be_stored(engine: ComputeEngine, values: Any, dtype: str | None, message: str) -> None:
    """Nothing is truncated, wrapped, parsed or dropped unseen."""
    with pytest.raises(ValueError, match=f"(?s){message}"):
        engine.tensor(values, dtype)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("int32", [1.5]), ("int32", [2**31]), ("float32", [1j]), ("float16", [1e6]), ("int32", [True])],
)
def test_uploads_are_checked_too(engine: ComputeEngine, dtype: str, values: Any) -> None:
    """Into a tensor that exists; it keeps its values."""
    x = engine.tensor(np.array([7.0]), dtype)
    with pytest.raises(ValueError, match=r"store|fit|large"):
        engine.upload(x, values)
    assert x.item() == 7
    with pytest.raises(ValueError, match=r"shape \(1, 1\) into a tensor of shape \(1,\)"):
        engine.upload(x, [[1]])
    with pytest.raises(TypeError, match="upload"):
        engine.upload(np.ones(1), [1])  # type: ignore[arg-type]


TAKEN: list[tuple[Any, str | None, Any]] = [  # values, dtype, expected
    (3.5, None, np.float32(3.5)),
    (np.float64(0.1), None, np.float32(0.1)),
    (7, None, np.int32(7)),
    ([], None, np.zeros(0, np.float32)),
    (np.zeros((0, 3), np.int64), None, np.zeros((0, 3), np.int32)),
    (np.zeros((2, 0)), "int32", np.zeros((2, 0), np.int32)),
    (np.arange(12.0).reshape(3, 4).T, None, np.arange(12, dtype=np.float32).reshape(3, 4).T),
    (np.arange(10)[::-2], None, np.arange(10, dtype=np.int32)[::-2]),
    (np.broadcast_to(np.float32(2), (3, 2)), None, np.full((3, 2), 2, np.float32)),
    (np.arange(4, dtype=">f4"), None, np.arange(4, dtype=np.float32)),
    (np.arange(4, dtype=">i8"), None, np.arange(4, dtype=np.int32)),
    (np.arange(4, dtype=">f8"), "int32", np.arange(4, dtype=np.int32)),
    (np.arange(3, dtype=">u2"), None, np.arange(3, dtype=np.int32)),
    ([2.0, -3.0], "int32", np.int32([2, -3])),
    ([2147483647.0, -2147483648.0], "int32", np.int32([2**31 - 1, -(2**31)])),
    (np.array([2**32 - 1], np.uint64), "uint32", np.uint32([2**32 - 1])),
    ([np.nan, np.inf, -np.inf, 1e-46], None, np.float32([np.nan, np.inf, -np.inf, 0])),
    ([np.inf, 65519.0], "float16", np.float16([np.inf, 65504])),
    (3.4028235677973362e38, None, np.float32(3.4028235e38)),
    ([2**24 + 1], "float32", np.float32([2**24])),
    ([1.0, -2.5, 1.00390625], "bfloat16", np.uint16([0x3F80, 0xC020, 0x3F80])),
    (np.uint16([0x3F80]), "bfloat16", np.uint16([0x3F80])),
    (range(3), None, np.int32([0, 1, 2])),
]


@pytest.mark.parametrize(("values", "dtype", "expected"), TAKEN)
def test_what_is_stored(engine: ComputeEngine, values: Any, dtype: str | None, expected: Any) -> None:
    """No dimension, none of a size, any layout, any byte order; floats round to nearest even."""
    x = engine.tensor(values, dtype)
    got = x.numpy()
    assert got.shape == expected.shape == x.shape
    assert got.dtype == expected.dtype
    assert np.array_equal(got, expected, equal_nan=got.dtype.kind == "f")
    target = engine.empty(x.shape, x.dtype)
    engine.upload(target, values)
    assert np.array_equal(target.numpy(), got, equal_nan=got.dtype.kind == "f")


def test_tensors_are_copied(engine: ComputeEngine, oracle: CpuEngine) -> None:
    """From this engine or another, in their own type."""
    for dtype in ("float32", "float16", "int32", "bfloat16"):
        x = engine.tensor(np.array([1.0, 2.0]), dtype)
        y = engine.tensor(x)
        assert y.dtype == dtype
        assert y.storage is not x.storage
        assert np.array_equal(y.numpy(), x.numpy())
    assert engine.tensor(oracle.tensor([0.5])).item() == 0.5


def test_masks_are_not_lost(engine: ComputeEngine) -> None:
    """A masked array must be filled first."""
    with pytest.raises(TypeError, match="mask"):
        engine.tensor(np.ma.masked_greater(np.arange(4), 2))


def test_sizes(vulkan: VulkanEngine) -> None:
    """A number alone is one dimension; NumPy's integers; nothing is truncated; too large is said before allocating."""
    assert vulkan.zeros(3).shape == (3,)
    assert vulkan.zeros((np.int64(2), 3)).shape == (2, 3)
    assert vulkan.zeros(np.array([2, 3])).shape == (2, 3)
    assert vulkan.zeros(()).shape == ()
    for shape in ((2.0,), (2.7, 1), "23", (None,), 2.5):
        with pytest.raises(TypeError, match="whole numbers"):
            vulkan.empty(shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        vulkan.empty((2, -1))
    with pytest.raises(ValueError, match="elements or more"):
        vulkan.empty((2**16, 2**16))
    with pytest.raises(ValueError, match="elements or more"):
        vulkan.tensor(np.broadcast_to(np.float32(0), (2**20, 2**20)))
