"""One library in a process of its own: `PYTHON worker.py LIBRARY`. Reads one JSON object a line from standard input and
answers each with one line:

    {"do": "hello", "driver": PATH?}       {"library", "version", "device", "driver", "on_driver"}
    {"do": "prepare", "work": NAME}        {"ok": true}, or {"unsupported": why}
    {"do": "run", "repeats": N, "lead": N} {"ms": [of each, device synchronised at its end], "cpu_ms"}; `lead` before
    {"do": "result", "file": PATH.npz}     {"ok": true}; what the last run computed is in the file
    {"do": "quit"}                         the process ends

Whatever goes wrong is answered by {"error": last line of the exception}. What a library prints goes to standard error.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import time
from typing import Any, Protocol

import numpy as np
from work import Unsupported, Work, work_named


class Job(Protocol):
    """One work, its operands on the device."""

    def run(self) -> None:
        """Do it once and wait until the device is done."""

    def results(self) -> dict[str, np.ndarray]:
        """Downloaded results."""


class Library(Protocol):
    """What a module `LIBRARY_peer` offers under the name `Library`: an open device."""

    version: str
    device: str

    def prepare(self, work: Work) -> Job:
        """Put the operands on the device. Raises Unsupported."""


def uses_driver(path: str) -> bool | None:
    """Whether this process has loaded the driver library at a path (or of a bare file name). None: cannot tell here."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            loaded = {line.split(maxsplit=5)[-1].strip() for line in lines if "/" in line}
    except OSError:
        return None
    if os.sep in path:
        return os.path.realpath(path) in {os.path.realpath(name) for name in loaded}
    return path in {os.path.basename(name) for name in loaded}


class Worker:
    """Answers messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.library: Library | None = None
        self.job: Job | None = None

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to one message. Raises whatever the library raises."""
        match message["do"]:
            case "hello":
                self.library = importlib.import_module(f"{self.name}_peer").Library()
                driver = message.get("driver")
                return {
                    "library": self.name,
                    "version": self.library.version,
                    "device": self.library.device,
                    "driver": getattr(self.library, "driver", ""),
                    "on_driver": uses_driver(driver) if driver else None,
                }
            case "prepare":
                assert self.library is not None
                self.job = None  # free the last one's memory first
                self.job = self.library.prepare(work_named(message["work"]))
                return {"ok": True}
            case "run":
                assert self.job is not None
                return self.timed(message.get("repeats", 1), message.get("lead", 0))
            case "result":
                assert self.job is not None
                results: dict[str, Any] = {**self.job.results()}
                np.savez(message["file"], **results)
                return {"ok": True}
        raise ValueError(f"unknown message {message['do']!r}")

    def timed(self, repeats: int, lead: int) -> dict[str, Any]:
        """Milliseconds of each run after `lead` others, and processor time a run over all threads of this process."""
        assert self.job is not None
        for _ in range(lead):
            self.job.run()
        ticks = [time.perf_counter()]
        processor = time.process_time()
        for _ in range(repeats):
            self.job.run()
            ticks.append(time.perf_counter())
        processor = time.process_time() - processor
        return {"ms": [(b - a) * 1e3 for a, b in itertools.pairwise(ticks)], "cpu_ms": processor / repeats * 1e3}


def last_line(error: BaseException) -> str:
    """Type and last line of text of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


def main() -> None:
    """Answer until told to quit or the parent is gone."""
    # Libraries print: the protocol keeps the real standard output, and descriptor 1 becomes standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        message = json.loads(line)
        if message["do"] == "quit":
            break
        try:
            reply = worker.answer(message)
        except Unsupported as reason:
            reply = {"unsupported": str(reason)}
        except Exception as error:
            reply = {"error": last_line(error)}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
    answers.flush()
    os._exit(0)  # some libraries crash while they are torn down


if __name__ == "__main__":
    main()
