"""The whole model: gradients by finite differences in float64, sizes, names, bad input, and both ways to train it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from layer_checks import check_parameters, randomize

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError, MissingActivationError
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import CrossEntropyLoss, GPTConfig, GPTModel, RopeScaling

TINY = {"vocab_size": 11, "max_seq_len": 8, "d_model": 8, "num_heads": 2, "num_layers": 2, "d_ff": 6}
GPT_LIKE = {"norm": "layernorm", "activation": "gelu", "positions": "learned"}


def batch(seed: int = 0, rows: int = 2, seq: int = 5, vocab: int = 11) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, vocab, (2, rows, seq))
    targets[0, 1] = -100
    return tokens, targets


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_heads": 1, "tie_head": False},
        GPT_LIKE,
        {**GPT_LIKE, "tie_head": False, "dropout": 0.3, "activation": "relu"},
        {"dropout": 0.3, "activation": "silu", "bias": True, "rope_interleaved": True, "window": 2},
        {"positions": "alibi", "attention_softcap": 3.0, "attention_sinks": True, "num_kv_heads": 1},
    ],
)
def test_whole_model_gradient(oracle: CpuEngine, settings: dict) -> None:
    model = GPTModel(oracle, GPTConfig(**{**TINY, **settings}), seed=1)
    randomize(model, scale=0.3)
    tokens, targets = batch()
    scale = 1.0 / 9
    oracle.set_step_parameters(StepParameters(seed=3, step=7, loss_scale=scale))

    def value() -> float:
        return model.loss(tokens, targets).item() * scale

    value()
    model.clear_gradients()
    value()
    model.backward()
    assert model.activation_cache() == {}
    gradients = {name: p.grad for name, p in model.named_parameters().items()}
    analytic = {name: grad.numpy() for name, grad in gradients.items() if grad is not None}
    assert analytic.keys() == gradients.keys()

    def loss_only() -> float:  # a training forward (dropout on) whose gradients are thrown away
        result = value()
        model.clear_gradients()
        return result

    for name, parameter in model.named_parameters().items():
        parameter.grad = oracle.tensor(analytic[name])
        check_parameters(loss_only, {name: parameter}, samples=4)


@pytest.mark.parametrize("tie_head", [True, False])
def test_logits_path_and_loss_path_agree(oracle: CpuEngine, tie_head: bool) -> None:
    model = GPTModel(oracle, GPTConfig(**{**TINY, "tie_head": tie_head}))
    tokens, targets = batch()
    oracle.set_step_parameters(StepParameters(loss_scale=1 / 9))
    total = model.loss(tokens, targets).item() / 9
    model.backward()
    first = {name: p.grad.numpy() for name, p in model.named_parameters().items() if p.grad is not None}
    model.clear_gradients()
    loss = CrossEntropyLoss(oracle)
    logits = model.forward(tokens)
    assert logits.shape == (2, 5, 11)
    assert abs(loss(logits, targets).item() - total) < 1e-7
    model.backward(loss.backward())
    for name, parameter in model.named_parameters().items():
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), first[name], rtol=1e-7, atol=1e-10)


def test_tied_gradient_is_lookup_part_plus_head_part(oracle: CpuEngine) -> None:
    """An untied model with equal weights gives the parts; loading two different tensors is an error."""
    tokens, targets = batch()
    oracle.set_step_parameters(StepParameters(loss_scale=1 / 9))
    tied = GPTModel(oracle, GPTConfig(**TINY), seed=4)
    untied = GPTModel(oracle, GPTConfig(**TINY, tie_head=False), seed=4)
    oracle.upload(untied.head.data, tied.head.data.numpy())
    for model in (tied, untied):
        model.loss(tokens, targets)
        model.backward()
    parts = untied.named_parameters()
    whole = tied.named_parameters()["embedding.weight"].grad
    assert whole is not None and parts["head"].grad is not None and parts["embedding.weight"].grad is not None
    np.testing.assert_allclose(
        whole.numpy(), parts["head"].grad.numpy() + parts["embedding.weight"].grad.numpy(), rtol=1e-10, atol=1e-14
    )
    assert "head" not in tied.named_parameters()
    assert set(parts) - set(tied.named_parameters()) == {"head"}
    state = tied.state_dict()
    tied.load_state_dict({**state, "head": state["embedding.weight"]})
    with pytest.raises(ValueError, match="two different tensors"):
        tied.load_state_dict({**state, "head": state["embedding.weight"] + 1})


def test_number_of_parameters() -> None:
    """Llama 3 8B and Llama 2 7B, norms included, and the closed form against real models."""
    llama3 = GPTConfig(128256, 8192, 4096, 32, 32, num_kv_heads=8, d_ff=14336, tie_head=False)
    assert llama3.num_parameters == 8_030_261_248
    assert GPTConfig(32000, 4096, 4096, 32, 32, tie_head=False).num_parameters == 6_738_415_616
    plan = PlanEngine()
    for settings in (
        {},
        {"tie_head": False, "num_kv_heads": 1, "head_dim": 6},
        GPT_LIKE,
        {"bias": True, "activation": "silu"},
    ):
        config = GPTConfig(**{**TINY, **settings})
        assert GPTModel(plan, config).num_parameters == config.num_parameters


def test_config_defaults_and_round_trip() -> None:
    config = GPTConfig(10, 8, 4096, 32, 1, rope_scaling=RopeScaling("yarn", 4.0, original_seq_len=8))
    assert (config.num_kv_heads, config.head_dim, config.d_ff, config.bias) == (32, 128, 11008, False)
    assert GPTConfig.from_dict(config.to_dict()) == config
    assert GPTConfig(10, 8, 64, 4, 1, norm="layernorm", activation="gelu").bias is True
    with pytest.raises(BadInputError, match="unknown model settings: colour"):
        GPTConfig.from_dict({**config.to_dict(), "colour": 1})
    with pytest.raises(BadInputError, match="vocab_size"):
        GPTConfig.from_dict({"d_model": 4})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 does not divide d_model 8"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"num_heads": 8}, "head_dim 1 is odd"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": float("nan")}, "dropout is nan"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm', it must be one of rmsnorm, layernorm"),
        ({"positions": "none"}, "positions"),
        ({"activation": "tanh"}, "activation"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"d_ff": -1, "vocab_size": 0}, "vocab_size is 0.*d_ff is -1"),
        ({"norm_eps": 0.0}, "norm_eps"),
    ],
)
def test_bad_configs(settings: dict, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        GPTConfig(**{**TINY, **settings})


def test_odd_head_dim_is_fine_with_learned_positions(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, GPTConfig(**{**TINY, "num_heads": 8, "positions": "learned"}))
    assert np.isfinite(model.loss(*batch()).item())


def test_bad_tokens(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, GPTConfig(**TINY))
    for tokens, message in (
        (np.full((1, 2), 11), "outside the vocabulary"),
        (np.full((1, 2), -1), "outside the vocabulary"),
        (np.zeros((1, 9), int), "the model takes 8"),
        (np.zeros(3, int), "batch, seq"),
        (np.zeros((1, 0), int), "not empty"),
        (np.zeros((1, 2)), "integers"),
    ):
        with pytest.raises(BadInputError, match=message):
            model.forward(tokens)
    tokens, targets = batch()
    with pytest.raises(BadInputError, match="outside"):
        model.loss(tokens, targets + 11)
    with pytest.raises(BadInputError, match="differ in shape"):
        model.loss(tokens, targets[:, 1:])


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "<i4", ">i4", "u4", "<i8", ">i8", "u8"])
def test_a_batch_is_checked_in_every_type(cpu: CpuEngine, dtype: str) -> None:
    """Number of labels, or what lies outside, as a look at each value says; also of arrays with gaps."""
    model = GPTModel(cpu, GPTConfig(**TINY))
    kind = np.dtype(dtype)
    limits = np.iinfo(kind)
    wide = [n for n in (limits.max, limits.min, 2**32 + 3, -(2**32) + 3) if limits.min <= n <= limits.max]
    whole = np.zeros((2, 6), kind)
    for number in (0, 10, 11, -1, -99, -100, -101, *wide):
        if not limits.min <= number <= limits.max:
            continue
        for ignored in ((), (1,), (0, 1, 2, 3, 4, 5)) if kind.kind == "i" else ((),):
            whole[:] = 3
            whole[1, 4] = number
            if ignored:
                whole[1, list(ignored)] = -100
            for targets in (whole, whole[:, ::2], np.asfortranarray(whole)):
                values = [int(value) for value in targets.ravel()]
                labels = [value for value in values if value != -100]
                if all(0 <= value <= 10 for value in labels):
                    assert model.check_batch(np.zeros_like(targets), targets) == len(labels)
                else:
                    with pytest.raises(BadInputError, match=rf"tokens {min(labels)}\.\.{max(labels)} lie outside"):
                        model.check_batch(np.zeros_like(targets), targets)
                if len(labels) < targets.size:
                    with pytest.raises(BadInputError, match="outside the vocabulary"):
                        model.check_batch(targets, np.zeros_like(targets))


@pytest.mark.parametrize("checkpoint_every", [0, 1, 2])
def test_evaluation_keeps_nothing(cpu: CpuEngine, checkpoint_every: int) -> None:
    model = GPTModel(cpu, GPTConfig(**{**TINY, "dropout": 0.5}))
    model.set_checkpoint_every(checkpoint_every)
    tokens, targets = batch()
    with pytest.raises(MissingActivationError):
        model.backward()
    model.loss(tokens, targets)
    model.set_training(False)
    model.clear_gradients()
    assert model.activation_cache() == {}
    before = cpu.pool_stats()["direct"]
    first = model.loss(tokens, targets).item()
    assert model.activation_cache() == {}
    assert all(p.grad is None for p in model.parameters())
    assert model.loss(tokens, targets).item() == first, "dropout is off"
    assert cpu.pool_stats()["direct"].live_bytes == before.live_bytes
    with pytest.raises(MissingActivationError):
        model.backward()


def test_logits_last(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, GPTConfig(**{**TINY, **GPT_LIKE}))
    tokens, _ = batch(rows=3)
    model.set_training(False)
    full = model.forward(tokens).numpy()[:, -1]
    np.testing.assert_allclose(model.logits_last(tokens).numpy(), full, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.logits_last(tokens[:1]).numpy(), full[:1], rtol=1e-5, atol=1e-6)
    assert not model.training


def test_dropout_sites_and_micro_batches_differ(cpu: CpuEngine) -> None:
    """Masks of two sites of one block, and of two micro-batches, differ; the same one repeats."""
    ones = cpu.tensor(np.ones(1000))
    model = GPTModel(cpu, GPTConfig(**{**TINY, "dropout": 0.5}))
    sites = [0] + [block.first_site + i for block in model.blocks for i in (0, 1)]
    assert len(set(sites)) == 5
    masks = []
    for micro_batch in (0, 1):
        cpu.set_step_parameters(StepParameters(seed=1, micro_batch=micro_batch))
        masks += [cpu.dropout(ones, p=0.5, site=site).numpy() for site in sites]
        assert np.array_equal(cpu.dropout(ones, p=0.5, site=0).numpy(), masks[-5])
    assert all((a != b).any() for i, a in enumerate(masks) for b in masks[:i])


def test_no_reference_cycle_holds_a_tensor(cpu: CpuEngine) -> None:
    """Everything a step used is given back by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        before = cpu.pool_stats()["direct"].live_bytes
        model = GPTModel(cpu, GPTConfig(**{**TINY, "dropout": 0.1}))
        own = cpu.pool_stats()["direct"].live_bytes
        for every in (0, 1, 2):
            model.set_checkpoint_every(every)
            model.loss(*batch())
            model.backward()
            model.clear_gradients()
            assert cpu.pool_stats()["direct"].live_bytes == own
        del model
        assert cpu.pool_stats()["direct"].live_bytes == before
    finally:
        gc.enable()


def test_segments_and_flush_settings(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, GPTConfig(**TINY))
    for setting in (model.set_checkpoint_every, model.set_flush_interval):
        with pytest.raises(ValueError, match="must not be negative"):
            setting(-1)
    with pytest.raises(ValueError, match="cannot recompute"):
        model.set_recompute(["mlp", "head"])
    model.set_checkpoint_mode(True)
    assert model.checkpoint_every == 1 and all(block.checkpoint_mode for block in model.blocks)
    model.set_checkpoint_mode(False)
    assert not any(block.attention.qkv.checkpoint_mode for block in model.blocks)


def test_flushes_where_asked(cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPTModel(cpu, GPTConfig(**{**TINY, "num_layers": 4}))
    flushes = []
    monkeypatch.setattr(cpu, "flush_batch", lambda: flushes.append(1), raising=True)
    for interval, expected in ((0, 0), (1, 8), (2, 4), (3, 2)):
        flushes.clear()
        model.set_flush_interval(interval)
        model.loss(*batch())
        model.backward()
        assert len(flushes) == expected
        model.clear_gradients()


def test_documents_are_models_of_their_own(oracle: CpuEngine, vulkan: VulkanEngine) -> None:
    """With ALiBi, which knows distances only, packed documents have the logits and gradients of single ones."""
    settings = {**TINY, "positions": "alibi", "attention_sinks": True}
    ids = np.array([[0, 0, 0, 0, 0], [5, 5, 5, 2, 2]])
    tokens = np.random.default_rng(4).integers(0, TINY["vocab_size"], ids.shape)
    targets = np.roll(tokens, 1)
    packed, single = (GPTModel(oracle, GPTConfig(**settings), seed=1) for _ in range(2))
    for model in (packed, single):
        randomize(model, scale=0.3)
    oracle.set_step_parameters(StepParameters(loss_scale=0.1))
    packed.set_documents(ids)
    logits = packed.forward(tokens).numpy()
    parts = [(0, slice(0, 5)), (1, slice(0, 3)), (1, slice(3, 5))]
    for row, part in parts:
        alone = single.forward(tokens[row : row + 1, part]).numpy()[0]
        np.testing.assert_allclose(logits[row, part], alone, rtol=1e-9, atol=1e-9)
    packed.loss(tokens, targets)
    packed.backward()
    for row, part in parts:
        single.loss(tokens[row : row + 1, part], targets[row : row + 1, part])
        single.backward()
    for (name, a), b in zip(packed.named_parameters().items(), single.parameters(), strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad.numpy(), rtol=1e-8, atol=1e-10, err_msg=name)
    packed.set_documents(None)
    assert not np.allclose(packed.forward(tokens).numpy(), logits)
    device = GPTModel(vulkan, GPTConfig(**settings), seed=1)
    device.load_state_dict(packed.state_dict())
    device.set_documents(ids)
    np.testing.assert_allclose(device.forward(tokens).numpy(), logits, rtol=1e-4, atol=1e-4)
