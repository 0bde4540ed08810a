"""A planned step whose calls are joined as an engine joins them: the kernels that a step really asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..engine.compute_engine import Rule
from ..engine.fusion import Call, Fusion, Range
from ..engine.fusion_apart import Apart
from ..engine.fusion_rules import rules
from ..engine.op import Op
from ..engine.plan_engine import PlanEngine
from ..engine.tensor import Tensor
from ..memory_pool import PoolRange

_SPACING = 2**44  # between blocks: more than any has


class _Hearer:
    """Stands where fusion launches calls, and passes them on: every kernel can be compiled, and no launch fails."""

    def __init__(self, hear: Callable[[Call], None]) -> None:
        self.recorder: Any = SimpleNamespace(num_commands=0)
        self.launch_call = hear

    def can_launch(self, call: Call) -> bool:
        """Always."""
        return True

    def refuse(self, call: Call, error: Exception) -> None:
        """Never happens, nor do the others below."""

    def give_up(self, calls: Sequence[Call], error: BaseException) -> None:
        """See `refuse`."""

    def take_apart(self, call: Call, held_back: Sequence[Call], never_made: Sequence[Range]) -> Apart:
        """See `refuse`."""
        return Apart([call], [], list(never_made))


class FusedPlan(PlanEngine):
    """Calls `hear` with every call, joined where an engine would join it while it records. CPU devices' rules."""

    def __init__(self, hear: Callable[[Call], None]) -> None:
        self._bases: dict[Any, int] = {}
        super().__init__()
        self.fusion = Fusion(_Hearer(hear), rules())

    def _address(self, range_: PoolRange) -> int:
        return self._bases.setdefault(range_.block, (len(self._bases) + 1) * _SPACING) + range_.offset

    def _launch(self, op: Op, rule: Rule, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any) -> None:
        super()._launch(op, rule, inputs, made, settings)
        self.fusion.add(Call(op, rule.cost, inputs, made, len(rule.outputs), settings, identity=rule))

    def _write(self, tensor: Tensor, data: np.ndarray) -> None:
        self.fusion.drain()

    def download(self, tensor: Tensor) -> np.ndarray:
        """Zeros of the tensor's shape."""
        self.fusion.drain()
        return super().download(tensor)

    def flush_batch(self) -> None:
        """Launches what is held back."""
        self.fusion.drain()

    def end_batch(self) -> None:
        """Ends the batch."""
        self.fusion.drain()
        super().end_batch()
