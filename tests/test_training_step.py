"""One optimizer step: weighing of micro-batches, ignored labels, values that are not finite, resuming."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, AdamW, GPTConfig, GPTModel, Layer, Parameter, TrainingStep, evaluate_loss

CONFIG = GPTConfig(13, 8, 8, 2, 2, d_ff=12)
DROPOUT = GPTConfig(13, 8, 8, 2, 2, d_ff=12, dropout=0.1)


class Table(Layer):
    """A model whose losses are given: logits are rows of a table, looked up by token."""

    def __init__(self, engine: CpuEngine, logits: np.ndarray) -> None:
        super().__init__(engine)
        self.weight = Parameter(engine, logits.shape)
        engine.upload(self.weight.data, logits)

    def loss(self, tokens: np.ndarray, targets: np.ndarray):
        ids = self.engine.tensor(tokens.reshape(-1).astype(np.int32))
        labels = self.engine.tensor(targets.reshape(-1).astype(np.int32))
        logits = self.engine.embedding(self.weight.data, ids)
        losses, lse = self.engine.cross_entropy(logits, labels)
        self.engine.cross_entropy_backward_(logits, labels, lse)
        self.keep(d_logits=logits, ids=ids)
        return self.engine.sum(losses)

    def backward(self, dy: None = None) -> None:
        out, accumulate = self.weight.gradient()
        self.engine.embedding_backward(self.take("d_logits"), self.take("ids"), out, accumulate=accumulate)


def logits_with_loss(loss: float) -> np.ndarray:
    """Two logits whose cross-entropy for class 0 is `loss`."""
    return np.array([0.0, math.log(math.exp(loss) - 1.0)])


def test_micro_batches_weigh_what_their_tokens_weigh(cpu: CpuEngine) -> None:
    """(1 token, loss 4) and (3 tokens, loss 1): 1.75, not 2.5, not 5."""
    table = Table(cpu, np.stack([logits_with_loss(4.0), logits_with_loss(1.0)]))
    step = TrainingStep(table, SGD(table, momentum=0.0), keep_gradients=True)
    batches = [
        (np.array([[0, 0, 0]]), np.array([[0, -100, -100]])),
        (np.array([[1, 1, 1]]), np.array([[0, 0, 0]])),
    ]
    result = step(batches, step=0, learning_rate=0.0)
    assert result.loss == pytest.approx(1.75, rel=1e-6)
    assert (result.num_valid, result.updated, result.finite) == (4, True, True)
    probability = np.array([math.exp(-4.0), math.exp(-1.0)])
    expected = np.array([1, 3]) * (probability - 1) / 4
    assert table.weight.grad is not None
    np.testing.assert_allclose(table.weight.grad.numpy()[:, 0], expected, rtol=1e-6)


def run(engine, config: GPTConfig, steps: list[tuple[int, list]], optimizer=AdamW, **settings) -> tuple[list, dict]:
    model = GPTModel(engine, config, seed=1)
    step = TrainingStep(model, optimizer(model), seed=9, keep_gradients=True, **settings)
    results = []
    for number, batches in steps:
        result = step(batches, step=number, learning_rate=1e-2)
        gradients = {name: p.grad.numpy() for name, p in model.named_parameters().items() if p.grad is not None}
        results.append((result, gradients))
    model.clear_gradients()
    return results, model.state_dict()


def data(seed: int, rows: int = 2) -> tuple[np.ndarray, np.ndarray]:
    tokens, targets = np.random.default_rng(seed).integers(0, 13, (2, rows, 8))
    return tokens, targets


def ignored(pair: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return pair[0], np.full_like(pair[1], -100)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_ignored_micro_batch_changes_nothing(cpu: CpuEngine, place: int) -> None:
    """One of four has every label ignored: loss, gradients and weights are those of the other three, to the bit."""
    three = [data(i) for i in range(3)]
    four = [*three[:place], ignored(data(3)), *three[place:]]
    ((with_it, gradients),), weights = run(cpu, CONFIG, [(0, four)])
    ((without, expected),), expected_weights = run(cpu, CONFIG, [(0, three)])
    assert with_it.loss == without.loss and with_it.num_valid == without.num_valid
    for name, value in expected.items():
        assert np.array_equal(gradients[name], value), name
    assert all(np.array_equal(weights[name], value) for name, value in expected_weights.items())


def test_all_labels_ignored(cpu: CpuEngine) -> None:
    """Loss 0, gradient 0, parameters unchanged, a warning."""
    model = GPTModel(cpu, CONFIG)
    optimizer = AdamW(model, weight_decay=0.5)
    step = TrainingStep(model, optimizer)
    step([data(0)], step=0, learning_rate=1e-2)
    weights, moments = model.state_dict(), optimizer.state_dict()
    with pytest.warns(UserWarning, match="every label is ignored"):
        result = step([ignored(data(i)) for i in range(4)], step=1, learning_rate=1e-2)
    assert (result.loss, result.grad_norm, result.num_valid, result.updated) == (0.0, 0.0, 0, False)
    assert all(np.array_equal(model.state_dict()[name], value) for name, value in weights.items())
    assert all(np.array_equal(optimizer.state_dict()[name], value) for name, value in moments.items())


@pytest.mark.parametrize("engine_name", ["cpu", "vulkan"])
@pytest.mark.parametrize("optimizer", [AdamW, SGD])
def test_what_is_not_finite_changes_nothing_and_is_named(
    engine_name: str, optimizer: type, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(engine_name)
    model = GPTModel(engine, CONFIG)
    chosen = optimizer(model)
    step = TrainingStep(model, chosen)
    assert step([data(0)], step=0, learning_rate=1e-2).finite
    name = "blocks.1.feed_forward.up.weight"
    weight = model.named_parameters()[name]
    good = weight.data.numpy()
    bad = good.copy()
    bad[0, 0] = np.nan
    engine.upload(weight.data, bad)
    weights, moments = model.state_dict(), chosen.state_dict()
    result = step([data(1)], step=1, learning_rate=1e-2)
    assert (result.updated, result.finite, result.non_finite) == (False, False, "loss")
    for key, value in model.state_dict().items():
        assert np.array_equal(value, weights[key], equal_nan=True), key
    for key, value in chosen.state_dict().items():
        assert np.array_equal(value, moments[key]), key
    engine.upload(weight.data, good)
    assert step([data(1)], step=1, learning_rate=1e-2).updated


def test_names_the_first_gradient_that_is_not_finite(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, CONFIG)
    optimizer = AdamW(model)

    def spoil(phase: str, micro_batch: int) -> None:
        if phase == "backward":
            for name in ("blocks.0.attention.out.weight", "final_norm.weight"):
                gradient = model.named_parameters()[name].grad
                assert gradient is not None
                cpu.upload(gradient, np.full(gradient.shape, np.inf))

    result = TrainingStep(model, optimizer, on_phase=spoil)([data(0)], step=0, learning_rate=1.0)
    assert result.non_finite == "blocks.0.attention.out.weight"
    assert optimizer.num_updates == 0


@pytest.mark.parametrize(("value", "named"), [(1e25, "gradient norm overflows: {}"), (np.inf, "{}")])
def test_a_finite_gradient_whose_norm_is_not_is_called_so(vulkan: VulkanEngine, value: float, named: str) -> None:
    """A gradient that is infinite is named before it. Where it is clipped, it is as any other."""
    engine = vulkan
    model = GPTModel(engine, CONFIG)
    gradients = {"blocks.0.attention.out.weight": 1e25, "final_norm.weight": value}
    before = model.state_dict()

    def spoil(phase: str, micro_batch: int) -> None:
        if phase == "backward":
            for name, size in gradients.items():
                gradient = model.named_parameters()[name].grad
                assert gradient is not None
                engine.upload(gradient, np.full(gradient.shape, size))

    result = TrainingStep(model, AdamW(model), on_phase=spoil)([data(0)], step=0, learning_rate=1.0)
    name = "final_norm.weight" if value == np.inf else "blocks.0.attention.out.weight"
    assert (result.updated, result.non_finite) == (False, named.format(name))
    assert all(np.array_equal(array, before[key]) for key, array in model.state_dict().items())
    result = TrainingStep(model, AdamW(model), on_phase=spoil, max_norm=1.0)([data(0)], step=0, learning_rate=0.1)
    if value == np.inf:
        assert (result.updated, result.non_finite) == (False, name)
        return
    size = sum(before[key].size for key in gradients)
    assert result.updated and result.finite and result.grad_norm == pytest.approx(1e25 * np.sqrt(size), rel=1e-5)
    for key, array in model.state_dict().items():  # every element of these two has the same gradient
        step = before[key] - array - 0.1 * 0.01 * before[key] * (before[key].ndim > 1)
        assert np.isfinite(array).all()
        if key in gradients:
            assert np.allclose(step, 0.1, rtol=1e-3), key


def test_resumed_run_equals_the_straight_one(vulkan: VulkanEngine) -> None:
    """At the level of model and optimizer: 5 steps, and 2 + 3 with a save between, dropout on."""
    pairs = [[data(n), data(n + 100)] for n in range(5)]
    model = GPTModel(vulkan, DROPOUT, seed=1)
    optimizer = AdamW(model)
    step = TrainingStep(model, optimizer, seed=9, max_norm=1.0)
    losses = []
    for n in range(5):
        if n == 2:
            saved = model.state_dict(), optimizer.state_dict()
        losses.append(step(pairs[n], step=n, learning_rate=1e-2).loss)
    final = model.state_dict()
    other = GPTModel(vulkan, DROPOUT, seed=77)
    other_optimizer = AdamW(other)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    step = TrainingStep(other, other_optimizer, seed=9, max_norm=1.0)
    assert [step(pairs[n], step=n, learning_rate=1e-2).loss for n in range(2, 5)] == losses[2:]
    assert all(np.array_equal(other.state_dict()[name], value) for name, value in final.items())


def test_vulkan_and_reference_agree(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    steps = [(n, [data(n)]) for n in range(8)]
    first, weights = run(vulkan, DROPOUT, steps, max_norm=1.0)
    second, expected = run(cpu, DROPOUT, steps, max_norm=1.0)
    for (a, _), (b, _) in zip(first, second, strict=True):
        assert a.loss == pytest.approx(b.loss, abs=1e-4)
    for name, value in expected.items():
        assert np.abs(weights[name] - value).max() < 1e-3, name


@pytest.mark.deviceless
@pytest.mark.parametrize("optimizer", [AdamW, SGD])
def test_it_learns(cpu: CpuEngine, optimizer: type) -> None:
    model = GPTModel(cpu, CONFIG)
    step = TrainingStep(model, optimizer(model), max_norm=1.0)
    tokens = np.arange(16).reshape(2, 8) % 13
    losses = [step([(tokens, (tokens + 1) % 13)], step=n, learning_rate=3e-2).loss for n in range(60)]
    assert losses[0] == pytest.approx(math.log(13), abs=0.05)
    assert losses[-1] < 0.5 * losses[0]
    loss = evaluate_loss(model, [(tokens, (tokens + 1) % 13), ignored((tokens, tokens))])
    assert loss == pytest.approx(losses[-1], rel=0.3)
    assert model.training
    assert math.isnan(evaluate_loss(model, [ignored((tokens, tokens))]))


def test_phases_and_gradient_lifetime(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, CONFIG)
    seen = []
    step = TrainingStep(model, AdamW(model), on_phase=lambda phase, i: seen.append((phase, i)))
    step([data(0), data(1)], step=0, learning_rate=1e-3)
    assert seen == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("optimizer", 1)]
    assert all(p.grad is None for p in model.parameters())


def test_adamw_first_step(cpu: CpuEngine) -> None:
    """p = 1, g = 0.5, through the optimizer; one-dimensional tensors do not decay unless asked."""
    model = Table(cpu, np.ones((1, 1)))
    for decay_all, expected in ((False, 0.899000002), (True, 0.899000002)):
        optimizer = AdamW(model, weight_decay=0.01, decay_all=decay_all)
        cpu.upload(model.weight.data, np.ones((1, 1)))
        model.weight.grad = cpu.tensor(np.full((1, 1), 0.5))
        optimizer.step(0.1)
        assert abs(model.weight.data.item() - expected) <= np.spacing(np.float32(0.899))
    norm = Layer(cpu)
    norm.weight = Parameter(cpu, (1,), "ones")
    norm.initialize(0)
    for decay_all, expected in ((False, 0.9), (True, 0.899)):
        optimizer = AdamW(norm, weight_decay=0.01, decay_all=decay_all)
        cpu.upload(norm.weight.data, np.ones(1))
        norm.weight.grad = cpu.tensor(np.full(1, 0.5))
        optimizer.step(0.1)
        assert norm.weight.data.item() == pytest.approx(expected, abs=1e-6)


def test_optimizer_state_and_settings(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, CONFIG)
    optimizer = AdamW(model)
    state = optimizer.state_dict()
    names = model.named_parameters()
    assert len(state) == 2 * len(names) + 1, "a tied head has one slot"
    with pytest.raises(ValueError, match="missing: num_updates"):
        optimizer.load_state_dict({name: value for name, value in state.items() if name != "num_updates"})
    with pytest.raises(ValueError, match="unexpected: momentum"):
        optimizer.load_state_dict({**state, "momentum.x": np.zeros(1)})
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        optimizer.step()
    for bad in ({"beta1": 1.0}, {"beta2": -0.1}, {"eps": 0.0}, {"learning_rate": -1.0}, {"weight_decay": math.nan}):
        with pytest.raises(ValueError):
            AdamW(model, **bad)
    with pytest.raises(ValueError):
        SGD(model, momentum=1.0)
    with pytest.raises(ValueError, match="no parameters"):
        SGD(Layer(cpu))
    with pytest.raises(BadInputError, match="at least one micro-batch"):
        TrainingStep(model, optimizer)([], step=0, learning_rate=0.1)
    with pytest.raises(BadInputError, match="max_norm"):
        TrainingStep(model, optimizer, max_norm=-1.0)
