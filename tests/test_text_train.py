"""Whole training runs: resumed to the same bits, stopped, killed, alike on both engines."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_run import edit_arrays

from vkfold.nn.training_step import TrainingStep
from vkfold.tools import text_generate, text_train
from vkfold.tools.saves import open_save

# Windows of 16 tokens, 60 of them: 40 steps of 2 x 2 windows end in the middle of the third epoch.
TEXT = "".join(f"{n} bottles of milk on the wall, {n} bottles of milk.\n" for n in range(22)).encode()[:1080]
SIZES = ["--seq-len", "16", "--d-model", "16", "--num-heads", "4", "--num-kv-heads", "2", "--num-layers", "2"]
STEPS = ["--batch-size", "2", "--accum-steps", "2", "--lr", "0.01", "--warmup-steps", "4", "--min-lr", "0.001"]
RUN = [*SIZES, *STEPS, "--dropout", "0.1", "--seed", "7", "--held-out", "0.1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def train(*argv: str | Path) -> None:
    assert text_train.main([str(word) for word in argv]) == 0


def log_of(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "log.jsonl").read_text().splitlines()]


def losses(root: Path) -> list[float]:
    """Losses of all steps, which must be numbered from 1 without a gap."""
    lines = [line for line in log_of(root) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def hashes(root: Path) -> dict[str, str]:
    """A hash of each weight and moment of the latest save."""
    save = open_save(root)
    arrays = save.model() | {f"optimizer {name}": array for name, array in save.optimizer().items()}
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}


# -- the same bits ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["cpu", "vulkan"])
def test_forty_steps_straight_or_in_parts(text: Path, tmp_path: Path, engine: str) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = [*RUN, "--engine", engine]
    train(text, *options, "--max-steps", "40", "--save", straight)
    assert open_save(straight).state["epoch"] >= 1

    train(text, *options, "--max-steps", "17", "--schedule-steps", "40", "--save", parts)
    assert 0 < open_save(parts).state["index"] < open_save(parts).state["num_windows"]
    train("--resume", parts, "--max-steps", "40")
    assert losses(parts) == losses(straight)
    assert hashes(parts) == hashes(straight)
    assert [line for line in log_of(parts) if "held_out_loss" in line][-1] == [
        line for line in log_of(straight) if "held_out_loss" in line
    ][-1]


@pytest.mark.deviceless
def test_one_step_at_a_time(text: Path, tmp_path: Path) -> None:
    straight, single = tmp_path / "straight", tmp_path / "single"
    train(text, *RUN, "--engine", "cpu", "--max-steps", "12", "--save", straight)
    train(text, *RUN, "--engine", "cpu", "--max-steps", "1", "--schedule-steps", "12", "--save", single)
    for step in range(2, 13):
        train(text, "--save", single, "--resume", "--max-steps", step, "--keep", "2")
    assert losses(single) == losses(straight)
    assert hashes(single) == hashes(straight)
    assert len(list(single.glob("step-*"))) == 2


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 8 steps in straight/ and the first 3 of it in parts/."""
    root = tmp_path_factory.mktemp("eight_steps")
    (root / "text.txt").write_bytes(TEXT)
    options = [root / "text.txt", *RUN, "--engine", "vulkan"]
    train(*options, "--max-steps", "8", "--save", root / "straight")
    train(*options, "--max-steps", "3", "--schedule-steps", "8", "--save", root / "parts")
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["--checkpoint-every", "1"],
        ["--recompute", "mlp,qkv"],
        ["--flush-interval", "1"],
        ["--activation-offload"],
        ["--activation-offload", "--checkpoint-every", "2", "--recompute", "qkv", "--recompute-blocks", "1"],
        ["--memory-budget", "800kB"],
    ],
)
def test_resumed_under_another_memory_mode(eight_steps: Path, tmp_path: Path, options: list[str]) -> None:
    straight, parts = eight_steps / "straight", tmp_path / "parts"
    shutil.copytree(eight_steps / "parts", parts)
    assert open_save(parts).step == 3
    train("--resume", parts, "--max-steps", "8", *options)
    assert losses(parts) == losses(straight)
    assert hashes(parts) == hashes(straight)


@pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
@pytest.mark.parametrize("engine", ["cpu", "vulkan"])
def test_killed_at_a_random_moment_and_resumed(text: Path, tmp_path: Path, engine: str) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    argv = [str(text), *RUN, "--engine", engine, "--max-steps", "40", "--save-interval", "3"]
    train(*argv, "--save", straight)
    program = "import sys; from vkfold.tools.text_train import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", program, *argv, "--save", str(killed)], stdout=subprocess.DEVNULL)
    wait_for(lambda: bool(list(killed.glob("step-*"))), process)
    time.sleep(float.fromhex("0x1p-33") * int.from_bytes(os.urandom(4), "big"))  # up to half a second
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert open_save(killed).step % 3 == 0 or open_save(killed).step == 40
    train("--resume", killed)
    assert losses(killed) == losses(straight)
    assert hashes(killed) == hashes(straight)


def wait_for(condition: Any, process: subprocess.Popen[Any]) -> None:
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.05)
    pytest.fail("nothing happened within a minute")


# -- stopping --------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_exit_cleanly(text: Path, tmp_path: Path, number: int) -> None:
    root = tmp_path / "run"
    argv = [str(text), *RUN, "--engine", "cpu", "--max-steps", "100000", "--save", str(root)]
    program = "import sys; from vkfold.tools.text_train import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (root / "log.jsonl").exists() and len((root / "log.jsonl").read_text()) > 0, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"stopped by {signal.Signals(number).name} after step" in out
    assert f"text_train --resume {root}" in out
    save = open_save(root)
    assert save.step == len(losses(root)) > 0
    train("--resume", root, "--max-steps", save.step + 1)


def test_a_loss_that_is_not_finite_stops_before_the_update(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    train(text, *RUN, "--engine", "cpu", "--max-steps", "2", "--schedule-steps", "9", "--save", root)
    save = open_save(root)
    before = hashes(root)
    path = save.folder / "model.safetensors"
    from safetensors.numpy import load_file

    weights = load_file(path)
    name = next(name for name in weights if "feed_forward" in name and weights[name].ndim == 2)
    weights[name][0, 0] = np.nan
    edit_arrays(path, weights)
    assert text_train.main(["--resume", str(root), "--max-steps", "9"]) == 1
    shown = capsys.readouterr().err
    assert "step 3: the loss is not finite" in shown
    assert "the weights were not updated" in shown
    assert open_save(root).step == 2
    assert open_save(root).state["index"] == save.state["index"]
    assert {n: h for n, h in hashes(root).items() if n != name} == {n: h for n, h in before.items() if n != name}


def test_a_gradient_that_is_not_finite_names_its_tensor(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = TrainingStep.__call__

    def poisoned(self: TrainingStep, micro_batches: Any, *, step: int, learning_rate: float, **others: Any) -> Any:
        parameter = self.model.named_parameters()["blocks.1.norm1.weight"]
        gradient = parameter.gradient

        def infinite() -> Any:
            out, _ = gradient()
            self.model.engine.fill_(out, float("inf"))
            return out, True

        if step == 1:
            parameter.gradient = infinite  # type: ignore[method-assign]
        return call(self, micro_batches, step=step, learning_rate=learning_rate)

    monkeypatch.setattr(TrainingStep, "__call__", poisoned)
    assert text_train.main([str(text), *RUN, "--engine", "cpu", "--max-steps", "9"]) == 1
    assert "step 2: the gradient of blocks.1.norm1.weight is not finite" in capsys.readouterr().err


# -- what a run writes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["cpu", "vulkan"])
def test_log_lines(text: Path, tmp_path: Path, engine: str) -> None:
    root = tmp_path / "run"
    train(text, *RUN, "--engine", engine, "--max-steps", "12", "--save", root, "--eval-interval", "5")
    lines = log_of(root)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [5, 10, 12]
    expected = [0.25, 0.5, 0.75, 1, 1, 0.955436, 0.83057, 0.650134, 0.449866, 0.26943, 0.144564, 0.1]
    assert [line["learning_rate"] for line in steps] == pytest.approx([0.01 * rate for rate in expected], abs=1e-8)
    for line in steps:
        assert set(line) >= {"step", "loss", "learning_rate", "grad_norm", "time", "tokens_per_s", "pool_stats"}
        assert set(line["pool_stats"]) == {"forward", "backward", "optimizer"}
        assert line["staging_bytes"] <= 20 * 2**20 and (line["staging_bytes"] > 0) == (engine == "vulkan")
        assert line["driver_memory"]["source"] in ("process memory", "VK_EXT_memory_budget")
        assert line["driver_memory"]["used_bytes"] > line["pool_stats"]["optimizer"].get("parameter", {}).get(
            "live_bytes", 0
        )
        for pools in line["pool_stats"].values():
            for stats in pools.values():
                names = " ".join(stats)
                for word in (
                    ("blocks", "peak")
                    if engine == "cpu"
                    else (
                        "blocks",
                        "allocated",
                        "free",
                        "largest_hole",
                        "fragmentation",
                        "peak",
                    )
                ):
                    assert word in names
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_memory_budget_is_kept_to(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run says what was chosen, stays within the budget, and ends with the bits of a run without one."""
    argv = [*RUN, "--max-steps", "5", "--save"]
    train(text, *argv, tmp_path / "plain")

    def peak(root: Path) -> int:
        pools = log_of(root)[1]["pool_stats"]["optimizer"]
        return sum(stats["peak_live_bytes"] for stats in pools.values())

    budget = peak(tmp_path / "plain") * 9 // 10
    train(text, "--memory-budget", budget, *argv, tmp_path / "budget")
    assert re.search(f"--memory-budget {budget} asks for: --(recompute|checkpoint)", capsys.readouterr().out)
    assert peak(tmp_path / "budget") <= budget
    assert hashes(tmp_path / "budget") == hashes(tmp_path / "plain")
    assert text_train.main([str(text), *RUN, "--memory-budget", "10kB"]) == 2
    assert "the smallest peak that can be reached is" in capsys.readouterr().err


def test_memory_timeline(text: Path, tmp_path: Path) -> None:
    train(text, *RUN, "--max-steps", "5", "--save", tmp_path / "plain")
    train(
        *(text, *RUN, "--max-steps", "5", "--checkpoint-every", "1", "--activation-offload", "--save"),
        *(tmp_path / "run", "--memory-timeline", tmp_path / "pictures" / "memory.png"),
    )
    assert hashes(tmp_path / "run") == hashes(tmp_path / "plain")  # being watched changes nothing
    assert (tmp_path / "pictures" / "memory.png").read_bytes().startswith(b"\x89PNG")
    shown = json.loads((tmp_path / "pictures" / "memory.json").read_text())
    pools = log_of(tmp_path / "run")[0]["pool_stats"]
    assert shown["peak_bytes"] == sum(
        stats["peak_live_bytes"] for name, stats in pools["optimizer"].items() if name != "host"
    )
    assert shown["host_peak_bytes"] == pools["optimizer"]["host"]["peak_live_bytes"] > 0
    assert sum(shown["peak_by_kind"].values()) == shown["peak_bytes"]
    ops, kinds = shown["ops"], shown["live_bytes_by_kind"]
    assert [phase for phase, _ in itertools.groupby(op["phase"] for op in ops)] == [
        *("forward", "backward", "forward", "backward", "optimizer")
    ]
    assert set(kinds) >= {"parameters", "optimizer states", "gradients", "saved activations", "temporaries"}
    for i, op in enumerate(ops):
        assert op["live_bytes"] == sum(values[i] for values in kinds.values())
    assert max(op["live_bytes"] for op in ops) <= shown["peak_bytes"]


@pytest.mark.deviceless
def test_progress_held_out_loss_and_sample(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(
        text,
        *RUN,
        "--engine",
        "cpu",
        "--epochs",
        "1",
        "--save",
        tmp_path / "run",
        "--sample",
        "20",
        "--log-interval",
        "5",
    )
    shown = capsys.readouterr().out
    num_steps = -(-len(range(0, 972 - 16, 16)) // 4)
    assert f"step 5/{num_steps}  loss " in shown
    assert "tokens/s  ETA 0:00:" in shown
    assert any(line.startswith("held-out loss ") and line.endswith(" nats/byte") for line in shown.splitlines())
    assert "sample of 20 tokens" in shown
    assert f"text_train --resume {tmp_path / 'run'}" in shown
    assert text_generate.main([str(tmp_path / "run"), "--engine", "cpu", "--length", "30", "--top-k", "5"]) == 0
    first = capsys.readouterr().out
    assert text_generate.main([str(tmp_path / "run"), "--engine", "cpu", "--length", "30", "--top-k", "5"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.deviceless
def test_bpe_run_resumes_with_its_tokenizer(text: Path, tmp_path: Path) -> None:
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = [*SIZES, *STEPS, "--engine", "cpu", "--tokenizer", "bpe", "--vocab-size", "280", "--tie-head"]
    train(text, *options, "--max-steps", "6", "--save", straight)
    train(text, *options, "--max-steps", "2", "--schedule-steps", "6", "--save", parts)
    train(text, "--resume", parts, "--max-steps", "6", "--save", tmp_path / "elsewhere")
    assert hashes(tmp_path / "elsewhere") == hashes(straight)
    train("--resume", tmp_path / "elsewhere", "--max-steps", "7")
    assert open_save(straight).state["tokenizer_kind"] == "bpe"


def test_tied_head_is_one_tensor(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One tensor in the file, one optimizer slot; two different tensors are an error."""
    from safetensors.numpy import load_file

    root = tmp_path / "run"
    train(text, *RUN, "--engine", "cpu", "--max-steps", "1", "--schedule-steps", "9", "--tie-head", "--save", root)
    save = open_save(root)
    assert "head" not in save.model()
    assert not [name for name in save.optimizer() if name.endswith(".head")]
    path = save.folder / "model.safetensors"
    weights = load_file(path)
    edit_arrays(path, weights | {"head": weights["embedding.weight"]})
    train("--resume", root, "--max-steps", "2", "--save", tmp_path / "same")
    edit_arrays(path, weights | {"head": weights["embedding.weight"] + 1})
    assert text_train.main(["--resume", str(save.folder), "--max-steps", "2", "--save", str(tmp_path / "other")]) == 2
    assert "two different tensors" in capsys.readouterr().err


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TEXT)))
    options = ["--tokenizer", "bpe", "--vocab-size", "270", "--engine", "cpu", "--save", tmp_path / "run"]
    train("-", *SIZES, *options, "--max-steps", "1")
    train("--resume", tmp_path / "run", "--max-steps", "2")  # the text is not needed again


# -- engines ---------------------------------------------------------------------------------------------------------
def test_both_engines_give_the_same_curve(text: Path, tmp_path: Path) -> None:
    for engine in ("cpu", "vulkan"):
        train(text, *RUN, "--engine", engine, "--max-steps", "15", "--save", tmp_path / engine)
    assert np.allclose(losses(tmp_path / "cpu"), losses(tmp_path / "vulkan"), rtol=0, atol=1e-4)
