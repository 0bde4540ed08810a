"""Input files, tokens on disk, windows and their order."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vkfold.engine.errors import BadInputError
from vkfold.tools.text_data import (
    ShuffledWindows,
    Windows,
    find_files,
    open_token_file,
    read_chunks,
    split_held_out,
    write_token_file,
)
from vkfold.tools.tokenizers import BpeTokenizer, ByteTokenizer


# -- files -----------------------------------------------------------------------------------------------------------
def test_folder_and_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", "skip.md"):
        (tmp_path / name).write_text(name)
    found = find_files([str(tmp_path)], "*.txt")
    assert [p.relative_to(tmp_path).as_posix() for p in found] == ["a.txt", "b.txt", "sub/c.txt"]
    assert find_files([str(tmp_path / "skip.md"), str(tmp_path)], "a*") == [tmp_path / "skip.md", tmp_path / "a.txt"]
    assert b"".join(read_chunks(found)) == b"a.txtb.txtsub/c.txt"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [], "no input"),
        (lambda folder: [str(folder / "absent.txt")], "does not exist"),
        (lambda folder: [str(folder)], r"matches '\*\.txt'"),
        (lambda folder: [str(folder / "empty.log")], "is empty"),
        (lambda folder: ["-", "more.txt"], "standard input"),
    ],
)
def test_bad_inputs(tmp_path: Path, make: object, message: str) -> None:
    (tmp_path / "empty.log").touch()
    with pytest.raises(BadInputError, match=message):
        find_files(make(tmp_path), "*.txt")  # type: ignore[operator]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"one\ntwo")))
    assert b"".join(read_chunks(find_files(["-"], "*.txt"))) == b"one\ntwo"


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 5, 64, 1000])
def test_chunks_join_to_the_file_and_split_no_character(tmp_path: Path, chunk_bytes: int) -> None:
    data = ("äöü😀\n" * 7 + "😀" * 30).encode() + b"\x80\x80\x80\x80\x80\xff"
    (tmp_path / "f").write_bytes(data)
    chunks = list(read_chunks([tmp_path / "f"], chunk_bytes))
    assert b"".join(chunks) == data
    assert all(chunks)
    if chunk_bytes >= 5:
        for chunk in chunks[: len(chunks) // 2]:
            chunk.decode()  # raises where a character was split


# -- tokens ----------------------------------------------------------------------------------------------------------
def test_token_file_round_trip(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3
    written = write_token_file(tmp_path / "run", [data[:100], data[100:]], ByteTokenizer())
    read = open_token_file(tmp_path / "run")
    assert read.tokens.dtype == np.uint16
    assert isinstance(read.tokens, np.memmap)
    assert ByteTokenizer().decode(read.tokens) == data
    assert read.fingerprint == written.fingerprint
    assert read.num_bytes == len(data)
    other = write_token_file(tmp_path / "other", [data[1:]], ByteTokenizer())
    assert other.fingerprint != written.fingerprint


def test_large_vocabularies_get_four_bytes(tmp_path: Path) -> None:
    tokenizer = BpeTokenizer.train([b"abc abc abc"], 260)
    tokenizer.vocab_size = 2**16 + 1
    assert write_token_file(tmp_path, [b"abc"], tokenizer).tokens.dtype == np.uint32


def test_incomplete_token_file_is_refused(tmp_path: Path) -> None:
    path = write_token_file(tmp_path, [b"some text"], ByteTokenizer()).path
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BadInputError, match="no complete tokens"):
        open_token_file(tmp_path)
    with pytest.raises(BadInputError, match="no complete tokens"):
        open_token_file(tmp_path / "absent")


# -- windows ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stride", [1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("num_tokens", [9, 10, 16, 17, 18, 100])
def test_number_of_windows(num_tokens: int, stride: int) -> None:
    seq_len = 8
    windows = Windows(np.arange(num_tokens, dtype=np.uint16), seq_len, stride)
    assert len(windows) == 1 + (num_tokens - seq_len - 1) // stride
    inputs, targets = windows.batch(np.arange(len(windows)))
    assert inputs.dtype == targets.dtype == np.int32
    assert inputs.shape == targets.shape == (len(windows), seq_len)
    assert np.array_equal(inputs + 1, targets)
    assert np.array_equal(inputs[:, 0], np.arange(len(windows)) * stride)
    last_start = len(windows) * stride  # one more would not fit
    assert last_start + seq_len + 1 > num_tokens


def test_batches_cover_all_windows_once() -> None:
    windows = Windows(np.arange(60, dtype=np.uint16), 8, 8)
    assert len(windows) == 7
    batches = list(windows.batches(3))
    assert [inputs.shape for inputs, _ in batches] == [(3, 8)] * 3
    targets = np.concatenate([targets for _, targets in batches])
    assert np.array_equal(targets[targets != -100], np.arange(1, 57))
    assert (targets[7:] == -100).all()


def test_shorter_than_a_window() -> None:
    assert len(Windows(np.zeros(8, np.uint16), 8, 1)) == 0
    with pytest.raises(BadInputError, match="needs 9"):
        split_held_out(8, 8, None)
    assert split_held_out(9, 8, None) == 9  # one window, and none held out


def test_held_out_part() -> None:
    assert split_held_out(1000, 8, None) == 900
    assert split_held_out(1000, 8, 0.25) == 750
    assert split_held_out(1000, 8, 0.0) == 1000
    assert split_held_out(80, 8, None) == 80  # a tenth is no window
    assert split_held_out(90, 8, None) == 81
    for fraction in (0.05, 0.95):
        with pytest.raises(BadInputError, match="held-out"):
            split_held_out(100, 8, fraction)


# -- order -----------------------------------------------------------------------------------------------------------
def test_every_epoch_is_a_permutation_of_its_own() -> None:
    stream = ShuffledWindows(10, seed=5)
    first, second = stream.draw(10), stream.draw(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert list(first) != list(second)
    assert (stream.epoch, stream.index) == (2, 0)
    assert list(ShuffledWindows(10, seed=5).draw(20)) == [*first, *second]
    assert list(ShuffledWindows(10, seed=6).draw(10)) != list(first)


@pytest.mark.parametrize("done", [0, 1, 6, 7, 8, 13, 20])
def test_cursor_resumes_exactly(done: int) -> None:
    straight = ShuffledWindows(7, seed=1)
    expected = straight.draw(done + 30)[done:]
    stream = ShuffledWindows(7, seed=1)
    stream.draw(done)
    resumed = ShuffledWindows(7, seed=1, epoch=stream.epoch, index=stream.index)
    assert np.array_equal(resumed.draw(30), expected)


def test_order_is_the_same_everywhere() -> None:
    """Pinned: another order would break the resuming of existing saves."""
    assert ShuffledWindows(8, seed=0).draw(8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
