"""Four floats as two 64-bit words (shaders/words.glsl): the same bits as in one access."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vkfold.engine.kernel import Kernel
from vkfold.engine.kernel_registry import known_kernels
from vkfold.engine.ops.adamw_many import KERNEL as ADAMW_MANY
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine


@pytest.fixture
def engines() -> Iterator[tuple[VulkanEngine, VulkanEngine]]:
    """One with and one without words, where the device has 64-bit integers."""
    with VulkanEngine() as words, VulkanEngine() as plain:
        if "shaderInt64" not in words.device.physical.features:
            pytest.skip("the device has no 64-bit integers")
        words.recorder.in_words, plain.recorder.in_words = True, False
        yield words, plain


def norm(e: VulkanEngine, x: Tensor, dy: Tensor, w: Tensor) -> list[Tensor]:
    y, rstd = e.rms_norm(x, w, eps=1e-5)
    out = e.zeros(w.shape)
    e.rms_norm_weight_backward(dy, x, rstd, out, accumulate=True)
    return [y, rstd, out, e.rms_norm_backward(dy, x, w, rstd)]


def elementwise(e: VulkanEngine, x: Tensor, dy: Tensor, w: Tensor) -> list[Tensor]:
    return [e.gelu(x), e.activation_backward(dy, x, "silu"), e.add(x, dy), e.dropout_add(x, dy, p=0.3, site=2)]


def update(e: VulkanEngine, x: Tensor, dy: Tensor, w: Tensor) -> list[Tensor]:
    sums, state = e.gradient_norm([dy, w], max_norm=0.1)
    p, m, v = e.copy(x), e.scale(dy, 0.1), e.multiply(dy, dy)
    e.adamw_many_([p], [dy], [m], [v], state, weight_decays=[0.1])
    return [sums, state, p, m, v]


def rope(e: VulkanEngine, x: Tensor, dy: Tensor, w: Tensor) -> list[Tensor]:
    turned = e.copy(x).reshape(1, *x.shape)
    tables = [e.copy(t).reshape(-1, 4) for t in (x, dy)]
    e.rope_(turned, *tables, num_heads=2, head_dim=8)
    return [turned]


@pytest.mark.parametrize("compute", [norm, elementwise, update, rope])
@pytest.mark.parametrize("cols", [16, 36, 300])
def test_same_bits(
    engines: tuple[VulkanEngine, VulkanEngine],
    compute: Callable[[VulkanEngine, Tensor, Tensor, Tensor], list[Tensor]],
    cols: int,
) -> None:
    rng = np.random.default_rng(cols)
    arrays = [rng.standard_normal(shape) for shape in ((37, cols), (37, cols), (cols,))]
    arrays[0][3, 5], arrays[0][4, 1] = -0.0, 1e-42  # neither a sign nor a denormal is lost on the way
    results = []
    for engine in engines:
        engine.set_step_parameters(StepParameters(learning_rate=0.1, seed=3))
        results.append([tensor.numpy().tobytes() for tensor in compute(engine, *map(engine.tensor, arrays))])
    assert results[0] == results[1]


def test_which_kernels_have_such_places() -> None:
    assert ADAMW_MANY.in_words.digest != ADAMW_MANY.digest
    assert ADAMW_MANY.in_words.in_words is ADAMW_MANY.in_words
    plain = Kernel("k", "void main() { args.y.v[0] = 1.0; }", "out f32 y", local_size=1)
    assert plain.in_words is plain
    digests = {kernel.digest for kernel in known_kernels()}
    assert {ADAMW_MANY.digest, ADAMW_MANY.in_words.digest} <= digests


def test_only_where_it_pays(vulkan: VulkanEngine) -> None:
    device = vulkan.device
    expected = device.driver_name == "llvmpipe" and "shaderInt64" in device.physical.features
    assert vulkan.recorder.in_words == expected
