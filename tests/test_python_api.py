"""Tensors as Python objects: operators, parts, numbers, NumPy; and ops that are given something else than tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.verbs import OpVerbs
from vkfold.engine.vulkan_engine import VulkanEngine

A = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
B = np.random.default_rng(2).standard_normal((3, 5)).astype(np.float32)
ONE_ULP = 2.0**-23


@pytest.fixture(params=["vulkan", "cpu"])
def engine(request: pytest.FixtureRequest) -> ComputeEngine:
    """Both engines that compute."""
    return request.getfixturevalue(request.param)


# -- operators -------------------------------------------------------------------------------------------------------
OPERATORS: dict[str, tuple[Any, float]] = {  # allowed error in units in the last place
    "a + b": (lambda a, b: a + b, 0),
    "a - b": (lambda a, b: a - b, 0),
    "a * b": (lambda a, b: a * b, 0),
    "a / b": (lambda a, b: a / b, 2.5),
    "a + 1.5": (lambda a, b: a + 1.5, 0),
    "1.5 + a": (lambda a, b: 1.5 + a, 0),
    "a - 0.1": (lambda a, b: a - 0.1, 0),
    "0.1 - a": (lambda a, b: 0.1 - a, 0),
    "a * 3": (lambda a, b: a * 3, 0),
    "True * a": (lambda a, b: True * a, 0),
    "a / 3": (lambda a, b: a / 3, 2.5),
    "3 / a": (lambda a, b: 3 / a, 2.5),
    "-a": (lambda a, b: -a, 0),
    "+a": (lambda a, b: +a, 0),
    "np.float32(2) * a": (lambda a, b: np.float32(2) * a, 0),
    "np.int32(2) - a": (lambda a, b: np.int32(2) - a, 0),
}


@pytest.mark.parametrize("text", OPERATORS)
def test_operators(engine: ComputeEngine, text: str) -> None:
    """As NumPy in float32, views that start anywhere included."""
    call, units = OPERATORS[text]
    expected = call(A, B).astype(np.float32)
    got = call(engine.tensor(A), engine.tensor(B)).numpy()
    assert np.all(np.abs(got - expected) <= units * ONE_ULP * np.abs(expected)), text
    assert got.shape == A.shape
    part = call(engine.tensor(A)[1:], engine.tensor(B)[1:]).numpy()  # 20 bytes in: not on 16
    assert np.array_equal(part, got[1:]), "the same bits wherever the tensor lies"


def test_operators_keep_signs_of_zero_and_infinities(engine: ComputeEngine) -> None:
    """-0.0 is another bit pattern than 0.0, and division by zero is no error."""
    values = np.array([0.0, -0.0, 1.0, -np.inf, np.nan], np.float32)
    x = engine.tensor(values)
    with np.errstate(all="ignore"):
        for call in (lambda t: -t, lambda t: t + 0.0, lambda t: t - 0.0, lambda t: 0.0 - t, lambda t: t / 0.0):
            expected = call(values)
            got = call(x).numpy()
            assert np.array_equal(got, expected, equal_nan=True)
            shown = ~np.isnan(expected)
            assert np.array_equal(np.signbit(got[shown]), np.signbit(expected[shown]))


@pytest.mark.parametrize("sign", ["+", "-", "*", "/", "@"])
def test_arrays_must_be_made_tensors(engine: ComputeEngine, sign: str) -> None:
    """On either side; NumPy does not take the tensor's place unseen."""
    t = engine.tensor(A)
    for other in (B, B.tolist()):
        for left, right in ((t, other), (other, t)):
            with pytest.raises(TypeError, match=r"engine\.tensor"):
                eval(f"left {sign} right", {"left": left, "right": right})
    with pytest.raises(TypeError, match="is needed"):
        eval(f"t {sign} None", {"t": t})
    with pytest.raises(TypeError, match="str"):
        eval(f"t {sign} 'x'", {"t": t})


def test_numbers_beyond_float32(engine: ComputeEngine) -> None:
    """An error, not an infinity."""
    t = engine.tensor(A)
    for call in (lambda: t + 1e39, lambda: t * 1e39, lambda: 1e39 / t, lambda: t / -1e39, lambda: t - 3.5e38):
        with pytest.raises(ValueError, match="does not fit float32"):
            call()
    assert np.isinf((t * np.inf).numpy()).all()


def test_integers_are_not_computed_with(engine: ComputeEngine) -> None:
    """The error names the type that is needed."""
    with pytest.raises(ValueError, match="float32"):
        engine.tensor([1, 2]) + 1


# -- what ops are given ----------------------------------------------------------------------------------------------
def required_tensors() -> list[tuple[str, str]]:
    """(verb, parameter) of every input of every op."""
    found = []
    for verb, function in vars(OpVerbs).items():
        if not verb.startswith("__"):
            for parameter in list(inspect.signature(function).parameters.values())[1:]:
                if "Tensor" in str(parameter.annotation) and parameter.kind is not parameter.VAR_KEYWORD:
                    found.append((verb, parameter.name))
    assert len(found) > 80
    return found


@pytest.mark.parametrize(("verb", "name"), required_tensors())
def test_every_op_says_which_input_is_no_tensor(cpu: CpuEngine, verb: str, name: str) -> None:
    """Arrays, lists and numbers for any input; None for one that is needed."""
    good = cpu.tensor(np.ones((2, 2)))
    parameters = list(inspect.signature(getattr(OpVerbs, verb)).parameters.values())[1:]
    given: dict[str, Any] = {}
    optional = False
    for parameter in parameters:
        kind = str(parameter.annotation)
        if parameter.name == name:
            optional = "None" in kind
        elif "Tensor" in kind and parameter.default is parameter.empty:
            given[parameter.name] = [good] if kind.startswith("Sequence") else good
        elif parameter.default is parameter.empty:
            given[parameter.name] = {"str": "relu", "float": 0.5, "Sequence[float]": [0.0]}.get(kind, 1)
    for bad in (np.ones((2, 2)), "x", 3.0, *([] if optional else [None])):
        with pytest.raises(TypeError, match=rf"{name} is .*needed|input \d is .*needed"):
            getattr(cpu, verb)(**given, **{name: bad})


def test_engines_of_one_device_are_told_apart(vulkan: VulkanEngine) -> None:
    """The message and repr() name each engine by its number, and the input by its name."""
    with VulkanEngine() as other:
        assert other.name == vulkan.name
        assert repr(other) != repr(vulkan)
        for call in (lambda a, b: vulkan.add(a, b), lambda a, b: vulkan.upload(b, B), lambda a, b: vulkan.download(b)):
            message = refused(lambda call=call: call(vulkan.tensor(A), other.tensor(B)))
            assert "another engine" in message
            assert f"engine {other.number})" in message
            assert f"engine {vulkan.number})" in message
        message = refused(lambda: vulkan.add(vulkan.tensor(A), other.tensor(B)))
        assert message.startswith("add: b lives on another engine")


def refused(call: Callable[[], object]) -> str:
    """The message of the ValueError of a call; nothing of its frames is kept alive."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


# -- parts -----------------------------------------------------------------------------------------------------------
C = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(np.float32)
IN_ONE_PIECE = [
    0,
    -1,
    np.int64(1),
    slice(None),
    slice(1, None),
    slice(5, 9),
    slice(1, 1),
    ...,
    (),
    (1, 2),
    (1, 2, 3),
    (-1, slice(1, 3)),
    (0, 1, slice(2, None)),
    (slice(0, 1), slice(1, 3)),
    (0, 1, ...),
    (..., slice(None)),
    (slice(None), slice(None), slice(0, 4)),
    (1, slice(2, None, 2)),
    (slice(0, 0), 1),
    (slice(None), slice(0, 0)),
]


@pytest.mark.parametrize("key", IN_ONE_PIECE, ids=repr)
def test_parts(engine: ComputeEngine, key: Any) -> None:
    """As NumPy's, without a copy: what is written to the part is written to the tensor."""
    x = engine.tensor(C)
    part = x[key]
    expected = C.copy()
    assert part.shape == expected[key].shape
    assert np.array_equal(part.numpy(), expected[key])
    assert part.storage is x.storage
    if part.size:
        engine.fill_(part, 7.0)
        expected[key] = 7.0
        assert np.array_equal(x.numpy(), expected), "the part and nothing else"


@pytest.mark.parametrize(
    "key", [(slice(None), 0), (..., 1), slice(None, None, -1), (0, slice(0, 3, 2)), (..., slice(0, 2))]
)
def test_parts_in_pieces_are_refused(engine: ComputeEngine, key: Any) -> None:
    """Never the wrong elements."""
    with pytest.raises(ValueError, match="one piece"):
        engine.tensor(C)[key]


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (2, IndexError),
        (-3, IndexError),
        ((0, 3), IndexError),
        ((0, 0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (1.0, TypeError),
        (True, TypeError),
        (None, TypeError),
        ([0, 1], TypeError),
        (np.array([0, 1]), TypeError),
    ],
)
def test_bad_indices(engine: ComputeEngine, key: Any, error: type[Exception]) -> None:
    """Outside the shape, or of another kind."""
    with pytest.raises(error):
        engine.tensor(C)[key]


def test_random_parts_agree_with_numpy(cpu: CpuEngine) -> None:
    """A part is either NumPy's or refused; it is refused only where NumPy's is not contiguous."""
    rng = np.random.default_rng(0)
    x, refused = cpu.tensor(C), 0
    for _ in range(2000):
        key = []
        for size in C.shape[: rng.integers(0, 4)]:
            if rng.random() < 0.4:
                key.append(int(rng.integers(-size, size)))
            else:
                ends = [None if rng.random() < 0.4 else int(n) for n in rng.integers(-size - 1, size + 2, 2)]
                key.append(slice(*ends, rng.choice([None, 1, 2, -1])))
        expected = C[tuple(key)]
        try:
            part = x[tuple(key)]
        except ValueError:
            refused += 1
            assert not expected.flags.c_contiguous
        else:
            assert np.array_equal(part.numpy(), expected)
    assert 200 < refused < 1800


def test_rows_of_16_bit_tensors(vulkan: VulkanEngine) -> None:
    """Parts that start in the middle of a word."""
    halves = np.arange(15).reshape(5, 3).astype(np.float16)
    x = vulkan.tensor(halves)
    assert [row.numpy().tolist() for row in x] == halves.tolist()
    assert vulkan.cast(x[3], "float32").numpy().tolist() == halves[3].tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_parts_are_overwritten(engine: ComputeEngine, dtype: str) -> None:
    """With numbers, arrays and tensors: that part and nothing beside it, in the middle of a word too."""
    expected = np.arange(15).reshape(5, 3).astype(dtype)
    x = engine.tensor(expected)
    for key, value in ((1, [7, 8, 9]), ((2, 1), 5), (slice(3, 5), np.full((2, 3), 4)), ((0, slice(0, 1)), [11])):
        expected[key] = value
        x[key] = value if np.isscalar(value) else np.array(value, dtype)
        assert np.array_equal(x.numpy(), expected), key
    x[0] = x[4]
    expected[0] = expected[4]
    assert np.array_equal(x.numpy(), expected)
    x[...] = 0
    assert not x.numpy().any()
    for value in (np.ones(2), x[1:3]):
        with pytest.raises(ValueError, match="shape"):
            x[0] = value
    with pytest.raises(ValueError, match="one piece"):
        x[:, 0] = 1
    with pytest.raises(ValueError, match="real numbers"):
        x[0] = None
    with pytest.raises(ValueError, match="fill_"):
        x[0] = 1e39


def test_iteration_and_length(engine: ComputeEngine) -> None:
    """Along the first dimension."""
    x = engine.tensor(A)
    assert len(x) == 3
    assert np.array_equal(np.stack([row.numpy() for row in x]), A)
    first, *_ = x
    assert first.shape == (5,)
    scalar = engine.tensor(2.0)
    for call in (len, iter, list):
        with pytest.raises(TypeError):
            call(scalar)
    with pytest.raises(IndexError):
        scalar[0]


def test_reshape(engine: ComputeEngine) -> None:
    """Numbers or a tuple."""
    x = engine.tensor(A)
    assert x.reshape((5, 3)).shape == x.reshape(5, -1).shape == x.reshape([5, 3]).shape == (5, 3)
    with pytest.raises(ValueError, match="sizes differ"):
        x.reshape(4, 4)
    with pytest.raises(TypeError):
        x.reshape(5.0, 3)


# -- numbers and NumPy -----------------------------------------------------------------------------------------------
def test_tensors_of_one_element_are_numbers(engine: ComputeEngine) -> None:
    """float, int, bool, item; anything larger is an error, an empty tensor too."""
    assert float(engine.tensor([[2.5]])) == 2.5
    assert int(engine.tensor(7)) == 7
    assert engine.tensor(3.0).item() == 3.0
    assert bool(engine.tensor([1.0]))
    assert not engine.tensor([0])
    for call in (float, int, bool):
        for values in (A, np.zeros((0, 2))):
            with pytest.raises(ValueError, match="shape"):
                call(engine.tensor(values))


def test_bfloat16_is_read_as_values(engine: ComputeEngine) -> None:
    """numpy() gives its bits, everything else the values."""
    x = engine.cast(engine.tensor([1.5, -2.0]), "bfloat16")
    assert x.numpy().dtype == np.uint16
    assert np.asarray(x).tolist() == [1.5, -2.0]
    assert x[1].item() == float(x[1]) == -2.0


def test_equality_is_identity(engine: ComputeEngine) -> None:
    """Tensors are keys of dicts."""
    x, y = engine.tensor(A), engine.tensor(A)
    assert x == x
    assert x != y
    assert {x: 1}[x] == 1
    assert (x == A) is False
    assert (x == A) is False


def test_numpy_copies_the_values(engine: ComputeEngine) -> None:
    """numpy.asarray, dtype and copy as NumPy 2 passes them, and functions that call it."""
    x = engine.tensor(A)
    assert np.array_equal(np.asarray(x), A)
    assert np.array(x, dtype=np.float64).dtype == np.float64
    assert np.allclose(x, A)
    assert np.array_equal(x.__array__(copy=True), A)
    assert np.stack([x, x]).shape == (2, 3, 5)
    with pytest.raises(ValueError, match="copy"):
        x.__array__(copy=False)
    np.asarray(x)[...] = 0
    assert np.array_equal(x.numpy(), A), "the array was a copy"
    with pytest.raises(TypeError):
        np.exp(x)
