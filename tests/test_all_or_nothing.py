"""Saving and loading change everything or nothing: files, links, pipes, permissions; parameters and moments."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vkfold as vf
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, Adafactor, AdamW, GPTConfig, GPTModel
from vkfold.tools.saves import _write_latest

CONFIG = GPTConfig(13, 8, 8, 2, 1, d_ff=12)
ARRAYS = {"x": np.arange(6.0, dtype=np.float32)}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- files -------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A rename over a device node, a pipe or a folder would put a file in its place."""
    pipe, folder, link = tmp_path / "pipe", tmp_path / "folder", tmp_path / "link"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(pipe)
    for path, kind in ((pipe, "a device or a pipe"), (link, "a device or a pipe"), (folder, "a folder")):
        with pytest.raises(BadInputError, match=f"cannot write {path}: {path.name} is {kind}, no regular file"):
            vf.save(path, ARRAYS)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and folder.is_dir() and link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link", "pipe"]
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(OSError, match="latest is a device or a pipe, no regular file"):
        _write_latest(tmp_path, "step-00000001")


@pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_new_files_have_the_permissions_of_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        vf.save(path, ARRAYS)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o666 & ~umask
    path.chmod(0o640)  # a file that is replaced keeps its own
    vf.save(path, {"x": ARRAYS["x"] + 1})
    assert mode_of(path) == 0o640
    assert np.array_equal(vf.load(path)["x"], ARRAYS["x"] + 1)


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege")
def test_a_link_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    vf.save(real, ARRAYS)
    link.symlink_to(real)
    vf.save(link, {"x": ARRAYS["x"] * 2})
    assert link.is_symlink() and np.array_equal(vf.load(real)["x"], ARRAYS["x"] * 2)


# -- parameters and moments --------------------------------------------------------------------------------------------
BAD: dict[str, Callable[[np.ndarray], Any]] = {
    "real numbers are needed": lambda a: a.astype(np.complex64),
    "dtype object": lambda a: a.astype(object),
    "too large for float32": lambda a: np.full(a.shape, 1e300),
    "booleans": lambda a: np.ones(a.shape, bool),
    "masked array": lambda a: np.ma.masked_array(a, mask=np.zeros(a.shape, bool)),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("make", [None, AdamW, SGD, Adafactor], ids=["model", "adamw", "sgd", "adafactor"])
def test_a_bad_value_changes_nothing(vulkan: VulkanEngine, make: Any, message: str) -> None:
    """The last tensor is the bad one: those before it stay as they were too, and the message names it."""
    model = GPTModel(vulkan, CONFIG, seed=0)
    thing = model if make is None else make(model)
    before = thing.state_dict()
    names = [name for name in before if name != "num_updates"]
    state = {name: value + 1 for name, value in before.items()}
    state[names[-1]] = BAD[message](state[names[-1]])
    with pytest.raises((ValueError, TypeError), match=f"{names[-1]}: .*{message}"):
        thing.load_state_dict(state)
    after = thing.state_dict()
    assert all(np.array_equal(after[name], before[name]) for name in before)
    state[names[-1]] = before[names[-1]] + 1
    thing.load_state_dict(state)
    assert all(np.array_equal(value, before[name] + 1) for name, value in thing.state_dict().items())


@pytest.mark.parametrize("count", [np.array([-1]), np.array([1.5]), np.array([np.nan]), np.array(["1"])])
def test_a_bad_number_of_updates_changes_nothing(cpu: CpuEngine, count: np.ndarray) -> None:
    optimizer = AdamW(GPTModel(cpu, CONFIG, seed=0))
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"num_updates is .*whole number"):
        optimizer.load_state_dict({name: value + 1 for name, value in before.items()} | {"num_updates": count})
    assert all(np.array_equal(value, before[name]) for name, value in optimizer.state_dict().items())
