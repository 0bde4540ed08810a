"""Gradient norm, AdamW and SGD: values, bounds from the arithmetic, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from op_checks import EPS32, ODD_SIZES

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.ops.adamw import ADAMW
from vkfold.engine.ops.gradient_norm import square_parts
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine

Values = dict[str, np.ndarray]
STEP = StepParameters(step=2, learning_rate=0.01, bias_correction1=1 - 0.9**3, bias_correction2=1 - 0.999**3)


@pytest.fixture(params=["vulkan", "cpu"])
def engine(request: pytest.FixtureRequest) -> ComputeEngine:
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def fresh_step_parameters(vulkan: VulkanEngine, cpu: CpuEngine, oracle: CpuEngine) -> Iterator[None]:
    yield
    for each in (vulkan, cpu, oracle):
        each.set_step_parameters(StepParameters())


def values(shape: tuple[int, ...], seed: int = 0) -> Values:
    """A parameter, a gradient and both kinds of moments, as a few steps of training leave them."""
    rng = np.random.default_rng(seed)
    p, g, m, b = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
    return {"p": p, "g": g, "m": 0.1 * m, "v": (rng.random(shape) * 0.01).astype(np.float32), "b": b}


def updated(engine: ComputeEngine, arrays: Values, names: str, update: Callable[..., None]) -> Values:
    """What the tensors called `names` hold after `update(engine, *tensors)`."""
    engine.set_step_parameters(STEP)
    tensors = {name: engine.tensor(arrays[name]) for name in names}
    update(engine, *tensors.values())
    return {name: tensor.numpy() for name, tensor in tensors.items()}


# -- gradient norm -----------------------------------------------------------------------------------------------------
SIZES = [[1], [3, 5], list(ODD_SIZES), [8191, 8192, 8193], [4, 40_001, 16, 65_536], [700_001, 8], [0, 7]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_are_exact_on_integers(vulkan: VulkanEngine, sizes: list[int]) -> None:
    # Small integers add up exactly in any order: a lost, doubled or foreign element shows.
    rng = np.random.default_rng(sum(sizes))
    vulkan.tensor(np.full(2**20, np.nan))  # freed at once: scratch memory starts as NaN
    grads = [rng.integers(-4, 5, n).astype(np.float32) for n in sizes]  # sums stay below 2^24
    sums, state = vulkan.gradient_norm([vulkan.tensor(g) for g in grads])
    expected = [float((g.astype(np.float64) ** 2).sum()) for g in grads]
    assert np.array_equal(sums.numpy(), np.array(expected, np.float32))
    clip, finite, norm, loss = state.numpy()
    assert (clip, finite, loss) == (1, 1, 0)
    assert norm == pytest.approx(np.sqrt(sum(expected)), rel=3e-7)


def test_norm_against_the_oracle(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    rng = np.random.default_rng(1)
    grads = [rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3) for shape in [(300, 257), (9,), (64, 64), (1,)]]
    for max_norm in (0.0, 0.5, 1e9):
        results = []
        for engine in (vulkan, oracle):
            loss = engine.tensor(np.array([1.25]))
            sums, state = engine.gradient_norm([engine.tensor(g) for g in grads], loss, max_norm=max_norm)
            results.append((sums.numpy(), state.numpy()))
        (got_sums, got_state), (want_sums, want_state) = results
        # Squares are rounded once; a chain has at most chunk / 4 / subgroup + log terms, all positive.
        assert np.all(np.abs(got_sums - want_sums) <= 8192 * EPS32 * want_sums)
        assert np.all(np.abs(got_state - want_state) <= 8192 * EPS32 * want_state)
        norm = np.sqrt(want_sums.sum())
        assert want_state[0] == pytest.approx(min(1, max_norm / (norm + 1e-6)) if max_norm else 1, rel=1e-12)
        assert got_state[1] == 1 and got_state[3] == 1.25


def test_clip_factor(engine: ComputeEngine) -> None:
    def clip(gradient: list[float], max_norm: float) -> float:
        return float(engine.gradient_norm([engine.tensor(np.array(gradient))], max_norm=max_norm)[1].numpy()[0])

    assert clip([3.0, 4.0], 1.0) == pytest.approx(1 / 5.000001, rel=3e-7)
    assert clip([3.0, 4.0], 5.1) == 1.0
    assert clip([0.0, 0.0], 1.0) == 1.0
    assert clip([3.0, 4.0], 0.0) == 1.0
    assert clip([3.0, 4.0], float("inf")) == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 5, 8999])
def test_a_value_that_is_not_finite_is_found(engine: ComputeEngine, bad: float, where: int) -> None:
    grads = [np.ones(7, np.float32), np.ones(9000, np.float32), np.ones(3, np.float32)]
    grads[1][where] = bad
    sums, state = engine.gradient_norm([engine.tensor(g) for g in grads], max_norm=1.0)
    assert list(np.isfinite(sums.numpy())) == [True, False, True]  # the tensor is named by its place
    assert list(state.numpy()[:2]) == [0, 0] and not np.isfinite(state.numpy()[2])
    good = [engine.tensor(np.ones(7))]
    assert list(engine.gradient_norm(good, engine.tensor(np.array([bad])))[1].numpy()[:2]) == [0, 0]
    assert list(engine.gradient_norm(good, engine.tensor(np.array([3.0])))[1].numpy()[[0, 1, 3]]) == [1, 1, 3]


@pytest.mark.parametrize("sizes", [(9000,), (100_003,), (7, 9000, 3), (2, 100_003, 1)])
def test_squares_beyond_float32_are_told_from_infinite_values(engine: ComputeEngine, sizes: tuple[int, ...]) -> None:
    """One element whose square overflows, or many whose sum does: negative, and clipped by the norm it has; with an
    infinite or NaN one beside it nothing is."""
    which = len(sizes) // 2

    def sum_of(*values: float, rest: float = 1.0, max_norm: float = 1.0) -> tuple[float, np.ndarray]:
        grads = [np.ones(n, np.float32) for n in sizes]
        grads[which][:] = rest
        grads[which][[8500, 5, 4000][: len(values)]] = values
        sums, state = engine.gradient_norm([engine.tensor(g) for g in grads], max_norm=max_norm)
        others = np.delete(sums.numpy(), which)
        assert np.array_equal(others, np.delete(sizes, which))
        return sums.numpy()[which], state.numpy()

    for values, rest in (((1e25,), 1.0), ((-3e37, 1e20), 1.0), ((), 1e18), ((1e30,), 1.8e19)):
        norm = np.sqrt((sizes[which] - len(values)) * rest**2 + np.square(values).sum())
        for max_norm in (1.0, 1e18):
            square, state = sum_of(*values, rest=rest, max_norm=max_norm)
            assert square < 0 and np.sqrt(-square) * 2.0**96 == pytest.approx(norm, rel=1e-4), (values, rest)
            assert state[:3] == pytest.approx([max_norm / norm, 1, norm], rel=1e-4)
        for max_norm in (0.0, 1e30, np.inf):  # squares of what is not clipped, or little, are beyond float32, too
            square, state = sum_of(*values, rest=rest, max_norm=max_norm)
            assert square < 0 and list(state[:2]) == [0, 0] and state[2] == pytest.approx(norm, rel=1e-4)
    assert list(sum_of(3e38)[1][:2]) == [0, 0]  # a factor below 2^-126
    square, state = sum_of(3e38, rest=3e38)  # a norm beyond float32
    assert square < 0 and list(state[:2]) == [0, 0] and state[2] == np.inf
    for bad in (np.inf, -np.inf, np.nan):
        for values in ((bad,), (1e25, bad), (bad, 1e25, 1e25)):
            square, state = sum_of(*values)
            assert not np.isfinite(square) and list(state[:2]) == [0, 0] and not np.isfinite(state[2])
    square, state = sum_of(1e18, -1e18)
    assert square == pytest.approx(2e36, rel=1e-6) and state[1] == 1


def test_a_norm_beyond_float32_of_sums_that_are_not(engine: ComputeEngine) -> None:
    grads = [np.full(3, 1.05e19, np.float32), np.ones(5, np.float32), np.full(3, -1.05e19, np.float32)]
    sums, state = engine.gradient_norm([engine.tensor(g) for g in grads], max_norm=2.0)
    assert (sums.numpy() > 0).all() and np.isfinite(sums.numpy()).all()
    norm = 1.05e19 * np.sqrt(6)
    assert state.numpy()[:3] == pytest.approx([2 / norm, 1, norm], rel=1e-6)


def test_a_tensor_sums_to_the_same_bits_whatever_comes_with_it(vulkan: VulkanEngine) -> None:
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(n).astype(np.float32) for n in (50_000, 100, 9_001)]
    tensors = [vulkan.tensor(a) for a in arrays]
    together = vulkan.gradient_norm(tensors)[0].numpy()
    alone = [vulkan.gradient_norm([t])[0].numpy()[0] for t in tensors]
    assert np.array_equal(together, np.array(alone))
    shifted = vulkan.tensor(np.concatenate([[0.0], arrays[0]])).rows(1, 50_001)  # not on 16 bytes: 4-byte loads
    assert vulkan.gradient_norm([shifted])[0].numpy()[0] == alone[0]


def test_square_parts_cover_the_elements() -> None:
    for n in (0, 1, 8191, 8192, 8193, 10**7 + 1, 2**26, 2**26 + 1, 2**32 - 1):
        parts, chunk = square_parts(n)
        assert chunk % 4 == 0 and parts <= 8192
        assert (parts - 1) * chunk < max(n, 1) <= parts * chunk
        assert chunk / 16 <= 65_535  # rounds of a loop with the smallest subgroup


def test_gradient_norm_refuses(engine: ComputeEngine) -> None:
    g = engine.tensor(np.ones(3))
    for grads, loss, max_norm, message in (
        ([], None, 0.0, "0 gradients"),
        ([g], None, -1.0, "max_norm is -1"),
        ([g], None, float("nan"), "max_norm is nan"),
        ([g, engine.tensor(np.arange(3))], None, 0.0, "gradient 1 is int32"),
        ([g], g, 0.0, "loss has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.gradient_norm(grads, loss, max_norm=max_norm)


# -- AdamW -------------------------------------------------------------------------------------------------------------
def test_adamw_first_step(engine: ComputeEngine) -> None:
    # p = 1, g = 0.5, on a transposed view
    gradient = np.full((5, 3), 0.5)
    gradient[1, 2], gradient[4, 0] = -0.5, 0.0
    engine.set_step_parameters(StepParameters(learning_rate=0.1, bias_correction1=1 - 0.9, bias_correction2=1 - 0.999))
    p, g = engine.tensor(np.ones((5, 3)).T), engine.tensor(gradient.T)
    m, v = engine.zeros((3, 5)), engine.zeros((3, 5))
    engine.adamw_(p, g, m, v, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
    expected = np.full((3, 5), 0.899000002)
    expected[2, 1], expected[0, 4] = 1.098999998, 0.999
    assert np.all(np.abs(p.numpy() - expected) <= np.spacing(expected.astype(np.float32)))
    assert m.numpy()[0, 0] == pytest.approx(0.05, rel=2e-7) and v.numpy()[0, 0] == pytest.approx(2.5e-4, rel=2e-7)


@pytest.mark.parametrize("shape", [*[(n,) for n in ODD_SIZES], (33, 65), (4, 5, 6), (0,), (70_003,)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.37])
def test_adamw_against_the_oracle(
    vulkan: VulkanEngine, oracle: CpuEngine, shape: tuple[int, ...], clip: float | None
) -> None:
    arrays = values(shape)

    def update(engine: ComputeEngine, p: Any, g: Any, m: Any, v: Any) -> None:
        state = None if clip is None else engine.tensor(np.array([clip, 1, 2, 3]))
        engine.adamw_(p, g, m, v, state, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)

    got, want = (updated(each, arrays, "pgmv", update) for each in (vulkan, oracle))
    assert np.array_equal(got["g"], arrays["g"])
    scaled = arrays["g"].astype(np.float64) * (clip or 1)
    # m and v: the constants, the clip factor and each operation are rounded once.
    assert np.all(np.abs(got["m"] - want["m"]) <= 4 * EPS32 * (0.9 * np.abs(arrays["m"]) + 0.1 * np.abs(scaled)))
    assert np.all(np.abs(got["v"] - want["v"]) <= 8 * EPS32 * want["v"])
    # The step: errors of m, v / 2, two corrections, square root and two divisions (2.5 ulp each in Vulkan's table).
    m_hat = (0.9 * np.abs(arrays["m"]) + 0.1 * np.abs(scaled)) / STEP.bias_correction1
    step = STEP.learning_rate * m_hat / (np.sqrt(want["v"] / STEP.bias_correction2) + 1e-8)
    bound = EPS32 * (np.abs(want["p"]) + 32 * step + 4 * 1e-3 * np.abs(arrays["p"]))
    assert np.all(np.abs(got["p"] - want["p"]) <= bound)


def test_adamw_many_steps_stay_with_the_oracle(engine: ComputeEngine, oracle: CpuEngine) -> None:
    rng = np.random.default_rng(4)
    gradients = rng.standard_normal((30, 257))
    results = []
    for each in (engine, oracle):
        p, m, v = each.tensor(np.ones(257)), each.zeros((257,)), each.zeros((257,))
        for t, gradient in enumerate(gradients, 1):
            each.set_step_parameters(
                StepParameters(learning_rate=1e-2, bias_correction1=1 - 0.9**t, bias_correction2=1 - 0.95**t)
            )
            g = each.tensor(gradient)
            state = each.gradient_norm([g], max_norm=1.0)[1]
            each.adamw_(p, g, m, v, state, beta1=0.9, beta2=0.95, weight_decay=0.1)
        results.append(p.numpy())
    assert np.max(np.abs(results[0] - results[1])) < 30 * 3 * EPS32


# -- SGD ---------------------------------------------------------------------------------------------------------------
SGD_SETTINGS: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
]


@pytest.mark.parametrize("n", [*ODD_SIZES, 0, 30_001])
@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
def test_sgd_against_the_oracle(vulkan: VulkanEngine, oracle: CpuEngine, n: int, settings: dict[str, Any]) -> None:
    arrays = values((n,))
    names = "pgb" if "momentum" in settings else "pg"
    clip = 0.5 if n % 2 else None

    def update(engine: ComputeEngine, p: Any, g: Any, b: Any = None) -> None:
        state = None if clip is None else engine.tensor(np.array([clip, 1, 2, 3]))
        engine.sgd_(p, g, b, state, **settings)

    got, want = (updated(each, arrays, names, update) for each in (vulkan, oracle))
    assert np.array_equal(got["g"], arrays["g"])
    direction = np.abs(arrays["b"]) + np.abs(arrays["g"]) if "b" in names else np.abs(arrays["g"])
    if "b" in names:
        assert np.all(np.abs(got["b"] - want["b"]) <= 2 * EPS32 * direction)
    bound = EPS32 * (np.abs(want["p"]) + 4 * STEP.learning_rate * (2 * direction + 0.1 * np.abs(arrays["p"])))
    assert np.all(np.abs(got["p"] - want["p"]) <= bound)


def test_sgd_by_hand(engine: ComputeEngine) -> None:
    engine.set_step_parameters(StepParameters(learning_rate=0.5))
    p, g, b = engine.tensor([4.0]), engine.tensor([2.0]), engine.zeros((1,))
    engine.sgd_(p, g, b, momentum=0.5)
    assert (p.item(), b.item()) == (3.0, 2.0)
    engine.sgd_(p, g, b, momentum=0.5)
    assert (p.item(), b.item()) == (1.5, 3.0)
    engine.sgd_(p, g, b, momentum=0.5, nesterov=True)  # b = 3.5, direction = 2 + 1.75
    assert (p.item(), b.item()) == (-0.375, 3.5)
    engine.sgd_(p, g, weight_decay=0.5)  # -0.375 * (1 - 0.25) - 1
    assert p.item() == -1.28125


# -- both --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nothing_changes_when_a_gradient_is_not_finite(engine: ComputeEngine, bad: float) -> None:
    arrays = values((37,))
    arrays["g"][5] = bad
    engine.set_step_parameters(STEP)
    tensors = {name: engine.tensor(array) for name, array in arrays.items()}
    state = engine.gradient_norm([tensors["g"]], max_norm=1.0)[1]
    engine.adamw_(tensors["p"], tensors["g"], tensors["m"], tensors["v"], state)
    engine.sgd_(tensors["p"], tensors["g"], tensors["b"], state, momentum=0.9)
    engine.sgd_(tensors["p"], tensors["g"], None, state)
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.numpy(), arrays[name], equal_nan=True), name


def test_views_off_16_bytes_get_the_same_bits(vulkan: VulkanEngine) -> None:
    arrays = values((64,))

    def run(shift: int) -> list[np.ndarray]:
        vulkan.set_step_parameters(STEP)
        whole = {k: vulkan.tensor(np.concatenate([np.full(shift, 7.0), a, np.full(3, 7.0)])) for k, a in arrays.items()}
        view = {k: t.rows(shift, shift + 64) for k, t in whole.items()}
        vulkan.adamw_(view["p"], view["g"], view["m"], view["v"])
        vulkan.sgd_(view["p"], view["g"], view["b"], momentum=0.9)
        for tensor in whole.values():
            array = tensor.numpy()
            assert np.all(array[:shift] == 7) and np.all(array[shift + 64 :] == 7)  # the neighbours are left alone
        return [view[k].numpy() for k in "pmvb"]

    for straight, shifted in zip(run(0), run(1), strict=True):
        assert np.array_equal(straight, shifted)


def test_updates_refuse(engine: ComputeEngine) -> None:
    p, q, i = engine.zeros((3,)), engine.zeros((4,)), engine.tensor([1, 2, 3])
    for message, call in (
        (r"adamw_: g has shape \(4,\)", lambda: engine.adamw_(p, q, p, p)),
        (r"adamw_: v has shape \(4,\)", lambda: engine.adamw_(p, p, p, q)),
        ("adamw_: p is int32", lambda: engine.adamw_(i, i, p, p)),
        ("adamw_: state has shape", lambda: engine.adamw_(p, p, p, p, p)),
        ("betas are 0.9 and 1", lambda: engine.adamw_(p, p, p, p, beta2=1.0)),
        ("must not be negative", lambda: engine.adamw_(p, p, p, p, eps=-1.0)),
        ("sgd_: momentum_buffer has shape", lambda: engine.sgd_(p, p, q)),
        ("need a momentum_buffer", lambda: engine.sgd_(p, p, momentum=0.9)),
        ("momentum is 1", lambda: engine.sgd_(p, p, p, momentum=1.0)),
        ("weight_decay is -1", lambda: engine.sgd_(p, p, weight_decay=-1.0)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_updates_can_be_planned() -> None:
    plan = PlanEngine()
    p, g, m, v = (plan.zeros((1000,)) for _ in range(4))
    state = plan.gradient_norm([p, p], max_norm=1.0)[1]
    plan.adamw_(p, g, m, v, state)
    plan.sgd_(p, g, m, state, momentum=0.9)
    assert plan.counts["adamw_"] == plan.counts["sgd_"] == plan.counts["gradient_norm"] == 1
    cost = ADAMW.cost(p.spec, p.spec, p.spec, p.spec, None, beta1=0.9, beta2=0.9, eps=0.0, weight_decay=0.0)
    assert (cost.bytes_read, cost.bytes_written) == (16_000, 12_000)
