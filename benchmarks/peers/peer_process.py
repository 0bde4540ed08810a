"""The parent's side of a worker: one process, one line a question, one line an answer, a timeout for each."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any


class PeerFailed(Exception):
    """The worker answered with an error, died, or took too long; the text says which."""


class PeerUnsupported(Exception):
    """The library cannot do the work; the text says what is missing."""


class PeerProcess:
    """A running worker. Close it: `with PeerProcess(command, environment) as peer`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=dict(environment), text=True
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdout is not None and self._process.stdin is not None
        self._input: IO[str] = self._process.stdin
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _listen(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer. Raises PeerFailed (the process is gone after a timeout or a crash) and PeerUnsupported."""
        try:
            self._input.write(json.dumps(message) + "\n")
            self._input.flush()
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self._process.kill()
            raise PeerFailed(f"no answer to {message['do']!r} within {timeout:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            code = self._process.wait()
            raise PeerFailed(f"ended with exit code {code}: {self._last_words()}")
        answer = json.loads(line)
        if "unsupported" in answer:
            raise PeerUnsupported(answer["unsupported"])
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def close(self) -> None:
        """Let it end, or end it."""
        if self.alive:
            try:
                self._input.write('{"do": "quit"}\n')
                self._input.close()
                self._process.wait(timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"
