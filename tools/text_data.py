"""Input text as tokens in a memory-mapped file, cut into windows that come in a seeded order."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.errors import BadInputError
from ..nn.losses import IGNORE_INDEX
from .options import shown
from .small_files import MAX_SETTINGS_BYTES, read_whole
from .tokenizers import Tokenizer

TOKENS_FILE = "tokens.bin"
TOKEN_DTYPES = ("<u2", "<u4")
CHUNK_BYTES = 4 * 2**20
STDIN = "-"


# -- input files -----------------------------------------------------------------------------------------------------
def find_files(paths: Sequence[str], glob: str) -> list[Path]:
    """The files that the paths name: files as given, folders searched through for the glob, in sorted order.

    "-" is standard input and must be alone. Raises BadInputError for a missing path, a folder without a match, no
    paths at all.
    """
    if not paths:
        raise BadInputError("no input: name a text file, a folder, or - for standard input")
    if STDIN in paths:
        if len(paths) > 1:
            raise BadInputError("- (standard input) cannot be combined with other inputs")
        return [Path(STDIN)]
    if not glob or Path(glob).is_absolute():
        raise BadInputError(f"--glob {glob!r} must be a pattern relative to the folder, for example '*.txt'")
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        try:
            is_folder = path.is_dir()
        except (OSError, ValueError) as error:  # a name too long, or with a NUL byte
            reason = getattr(error, "strerror", None) or error
            raise BadInputError(f"cannot look at the input {name[:60]!r}: {reason}") from error
        if is_folder:
            if not os.access(path, os.R_OK | os.X_OK):  # searching it would find nothing, and not say why
                raise BadInputError(f"cannot search the folder {path}: Permission denied")
            try:
                found = sorted(p for p in path.rglob(glob) if p.is_file())
            except (OSError, ValueError) as error:  # ValueError: a pattern that is none
                raise BadInputError(
                    f"cannot search the folder {path} for {glob!r}: {getattr(error, 'strerror', None) or error}"
                ) from error
            if not found:
                raise BadInputError(f"no file in the folder {path} matches {glob!r}: choose another with --glob")
            files += found
        elif path.is_file():
            if path.stat().st_size == 0:
                raise BadInputError(f"{path} is empty")
            files.append(path)
        elif path.exists():
            raise BadInputError(f"{path} is neither a file nor a folder: pipe it into standard input and name -")
        else:
            raise BadInputError(f"{path} does not exist")
    return files


def read_chunks(files: Iterable[Path], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The bytes of the files one after another, in pieces cut behind a line end where there is one.

    Raises BadInputError for a file that cannot be read.
    """
    for path in files:
        try:
            if str(path) == STDIN and sys.stdin is None:
                raise BadInputError("- is standard input, and that is closed: pipe text into it, or name a file")
            stream = sys.stdin.buffer if str(path) == STDIN else path.open("rb")
            with stream:
                rest = b""
                while data := stream.read(chunk_bytes):
                    data = rest + data
                    cut = data.rfind(b"\n") + 1 or _character_end(data)
                    yield data[:cut]
                    rest = data[cut:]
                if rest:
                    yield rest
        except OSError as error:
            raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error


def _character_end(data: bytes) -> int:
    """Where the last UTF-8 character begins, so that a cut does not split it; all of it for a lone character."""
    start = len(data) - 1
    while start > max(0, len(data) - 4) and data[start] & 0xC0 == 0x80:
        start -= 1
    return start or len(data)


# -- tokens ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TokenFile:
    """Tokens on disk, read through a memory map.  # uint16 or uint32 [num_tokens]"""

    path: Path
    tokens: np.ndarray
    fingerprint: str  # SHA-256 of the token numbers
    num_bytes: int  # of the text they stand for


def write_token_file(folder: Path, chunks: Iterable[bytes], tokenizer: Tokenizer) -> TokenFile:
    """Encode the chunks into `folder`/tokens.bin, complete or absent. Raises BadInputError when it cannot."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    digest, num_bytes, num_tokens = hashlib.sha256(), 0, 0
    path = folder / TOKENS_FILE
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for chunk in chunks:
                tokens = tokenizer.encode(chunk).astype(dtype)
                file.write(tokens.tobytes())
                digest.update(tokens.tobytes())
                num_bytes += len(chunk)
                num_tokens += len(tokens)
            file.flush()
            os.fsync(file.fileno())
        description = {"dtype": dtype.str, "sha256": digest.hexdigest(), "bytes": num_bytes, "tokens": num_tokens}
        path.with_suffix(".json").write_text(json.dumps(description))
        temporary.replace(path)
    except OSError as error:
        raise BadInputError(f"cannot write tokens into {folder}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return open_token_file(folder, verify=False)


def open_token_file(folder: Path, *, verify: bool = True) -> TokenFile:
    """The tokens that `write_token_file` left. verify: read them all, and compare with the SHA-256 beside them.

    Raises BadInputError when they are missing, incomplete or others than were written.
    """
    path = folder / TOKENS_FILE
    try:
        description = json.loads(read_whole(path.with_suffix(".json"), MAX_SETTINGS_BYTES))
        if description["dtype"] not in TOKEN_DTYPES:
            raise ValueError(f"dtype is {shown(description['dtype'])}")
        for name in ("tokens", "bytes"):
            if type(description[name]) is not int or not 0 <= description[name] < 2**63:
                raise ValueError(f"{name} is {shown(description[name])}")
        dtype, num_tokens = np.dtype(description["dtype"]), description["tokens"]
        if path.stat().st_size != num_tokens * dtype.itemsize:
            raise ValueError(f"{path.stat().st_size} bytes instead of {num_tokens * dtype.itemsize}")
        tokens = np.memmap(path, dtype, "r") if num_tokens else np.zeros(0, dtype)
        if verify and _sha256(tokens) != description["sha256"]:
            raise ValueError("their SHA-256 is not the one they were written with")
        return TokenFile(path, tokens, str(description["sha256"]), description["bytes"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInputError(f"{path} holds no complete tokens ({error}): name the input text again") from error


def _sha256(tokens: np.ndarray) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(tokens), CHUNK_BYTES):
        digest.update(tokens[start : start + CHUNK_BYTES].tobytes())
    return digest.hexdigest()


# -- windows ---------------------------------------------------------------------------------------------------------
def split_held_out(num_tokens: int, seq_len: int, fraction: float | None) -> int:
    """How many tokens, from the start, are for training; the tail is held out.

    `fraction` None means a tenth where that leaves a window on both sides, else nothing. Raises BadInputError when the
    text is shorter than one window of seq_len + 1 tokens, or a part that was asked for is.
    """
    window = seq_len + 1
    if num_tokens < window:
        raise BadInputError(
            f"the text has {num_tokens} tokens; one window of --seq-len {seq_len} needs {window} "
            f"(a target follows each token): give more text or a smaller --seq-len"
        )
    held_out = int(num_tokens * (0.1 if fraction is None else fraction))
    fits = num_tokens - held_out >= window and held_out >= window
    if fraction is None:
        return num_tokens - held_out if fits else num_tokens
    if held_out and not fits:
        raise BadInputError(
            f"--held-out {fraction:g} of {num_tokens} tokens leaves {num_tokens - held_out} for training and "
            f"{held_out} held out; each part needs one window of {window} tokens: give more text or --held-out 0"
        )
    return num_tokens - held_out


class Windows:
    """Windows of seq_len tokens, each with the tokens that follow them as targets.

    Window i starts at token i * stride; there are 1 + floor((N - seq_len - 1) / stride), or none of too short a part.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, stride: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.stride = stride

    def __len__(self) -> int:
        spare = len(self.tokens) - self.seq_len - 1
        return 1 + spare // self.stride if spare >= 0 else 0

    def batch(self, numbers: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the windows with these numbers.  # both int32 [len(numbers), seq_len]"""
        starts = np.asarray(numbers, np.int64) * self.stride
        rows = self.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int32)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    def batches(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All windows in order, the last batch filled up with ignored targets so that every batch has one shape."""
        for start in range(0, len(self), batch_size):
            numbers = np.arange(start, start + batch_size)
            inputs, targets = self.batch(np.minimum(numbers, len(self) - 1))
            targets[numbers >= len(self)] = IGNORE_INDEX
            yield inputs, targets


class ShuffledWindows:
    """An endless stream of window numbers: each epoch is a permutation of its own, known from (seed, epoch) alone.

    `epoch` and `index` are the cursor: the next window is number `index` of that epoch's order. Setting both resumes
    exactly. Windows drawn across the end of an epoch continue in the next one, so every batch is full.
    """

    def __init__(self, num_windows: int, seed: int, epoch: int = 0, index: int = 0) -> None:
        if num_windows < 1:
            raise ValueError("no windows to draw from")
        self.num_windows = num_windows
        self.seed = seed
        self.epoch = epoch
        self.index = index
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> np.ndarray:
        # Raw generator output, sorted: NumPy keeps that stable between versions, unlike Generator.permutation.
        key = np.array([self.seed & (2**64 - 1), epoch], np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(self.num_windows), kind="stable")

    def draw(self, count: int) -> np.ndarray:
        """The next `count` window numbers.  # int64 [count]"""
        parts = [self._order[:0]]
        while count:
            part = self._order[self.index : self.index + count]
            parts.append(part)
            count -= len(part)
            self.index += len(part)
            if self.index == self.num_windows:
                self.epoch, self.index = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
        return np.concatenate(parts)
