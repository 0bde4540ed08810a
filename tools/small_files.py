"""Files that are read whole: bounded, whatever the name leads to."""

from __future__ import annotations

import stat
from pathlib import Path

MAX_SETTINGS_BYTES = 2**20  # config files, state.json
MAX_TOKENIZER_BYTES = 2**27


def read_whole(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file or a pipe that holds at most max_bytes.

    Raises OSError as reading does, ValueError for a device (such as /dev/zero, which never ends), for a file that is
    larger, and for a name with a NUL byte.
    """
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise ValueError("it is a device, not a file")
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    return data
