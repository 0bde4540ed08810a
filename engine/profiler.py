"""Device time of every op, by timestamps written before and after its commands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .errors import BadInputError
from .fusion import Call
from .launcher import OpLauncher
from .variant_families import reasons_of
from .vulkan_api import QueryPool

if TYPE_CHECKING:
    from .vulkan_engine import VulkanEngine

Reasons: TypeAlias = Mapping[str, Mapping[str, str]]
_QUERIES = 4096  # timestamps a query pool: a step of more ops takes several


class Scope(NamedTuple):
    """Where an op was called: phase ("forward", "backward", "optimizer", "") and layer ("blocks.3", "head", "")."""

    phase: str = ""
    layer: str = ""


class OpSample(NamedTuple):
    """One op as it ran. start, seconds: device time; parts: the calls that fusion made one.

    flops, bytes_moved: of the op's cost rule, every tensor read and written once. kernels: name -> dispatches. reasons:
    of those with variants, name -> call, as the log has it -> variant and why it was chosen.
    """

    op: str
    parts: tuple[str, ...]
    scope: Scope
    flops: int
    bytes_moved: int
    start: float
    seconds: float
    kernels: dict[str, int]
    reasons: Reasons = MappingProxyType({})


class OpProfiler:
    """Measures all ops of an engine between `attach` and `detach`; `take` gives what ran since the last time.

    `scope` is what ops called from now on belong to: whoever runs the model sets it. Values and their bits do not
    change; nothing is submitted early. Raises BadInputError where the device's queue writes no timestamps.
    """

    def __init__(self, engine: VulkanEngine) -> None:
        if not engine.device.physical.timestamp_bits:
            raise BadInputError(f"{engine.name} writes no timestamps on its compute queue: it cannot be profiled")
        self.engine = engine
        self.scope = Scope()
        self._pools: list[QueryPool] = []
        self._calls: list[tuple[Call, dict[str, int], Reasons]] = []
        self._kernels: dict[str, int] = {}
        self._reasons: dict[Any, Reasons] = {}  # by kind of call

    def attach(self) -> None:
        """Start measuring. Raises BadInputError when the engine has a profiler already."""
        if self.engine.profiler is not None:
            raise BadInputError("this engine is being profiled already: detach the other profiler first")
        self.engine.end_batch()
        self.engine.profiler = self
        self.engine.recorder.trace = self._dispatched

    def detach(self) -> None:
        """Stop measuring, and give the query pools back. What was not taken is lost."""
        self.engine.end_batch()
        self.engine.profiler = None
        self.engine.recorder.trace = None
        self.engine.recorder.finish()
        for pool in self._pools:
            pool.destroy()
        self._pools.clear()
        self._calls.clear()
        self._reasons.clear()

    def begin(self, call: Call) -> None:
        """An op's commands follow. The first of a kind is rehearsed before, to hear what is chosen for it."""
        kind = OpLauncher.kind_of(call)
        if (reasons := self._reasons.get(kind)) is None:
            reasons = self._reasons[kind] = reasons_of(self.engine.recorder, call)
        index = 2 * len(self._calls)
        if index // _QUERIES == len(self._pools):
            self._pools.append(self.engine.device.create_query_pool(_QUERIES))
        if index % _QUERIES == 0:
            self.engine.recorder.reset_queries(self._pools[index // _QUERIES])
        self._kernels = {}
        self._calls.append((call, self._kernels, reasons))
        self.engine.recorder.write_timestamp(self._pools[index // _QUERIES], index % _QUERIES)

    def end(self) -> None:
        """The op's commands are recorded."""
        index = 2 * len(self._calls) - 1
        self.engine.recorder.write_timestamp(self._pools[index // _QUERIES], index % _QUERIES)

    def take(self) -> list[OpSample]:
        """What ran, in order. Waits for it."""
        self.engine.end_batch()
        times: list[float] = []
        for pool in self._pools:
            left = 2 * len(self._calls) - len(times)
            if left > 0:
                times += pool.seconds(min(left, _QUERIES))
        samples = []
        for i, (call, kernels, planned) in enumerate(self._calls):
            start, stop = times[2 * i : 2 * i + 2]
            cost = call.cost
            moved = cost.bytes_moved
            scope = call.scope or Scope()
            reasons = {name: planned[name] for name in kernels if name in planned}
            numbers = cost.flops, moved, start, stop - start
            samples.append(OpSample(call.op.name, call.parts, scope, *numbers, kernels, reasons))
        self._calls.clear()
        return samples

    def _dispatched(self, kernel: str) -> None:
        self._kernels[kernel] = self._kernels.get(kernel, 0) + 1
