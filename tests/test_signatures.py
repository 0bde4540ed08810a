"""Parameters of functions: what `inspect.signature` says, of the ops and of whatever else can be called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.op import OPS, Cost, Op
from vkfold.engine.setting_checks import check_settings
from vkfold.engine.signatures import parameters_of
from vkfold.engine.tensor import TensorSpec


def expected(function: Callable[..., Any]) -> list[tuple[str, Any, str]]:
    """As inspect has them."""
    return [(p.name, p.kind, str(p.annotation)) for p in inspect.signature(function).parameters.values()]


def test_the_ops() -> None:
    """Every function of every op."""
    assert len(OPS) > 40
    for op in OPS.values():
        for function in (op.outputs, op.flops, op.reference, op.launch, op.scratch, op.written, op.cost):
            assert list(parameters_of(function)) == expected(function), (op, function)


class _Odd:
    def method(
        self, a: int, b: str | None = None, /, c: Any = 1, *rest: float, d: bool, e: int = 3, **more: str
    ) -> int:
        return 0

    def only_self(self) -> None: ...

    def all_in_one(*args: int, only: bool = True) -> None:  # type: ignore[misc]  # self is one of args
        ...

    @classmethod
    def of_class(cls, a: int) -> None: ...

    @staticmethod
    def static(a: int, *, b) -> None:  # type: ignore[no-untyped-def]
        ...

    def __call__(self, x: TensorSpec, *, scale: float) -> None: ...


def _wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **settings: Any) -> Any:
        return function(*args, **settings)

    return wrapper


class _Wrapped(_Odd):
    method = _wrapping(_Odd.method)  # type: ignore[assignment]


def _told() -> None: ...


_told.__signature__ = inspect.signature(_Odd().method)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "function",
    [
        _Odd().method,
        _Odd.method,
        _Odd().only_self,
        _Odd().all_in_one,
        _Odd.of_class,
        _Odd.static,
        _Odd(),
        _Odd,
        _Wrapped().method,
        _told,
        functools.partial(_Odd().method, 1),
        functools.partial(_Odd.static, b=2),
        functools.cache(_Odd.static),
        lambda a, *, b=1, **c: a,
        expected,
        len,
    ],
)
def test_whatever_is_called(function: Callable[..., Any]) -> None:
    """Kinds, defaults, wrappers, objects and builtins: the same names, kinds and texts of annotations."""
    assert list(parameters_of(function)) == expected(function)


def test_no_parameters_at_all() -> None:
    """A method that takes not even self is refused as inspect refuses it."""

    class Bad:
        def nothing() -> None:  # type: ignore[misc]
            ...

    for ask in (inspect.signature, parameters_of):
        with pytest.raises(ValueError, match="invalid method signature"):
            ask(Bad().nothing)


class _Doubled(Op):
    """An op whose shape rule is wrapped, as a program might do with one of its own."""

    name = "doubled"

    def outputs(self, x: TensorSpec, y: TensorSpec | None, *, times: int) -> tuple[TensorSpec, ...]:
        return (x,)

    outputs = _wrapping(outputs)  # type: ignore[assignment]

    def flops(self, *specs: Any, **settings: Any) -> int:
        return 1


def test_an_op_may_say_what_it_costs() -> None:
    class Dear(_Doubled):
        name = "dear"

        def cost(self, *specs: Any, **settings: Any) -> Cost:
            return Cost(super().cost(*specs, **settings).flops + 11, 6, 7)

    with CpuEngine() as cpu:
        assert cpu.rule_of(Dear(), (cpu.tensor([1.0]), None), {"times": 2}).cost == (12, 6, 7)


def test_a_wrapped_shape_rule_is_checked() -> None:
    """What the wrapped function says of inputs and settings counts."""
    with CpuEngine() as cpu:
        x = cpu.tensor([1.0])
        rule = cpu.rule_of(_Doubled(), (x, None), {"times": 2})
        assert rule.whole == ("times",) and rule.cost == (1, 4, 4)
        with pytest.raises(TypeError, match="doubled: x is None, a tensor is needed"):
            cpu.rule_of(_Doubled(), (None, x), {"times": 2})
        with pytest.raises(TypeError, match="doubled: y is a NumPy array"):
            cpu.rule_of(_Doubled(), (x, x.numpy()), {"times": 2})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="doubled: times is True"):
            check_settings(_Doubled(), {"times": True})
