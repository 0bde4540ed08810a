"""Hand-written kernels: everything that does not fit is refused before the device sees it, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vkfold.engine.errors import VkfoldError
from vkfold.engine.kernel import Kernel
from vkfold.engine.vulkan_engine import VulkanEngine

AXPY = Kernel(
    "axpy",
    """void main() {
        uint i = group_index() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
        if (i < args.n) args.y.v[i] = fma(args.alpha, args.x.v[i], args.y.v[i]) + float(args.shift);
    }""",
    "in f32 x[n], inout f32 y[n], uint n, int shift, float alpha",
    local_size=64,
)
WORDS = Kernel(
    "words",
    "void main() { args.y.v[group_index()] = args.x.v[group_index()] + args.z.v[0]; }",
    "in i32 x, out u32 y, in i32 z",
    local_size=1,
)
TABLE = Kernel("table", "void main() {}", "out f32x4 y[rows * groups + 1], uint rows, uint groups", local_size=1)


def test_what_fits_is_taken(vulkan: VulkanEngine) -> None:
    """Python's and NumPy's numbers, offsets in bytes, words of any type."""
    x, y = vulkan.tensor(np.arange(10.0)), vulkan.tensor(np.ones(10))
    vulkan.dispatch(AXPY, np.int64(1), x, y, np.uint32(10), np.int8(-1), np.float64(2))
    assert y.numpy().tolist() == [2.0 * i for i in range(10)]
    vulkan.dispatch(AXPY, 1, (x, 16), (y, 24), 4, 0, 1)
    assert y.numpy()[6:].tolist() == [2.0 * i + (i - 2) for i in range(6, 10)]
    i, u, f = vulkan.tensor([1, 2]), vulkan.zeros((2,), "uint32"), vulkan.zeros((2,))
    vulkan.dispatch(WORDS, 2, i, u, i)
    vulkan.dispatch(WORDS, 2, i, f, i)
    assert u.numpy().tolist() == f.numpy().view(np.uint32).tolist() == [2, 3]


WRONG: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    ("an int32 tensor", TypeError, r"'axpy'.*'x'.*f32.*int32.*cast", {"x": "int32"}),
    ("a float16 tensor", TypeError, r"'axpy'.*'y'.*f32.*float16.*cast", {"y": "float16"}),
    ("an array", TypeError, r"'axpy'.*'x'.*NumPy array.*engine\.tensor", {"x": np.ones(10)}),
    ("None", TypeError, r"'axpy'.*'x'.*None", {"x": None}),
    ("a number for a pointer", TypeError, r"'axpy'.*'x'.*3", {"x": 3}),
    ("a tensor for a scalar", TypeError, r"'axpy'.*'n'.*uint.*Tensor", {"n": "float32"}),
    ("a float for uint", TypeError, r"'axpy'.*'n'.*uint.*2\.0.*int", {"n": 2.0}),
    ("a string for float", TypeError, r"'axpy'.*'alpha'.*float.*'1'.*number", {"alpha": "1"}),
    ("None for float", TypeError, r"'axpy'.*'alpha'.*None", {"alpha": None}),
    ("complex for float", TypeError, r"'axpy'.*'alpha'.*complex", {"alpha": 1j}),
    ("-1 for uint", ValueError, r"'axpy'.*'n'.*uint.*-1.*0 to 4294967295", {"n": -1}),
    ("2^32 for uint", ValueError, r"'axpy'.*'n'.*4294967296", {"n": 2**32}),
    ("2^31 for int", ValueError, r"'axpy'.*'shift'.*int.*2147483648", {"shift": 2**31}),
    ("a float beyond float32", ValueError, r"'axpy'.*'alpha'.*1e\+39.*float32", {"alpha": 1e39}),
    ("an int beyond float64", ValueError, r"'axpy'.*'alpha'.*float32", {"alpha": 10**400}),
    ("more elements than x has", ValueError, r"'axpy'.*'x'.*\bn\b.*n = 11.*shape \(10,\)", {"n": 11}),
    ("an offset that leaves too few", ValueError, r"'axpy'.*'x'.*n = 10.*8 from there on", {"x": ("float32", 8)}),
    ("an offset beyond the tensor", ValueError, r"'axpy'.*'x'.*offset 44.*40 bytes", {"x": ("float32", 44)}),
    ("a negative offset", ValueError, r"'axpy'.*'x'.*offset -4", {"x": ("float32", -4)}),
    ("an offset inside an element", ValueError, r"'axpy'.*'x'.*offset 2.*multiple of 4", {"x": ("float32", 2)}),
    ("a fraction of an offset", TypeError, r"'axpy'.*'x'.*offset.*1\.5", {"x": ("float32", 1.5)}),
    ("a fraction of a workgroup", TypeError, r"'axpy'.*workgroups.*1\.5", {"groups": 1.5}),
    ("-1 workgroups", ValueError, r"'axpy'.*-1 workgroups", {"groups": -1}),
]


@pytest.mark.parametrize(("error", "message", "given"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_does_not_fit_is_named(
    vulkan: VulkanEngine, error: type[Exception], message: str, given: dict[str, Any]
) -> None:
    """Kernel, argument, value and remedy; nothing is recorded."""

    def tensor(what: Any) -> Any:
        if isinstance(what, tuple):
            return (tensor(what[0]), what[1])
        return vulkan.zeros((10,), what) if isinstance(what, str) and what != "1" else what

    values = {"x": "float32", "y": "float32", "n": 10, "shift": 0, "alpha": 1.0, **given}
    groups = values.pop("groups", 1)
    arguments = [tensor(value) for value in values.values()]
    vulkan.end_batch()
    with pytest.raises(error, match=message):
        vulkan.dispatch(AXPY, groups, *arguments)
    assert vulkan.recorder._current is None, "something was recorded"


def test_counts_of_arguments_and_other_engines(vulkan: VulkanEngine) -> None:
    """The message lists the arguments."""
    with pytest.raises(TypeError, match=r"'axpy' takes 5 arguments \(x, y, n, shift, alpha\), 1 were given"):
        vulkan.dispatch(AXPY, 1, vulkan.zeros((1,)))
    with pytest.raises(TypeError, match="the kernel is 'axpy'"):
        vulkan.dispatch("axpy", 1)  # type: ignore[arg-type]
    with VulkanEngine() as other:
        pair = [other.zeros((4,)), vulkan.zeros((4,))]
        with pytest.raises(ValueError, match=r"'axpy': argument 'x' lives on another engine"):
            vulkan.dispatch(AXPY, 1, *pair, 4, 0, 1.0)
        pair.clear()


def test_a_count_made_of_several_sizes(vulkan: VulkanEngine) -> None:
    """Products, sums, and elements of 16 bytes."""
    y = vulkan.zeros((28,))  # 7 vec4
    vulkan.dispatch(TABLE, 1, y, 2, 3)
    with pytest.raises(ValueError, match=r"rows = 2, groups = 4: 9"):
        vulkan.dispatch(TABLE, 1, y, 2, 4)
    with pytest.raises(VkfoldError, match="aligned"):
        vulkan.dispatch(TABLE, 1, (y, 4), 1, 1)


@pytest.mark.parametrize(
    "declared",
    ["in f32 x[m], uint n", "in f32 x[n - 1], uint n", "in f32 x[2n], uint n", "in f32 x[a], float a", "in f32 x y"],
)
def test_bad_declarations(declared: str) -> None:
    """Refused where the kernel is written."""
    with pytest.raises(ValueError, match=r"bad|argument"):
        Kernel("bad", "void main() {}", declared, local_size=1)


def test_a_workgroup_too_large_for_the_device(vulkan: VulkanEngine) -> None:
    """It is not made smaller unseen."""
    largest = vulkan.recorder.max_invocations
    for size, fits in ((largest, True), (largest + 1, False), (2**20, False)):
        kernel = Kernel("large", "void main() {}", "out f32 y", local_size=size)
        if fits:
            vulkan.dispatch(kernel, 1, vulkan.zeros((1,)))
            vulkan.end_batch()
        else:
            with pytest.raises(ValueError, match=rf"'large': local_size {size}, .* at most {largest}"):
                vulkan.dispatch(kernel, 1, vulkan.zeros((1,)))
    for bad in (0, -1):
        with pytest.raises(ValueError, match="local_size or subgroups"):
            Kernel("large", "void main() {}", "out f32 y", local_size=bad)
