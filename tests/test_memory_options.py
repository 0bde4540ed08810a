"""memory_estimator and its kin: what is refused, what is advised, and what tables and pictures show."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.table import Table

from vkfold.engine.allocation_ledger import RECOMPUTED
from vkfold.engine.errors import BadInputError
from vkfold.nn import GPTConfig
from vkfold.tools import gpu_profile, text_train
from vkfold.tools.console import FILE_WIDTH, TableConsole
from vkfold.tools.inference_plan import plan_inference
from vkfold.tools.memory_estimator import main
from vkfold.tools.memory_plan import TrainingPlan, plan_training
from vkfold.tools.memory_plot import timeline_figure, unit_of
from vkfold.tools.model_setup import gpt_config
from vkfold.tools.run_config import FREE_ON_RESUME, RunConfig, resumed_config
from vkfold.tools.several_cards import plan_card
from vkfold.tools.size_check import check_budget, planned_peak_bytes

SMALL = ["--d-model", "32", "--num-heads", "2", "--num-layers", "2", "--seq-len", "16", "--batch-size", "2"]
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
VOCAB = 64
# Activations are nearly all, so that a smaller batch helps.
LONG = RunConfig(d_model=32, num_heads=2, num_layers=2, seq_len=64, batch_size=12)


# -- refused -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--inference", "--plot", "x.png"], "--plot x.png"),
        (["--inference", "--ops"], "--ops:"),
        (["--inference", "--saved"], "--saved:"),
        (["--inference", "--attribution"], "--attribution:"),
        (["--inference", "--cards", "2"], "--cards 2:"),
        (["--inference", "--zero-stage", "1"], "--zero-stage 1:"),
        (["--inference", "--memory-budget", "4GB"], "--memory-budget 4GB:"),
        (["--inference", "--checkpoint-every", "1"], "--checkpoint-every 1:"),
        (["--inference", "--activation-offload"], "--activation-offload:"),
        (["--dtype", "float16"], "--dtype float16:"),
        (["--card-gb", "24"], "--card-gb 24.0:"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    shown = capsys.readouterr()
    assert named in shown.err and "no effect with" in shown.err and not shown.out


def test_options_at_their_defaults_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--inference", "--cards", "1", "--no-ops", "--dtype", "int8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "int8"
    assert main([*SMALL, "--dtype", "float32", "--json"]) == 0


def test_generation_too_large_for_an_engine_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--inference", "--preset", "gpt-236m", "--seq-len", "130049"]) == 2
    assert "these sizes are too large" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.svg", "x", "x.pdf", "png"])
def test_a_picture_of_another_format_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--plot", str(tmp_path / name)]) == 2
    shown = capsys.readouterr()
    assert "must end in .png" in shown.err and not shown.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["", "/", ".", "..", "folder/.."])
def test_a_timeline_without_a_name_is_refused(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to train on " * 100)
    assert text_train.main([str(text), *SMALL, "--max-steps", "1", f"--memory-timeline={path}"]) == 2
    assert f"--memory-timeline {path!r} names no file" in capsys.readouterr().err


def test_a_timeline_over_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to train on " * 100)
    for ending in ("json", "png"):
        (tmp_path / ending / f"memory.{ending}").mkdir(parents=True)
        argv = [str(text), *SMALL, "--max-steps", "1", "--memory-timeline", str(tmp_path / ending / "memory.png")]
        assert text_train.main(argv) == 2
        assert f"memory.{ending} is a folder" in capsys.readouterr().err


def test_the_profile_keeps_to_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[RunConfig] = []

    def stop(engine: object, config: RunConfig, vocab_size: int) -> None:
        seen.append(config)
        raise BadInputError("far enough")

    monkeypatch.setattr(gpu_profile, "profile_steps", stop)
    options = [*SMALL, "--seq-len", "64", "--batch-size", "8"]
    plain = planned_peak_bytes(gpu_profile.profile_config(options)[0], 256)
    assert gpu_profile.main([*options, "--memory-budget", str(plain - 1), "--out", str(tmp_path)]) == 2
    assert "--memory-budget asks for: --" in capsys.readouterr().err
    assert planned_peak_bytes(seen[0], 256) < plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seq-len", "130049"], "these sizes are too large|more than an engine can address"),
        (["--d-model", "65536", "--num-heads", "512", "--d-ff", "65536"], "the weights and moments alone take"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_profile.main([*options, "--num-layers", "1", "--out", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_card_that_holds_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--inference", "--card-gb", "1e-12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_batch"] == 0


def reference_step(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "reference_step.py"), *SMALL, "--vocab-size", "301", "--d-ff", "96"]
    return subprocess.run([*command, *options], capture_output=True, text=True)


def test_the_reference_step_keeps_to_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    sizes = ["--batch-size", "4", "--seq-len", "64"]
    plain = json.loads(reference_step("--json", *sizes).stdout)["planned"]["peak_bytes"]
    done = reference_step("--json", *sizes, "--memory-budget", str(plain - 1))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["measured"]["peak_bytes"] == told["planned"]["peak_bytes"] < plain
    assert told["memory_budget"]["mode"].startswith("--")
    refused = reference_step("--attribution")
    assert refused.returncode == 2 and "--attribution" in refused.stderr


def test_a_resumed_run_keeps_its_loss_chunks() -> None:
    """Other chunks are other sums, so other bits."""
    assert "loss_chunk_bytes" not in FREE_ON_RESUME
    saved = dataclasses.asdict(RunConfig(inputs=["x.txt"]))
    config = RunConfig(resume="run", loss_chunk_bytes=1234)
    with pytest.raises(BadInputError, match="cannot resume with --loss-chunk-bytes 1234"):
        resumed_config(config, {"loss_chunk_bytes", "resume"}, saved)


# -- advice ------------------------------------------------------------------------------------------------------------
def advice(config: RunConfig, budget: int) -> str:
    with pytest.raises(BadInputError) as raised:
        check_budget(config, VOCAB, budget)
    return str(raised.value).split(": ", 1)[1]


def changed(config: RunConfig, text: str) -> RunConfig:
    """The config with the options of an advice."""
    values = {name.replace("-", "_"): int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", text)}
    return dataclasses.replace(config, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch_size", [12, 11, 9])
@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize("percent", [60, 75, 90, 99])
def test_advice_fits_and_keeps_the_tokens_it_promises(batch_size: int, accum_steps: int, percent: int) -> None:
    config = dataclasses.replace(LONG, batch_size=batch_size, accum_steps=accum_steps)
    budget = planned_peak_bytes(config, VOCAB) * percent // 100
    first, _, same = advice(config, budget).partition("; for the same tokens a step ")
    proposed = changed(config, first)
    assert proposed != config
    assert planned_peak_bytes(proposed, VOCAB) <= budget
    if proposed.batch_size < batch_size:  # the largest that fits
        larger = dataclasses.replace(proposed, batch_size=proposed.batch_size + 1)
        assert planned_peak_bytes(larger, VOCAB) > budget
    if same:
        kept = changed(config, same)
        assert kept.batch_size * kept.accum_steps == batch_size * accum_steps
        assert planned_peak_bytes(kept, VOCAB) <= budget


def test_advice_names_the_steps_to_accumulate() -> None:
    config = dataclasses.replace(LONG, accum_steps=3)
    budget = planned_peak_bytes(dataclasses.replace(config, batch_size=4), VOCAB)
    assert (
        advice(config, budget) == "--batch-size 4 would fit; for the same tokens a step --batch-size 4 --accum-steps 9"
    )


def test_no_accumulation_is_advised_with_fused_updates() -> None:
    config = dataclasses.replace(LONG, fused_update=True, max_norm=0.0)
    budget = planned_peak_bytes(dataclasses.replace(config, batch_size=4), VOCAB)
    assert advice(config, budget) == "--batch-size 4 would fit"


def test_advice_to_a_run_with_a_memory_budget_is_a_smaller_one() -> None:
    """--checkpoint-every is refused together with it."""
    budget = planned_peak_bytes(LONG, VOCAB) - 1
    with pytest.raises(BadInputError, match=f": --memory-budget {budget} looks for what fits it$"):
        check_budget(LONG, VOCAB, budget, automatic=True)


def test_the_check_counts_gradients_that_accumulate() -> None:
    """In the second micro-batch all gradients are alive: that is the peak."""
    wide = dataclasses.replace(LONG, d_model=64, batch_size=1, seq_len=16, accum_steps=2)
    one, two = (planned_peak_bytes(dataclasses.replace(wide, accum_steps=n), VOCAB) for n in (1, 2))
    assert one < two == planned_peak_bytes(dataclasses.replace(wide, accum_steps=5), VOCAB)
    assert two == plan_training(wide, VOCAB).peak_bytes
    with pytest.raises(BadInputError, match="of device memory"):
        check_budget(wide, VOCAB, two - 1)
    assert check_budget(wide, VOCAB, two) == two


# -- figures -----------------------------------------------------------------------------------------------------------
def test_the_largest_batch_leaves_room_for_the_prompt() -> None:
    model = GPTConfig(VOCAB, 32, 32, 2, 2)
    plan = plan_inference(model, batch_size=1, seq_len=32)
    assert plan.workspace_bytes > 0
    for count in (1, 7):
        card = plan.weight_bytes + plan.workspace_bytes + count * plan.kv_bytes_per_token * 32
        for nbytes, expected in ((card, count), (card - 1, count - 1)):
            found = plan_inference(model, batch_size=1, seq_len=32, card_bytes=nbytes).largest_batch
            assert found == expected


@pytest.mark.parametrize("recompute", ["norm", "attention", "qkv", "mlp", "norm,attention,qkv,mlp"])
def test_what_is_rebuilt_is_booked_as_recomputed(recompute: str) -> None:
    batch, seq, d = 2, 16, 32
    config = RunConfig(d_model=d, num_heads=2, num_layers=3, d_ff=64, activation="gelu", seq_len=seq, batch_size=batch)
    assert not plan_training(config, VOCAB).bytes_of(RECOMPUTED)
    plan = plan_training(dataclasses.replace(config, recompute=recompute), VOCAB)
    n = batch * seq * 4
    shapes = {
        "norm": {"norm1.0": n, "norm2.0": n},
        "attention": {"attention.o": n * d, "attention.lse": 2 * n},
        "qkv": {"attention.qkv": 3 * n * d},
        "mlp": {"feed_forward.pre": n * 64},
    }
    expected = {
        f"blocks.{i}.{name}": -(-nbytes // 256) * 256
        for i in range(3)
        for group in recompute.split(",")
        for name, nbytes in shapes[group].items()
    }
    found = {a.label: a.nbytes for a in plan.ledger.allocations if a.kind == RECOMPUTED}
    assert found == expected


def test_segments_label_what_they_rebuild() -> None:
    plan = plan_training(dataclasses.replace(LONG, checkpoint_every=1), VOCAB)
    names = {a.label for a in plan.ledger.allocations if a.kind == RECOMPUTED}
    assert names >= {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attention.qkv", "mid", "feed_forward.pre")}


def test_tensor_parallel_keeps_the_residual_stream_whole() -> None:
    """By hand: of what a block keeps, x, mid and the norms' scalars are whole, and all the rest is spread."""
    few, many = (plan_training(dataclasses.replace(LONG, num_layers=n), VOCAB) for n in (2, 6))

    def of_a_layer(tensor_parallel: int) -> float:
        """Bytes at the peak that a layer more costs, without its weights and moments (gradients come later)."""
        more = []
        for plan in (few, many):
            card = plan_card(plan, tensor_parallel=tensor_parallel)
            more.append(card.peak_bytes - card.parameter_bytes - card.optimizer_bytes)
        return (more[1] - more[0]) / 4

    n, d, f = 12 * 64, 32, gpt_config(LONG, VOCAB).d_ff
    whole = 4 * (2 * n * d + 2 * n)
    spread = 4 * (3 * n * d + n * d + 2 * n + 2 * n * f)
    assert of_a_layer(1) == whole + spread
    assert of_a_layer(2) == whole + spread / 2


def test_json_names_the_chosen_mode(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [*SMALL, "--batch-size", "8", "--seq-len", "64"]
    assert main([*sizes, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "memory_budget" not in plain
    assert main([*sizes, "--memory-budget", str(plain["peak_bytes"] - 1), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    chosen = told["memory_budget"]
    assert chosen["peak_bytes"] == told["peak_bytes"] < plain["peak_bytes"]
    options = [f"--checkpoint-every={chosen['checkpoint_every']}", f"--recompute={','.join(chosen['recompute'])}"]
    options += [] if chosen["recompute_blocks"] is None else [f"--recompute-blocks={chosen['recompute_blocks']}"]
    assert chosen["mode"].startswith(("--recompute", "--checkpoint-every"))
    assert main([*sizes, *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == told["peak_bytes"]


def test_attribution_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    left_out = ["norm outputs rebuilt", "activation outputs rebuilt", "no score matrix"]
    for offload in ([], ["--activation-offload"]):
        assert main([*SMALL, "--attribution", "--json", *offload]) == 0
        told = json.loads(capsys.readouterr().out)
        assert list(told["attribution_left_out"]) == (left_out if offload else [])
        assert [row["saving"] in left_out for row in told["attribution"]].count(True) == (0 if offload else 3)
    assert main([*SMALL, "--attribution", "--activation-offload"]) == 0
    assert "Left out with --activation-offload: norm outputs rebuilt" in capsys.readouterr().out


# -- tables and pictures -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("option", ["--attribution", "--saved", "--ops"])
def test_tables_in_a_pipe_cut_nothing(option: str) -> None:
    command = [sys.executable, "-m", "vkfold.tools.memory_estimator", "--preset", "gpt-236m", option]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert not [line for line in lines if "…" in line]
    assert 80 < max(map(len, lines)) <= FILE_WIDTH or option != "--attribution"


def printed(table: Table, width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    console = TableConsole()
    assert console.width == FILE_WIDTH
    console.width = width
    console.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    return lines


def test_numbers_stay_whole_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("saving")
    for heading in ("peak", "end of forward", "reserved", "FLOPs it costs", "of all"):
        table.add_column(heading, justify="right")
    numbers = ["1,610,612,736", "1,610,612,737", "1,560,281,088", "9,614,595,299,328", "0.0%"]
    table.add_row("activation outputs rebuilt", *numbers)
    lines = printed(table, 80, capsys)
    assert lines[1].split() == ["activation", *numbers]
    assert [line.strip() for line in lines[2:]] == ["outputs", "rebuilt"]


@pytest.mark.parametrize("justify", ["left", "right"])
@pytest.mark.parametrize("text", ["blocks.0.feed_forward.pre", "1,234,567,890,123"])
def test_what_is_too_narrow_folds(justify: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    table.add_column("it", justify=justify)
    table.add_column("more", justify=justify)
    table.add_row(text, "")
    assert "".join(line.strip() for line in printed(table, 12, capsys)[1:]) == text


def small_plan() -> TrainingPlan:
    return plan_training(LONG, VOCAB)


def test_the_picture_marks_the_peak_and_shades_the_phases() -> None:
    plan = small_plan()
    ledger = plan.ledger
    figure = timeline_figure(ledger, "title")
    axes = figure.axes[0]
    records = [record for record in ledger.ops if record.phase]
    (mark,) = axes.lines
    at = int(mark.get_xdata()[0])
    assert 0 < at < len(records) - 1
    assert records[at] is ledger.ops[ledger.peak_op_number]
    unit, scale = unit_of(ledger.peak_bytes)
    assert unit == "MB" and mark.get_ydata()[0] * scale == pytest.approx(plan.peak_bytes)
    assert axes.get_ylabel() == "live MB"
    texts = [text.get_text() for text in axes.texts]
    assert f"{plan.peak_bytes / 1e6:.2f} MB in {ledger.peak_op}" in texts
    spans = {tuple(np.round(patch.get_facecolor(), 3)) for patch in axes.patches}
    assert len(axes.patches) == len(spans) == 3  # forward, backward, optimizer
    assert [text for text in texts if text in ("forward", "backward", "optimizer")] == [
        *("forward", "backward", "optimizer")
    ]


@pytest.mark.parametrize(
    ("nbytes", "unit"), [(5e9, "GB"), (1e9, "GB"), (999e6, "MB"), (5e3, "KB"), (900, "B"), (0, "B")]
)
def test_units_of_pictures(nbytes: Any, unit: str) -> None:
    assert unit_of(int(nbytes))[0] == unit
