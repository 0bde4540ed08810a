"""Saves are complete or absent, the newest is named, damage is told."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vkfold.engine.errors import BadInputError
from vkfold.tools.saves import (
    Arrays,
    Save,
    check_save_folder,
    open_save,
    step_folders,
    write_save,
)
from vkfold.tools.tokenizers import ByteTokenizer

WEIGHTS: Arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}
MOMENTS: Arrays = {"a.m": np.zeros((2, 3), np.float32)}


def save(root: Path, step: int, keep: int = 0) -> Path:
    return write_save(root, step, lambda: WEIGHTS, lambda: MOMENTS, {"config": {"d_model": 3}}, ByteTokenizer(), keep)


def names(root: Path) -> list[str]:
    return [path.name for path in step_folders(root)]


def test_round_trip(tmp_path: Path) -> None:
    folder = save(tmp_path, 40)
    assert folder == tmp_path / "step-00000040"
    assert sorted(p.name for p in folder.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "tokenizer.json",
    ]
    assert (tmp_path / "latest").read_text() == "step-00000040\n"
    for path in (tmp_path, folder):
        read = open_save(path)
        assert (read.step, read.state["config"]) == (40, {"d_model": 3})
        for expected, found in ((WEIGHTS, read.model()), (MOMENTS, read.optimizer())):
            assert expected.keys() == found.keys()
            assert all(np.array_equal(expected[name], found[name]) for name in expected)
        assert read.tokenizer().kind == "bytes"


def test_latest_and_keep(tmp_path: Path) -> None:
    for step in (1, 2, 3, 100_000_000):
        save(tmp_path, step)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003", "step-100000000"]
    assert open_save(tmp_path).step == 100_000_000
    save(tmp_path, 100_000_001, keep=2)
    assert names(tmp_path) == ["step-100000000", "step-100000001"]
    assert not list(tmp_path.glob(".*"))


def test_newest_complete_save_is_taken_without_latest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "latest").unlink()
    assert open_save(tmp_path).step == 2
    (tmp_path / "latest").write_text("step-00000009\n")
    assert open_save(tmp_path).step == 2


def test_same_step_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 7)
    write_save(tmp_path, 7, lambda: {"a": np.zeros(1, np.float32)}, dict, {}, ByteTokenizer())
    assert list(open_save(tmp_path).model()) == ["a"]
    assert names(tmp_path) == ["step-00000007"]


def test_what_a_killed_run_left_is_no_save(tmp_path: Path) -> None:
    save(tmp_path, 1)
    unfinished = tmp_path / ".step-00000002.tmp"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert open_save(tmp_path).step == 1
    save(tmp_path, 2)
    assert not unfinished.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="kills with SIGKILL")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A process that saves for ever is killed; what is there must be complete."""
    program = (
        "import sys, numpy as np; from pathlib import Path; from vkfold.tools.saves import write_save\n"
        "from vkfold.tools.tokenizers import ByteTokenizer\n"
        "for step in range(1, 10**6):\n"
        "    value = {'x': np.full(200_000, step, np.float32)}\n"
        "    write_save(Path(sys.argv[1]), step, lambda: value, lambda: value, {}, ByteTokenizer(), 2)\n"
        "    print(step, flush=True)\n"
    )
    for delay in (0.0, 0.003, 0.007):
        root = tmp_path / str(delay)
        root.mkdir()
        process = subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(3):
            reached = int(process.stdout.readline())
        with suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        process.kill()
        process.communicate()
        read = open_save(root)
        assert read.step >= reached
        assert (read.model()["x"] == read.step).all()
        assert (read.optimizer()["x"] == read.step).all()


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_full_disk_leaves_the_last_good_save(tmp_path: Path) -> None:
    """A write that the system refuses midway, as on a full disk."""
    save(tmp_path, 1)
    program = (
        "import resource, sys, numpy as np; from pathlib import Path; from vkfold.tools.saves import write_save\n"
        "from vkfold.tools.tokenizers import ByteTokenizer; from vkfold.tools.console import run_program\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "big = {'x': np.ones(100_000, np.float32)}\n"
        "def main(argv):\n"
        "    write_save(Path(argv[0]), 2, lambda: big, dict, {}, ByteTokenizer())\n"
        "    return 0\n"
        "sys.exit(run_program('text_train', main))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot save into" in done.stderr
    assert f"the last good save is {tmp_path / 'step-00000001'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert names(tmp_path) == ["step-00000001"]
    assert open_save(tmp_path).step == 1
    assert not list(tmp_path.glob(".*"))


def test_missing_saves(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="does not exist"):
        open_save(tmp_path / "absent")
    with pytest.raises(BadInputError, match="no save in"):
        open_save(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="it is a file"):
        open_save(tmp_path / "file")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_damaged_files(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1) / name
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:20], b"", b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(BadInputError, match="truncated or damaged"):
            getattr(open_save(tmp_path), name.split(".")[0])()
    path.unlink()
    with pytest.raises(BadInputError, match="incomplete"):
        getattr(open_save(tmp_path), name.split(".")[0])()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_weights_that_were_changed_since(tmp_path: Path, name: str) -> None:
    """One bit is enough, and whole files of another save."""
    path = save(tmp_path, 1) / name
    read = Save.model if name.startswith("model") else Save.optimizer
    whole = path.read_bytes()
    for place in (len(whole) - 1, len(whole) - 8):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(BadInputError, match=rf"{name} is damaged: its contents are not those that were saved"):
            read(open_save(tmp_path))
    save_file({key: array + 1 for key, array in load_file(path).items()}, path)
    with pytest.raises(BadInputError, match=r"is damaged.*try an older save"):
        read(open_save(tmp_path))
    path.write_bytes(whole)
    assert read(open_save(tmp_path)).keys() == (WEIGHTS if name.startswith("model") else MOMENTS).keys()


def test_saves_without_checksums_are_read(tmp_path: Path) -> None:
    """Those of earlier versions, and files that were edited on purpose."""
    folder = save(tmp_path, 1)
    state = json.loads((folder / "state.json").read_text())
    assert state["sha256"] == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.safetensors")
    }
    save_file({"a": WEIGHTS["a"] + 1}, folder / "model.safetensors")
    del state["sha256"]["model.safetensors"]
    for _ in range(2):
        (folder / "state.json").write_text(json.dumps(state))
        assert np.array_equal(open_save(tmp_path).model()["a"], WEIGHTS["a"] + 1)
        assert open_save(tmp_path).optimizer().keys() == MOMENTS.keys()
        state.pop("sha256", None)


@pytest.mark.parametrize("nonsense", [None, 3, "x", ["model.safetensors"], {"model.safetensors": 7}])
def test_checksums_that_are_none(tmp_path: Path, nonsense: object) -> None:
    path = save(tmp_path, 1) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": nonsense}))
    with pytest.raises(BadInputError, match=r"is damaged: state\.json: sha256 is"):
        open_save(tmp_path)


def test_damaged_state(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "state.json"
    for content in ("", "{", "[]", '{"step": 1}', '{"format": 1}', '{"format": 1, "step": "x"}'):
        path.write_text(content)
        with pytest.raises(BadInputError, match="damaged"):
            open_save(tmp_path)
    path.write_text(json.dumps({"format": 99, "step": 1}))
    with pytest.raises(BadInputError, match="format 99"):
        open_save(tmp_path)
    path.unlink()
    with pytest.raises(BadInputError, match="incomplete"):
        open_save(tmp_path)


def test_save_folder_checks(tmp_path: Path) -> None:
    check_save_folder(tmp_path / "new" / "deep", resuming=False)
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match="cannot write into the save folder"):
        check_save_folder(tmp_path / "file", resuming=False)
    save(tmp_path, 1)
    with pytest.raises(BadInputError, match="already holds saves"):
        check_save_folder(tmp_path, resuming=False)
    check_save_folder(tmp_path, resuming=True)


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_save_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInputError, match="cannot write into the save folder"):
        check_save_folder(tmp_path / "run", resuming=False)
