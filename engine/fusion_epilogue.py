"""The rule of matmul + elementwise: an elementwise op that alone reads a product becomes the product's epilogue.

It is a late rule: by the time a matmul is launched its reader has been joined with its own neighbours, and it is known
whether anybody still holds the product.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .expr import Expr, variable, whole
from .expr_walk import named, substitute
from .fusion import Call, LateMerge, LateRule, Range, extent, overlap
from .fusion_map import Side
from .kernel_registry import is_available
from .ops.matmul import MATMUL, layout_of, plan_for
from .ops.matmul_parts import OwnEpilogue, needed_shape, own_form, usual_epilogue
from .tensor import Tensor, TensorSpec
from .variant_choice import ChoosingAs

if TYPE_CHECKING:
    from .recorder import Recorder

RULE = "matmul + elementwise"
_BIAS, _RESIDUAL, _OUT = 2, 3, 4  # inputs of matmul; operands of an epilogue follow
_BY_WIDTH = re.compile(r"index ([%/]) args\.(\w+)")


def epilogue_rules(gpu: Recorder) -> dict[str, LateRule]:
    """Op name -> the rule, for matmul."""

    def matmul_elementwise(call: Call, behind: Sequence[Call]) -> LateMerge | None:
        out = call.inputs[_OUT]
        product = call.outputs[0] if out is None else out
        place = _reader(call, product, behind)
        merged = None if place is None else _merged(gpu, call, product, behind[place])
        return None if place is None or merged is None else LateMerge(RULE, None, place, merged)

    return {MATMUL.name: matmul_elementwise}


def _reader(call: Call, product: Tensor, behind: Sequence[Call]) -> int | None:
    """The place of the call that reads a product, if nothing else does or ever will, and the matmul can wait for it.

    Or that changes it in place: whoever reads it later reads that.
    """
    bytes_of = [extent(product)]
    found = None
    for place, other in enumerate(behind):
        writes = overlap(bytes_of, other.writes())
        if overlap(bytes_of, other.reads()):
            if found is not None:
                return None
            if writes:
                return place
            found = place
        elif writes:
            break  # the memory serves something else from here on
        if found is None and overlap(call.reads(), other.writes()):
            return None
    return found if call.inputs[_OUT] is None and call.is_dead(0) else None


class _Epilogue:
    """An epilogue in the making: the expression so far, and what it takes."""

    def __init__(self, call: Call) -> None:
        bias, residual = call.inputs[_BIAS], call.inputs[_RESIDUAL]
        own: OwnEpilogue | None = call.settings.get("epilogue")
        self.tensors: list[Tensor] = []
        self.numbers: dict[str, list[float]] = {"s": [], "n": []}
        self._kinds: list[str] = []
        self._known: dict[tuple[Range, str], Expr] = {}
        if own is None:
            self.root = usual_epilogue(bias is not None, call.settings["activation"], residual is not None)
            given = {variable("bias"): ("column", bias), variable("residual"): ("full", residual)}
            parts = {name: self.tensor(kind, t) for name, (kind, t) in given.items() if t is not None}
            (self.root,) = substitute([self.root], parts)
        else:  # a tensor that it has under two names has one here
            new = {}
            for i, (kind, tensor) in enumerate(zip(own.kinds, call.inputs[_OUT + 1 :], strict=True)):
                assert tensor is not None
                new[f"x{i}"] = self.tensor(kind, tensor)
            (self.root,) = substitute([own.root], {variable(name): now for name, now in new.items()})
            floats = own.counts[0]
            numbers = call.settings["numbers"]
            self.numbers = {"s": list(numbers[:floats]), "n": list(numbers[floats:])}

    def tensor(self, kind: str, tensor: Tensor) -> Expr:
        """The variable of a tensor that lies so under C."""
        key = extent(tensor), kind
        if key not in self._known:
            self._known[key] = variable(f"x{len(self.tensors)}")
            self.tensors.append(tensor)
            self._kinds.append(kind)
        return self._known[key]

    def number(self, letter: str, value: float) -> Expr:
        """The variable ("s") or whole number ("n") of a number."""
        self.numbers[letter].append(value)
        name = f"{letter}{len(self.numbers[letter]) - 1}"
        return variable(name) if letter == "s" else whole(name)

    def form(self) -> OwnEpilogue:
        """The whole. Raises ValueError for more arguments than a dispatch takes."""
        names = [tuple(f"{letter}{i}" for i in range(len(found))) for letter, found in self.numbers.items()]
        tensors = tuple(f"x{i}" for i in range(len(self.tensors)))
        return own_form(self.root, tensors, tuple(self._kinds), names[0], names[1])


def _kind(place: str, values: dict[str, float], width: int) -> str | None:
    """How an operand of a map kernel lies under rows of this width; None where it lies otherwise."""
    if place in ("index", "0u"):
        return "full" if place == "index" else "one"
    found = _BY_WIDTH.fullmatch(place)
    if found is None or values.get(found.group(2)) != width:
        return None
    return "column" if found.group(1) == "%" else "row"


def _expression_of(last: Call, side: Side, product: Tensor, epilogue: _Epilogue) -> Expr | None:
    """What the elementwise call makes of the epilogue so far; None for one that is no function of C's elements."""
    kernel, values = side.kernel, dict(zip(side.kernel.scalars, side.values, strict=True))
    if len(kernel.outputs) != 1 or kernel.outputs[0].place != "index" or side.num_elements != product.size:
        return None
    (expression,) = kernel.expressions.values()
    new: dict[Expr, Expr] = {}
    for operand in kernel.inputs:
        tensor = side.tensors[operand.pointer]
        kind = _kind(operand.place, values, product.shape[-1])
        if kind is None:
            return None
        if kind == "full" and extent(tensor) == extent(product):
            new[variable(operand.name)] = epilogue.root
            continue
        spec = TensorSpec(needed_shape(kind, product.shape))
        if spec.size != tensor.size:
            return None
        lying = Tensor(tensor.engine, spec, tensor.storage, tensor.offset)
        new[variable(operand.name)] = epilogue.tensor(kind, lying)
    new |= {variable(n): epilogue.number("s", values[n]) for n in named([expression]) if n in values}
    new |= {whole(n): epilogue.number("n", values[n]) for n in named([expression], "whole")}
    return substitute([expression], new)[0]


def _merged(gpu: Recorder, call: Call, product: Tensor, last: Call) -> Call | None:
    side = Side.of(last)
    if side is None:
        return None
    epilogue = _Epilogue(call)
    root = _expression_of(last, side, product, epilogue)
    if root is None:
        return None
    epilogue.root = root
    a, b = call.inputs[:2]
    assert a is not None and b is not None
    written = side.tensors[side.kernel.outputs[0].pointer]
    in_place = extent(written) == extent(product)
    # Sums are stored where the result will be, and only then are operands read.
    touched = [extent(written), extent(product)] if in_place else [extent(written)]
    if overlap(touched, [extent(t) for t in (a, b, *epilogue.tensors)]) or (not in_place and last.num_outputs != 1):
        return None
    try:
        form = epilogue.form()
    except ValueError:
        return None
    numbers = tuple(number for found in epilogue.numbers.values() for number in found)
    settings = {**call.settings, "activation": None, "epilogue": form, "numbers": numbers}
    inputs = [a, b, None, None, product if in_place else None, *epilogue.tensors]
    transposed = settings["trans_a"], settings["trans_b"]
    layout = layout_of(a.spec, b.spec, *transposed)
    accumulate, precision = settings["accumulate"], settings.get("precision", "float32")
    with ChoosingAs(call.choices):
        plan = plan_for(gpu, a, b, layout, *transposed, accumulate, precision, form)
    if not is_available(plan.kernel) or not is_available(plan.more):
        return None  # no kernel is cached, and there is no compiler
    cost = MATMUL.cost(*(None if t is None else t.spec for t in inputs), **settings)
    if in_place:
        return Call(MATMUL, cost, inputs, (), 0, settings, ())
    made = Tensor(written.engine, product.spec, written.storage, written.offset)
    return Call(MATMUL, cost, inputs, [made], 1, settings, last.alive)
