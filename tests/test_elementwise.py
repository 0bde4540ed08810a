"""Elementwise ops: add, multiply, scale, activations, SwiGLU; any size, values at the ends of the range, gradients."""

from __future__ import annotations

import re

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.kernel import SHADER_DIR
from vkfold.engine.kernel_registry import known_kernels
from vkfold.engine.map_kernel import MapKernel, Operand
from vkfold.engine.vulkan_engine import VulkanEngine

from .op_checks import EPS32, ODD_SIZES, check_gradient, check_op, run, sampled_sizes

KINDS = ("relu", "gelu", "silu")
# exp is within 3 + 2 |x| units in the last place (Vulkan's precision table), division within 2.5; weighted by what is
# left of the value at that x this stays below 40 units of the result or of 1.
CLOSE = 40 * 2 * EPS32


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return (scale * rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("size", ODD_SIZES)
def test_arithmetic_is_exact(vulkan: VulkanEngine, size: int) -> None:
    """add, multiply and scale round once, as NumPy does: equal bits."""
    a, b = normal(size, seed=1), normal(size, seed=2)
    x, y = vulkan.tensor(a), vulkan.tensor(b)
    assert np.array_equal((x + y).numpy(), a + b)
    assert np.array_equal((x * y).numpy(), a * b)
    assert np.array_equal((x * 0.3).numpy(), a * np.float32(0.3))
    vulkan.add_(x, y)
    assert np.array_equal(x.numpy(), a + b)
    assert np.array_equal(y.numpy(), b)


def test_shapes_and_views(vulkan: VulkanEngine) -> None:
    """More dimensions; views that start in the middle of 16 bytes; neighbours untouched."""
    a = normal(5, 3, 7)
    x = vulkan.tensor(a)
    assert np.array_equal((x + x).numpy(), a + a)
    vulkan.add_(x.rows(1, 3), x.rows(3, 5))
    expected = a.copy()
    expected[1:3] += a[3:5]
    assert np.array_equal(x.numpy(), expected)
    assert (vulkan.tensor(np.zeros((0, 4))) + vulkan.tensor(np.zeros((0, 4)))).numpy().shape == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_activations(vulkan: VulkanEngine, oracle: CpuEngine, kind: str) -> None:
    """Value and gradient against float64, sizes around the width of a load, both ends of the range."""
    for size in (*ODD_SIZES, 4096):
        x, dy = normal(size, scale=4.0), normal(size, seed=9)
        check_op(vulkan, oracle, lambda engine, t: engine.activation(t, kind), (x,), CLOSE)
        check_op(vulkan, oracle, lambda engine, d, t: engine.activation_backward(d, t, kind), (dy, x), CLOSE)
    ends = np.array([0, -0.0, 1e-30, -1e-30, 87, -87, 88.8, -88.8, 200, -200, 1e4, -1e4, 3e38, -3e38], np.float32)
    check_op(vulkan, oracle, lambda engine, t: engine.activation(t, kind), (ends,), CLOSE)
    ones = np.ones_like(ends)
    (got, *_) = check_op(
        vulkan, oracle, lambda engine, d, t: engine.activation_backward(d, t, kind), (ones, ends), CLOSE
    )
    assert np.isfinite(got).all()


def plain(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Value and derivative by the formulas of the papers, in float64: nothing of engine/expr.py is in them."""
    x = x.astype(np.float64)
    if kind == "relu":
        return np.maximum(x, 0), (x > 0).astype(np.float64)
    if kind == "silu":
        s = 1 / (1 + np.exp(-x))
        return x * s, s * (1 + x * (1 - s))
    root = np.sqrt(2 / np.pi)
    t = np.tanh(root * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine_name", ["vulkan", "cpu", "oracle"])
def test_activations_are_the_papers_formulas(request: pytest.FixtureRequest, engine_name: str, kind: str) -> None:
    """The engines share one expression; here it is compared with another way to write the same, SwiGLU too."""
    engine = request.getfixturevalue(engine_name)
    x, dy, up = normal(1003, scale=4.0), normal(1003, seed=1), normal(1003, seed=2)
    x[:3] = 0, 30.5, -30.5
    close = 1e-13 if engine_name == "oracle" else CLOSE
    value, slope = plain(x, kind)
    dy, up = dy.astype(np.float64), up.astype(np.float64)
    t, d = engine.tensor(x), engine.tensor(dy)
    assert np.all(np.abs(engine.activation(t, kind).numpy() - value) <= close * np.maximum(1, np.abs(value)))
    got = engine.activation_backward(d, t, kind).numpy()
    assert np.all(np.abs(got - dy * slope) <= close * np.maximum(1, np.abs(dy * slope)))
    if kind == "silu":
        both = engine.tensor(np.concatenate([x, up]).reshape(1, -1))
        expected = value * up
        scale = 1 + np.abs(dy) * np.maximum(np.abs(x), np.abs(up)) + np.abs(expected)
        assert np.all(np.abs(engine.swiglu(both).numpy()[0] - expected) <= close * scale)
        got = engine.swiglu_backward(engine.tensor(dy.reshape(1, -1)), both).numpy()[0].reshape(2, -1)
        assert np.all(np.abs(got - [dy * up * slope, dy * value]) <= close * scale * (1 + np.abs(up)))


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_input_has_a_gradient(vulkan: VulkanEngine, cpu: CpuEngine, kind: str) -> None:
    """At both infinities the slope is 0 or 1, not infinity times 0."""
    x = np.array([np.inf, -np.inf, 3e38, -3e38, 1e4, -1e4], np.float32)
    for engine in (vulkan, cpu):
        got = engine.activation_backward(engine.tensor(np.ones(6)), engine.tensor(x), kind).numpy()
        assert np.array_equal(got, np.array([1, 0, 1, 0, 1, 0], np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_wide_and_narrow_agree(vulkan: VulkanEngine, kind: str) -> None:
    """The four-element and the one-element kernel, and the matmul epilogue, give the same bits."""
    x = normal(1025, scale=5.0)
    whole = vulkan.activation(vulkan.tensor(x), kind).numpy()
    shifted = vulkan.activation(vulkan.tensor(x).reshape(1025, 1).rows(1, 1025), kind).numpy().reshape(-1)
    assert np.array_equal(whole[1:], shifted)
    square = vulkan.tensor(x[:1024].reshape(32, 32))
    fused = vulkan.matmul(square, vulkan.tensor(np.eye(32)), activation=kind).numpy()
    assert np.array_equal(fused.reshape(-1), whole[:1024])


@pytest.mark.parametrize("kind", KINDS)
def test_activation_gradients(oracle: CpuEngine, kind: str) -> None:
    check_gradient(
        oracle,
        lambda engine, x: engine.activation(x, kind),
        lambda engine, dy, x: engine.activation_backward(dy, x, kind),
        (normal(40, scale=3.0),),
    )


@pytest.mark.parametrize("engine_name", ["vulkan", "cpu"])
def test_gelu_at_the_ends(request: pytest.FixtureRequest, engine_name: str) -> None:
    """The tanh form overflows nowhere: signed zeros and the input itself, gradients 0 and 1."""
    engine = request.getfixturevalue(engine_name)
    x = np.array([-13.24, 21.657723, -1e4, 1e4], np.float32)
    y = engine.gelu(engine.tensor(x)).numpy()
    assert np.array_equal(y, np.array([-0.0, 21.657723, -0.0, 1e4], np.float32))
    assert np.signbit(y).tolist() == [True, False, True, False]
    gradient = engine.activation_backward(engine.tensor(np.ones(4)), engine.tensor(x), "gelu").numpy()
    assert np.array_equal(gradient, np.array([0, 1, 0, 1], np.float32))


def test_no_tanh_in_shaders() -> None:
    """Real drivers overflow in tanh; sin and cos promise little precision."""
    for path in SHADER_DIR.rglob("*"):
        if path.suffix in (".comp", ".glsl"):
            text = re.sub(r"//.*|/\*.*?\*/", "", path.read_text(encoding="utf-8"))
            assert not re.search(r"\b(tanh|sin|cos)\s*\(", text), path.name
    for kernel in known_kernels():
        text = re.sub(r"//.*|/\*.*?\*/", "", kernel.glsl)
        assert not re.search(r"\b(tanh|sin|cos)\s*\(", text), kernel.name


def test_nan_stays(vulkan: VulkanEngine) -> None:
    x = vulkan.tensor(np.array([np.nan, 1.0, np.nan, -1.0, np.nan], np.float32))
    for kind in KINDS:
        assert np.isnan(vulkan.activation(x, kind).numpy()).tolist() == [True, False, True, False, True]


def test_swiglu(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    """Forward and backward, widths that are and are not multiples of 4, leading dimensions."""
    for rows, width in [*sampled_sizes(2, 18, sizes=(1, 2, 3, 4, 7, 8, 16, 31, 33, 64, 100, 257)), (6, 384)]:
        gate_up, dy = normal(rows, 2 * width, scale=2.0), normal(rows, width, seed=3)
        scale = 1 + np.abs(gate_up).max() * np.abs(dy).max()
        check_op(vulkan, oracle, lambda engine, t: engine.swiglu(t), (gate_up,), CLOSE * scale)
        check_op(vulkan, oracle, lambda engine, d, t: engine.swiglu_backward(d, t), (dy, gate_up), CLOSE * scale)
    three = normal(2, 3, 8)
    assert run(vulkan, lambda engine, t: engine.swiglu(t), (three,))[0].shape == (2, 3, 4)


def test_swiglu_gradient(oracle: CpuEngine) -> None:
    check_gradient(
        oracle,
        lambda engine, x: engine.swiglu(x),
        lambda engine, dy, x: engine.swiglu_backward(dy, x),
        (normal(4, 10, scale=2.0),),
    )


def test_own_map_kernel(vulkan: VulkanEngine) -> None:
    """A kernel from one line of GLSL: two outputs, an own layout, a scalar."""
    kernel = MapKernel(
        "test_map",
        ("x", Operand("reverse", "x", "args.num_elements - 1u - index")),
        ("low", "high"),
        "low = min(x, reverse) * args.factor; high = max(x, reverse);",
        scalars="float factor",
    )
    a = normal(37)
    x, low, high = vulkan.tensor(a), vulkan.zeros((37,)), vulkan.zeros((37,))
    kernel.launch(vulkan, 37, x, low, high, 2.0, wide=False)
    assert np.array_equal(low.numpy(), np.minimum(a, a[::-1]) * 2)
    assert np.array_equal(high.numpy(), np.maximum(a, a[::-1]))


def test_bad_input(cpu: CpuEngine) -> None:
    a, b = cpu.tensor(np.zeros(3)), cpu.tensor(np.zeros(4))
    for call in (cpu.add, cpu.multiply, cpu.add_):
        with pytest.raises(ValueError, match=r"b is float32 \(4,\), a is float32 \(3,\)"):
            call(a, b)
    with pytest.raises(ValueError, match="unknown activation 'elu': use one of relu, gelu, silu"):
        cpu.activation(a, "elu")
    with pytest.raises(ValueError, match="even last dimension"):
        cpu.swiglu(a)
    with pytest.raises(ValueError, match="x is int32, needed is float32"):
        cpu.relu(cpu.tensor(np.zeros(3, np.int32)))


def test_relu_keeps_the_sign_of_zero(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    """relu(-0.0) is -0.0, as x is not below 0; its slope there is 0."""
    x = np.array([-0.0, 0.0, -1.0, 1.0, np.nan], np.float32)
    for engine in (vulkan, cpu):
        got = engine.relu(engine.tensor(x)).numpy()
        assert np.signbit(got[:4]).tolist() == [True, False, False, False] and np.isnan(got[4])
        slope = engine.activation_backward(engine.tensor(np.ones(5)), engine.tensor(x), "relu").numpy()
        assert slope[:4].tolist() == [0, 0, 0, 1]
