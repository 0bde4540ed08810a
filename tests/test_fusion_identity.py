"""Calls that compare equal and are not the same: signs of zeros, settings by other names. Fusion tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vkfold.engine import compute_engine
from vkfold.engine.expr import constant, variables
from vkfold.engine.fusion import Call
from vkfold.engine.fusion_map import signs_of_zeros
from vkfold.engine.launcher import OpLauncher
from vkfold.engine.map_kernel import MapKernel
from vkfold.engine.op import Cost, Op
from vkfold.engine.ops.elementwise import MapOp
from vkfold.engine.tensor import Tensor, TensorSpec
from vkfold.engine.vulkan_engine import VulkanEngine

from .fusion_checks import check_same, counts, fusing_engine

engine = pytest.fixture(name="engine")(fusing_engine)
_x, _a, _b = variables("x a b")


class Line(MapOp):
    """x * a + b; both have a default, so a call may name either, in any order."""

    name = "test_line"
    kernel = MapKernel("test_line", ("x",), ("y",), {"y": _x * _a + _b}, scalars="float a, float b")

    def outputs(self, x: TensorSpec, *, a: float = 1.0, b: float = 0.0) -> Sequence[TensorSpec]:
        return (x,)

    def scalar_values(self, *specs: TensorSpec, a: float = 1.0, b: float = 0.0) -> tuple[float, ...]:
        return a, b


class Grid(Op):
    """Zeros [m + 1, 10 n + 1]."""

    name = "test_grid"

    def outputs(self, x: TensorSpec, *, m: int = 0, n: int = 0) -> Sequence[TensorSpec]:
        return (TensorSpec((m + 1, 10 * n + 1)),)

    def flops(self, x: TensorSpec, **settings: int) -> int:
        return 0

    def launch(self, gpu: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **settings: int) -> None:
        gpu.fill_zero(outputs[0])


LINE, GRID = Line(), Grid()


def test_settings_have_names(engine: VulkanEngine) -> None:
    x = engine.tensor(np.full(8, 3.0))
    found = []
    for settings in ({"a": 5.0}, {"b": 5.0}, {"a": 5.0, "b": 2.0}, {"b": 5.0, "a": 2.0}, {}):
        y = engine.execute(LINE, (x,), **settings)[0]
        product = engine.multiply(y, x)
        del y
        found.append(product.numpy()[0])
    assert found == [45, 24, 51, 33, 9]
    assert counts(engine)["elementwise neighbours"] == 5
    shapes = [engine.execute(GRID, (x,), **settings)[0].shape for settings in ({"m": 5}, {"n": 5}, {"n": 5, "m": 2})]
    assert shapes == [(6, 1), (1, 51), (3, 51)]


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)], ids=["plus first", "minus first"])
def test_zeros_have_signs(engine: VulkanEngine, zeros: tuple[float, float]) -> None:
    """Equal as settings, and one over them is not."""
    one, eye = engine.tensor(np.ones((4, 4))), engine.tensor(np.eye(4))

    def scaled(engine: VulkanEngine) -> list[np.ndarray]:
        found = []
        for zero in zeros:
            y = engine.scale(one, zero)
            found.append(engine.divide(one, y).numpy())
            del y
            y = engine.scale(engine.matmul(one, eye), zero)
            found.append(engine.divide(one, y).numpy())
            del y
            y = engine.map(_x * _a, x=one, a=zero)
            found.append(engine.divide(one, y).numpy())
            del y
            y = engine.map(_x * constant(zero), x=one)
            found.append(engine.divide(one, y).numpy())
            del y
            y = engine.execute(LINE, (one,), a=zero, b=-0.0)[0]
            found.append(engine.divide(one, y).numpy())
        return found

    def together(engine: VulkanEngine) -> list[np.ndarray]:
        """Both in one kernel."""
        first, second = (engine.scale(one, zero) for zero in zeros)
        return [engine.divide(first, one).numpy(), engine.divide(one, second).numpy()]

    check_same(engine, scaled)
    check_same(engine, together)
    found = scaled(engine)
    for zero, arrays in zip(zeros, (found[:5], found[5:]), strict=True):
        assert all((array == np.copysign(np.inf, zero)).all() for array in arrays)
    assert counts(engine)["elementwise neighbours"] >= 10


def test_signs_of_zeros_among_settings() -> None:
    settings = {"a": 0.0, "b": (1.0, -0.0, (0.0, np.float32(-0.0))), "c": 0, "d": False, "e": "0", "f": 2.0, "g": None}
    assert signs_of_zeros(settings.values()) == (1.0, -1.0, 1.0, -1.0, 1.0, 1.0)
    assert signs_of_zeros([]) == signs_of_zeros([3.0, (1, 2), True, "", None]) == ()


def test_zeros_have_places(engine: VulkanEngine) -> None:
    """0 and -0.0 for -0.0 and 0: the same numbers, and as many signs of each kind."""
    one, minus = engine.tensor(np.ones(4)), engine.tensor(np.full(4, -1.0))
    found = []
    for factor, offset in ((0, -0.0), (-0.0, 0), (0.0, -0.0), (-0.0, np.int64(0)), (-0.0, -0.0), (0, 0)):

        def call(engine: VulkanEngine, factor: float = factor, offset: float = offset) -> list[np.ndarray]:
            y = engine.affine(minus, factor, offset)
            quotient = engine.divide(one, y)
            del y
            return [quotient.numpy()]

        check_same(engine, call)
        found.append(call(engine)[0][0])
    assert found == [-np.inf, np.inf, -np.inf, np.inf, np.inf, np.inf]


def test_joint_calls_are_told_apart_by_names() -> None:
    """Kernels are compiled for a kind of call; the values alone do not tell it."""
    kinds = []
    for settings in ({"a": 1.0, "b": 2.0}, {"b": 1.0, "a": 2.0}, {"a": 1.0, "b": 2.0}):
        kinds.append(OpLauncher.kind_of(Call(LINE, Cost(0, 0, 0), (), (), 0, settings, ())))
    assert kinds[0] == kinds[2] != kinds[1]


def test_rules_are_bounded(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor that differs from call to call, NaN among them, does not fill memory."""
    monkeypatch.setattr(compute_engine, "_MOST_RULES", 50)
    vulkan.known_rules.clear()
    x = vulkan.tensor(np.arange(4.0))
    for number in range(120):
        assert np.array_equal(vulkan.scale(x, float(number)).numpy(), np.arange(4.0) * number)
        vulkan.scale(x, float("nan"))
        assert len(vulkan.known_rules) <= 50
