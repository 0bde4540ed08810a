"""Rows of the comparison: one worker a library, rounds that go around all of them, medians."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from drivers import Driver
from environments import PEERS, InstallFailed, Peer, python_of
from peer_process import PeerFailed, PeerProcess, PeerUnsupported
from vkfold_peer import lm_reference
from work import LmStep, Work, error_of

WORKER = Path(__file__).resolve().parent / "worker.py"
SHORT_MS = 60.0  # a shorter run is repeated within a round until the round takes about this long
MAX_REPEATS = 20
LEAD_MS = 150.0  # of untimed runs before the timed ones of a round, where runs are shorter
LONG_MS = 3000.0  # a longer run is warmed up twice only
NO_DRIVER = "none (CPU)"
Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """rounds: around all libraries. seconds: of timed work for one library and work; past it no further round, but
    never fewer than three. timeout: seconds for any one answer."""

    rounds: int = 9
    seconds: float = 30.0
    timeout: float = 600.0


@dataclass
class Contender:
    """A library in the comparison. failed: why it is out for all works. rounds: {round: mean ms of its runs}.

    lead: untimed runs before them. fastest: ms of the fastest run. cpu_ms: processor time of a run in each round.
    """

    peer: Peer
    process: PeerProcess | None = None
    version: str = ""
    device: str = ""
    failed: str = ""
    repeats: int = 1
    lead: int = 0
    out: str = ""
    rounds: dict[int, float] = field(default_factory=dict)
    fastest: float = math.inf
    cpu_ms: list[float] = field(default_factory=list)

    @property
    def spent(self) -> float:
        """Seconds of timed work."""
        return sum(self.rounds.values()) * self.repeats / 1e3


class Comparison:
    """All libraries on one driver. `run(works)` yields a row for each work and library."""

    def __init__(self, names: Sequence[str], driver: Driver, limits: Limits, say: Callable[[str], None]) -> None:
        self.driver, self.limits, self.say = driver, limits, say
        self.contenders = [Contender(PEERS[name]) for name in names]
        self.driver_text = driver.icd.stem

    @contextmanager
    def running(self) -> Iterator[None]:
        """Workers are ended however the block is left."""
        with ExitStack() as stack:
            stack.callback(self._end)
            yield

    def _end(self) -> None:
        for contender in self.contenders:
            if contender.process is not None:
                contender.process.close()

    def run(self, works: Sequence[Work]) -> Iterator[Row]:
        """Rows, a work at a time; every library has one for every work."""
        with self.running():
            for contender in self.contenders:
                self._open(contender)
            for work in works:
                self.say(f"{work.name} ...")
                yield from self._compare(work)

    # -- one library -------------------------------------------------------------------------------------------------
    def _open(self, contender: Contender) -> None:
        """Install and start; what goes wrong becomes `failed`."""
        peer = contender.peer
        try:
            self.say(f"{peer.name}: environment ...")
            python = python_of(peer)
            environment = self.driver.environment(os.environ)
            contender.process = PeerProcess([python, str(WORKER), peer.name], environment)
            question = {"do": "hello", "driver": self.driver.library if peer.vulkan else None}
            answer = contender.process.ask(question, self.limits.timeout)
        except (InstallFailed, PeerFailed, PeerUnsupported) as error:
            contender.failed = str(error)
            self.say(f"{peer.name}: {error}")
            return
        contender.version, contender.device = answer["version"], answer["device"]
        if answer["driver"]:
            self.driver_text = answer["driver"]
        if answer["on_driver"] is False:
            contender.failed = f"did not load the driver {self.driver.library}"
        self.say(f"{peer.name} {contender.version} on {contender.device} {contender.failed}".rstrip())

    def _ask(self, contender: Contender, **message: Any) -> dict[str, Any]:
        """Ask about the work at hand; a failure puts the library out of it, and {} comes back."""
        assert contender.process is not None
        try:
            return contender.process.ask(message, self.limits.timeout)
        except PeerUnsupported as error:
            contender.out = f"unsupported: {error}"
        except PeerFailed as error:
            contender.out = str(error)
        return {}

    # -- one work ----------------------------------------------------------------------------------------------------
    def _compare(self, work: Work) -> Iterator[Row]:
        for contender in self.contenders:
            contender.out, contender.rounds = contender.failed, {}
            contender.fastest, contender.cpu_ms = math.inf, []
            if not contender.failed and not (contender.process and contender.process.alive):
                self._open(contender)
                contender.out = contender.failed
            if not contender.out and self._ask(contender, do="prepare", work=work.name):
                self._warm_up(contender)
        for number in range(self.limits.rounds):
            for contender in self._order(number):
                self._round(contender, number)
        reference = lm_reference(work) if isinstance(work, LmStep) else work.reference()
        for contender in self.contenders:
            error = float("inf") if contender.out else self._error(contender, reference)
            yield self._row(work, contender, error)

    def _warm_up(self, contender: Contender) -> None:
        """Compile and cache; then choose how often a round repeats a short run."""
        last = 0.0
        for number in range(3):
            if number == 2 and last > LONG_MS:
                break
            answer = self._ask(contender, do="run")
            if contender.out:
                return
            last = answer["ms"][0]
        contender.repeats = int(min(MAX_REPEATS, max(1, SHORT_MS // max(last, 1e-3))))
        contender.lead = int(min(10 * MAX_REPEATS, LEAD_MS // max(last, 1e-3)))

    def _order(self, number: int) -> list[Contender]:
        """Everybody, beginning with another one each round."""
        first = number % len(self.contenders)
        return self.contenders[first:] + self.contenders[:first]

    def _round(self, contender: Contender, number: int) -> None:
        if contender.out or (number >= 3 and contender.spent > self.limits.seconds):
            return
        answer = self._ask(contender, do="run", repeats=contender.repeats, lead=contender.lead)
        if not contender.out:
            # The mean, so that what interrupts short runs and long ones weighs alike.
            contender.rounds[number] = statistics.fmean(answer["ms"])
            contender.fastest = min(contender.fastest, *answer["ms"])
            contender.cpu_ms.append(answer["cpu_ms"])

    def _error(self, contender: Contender, reference: dict[str, np.ndarray]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.npz"
            if not self._ask(contender, do="result", file=str(file)):
                return float("inf")
            with np.load(file) as results:
                return error_of(dict(results), reference)

    def _row(self, work: Work, contender: Contender, error: float) -> Row:
        peer = contender.peer
        row: Row = {
            "work": work.name,
            "library": peer.name,
            "version": contender.version,
            "driver": self.driver_text if peer.vulkan else NO_DRIVER,
            "device": contender.device,
        }
        if contender.out:
            return {**row, "ms": None, "failed": contender.out}
        times = list(contender.rounds.values())
        quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
        return {
            **row,
            "ms": statistics.median(times),
            "best": contender.fastest,
            "cpu_ms": statistics.median(contender.cpu_ms),
            "spread": quarters[2] - quarters[0],
            "error": error if math.isfinite(error) else None,
            "rounds": len(times),
            "ratio": self._ratio(contender),
        }

    def _ratio(self, contender: Contender) -> float | None:
        """Median over rounds of its time / vkfold's in the same round."""
        ours = next((c for c in self.contenders if c.peer.name == "vkfold" and not c.out), None)
        shared = contender.rounds.keys() & ours.rounds.keys() if ours else set()
        if not ours or not shared:
            return None
        return statistics.median(contender.rounds[n] / ours.rounds[n] for n in shared)
