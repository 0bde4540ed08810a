"""The rule of norm + matmul: a norm's output that only one matmul reads is made as that matmul reads it, never stored.

It is a late rule: that nobody holds the output any more is known when the norm is about to be launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .fusion import Call, LateMerge, LateRule, extent, overlap
from .kernel_registry import is_available
from .op import Op
from .ops.layer_norm import APPLY as LAYER_APPLY
from .ops.layer_norm import LAYER_NORM, LAYER_NORM_APPLY, LAYER_NORM_STATS
from .ops.matmul import MATMUL
from .ops.matmul_prologue import MATMUL_PROLOGUE, prologue_plan
from .ops.rms_norm import APPLY as RMS_APPLY
from .ops.rms_norm import RMS_NORM, RMS_NORM_APPLY, RMS_NORM_STATS
from .tensor import Tensor, TensorSpec
from .variant_choice import ChoosingAs

if TYPE_CHECKING:
    from .recorder import Recorder

RULE = "norm + matmul"
_STATS: dict[Op, Op] = {RMS_NORM: RMS_NORM_STATS, LAYER_NORM: LAYER_NORM_STATS}


def norm_rules(gpu: Recorder) -> dict[str, LateRule]:
    """Op name -> the rule, for the norms."""

    def norm_matmul(call: Call, behind: Sequence[Call]) -> LateMerge | None:
        place = _only_reader(call, behind)
        return None if place is None else _merged(gpu, call, behind, place)

    return {op.name: norm_matmul for op in (RMS_NORM, RMS_NORM_APPLY, LAYER_NORM, LAYER_NORM_APPLY)}


def _only_reader(call: Call, behind: Sequence[Call]) -> int | None:
    """The place of the matmul that reads a norm's output as its A, if nothing else does or ever will."""
    if not call.is_dead(0):
        return None
    bytes_of = [extent(call.outputs[0])]
    found = None
    for place, other in enumerate(behind):
        if overlap(bytes_of, other.reads()):
            if found is not None:
                return None
            found = place
        if overlap(bytes_of, other.writes()):
            break  # the memory serves something else from here on
    if found is None:
        return None
    matmul = behind[found]
    if matmul.op is not MATMUL:
        return None
    a, b = matmul.inputs[:2]
    if a is None or b is None or extent(a) != bytes_of[0]:
        return None
    others = [extent(t) for t in matmul.inputs[1:] if t is not None]
    fits = len(a.shape) == len(b.shape) == 2 and not overlap(bytes_of, others)
    fits &= matmul.settings.get("precision", "float32") == "float32" and matmul.settings.get("epilogue") is None
    return found if fits else None


def _merged(gpu: Recorder, call: Call, behind: Sequence[Call], place: int) -> LateMerge | None:
    matmul, op = behind[place], call.op
    prologue = (RMS_APPLY if op in (RMS_NORM, RMS_NORM_APPLY) else LAYER_APPLY).spec
    # What a norm takes is what its `apply` takes, with the numbers a row behind the rest; a whole norm makes those.
    x, *operands = [*call.inputs, *call.outputs[1:]] if op in _STATS else call.inputs
    a, b = matmul.inputs[:2]
    assert x is not None and a is not None and b is not None
    needed = [extent(t) for t in (x, *operands) if t is not None]
    # The matmul reads what the norm read: nothing may have been written there by then, nor may it write there itself.
    if any(overlap(needed, other.writes()) for other in behind[: place + 1]):
        return None
    rows = Tensor(x.engine, TensorSpec(a.shape), x.storage, x.offset)
    flat = [None if t is None else Tensor(t.engine, TensorSpec((t.size,)), t.storage, t.offset) for t in operands]
    inputs = [rows, *matmul.inputs[1:], *flat]
    settings = {**matmul.settings, "prologue": prologue}
    with ChoosingAs(matmul.choices):
        plan = prologue_plan(gpu, rows, b, prologue, settings["trans_a"], settings["trans_b"])
    if plan is None or not is_available(plan.kernel) or not is_available(plan.more):
        return None  # no kernel is shipped, and there is no compiler
    cost = MATMUL_PROLOGUE.cost(*(None if t is None else t.spec for t in inputs), **settings)
    merged = Call(MATMUL_PROLOGUE, cost, inputs, matmul.made, matmul.num_outputs, settings, matmul.alive)
    return LateMerge(RULE, _stats_call(call, x), place, merged)


def _stats_call(call: Call, x: Tensor) -> Call | None:
    """What is left of the norm: its row scalars, or nothing where they were there before."""
    op = _STATS.get(call.op)
    if op is None:
        return None
    cost = op.cost(x.spec, **call.settings)
    return Call(op, cost, [x], call.made[1:], call.num_outputs - 1, call.settings, call.alive[1:])
