"""The rules of fusion: which two neighbouring calls one call can replace, without changing a bit.

A rule is given the window, whose last call is the later one, and looks for its partner among the calls before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .fusion import Call, LateRule, Merge, Rule, can_move, extent, overlap
from .fusion_epilogue import epilogue_rules
from .fusion_map import elementwise_neighbours
from .fusion_norm import norm_rules
from .op import OPS, Op
from .ops.activation import ACTIVATION
from .ops.add import ADD_IN_PLACE
from .ops.add_bias import ADD_BIAS
from .ops.elementwise import MapOp
from .ops.layer_norm import LAYER_NORM_BACKWARD
from .ops.matmul import MATMUL
from .ops.rms_norm import RMS_NORM_BACKWARD
from .tensor import Tensor

if TYPE_CHECKING:
    from .recorder import Recorder

_BIAS, _RESIDUAL, _OUT = 2, 3, 4  # inputs of matmul


def _maker_of(calls: Sequence[Call], tensor: Tensor) -> int | None:
    """The place of the latest earlier call that writes a tensor, if nothing touches the tensor in between."""
    bytes_of = [extent(tensor)]
    for place in range(len(calls) - 2, -1, -1):
        call = calls[place]
        if overlap(bytes_of, call.writes()):
            return place
        if overlap(bytes_of, call.reads()):
            return None
    return None


def _reshaped(tensor: Tensor, like: Tensor) -> Tensor:
    return Tensor(tensor.engine, like.spec, tensor.storage, tensor.offset)


def matmul_epilogue(calls: Sequence[Call]) -> Merge | None:
    """matmul, then y += bias, y = activation(y) with nobody left to read its input, or y += residual: its epilogue.

    The kernel adds the bias, then applies the activation, then adds the residual: a later part takes what is there.
    """
    last = calls[-1]
    target = last.inputs[0]
    assert target is not None
    place = _maker_of(calls, target)
    if place is None or calls[place].op is not MATMUL:
        return None
    matmul = calls[place]
    out = matmul.inputs[_OUT]
    product = matmul.outputs[0] if out is None else out
    if extent(product) != extent(target) or matmul.inputs[_RESIDUAL] is not None:
        return None
    if matmul.settings.get("epilogue") is not None:  # one of its own
        return None
    inputs, settings, made, alive = list(matmul.inputs), dict(matmul.settings), matmul.made, matmul.alive
    if last.op is ACTIVATION:
        if settings["activation"] is not None or out is not None or not matmul.is_dead():
            return None
        settings["activation"] = last.settings["kind"]
        made = [_reshaped(last.outputs[0], product), *matmul.made[1:]]
        alive = last.alive
    else:
        added = last.inputs[1]
        assert added is not None
        if overlap([extent(added)], [extent(product)]):
            return None
        if last.op is ADD_BIAS:
            if settings["activation"] is not None or inputs[_BIAS] is not None:
                return None
            inputs[_BIAS] = added
        else:
            inputs[_RESIDUAL] = _reshaped(added, product)
    specs = [None if t is None else t.spec for t in inputs]
    cost = MATMUL.cost(*specs, **settings)
    merged = Call(MATMUL, cost, inputs, made, matmul.num_outputs, settings, alive)
    if not can_move(last, calls[place + 1 : -1]) or overlap(merged.reads(), [extent(t) for t in made]):
        return None
    return Merge("matmul + " + _PART[last.op], place, merged, at_first=True)


_PART: dict[Op, str] = {ADD_BIAS: "bias", ACTIVATION: "activation", ADD_IN_PLACE: "residual"}


def residual_norm_backward(calls: Sequence[Call]) -> Merge | None:
    """The gradient of a norm, then added to the residual stream's: added at once, and never stored by itself."""
    last = calls[-1]
    target, added = last.inputs
    assert target is not None and added is not None
    place = _maker_of(calls, added)
    if place is None:
        return None
    norm = calls[place]
    if norm.op not in (RMS_NORM_BACKWARD, LAYER_NORM_BACKWARD) or norm.inputs[-1] is not None:
        return None
    if extent(norm.outputs[0]) != extent(added) or not norm.is_dead():
        return None
    inputs = [*norm.inputs[:-1], _reshaped(target, norm.outputs[0])]
    specs = [None if t is None else t.spec for t in inputs]
    merged = Call(norm.op, norm.op.cost(*specs), inputs, norm.made[1:], 0, {}, ())
    between = calls[place + 1 : -1]
    if overlap([extent(target)], norm.reads()):
        return None
    if can_move(norm, between):
        return Merge("residual + norm", place, merged, at_first=False)
    if can_move(last, between):
        return Merge("residual + norm", place, merged, at_first=True)
    return None


def rules() -> dict[str, Sequence[Rule]]:
    """Op name -> rules to try, in order, when a call of that op is the later one."""
    found: dict[str, list[Rule]] = {op.name: [matmul_epilogue] for op in (ADD_BIAS, ACTIVATION, ADD_IN_PLACE)}
    found[ADD_IN_PLACE.name].append(residual_norm_backward)
    for op in OPS.values():
        if isinstance(op, MapOp):
            found.setdefault(op.name, []).append(elementwise_neighbours)
    return dict(found)


def late_rules(gpu: Recorder) -> dict[str, LateRule]:
    """Op name -> the rule to try when a call of that op is about to be launched."""
    return {**norm_rules(gpu), **epilogue_rules(gpu)}
