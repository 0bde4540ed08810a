"""Fused updates: the bits of the plain step, never all gradients alive, what is refused, what is not finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vkfold.engine.allocation_ledger import AllocationLedger
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.plan_engine import PlanEngine
from vkfold.nn import SGD, Adafactor, AdamW, FusedUpdate, GPTConfig, GPTModel, Parameter, TrainingStep
from vkfold.tools import text_train, training_run
from vkfold.tools.saves import open_save

TIED = GPTConfig(37, 16, 20, 2, 3, d_ff=24, tie_head=True, norm="layernorm", activation="gelu", positions="learned")
UNTIED = GPTConfig(37, 16, 24, 6, 3, num_kv_heads=2, d_ff=28, tie_head=False, dropout=0.1)
OPTIMIZERS = [AdamW, SGD, Adafactor]


@pytest.fixture(params=["vulkan", "cpu"])
def engine(request: pytest.FixtureRequest) -> ComputeEngine:
    return request.getfixturevalue(request.param)


def batch(seed: int, vocab: int = 37) -> tuple[np.ndarray, np.ndarray]:
    tokens, targets = np.random.default_rng(seed).integers(0, vocab, (2, 3, 15))
    return tokens, targets


def trained(
    engine: ComputeEngine, config: GPTConfig, optimizer: type, fused: bool, every: int = 0
) -> tuple[list, dict]:
    """Step results, and every weight and moment after three steps."""
    model = GPTModel(engine, config, seed=1, loss_chunk_bytes=4096)
    model.set_checkpoint_every(every)
    chosen = optimizer(model, weight_decay=0.1)
    step = TrainingStep(model, chosen, seed=3, fused_update=fused)
    results = [step([batch(i)], step=i, learning_rate=1e-2) for i in range(3)]
    assert all(p.grad is None and p.on_complete is None for p in model.parameters())
    return results, model.state_dict() | {f"optimizer {name}": a for name, a in chosen.state_dict().items()}


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("every", [0, 2])
def test_the_bits_of_the_plain_step(engine: ComputeEngine, config: GPTConfig, optimizer: type, every: int) -> None:
    plain, expected = trained(engine, config, optimizer, fused=False)
    fused, got = trained(engine, config, optimizer, fused=True, every=every)
    for name, value in expected.items():
        assert np.array_equal(got[name], value), name
    for one, other in zip(plain, fused, strict=True):
        assert (one.loss, one.num_valid, one.updated, one.finite) == (other.loss, other.num_valid, True, True)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=3e-7)


@pytest.mark.parametrize("groups", [("norm", "attention"), ("mlp", "qkv", "activation")])
def test_the_bits_with_fine_grained_recomputation(cpu: CpuEngine, groups: tuple[str, ...]) -> None:
    # What is rebuilt in backward is rebuilt from weights that were not updated yet.
    weights = []
    for fused in (False, True):
        model = GPTModel(cpu, UNTIED, seed=1)
        model.set_recompute(groups)
        step = TrainingStep(model, AdamW(model), fused_update=fused)
        for i in range(2):
            step([batch(i)], step=i, learning_rate=1e-2)
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        assert np.array_equal(weights[1][name], value), name


def test_a_tied_table_is_updated_once_after_the_embedding(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, TIED, seed=1)
    optimizer = AdamW(model)
    order: list[str] = []
    update = optimizer.update

    def noted(name: str, parameter: Parameter, state: object) -> None:
        order.append(name)
        update(name, parameter, state)  # type: ignore[arg-type]

    optimizer.update = noted  # type: ignore[assignment, method-assign]
    TrainingStep(model, optimizer, fused_update=True)([batch(0)], step=0, learning_rate=1e-2)
    assert sorted(order) == sorted(model.named_parameters())
    assert order[-1] == "embedding.weight" and order[:2] == ["final_norm.weight", "final_norm.bias"]


def planned(optimizer: type, fused: bool) -> tuple[int, int]:
    """Peak bytes of all, and of gradients, in a step of the 236M-parameter reference model, checkpointed."""
    config = GPTConfig(
        32782, 1024, 1024, 16, 16, d_ff=4096, norm="layernorm", activation="gelu", positions="learned", tie_head=True
    )
    engine = PlanEngine()
    ledger = AllocationLedger(engine)
    ledger.attach()
    model = GPTModel(engine, config, loss_chunk_bytes=64 * 2**20)
    model.set_checkpoint_every(1)
    step = TrainingStep(model, optimizer(model), fused_update=fused)
    tokens = np.zeros((6, 1024), np.int32)
    ledger.start_peak()
    step([(tokens, tokens)], step=0, learning_rate=1e-3)
    assert ledger.reserved_at_peak <= 1.05 * ledger.peak_bytes or not fused
    return ledger.peak_bytes, int(ledger.curve(kind="gradients").max())


def test_planned_memory_of_the_reference_model() -> None:
    peak, gradients = planned(Adafactor, fused=True)
    assert peak <= 2.4e9
    # The tied table's gradient lives from the loss to the end; beside it one Linear's weight and bias.
    assert gradients <= 4 * (32782 * 1024 + 4096 * 1024 + 4096 + 1024) + 512
    plain_peak, plain_gradients = planned(AdamW, fused=False)
    assert plain_gradients > 6 * gradients and plain_peak > 2 * peak


# -- what is not finite ------------------------------------------------------------------------------------------------
def spoiled(model: GPTModel, name: str, value: float) -> None:
    """From now on the gradient of a parameter gets this value before it is reported as complete."""
    parameter = model.named_parameters()[name]
    report = parameter.gradient_written

    def written() -> None:
        assert parameter.grad is not None
        model.engine.upload(parameter.grad, np.full(parameter.shape, value))
        report()

    parameter.gradient_written = written  # type: ignore[method-assign]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_that_is_not_finite_changes_nothing(engine: ComputeEngine, optimizer: type) -> None:
    for config in (TIED, UNTIED):
        model = GPTModel(engine, config, seed=1)
        chosen = optimizer(model)
        step = TrainingStep(model, chosen, fused_update=True)
        step([batch(0)], step=0, learning_rate=1e-2)
        weight = model.named_parameters()["blocks.1.feed_forward.up.weight"].data
        engine.upload(weight, np.full(weight.shape, np.nan))
        before = model.state_dict() | chosen.state_dict()
        result = step([batch(1)], step=1, learning_rate=1e-2)
        assert (result.updated, result.non_finite) == (False, "loss")
        for name, value in (model.state_dict() | chosen.state_dict()).items():
            assert np.array_equal(value, before[name], equal_nan=True), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_is_not_applied_and_named(engine: ComputeEngine, optimizer: type) -> None:
    model = GPTModel(engine, UNTIED, seed=1)
    chosen = optimizer(model)
    step = TrainingStep(model, chosen, fused_update=True)
    bad = ("blocks.1.attention.out.weight", "head")
    for name in bad:
        spoiled(model, name, np.inf)
    before = model.state_dict()
    result = step([batch(0)], step=0, learning_rate=1e-2)
    assert (result.updated, result.finite, result.non_finite) == (True, False, bad[0])
    for name, value in model.state_dict().items():
        assert np.array_equal(value, before[name]) == (name in bad), name
    for name, value in chosen.state_dict().items():
        assert np.all(np.isfinite(value)) and (not name.endswith(bad) or not value.any()), name


def test_a_finite_gradient_whose_norm_is_not_is_called_so(engine: ComputeEngine) -> None:
    model = GPTModel(engine, UNTIED, seed=1)
    step = TrainingStep(model, AdamW(model), fused_update=True)
    spoiled(model, "head", 1e25)
    result = step([batch(0)], step=0, learning_rate=1e-2)
    assert (result.updated, result.grad_norm) == (True, np.inf)
    assert result.non_finite == "gradient norm overflows: head"


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_refuses(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, UNTIED)
    optimizer = AdamW(model)
    with pytest.raises(BadInputError, match="cannot clip to the global norm 1: the norm is known only when all"):
        TrainingStep(model, optimizer, max_norm=1.0, fused_update=True)
    with pytest.raises(BadInputError, match="keep_gradients"):
        TrainingStep(model, optimizer, keep_gradients=True, fused_update=True)
    with pytest.raises(BadInputError, match="cannot accumulate 2 micro-batches"):
        TrainingStep(model, optimizer, fused_update=True)([batch(0), batch(1)], step=0, learning_rate=1e-2)


def test_a_contribution_after_the_update_is_an_error(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, TIED)
    model.head.num_uses = 1  # wrong: the head and the embedding both contribute
    with pytest.raises(RuntimeError, match=r"embedding\.weight: a gradient came after its update"):
        TrainingStep(model, AdamW(model), fused_update=True)([batch(0)], step=0, learning_rate=1e-2)
    assert all(p.on_complete is None for p in model.parameters())


def test_a_gradient_nobody_reported_is_applied_at_the_end(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, UNTIED, seed=1)
    model.final_norm.weight.num_uses = 2  # wrong the other way: never complete
    expected = trained(cpu, UNTIED, AdamW, fused=False)[1]
    optimizer = AdamW(model, weight_decay=0.1)
    model.head_loss.chunk_bytes = 4096
    step = TrainingStep(model, optimizer, seed=3, fused_update=True)
    for i in range(3):
        step([batch(i)], step=i, learning_rate=1e-2)
    assert np.array_equal(model.state_dict()["final_norm.weight"], expected["final_norm.weight"])


def test_no_gradient_at_all(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, UNTIED)
    with FusedUpdate(AdamW(model)) as fused, pytest.raises(ValueError, match="run backward first"):
        fused.finish()


# -- text_train --------------------------------------------------------------------------------------------------------
TEXT = "".join(f"{n} green bottles hanging on the wall\n" for n in range(40)).encode()
RUN = ["--seq-len", "16", "--d-model", "16", "--num-heads", "4", "--num-layers", "2", "--batch-size", "4"]
RUN += ["--lr", "0.01", "--optimizer", "adafactor", "--max-norm", "0", "--dropout", "0.1", "--held-out", "0.1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def train(*argv: object) -> int:
    return text_train.main([str(word) for word in argv])


def saved(root: Path) -> dict[str, np.ndarray]:
    save = open_save(root)
    return save.model() | {f"optimizer {name}": array for name, array in save.optimizer().items()}


@pytest.mark.parametrize("engine_name", ["cpu", "vulkan"])
def test_save_and_resume_with_and_without(text: Path, tmp_path: Path, engine_name: str) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = [*RUN, "--engine", engine_name]
    assert train(text, *options, "--max-steps", 8, "--save", straight) == 0
    assert train(text, *options, "--max-steps", 3, "--schedule-steps", 8, "--fused-update", "--save", parts) == 0
    assert train("--resume", parts, "--max-steps", 5, "--no-fused-update") == 0
    assert train("--resume", parts, "--max-steps", 8, "--fused-update", "--checkpoint-every", 1) == 0
    expected, got = saved(straight), saved(parts)
    assert "optimizer row_mean_sq.embedding.weight" in expected
    assert sorted(expected) == sorted(got)
    for name, value in expected.items():
        assert np.array_equal(got[name], value), name


def test_options_that_do_not_go_together(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(text, *RUN, "--fused-update", "--max-norm", 1) == 2
    assert "--fused-update cannot clip to the global norm (--max-norm 1)" in capsys.readouterr().err
    assert train(text, *RUN, "--fused-update", "--accum-steps", 2) == 2
    assert "--fused-update cannot accumulate (--accum-steps 2)" in capsys.readouterr().err


def test_a_partly_updated_state_is_not_saved(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_init = training_run.TrainingRun.__init__

    def spoil(self: training_run.TrainingRun, *args: object, **settings: object) -> None:
        run_init(self, *args, **settings)  # type: ignore[arg-type]
        spoiled(self.model, "blocks.0.attention.qkv.weight", np.nan)

    root = tmp_path / "run"
    assert train(text, *RUN, "--engine", "cpu", "--max-steps", 2, "--fused-update", "--save", root) == 0
    monkeypatch.setattr(training_run.TrainingRun, "__init__", spoil)
    assert train("--resume", root, "--max-steps", 4) != 0
    shown = capsys.readouterr().err
    assert "gradient of blocks.0.attention.qkv.weight is not finite" in shown
    assert "resume from the last save" in shown
    assert open_save(root).step == 2
    assert [folder.name for folder in root.glob("step-*")] == [open_save(root).folder.name]
