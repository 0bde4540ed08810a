"""What an unlucky or unkind user does to text_train: one clear message, exit code 2, and nothing saved is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_run import SMALL, TEXT, edit_arrays
from test_bad_input import message_of

from vkfold.engine.errors import BadInputError
from vkfold.tools import text_generate, text_train
from vkfold.tools.progress import JsonLog
from vkfold.tools.saves import lock_save_folder


# -- saves -------------------------------------------------------------------------------------------------------------
def test_moments_of_another_model(capsys: pytest.CaptureFixture[str], saved: Path, no_device: None) -> None:
    path = saved / "step-00000002" / "optimizer.safetensors"
    moments = load_file(path)
    name = next(name for name in moments if name.endswith("qkv.weight"))
    edit_arrays(path, moments | {name: np.zeros((3, 5), np.float32)})
    shown = message_of(capsys, "--resume", saved, "--max-steps", "4")
    assert "the saved moments are of another model or optimizer" in shown
    assert f"{name}: shape (3, 5)" in shown


def test_generating_from_weights_of_another_model(
    capsys: pytest.CaptureFixture[str], saved: Path, no_device: None
) -> None:
    path = saved / "step-00000002" / "model.safetensors"
    weights = load_file(path)
    edit_arrays(path, {name: value for name, value in weights.items() if "norm1" not in name})
    assert "missing: blocks.0.norm1.weight" in message_of(capsys, saved, program="text_generate")


def test_generating_from_weights_that_are_nan(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    path = saved / "step-00000002" / "model.safetensors"
    edit_arrays(path, {name: np.full_like(value, np.nan) for name, value in load_file(path).items()})
    assert "are the weights damaged?" in message_of(capsys, saved, "--engine", "cpu", program="text_generate")


def test_generating_with_odd_settings(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    argv = [str(saved), "--engine", "cpu", "--length", "3", "--temperature", "1e-320", "--top-k", str(2**62)]
    assert text_generate.main([*argv, "--top-p", "1e-300", "--prompt", "\udce9 x" * 200]) == 0
    assert "Warning" not in capsys.readouterr().err


def test_two_runs_in_one_folder(capsys: pytest.CaptureFixture[str], saved: Path, text: Path, no_device: None) -> None:
    """The second run is refused while the first one lives, whether it is new or resumed."""
    new = saved.parent / "new"
    new.mkdir()
    with lock_save_folder(saved), lock_save_folder(new):
        assert f"another run is saving into {saved}" in message_of(capsys, "--resume", saved)
        assert f"another run is saving into {new}" in message_of(capsys, text, *SMALL, "--save", new)
    with lock_save_folder(saved), pytest.raises(BadInputError, match="another run"), lock_save_folder(saved):
        pass


def test_a_killed_run_leaves_no_lock(saved: Path) -> None:
    code = "import os, sys; from pathlib import Path; from vkfold.tools.saves import lock_save_folder\n"
    code += "with lock_save_folder(Path(sys.argv[1])): os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code, str(saved)], check=False).returncode == 9
    assert text_train.main(["--resume", str(saved), "--max-steps", "3"]) == 0


def test_save_folder_that_is_a_file(capsys: pytest.CaptureFixture[str], text: Path, no_device: None) -> None:
    assert "cannot write into the save folder" in message_of(capsys, text, *SMALL, "--save", text)


def test_a_disk_too_small_for_a_save(
    capsys: pytest.CaptureFixture[str], text: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before the first step, not after the last one; the figure is that of the files."""
    save_bytes = sum(
        (saved / "step-00000002" / f"{name}.safetensors").stat().st_size for name in ("model", "optimizer")
    )
    free = save_bytes - 8000  # what the files have beside the numbers is less
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    shown = message_of(capsys, text, *SMALL, "--save", text.parent / "new")
    assert f"{text.parent / 'new'} has {free / 1e6:.1f} MB free" in shown
    assert text_train.main([str(text), *SMALL]) == 0
    free = save_bytes
    assert text_train.main([str(text), *SMALL, "--save", str(text.parent / "new")]) == 0


def test_keep_0_keeps_all(text: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert text_train.main([str(text), *SMALL, "--save", str(root), "--save-interval", "1", "--keep", "0"]) == 0
    assert sorted(p.name for p in root.glob("step-*")) == ["step-00000001", "step-00000002"]


# -- few windows -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        # 1800 tokens, 1620 to train on: 1 + (1620 - 17) // 1500 windows; 1 + (1620 - 17) // 229 are 8
        ("--batch-size 8 --stride 1500", "--stride 1500 leaves 2 windows of 16 tokens to train on, fewer than the 8"),
        ("--batch-size 8 --stride 1500", "a --stride of at most 229 gives that many"),
        ("--batch-size 8 --held-out 0.97", "--held-out 0.97 leaves 3 windows of 16 tokens to train on"),
        ("--eval-interval 1 --held-out 0", "there is no held-out text to evaluate (--held-out is 0)"),
        ("--eval-interval 1 --seq-len 1000", "the text is too short to hold a window out"),
        ("--vocab-size 5000", "--tokenizer bytes has 256 tokens: leave --vocab-size out"),
    ],
)
def test_options_that_leave_nothing(
    capsys: pytest.CaptureFixture[str], text: Path, no_device: None, argv: str, expected: str
) -> None:
    assert expected in message_of(capsys, text, *SMALL, *argv.split())


def test_the_advised_stride_fills_a_batch(text: Path) -> None:
    assert text_train.main([str(text), *SMALL, "--batch-size", "8", "--stride", "229"]) == 0
    assert text_train.main([str(text), *SMALL, "--batch-size", "8", "--stride", "230"]) == 2


def test_warnings_about_a_short_text(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    """It may be all the text there is: training goes on."""
    assert text_train.main([str(text), *SMALL, "--seq-len", "400", "--batch-size", "8"]) == 0
    shown = capsys.readouterr().err
    assert "text_train: warning: only 4 windows of 400 tokens to train on, fewer than the 8" in shown
    assert text_train.main([str(text), *SMALL, "--batch-size", "8", "--held-out", "0.05"]) == 0
    assert "warning: only 5 windows of 16 tokens are held out" in capsys.readouterr().err
    assert text_train.main([str(text), *SMALL]) == 0
    assert "warning" not in capsys.readouterr().err


# -- logs --------------------------------------------------------------------------------------------------------------
def test_log_folders_are_made(text: Path, tmp_path: Path) -> None:
    log = tmp_path / "a" / "b" / "log.jsonl"
    assert text_train.main([str(text), *SMALL, "--log-file", str(log)]) == 0
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()][:2] == [1, 2]


def test_log_that_is_something_else(capsys: pytest.CaptureFixture[str], text: Path, no_device: None) -> None:
    """A slip of the keyboard does not cost the text."""
    assert "exists and is no log of a run" in message_of(capsys, text, *SMALL, "--log-file", text)
    assert text.read_bytes() == TEXT
    assert "cannot write the log" in message_of(capsys, text, *SMALL, "--log-file", text.parent)
    assert "cannot write the log" in message_of(capsys, text, *SMALL, "--log-file", text / "sub" / "log")


@pytest.mark.skipif(sys.platform == "win32", reason="makes a named pipe")
def test_log_into_a_pipe(tmp_path: Path) -> None:
    """What is no regular file, like /dev/stdout, is written to and stays what it is; a link stays a link."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = JsonLog(str(pipe), 0)
    log.write(step=1)
    assert json.loads(os.read(reader, 100)) == {"step": 1}
    log.close()
    os.close(reader)
    assert pipe.is_fifo()
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    log = JsonLog(str(link), 0)
    log.write(step=1)
    log.close()
    assert link.is_symlink() and json.loads(target.read_text()) == {"step": 1}


# -- names and streams -------------------------------------------------------------------------------------------------
def run_apart(*argv: str | bytes, **settings: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "import sys; from vkfold.tools.text_train import main; sys.exit(main())", *argv]
    return subprocess.run(command, check=False, capture_output=True, **settings)  # type: ignore[call-overload, no-any-return]


@pytest.mark.skipif(sys.platform != "linux", reason="names files by bytes")
@pytest.mark.parametrize("name", ["ä b 文 😀.txt".encode(), b"caf\xe9 \n.txt", b"--help.txt"])
def test_odd_names(tmp_path: Path, name: bytes) -> None:
    """Names with spaces, line ends, and bytes that are no UTF-8, on a terminal that shows ASCII alone."""
    folder = os.fsencode(tmp_path) + b"/" + name + b".d"
    os.mkdir(folder)
    path = folder + b"/" + name
    with open(path, "wb") as file:
        file.write(TEXT)
    argv = [path, *SMALL, "--save", folder + b"/run", "--sample", "4", "--prompt", b"caf\xe9 \xc3\xa4"]
    done = run_apart(*argv, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"saved in" in done.stdout
    again = run_apart("--resume", folder + b"/run", "--max-steps", "3", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert again.returncode == 0, again.stderr
    missing = run_apart(path + b"x", *SMALL)
    assert missing.returncode == 2 and b"does not exist" in missing.stderr and b"Traceback" not in missing.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="closes a descriptor in the child")
def test_closed_standard_input() -> None:
    done = run_apart("-", *SMALL, preexec_fn=lambda: os.close(0))
    assert done.returncode == 2, done.stderr
    assert b"standard input, and that is closed" in done.stderr
    empty = run_apart("-", *SMALL, stdin=subprocess.DEVNULL)
    assert empty.returncode == 2 and b"the input is empty" in empty.stderr


@pytest.mark.parametrize("option", ["save", "log_file", "resume", "tokenizer", "glob", "device"])
def test_nul_bytes_in_a_config_file(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path, option: str
) -> None:
    config = tmp_path / "run.json"
    config.write_text(json.dumps({option: "a\0b"}))
    argv = [] if option == "device" else SMALL
    message_of(capsys, text.parent if option == "glob" else text, *argv, "--config", config)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ("d_modl = 3", "did you mean d_model?"),
        ("d_model = '3'", "d_model must be a whole number"),
        ("d_model = 3.0", "d_model must be a whole number"),
        ("tie_head = 1", "tie_head must be true or false"),
        ("d_ff = 0", "--d-ff 0 must be greater than 0"),
        ("lr = nan", "not a finite number"),
        ("norm = 'batch'", "--norm batch: choose from"),
        ("[training]\nlr = 1", "unknown name 'training'"),
        ("lr", "is not valid"),
    ],
)
def test_slips_in_a_config_file(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path, no_device: None, contents: str, expected: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(contents)
    assert expected in message_of(capsys, text, *SMALL[:2], "--config", config)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of files")
def test_what_may_not_be_read_or_written() -> None:
    """As a user without rights, whoever runs the tests."""
    code = """
import contextlib, io, os, sys
from vkfold.tools import text_generate, text_train
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for line in sys.stdin.read().splitlines():
    program, *argv = line.split("\\t")
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        code = {"train": text_train, "generate": text_generate}[program].main(argv)
    print(code, shown.getvalue().strip())
"""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root = Path(name)
        for folder in ("locked", "shut"):
            (root / folder).mkdir()
            (root / folder / "text.txt").write_bytes(TEXT)
        for file in ("secret.txt", "text.txt"):
            (root / file).write_bytes(TEXT)
        (root / "secret.txt").chmod(0)
        (root / "text.txt").chmod(0o444)
        (root / "locked").chmod(0o444)
        (root / "shut").chmod(0)
        root.chmod(0o555)
        cases = {
            "secret.txt": "cannot read",
            "locked": "cannot search the folder",
            "shut": "cannot search the folder",
            "shut/text.txt": "cannot look at the input",
            "text.txt --save new": "cannot write into the save folder",
            "text.txt --save shut": "cannot write into the save folder",
            "text.txt --log-file new/log.jsonl": "cannot write the log",
            "text.txt --tokenizer secret.txt": "cannot read the tokenizer",
            "text.txt --config secret.txt": "cannot read the config file",
            "--resume shut": "cannot look for saves",
        }
        paths = {"secret.txt", "text.txt", "locked", "shut", "shut/text.txt", "new", "new/log.jsonl"}
        lines = []
        for case in cases:
            words = [str(root / word) if word in paths else word for word in case.split()]
            lines.append("\t".join(["train", *words, *([] if "--resume" in words else SMALL)]))
        lines.append(f"generate\t{root / 'shut'}")
        done = subprocess.run(
            [sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True, check=False
        )
        root.chmod(0o755)
        for folder in ("locked", "shut"):
            (root / folder).chmod(0o755)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    for answer, expected in zip(answers, [*cases.values(), "cannot look for saves"], strict=True):
        assert answer.startswith("2 text_") and expected in answer and "denied" in answer


# -- sizes beyond sense ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "argv",
    [
        "--d-model 1000000000000 --num-heads 1000000000",
        "--num-layers 1000000000000",
        "--d-ff 1000000000000000",
        "--batch-size 1000000000000",
        "--seq-len 100000000000000000000",
        "--tokenizer bpe --vocab-size 100000000000000000000000",
        "--lr 1e300",
        "--weight-decay 1e300",
        "--max-norm 1e300",
        "--seed 9223372036854775808",
        "--accum-steps 100000000000",
        "--stride 100000000000000000000000",
    ],
)
def test_numbers_beyond_sense(capsys: pytest.CaptureFixture[str], text: Path, argv: str) -> None:
    message_of(capsys, text, *SMALL, *argv.split())


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ("", "A smaller --lr may help"),
        ("--max-norm 0", "A smaller --lr or --max-norm 1 may help"),
        ("--max-steps 100", "A smaller --lr or a longer --warmup-steps may help"),
        ("--max-steps 100 --max-norm 0", "A smaller --lr, a longer --warmup-steps or --max-norm 1 may help"),
        ("--fused-update --max-norm 0", "A smaller --lr may help"),
    ],
)
def test_advice_where_training_blows_up(
    capsys: pytest.CaptureFixture[str], text: Path, options: str, advice: str
) -> None:
    """Nothing is advised that is in use already."""
    assert text_train.main([str(text), *SMALL, "--lr", "1e30", *options.split()]) == 1
    shown = capsys.readouterr().err
    assert re.search(r"step 2: the (loss|gradient of \S+) is not finite \((loss|norm) (nan|inf)\)", shown)
    assert shown.strip().endswith(advice)


# -- interruptions -----------------------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("times", [1, 2])
def test_interrupted(text: Path, tmp_path: Path, times: int) -> None:
    """Ctrl-C saves and ends with 0; a second one ends at once. Either way the saves that are there are complete."""
    root = tmp_path / "run"
    argv = [str(text), *SMALL, "--max-steps", "1000000", "--save", str(root), "--save-interval", "5"]
    code = "import sys; from vkfold.tools.text_train import main; sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", code, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        give_up = time.monotonic() + 60
        while not (root / "latest").exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert b"Traceback" not in err
    assert process.returncode in ((0,) if times == 1 else (0, 130)), err
    if process.returncode == 0:
        assert b"stopped by SIGINT after step" in out
    step = int((root / "latest").read_text().strip().removeprefix("step-"))
    assert text_train.main(["--resume", str(root), "--max-steps", str(step + 1)]) == 0
