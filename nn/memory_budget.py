"""The cheapest recomputation that fits a memory budget, found by planning."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..engine.errors import BadInputError
from ..engine.plan_engine import PlanEngine
from .gpt_model import GPTModel

GROUPS = ("norm", "attention", "qkv", "mlp")  # "activation" saves nothing: activation outputs are never kept
MAX_STEPS = 16  # numbers of recomputing blocks that are tried, at most


class MemoryMode(NamedTuple):
    """What is recomputed: segments of checkpoint_every blocks (0: none), and these groups in the first num_blocks
    blocks (None: in all)."""

    checkpoint_every: int = 0
    groups: tuple[str, ...] = ()
    num_blocks: int | None = None

    def apply(self, model: GPTModel) -> None:
        """Set the model's modes of recomputation to this one."""
        model.set_checkpoint_every(self.checkpoint_every)
        model.set_recompute(self.groups, self.num_blocks)

    def __str__(self) -> str:
        parts = [f"--checkpoint-every {self.checkpoint_every}"] if self.checkpoint_every else []
        parts += [f"--recompute {','.join(self.groups)}"] if self.groups else []
        parts += [f"--recompute-blocks {self.num_blocks}"] if self.groups and self.num_blocks is not None else []
        return " ".join(parts) or "no recomputation"


class PlannedMode(NamedTuple):
    """A mode with the FLOPs of a step and the most bytes live at once on the device."""

    mode: MemoryMode
    flops: int
    peak_bytes: int


def cheapest_mode(model: GPTModel, step: Callable[[], object], budget_bytes: int) -> PlannedMode:
    """The mode with the fewest planned FLOPs whose planned peak is at most budget_bytes; then the smallest peak.

    model: on a PlanEngine, its other settings (offload) as they will be. step: runs one optimizer step of it.
    Tried are: segments of every useful length with any groups; without segments any groups in the first k blocks. All
    blocks are alike, so that FLOPs are linear in k: modes are gone through from the cheapest on, and only peaks are
    looked for. The model is left in the mode returned.

    Raises BadInputError that states the smallest peak that can be reached when no mode fits.
    """
    plans = _Plans(model, step)
    num_layers = model.config.num_layers
    smallest = plans.of(MemoryMode())
    if smallest.peak_bytes <= budget_bytes:
        return smallest
    candidates = sorted((plans.flops_of(mode), i, mode) for i, mode in enumerate(_modes(num_layers)))
    for flops, alike in itertools.groupby(candidates, key=lambda candidate: candidate[0]):
        found = min((plans.of(mode) for _, _, mode in alike), key=lambda plan: plan.peak_bytes)
        assert found.flops == flops
        if found.peak_bytes <= budget_bytes:
            found.mode.apply(model)
            return found
        smallest = min(smallest, found, key=lambda plan: plan.peak_bytes)
    raise BadInputError(
        f"no recomputation fits {budget_bytes:,} bytes: the smallest peak that can be reached is "
        f"{smallest.peak_bytes:,} bytes, with {smallest.mode}"
    )


def _modes(num_layers: int) -> Iterator[MemoryMode]:
    subsets = [chosen for n in range(len(GROUPS) + 1) for chosen in itertools.combinations(GROUPS, n)]
    steps = min(num_layers, MAX_STEPS)
    counts = [-(-num_layers * i // steps) for i in range(1, steps + 1)]
    # Of the lengths that make equally many segments the shortest, whose segments are the most even.
    lengths = {-(-num_layers // every): every for every in range(num_layers, 0, -1)}
    for groups in subsets[1:]:
        for count in counts:
            yield MemoryMode(0, groups, count if count < num_layers else None)
    for every in lengths.values():
        for groups in subsets:
            yield MemoryMode(every, groups)


class _Plans:
    """Planned steps of one model, each mode once."""

    def __init__(self, model: GPTModel, step: Callable[[], object]) -> None:
        if not isinstance(model.engine, PlanEngine):
            raise TypeError("a memory budget is planned with a model on a PlanEngine")
        self.model = model
        self.engine = model.engine
        self.step = step
        self._known: dict[MemoryMode, PlannedMode] = {}

    def of(self, mode: MemoryMode) -> PlannedMode:
        """Plan one mode."""
        if mode not in self._known:
            engine = self.engine
            mode.apply(self.model)
            engine.reset_peak()
            before = engine.cost.flops
            self.step()
            peak = sum(pool.stats().peak_live_bytes for pool in engine.pools.values())
            self._known[mode] = PlannedMode(mode, engine.cost.flops - before, peak)
        return self._known[mode]

    def flops_of(self, mode: MemoryMode) -> int:
        """FLOPs of a mode, worked out from those of all blocks where it names only some."""
        if mode.num_blocks is None:
            return self.of(mode).flops
        none, every = self.of(MemoryMode()).flops, self.of(mode._replace(num_blocks=None)).flops
        return none + (every - none) * mode.num_blocks // self.model.config.num_layers
