"""A call that fusion holds back is launched with the variants that were to be chosen when it was made."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from vkfold.engine.errors import BadInputError
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import variants
from vkfold.engine.tensor import Tensor
from vkfold.engine.variant_choice import ChoosingAs, choice_state, forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine

from .fusion_checks import arrays, as_if_new, fusion_of

engine = pytest.fixture(name="engine")(as_if_new)

BAD = [("VKFOLD_VARIANT", "matmul=rows3,attention=rows3"), ("VKFOLD_VARIANT", "matmul"), ("VKFOLD_TUNE", "maybe")]


Operands = tuple[Tensor, ...]
Calls = Callable[[VulkanEngine, Operands], Tensor]


@pytest.fixture
def operands(engine: VulkanEngine) -> Operands:
    """Uploaded before: an upload launches what is held back."""
    a, b, column, scalars = arrays((24, 16), (16, 16), (16,), (24,))
    return tuple(map(engine.tensor, (a, b, column, np.ones((1, 4, 1, 8)), scalars)))


def product(gpu: VulkanEngine, x: Operands) -> Tensor:
    return gpu.matmul(x[0], x[1])


def with_bias(gpu: VulkanEngine, x: Operands) -> Tensor:
    made = gpu.matmul(x[0], x[1])
    gpu.add_bias_(made, x[2])
    return made


def with_scale(gpu: VulkanEngine, x: Operands) -> Tensor:
    return gpu.scale(gpu.matmul(x[0], x[1]), 0.5)


def of_norm(gpu: VulkanEngine, x: Operands) -> Tensor:
    return gpu.matmul(gpu.rms_norm_apply(x[0], x[2], x[4]), x[1])


def attention(gpu: VulkanEngine, x: Operands) -> Tensor:
    return gpu.attention(x[3], x[3], x[3])[0]


CALLS = [product, with_bias, with_scale, of_norm, attention]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("variable", "text"), BAD)
def test_a_bad_switch_is_no_error_of_calls_that_were_made_before(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, operands: Operands, call: Calls, variable: str, text: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    expected = call(engine, operands).numpy()
    made = call(engine, operands)
    monkeypatch.setenv(variable, text)
    for _ in range(2):
        with pytest.raises(BadInputError, match=variable if "=" not in text else "rows3"):
            call(engine, operands)
    assert np.array_equal(engine.copy(made).numpy(), expected)
    assert np.array_equal(made.numpy(), expected)
    monkeypatch.delenv(variable)
    assert np.array_equal(call(engine, operands).numpy(), expected)


@pytest.mark.parametrize("call", [product, with_bias, with_scale, of_norm])
@pytest.mark.parametrize("by_switch", [True, False])
def test_each_call_has_the_variant_that_was_forced_when_it_was_made(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, operands: Operands, call: Calls, by_switch: bool
) -> None:
    family = [v for v in variants(MatmulChooser.of(engine.recorder).device) if not v.whole_workgroup]
    names = [family[0].name, family[-1].name]
    assert names[0] != names[1]
    kernels: list[str] = []
    engine.recorder.trace = kernels.append
    expected = call(engine, operands).numpy()
    kernels.clear()
    made = []
    for name in (*names, *names[::-1]):
        if by_switch:
            monkeypatch.setenv("VKFOLD_VARIANT", f"matmul={name}")
            made.append(call(engine, operands))
        else:
            with forced_variant(name):
                made.append(call(engine, operands))
    monkeypatch.delenv("VKFOLD_VARIANT", raising=False)
    engine.flush_batch()
    used = [next(n for n in names if n in kernel) for kernel in kernels if kernel.startswith("matmul")]
    assert used == [*names, *names[::-1]]
    if call is not product:
        assert sum(fired.times for fired in fusion_of(engine).report().values()) >= 4
    for tensor in made:
        assert np.array_equal(tensor.numpy(), expected)


def test_what_a_call_chose_by_is_of_no_matter_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_VARIANT", "matmul=one")
    then = choice_state()
    monkeypatch.setenv("VKFOLD_VARIANT", "matmul=two")
    seen = []
    with ChoosingAs(then):
        thread = threading.Thread(target=lambda: seen.append(choice_state()))
        thread.start()
        thread.join()
        assert choice_state() == then
    assert [state.variant for state in (*seen, choice_state())] == ["matmul=two", "matmul=two"]
