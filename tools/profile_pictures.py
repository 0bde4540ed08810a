"""A profile as files: roofline PNG, one HTML page that needs no network, and a trace for Perfetto."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ..engine.errors import BadInputError
from ..engine.profiler import OpSample
from .profile_summary import ATTENTION, ELEMENTWISE, MATMUL, OPTIMIZER, OTHER, Row, Summary, kind_of

_COLOURS = {MATMUL: "#5e81ac", ATTENTION: "#bf616a", ELEMENTWISE: "#d08770", OPTIMIZER: "#8fbcbb", OTHER: "#7b88a1"}


def roofline_png(summary: Summary, title: str) -> bytes:
    """Every op on the device's roofline: FLOPs a byte against FLOPs a second, area by share of time, named from 1%."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    peaks = summary.peaks
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in summary.grouped(lambda s: s.op) if row.flops and row.seconds > 0]
    spread = [row.intensity for row in rows] + [peaks.flops / peaks.bandwidth]
    x = np.geomspace(min(spread) / 3, max(spread) * 3, 200)
    axes.plot(x, np.minimum(peaks.flops, x * peaks.bandwidth) / 1e9, color="black", label="roof (measured)")
    for row in rows:
        share = row.seconds / summary.busy_seconds
        colour = _COLOURS[kind_of(row.name)]
        axes.scatter(row.intensity, row.flops / row.seconds / 1e9, s=40 + 1500 * share, color=colour, alpha=0.7)
        if share >= 0.01:
            place = (row.intensity, row.flops / row.seconds / 1e9)
            text = f"{row.name} {share:.0%}"
            axes.annotate(text, place, fontsize=8, xytext=(8, 4), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="GFLOP/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(loc="lower right")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    return buffer.getvalue()


def html_page(summary: Summary, title: str, png: bytes, reasons: Sequence[tuple[str, str]]) -> str:
    """One page with the picture and the tables in it: nothing is loaded from anywhere.

    reasons: (kernel, why it was chosen).
    """
    peaks = summary.peaks

    def table(heading: str, key: Callable[[OpSample], str]) -> str:
        lines = [
            f"<h2>{heading}</h2><table><tr><th>name<th>calls<th>ms<th>share<th>GFLOP/s<th>GB/s<th>of the roof</tr>"
        ]
        for row in summary.grouped(key):
            lines.append(
                f"<tr><td>{html.escape(row.name)}<td>{row.calls}<td>{row.seconds * 1e3:.3f}"
                f"<td>{row.seconds / summary.busy_seconds:.1%}"
                f"<td>{_rate(row.flops, row)}<td>{_rate(row.bytes_moved, row)}"
                f"<td>{row.roofline_share(peaks):.0%}</tr>"
            )
        return "".join(lines) + "</table>"

    why = "".join(f"<tr><td>{html.escape(kernel)}<td>{html.escape(reason)}</tr>" for kernel, reason in reasons)
    style = (
        "body{font:14px sans-serif;margin:2em;max-width:1100px}table{border-collapse:collapse}"
        "td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}"
        "td:first-child,th:first-child{text-align:left}"
        ".why td{text-align:left}"
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{style}</style>"
        f"<h1>{html.escape(title)}</h1><p>step {summary.step_seconds * 1e3:.2f} ms, MFU {summary.mfu:.1%}, "
        f"MBU {summary.mbu:.1%}; peaks measured on this device: {peaks.flops / 1e9:.1f} GFLOP/s, "
        f"{peaks.bandwidth / 1e9:.1f} GB/s</p>"
        f"<img alt='roofline' style='max-width:100%' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"
        + table("By kind", lambda s: kind_of(s.op))
        + table("By op", lambda s: s.op)
        + table("By phase", lambda s: s.scope.phase or "(none)")
        + table("By layer", lambda s: s.scope.layer or "(none)")
        + f"<h2>Why these kernels</h2><table class='why'>{why}</table></html>\n"
    )


def _rate(amount: int, row: Row) -> str:
    return f"{amount / row.seconds / 1e9:.2f}" if row.seconds > 0 else ""


def trace_events(steps: Sequence[Sequence[OpSample]]) -> dict[str, object]:
    """The steps in Chrome's trace format ("Trace Event Format", complete events, microseconds): a row a phase."""
    origin = steps[0][0].start
    phases: dict[str, int] = {}
    events: list[dict[str, object]] = []
    for number, step in enumerate(steps):
        for sample in step:
            thread = phases.setdefault(sample.scope.phase or "other", len(phases) + 1)
            events.append(
                {
                    "name": sample.op,
                    "cat": kind_of(sample.op),
                    "ph": "X",
                    "ts": (sample.start - origin) * 1e6,
                    "dur": sample.seconds * 1e6,
                    "pid": 1,
                    "tid": thread,
                    "args": {
                        "step": number,
                        "layer": sample.scope.layer,
                        "ops": " + ".join(sample.parts),
                        "kernels": sample.kernels,
                        "flops": sample.flops,
                        "bytes": sample.bytes_moved,
                    },
                }
            )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": phase}}
        for phase, thread in phases.items()
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def write_files(
    folder: Path,
    summary: Summary,
    steps: Sequence[Sequence[OpSample]],
    title: str,
    reasons: Sequence[tuple[str, str]],
) -> list[Path]:
    """roofline.png, profile.html, trace.json and profile.json. Raises BadInputError where they cannot be written."""
    png = roofline_png(summary, title)
    contents = {
        "roofline.png": png,
        "profile.html": html_page(summary, title, png, reasons).encode(),
        "trace.json": json.dumps(trace_events(steps)).encode(),
        "profile.json": json.dumps({**summary.as_dict(), "kernels": dict(reasons)}, indent=1).encode(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in contents.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise BadInputError(f"cannot write the profile to {folder}: {error.strerror or error}") from error
    return [folder / name for name in contents]
