"""The smallest run of text_train that tests of the programs start from."""

from __future__ import annotations

SMALL = ["--engine", "cpu", "--seq-len", "16", "--d-model", "16", "--num-heads", "2", "--num-layers", "1"]
SMALL += ["--batch-size", "2", "--max-steps", "2"]
TEXT = b"the quick brown fox jumps over the lazy dog.\n" * 40
