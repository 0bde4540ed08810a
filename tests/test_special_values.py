"""NaN, infinities and zeros of both signs are kept where a device can be told to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vkfold.engine import vulkan_pipeline
from vkfold.engine.expr import constant, exp, logistic, tanh, variables
from vkfold.engine.glsl_compiler import compile_glsl
from vkfold.engine.spirv import instructions, preserve_special_values
from vkfold.engine.vulkan_engine import VulkanEngine

from .spirv_validator import complaint

TEXT = "#version 460\nlayout(local_size_x = 1) in; void main() { float x = 2.0; x += x; }"


def test_the_module_declares_it_and_is_else_the_same() -> None:
    """One capability after the others, one execution mode of 32-bit floats behind the entry point."""
    spirv = compile_glsl(TEXT)
    made = preserve_special_values(spirv)
    before, after = ([w.tolist() for _, _, w in instructions(each)] for each in (spirv, made))
    entry = next(w[2] for w in before if w[0] & 0xFFFF == 15)
    added = [w for w in after if w not in before]
    assert added == [[2 << 16 | 17, 4466], [4 << 16 | 16, entry, 4461, 32]]
    assert [w for w in after if w not in added] == before
    assert not complaint(made)
    with pytest.raises(ValueError, match="without an entry point"):
        preserve_special_values(spirv[: 5 * 4])


@pytest.mark.parametrize("able", [True, False])
def test_pipelines_ask_for_it_where_the_device_can(
    vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    asked: list[bytes] = []

    def passed(spirv: bytes) -> bytes:
        asked.append(spirv)
        return spirv

    monkeypatch.setattr(vulkan_pipeline, "preserve_special_values", passed)
    device = vulkan.device
    monkeypatch.setattr(device, "physical", dataclasses.replace(device.physical, preserves_special_values=able))
    device.destroy_pipeline(device.create_pipeline(compile_glsl(TEXT), 1, 0, "special values"))
    assert len(asked) == able


def test_what_is_not_finite_is_not_folded_away(vulkan: VulkanEngine) -> None:
    """x - x and 0 x of NaN and infinities are NaN; -0 + -0 keeps its sign."""
    (x,) = variables("x")
    values = np.array([np.nan, np.inf, -np.inf, 1.0, -0.0], np.float32)
    with np.errstate(invalid="ignore"):
        for root, expected in ((x - x, values - values), (x * 0.0, values * np.float32(0)), (x + x, values + values)):
            got = vulkan.map(root, x=vulkan.tensor(values)).numpy()
            nan = np.isnan(expected)
            assert np.array_equal(np.isnan(got), nan)
            assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def test_functions_of_constants_keep_their_values(vulkan: VulkanEngine) -> None:
    """What a driver works out ahead when it is told to keep special values is what it would compute."""
    (x,) = variables("x")
    values = np.linspace(-2, 2, 101, dtype=np.float32)
    for root, number in ((exp(constant(-1.0)), np.exp(-1)), (tanh(constant(0.0)), 0), (logistic(constant(0.0)), 0.5)):
        got = vulkan.map(x + root, x=vulkan.tensor(values)).numpy()
        np.testing.assert_allclose(got, values + number, rtol=0, atol=1e-6)
