"""Files that were edited, damaged or never end, and options and switches that are absurd: a message and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_bad_input import SMALL, message_of

from vkfold.__main__ import main as vkfold
from vkfold.engine import switches
from vkfold.engine.errors import BadInputError
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools import demo, memory_estimator, size_check, text_train
from vkfold.tools.options import parse_bytes
from vkfold.tools.run_config import nearest_divisor
from vkfold.tools.saves import lock_save_folder
from vkfold.tools.small_files import read_whole

HUGE = 10**400


# -- state.json --------------------------------------------------------------------------------------------------------
EDITS: list[tuple[str, Any]] = [
    *(("config.recompute", 7), ("config.stride", "a"), ("config.d_ff", [1]), ("config.memory_budget", 5)),
    *(("config.batch_size", 2.5), ("config.seq_len", True), ("config.lr", HUGE), ("config.lr", None)),
    *(("config.num_layers", 10**30), ("config.norm", "batch"), ("config.tie_head", 1)),
    *(("config.inputs", [3]), ("config.seed", 10**40), ("config.recompute", "everything"), ("config.no_such", 1)),
    *(("config.dropout", 1.0), ("config", []), ("config", None), ("config.num_heads", 3)),
    *(("epoch", 10**25), ("num_windows", 10**15), ("seed", 10**40), ("index", -1), ("index", 10**6), ("step", "2")),
    *(("step", HUGE), ("step", 5), ("num_steps", 2.0), ("num_steps", True), ("fingerprint", 3), ("vocab_size", [256])),
    *(("tokenizer_kind", None), ("engine", {}), ("schedule.peak", HUGE), ("schedule.peak", "1"), ("schedule", 3)),
    *(("schedule.warmup_steps", 1.5), ("schedule.total_steps", 10**30), ("schedule.kind", ["cosine"])),
    *(("schedule.floor", -1.0), ("no_such", 1)),
]


def edit(path: Path, name: str, value: object) -> None:
    state = json.loads(path.read_text())
    place, *inner = name.split(".")
    if inner:
        state[place][inner[0]] = value
    else:
        state[place] = value
    path.write_text(json.dumps(state))


@pytest.mark.parametrize("program", ["text_train", "text_generate"])
def test_an_edited_state(capsys: pytest.CaptureFixture[str], saved: Path, no_device: None, program: str) -> None:
    """Each field of a save is checked as an option is, and named; nothing is worked out from a wrong one."""
    path = saved / "step-00000002" / "state.json"
    good = path.read_text()
    for name, value in EDITS:
        path.write_text(good)
        edit(path, name, value)
        shown = message_of(capsys, *(["--resume"] if program == "text_train" else []), saved, program=program)
        assert f"the save {path.parent} is damaged: state.json: " in shown, name
        field = name.split(".")[-1]
        assert field.removeprefix("no_") in shown.replace("-", "_"), shown
        assert len(shown) < 600


@pytest.mark.parametrize("name", ["step", "config", "schedule", "epoch", "fingerprint"])
def test_a_state_without_a_field(capsys: pytest.CaptureFixture[str], saved: Path, no_device: None, name: str) -> None:
    path = saved / "step-00000002" / "state.json"
    state = json.loads(path.read_text())
    del state[name]
    path.write_text(json.dumps(state))
    assert name in message_of(capsys, "--resume", saved)


@pytest.mark.parametrize("contents", ["[" * 100_000, "[]", "3", '"text"', "{}", "\udcff", '{"format": [], "step": 1}'])
def test_a_state_that_is_none(capsys: pytest.CaptureFixture[str], saved: Path, no_device: None, contents: str) -> None:
    (saved / "step-00000002" / "state.json").write_bytes(contents.encode(errors="surrogateescape"))
    message_of(capsys, "--resume", saved)
    message_of(capsys, saved, program="text_generate")


def test_windows_that_the_text_does_not_have(capsys: pytest.CaptureFixture[str], saved: Path, no_device: None) -> None:
    edit(saved / "step-00000002" / "state.json", "num_windows", 2**30)
    assert "num_windows is 1073741824, and the text has" in message_of(capsys, "--resume", saved)


@pytest.mark.parametrize("file", ["model", "optimizer"])
@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.float16, np.bool_])
def test_numbers_of_another_type(
    capsys: pytest.CaptureFixture[str], saved: Path, no_device: None, file: str, dtype: type
) -> None:
    """Bytes that stand for other numbers than were saved."""
    path = saved / "step-00000002" / f"{file}.safetensors"
    arrays = load_file(path)
    for name in {next(iter(arrays)), "num_updates"} & set(arrays):
        save_file(arrays | {name: arrays[name].astype(dtype)}, path)
        assert f"{path} is damaged: {name} is {np.dtype(dtype)}, not " in message_of(capsys, "--resume", saved)


# -- tokens.bin --------------------------------------------------------------------------------------------------------
def test_tokens_of_the_same_size(capsys: pytest.CaptureFixture[str], saved: Path, text: Path, no_device: None) -> None:
    """One bit of one token is enough; the text itself puts it right."""
    path = saved / "tokens.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    shown = message_of(capsys, "--resume", saved)
    assert "tokens.bin holds no complete tokens (their SHA-256 is not the one they were written with)" in shown
    assert "name the input text again" in shown


def test_the_text_again_mends_the_tokens(saved: Path, text: Path) -> None:
    path = saved / "tokens.bin"
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    assert text_train.main(["--resume", str(saved), "--max-steps", "3"]) == 2
    assert text_train.main(["--resume", str(saved), str(text), "--max-steps", "3"]) == 0
    assert path.read_bytes() == good
    assert text_train.main(["--resume", str(saved), "--max-steps", "4"]) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "O"),
        ("dtype", "<f8"),
        ("dtype", [1]),
        ("tokens", 1e308),
        ("tokens", "x"),
        ("bytes", -1),
        ("bytes", HUGE),
    ],
)
def test_edited_description_of_tokens(
    capsys: pytest.CaptureFixture[str], saved: Path, no_device: None, name: str, value: object
) -> None:
    edit(saved / "tokens.json", name, value)
    assert "holds no complete tokens" in message_of(capsys, "--resume", saved)


# -- config files ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "contents", "expected"),
    [
        ("run.json", f'{{"lr": 1{"0" * 400}}}', "lr a number of 1,329 bits is beyond what float32 holds"),
        ("run.toml", f"lr = 1{'0' * 400}", "lr a number of 1,329 bits is beyond what float32 holds"),
        ("run.toml", f"lr = 0x{'f' * 9000}", "lr a number of 36,000 bits is beyond what float32 holds"),
        ("run.toml", f"d_ff = 0x{'f' * 9000}", "--d-ff a number of 36,000 bits must be less than 2^63"),
        ("run.toml", f"norm = 0x{'f' * 9000}", "norm must be a text, not a number of 36,000 bits"),
        ("run.toml", f"norm = [0x{'f' * 9000}]", "norm must be a text, not a list"),
        ("run.json", f'{{"d_ff": "{"x" * 9000}"}}', "d_ff must be a whole number, not 'xxx"),
        ("run.json", f'{{"norm": "{"x" * 9000}"}}', "--norm xxx"),
        ("run.json", f'{{"memory_budget": "{"9" * 9000}"}}', "is no number of bytes"),
        ("run.json", "[" * 100_000, "nested too deeply"),
        ("run.json", '{"lr": ' * 100_000, "nested too deeply"),
        ("run.toml", "lr = " + "[" * 5000, "nested too deeply"),
        ("run.toml", "lr = " + "{a=" * 5000, "nested too deeply"),
        ("run.json", '{"d-model": 8, "d_model": 16}', "d_model is given twice"),
        ("run.toml", "d-model = 8\nd_model = 16", "d_model is given twice"),
        ("run.json", '{"d_model": 8, "d_model": 16}', "'d_model' is given twice"),
        ("run.json", f'{{"{"x" * 9000}": 8}}', "unknown name"),
        ("run.toml", "#" * 2**20 + "\n", "larger than 1,048,576 bytes"),
    ],
)
def test_a_hostile_config_file(
    capsys: pytest.CaptureFixture[str],
    text: Path,
    tmp_path: Path,
    no_device: None,
    name: str,
    contents: str,
    expected: str,
) -> None:
    (tmp_path / name).write_text(contents)
    shown = message_of(capsys, text, *SMALL[:2], "--config", tmp_path / name)
    assert expected in shown and len(shown) < 600


# -- files that never end ----------------------------------------------------------------------------------------------
@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs a file without an end")
def test_files_without_an_end(capsys: pytest.CaptureFixture[str], text: Path, saved: Path, no_device: None) -> None:
    assert "it is a device" in message_of(capsys, text, *SMALL, "--tokenizer", "/dev/zero")
    assert "it is a device" in message_of(capsys, text, *SMALL, "--config", "/dev/zero")
    save = saved / "step-00000002"
    for name in ("state.json", "tokenizer.json", "model.safetensors", "../tokens.json", "../tokens.bin"):
        path = save / name
        data = path.read_bytes()
        path.unlink()
        path.symlink_to("/dev/zero")
        message_of(capsys, "--resume", saved)
        path.unlink()
        path.write_bytes(data)
    latest = saved / "latest"
    latest.unlink()
    latest.symlink_to("/dev/zero")
    assert text_train.main(["--resume", str(saved), "--max-steps", "1"]) == 2  # the newest save is found without it
    assert "already at step 2" in capsys.readouterr().err


def test_reading_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_whole(path, 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_whole(path, 4)


@pytest.mark.skipif(sys.platform == "win32", reason="makes a pipe")
def test_a_config_from_a_pipe(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    """As a shell's <(...) gives it."""
    reader, writer = os.pipe()
    os.write(writer, b"max_steps = 1\n")
    os.close(writer)
    assert text_train.main([str(text), *SMALL[:-2], "--config", f"/dev/fd/{reader}"]) == 0
    os.close(reader)
    assert "step 1/1" in capsys.readouterr().out


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget_text", ["9" * 400, "1" + "0" * 5000, "9" * 30 + "TB", "0." + "1" * 60, "0", "0.5B"])
def test_budgets_that_are_none(
    capsys: pytest.CaptureFixture[str], text: Path, no_device: None, budget_text: str
) -> None:
    shown = message_of(capsys, text, *SMALL, "--memory-budget", budget_text)
    assert "is no number of bytes" in shown and len(shown) < 300


def test_bytes_are_exact() -> None:
    assert parse_bytes("9007199254740993") == 2**53 + 1
    assert parse_bytes("1.1GB") == 1_100_000_000
    assert parse_bytes("0.5 KiB") == 512
    assert parse_bytes("7.") == 7
    assert parse_bytes(str(2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize("d_model", [2**62, 10**9 + 7, 2**63 - 25])
@pytest.mark.parametrize("heads", [7, 10**6 + 3, 2**61 + 1])
def test_heads_that_do_not_divide(
    capsys: pytest.CaptureFixture[str], text: Path, no_device: None, d_model: int, heads: int
) -> None:
    start = time.monotonic()
    shown = message_of(capsys, text, *SMALL, "--d-model", str(d_model), "--num-heads", str(heads))
    assert f"--num-heads {heads} does not divide --d-model {d_model}" in shown
    assert time.monotonic() - start < 5


def test_the_nearest_divisor() -> None:
    for number in (1, 12, 97, 360, 4096):
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        for wish in range(1, 2 * number):
            assert nearest_divisor(number, wish) == min(divisors, key=lambda n: abs(n - wish))
    assert nearest_divisor(2**61 - 1, 2**60) is None


def test_more_weights_than_memory_is_told_without_planning(
    capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr(size_check, "planned_peak_bytes", refuse)
    monkeypatch.setattr(text_train, "budget_bytes", lambda engine: 100 * 2**20)
    assert text_train.main([str(text), *SMALL, "--num-layers", "10000"]) == 2
    assert "error: the weights and moments alone take 1.60 GB of device memory" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_the_least_is_not_above_the_plan(optimizer: str) -> None:
    config = text_train.RunConfig(seq_len=16, d_model=16, num_heads=2, num_layers=2, batch_size=1, optimizer=optimizer)
    least = size_check._least_bytes(config, 256)
    exact = size_check.planned_save_bytes(config, 256)
    assert least == exact if optimizer != "adafactor" else 0.5 * exact < least < exact


def test_many_blocks_are_announced(
    capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_train, "MANY_BLOCKS", 2)
    assert text_train.main([str(text), *SMALL]) == 0
    assert "planning" not in capsys.readouterr().err
    assert text_train.main([str(text), *SMALL, "--num-layers", "2"]) == 0
    assert "text_train: planning the memory of 2 blocks" in capsys.readouterr().err


def test_more_blocks_than_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--seq-len", "1", "--batch-size", "1", "--accum-steps", "100000000"]
    assert memory_estimator.main(argv) == 2
    assert "plan --accum-steps 2" in capsys.readouterr().err


# -- switches ----------------------------------------------------------------------------------------------------------
BAD_SWITCHES = [
    *(("VKFOLD_REPLAY", "foo"), ("VKFOLD_FUSION", "on"), ("VKFOLD_TUNE", "2"), ("VKFOLD_CHECK_RECOMPUTE", "yes")),
    *(("VKFOLD_DEBUG", "9"), ("VKFOLD_LOG", "loud"), ("VKFOLD_TRANSFER_QUEUE", "on"), ("VKFOLD_VARIANT", "foo")),
    *(("VKFOLD_VARIANT", "matmul="), ("VKFOLD_VARIANT", "=foo"), ("VKFOLD_CACHE_DIR", __file__)),
    *(("VKFOLD_CACHE_DIR", "~no-such-user/x"), ("VKFOLD_CACHE_DIR", "/" + "x" * 5000)),
]


@pytest.mark.parametrize(("name", "value"), BAD_SWITCHES)
def test_bad_switches(
    capsys: pytest.CaptureFixture[str],
    text: Path,
    no_device: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    """Whether the program would use the switch or not: before it does anything."""
    monkeypatch.setenv(name, value)
    assert f"{name}={value}: " in message_of(capsys, text, *SMALL)
    assert f"{name}={value}: " in message_of(capsys, text, program="text_generate")
    assert demo.main(["--folder", str(text.parent / "demo")]) == 2
    assert not (text.parent / "demo").exists()
    assert vkfold(["kernels"]) == vkfold(["tune"]) == vkfold([]) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setattr("vkfold.engine.vulkan_engine.Instance", lambda *a, **k: pytest.fail("a device was looked for"))
    with pytest.raises(BadInputError, match=name):
        VulkanEngine()


def test_every_switch_that_can_be_wrong_is_tried() -> None:
    assert {name for name, _ in BAD_SWITCHES} == set(switches.SWITCHES) - {"VKFOLD_DEVICE"}
    switches.check({})


def test_a_variant_that_the_device_does_not_have(
    capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKFOLD_VARIANT", "matmul=foo")
    shown = message_of(capsys, text, "--engine", "vulkan", *SMALL[2:])
    assert "no matmul variant 'foo': this device has " in shown


# -- the demo ----------------------------------------------------------------------------------------------------------
def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_demo_keeps_what_is_saved(short_demo: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    argv = ["--folder", str(folder), "--engine", "cpu", "--steps", "1"]
    assert demo.main(argv) == 1
    before = contents_of(folder)
    assert "saves/step-00000001/model.safetensors" in before
    assert demo.main(["--folder", str(folder), "--device", "no such device"]) == 2  # it could not start
    assert demo.main([*argv, "--seed", str(2**64)]) == 2
    assert before.items() <= contents_of(folder).items()
    capsys.readouterr()
    assert demo.main([*argv, "--seed", "1"]) == 1
    assert before.items() <= contents_of(folder).items()
    assert "(text.txt, saves-2/, saves-2/log.jsonl)" in capsys.readouterr().out


def test_the_demo_and_a_living_run(short_demo: None, tmp_path: Path) -> None:
    """A run that has saved nothing yet has its folder for itself."""
    saves = tmp_path / "demo" / "saves"
    saves.mkdir(parents=True)
    code = "import sys; from pathlib import Path; from vkfold.tools.saves import lock_save_folder\n"
    code += "with lock_save_folder(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(saves)], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout.readline() == b"locked\n"
        argv = ["--folder", str(saves.parent), "--engine", "cpu", "--steps", "1"]
        assert demo.main(argv) == 1
        other.communicate()
    assert not list(saves.glob("step-*"))
    assert (saves.parent / "saves-2" / "step-00000001").is_dir()
    with lock_save_folder(saves):
        pass
