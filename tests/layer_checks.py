"""Finite differences for whole layers: input and every parameter."""

from __future__ import annotations

import numpy as np

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.nn.layer import Layer
from vkfold.nn.parameter import Parameter


def randomize(layer: Layer, seed: int = 0, scale: float = 0.5) -> None:
    """Values for every parameter that hide no term: nothing is 0 or 1."""
    rng = np.random.default_rng(seed)
    for parameter in layer.parameters():
        offset = 1.0 if parameter.init == "ones" else 0.0
        parameter.engine.upload(parameter.data, offset + scale * rng.standard_normal(parameter.shape))


def numeric_gradient(value, array: np.ndarray, place: tuple[int, ...], step: float = 1e-5) -> float:
    """Central difference of value() with respect to array[place], which value reads."""
    saved = array[place]
    sides = []
    for sign in (1, -1):
        array[place] = saved + sign * step
        sides.append(value())
    array[place] = saved
    return (sides[0] - sides[1]) / (2 * step)


def places_of(shape: tuple[int, ...], rng: np.random.Generator, samples: int) -> list[tuple[int, ...]]:
    """Some positions in an array of this shape."""
    flat = rng.permutation(int(np.prod(shape)))[:samples]
    return [tuple(int(n) for n in np.unravel_index(i, shape)) for i in flat]


def check_parameters(value, parameters: dict[str, Parameter], *, samples: int = 12, tolerance: float = 2e-6) -> None:
    """Compare each parameter's gradient with finite differences of value()."""
    rng = np.random.default_rng(1)
    for name, parameter in parameters.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        analytic = parameter.grad.numpy()
        array = parameter.data.numpy()

        def at(array: np.ndarray = array, parameter: Parameter = parameter) -> float:
            parameter.engine.upload(parameter.data, array)
            return value()

        for place in places_of(parameter.shape, rng, samples):
            numeric = numeric_gradient(at, array, place)
            error = abs(numeric - analytic[place])
            assert error <= tolerance * max(1.0, abs(numeric)), f"{name} at {place}: {analytic[place]} and {numeric}"
        at()


def check_layer(layer: Layer, x: np.ndarray, *, samples: int = 12, tolerance: float = 2e-6) -> None:
    """backward against finite differences of sum(forward(x) * cotangent), on the float64 engine."""
    engine = layer.engine
    assert isinstance(engine, CpuEngine)
    x = np.array(x, np.float64)
    cotangent = np.random.default_rng(2).standard_normal(layer.forward(engine.tensor(x)).shape)

    def value() -> float:
        return float((layer.forward(engine.tensor(x)).numpy() * cotangent).sum())

    layer.clear_gradients()
    layer.forward(engine.tensor(x))
    dx = layer.backward(engine.tensor(cotangent)).numpy()
    assert dx.shape == x.shape
    assert layer.activation_cache() == {}, "backward releases what was kept"
    for place in places_of(x.shape, np.random.default_rng(3), samples):
        numeric = numeric_gradient(value, x, place)
        assert abs(numeric - dx[place]) <= tolerance * max(1.0, abs(numeric)), f"dx at {place}: {dx[place]}, {numeric}"
    check_parameters(value, layer.named_parameters(), samples=samples, tolerance=tolerance)
