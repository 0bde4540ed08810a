"""Saves of a training run on disk: complete or absent, the newest one named, old ones removed.

SAVE/step-00000040/ holds model.safetensors, optimizer.safetensors, state.json and tokenizer.json; SAVE/latest names the
newest. A save is written into a folder with another name, flushed to the disk and renamed, so that a run killed at any
moment, or a full disk, leaves the saves before it as they were. state.json has the SHA-256 of the arrays' files, under
"sha256": what was damaged since, or edited, is refused when it is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..engine.errors import BadInputError
from ..nn.state_files import require_regular, write_arrays
from .options import shown
from .small_files import MAX_SETTINGS_BYTES, read_whole
from .tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer

MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, LATEST_FILE = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "latest",
)
LOCK_FILE = ".lock"
DIGESTS = "sha256"  # in STATE_FILE: file name -> SHA-256
FORMAT = 1
Arrays = dict[str, np.ndarray]
_STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass
class Save:
    """One save, read back. state: what `write_save` was given, with the step. digests: SHA-256 of files, by name."""

    folder: Path
    step: int
    state: dict[str, Any]
    digests: Mapping[str, str] = field(default_factory=dict)

    def model(self) -> Arrays:
        """The weights by name. Raises BadInputError when the file is missing, damaged, or not what was saved."""
        return self._arrays(MODEL_FILE)

    def optimizer(self) -> Arrays:
        """The moments by name. Raises BadInputError when the file is missing, damaged, or not what was saved."""
        return self._arrays(OPTIMIZER_FILE, ("num_updates",))

    def _arrays(self, name: str, whole_numbers: Sequence[str] = ()) -> Arrays:
        path = self.folder / name
        arrays = _read_arrays(path, whole_numbers)
        if name in self.digests and self.digests[name] != sha256_of(path):  # earlier versions saved none
            raise BadInputError(
                f"{path} is damaged: its contents are not those that were saved (SHA-256); try an older save or, where "
                f'the file was edited on purpose, take its line out of "{DIGESTS}" in {STATE_FILE}'
            )
        return arrays

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run. Raises BadInputError when the file is missing or damaged."""
        return load_tokenizer(self.folder / TOKENIZER_FILE)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal, as `sha256sum` prints it. Raises BadInputError."""
    digest, part = hashlib.sha256(), memoryview(bytearray(2**20))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(part):
                digest.update(part[:count])
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {_reason(error)}") from error
    return digest.hexdigest()


def check_save_folder(root: Path, *, resuming: bool) -> None:
    """Make the folder and try to write into it. Raises BadInputError when that fails or it holds another run."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise BadInputError(f"cannot write into the save folder {root}: {_reason(error)}") from error
    if not resuming and step_folders(root):
        raise BadInputError(
            f"{root} already holds saves of a run: go on with --resume {root}, or choose another folder"
        )


def check_disk_space(root: Path, save_bytes: int) -> None:
    """Raises BadInputError when the disk has no room for one save of so many bytes."""
    free = shutil.disk_usage(root).free
    if free < save_bytes:
        raise BadInputError(
            f"a save takes about {save_bytes / 1e6:,.1f} MB, and {root} has {free / 1e6:,.1f} MB free: "
            f"make room, or choose another --save folder"
        )


@contextmanager
def lock_save_folder(root: Path) -> Iterator[None]:
    """Keep other runs out of the folder until the end of the block, or of this process, however it ends.

    Raises BadInputError when another run has it. Where files cannot be locked, as on some network drives, it does
    nothing.
    """
    try:
        file = (root / LOCK_FILE).open("a+b")
    except OSError as error:
        raise BadInputError(f"cannot write into the save folder {root}: {error.strerror or error}") from error
    with file:
        try:
            _lock(file.fileno())
        except (BlockingIOError, PermissionError) as error:
            raise BadInputError(f"another run is saving into {root}: wait for it, or choose another folder") from error
        except OSError:
            pass
        yield


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def step_folders(root: Path) -> list[Path]:
    """The complete saves in a folder, oldest first. Raises BadInputError for a folder that cannot be read."""
    try:
        found = [(int(m[1]), p) for p in root.iterdir() if (m := _STEP_NAME.fullmatch(p.name)) and p.is_dir()]
    except OSError as error:
        raise BadInputError(f"cannot look for saves in {root}: {_reason(error)}") from error
    return [path for _, path in sorted(found)]


def write_save(
    root: Path,
    step: int,
    model: Callable[[], Arrays],
    optimizer: Callable[[], Arrays],
    state: Mapping[str, Any],
    tokenizer: Tokenizer,
    keep: int = 0,
) -> Path:
    """Write one save and make it the latest; then remove all but the `keep` newest (0 keeps all).

    model, optimizer: called one after the other, so that only one of the two is in host memory. Raises BadInputError
    when the disk is full or cannot be written; the saves before stay as they were.
    """
    final = root / f"step-{step:08d}"
    work = root / f".{final.name}.tmp"
    try:
        for left_over in root.glob(".step-*.tmp"):  # of a run that was killed
            shutil.rmtree(left_over)
        work.mkdir()
        write_arrays(work / MODEL_FILE, model())
        write_arrays(work / OPTIMIZER_FILE, optimizer())
        tokenizer.save(work)
        digests = {name: sha256_of(work / name) for name in (MODEL_FILE, OPTIMIZER_FILE)}
        (work / STATE_FILE).write_text(
            json.dumps({"format": FORMAT, "step": step, **state, DIGESTS: digests}, indent=1), encoding="utf-8"
        )
        for path in [*work.iterdir(), work]:
            _flush(path)
        if final.exists():  # the run went on from an older save
            final.rename(root / f".{final.name}-old.tmp")
        work.rename(final)
        _write_latest(root, final.name)
        for left_over in root.glob(".step-*-old.tmp"):
            shutil.rmtree(left_over)
        for old in step_folders(root)[: -keep or None] if keep else []:
            _remove(old, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(work, ignore_errors=True)
        saved = [p.name for p in step_folders(root)] if root.is_dir() else []
        left = f"the last good save is {root / saved[-1]}" if saved else "there is no earlier save"
        raise BadInputError(f"cannot save into {root}: {error}; {left}") from error
    return final


def _remove(old: Path, newest: Path) -> None:
    if old != newest:
        hidden = old.with_name(f".{old.name}-old.tmp")  # complete or absent, here too
        old.rename(hidden)
        shutil.rmtree(hidden)


def _write_latest(root: Path, name: str) -> None:
    require_regular(root / LATEST_FILE)
    temporary = root / f".{LATEST_FILE}.tmp"
    temporary.write_text(name + "\n", encoding="utf-8")
    _flush(temporary)
    temporary.replace(root / LATEST_FILE)
    _flush(root)


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if path.is_dir():
        if os.name == "nt":  # folders cannot be flushed there
            return
        handle = os.open(path, os.O_RDONLY)
    else:
        handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_save(path: Path) -> Save:
    """The save at `path`: one save's folder, or a folder of saves, whose latest is taken.

    Raises BadInputError when there is none, or when its state cannot be read.
    """
    folder = path
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:  # a name too long, or with a NUL byte; a folder that may not be looked into
        raise BadInputError(f"cannot open the save {str(path)[:80]!r}: {_reason(error)}") from error
    if not is_folder:
        raise BadInputError(f"no save at {path}: " + ("it is a file" if path.exists() else "it does not exist"))
    if not _STEP_NAME.fullmatch(path.name) and not os.path.exists(path / STATE_FILE):
        folder = _latest(path)
    try:
        state = json.loads(read_whole(folder / STATE_FILE, MAX_SETTINGS_BYTES).decode("utf-8"))
        found, step = state["format"], state["step"]
    except OSError as error:
        raise BadInputError(f"the save {folder} is incomplete: {STATE_FILE}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise BadInputError(f"the save {folder} is damaged: {STATE_FILE}: {reason}") from error
    if type(found) is not int or found != FORMAT:
        raise BadInputError(f"the save {folder} has format {shown(found)}; this version reads format {FORMAT}")
    if type(step) is not int or not 0 <= step < 2**63:
        raise BadInputError(f"the save {folder} is damaged: {STATE_FILE}: step is {shown(step)}")
    digests = state.pop(DIGESTS, {})
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise BadInputError(f"the save {folder} is damaged: {STATE_FILE}: {DIGESTS} is {shown(digests)}")
    return Save(folder, step, state, digests)


def _latest(root: Path) -> Path:
    folders = step_folders(root)
    try:
        named = root / read_whole(root / LATEST_FILE, MAX_SETTINGS_BYTES).decode("utf-8").strip()
        if named in folders:
            return named
    except (OSError, ValueError):
        pass  # the newest complete save is as good
    if not folders:
        raise BadInputError(f"no save in {root}: it has no folder like step-00000040")
    return folders[-1]


def _read_arrays(path: Path, whole_numbers: Sequence[str] = ()) -> Arrays:
    try:
        arrays = load_file(path)
    except OSError as error:
        raise BadInputError(f"the save {path.parent} is incomplete: {path.name}: {error.strerror or error}") from error
    except SafetensorError as error:
        size = path.stat().st_size
        raise BadInputError(f"{path} is truncated or damaged ({size} bytes): {error}; try an older save") from error
    for name, array in arrays.items():
        expected = np.int64 if name in whole_numbers else np.float32
        if array.dtype != expected:
            raise BadInputError(f"{path} is damaged: {name} is {array.dtype}, not {np.dtype(expected)}")
    return arrays
