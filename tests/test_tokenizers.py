"""Tokenizers keep every byte."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from vkfold.engine.errors import BadInputError
from vkfold.tools.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer, byte_characters, load_tokenizer

TEXT = ("Recompute what you can, keep what you must.\r\n" * 20 + "naïve café 😀 übergroß\t\n\n" * 10).encode()
CASES = {
    "all bytes": bytes(range(256)),
    "all bytes twice, reversed": bytes(range(256)) + bytes(range(255, -1, -1)),
    "byte order mark": b"\xef\xbb\xbfabc",
    "crlf": b"a\r\nb",
    "cr only": b"a\rb\r\r",
    "empty": b"",
    "blank lines": b"\n\n \n\t\n",
    "a lone 0x92": b"it\x92s",
    "emoji": "x😀y".encode(),
    "half an emoji": "😀".encode()[:2] + b" and " + "😀".encode()[2:],
    "combining and ligature": b"e\xcc\x81 \xef\xac\x81 \xc3\xa9",
    "leading space": b"  two",
    "null": b"\0\0a\0",
    "surrogate bytes": b"\xed\xa0\x80",
    "random": os.urandom(4096),
}


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train([TEXT], 300)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("bpe")


@pytest.mark.parametrize("data", CASES.values(), ids=CASES.keys())
def test_round_trip(tokenizer: Tokenizer, data: bytes) -> None:
    tokens = tokenizer.encode(data)
    assert tokenizer.decode(tokens) == data
    assert len(tokens) == 0 or int(tokens.max()) < tokenizer.vocab_size


def test_bytes_are_their_own_numbers() -> None:
    assert ByteTokenizer().encode(bytes(range(256))).tolist() == list(range(256))
    assert ByteTokenizer().vocab_size == 256


def test_training_merges(bpe: BpeTokenizer) -> None:
    assert 256 < bpe.vocab_size <= 300
    assert len(bpe.encode(TEXT)) < len(TEXT) / 2


def test_every_byte_has_its_own_token(bpe: BpeTokenizer) -> None:
    assert len(set(byte_characters())) == 256
    assert {bpe.decode([token]) for token in range(bpe.vocab_size)} >= {bytes([b]) for b in range(256)}


def test_text_is_made_of_joined_bytes(tokenizer: Tokenizer) -> None:
    """An emoji split over two tokens comes back whole."""
    data = "😀".encode()
    tokens = np.concatenate([tokenizer.encode(data[:2]), tokenizer.encode(data[2:])])
    assert len(tokens) >= 2
    assert tokenizer.decode_text(tokens) == "😀"
    assert tokenizer.decode_text(tokens[:1]) == "\ufffd"


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.kind == tokenizer.kind
    assert loaded.vocab_size == tokenizer.vocab_size
    assert np.array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))


def test_lossy_settings_of_a_given_file_are_turned_off(bpe: BpeTokenizer) -> None:
    description = json.loads(bpe.to_json())
    description["normalizer"] = {"type": "Lowercase"}
    description["pre_tokenizer"]["add_prefix_space"] = True
    description["model"]["dropout"] = 0.5
    description["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    description["added_tokens"] = [
        {
            "id": bpe.vocab_size,
            "content": "<|end|>",
            "single_word": False,
            "lstrip": True,
            "rstrip": True,
            "normalized": False,
            "special": True,
        }
    ]
    tokenizer = BpeTokenizer(json.dumps(description))
    data = b"UPPER lower  <|end|>  after"
    assert tokenizer.decode(tokenizer.encode(data)) == data
    assert bpe.vocab_size in tokenizer.encode(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", r"no tokenizer\.json"),
        ("[]", r"no tokenizer\.json"),
        ("{}", r"no tokenizer\.json"),
        ('{"model": {"type": "Nonsense"}}', r"no tokenizer\.json"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "no byte-level tokenizer"),
    ],
)
def test_what_is_no_tokenizer_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=message):
        load_tokenizer(path)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot read"):
        load_tokenizer(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(BadInputError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "binary.json")


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(BadInputError, match="at least 256"):
        BpeTokenizer.train([TEXT], 255)
