"""Text as tokens and back, losslessly: bytes, or a byte-level BPE through the `tokenizers` library.

Every tokenizer here works on bytes, never on text: `decode(encode(data)) == data` for any data, whatever its encoding,
line ends or stray bytes. Decoding joins the bytes of all tokens first; text is made of them afterwards.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.errors import BadInputError
from .small_files import MAX_TOKENIZER_BYTES, read_whole

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(ABC):
    """Bytes to token numbers in [0, vocab_size) and back."""

    kind: str
    vocab_size: int

    @abstractmethod
    def encode(self, data: bytes) -> np.ndarray:
        """Token numbers of the data.  # uint32 [num_tokens]"""

    @abstractmethod
    def decode(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of all tokens, joined."""

    def decode_text(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text; bytes that are no UTF-8 show as U+FFFD."""
        return self.decode(tokens).decode("utf-8", errors="replace")

    @abstractmethod
    def to_json(self) -> str:
        """What identifies the tokenizer, and the contents of its file."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer into a folder, for `load_tokenizer`."""
        (folder / TOKENIZER_FILE).write_text(self.to_json(), encoding="utf-8")


class ByteTokenizer(Tokenizer):
    """One token a byte."""

    kind = "bytes"
    vocab_size = 256

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.uint32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        return bytes(np.asarray(tokens, np.uint8))

    def to_json(self) -> str:
        return json.dumps({"type": "bytes"})


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards in order (Radford et al.
    2019, "Language models are unsupervised multitask learners", byte-level BPE).
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(stand_ins)) for byte in range(256)]


_CHARACTERS = byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(_CHARACTERS)}
_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")  # what "surrogateescape" makes of bytes that are no UTF-8


def _load_library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise BadInputError(
            f"a BPE tokenizer needs the tokenizers library: pip install tokenizers ({error})"
        ) from error
    return tokenizers


class BpeTokenizer(Tokenizer):
    """A byte-level BPE, given as the text of a tokenizer.json.

    Whatever in the file would lose bytes (normalizer, prefix space, stripping, truncation, merge dropout) is turned off
    first. Bytes that are no UTF-8, which the library cannot be given, become the single-byte tokens of the vocabulary.
    Raises BadInputError when the text is no tokenizer, or none that keeps every byte.
    """

    kind = "bpe"

    def __init__(self, text: str, source: str = TOKENIZER_FILE) -> None:
        library = _load_library()
        try:
            description = json.loads(text)
            if not isinstance(description, dict) or "model" not in description:
                raise ValueError('no "model" in it')
            self._text = json.dumps(_lossless(description), ensure_ascii=False)
            self._library = library.Tokenizer.from_str(self._text)
        except Exception as error:  # the library raises bare Exception
            raise BadInputError(f"{source} is no tokenizer.json of the tokenizers library: {error}") from error
        vocabulary: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        missing = [byte for byte, character in enumerate(_CHARACTERS) if character not in vocabulary]
        if missing:
            raise BadInputError(
                f"{source} is no byte-level tokenizer: {len(missing)} of the 256 bytes have no token of their own "
                f"(the first is 0x{missing[0]:02X}), so text could be lost; use a byte-level BPE or --tokenizer bytes"
            )
        self.vocab_size = max(vocabulary.values()) + 1
        self._byte_tokens = np.array([vocabulary[c] for c in _CHARACTERS], np.uint32)
        added = {token.content: number for number, token in self._library.get_added_tokens_decoder().items()}
        self._bytes_of: list[bytes] = [b""] * self.vocab_size
        for token, number in vocabulary.items():
            mapped = token not in added and all(c in _BYTE_OF for c in token)
            self._bytes_of[number] = bytes(_BYTE_OF[c] for c in token) if mapped else token.encode()
        for probe in _PROBES:
            if self.decode(self.encode(probe)) != probe:
                raise BadInputError(f"{source} does not keep text as it is: {probe!r} comes back changed")

    @classmethod
    def train(cls, chunks: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
        """A BPE of at most `vocab_size` tokens (256 bytes and merges) learned from the data.

        Raises BadInputError for fewer than 256 tokens.
        """
        if vocab_size < 256:
            raise BadInputError(
                f"--vocab-size {vocab_size}: a byte-level BPE has at least 256 tokens, one for each byte"
            )
        library = _load_library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=_CHARACTERS, show_progress=False, special_tokens=[]
        )
        tokenizer.train_from_iterator((chunk.decode("utf-8", errors="ignore") for chunk in chunks), trainer)
        return cls(tokenizer.to_str(), "the trained tokenizer")

    def encode(self, data: bytes) -> np.ndarray:
        parts: list[np.ndarray] = []
        for piece in _split_utf8(data):
            if isinstance(piece, str):
                parts.append(np.array(self._library.encode(piece, add_special_tokens=False).ids, np.uint32))
            else:
                parts.append(self._byte_tokens[np.frombuffer(piece, np.uint8)])
        return np.concatenate(parts) if parts else np.zeros(0, np.uint32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> bytes:
        return b"".join(self._bytes_of[int(token)] for token in tokens)

    def to_json(self) -> str:
        return self._text


_PROBES = (
    b"Two words,  then\r\nlines\n\n\tand tabs \r \xe2\x80\xa8 end ",
    b" starts with a space; e\xcc\x81 \xef\xac\x81 \xc3\xa9 \xf0\x9f\x98\x80",
    bytes(range(256)),
)


def _lossless(node: Any) -> Any:
    """The description of a tokenizer without what would change the bytes."""
    if isinstance(node, list):
        return [_lossless(item) for item in node]
    if not isinstance(node, dict):
        return node
    lossy: dict[str, Any] = {
        "normalizer": None,
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "dropout": None,
    }
    lossy |= {"add_prefix_space": False, "lstrip": False, "rstrip": False}
    # A vocabulary is a dictionary too, and may hold any of these words as tokens.
    return {
        key: value if key in ("vocab", "merges") else lossy[key] if key in lossy else _lossless(value)
        for key, value in node.items()
    }


def _split_utf8(data: bytes) -> Iterator[str | bytes]:
    """The data as runs of valid text and the stray bytes between them, in order."""
    for number, part in enumerate(_STRAY_BYTES.split(data.decode("utf-8", errors="surrogateescape"))):
        if part:
            yield part.encode("utf-8", errors="surrogateescape") if number % 2 else part


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file: a tokenizer.json, or what `ByteTokenizer.save` wrote.

    Raises BadInputError for a missing file or one that is no lossless tokenizer.
    """
    try:
        text = read_whole(path, MAX_TOKENIZER_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is no tokenizer.json: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a device, a file too large, a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise BadInputError(f"cannot read the tokenizer {str(path)!r}: {reason}") from error
    if re.fullmatch(r'\s*\{\s*"type":\s*"bytes"\s*\}\s*', text):
        return ByteTokenizer()
    return BpeTokenizer(text, str(path))
