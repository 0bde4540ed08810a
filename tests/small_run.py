"""The smallest run of text_train that tests of the programs start from; its saves, edited on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SMALL = ["--engine", "cpu", "--seq-len", "16", "--d-model", "16", "--num-heads", "2", "--num-layers", "1"]
SMALL += ["--batch-size", "2", "--max-steps", "2"]
TEXT = b"the quick brown fox jumps over the lazy dog.\n" * 40


def edit_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Put other arrays into a file of a save, and take its checksum out, as the message of a damaged one says."""
    save_file(arrays, path)
    state = json.loads((path.parent / "state.json").read_text(encoding="utf-8"))
    state["sha256"].pop(path.name, None)
    (path.parent / "state.json").write_text(json.dumps(state), encoding="utf-8")
