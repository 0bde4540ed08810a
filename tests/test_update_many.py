"""Updates and norms of many tensors in a handful of dispatches: the one-tensor ops' bits, and nothing beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from op_checks import ODD_SIZES

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.kernel import Kernel
from vkfold.engine.ops.adamw_many import ADAMW_MANY
from vkfold.engine.ops.sgd_many import SGD_MANY
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, AdamW, Linear

STEP = StepParameters(step=2, learning_rate=0.01, bias_correction1=1 - 0.9**3, bias_correction2=1 - 0.999**3)
SIZES = [[7], [2048], [0, 3], list(ODD_SIZES), [2047, 2048, 2049, 4096, 4097], [70_001, 1, 0, 8192, 8193, 40_000]]


@pytest.fixture(autouse=True)
def step_parameters(vulkan: VulkanEngine, cpu: CpuEngine, oracle: CpuEngine) -> Iterator[None]:
    for each in (vulkan, cpu, oracle):
        each.set_step_parameters(STEP)
    yield
    for each in (vulkan, cpu, oracle):
        each.set_step_parameters(StepParameters())


def arrays_of(sizes: Sequence[int], seed: int = 0) -> list[list[np.ndarray]]:
    """p, g, m, v of each size; v is positive."""
    rng = np.random.default_rng(seed)
    made = [[rng.standard_normal(n).astype(np.float32) for _ in range(4)] for n in sizes]
    return [[p, g, m, np.square(v)] for p, g, m, v in made]


def tensors_of(engine: ComputeEngine, arrays: list[list[np.ndarray]], count: int, shift: int = 0) -> list[list[Tensor]]:
    """The first `count` arrays of each parameter as tensors that start `shift` elements behind an aligned address."""
    made = []
    for group in arrays:
        made.append([])
        for array in group[:count]:
            whole = engine.tensor(np.concatenate([np.full(shift, np.nan, np.float32), array]))
            made[-1].append(whole.rows(shift, whole.size) if array.size else engine.tensor(array))
    return made


def columns(groups: list[list[Tensor]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*groups, strict=True)]


def values(groups: list[list[Tensor]]) -> list[list[np.ndarray]]:
    return [[tensor.numpy() for tensor in group] for group in groups]


def same_bits(a: list[list[np.ndarray]], b: list[list[np.ndarray]]) -> bool:
    return all(
        x.tobytes() == y.tobytes() for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_adamw_gives_the_bits_of_single_updates(vulkan: VulkanEngine, sizes: list[int], shift: int) -> None:
    arrays = arrays_of(sizes)
    decays = [0.1 * (i % 2) for i in range(len(sizes))]
    state = vulkan.tensor(np.array([0.3, 1, 0, 0]))
    for given in (state, None):
        single = tensors_of(vulkan, arrays, 4)
        for group, decay in zip(single, decays, strict=True):
            vulkan.adamw_(*group, given, weight_decay=decay)
        many = tensors_of(vulkan, arrays, 4, shift)
        vulkan.adamw_many_(*columns(many), given, weight_decays=decays)
        found = values(many)
        assert same_bits(found, values(single))
        changed = [not np.array_equal(group[0], old[0]) for group, old in zip(found, arrays, strict=True)]
        assert changed == [n > 0 for n in sizes]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("momentum", "nesterov"), [(None, False), (0.9, False), (0.9, True)])
def test_sgd_gives_the_bits_of_single_updates(
    vulkan: VulkanEngine, sizes: list[int], momentum: float | None, nesterov: bool
) -> None:
    arrays = arrays_of(sizes)
    decays = [0.1 * (i % 3) for i in range(len(sizes))]
    state = vulkan.tensor(np.array([0.3, 1, 0, 0]))
    count = 2 if momentum is None else 3
    for shift in (0, 3):
        single = tensors_of(vulkan, arrays, count)
        for (p, g, *b), decay in zip(single, decays, strict=True):
            buffer = b[0] if b else None
            vulkan.sgd_(p, g, buffer, state, momentum=momentum or 0.0, weight_decay=decay, nesterov=nesterov)
        many = tensors_of(vulkan, arrays, count, shift)
        p, g, *b = columns(many)
        buffers = b[0] if b else None
        vulkan.sgd_many_(p, g, buffers, state, weight_decays=decays, momentum=momentum or 0.0, nesterov=nesterov)
        assert same_bits(values(many), values(single))


@pytest.mark.parametrize("sizes", [[5, 8191, 8192, 8193], [3, 70_001, 0, 16, 40_000], list(ODD_SIZES)], ids=str)
def test_sums_of_squares_do_not_depend_on_company(vulkan: VulkanEngine, sizes: list[int]) -> None:
    arrays = arrays_of(sizes)
    alone = [vulkan.gradient_norm([vulkan.tensor(group[1])])[0].numpy()[0] for group in arrays]
    for shift in (0, 1):
        grads = [group[0] for group in tensors_of(vulkan, [[group[1]] for group in arrays], 1, shift)]
        sums, state = vulkan.gradient_norm(grads)
        assert sums.numpy().tobytes() == np.array(alone, np.float32).tobytes()
        total = np.cumsum(np.array(alone, np.float32), dtype=np.float32)[-1]
        assert state.numpy()[2] == pytest.approx(np.sqrt(total), rel=3e-7)


def test_neighbours_in_memory_stay_as_they_are(vulkan: VulkanEngine) -> None:
    sizes = [13, 2050]
    guarded = [vulkan.tensor(np.full(n + 8, 7.0)) for n in sizes for _ in range(4)]
    inner = [tensor.rows(4, tensor.size - 4) for tensor in guarded]
    groups = [inner[i : i + 4] for i in range(0, len(inner), 4)]
    vulkan.adamw_many_(*columns(groups), weight_decays=[0.1, 0.1])
    for tensor in guarded:
        found = tensor.numpy()
        assert np.all(found[:4] == 7) and np.all(found[-4:] == 7)


def test_nothing_changes_when_the_flag_is_off(vulkan: VulkanEngine) -> None:
    arrays = arrays_of([9, 5000])
    state = vulkan.tensor(np.array([0.0, 0.0, np.nan, 1.0]))
    adam, sgd = tensors_of(vulkan, arrays, 4), tensors_of(vulkan, arrays, 3)
    vulkan.adamw_many_(*columns(adam), state, weight_decays=[0.1, 0.1])
    vulkan.sgd_many_(*columns(sgd), state, weight_decays=[0.1, 0.1], momentum=0.5)
    assert same_bits(values(adam), arrays)
    assert same_bits(values(sgd), [group[:3] for group in arrays])


def test_two_thousand_tensors_in_few_dispatches(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    sizes = [1 + i % 23 for i in range(2000)]
    arrays = arrays_of(sizes)
    found = []
    for engine in (vulkan, oracle):
        groups = tensors_of(engine, arrays, 4)
        _, state = engine.gradient_norm([group[1] for group in groups], max_norm=1.0)
        engine.adamw_many_(*columns(groups), state, weight_decays=[0.1] * len(groups))
        found.append(values(groups))
    for got, want in zip(*found, strict=True):
        for x, y in zip(got, want, strict=True):
            assert np.allclose(x, y, rtol=2e-5, atol=2e-6)


def counted(dispatch: Callable[..., None], names: list[str]) -> Callable[..., None]:
    def listening(kernel: Kernel, *rest: Any) -> None:
        names.append(kernel.name)
        dispatch(kernel, *rest)

    return listening


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_step_is_as_many_dispatches_for_any_number_of_parameters(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    with VulkanEngine() as engine:
        for num_layers in (1, 6):
            layers = [Linear(engine, 5, 7, seed=i) for i in range(num_layers)]
            stack = layers[0]
            stack.more = layers[1:]  # a list of layers is found by named_parameters
            optimizer = kind(stack)
            for parameter in stack.parameters():
                parameter.grad = engine.tensor(np.ones(parameter.shape))
            dispatched: list[str] = []
            with monkeypatch.context() as patch:
                patch.setattr(engine.recorder, "dispatch", counted(engine.recorder.dispatch, dispatched))
                optimizer.step(0.1, max_norm=1.0)
            counts.append(len(dispatched))
            stack.clear_gradients()
            del optimizer, stack, layers
    assert counts[0] == counts[1] <= 4


def test_planned_memory_is_that_of_the_device(vulkan: VulkanEngine) -> None:
    if vulkan.guard_bytes:
        pytest.skip("VKFOLD_DEBUG puts guards around every tensor")
    peaks = []
    for engine in (vulkan, PlanEngine()):
        groups = [[engine.empty((n,)) for _ in range(4)] for n in (9, 70_000, 300)]
        engine.reset_peak()
        before = engine.pool_stats()["step"].live_bytes
        _, state = engine.gradient_norm([group[1] for group in groups])
        engine.adamw_many_(*columns(groups), state, weight_decays=[0.0] * 3)
        peaks.append(engine.pool_stats()["step"].peak_live_bytes - before)
    assert peaks[0] == peaks[1] > 0


def test_bad_lists_are_refused(cpu: CpuEngine) -> None:
    x, y = cpu.zeros((3,)), cpu.zeros((4,))
    with pytest.raises(ValueError, match="0 entries of p were given"):
        cpu.adamw_many_([], [], [], [], weight_decays=[])
    with pytest.raises(ValueError, match="1 entries of p, but 2 of weight_decays"):
        cpu.adamw_many_([x], [x], [x], [x], weight_decays=[0.0, 0.0])
    with pytest.raises(ValueError, match="g has shape"):
        cpu.adamw_many_([x], [y], [x], [x], weight_decays=[0.0])
    with pytest.raises(ValueError, match="need a momentum_buffer"):
        cpu.sgd_many_([x], [x], weight_decays=[0.0], momentum=0.5)
    with pytest.raises(ValueError, match="2 of momentum_buffers"):
        cpu.sgd_many_([x], [x], [x, x], weight_decays=[0.0])


def test_what_is_declared_as_written(vulkan: VulkanEngine) -> None:
    assert ADAMW_MANY.written(9) == [1, 3, 4, 5, 7, 8]
    assert SGD_MANY.written(5, with_momentum=False) == [1, 3]
    assert SGD_MANY.written(7, with_momentum=True) == [1, 3, 4, 6]
