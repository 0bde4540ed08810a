"""A state dict in one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..engine.errors import BadInputError
from .layer import Layer


def save(path: str | os.PathLike[str], state: Layer | Mapping[str, np.ndarray]) -> None:
    """Write a layer's parameters, or any name -> array mapping, as a safetensors file: complete, or not at all.

    Raises BadInputError when the file cannot be written; one that was there before stays then.
    """
    target = Path(path)
    arrays = state.state_dict() if isinstance(state, Layer) else state
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise BadInputError(f"cannot write {target}: {error}") from error


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Name -> array of a safetensors file, for `load_state_dict`.

    Raises BadInputError when the file is missing, truncated or of another kind.
    """
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot read {path}: {error}") from error
