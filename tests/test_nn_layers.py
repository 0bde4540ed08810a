"""Every layer by itself: gradients by finite differences in float64, the contract, and values known in closed form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layer_checks import check_layer, numeric_gradient, places_of, randomize

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError, MissingActivationError
from vkfold.engine.step_parameters import StepParameters
from vkfold.nn import (
    Attention,
    CrossEntropyLoss,
    Embedding,
    FeedForward,
    GPTBlock,
    Layer,
    LayerNorm,
    Linear,
    LinearCrossEntropy,
    Parameter,
    RMSNorm,
    Rope,
    RopeScaling,
    Softmax,
)
from vkfold.nn.feed_forward import default_width
from vkfold.nn.gpt_block import RECOMPUTE_GROUPS, make_norm
from vkfold.nn.rope import dynamic_ntk_base, inverse_frequencies, ntk_base, yarn_attention_factor


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape)


def make_block(engine, *, norm="rmsnorm", activation="swiglu", dropout=0.0, bias=False, kv_heads=1) -> GPTBlock:
    block = GPTBlock(
        engine,
        Attention(engine, 12, 2, kv_heads, bias=bias, rope=Rope(engine, 6, 16), seed=None),
        FeedForward(engine, 12, 10, activation=activation, bias=bias, seed=None),
        make_norm(engine, norm, 12, 1e-5),
        make_norm(engine, norm, 12, 1e-5),
        dropout=dropout,
        first_site=3,
    )
    randomize(block)
    return block


@pytest.mark.parametrize("bias", [False, True])
def test_linear(oracle: CpuEngine, bias: bool) -> None:
    layer = Linear(oracle, 5, 3, bias=bias)
    randomize(layer)
    x = inputs(2, 4, 5)
    expected = x @ layer.weight.data.numpy() + (layer.bias.data.numpy() if layer.bias else 0)
    np.testing.assert_allclose(layer(oracle.tensor(x)).numpy(), expected, rtol=1e-12)
    check_layer(layer, x)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms(oracle: CpuEngine, kind: type[RMSNorm | LayerNorm]) -> None:
    layer = kind(oracle, 9)
    randomize(layer)
    x = inputs(2, 3, 9)
    check_layer(layer, x)
    y, stats = layer.normalize(oracle.tensor(x))
    assert np.array_equal(layer.rebuild(oracle.tensor(x), stats).numpy(), y.numpy())


def test_softmax(oracle: CpuEngine) -> None:
    check_layer(Softmax(oracle), inputs(3, 7))


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "silu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward(oracle: CpuEngine, activation: str, bias: bool) -> None:
    layer = FeedForward(oracle, 6, 8, activation=activation, bias=bias)
    randomize(layer)
    check_layer(layer, inputs(2, 3, 6))


@pytest.mark.deviceless
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rope", ["none", "halves", "pairs", "yarn"])
def test_attention(oracle: CpuEngine, kv_heads: int, rope: str) -> None:
    scaling = RopeScaling("yarn", 4.0, original_seq_len=8) if rope == "yarn" else None
    table = None if rope == "none" else Rope(oracle, 4, 32, interleaved=rope == "pairs", scaling=scaling)
    layer = Attention(oracle, 16, 4, kv_heads, rope=table, bias=rope == "pairs", window=3 if rope == "yarn" else 0)
    randomize(layer)
    check_layer(layer, inputs(2, 5, 16), samples=8)


def test_grouped_heads_read_their_group(oracle: CpuEngine) -> None:
    """Values of head 0 all 1, of head 1 all 2: the four query heads give 1, 1, 2, 2."""
    layer = Attention(oracle, 8, 4, 2)
    weight = np.zeros((8, 16))
    oracle.upload(layer.qkv.weight.data, weight)
    qkv = np.zeros((1, 3, 16))
    qkv[..., 12:14], qkv[..., 14:16] = 1.0, 2.0
    o, _ = layer._attend(oracle.tensor(qkv))
    assert np.array_equal(o.numpy()[0, 1], [1, 1, 1, 1, 2, 2, 2, 2])


def test_rope_frequencies_and_scaling() -> None:
    """Frequencies, bases for longer contexts (NTK, static and dynamic), attention factors of YaRN, what is refused."""
    np.testing.assert_allclose(inverse_frequencies(8), [1, 0.1, 0.01, 0.001], rtol=1e-15)
    assert round(ntk_base(1e4, 4, 64), 3) == 41829.366
    assert round(dynamic_ntk_base(1e4, 2, 4096, 2048, 128), 3) == 30527.737
    assert dynamic_ntk_base(1e4, 2, 2048, 2048, 128) == 1e4
    assert [round(yarn_attention_factor(f), 8) for f in (4, 16, 40)] == [1.13862944, 1.27725887, 1.36888795]
    assert yarn_attention_factor(4, 0.5) == 0.5
    with pytest.raises(ValueError, match="odd"):
        inverse_frequencies(7)
    for bad in ({"kind": "x", "factor": 2}, {"kind": "ntk", "factor": 0.5}, {"kind": "yarn", "factor": 2}):
        with pytest.raises(ValueError):
            RopeScaling(**bad)
    yarn = {"kind": "yarn", "factor": 2, "original_seq_len": 8}
    for nonsense in (np.nan, np.inf, -1.0):
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            with pytest.raises(ValueError, match=f"{name} {nonsense}: it must be"):
                RopeScaling(**{**yarn, name: nonsense})
        with pytest.raises(ValueError, match=f"RoPE base {nonsense}: it must be positive and finite"):
            inverse_frequencies(8, nonsense)


@pytest.mark.parametrize("layer", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("eps", [np.nan, np.inf, -1e-5])
def test_a_norm_refuses_an_eps_when_it_is_made(cpu: CpuEngine, layer: type[RMSNorm | LayerNorm], eps: float) -> None:
    with pytest.raises(BadInputError, match="eps is"):
        layer(cpu, 8, eps=eps)


def test_dynamic_rope_follows_the_length(oracle: CpuEngine) -> None:
    rope = Rope(oracle, 8, 64, scaling=RopeScaling("dynamic", 2.0, original_seq_len=16))
    x = inputs(1, 16, 8)
    short = oracle.tensor(x)
    rope.rotate(short, 1)
    plain = oracle.tensor(x)
    Rope(oracle, 8, 64).rotate(plain, 1)
    assert np.array_equal(short.numpy(), plain.numpy())
    long = oracle.tensor(inputs(1, 64, 8))
    rope.rotate(long, 1)
    again = oracle.tensor(inputs(1, 64, 8))
    Rope(oracle, 8, 64, base=dynamic_ntk_base(1e4, 2, 64, 16, 8)).rotate(again, 1)
    assert np.array_equal(long.numpy(), again.numpy())
    with pytest.raises(ValueError, match="max_seq_len"):
        rope.rotate(oracle.tensor(inputs(1, 65, 8)), 1)


def test_swiglu_default_width() -> None:
    """8/3 d rounded up to a multiple of 256 for SwiGLU, 4 d for others."""
    assert default_width(4096, "swiglu") == 11008
    assert default_width(64, "swiglu") == 256
    assert default_width(96, "gelu") == 384


@pytest.mark.deviceless
@pytest.mark.parametrize(("norm", "activation", "bias"), [("rmsnorm", "swiglu", False), ("layernorm", "gelu", True)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_block(oracle: CpuEngine, norm: str, activation: str, bias: bool, dropout: float) -> None:
    oracle.set_step_parameters(StepParameters(seed=5, step=2))
    check_layer(make_block(oracle, norm=norm, activation=activation, bias=bias, dropout=dropout), inputs(2, 4, 12))


def gradients_of(block: GPTBlock, groups: tuple[str, ...], recompute: bool) -> dict[str, np.ndarray]:
    block.clear_gradients()
    block.set_recompute(groups)
    block.set_checkpoint_mode(recompute)
    x = block.engine.tensor(inputs(2, 4, 12))
    y = block.forward(x).numpy()
    if recompute:
        assert block.activation_cache() == {}
        block.forward_recompute(x, need_output=False)
    dx = block.backward(block.engine.tensor(inputs(2, 4, 12)[::-1])).numpy()
    return {
        "y": y,
        "dx": dx,
        **{name: p.grad.numpy() for name, p in block.named_parameters().items() if p.grad is not None},
    }


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_recompute_set_gives_the_same_bits(cpu: CpuEngine, dropout: float) -> None:
    cpu.set_step_parameters(StepParameters(seed=5, step=2))
    block = make_block(cpu, dropout=dropout)
    plain = gradients_of(block, (), False)
    kept_bytes = set()
    for size in range(len(RECOMPUTE_GROUPS) + 1):
        for groups in itertools.combinations(RECOMPUTE_GROUPS, size):
            for recompute in (False, True):
                result = gradients_of(block, groups, recompute)
                assert result.keys() == plain.keys()
                for name, value in plain.items():
                    assert np.array_equal(result[name], value), (groups, recompute, name)
            block.set_checkpoint_mode(False)
            block.forward(cpu.tensor(inputs(2, 4, 12)))
            kept_bytes.add(sum(t.nbytes for t in block.activation_cache().values()))
            names = set(block.activation_cache())
            gone = {"attention": "attention.o", "qkv": "attention.qkv", "mlp": "feed_forward.pre", "norm": "norm1.0"}
            for group, name in gone.items():
                assert (name in names) == (group not in groups)
    assert len(kept_bytes) > 8


def test_block_keeps_only_what_the_design_says(cpu: CpuEngine) -> None:
    """Inputs, q, k, v, O, the mid residual, the pre-activation, and scalars a row."""
    block = make_block(cpu, kv_heads=2)
    block.forward(cpu.tensor(inputs(2, 4, 12)))
    sizes = {name: tensor.size for name, tensor in block.activation_cache().items()}
    assert sizes == {
        "x": 96,
        "mid": 96,
        "norm1.0": 8,
        "norm2.0": 8,
        "attention.qkv": 288,
        "attention.o": 96,
        "attention.lse": 16,
        "feed_forward.pre": 160,
    }


def test_backward_without_a_cache_is_an_error(cpu: CpuEngine) -> None:
    layers = [
        (Linear(cpu, 12, 12), inputs(2, 4, 12)),
        (RMSNorm(cpu, 12), inputs(2, 4, 12)),
        (LayerNorm(cpu, 12), inputs(2, 4, 12)),
        (Softmax(cpu), inputs(2, 4, 12)),
        (FeedForward(cpu, 12), inputs(2, 4, 12)),
        (Attention(cpu, 12, 2), inputs(2, 4, 12)),
        (make_block(cpu), inputs(2, 4, 12)),
    ]
    for layer, x in layers:
        dy = cpu.tensor(x)
        with pytest.raises(MissingActivationError, match="call forward first"):
            layer.backward(dy)
        layer.forward(cpu.tensor(x))
        layer.backward(dy)
        with pytest.raises(MissingActivationError):
            layer.backward(dy)
        layer.forward(cpu.tensor(x))  # a full cache must not be used after a forward that keeps nothing
        layer.set_checkpoint_mode(True)
        layer.forward(cpu.tensor(x))
        assert layer.activation_cache() == {}
        with pytest.raises(MissingActivationError, match="checkpoint mode"):
            layer.backward(dy)
        layer.forward_recompute(cpu.tensor(x))
        assert layer.checkpoint_mode
        layer.backward(dy)
        layer.set_checkpoint_mode(False)
        layer.set_training(False)
        layer.forward(cpu.tensor(x))
        assert layer.activation_cache() == {}
        with pytest.raises(MissingActivationError, match="not training"):
            layer.backward(dy)


def test_checkpoint_mode_goes_through_each_childs_own_method(cpu: CpuEngine) -> None:
    calls = []

    class Watched(Linear):
        def set_checkpoint_mode(self, on: bool) -> None:
            calls.append(on)
            super().set_checkpoint_mode(on)

    class Pair(Layer):
        def __init__(self) -> None:
            super().__init__(cpu)
            self.layers = [Watched(cpu, 3, 3), Watched(cpu, 3, 3)]

        def forward(self, x):
            self.start_forward()
            return self.layers[1](self.layers[0](x))

        def backward(self, dy):
            return self.layers[0].backward(self.layers[1].backward(dy))

    pair = Pair()
    pair.set_checkpoint_mode(True)
    assert calls == [True, True]
    pair.forward(cpu.tensor(inputs(2, 3)))
    assert pair.activation_cache() == {}
    pair.forward_recompute(cpu.tensor(inputs(2, 3)))
    assert set(pair.activation_cache()) == {"layers.0.x", "layers.1.x"}
    assert set(pair.named_parameters()) == {f"layers.{i}.{part}" for i in (0, 1) for part in ("weight", "bias")}


def test_embedding(oracle: CpuEngine) -> None:
    layer = Embedding(oracle, 5, 3)
    tokens = np.array([[4, 1, 1], [0, 4, 4]])
    y = layer(oracle.tensor(tokens))
    assert np.array_equal(y.numpy(), layer.weight.data.numpy()[tokens])
    dy = inputs(2, 3, 3)
    layer.backward(oracle.tensor(dy))
    expected = np.zeros((5, 3))
    np.add.at(expected, tokens, dy)
    assert layer.weight.grad is not None
    np.testing.assert_allclose(layer.weight.grad.numpy(), expected, rtol=1e-12)


def test_gradients_add_up(oracle: CpuEngine) -> None:
    layer = Linear(oracle, 4, 3)
    x, dy = inputs(5, 4), inputs(5, 3)
    for _ in range(2):
        layer.forward(oracle.tensor(x))
        layer.backward(oracle.tensor(dy))
    assert layer.weight.grad is not None and layer.bias is not None and layer.bias.grad is not None
    np.testing.assert_allclose(layer.weight.grad.numpy(), 2 * x.T @ dy, rtol=1e-12)
    np.testing.assert_allclose(layer.bias.grad.numpy(), 2 * dy.sum(0), rtol=1e-12)


@pytest.mark.parametrize("chunk_bytes", [0, 1, 64 * 4 * 11, 100 * 4 * 11])
def test_linear_cross_entropy(oracle: CpuEngine, chunk_bytes: int) -> None:
    num_rows, vocab = 150, 11
    weight = Parameter(oracle, (vocab, 6))
    loss = LinearCrossEntropy(oracle, weight, chunk_bytes=chunk_bytes)
    assert loss.rows_of_chunk(num_rows) == (num_rows if chunk_bytes == 0 else 64)
    hidden, table = inputs(num_rows, 6), inputs(vocab, 6)
    oracle.upload(weight.data, table)
    targets = np.random.default_rng(0).integers(0, vocab, num_rows).astype(np.int32)
    targets[::7] = -100
    valid = targets >= 0
    oracle.set_step_parameters(StepParameters(loss_scale=0.25))

    def value() -> float:
        logits = hidden @ table.T
        rows = np.log(np.exp(logits).sum(-1)) - logits[np.arange(num_rows), np.maximum(targets, 0)]
        return float(rows[valid].sum())

    total = loss.forward(oracle.tensor(hidden), oracle.tensor(targets)).item()
    assert abs(total - value()) < 1e-9 * abs(total)
    assert set(loss.activation_cache()) == {"d_hidden"}
    d_hidden = loss.backward().numpy()
    assert weight.grad is not None
    d_table = weight.grad.numpy()
    rng = np.random.default_rng(1)
    for place in places_of(hidden.shape, rng, 10):
        assert abs(numeric_gradient(value, hidden, place) * 0.25 - d_hidden[place]) < 1e-6
    for place in places_of(table.shape, rng, 10):
        assert abs(numeric_gradient(value, table, place) * 0.25 - d_table[place]) < 1e-6
    weight.clear_gradient()
    loss.set_training(False)
    assert loss.forward(oracle.tensor(hidden), oracle.tensor(targets)).item() == total
    assert weight.grad is None and loss.activation_cache() == {}
    with pytest.raises(MissingActivationError):
        loss.backward()


def test_cross_entropy_loss(oracle: CpuEngine) -> None:
    loss = CrossEntropyLoss(oracle)
    logits, targets = inputs(2, 3, 5), np.array([[0, 4, -100], [2, 2, 1]])
    valid = targets >= 0

    def value() -> float:
        rows = (
            np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
        )
        return float(rows[valid].mean())

    assert abs(loss(oracle.tensor(logits), targets).item() - value()) < 1e-7
    d_logits = loss.backward().numpy()
    for place in places_of(logits.shape, np.random.default_rng(0), 15):
        assert abs(numeric_gradient(value, logits, place) - d_logits[place]) < 1e-7
    with pytest.raises(ValueError, match="outside"):
        loss(oracle.tensor(logits), np.full((2, 3), 5))
    with pytest.raises(ValueError, match="do not fit"):
        loss(oracle.tensor(logits), np.zeros((2, 4), int))


def test_state_dict_names_every_difference(cpu: CpuEngine) -> None:
    layer, other = FeedForward(cpu, 4, 6, bias=True, seed=1), FeedForward(cpu, 4, 6, bias=True, seed=2)
    state = layer.state_dict()
    assert set(state) == {"up.weight", "up.bias", "down.weight", "down.bias"}
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        assert np.array_equal(value, state[name])
    before = other.state_dict()
    broken = {**state, "extra": np.zeros(1), "up.bias": np.zeros(3)}
    del broken["down.bias"]
    with pytest.raises(ValueError, match=r"missing: down.bias; unexpected: extra; up.bias: shape \(3,\)"):
        other.load_state_dict(broken)
    assert all(np.array_equal(value, before[name]) for name, value in other.state_dict().items())


def test_start_values_depend_on_name_and_seed_only(cpu: CpuEngine) -> None:
    first, again, other = (FeedForward(cpu, 8, 16, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)
    big = Linear(cpu, 200, 300, std=0.05, seed=0).weight.data.numpy()
    assert abs(big.std() - 0.05) < 0.001 and abs(big.mean()) < 0.001
    assert not np.array_equal(first["up.weight"][:8, :8], first["down.weight"][:8, :8])


def test_a_gradient_is_complete_after_its_last_use(cpu: CpuEngine) -> None:
    parameter = Parameter(cpu, (2, 2))
    parameter.num_uses = 2
    done = []
    parameter.on_complete = done.append
    for expected in (0, 1, 1, 2):
        parameter.gradient_written()
        assert len(done) == expected


def test_wrong_settings(cpu: CpuEngine) -> None:
    with pytest.raises(ValueError, match="do not divide d_model"):
        Attention(cpu, 10, 3)
    with pytest.raises(ValueError, match="key/value heads"):
        Attention(cpu, 12, 4, 3)
    with pytest.raises(ValueError, match="unknown activation"):
        FeedForward(cpu, 8, activation="tanh")
    with pytest.raises(ValueError, match="cannot recompute"):
        make_block(cpu).set_recompute(["everything"])
    with pytest.raises(ValueError, match="got x of shape"):
        Linear(cpu, 3, 4)(cpu.tensor(inputs(2, 5)))
    with pytest.raises(ValueError, match="unknown init"):
        Parameter(cpu, (1,), "random")
