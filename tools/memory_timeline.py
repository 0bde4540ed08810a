"""--memory-timeline: what was live when during one step of a run, as numbers and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..engine.allocation_ledger import KINDS, AllocationLedger
from ..engine.compute_engine import ComputeEngine
from ..engine.errors import BadInputError
from ..engine.pooled_engine import PooledEngine
from ..nn.gpt_model import GPTModel
from ..nn.optimizers import Optimizer
from .memory_plot import draw
from .memory_watch import MemoryWatch


def check_timeline(path: str) -> None:
    """Raises BadInputError for a path that names no file, or where a folder has the name of one."""
    if Path(path).name in ("", "..") or "\0" in path:
        raise BadInputError(f"--memory-timeline {path!r} names no file: give a name such as memory.json")
    for file in _files(Path(path)):
        if file.is_dir():
            raise BadInputError(f"--memory-timeline {path}: {file} is a folder, it cannot be written")


def _files(path: Path) -> tuple[Path, Path]:
    """The two files that are written."""
    stem = path.with_suffix("") if path.suffix in (".json", ".png") else path
    return stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".png")


class MemoryTimeline:
    """Listens to an engine from before the model is made to the end of one step, then writes FILE.json and FILE.png.

    path: with or without one of these endings. Raises BadInputError for an engine without pools, a path that names no
    file, or a folder that cannot be written to.
    """

    def __init__(self, engine: ComputeEngine, path: Path) -> None:
        if not isinstance(engine, PooledEngine):
            raise BadInputError("--memory-timeline shows the pools of a Vulkan device: it needs --engine vulkan")
        check_timeline(str(path))
        self.numbers, self.picture = _files(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInputError(f"cannot write {self.numbers}: {error.strerror or error}") from error
        self.engine = engine
        self.ledger = AllocationLedger(engine)
        self.ledger.attach()
        self._watch: MemoryWatch | None = None

    def start(self, model: GPTModel, optimizer: Optimizer, num_micro_batches: int) -> None:
        """The step to show begins."""
        self._watch = MemoryWatch(self.ledger, model, optimizer)
        self._watch.start(num_micro_batches)

    def on_phase(self, phase: str, micro_batch: int) -> None:
        """A phase of the step was recorded."""
        if self._watch is not None:
            self._watch.on_phase(phase, micro_batch)

    def finish(self, title: str) -> None:
        """The step is over: stop listening and write both files. Raises BadInputError when they cannot be written."""
        assert self._watch is not None
        for block in self._watch.model.blocks:
            vars(block).pop("forward_recompute", None)  # the watch's
        self._watch = None
        self.ledger.detach()
        try:
            self.numbers.write_text(json.dumps(self.as_dict(), separators=(",", ":")), encoding="utf-8")
        except OSError as error:
            raise BadInputError(f"cannot write {self.numbers}: {error.strerror or error}") from error
        draw(self.ledger, self.picture, title)

    def as_dict(self) -> dict[str, Any]:
        """The step, op by op: its name and phase, and live bytes by kind once its outputs and temporaries exist.

        Bytes are those of all device pools, with the pools' rounding; host bytes stand apart.
        """
        ledger = self.ledger
        records = [record for record in ledger.ops if record.phase]
        events = [record.event for record in records]
        live = {kind: ledger.curve(kind=kind)[events].astype(int).tolist() for kind in KINDS}
        host = self.engine.host_pool.stats()
        return {
            "peak_bytes": ledger.peak_bytes,
            "peak_op": ledger.peak_op,
            "peak_phase": ledger.peak_phase,
            "peak_by_kind": ledger.by_kind(),
            "peak_reserved_bytes": ledger.peak_reserved_bytes,
            "host_peak_bytes": host.peak_live_bytes,
            "ops": [{"op": record.op, "phase": record.phase, "live_bytes": record.live_bytes} for record in records],
            "live_bytes_by_kind": {kind: values for kind, values in live.items() if any(values)},
        }
