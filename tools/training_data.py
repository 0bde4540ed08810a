"""From the options of a run to windows: tokenizer, tokens, training part, held-out part."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..engine.errors import BadInputError
from .run_config import RunConfig
from .run_state import RunState
from .saves import Save
from .text_data import (
    STDIN,
    TOKENS_FILE,
    TokenFile,
    Windows,
    find_files,
    open_token_file,
    read_chunks,
    split_held_out,
    write_token_file,
)
from .tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer


@dataclass
class TrainingData:
    """What a run reads: training windows, held-out windows (may be none), and how they became tokens."""

    tokenizer: Tokenizer
    train: Windows
    held_out: Windows
    fingerprint: str
    num_bytes: int

    def held_out_bytes_per_token(self) -> float:
        """Bytes that a held-out target stands for, on average: nats a token divided by it are nats a byte."""
        targets = self.held_out.tokens[1 : 1 + len(self.held_out) * self.held_out.seq_len]
        return len(self.tokenizer.decode(targets)) / len(targets)


def new_data(config: RunConfig, folder: Path) -> TrainingData:
    """Read and encode the input; the tokens go into `folder`. Raises BadInputError for input that is no use."""
    files = find_files(config.inputs, config.glob)
    if config.tokenizer == "bpe":
        # Standard input comes once, and is needed twice.
        chunks = list(read_chunks(files)) if str(files[0]) == STDIN else None
        tokenizer: Tokenizer = BpeTokenizer.train(read_chunks(files) if chunks is None else chunks, config.vocab_size)
        token_file = write_token_file(folder, read_chunks(files) if chunks is None else chunks, tokenizer)
    else:
        tokenizer = ByteTokenizer() if config.tokenizer == "bytes" else load_tokenizer(Path(config.tokenizer))
        token_file = write_token_file(folder, read_chunks(files), tokenizer)
    if not len(token_file.tokens):
        raise BadInputError(f"the input is empty: {', '.join(config.inputs)}")
    return _split(config, tokenizer, token_file)


def resumed_data(config: RunConfig, save: Save, folder: Path, *, inputs_given: bool) -> TrainingData:
    """The data of a saved run: from its folder, or read again when inputs are given now.

    folder: where tokens of inputs given now go. Raises BadInputError when it is not the text the run was made with.
    """
    tokenizer = save.tokenizer()
    if inputs_given:
        token_file = write_token_file(folder, read_chunks(find_files(config.inputs, config.glob)), tokenizer)
    else:
        token_file = open_token_file(save.folder.parent)
    state = RunState.of(save)
    if token_file.fingerprint != state.fingerprint:
        raise BadInputError(f"the save {save.folder} was made with another text: resume it with its own input")
    data = _split(config, tokenizer, token_file)
    if state.num_windows != len(data.train):
        raise BadInputError(
            f"the save {save.folder} is damaged: state.json: num_windows is {state.num_windows}, and the text has "
            f"{len(data.train)}"
        )
    return data


def check_windows(config: RunConfig, given: Collection[str], data: TrainingData, *, fresh: bool) -> list[str]:
    """Warnings about a text that is short for the options. fresh: the run is a new one.

    Raises BadInputError when it is an option that leaves too few windows, or asks for what there is not.
    """
    warnings = []
    batch, stride, text = config.batch_size, config.stride or config.seq_len, data.train.tokens
    num_windows = len(data.train)
    if num_windows < batch:
        few = (
            f"{num_windows} windows of {config.seq_len} tokens to train on, fewer than the {batch} of one --batch-size"
        )
        whole = Windows(text, config.seq_len, min(stride, config.seq_len))
        with_held_out = len(text) + len(data.held_out.tokens)
        if fresh and len(whole) >= batch:
            most = (len(text) - config.seq_len - 1) // (batch - 1)
            raise BadInputError(f"--stride {stride} leaves {few}: a --stride of at most {most} gives that many")
        if fresh and config.held_out and (with_held_out - config.seq_len - 1) // stride + 1 >= batch:
            raise BadInputError(f"--held-out {config.held_out:g} leaves {few}: hold out less")
        warnings.append(
            f"only {few}: each batch repeats text; give more text, a smaller --seq-len or --batch-size {num_windows}"
        )
    num_held_out = len(data.held_out)
    if config.eval_interval and not num_held_out and (fresh or "eval_interval" in given):
        why = "--held-out is 0" if config.held_out == 0 else "the text is too short to hold a window out"
        raise BadInputError(f"--eval-interval {config.eval_interval}: there is no held-out text to evaluate ({why})")
    if 0 < num_held_out < batch:
        warnings.append(
            f"only {num_held_out} windows of {config.seq_len} tokens are held out: a loss over so little text is rough"
        )
    if fresh and "vocab_size" in given and config.vocab_size != data.tokenizer.vocab_size:
        if config.tokenizer != "bpe":
            raise BadInputError(
                f"--vocab-size {config.vocab_size} is of a BPE trained on the input (--tokenizer bpe); --tokenizer "
                f"{config.tokenizer} has {data.tokenizer.vocab_size} tokens: leave --vocab-size out"
            )
        warnings.append(
            f"the input has pairs for a BPE of {data.tokenizer.vocab_size} tokens only, not --vocab-size "
            f"{config.vocab_size}"
        )
    return warnings


def copy_tokens(source: Path, target: Path) -> None:
    """Put the tokens of one folder into another, for a run that goes on there. Raises BadInputError if it cannot."""
    try:
        for suffix in (".json", ".bin"):
            name = Path(TOKENS_FILE).with_suffix(suffix).name
            shutil.copyfile(source / name, target / f"{name}.tmp")
            (target / f"{name}.tmp").replace(target / name)
    except OSError as error:
        raise BadInputError(f"cannot copy the tokens into {target}: {error.strerror or error}") from error


def _split(config: RunConfig, tokenizer: Tokenizer, token_file: TokenFile) -> TrainingData:
    tokens: np.ndarray = token_file.tokens
    num_train = split_held_out(len(tokens), config.seq_len, config.held_out)
    train = Windows(tokens[:num_train], config.seq_len, config.stride or config.seq_len)
    held_out = Windows(tokens[num_train:], config.seq_len, config.seq_len)
    return TrainingData(tokenizer, train, held_out, token_file.fingerprint, token_file.num_bytes)
