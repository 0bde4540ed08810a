"""A state dict in one safetensors file."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..engine.errors import BadInputError
from ..engine.input_checks import described
from .layer import Layer


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write name -> array into a new safetensors file, with the permissions of any new file.

    The library's own files are for their owner alone, whatever the umask. Raises OSError and SafetensorError.
    """
    with path.open("wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def require_regular(path: Path) -> None:
    """Raises OSError for what is there and no file: renaming a file over a device or a pipe would take its place."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise OSError(f"{path.name} is {kind}, no regular file: choose another name")


def save(path: str | os.PathLike[str], state: Layer | Mapping[str, np.ndarray]) -> None:
    """Write a layer's parameters, or any name -> array mapping, as a safetensors file: complete, or not at all.

    A link is followed; the permissions of a file that is replaced stay. Raises BadInputError when the file cannot be
    written, or the path is a folder, a device or a pipe; what was there before stays then.
    """
    if not isinstance(state, (Layer, Mapping)):
        raise TypeError(f"save: {described(state)}, needed is a layer, or a dict of name -> array")
    target = Path(os.path.realpath(path))
    arrays = state.state_dict() if isinstance(state, Layer) else state
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        require_regular(Path(path))
        write_arrays(temporary, arrays)
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise BadInputError(f"cannot write {path}: {error}") from error


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Name -> array of a safetensors file, for `load_state_dict`.

    Raises BadInputError when the file is missing, truncated or of another kind.
    """
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot read {path}: {error}") from error
