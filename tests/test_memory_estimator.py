"""memory_estimator: presets, figures that circulate wrongly elsewhere, output, and bad input."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from vkfold.engine.allocation_ledger import KINDS, AllocationLedger
from vkfold.engine.plan_engine import PlanEngine
from vkfold.nn import GPTConfig
from vkfold.tools.inference_plan import kv_bytes_per_token, plan_inference
from vkfold.tools.memory_estimator import main
from vkfold.tools.memory_plan import TrainingPlan, matmul_parameters, op_rows, plan_training, rule_flops_per_token
from vkfold.tools.presets import PRESETS, preset
from vkfold.tools.run_config import RunConfig
from vkfold.tools.several_cards import plan_card

SMALL = ["--d-model", "32", "--num-heads", "2", "--num-layers", "2", "--seq-len", "16", "--batch-size", "2"]


def model_of(name: str) -> GPTConfig:
    """A preset's model."""
    options = preset(name)
    names = (
        "d_model",
        "num_heads",
        "num_layers",
        "num_kv_heads",
        "d_ff",
        "norm",
        "activation",
        "positions",
        "tie_head",
    )
    settings = {key: options[key] for key in names if key in options}
    return GPTConfig(options["vocab_size"], options["seq_len"], **settings)


def plan_preset(name: str, **changes: Any) -> TrainingPlan:
    """A preset's training step."""
    config = RunConfig(**{**preset(name), **changes})
    return plan_training(config, config.vocab_size)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt-236m", 236_158_976),
        ("small", 124_439_808),  # GPT-2's own counts
        ("medium", 354_823_168),
        ("large", 774_030_080),
        ("xl", 1_557_611_200),
        ("2.7b", 2_648_931_840),
        ("smollm2-135m", 134_515_008),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_parameters_of_presets(name: str, num_parameters: int) -> None:
    assert model_of(name).num_parameters == num_parameters


def test_all_presets_are_counted() -> None:
    assert set(PRESETS) == {
        *("gpt-236m", "small", "medium", "large", "xl", "2.7b", "smollm2-135m"),
        *("llama-2-7b", "llama-3-8b", "llama-3-70b"),
    }


def test_kv_cache_of_llama_3() -> None:
    """Half and a quarter of what circulates, because key/value heads are shared."""
    assert kv_bytes_per_token(model_of("llama-3-8b"), "float16") == 131_072
    assert kv_bytes_per_token(model_of("llama-3-70b"), "float16") == 327_680


def test_zero_3_over_eight_cards() -> None:
    """The ledger's own sum: 16 bytes a parameter."""
    plan = plan_preset("llama-3-8b", seq_len=64)
    card = plan_card(plan, cards=8, zero_stage=3)
    assert card.states_bytes == pytest.approx(16 * 8_030_261_248 / 8, rel=1e-6)
    assert card.states_bytes == pytest.approx(16_060_000_000, rel=1e-4)
    assert card.gathered_bytes == pytest.approx(4 * 128256 * 4096 * 7 / 8, rel=1e-6)


def test_kv_cache_of_a_70b_with_64_heads() -> None:
    """Batch 16, 32K tokens, f16, tensor parallel over 8 cards."""
    model = dataclasses.replace(model_of("llama-3-70b"), num_kv_heads=64, max_seq_len=32 * 1024)
    plan = plan_inference(model, batch_size=16, seq_len=32 * 1024, dtype="float16", tensor_parallel=8)
    assert plan.kv_bytes == 160 * 2**30


def test_zero_stages_spread_what_they_say() -> None:
    plan = plan_preset("small", seq_len=32)
    whole = plan_card(plan)
    assert whole.peak_bytes == plan.peak_bytes
    stages = [plan_card(plan, cards=4, zero_stage=stage) for stage in range(4)]
    assert [card.optimizer_bytes for card in stages] == [whole.optimizer_bytes] + 3 * [whole.optimizer_bytes // 4]
    assert [card.gradient_bytes for card in stages] == 2 * [whole.gradient_bytes] + 2 * [whole.gradient_bytes // 4]
    assert [card.parameter_bytes for card in stages] == 3 * [whole.parameter_bytes] + [whole.parameter_bytes // 4]
    assert whole.peak_bytes == stages[0].peak_bytes > stages[1].peak_bytes > stages[2].peak_bytes


def test_tensor_parallel_spreads_matrices_and_keeps_norms() -> None:
    plan = plan_preset("smollm2-135m", seq_len=64, d_ff=1152)
    model, d = plan.model, 576
    card = plan_card(plan, tensor_parallel=3)
    spread = model.num_parameters - (2 * 30 + 1) * d
    assert card.parameter_bytes == pytest.approx(4 * (spread / 3 + (2 * 30 + 1) * d), rel=1e-5)
    assert plan.peak_bytes / 3 < card.peak_bytes < plan.peak_bytes / 2
    nine = plan_card(plan, tensor_parallel=9)  # 3 key/value heads: each is held by three cards
    doubled = spread / 9 + 30 * d * 2 * 64 * (1 - 1 / 3)
    assert nine.parameter_bytes == pytest.approx(4 * (doubled + (2 * 30 + 1) * d), rel=1e-5)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("options", "peak_gb", "more_flops"),
    [
        ({}, 7.4, 0.0),
        ({"recompute": "mlp"}, 5.9, 8.6),
        ({"recompute": "mlp,qkv"}, 4.8, 15.05),
        ({"activation_offload": True}, 4.8, 0.0),
        ({"checkpoint_every": 1}, 4.5, 19.35),
        ({"checkpoint_every": 1, "optimizer": "adafactor", "fused_update": True, "max_norm": 0.0}, 2.4, 19.35),
    ],
)
def test_figures_of_the_reference_configuration(options: dict[str, Any], peak_gb: float, more_flops: float) -> None:
    plain, plan = plan_preset("gpt-236m"), plan_preset("gpt-236m", **options)
    assert plan.peak_bytes <= peak_gb * 1e9
    more = 100 * (plan.matmul_attention_flops / plain.matmul_attention_flops - 1)
    assert more == pytest.approx(more_flops, abs=0.1)
    attention = plain.matmul_attention_flops - sum(r.cost.flops for r in plain.ledger.ops if r.op == "matmul")
    assert attention == sum(r.cost.flops for r in plain.ledger.ops if r.op.startswith("attention")) > 0
    assert plan.ledger.reserved_at_peak <= 1.05 * plan.peak_bytes
    assert plan.ledger.peak_reserved_bytes <= 1.05 * plan.peak_bytes


def test_flops_rules_and_exact_count() -> None:
    """By hand: P, 6 P and 8 P; and the exact count is 6 P and attention's own, without the part a mask leaves out."""
    plan = plan_preset("gpt-236m")
    parameters = 16 * 12 * 1024**2 + 32782 * 1024
    assert matmul_parameters(plan.model) == parameters
    assert rule_flops_per_token(plan.model, full_recompute=False) == 6 * parameters
    assert rule_flops_per_token(plan.model, full_recompute=True) == 8 * parameters
    matmuls = sum(op.cost.flops for op in plan.ledger.ops if op.op == "matmul")
    assert matmuls == pytest.approx(6 * parameters * plan.num_tokens, rel=2e-3)  # and what adds biases and residuals
    untied = model_of("llama-2-7b")
    assert matmul_parameters(untied) == untied.num_parameters - 32000 * 4096 - (2 * 32 + 1) * 4096


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "gpt-236m", "--batch-size", "6", "--checkpoint-every", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    names = ("peak_bytes", "peak_op", "by_kind", "flops_per_step", "flops_per_token", "num_parameters", "pool")
    assert not [name for name in names if name not in result]
    assert result["num_parameters"] == 236_158_976
    assert sum(result["by_kind"].values()) == result["peak_bytes"]
    assert set(result["by_kind"]) <= set(KINDS)
    assert result["flops_per_token"] == 8 * result["matmul_parameters"]
    assert result["flops_per_token_exact"] * result["tokens_per_step"] == result["flops_per_step"]
    pools = result["pool"]
    together = sum(stats["peak_live_bytes"] for stats in pools.values())
    assert result["peak_bytes"] == together  # the parameter pool is constant during a step
    assert result["pool_overhead_bytes"] == result["reserved_bytes_at_peak"] - result["peak_bytes"]


def test_options_change_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "small", "--num-layers", "1", "--d-ff", "100", "--no-tie-head", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["num_layers"], model["d_ff"], model["tie_head"]) == (1, 100, False)
    assert (model["d_model"], model["vocab_size"], model["norm"]) == (768, 50257, "layernorm")


def test_tables_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    picture = tmp_path / "step.png"
    several = ["--cards", "2", "--zero-stage", "2", "--ops", "--plot", str(picture)]
    assert main([*SMALL, "--checkpoint-every", "1", *several, "input.txt"]) == 0
    out = capsys.readouterr().out
    for words in ("peak of live bytes", "saved activations", "pool overhead", "8 P (full", "ZeRO stage 2", "adamw_"):
        assert words in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_inference(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "llama-3-8b", "--inference", "--dtype", "float16", "--seq-len", "4096", "--card-gb", "24"]
    assert main([*options, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["weight_bytes"] == 2 * 8_030_261_248
    assert plan["kv_bytes"] == 131_072 * 4096
    rest = 24e9 - plan["weight_bytes"] - plan["workspace_bytes"]
    assert plan["largest_batch"] == rest // (131_072 * 4096) > 0
    assert main(options) == 0
    assert "largest batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "llama3-8b"], "did you mean llama-3-8b"),
        (["--preset", "gpt-236m", "--num-heads", "7"], "does not divide"),
        (["--preset", "gpt-236m", "--tensor-parallel", "3"], "--tensor-parallel 3 does not divide --num-heads 16"),
        (["--zero-stage", "4"], "0, 1, 2 or 3"),
        (["--d-modle", "3"], "--d-model"),
        (["--preset", "small", "--plot", "/nonexistent/folder/x.png"], "cannot write the picture"),
        (["--d-model", "65536", "--num-heads", "512", "--d-ff", "65536"], "too large"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


# -- the ledger --------------------------------------------------------------------------------------------------------
def test_saved_tensors_by_layer() -> None:
    plan = plan_preset("gpt-236m")
    hidden = 6 * 1024 * 1024 * 4
    scalars = {f"norm{i}.{j}": 6 * 1024 * 4 for i in (1, 2) for j in (0, 1)}
    for i in range(16):
        assert plan.saved_by_layer()[f"blocks.{i}"] == {
            "x": hidden,
            **scalars,
            "attention.qkv": 3 * hidden,
            "attention.o": hidden,
            "attention.lse": 6 * 16 * 1024 * 4,
            "mid": hidden,
            "feed_forward.pre": 4 * hidden,
        }
    kept = [row for row in op_rows(plan) if row["kept"] and row["op"] == "matmul"]
    assert len(kept) == 16 * 4  # qkv, the mid residual, the pre-activation, the next block's input


def test_ledger_sees_what_the_pool_counts() -> None:
    engine = PlanEngine()
    before = engine.zeros((1000,))
    ledger = AllocationLedger(engine)
    ledger.attach()
    with pytest.raises(ValueError, match="already has"):
        AllocationLedger(engine).attach()
    a = engine.zeros((64,))
    with ledger.making("tables"):
        b = engine.zeros((65,))
    c = engine.add(a, a)
    assert ledger.by_kind() == {"earlier": 4096, "tables": 512, "temporaries": 512}
    assert ledger.peak_bytes == ledger.live_bytes == engine.pools["step"].live_bytes == 5120
    assert ledger.peak_op == "add"
    del before, c
    assert ledger.live_bytes == engine.pools["step"].live_bytes == 768
    assert ledger.curve().max() == 5120 and ledger.curve()[-1] == 768
    assert np.array_equal(sum(ledger.curve(kind=kind) for kind in KINDS), ledger.curve())
    ledger.detach()
    del b
    assert ledger.live_bytes == 768  # nothing is heard any more
    assert engine.ledger is None and a.shape == (64,)
