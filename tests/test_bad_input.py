"""Bad input gives one clear message and exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import SMALL, TEXT

from vkfold.tools import text_generate, text_train
from vkfold.tools.text_data import find_files


def message_of(capsys: pytest.CaptureFixture[str], *argv: str | Path, program: str = "text_train") -> str:
    """Run the program, demand exit code 2 and a one-paragraph message without a traceback; return it."""
    main = text_train.main if program == "text_train" else text_generate.main
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"{program}: error: ")
    assert "Traceback" not in shown
    return shown


# -- input text ------------------------------------------------------------------------------------------------------
def test_no_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no input" in message_of(capsys, *SMALL)


def test_missing_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert f"{tmp_path / 'absent.txt'} does not exist" in message_of(capsys, tmp_path / "absent.txt", *SMALL)


def test_empty_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    assert "is empty" in message_of(capsys, tmp_path / "empty.txt", *SMALL)
    assert "is empty" in message_of(capsys, tmp_path, *SMALL)  # a folder of nothing but empty files


def test_folder_without_a_match(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    shown = message_of(capsys, text.parent, "--glob", "*.md", *SMALL)
    assert "no file in the folder" in shown
    assert "'*.md'" in shown


@pytest.mark.parametrize(("length", "works"), [(15, False), (16, False), (17, True)])
def test_shorter_than_a_window(capsys: pytest.CaptureFixture[str], text: Path, length: int, works: bool) -> None:
    text.write_bytes(TEXT[:length])
    if works:
        assert text_train.main([str(text), *SMALL]) == 0
    else:
        shown = message_of(capsys, text, *SMALL)
        assert f"{length} tokens; one window of --seq-len 16 needs 17" in shown


def test_seq_len_longer_than_the_data(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    shown = message_of(capsys, text, *SMALL, "--seq-len", "5000")
    assert "--seq-len 5000 needs 5001" in shown


def test_held_out_part_too_short(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    assert "--held-out 0.001" in message_of(capsys, text, *SMALL, "--held-out", "0.001")


# -- tokenizer -------------------------------------------------------------------------------------------------------
def test_tokenizer_that_is_none(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    assert "is no tokenizer.json" in message_of(capsys, text, *SMALL, "--tokenizer", text)
    assert "cannot read the tokenizer" in message_of(capsys, text, *SMALL, "--tokenizer", "absent.json")


# -- options ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--num-heads 3", "--num-heads 3 does not divide --d-model 16"),
        ("--num-heads 4 --num-kv-heads 3", "--num-kv-heads 3 does not divide --num-heads 4"),
        ("--d-model 6 --num-heads 2", "head_dim 3"),
        ("--num-layer 3", "did you mean --num-layers"),
        ("--warmup-steps 2", "no room after 2 warm-up steps"),
        ("--lr nan", "not a finite number"),
        ("--engine tpu", "invalid choice"),
        ("--config absent.toml", "cannot read the config file"),
        ("--device 0", "--device chooses a Vulkan device"),
    ],
)
def test_options(capsys: pytest.CaptureFixture[str], text: Path, argv: str, expected: str) -> None:
    assert expected in message_of(capsys, text, *SMALL, *argv.split())


def test_log_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    assert "cannot write the log" in message_of(capsys, text, *SMALL, "--log-file", text / "log.jsonl")


# -- memory ----------------------------------------------------------------------------------------------------------
def test_sizes_that_cannot_fit(capsys: pytest.CaptureFixture[str], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = message_of(capsys, text, *SMALL, "--d-model", "65536", "--num-heads", "512", "--num-layers", "8")
    assert "of device memory, the budget is" in shown
    assert "make --d-model, --num-layers or --d-ff smaller" in shown
    monkeypatch.setattr(text_train, "budget_bytes", lambda engine: 1_500_000)
    shown = message_of(capsys, text, *SMALL, "--num-layers", "4", "--batch-size", "128")
    assert "--batch-size" in shown
    assert "would fit" in shown


# -- device ----------------------------------------------------------------------------------------------------------
def test_unknown_device(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    shown = message_of(capsys, text, *SMALL, "--engine", "vulkan", "--device", "no such device")
    assert "no Vulkan device matches 'no such device'" in shown
    assert "There is:" in shown


def run_apart(code: str, text: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """text_train on Vulkan in a process of its own, after some code."""
    argv = [str(text), *SMALL, "--engine", "vulkan"]
    program = f"{code}\nimport sys\nfrom vkfold.tools.text_train import main\nsys.exit(main({argv!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_no_vulkan_loader(text: Path) -> None:
    # What PyVulkan does where it finds no loader: importing it raises OSError.
    code = (
        "import sys\n"
        "class NoLoader:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'vulkan':\n"
        "            raise OSError('Cannot find Vulkan SDK version')\n"
        "sys.meta_path.insert(0, NoLoader())"
    )
    done = run_apart(code, text)
    assert done.returncode == 2, done.stderr
    assert "no Vulkan loader was found" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="chooses drivers by ICD files")
def test_no_device(text: Path, tmp_path: Path) -> None:
    icd = tmp_path / "none.json"
    icd.write_text(
        json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": "/absent.so", "api_version": "1.2.0"}})
    )
    done = run_apart("", text, VK_ICD_FILENAMES=str(icd), VK_DRIVER_FILES=str(icd))
    assert done.returncode == 2, done.stderr
    assert "found no driver" in done.stderr
    assert "Traceback" not in done.stderr


# -- saves -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(text: Path, tmp_path: Path) -> Path:
    root = tmp_path / "run"
    assert text_train.main([str(text), *SMALL, "--save", str(root)]) == 0
    return root


def test_resume_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "does not exist" in message_of(capsys, "--resume", tmp_path / "absent")
    assert "no save in" in message_of(capsys, "--resume", tmp_path)
    assert "no save in" in message_of(capsys, "--save", tmp_path, "--resume")
    assert "--resume from where?" in message_of(capsys, *SMALL, "--resume")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"])
def test_resume_truncated(capsys: pytest.CaptureFixture[str], saved: Path, name: str) -> None:
    path = saved / "step-00000002" / name
    path.write_bytes(path.read_bytes()[:-9])
    shown = message_of(capsys, "--resume", saved, "--max-steps", "4")
    assert "damaged" in shown or "no tokenizer.json" in shown
    path.unlink()
    shown = message_of(capsys, "--resume", saved, "--max-steps", "4")
    assert "incomplete" in shown or "cannot read" in shown


def test_resume_with_another_config(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    shown = message_of(capsys, "--resume", saved, "--d-model", "32")
    assert "cannot resume with --d-model 32: the save was made with 16" in shown


@pytest.mark.parametrize(
    "change", [{"index": 999}, {"epoch": -1}, {"seed": "x"}, {"schedule": {}}, {"config": {"x": 1}}]
)
def test_resume_with_a_state_that_makes_no_sense(
    capsys: pytest.CaptureFixture[str], saved: Path, change: dict[str, object]
) -> None:
    path = saved / "step-00000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "damaged" in message_of(capsys, "--resume", saved, "--max-steps", "4")


def test_resume_with_weights_of_another_model(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    path = saved / "step-00000002" / "state.json"
    state = json.loads(path.read_text())
    state["config"]["d_model"] = 32
    path.write_text(json.dumps(state))
    assert "the saved weights are of another model" in message_of(capsys, "--resume", saved)
    assert "the saved weights are of another model" in message_of(
        capsys, saved, "--engine", "cpu", program="text_generate"
    )


def test_resume_with_another_text(capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_bytes(TEXT[::-1])
    assert "was made with another text" in message_of(capsys, tmp_path / "other.txt", "--resume", saved)
    assert text_train.main([str(find_files([str(tmp_path / "text.txt")], "*")[0]), "--resume", str(saved)]) == 0


def test_save_folder_that_cannot_be_used(capsys: pytest.CaptureFixture[str], text: Path, saved: Path) -> None:
    assert "cannot write into the save folder" in message_of(capsys, text, *SMALL, "--save", text / "sub")
    assert "already holds saves" in message_of(capsys, text, *SMALL, "--save", saved)


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_disk_full_while_saving(text: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    argv = [str(text), *SMALL, "--save", str(root), "--save-interval", "1", "--max-steps", "9"]
    program = (
        "import resource, sys\n"
        "from vkfold.tools import training_run, text_train\n"
        "write_save = training_run.write_save\n"
        "def full_at_step_2(root, step, *rest):\n"
        "    if step == 2:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "    return write_save(root, step, *rest)\n"
        "training_run.write_save = full_at_step_2\n"
        f"sys.exit(text_train.main({argv!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot save into" in done.stderr
    assert f"the last good save is {root / 'step-00000001'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["step-00000001"]
    assert text_train.main(["--resume", str(root), "--max-steps", "2"]) == 0


# -- text_generate ---------------------------------------------------------------------------------------------------
def test_generate(capsys: pytest.CaptureFixture[str], saved: Path, tmp_path: Path) -> None:
    capsys.readouterr()
    assert text_generate.main([str(saved), "--engine", "cpu", "--length", "5", "--prompt", "the "]) == 0
    assert capsys.readouterr().out.startswith("the ")
    for argv, expected in (
        ([], "name one save, not 0"),
        ([tmp_path / "absent"], "does not exist"),
        ([saved, "--temperature", "-1"], "--temperature -1.0 must be"),
        ([saved, "--temperature", "nan"], "not a finite number"),
        ([saved, "--top-p", "0"], "top_p is 0"),
        ([saved, "--top-k", "-2"], "--top-k -2 must be"),
        ([saved, "--length", "0"], "--length 0 must be"),
    ):
        assert expected in message_of(capsys, *argv, "--engine", "cpu", program="text_generate")


# -- found by trying to break it -------------------------------------------------------------------------------------
def test_absolute_glob(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    assert "relative to the folder" in message_of(capsys, text.parent, "--glob", "/tmp/*", *SMALL)


def test_endless_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "xxx" in message_of(capsys, "x" * 5000, *SMALL)


def test_head_dim_beyond_attention(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    shown = message_of(capsys, text, *SMALL, "--d-model", "1024", "--num-heads", "2")
    assert "head_dim 512 is over 256" in shown


@pytest.mark.parametrize(("name", "value"), [("step", -3), ("d_model", "x")])
def test_damaged_state(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path, name: str, value: object
) -> None:
    save = tmp_path / "save"
    assert text_train.main([str(text), *SMALL, "--save", str(save)]) == 0
    path = save / (save / "latest").read_text().strip() / "state.json"
    state = json.loads(path.read_text())
    (state if name == "step" else state["config"])[name] = value
    path.write_text(json.dumps(state))
    assert "is damaged" in message_of(capsys, "--resume", save)


def test_a_moved_save_goes_on_where_it_is(text: Path, tmp_path: Path) -> None:
    """A run resumed from a moved folder saves there, not where it was made."""
    made, moved = tmp_path / "made", tmp_path / "moved"
    assert text_train.main([str(text), *SMALL, "--save", str(made)]) == 0
    made.rename(moved)
    assert text_train.main(["--resume", str(moved), "--max-steps", "4"]) == 0
    assert not made.exists()
    assert (moved / "latest").read_text().strip() == "step-00000004"


def test_fewer_steps_than_were_done(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    assert text_train.main([str(text), *SMALL, "--save", str(save)]) == 0
    assert "already at step 2, beyond the 1" in message_of(capsys, "--resume", save, "--max-steps", "1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that is always full")
def test_full_log_saves_first(capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path) -> None:
    """A log that cannot be written ends the run, but not without a save."""
    save = tmp_path / "save"
    (tmp_path / "log").symlink_to("/dev/full")
    shown = message_of(capsys, text, *SMALL, "--save", save, "--log-file", tmp_path / "log")
    assert "cannot write the log" in shown
    assert "the state after step 1 is saved" in shown
    assert (save / "latest").read_text().strip() == "step-00000001"
