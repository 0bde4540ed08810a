"""Learning-rate schedules: every value of a warm-up, a decay and what follows."""

from __future__ import annotations

import math

import pytest

from vkfold.engine.errors import BadInputError
from vkfold.nn import Schedule, constant, cosine

EXPECTED = [0.25, 0.5, 0.75, 1, 1, 0.955436, 0.83057, 0.650134, 0.449866, 0.26943, 0.144564, 0.1]


def test_cosine_with_warm_up() -> None:
    schedule = cosine(1.0, 12, warmup_steps=4, floor=0.1)
    assert [round(schedule(step), 6) for step in range(12)] == EXPECTED
    assert all(schedule(step) == pytest.approx(0.1, abs=1e-15) for step in (12, 13, 1000, 10**9))


def test_a_resumed_run_follows_the_stored_horizon() -> None:
    schedule = cosine(1.0, 12, warmup_steps=4, floor=0.1)
    resumed = Schedule(**schedule.state_dict())
    assert resumed == schedule
    assert [resumed(step) for step in range(20)] == [schedule(step) for step in range(20)]


def test_constant() -> None:
    assert [constant(0.5)(step) for step in (0, 1, 10**6)] == [0.5] * 3
    assert [constant(0.5, 2)(step) for step in range(4)] == [0.25, 0.5, 0.5, 0.5]


def test_short_horizons() -> None:
    assert [cosine(1.0, 1)(step) for step in range(3)] == [1, 0, 0]
    assert [cosine(1.0, 2, floor=0.5)(step) for step in range(3)] == [1, 0.5, 0.5]


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "linear", "peak": 1.0},
        {"kind": "constant", "peak": -1.0},
        {"kind": "constant", "peak": math.nan},
        {"kind": "constant", "peak": 1.0, "warmup_steps": -1},
        {"kind": "cosine", "peak": 1.0, "total_steps": 4, "warmup_steps": 4},
        {"kind": "cosine", "peak": 1.0, "total_steps": 4, "floor": 2.0},
        {"kind": "cosine", "peak": 1.0, "total_steps": 4, "floor": -0.1},
    ],
)
def test_settings_that_make_no_sense(settings: dict) -> None:
    with pytest.raises(BadInputError):
        Schedule(**settings)
