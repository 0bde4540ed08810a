"""A step's memory as a picture: live bytes by kind over its ops."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..engine.allocation_ledger import KINDS, AllocationLedger
from ..engine.errors import BadInputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "earlier": "#999999",
    "parameters": "#4c566a",
    "optimizer states": "#7b88a1",
    "tables": "#a3b1c6",
    "gradients": "#bf616a",
    "saved activations": "#5e81ac",
    "recomputed activations": "#88c0d0",
    "logits": "#d08770",
    "temporaries": "#ebcb8b",
}
_SHADES = {"forward": "#ffffff", "backward": "#eceff4", "optimizer": "#d8dee9"}


def check_picture(path: Path) -> None:
    """Raises BadInputError for a name that says another format than the one written."""
    if path.suffix.lower() != ".png":
        raise BadInputError(f"cannot write the picture {path}: pictures are PNG, so its name must end in .png")


def draw(ledger: AllocationLedger, path: Path, title: str) -> None:
    """Write a PNG of `timeline_figure`. Raises BadInputError for a path that cannot be written."""
    check_picture(path)
    try:
        timeline_figure(ledger, title).savefig(path, dpi=110, format="png")
    except OSError as error:
        raise BadInputError(f"cannot write the picture {path}: {error.strerror or error}") from error


def unit_of(nbytes: int) -> tuple[str, float]:
    """The decimal unit in which so many bytes are a number from 1 to 1,000, and its bytes."""
    return next(((name, size) for name, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)) if nbytes >= size), ("B", 1.0))


def timeline_figure(ledger: AllocationLedger, title: str) -> Figure:
    """Stacked areas by kind, phases shaded, the peak marked. Raises BadInputError when no op of a step was heard."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [record for record in ledger.ops if record.phase]
    if not records:
        raise BadInputError("there is nothing to draw: the ledger heard no op of a step")
    unit, scale = unit_of(ledger.peak_bytes)
    events = np.array([record.event for record in records])
    curves = {kind: ledger.curve(kind=kind)[events] / scale for kind in KINDS}
    curves = {kind: curve for kind, curve in curves.items() if curve.any()}
    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x = np.arange(len(records))
    first = 0
    for i in range(1, len(records) + 1):
        if i == len(records) or records[i].phase != records[first].phase:
            axes.axvspan(first, i, color=_SHADES.get(records[first].phase, "#ffffff"), zorder=0)
            axes.text((first + i) / 2, 1.01, records[first].phase, ha="center", transform=axes.get_xaxis_transform())
            first = i
    axes.stackplot(x, *curves.values(), labels=list(curves), colors=[_COLOURS[kind] for kind in curves])
    peak = int(np.searchsorted(events, ledger.peak_event))
    axes.plot([min(peak, len(x) - 1)], [ledger.peak_bytes / scale], "v", color="black")
    axes.annotate(
        f"{ledger.peak_bytes / scale:.2f} {unit} in {ledger.peak_op}",
        (min(peak, len(x) - 1), ledger.peak_bytes / scale),
        textcoords="offset points",
        xytext=(0, 8),
        ha="center",
    )
    top = 1.1 * ledger.peak_bytes / scale
    axes.set(xlabel="ops of the step", ylabel=f"live {unit}", xlim=(0, len(records)), ylim=(0, top))
    axes.set_title(title, pad=22)
    axes.legend(loc="lower center", ncols=len(curves), fontsize="small")
    return figure
