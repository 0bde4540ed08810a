"""Fusion changes what is dispatched and what is moved, never a bit of what anybody can read."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from vkfold.engine.expr import logistic, maximum, variables
from vkfold.engine.fusion_map_op import FusedMapOp
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import GPTConfig, GPTModel
from vkfold.nn.optimizers import AdamW
from vkfold.nn.training_step import TrainingStep

from .fusion_checks import arrays, as_if_new, check_same, counts, fuse_everything, fusion_of

MODELS = {
    "gpt": {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "num_kv_heads": 2},
}
NUM_LAYERS = 3

engine = pytest.fixture(name="engine")(as_if_new)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[bool, VulkanEngine]]:
    """Without fusion and with: with the same history, their pools are in the same state."""
    with pytest.MonkeyPatch.context() as patch:
        fuse_everything(patch)
        fused = VulkanEngine()
        patch.setenv("VKFOLD_FUSION", "0")
        plain = VulkanEngine()
    with fused, plain:
        yield {False: plain, True: fused}


def train(
    kind: str, dropout: float, engine: VulkanEngine, num_layers: int = NUM_LAYERS
) -> tuple[dict, list, dict, int, dict]:
    engine.end_batch()
    engine.release_idle_pool_blocks()
    config = GPTConfig(
        vocab_size=50,
        d_model=24,
        num_heads=4,
        num_layers=num_layers,
        max_seq_len=9,
        dropout=dropout,
        **MODELS[kind],
    )
    model = GPTModel(engine, config, seed=1)
    model.set_training(True)
    step = TrainingStep(model, AdamW(model), max_norm=1.0)
    rng = np.random.default_rng(0)
    losses, report, before = [], {}, 0
    for i in range(3):
        if engine.fusion is not None:
            engine.fusion.reset_report()
        batches = [(tokens := rng.integers(0, 50, (2, 9)), np.roll(tokens, -1, 1)) for _ in range(2)]
        losses.append(step(batches, step=i, learning_rate=1e-2).loss)
        if engine.fusion is not None and engine.fusion.num_calls:  # none in a step that is replayed
            report, before = engine.fusion.report(), engine.fusion.num_calls
    stats = {name: vars(s) if hasattr(s, "__dict__") else str(s) for name, s in engine.pool_stats().items()}
    return model.state_dict(), losses, report, before, stats


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_equal_to_the_bit_and_every_rule_fires_in_every_layer(
    kind: str, dropout: float, engines: dict[bool, VulkanEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKFOLD_REPLAY", "0")
    plain, plain_losses, nothing, _, plain_stats = train(kind, dropout, engines[False])
    fused, losses, report, num_calls, stats = train(kind, dropout, engines[True])
    assert not nothing
    assert losses == plain_losses
    for name, value in plain.items():
        assert np.array_equal(value, fused[name]), name
    assert stats == plain_stats  # not one allocation more or less
    show(f"{kind}, dropout {dropout}: {{}} ops a step in {{}} launches", report, num_calls)
    expected = {"residual + norm", "elementwise neighbours", "norm + matmul"}
    expected |= {"matmul + bias"} if kind == "gpt" else set()
    expected |= {"matmul + elementwise"} if dropout else {"matmul + residual"}
    for rule in expected:
        assert report[rule].times >= 2 * NUM_LAYERS, rule  # two micro-batches
    _, _, longer, _, _ = [train(kind, dropout, engine, NUM_LAYERS + 1) for engine in engines.values()][True]
    for rule in expected:
        assert longer[rule].times >= report[rule].times + 2, f"{rule} does not fire in a layer more"


def show(title: str, report: dict, num_calls: int) -> None:
    """Print how often each rule fired, and see that it lowered the bytes."""
    saved = sum(fired.launches_saved for fired in report.values())
    print("\n" + title.format(num_calls, num_calls - saved))
    for rule, fired in report.items():
        print(f"  {rule:22} {fired.times:3} times, bytes {fired.bytes_before:9,} -> {fired.bytes_after:9,}")
        assert fired.bytes_after < fired.bytes_before


@pytest.mark.parametrize("kind", MODELS)
def test_a_forward_without_backward_joins_matmuls_and_activations(engine: VulkanEngine, kind: str) -> None:
    """Where nothing is kept for backward, nobody else reads what comes before the activation."""
    config = GPTConfig(vocab_size=50, d_model=24, num_heads=4, num_layers=NUM_LAYERS, max_seq_len=9, **MODELS[kind])
    model = GPTModel(engine, config, seed=1)
    model.set_training(False)
    tokens = np.random.default_rng(0).integers(0, 50, (2, 9))
    reports = []

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        engine.flush_batch()
        if engine.fusion is not None:
            engine.fusion.reset_report()
        logits = model.forward(tokens).numpy()
        if engine.fusion is not None:
            reports.append((engine.fusion.report(), engine.fusion.num_calls))
        return [logits]

    check_same(engine, call)
    report, num_calls = reports[0]
    show(f"{kind}, forward alone: {{}} ops in {{}} launches", report, num_calls)
    expected = {"matmul + residual": 2}  # a layer
    if kind == "gpt":
        expected |= {"matmul + activation": 1, "matmul + bias": 4}
    for rule, times in expected.items():
        assert report[rule].times == times * NUM_LAYERS, rule


def test_matmul_takes_bias_activation_and_residual(engine: VulkanEngine) -> None:
    a, b, bias, residual = arrays((17, 9), (9, 33), (33,), (17, 33))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        y = engine.matmul(engine.tensor(a), engine.tensor(b))
        engine.add_bias_(y, engine.tensor(bias))
        z = engine.gelu(y)
        del y
        engine.add_(z, engine.tensor(residual))
        return [z.numpy()]

    # Uploads between ops end the window: the operands must be there first for anything to be fused.
    check_same(engine, call)
    assert set(counts(engine)) <= {"elementwise neighbours"}
    fusion_of(engine).reset_report()

    def ready(engine: VulkanEngine) -> list[np.ndarray]:
        at, bt, biast, rt = (engine.tensor(array) for array in (a, b, bias, residual))
        y = engine.matmul(at, bt)
        engine.add_bias_(y, biast)
        z = engine.gelu(y)
        del y
        engine.add_(z, rt)
        return [z.numpy()]

    check_same(engine, ready)
    assert counts(engine) == {"matmul + bias": 1, "matmul + activation": 1, "matmul + residual": 1}


def test_a_value_that_is_still_held_is_still_written(engine: VulkanEngine) -> None:
    a, b = (engine.tensor(array) for array in arrays((8, 8), (8, 8)))
    y = engine.matmul(a, b)
    z = engine.gelu(y)
    assert np.array_equal(z.numpy(), engine.gelu(engine.tensor(y.numpy())).numpy())
    assert np.allclose(y.numpy(), a.numpy() @ b.numpy(), atol=1e-5)
    assert not counts(engine)


def test_a_reader_between_sees_what_was_there(engine: VulkanEngine) -> None:
    a, b, r = (engine.tensor(array) for array in arrays((8, 8), (8, 8), (8, 8)))
    y = engine.matmul(a, b)
    copied = engine.copy(y)
    engine.add_(y, r)
    before = copied.numpy()
    assert np.array_equal(y.numpy(), before + r.numpy())
    assert not counts(engine)


def test_a_residual_written_between_is_waited_for(engine: VulkanEngine) -> None:
    a, b, r, more = (engine.tensor(array) for array in arrays((8, 8), (8, 8), (8, 8), (8, 8)))
    y = engine.matmul(a, b)
    engine.add_(r, more)  # the matmul that adds r must not run before this
    engine.add_(y, r)
    assert np.array_equal(y.numpy(), engine.matmul(a, b).numpy() + r.numpy())
    assert "matmul + residual" not in counts(engine)


def test_a_matmul_is_not_added_to_itself_in_place(engine: VulkanEngine) -> None:
    a, b = (engine.tensor(array) for array in arrays((8, 8), (8, 8)))
    y = engine.matmul(a, b)
    engine.add_(y, y)
    assert np.array_equal(y.numpy(), 2 * engine.matmul(a, b).numpy())


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("cols", [3, 16, 33])
def test_norm_gradient_is_added_to_the_residual_stream(engine: VulkanEngine, norm: str, cols: int) -> None:
    dy, x, weight, stream = arrays((7, cols), (7, cols), (cols,), (7, cols))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        tensors = [engine.tensor(array) for array in (dy, x, weight)]
        target = engine.tensor(stream)
        if norm == "rms":
            _, *stats = engine.rms_norm(tensors[1], tensors[2])
            gradient = engine.rms_norm_backward(*tensors, *stats)
        else:
            _, *stats = engine.layer_norm(tensors[1], tensors[2], engine.zeros((cols,)))
            gradient = engine.layer_norm_backward(*tensors, *stats)
        engine.add_(target, gradient)
        del gradient
        return [target.numpy()]

    check_same(engine, call)
    assert counts(engine) == {"residual + norm": 1}


def test_a_dropped_value_is_written_for_a_reader_between(engine: VulkanEngine) -> None:
    """Two elementwise ops with a matmul between them that reads what the first made, and nobody else holds."""
    a, b = arrays((8, 8), (8, 8))

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        x, square = engine.tensor(a), engine.tensor(b)
        engine.flush_batch()
        y = engine.scale(x, 2.0)
        z = engine.matmul(y, square)
        w = engine.silu(y)
        del y
        engine.softmax(z)  # the pair before is looked at now
        return [z.numpy(), w.numpy()]

    check_same(engine, call)


def random_step(engine: VulkanEngine, rng: Any, x: Tensor, y: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """One elementwise op of x, of a kind that a product may end in, in place or not."""
    a, b, row, column = variables("a b row column")
    what = rng.integers(0, 8)
    if what == 0:
        return engine.affine(x, factor=0.75, offset=0.125)
    if what == 1:
        return engine.dropout_add(y, x, p=0.25, site=int(rng.integers(0, 3)))
    if what == 2:
        return engine.map(a * logistic(b) * row + column, a=x, b=y, row=scales, column=weight)
    if what == 3:
        return engine.map(maximum(a * row, -1.0), a=x, row=0.5)
    if what == 4:
        return engine.multiply(y, x)
    if what == 5:
        return engine.activation_backward(x, y, "gelu")
    if what == 6:
        engine.add_bias_(x, weight)
    else:
        engine.add_(x, y)
    return x


def random_program(seed: int, ops: int = 25) -> Callable[[VulkanEngine], list[np.ndarray]]:
    """A program that drops, aliases, overwrites and takes views at random; it gives every value that is still held."""

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)

        def pick(values: list) -> Tensor:
            return values[rng.integers(0, len(values))]

        values = [engine.tensor(0.5 * rng.standard_normal((6, 8)).astype(np.float32)) for _ in range(4)]
        square, weight = engine.tensor(0.3 * np.eye(8) + 0.01), engine.tensor(np.linspace(0.5, 1.5, 8))
        rstds = engine.tensor(np.linspace(0.2, 0.9, 6))
        wide = engine.tensor(np.tile(0.5 * np.eye(8), 2))
        scales = engine.tensor(np.linspace(0.3, 1.2, 6).reshape(6, 1))
        for _ in range(ops):
            x, y = pick(values), pick(values)
            activation = (None, "relu", "silu")[rng.integers(0, 3)]
            what = rng.integers(0, 14)
            if what == 0:
                values.append(engine.matmul(x, square))
                if rng.integers(0, 2):
                    engine.add_bias_(values[-1], weight)
                if rng.integers(0, 2):
                    engine.add_(values[-1], y)
            elif what == 1:
                engine.add_(x, y)
            elif what == 2:
                engine.add_bias_(x, weight)
            elif what == 3:
                values.append(engine.activation(x, ("relu", "silu")[rng.integers(0, 2)]))
                values.append(engine.gelu(engine.matmul(y, square)))
            elif what == 4:
                gradient = engine.rms_norm_backward(x, y, weight, rstds)
                if rng.integers(0, 2):
                    values.append(gradient)
                else:
                    engine.add_(pick(values), gradient)
                del gradient
            elif what == 5:
                values.append(engine.scale(engine.add(x, y), 0.4))
            elif what == 6:
                values.append(engine.swiglu(engine.swiglu_backward(x, engine.matmul(y, wide))))
            elif what == 7:
                values.append(engine.dropout(x, p=0.25, site=int(rng.integers(0, 3))))
            elif what == 8:  # views of rows: bytes that overlap in part
                engine.add_(x.rows(0, 3), y.rows(3, 6))
                engine.add_(y.rows(1, 4), engine.scale(x.rows(2, 5), 0.5))
            elif what == 9:
                values.append(engine.activation_backward(x, y, "silu"))
                values.append(engine.activation(y, "silu"))
            elif what == 10:
                normed = (
                    engine.rms_norm(x, weight)[0] if rng.integers(0, 2) else engine.rms_norm_apply(x, weight, rstds)
                )
                values.append(engine.matmul(normed, square))
                del normed
                if rng.integers(0, 2):
                    engine.add_(y, values[-1])
            elif what in (11, 12):
                product = engine.matmul(x, square, bias=weight if rng.integers(0, 2) else None, activation=activation)
                for _ in range(rng.integers(1, 4)):
                    product = random_step(engine, rng, product, pick(values), weight, scales)
                if rng.integers(0, 2):
                    values.append(product)
                elif x is not y:  # into what somebody else sees
                    engine.matmul(x, square, out=y, accumulate=bool(rng.integers(0, 2)))
                    engine.add_(y, product)
                del product
            while len(values) > 6:
                del values[rng.integers(0, len(values))]
            del x, y
        return [value.numpy() for value in values]

    return call


@pytest.mark.parametrize(
    "seeds", [range(0, 20), range(20, 40), pytest.param(range(40, 60), marks=pytest.mark.slow)], ids=str
)
def test_random_programs_give_the_same_bits(engine: VulkanEngine, seeds: range) -> None:
    for seed in seeds:
        check_same(engine, random_program(seed))
    expected = {
        "matmul + bias",
        "matmul + activation",
        "matmul + residual",
        "matmul + elementwise",
        "residual + norm",
        "elementwise neighbours",
    }
    assert set(counts(engine)) >= expected


def test_joint_ops_have_a_reference(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a joint op says it computes is what its kernel computes, to the reference's own accuracy."""
    seen: list[str] = []
    launch = FusedMapOp.launch

    def checked(op: FusedMapOp, gpu: Any, inputs: Any, outputs: Any, **settings: Any) -> None:
        if gpu.rehearsing:
            launch(op, gpu, inputs, outputs, **settings)
            return
        before = [tensor.numpy() for tensor in inputs]
        launch(op, gpu, inputs, outputs, **settings)
        step = {"step": engine.step_parameters} if op.takes_step else {}
        made = op.reference(*before, **settings, **step)
        for array, tensor in zip([*before, *made], [*inputs, *outputs], strict=True):
            assert np.allclose(array.reshape(-1), tensor.numpy().reshape(-1), rtol=1e-5, atol=1e-5), op.name
        seen.append(op.name)

    monkeypatch.setattr(FusedMapOp, "launch", checked)
    for seed in range(8):
        random_program(seed)(engine)
    assert len(set(seen)) > 10
    assert any("swiglu" in name for name in seen) and any("dropout" in name for name in seen)


def test_chains_do_not_grow_without_end(engine: VulkanEngine) -> None:
    x = engine.tensor(np.ones((4, 4)))
    y = engine.scale(x, 1.0)
    for _ in range(30):
        y = engine.add(y, x)
    assert np.array_equal(y.numpy(), np.full((4, 4), 31.0))
    assert 20 <= counts(engine)["elementwise neighbours"] <= 26  # six calls at most in a kernel


def test_held_back_ops_hold_no_memory(engine: VulkanEngine) -> None:
    a = engine.tensor(np.ones((64, 64), np.float32))
    engine.flush_batch()
    before = engine.pool_stats()["step"].live_bytes
    b = engine.gelu(a)
    assert engine.pool_stats()["step"].live_bytes > before
    del b
    gc.collect()
    assert engine.pool_stats()["step"].live_bytes == before
