"""Cross-entropy and its gradient: odd sizes, large vocabularies, ignored labels, infinities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from op_checks import EPS32, check_gradient, check_op, sampled_sizes

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine

IGNORED = -100
SHAPES = [*sampled_sizes(2, 22, seed=11), (3, 50_257), (2, 32_782)]


def forward(engine: ComputeEngine, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The op under its default ignore_index."""
    return engine.cross_entropy(logits, targets)


def forward_bound(logits: np.ndarray) -> Any:
    """|error| of loss and lse, from the Vulkan precision table: exp(x) 3 + 2|x| ulp, log 3 ulp or 2^-21 absolute.

    Each round of the running sum rescales (an exp of 3 ulp) and adds; an ulp is two units of EPS32.
    """
    finite = np.where(np.isfinite(logits), logits, np.nan).astype(np.float64)
    with np.errstate(all="ignore"):
        spread = np.minimum(np.nan_to_num(np.nanmax(finite, axis=1) - np.nanmin(finite, axis=1)), 90)
        size = np.nan_to_num(np.nanmax(np.abs(finite), axis=1))
    rounds = logits.shape[1] / 16 + 10
    relative = EPS32 * (7 * rounds + 2 * (3 + 2 * spread) + spread)

    def bounds(expected: list[np.ndarray]) -> list[np.ndarray]:
        common = relative + 2.0**-21 + 6 * EPS32 * np.log(logits.shape[1])
        return [common + 2 * EPS32 * (size + np.abs(np.nan_to_num(e, posinf=0, neginf=0))) for e in expected]

    return bounds


def arrays_for(rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits with a few -inf, targets with a few ignored ones."""
    rng = np.random.default_rng(rows * 31 + cols)
    logits = (rng.standard_normal((rows, cols)) * rng.uniform(0.5, 20)).astype(np.float32)
    targets = rng.integers(0, cols, rows)
    holes = rng.random((rows, cols)) < 0.1
    holes[np.arange(rows), targets] = False
    logits[holes] = -np.inf
    targets[rng.random(rows) < 0.2] = IGNORED
    return logits, targets


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_forward(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    logits, targets = arrays_for(rows, cols)
    loss, lse = check_op(vulkan, oracle, forward, [logits, targets], forward_bound(logits))
    assert not loss[targets == IGNORED].any()
    assert not lse[targets == IGNORED].any()


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_backward(vulkan: VulkanEngine, oracle: CpuEngine, rows: int, cols: int) -> None:
    logits, targets = arrays_for(rows, cols)
    lse = forward(oracle, oracle.tensor(logits), oracle.tensor(targets))[1].numpy().astype(np.float32)
    scale = 0.375
    with np.errstate(all="ignore"):
        distance = np.where(np.isfinite(logits), np.abs(logits - lse[:, None]), 0).astype(np.float64)
        p = np.exp(-distance) + 1e-37
    bound = scale * EPS32 * (p * (2 * (3 + 2 * distance) + distance + 2) + 4) + 1e-37
    before = {engine: engine.step_parameters for engine in (vulkan, oracle)}
    for engine, parameters in before.items():
        engine.set_step_parameters(replace(parameters, loss_scale=scale))
    try:
        (gradient,) = check_op(
            vulkan,
            oracle,
            lambda e, *t: e.cross_entropy_backward_(*t),
            [logits, targets, lse],
            lambda expected: [bound],
        )
    finally:
        for engine, parameters in before.items():
            engine.set_step_parameters(parameters)
    assert not gradient[targets == IGNORED].any()
    kept = np.isneginf(logits) & (np.arange(cols) != targets[:, None])
    assert not gradient[kept].any(), "an absent class has a gradient"


def test_special_rows(vulkan: VulkanEngine, oracle: CpuEngine) -> None:
    inf, nan = np.inf, np.nan
    logits = np.array(
        [
            [0, -inf, 1, 0],  # an absent class
            [-inf, -inf, -inf, -inf],  # nothing there: NaN
            [90, 0, -90, 90],  # exp(90) overflows
            [nan, 0, 0, 0],
            [nan, inf, -inf, 0],  # ignored: nothing of it may show
            [inf, 0, 0, 0],
            [0, -inf, 0, 0],  # the target is absent: infinite loss
            [0, 0, 0, 0],  # targets outside
            [0, 0, 0, 0],
            [1e30, 0, -1e30, 1e30],
        ],
        np.float32,
    )
    targets = np.array([2, 0, 0, 1, IGNORED, 1, 1, 4, -1, 3])
    expected_loss = [np.log(1 + 2 * np.exp(-1.0)), nan, np.log(2.0), nan, 0, nan, inf, nan, nan, np.log(2.0)]
    for engine in (vulkan, oracle):
        loss, lse = engine.cross_entropy(engine.tensor(logits), engine.tensor(targets))
        assert np.allclose(loss.numpy(), expected_loss, rtol=1e-6, equal_nan=True)
        assert np.isneginf(lse.numpy()[1])
        gradient = engine.cross_entropy_backward_(engine.tensor(logits), engine.tensor(targets), lse).numpy()
        assert np.array_equal(gradient[4], np.zeros(4))
        assert np.allclose(gradient[2], [-0.5, 0, 0, 0.5], atol=1e-5)
        assert np.isnan(gradient[[3, 5, 7, 8]]).any(axis=1).all()
        assert gradient[0, 1] == 0
        assert np.isfinite(gradient[[0, 1, 2, 6, 9]]).all()


@pytest.mark.parametrize("place", [0, 8, 31, 32, 63, 64, 99])
def test_infinities_at_tile_edges(vulkan: VulkanEngine, oracle: CpuEngine, place: int) -> None:
    """Runs of -inf before and after every place where a lane's share may begin."""
    logits = np.random.default_rng(place).standard_normal((2, 100)).astype(np.float32)
    logits[0, :place] = -np.inf
    logits[1, place + 1 :] = -np.inf
    check_op(vulkan, oracle, forward, [logits, np.array([place, place])], forward_bound(logits))


def test_gradient(oracle: CpuEngine) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 7))
    targets = np.array([0, 6, IGNORED, 3, 3])

    def loss(e: ComputeEngine, logits: Tensor) -> Tensor:
        return e.sum(e.cross_entropy(logits, e.tensor(targets))[0])

    def backward(e: ComputeEngine, dy: Tensor, logits: Tensor) -> Tensor:
        ids = e.tensor(targets)
        _, lse = e.cross_entropy(logits, ids)
        e.set_step_parameters(StepParameters(loss_scale=dy.item()))  # the cotangent of the sum
        try:
            return e.cross_entropy_backward_(e.copy(logits), ids, lse)
        finally:
            e.set_step_parameters(StepParameters())

    check_gradient(oracle, loss, backward, [logits])


def test_micro_batches_count_tokens_not_batches(vulkan: VulkanEngine) -> None:
    """Sums of losses over valid tokens: (1 token, loss 4) and (3 tokens, loss 1) give 1.75."""
    sums = []
    for loss, tokens in ((4.0, 1), (1.0, 3)):
        logits = np.zeros((4, 2), np.float32)
        logits[:, 1] = np.log(np.expm1(loss))  # log(1 + e^x) = loss
        targets = np.where(np.arange(4) < tokens, 0, IGNORED)
        sums.append(vulkan.sum(vulkan.cross_entropy(vulkan.tensor(logits), vulkan.tensor(targets))[0]).item())
    assert sum(sums) / 4 == pytest.approx(1.75, rel=1e-6)


def test_all_labels_ignored(vulkan: VulkanEngine) -> None:
    """Loss 0 and gradient 0, exactly, whatever the logits and the scale."""
    logits = vulkan.tensor(np.full((5, 9), np.nan, np.float32))
    targets = vulkan.tensor(np.full(5, 7))
    loss, lse = vulkan.cross_entropy(logits, targets, ignore_index=7)
    assert vulkan.sum(loss).item() == 0
    vulkan.cross_entropy_backward_(logits, targets, lse, ignore_index=7)
    assert not logits.numpy().any()


def test_bits_do_not_depend_on_time_or_place(vulkan: VulkanEngine) -> None:
    logits, targets = arrays_for(40, 200)
    flat = vulkan.tensor(np.concatenate([np.zeros(1, np.float32), logits.ravel()]))
    ids = vulkan.tensor(targets)
    results = []
    for source in (vulkan.tensor(logits), vulkan.tensor(logits), flat.rows(1, logits.size + 1).reshape(40, 200)):
        loss, lse = vulkan.cross_entropy(source, ids)
        vulkan.cross_entropy_backward_(source, ids, lse)
        results.append([loss.numpy(), lse.numpy(), source.numpy()])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_shapes_that_do_not_fit(cpu: CpuEngine) -> None:
    logits, targets = cpu.zeros((4, 6)), cpu.zeros((4,), "int32")
    with pytest.raises(ValueError, match=r"targets has shape \(3,\), needed is \(4,\)"):
        cpu.cross_entropy(logits, cpu.zeros((3,), "int32"))
    with pytest.raises(ValueError, match="targets is float32"):
        cpu.cross_entropy(logits, cpu.zeros((4,)))
    with pytest.raises(ValueError, match="vocabulary"):
        cpu.cross_entropy(cpu.zeros((2, 2, 6)), targets)
    with pytest.raises(ValueError, match="lse has shape"):
        cpu.cross_entropy_backward_(logits, targets, cpu.zeros((5,)))
