"""What a person sees while training (a live line, or plain lines), and the JSON-lines log."""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..engine.errors import BadInputError

_LONGEST_ETA = 99 * 86400  # seconds shown at most


class Progress:
    """Shows loss, learning rate, gradient norm, tokens/s and time left: live on a terminal, else lines."""

    def __init__(self, first_step: int, num_steps: int, interval: int) -> None:
        self._first = first_step
        self._total = num_steps
        self._interval = interval
        self._start = time.monotonic()
        self._bar: Any = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            numbers, values = TextColumn("step {task.completed}/{task.total}"), TextColumn("{task.description}")
            self._bar = RichProgress(numbers, BarColumn(8), values, transient=True)
            self._task = self._bar.add_task("", total=num_steps, completed=first_step)
            self._bar.start()

    def step(self, step: int, loss: float, learning_rate: float, grad_norm: float, tokens_per_s: float) -> None:
        """Step number `step` (from 1) is done."""
        left = (time.monotonic() - self._start) / (step - self._first) * (self._total - step)
        text = f"loss {loss:.4f}  lr {learning_rate:.2e}  grad {grad_norm:.3f}  {tokens_per_s:,.0f} tokens/s"
        text += f"  ETA {timedelta(seconds=round(min(left, _LONGEST_ETA)))}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self._interval == 0 or step in (self._first + 1, self._total):
            self.say(f"step {step}/{self._total}  {text}")

    def say(self, text: str) -> None:
        """A line of text above the live one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Take the live line away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class LogError(BadInputError):
    """The log cannot be written."""


def check_log(path: Path, *, fresh: bool) -> None:
    """Make the log's folder and try to write into the log.

    fresh: the run is a new one, whose log replaces what is there. Raises BadInputError when that fails, or when
    the file is there and is no log.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh and path.is_file() and not _is_log(path):
            raise BadInputError(f"{path} exists and is no log of a run: choose another --log-file")
        with path.open("a"):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(
            f"cannot write the log {path}: {getattr(error, 'strerror', None) or error}; choose another --log-file"
        ) from error


def _is_log(path: Path) -> bool:
    """Whether a file is empty or its first line is one of ours."""
    with path.open("rb") as file:
        first = file.readline(2**20)
    if not first:
        return True
    try:
        return "step" in json.loads(first)
    except (ValueError, TypeError, RecursionError):
        return False


class JsonLog:
    """One JSON object a line. A resumed run keeps the lines up to the step it goes on from, and drops later ones.

    What is no regular file, such as a pipe, is only written to. Raises LogError when the file cannot be written.
    """

    def __init__(self, path: str | None, first_step: int) -> None:
        self._file = None
        if path is None:
            return
        try:
            target = Path(path).resolve()  # a link stays one
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_file() or not target.exists():  # /dev/stdout must not be replaced by a file
                kept = _lines_until(target, first_step) if first_step else []
                temporary = target.with_name(target.name + ".tmp")
                temporary.write_text("".join(kept), encoding="utf-8")
                temporary.replace(target)
            self._file = target.open("a", encoding="utf-8")
        except OSError as error:
            raise LogError(f"cannot write the log {path}: {error.strerror or error}") from error

    def write(self, **values: Any) -> None:
        """Add a line; NaN and infinity, which are no JSON numbers, become texts. Raises LogError if it cannot."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_plain(values), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise LogError(f"cannot write the log {self._file.name}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # the last write has told of a full disk
                self._file.close()
            self._file = None


def _lines_until(path: Path, step: int) -> list[str]:
    kept = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # cut off when the run was killed
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
