"""Adafactor: values by hand and against the float64 oracle, what it leaves alone, its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from op_checks import EPS32, ODD_SIZES, sampled_sizes

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.ops.adafactor import factored_shapes
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import Adafactor, GPTConfig, GPTModel, TrainingStep

SHAPES: list[tuple[int, ...]] = [
    *[(n,) for n in ODD_SIZES],
    *sampled_sizes(2, 18),
    (3, 4, 5),
    (2, 3, 4, 8),
    (20_001,),
    (2000, 8),
    (4, 9001),
    (0,),
    (0, 5),
]


@pytest.fixture(params=["vulkan", "cpu"])
def engine(request: pytest.FixtureRequest) -> ComputeEngine:
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def fresh_step_parameters(vulkan: VulkanEngine, cpu: CpuEngine, oracle: CpuEngine) -> Iterator[None]:
    yield
    for each in (vulkan, cpu, oracle):
        each.set_step_parameters(StepParameters())


def arrays_for(shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Parameter, gradient over five powers of ten, and moments as a few steps leave them."""
    rng = np.random.default_rng(seed)
    p = rng.standard_normal(shape)
    g = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 2, shape)
    moments = [rng.uniform(0.1, 2, s) * 10.0 ** rng.uniform(-2, 2, s) for s in factored_shapes(shape)]
    return [a.astype(np.float32) for a in (p, g, *moments)]


def run(each: ComputeEngine, arrays: list[np.ndarray], clip: float | None = None, **settings: Any) -> list[np.ndarray]:
    tensors = [each.tensor(a) for a in arrays]
    state = None if clip is None else each.tensor(np.array([clip, 1, 2, 3]))
    each.adafactor_(*tensors, *[None] * (4 - len(tensors)), state, **settings)
    return [t.numpy() for t in tensors]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("clip", "relative"), [(None, None), (0.37, 1e-3)])
def test_against_the_oracle(
    vulkan: VulkanEngine, oracle: CpuEngine, shape: tuple[int, ...], clip: float | None, relative: float | None
) -> None:
    arrays = arrays_for(shape, seed=sum(shape))
    vulkan.tensor(np.full(2**18, np.nan))  # freed at once: scratch memory starts as NaN
    results = []
    for each in (vulkan, oracle):
        each.set_step_parameters(StepParameters(learning_rate=0.01, square_weight=5**-0.8))
        results.append(run(each, arrays, clip, weight_decay=0.1, relative=relative))
    (p, g, *moments), (want_p, _, *want_moments) = results
    assert np.array_equal(g, arrays[1])
    # Sums of at most 20,001 squares, in chains of at most 9001 / 16 + 3 terms, or of 32 rows and 128 chunks.
    for got, want in zip(moments, want_moments, strict=True):
        assert np.all(np.abs(got - want) <= 600 * EPS32 * want)
    # The update is at most the step the oracle takes, with the errors of moments, roots and quotients on it.
    rate = 0.01 if relative is None or not p.size else 0.01 * max(relative, np.sqrt(np.mean(np.square(arrays[0]))))
    step = np.abs(want_p - arrays[0] * (1.0 - rate * 0.1))
    assert np.all(np.abs(p - want_p) <= EPS32 * (np.abs(want_p) + 0.01 * np.abs(arrays[0])) + 1500 * EPS32 * step)


def test_matrix_by_hand(engine: ComputeEngine) -> None:
    engine.set_step_parameters(StepParameters(learning_rate=0.5, square_weight=1.0))
    p, g, rows, cols = run(
        engine, [np.ones((2, 2)), np.array([[1.0, 2.0], [3.0, 4.0]]), np.full(2, 9.0), np.full(2, 9.0)]
    )
    np.testing.assert_allclose(rows, [2.5, 12.5], rtol=3e-7)  # square_weight 1: nothing of the old moments is left
    np.testing.assert_allclose(cols, [5.0, 10.0], rtol=3e-7)
    update = g / np.sqrt(np.outer([2.5, 12.5], [5.0, 10.0]) / 7.5)
    assert np.sqrt(np.mean(update**2)) < 1  # so it is not clipped
    np.testing.assert_allclose(p, 1 - 0.5 * update, rtol=1e-6)


def test_vector_by_hand(engine: ComputeEngine) -> None:
    engine.set_step_parameters(StepParameters(learning_rate=0.5, square_weight=0.25))
    p, _, v = run(engine, [np.ones(2), np.array([4.0, -2.0]), np.array([0.0, 4.0])], weight_decay=0.25)
    np.testing.assert_allclose(v, [4.0, 4.0], rtol=3e-7)
    scale = max(1.0, np.sqrt((4.0 + 1.0) / 2))  # update [2, -1]
    np.testing.assert_allclose(p, [0.875 - 1.0 / scale, 0.875 + 0.5 / scale], rtol=1e-6)


def test_update_clipping_bounds_the_step(engine: ComputeEngine) -> None:
    engine.set_step_parameters(StepParameters(learning_rate=1.0, square_weight=1e-3))
    for shape in ((50,), (6, 7)):
        moments = [np.full(s, 1e-6) for s in factored_shapes(shape)]
        for threshold in (1.0, 0.25):
            p = run(engine, [np.zeros(shape), np.full(shape, 3.0), *moments], threshold=threshold)[0]
            assert np.sqrt(np.mean(p**2)) == pytest.approx(threshold, rel=1e-5)


@pytest.mark.parametrize("size", [1e-12, 1e-15, 1e15])
def test_rows_and_columns_of_extreme_size(engine: ComputeEngine, size: float) -> None:
    """Products of row and column moments leave float32's range; a zero gradient gives a zero update."""
    engine.set_step_parameters(StepParameters(learning_rate=1.0, square_weight=1.0))
    g = np.zeros((5, 6))
    g[1], g[2, 3] = size, -2 * size
    p = run(engine, [np.zeros((5, 6)), g, np.zeros(5), np.zeros(6)])[0]
    assert np.all(np.isfinite(p)) and np.all(p[[0, 3, 4]] == 0)
    assert np.all(p[1] < -0.1) and p[2, 3] > 0.1
    p = run(engine, [np.ones((5, 6)), np.zeros((5, 6)), np.zeros(5), np.zeros(6)])[0]
    assert np.all(p == 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(37,), (5, 7), (8, 8)])
def test_nothing_changes_when_a_gradient_is_not_finite(
    engine: ComputeEngine, bad: float, shape: tuple[int, ...]
) -> None:
    arrays = arrays_for(shape)
    arrays[1].reshape(-1)[5] = bad
    engine.set_step_parameters(StepParameters(learning_rate=0.1, square_weight=0.5))
    tensors = [engine.tensor(a) for a in arrays]
    state = engine.gradient_norm([tensors[1]])[1]
    engine.adafactor_(*tensors, *[None] * (4 - len(tensors)), state)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array, equal_nan=True)


def test_views_off_16_bytes_get_the_same_bits(vulkan: VulkanEngine) -> None:
    def run_at(shift: int, shape: tuple[int, ...]) -> list[np.ndarray]:
        vulkan.set_step_parameters(StepParameters(learning_rate=0.1, square_weight=0.5))
        wholes, views = [], []
        for a in arrays_for(shape):
            whole = vulkan.tensor(np.concatenate([np.full(shift, 7.0), a.reshape(-1), np.full(3, 7.0)]))
            wholes.append(whole)
            views.append(whole.rows(shift, shift + a.size).reshape(*a.shape))
        vulkan.adafactor_(*views, *[None] * (3 - len(views) + 1), relative=1e-3)
        for whole in wholes:
            values = whole.numpy()
            assert np.all(values[:shift] == 7) and np.all(values[-3:] == 7)  # the neighbours are left alone
        return [view.numpy() for view in views]

    for shape in ((64,), (8, 12)):
        for straight, shifted in zip(run_at(0, shape), run_at(1, shape), strict=True):
            assert np.array_equal(straight, shifted)


def test_refuses(engine: ComputeEngine) -> None:
    v, m, r, c = engine.zeros((6,)), engine.zeros((2, 3)), engine.zeros((2,)), engine.zeros((3,))
    for message, call in (
        (r"g has shape \(6,\)", lambda: engine.adafactor_(m, v, r, c)),
        ("has 2 moments", lambda: engine.adafactor_(m, m, r)),
        ("has 1 moments", lambda: engine.adafactor_(v, v, v, c)),
        (r"first has shape \(3,\)", lambda: engine.adafactor_(m, m, c, r)),
        (r"second has shape \(2,\)", lambda: engine.adafactor_(m, m, r, r)),
        ("state has shape", lambda: engine.adafactor_(v, v, v, None, v)),
        ("eps 0", lambda: engine.adafactor_(v, v, v, eps=0.0)),
        ("threshold -1", lambda: engine.adafactor_(v, v, v, threshold=-1.0)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# -- the optimizer -----------------------------------------------------------------------------------------------------
CONFIG = GPTConfig(23, 16, 12, 2, 2, d_ff=20)


def steps(model: GPTModel, optimizer: Adafactor, numbers: range) -> None:
    step = TrainingStep(model, optimizer, max_norm=1.0)
    for i in numbers:
        tokens, targets = np.random.default_rng(i).integers(0, 23, (2, 3, 16))
        assert step([(tokens, targets)], step=i, learning_rate=1e-2).updated


def test_training_stays_with_the_oracle(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    results = []
    for each in (vulkan, oracle):
        model = GPTModel(each, CONFIG, seed=3)
        start = model.state_dict()
        steps(model, Adafactor(model, relative_step=True, weight_decay=0.1), range(3))
        results.append(model.state_dict())
    for name, want in results[1].items():
        moved = np.abs(want - start[name]).max()
        assert moved > 1e-5 and np.abs(results[0][name] - want).max() <= 1e-3 * moved, name


def test_state_goes_to_another_optimizer(engine: ComputeEngine) -> None:
    model = GPTModel(engine, CONFIG, seed=3)
    optimizer = Adafactor(model)
    steps(model, optimizer, range(3))
    state = optimizer.state_dict()
    assert state["row_mean_sq.embedding.weight"].shape == (23,)
    assert state["column_mean_sq.embedding.weight"].shape == (12,)
    assert state["mean_sq.final_norm.weight"].shape == (12,)
    other = GPTModel(engine, CONFIG, seed=4)
    other.load_state_dict(model.state_dict())
    resumed = Adafactor(other)
    resumed.load_state_dict(state)
    for each, its in ((model, optimizer), (other, resumed)):
        steps(each, its, range(3, 5))
    for name, value in model.state_dict().items():
        assert np.array_equal(value, other.state_dict()[name]), name
    for name, value in optimizer.state_dict().items():
        assert np.array_equal(value, resumed.state_dict()[name]), name
    with pytest.raises(ValueError, match=r"unexpected: row_mean_sq\.extra"):
        resumed.load_state_dict({**state, "row_mean_sq.extra": np.zeros(3)})


def test_moments_are_rows_and_columns() -> None:
    engine = PlanEngine()
    model = GPTModel(engine, CONFIG)
    before = engine.pool_stats()["parameter"].live_bytes
    optimizer = Adafactor(model)
    taken = engine.pool_stats()["parameter"].live_bytes - before
    sizes = [s for p in model.parameters() for s in factored_shapes(p.shape)]
    assert taken == sum(-(-4 * int(np.prod(s)) // 256) * 256 for s in sizes)
    assert sum(t.size for t in optimizer.named_moments().values()) == sum(int(np.prod(s)) for s in sizes)


def test_settings_out_of_range(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, CONFIG)
    for settings, message in (
        ({"decay_power": 0.5}, "decay_power"),
        ({"eps": 0.0}, "eps"),
        ({"clip_threshold": 0.0}, "clip"),
    ):
        with pytest.raises(ValueError, match=message):
            Adafactor(model, **settings)
