"""What vkfold aims at, and whether a run's rows show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from work import Matmul, work_named

Row = dict[str, object]
WRONG = 1e-2  # a library whose error is over this did not do the work: its time says nothing


@dataclass(frozen=True)
class Goal:
    """value(rows) must be at least `least`; None: the rows do not tell. text says what the value is."""

    text: str
    least: float
    value: Callable[[Sequence[Row]], float | None]


def _times(rows: Iterable[Row], work: str) -> dict[str, tuple[float, str]]:
    """Library -> (ratio to vkfold, driver)."""
    found = {}
    for row in rows:
        ratio, error = row.get("ratio"), row.get("error")
        if row["work"] == work and isinstance(ratio, float) and isinstance(error, float) and error <= WRONG:
            found[str(row["library"])] = (ratio, str(row["driver"]))
    return found


def _against(work: str, *libraries: str) -> Callable[[Sequence[Row]], float | None]:
    """Time of the fastest of these libraries (all on Vulkan when none is named) / vkfold's."""

    def value(rows: Sequence[Row]) -> float | None:
        ratios = [
            ratio
            for name, (ratio, driver) in _times(rows, work).items()
            if (name in libraries if libraries else name != "vkfold" and not driver.startswith("none"))
        ]
        return min(ratios, default=None)

    return value


def _rate(work: str, other: str) -> Callable[[Sequence[Row]], float | None]:
    """vkfold's FLOP/s at `work` / its FLOP/s at `other`, each in its fastest run: they were not timed side by side."""

    def rate(rows: Sequence[Row], name: str) -> float | None:
        found = work_named(name)
        times = [row.get("best") for row in rows if row["work"] == name and row["library"] == "vkfold"]
        if not isinstance(found, Matmul) or not times or not isinstance(times[0], float):
            return None
        return found.flops / times[0]

    def value(rows: Sequence[Row]) -> float | None:
        here, there = rate(rows, work), rate(rows, other)
        return here / there if here and there else None

    return value


GOALS = (
    *(Goal(f"{w}: times as fast as the best Vulkan peer", 4, _against(w)) for w in ("matmul 512", "matmul 1024")),
    *(Goal(f"{w}: share of NumPy's speed (goal on Mesa 25)", 0.18, _against(w, "numpy"))
      for w in ("matmul 512", "matmul 1024")),
    *(Goal(f"matmul {size} {form}: rate over NN's", 0.7, _rate(f"matmul {size} {form}", f"matmul {size}"))
      for size in (512, 1024) for form in ("NT", "TN")),
    Goal("matmul 1752x4720x584: rate over matmul 1024's", 0.7, _rate("matmul 1752x4720x584", "matmul 1024")),
    Goal("matmul 1000x33x257: rate over matmul 1000x32x256's", 0.7, _rate("matmul 1000x33x257", "matmul 1000x32x256")),
    Goal("attention 1x4x512x64 f+b: times as fast as aule", 20, _against("attention 1x4x512x64 f+b", "aule")),
    Goal("mlp step: times as fast as the best Vulkan peer", 5, _against("mlp step")),
    Goal("tiny lm step: times as fast as torchvulkan", 6, _against("tiny lm step", "torchvulkan")),
    Goal("tiny lm step: share of PyTorch's speed on the CPU (goal on Mesa 25)", 1 / 3,
         _against("tiny lm step", "torch")),
)  # fmt: skip
