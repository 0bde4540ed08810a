"""vkfold beside other Vulkan libraries on the same driver, in the same run, with NumPy and PyTorch on the CPU as the
machine's yardstick. Each library gets a virtual environment at first use (the first run needs the network).

    ./run bench                              every work, every library
    ./run bench --only matmul --json FILE    works whose name holds "matmul"; rows also to FILE
    ./run bench --driver /path/to/icd.json   on this Vulkan driver

A product of [M, K] and [K, N] is called MxKxN here; kernel_lab and `vkfold tune --shapes` write MxNxK.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
from pathlib import Path
from typing import Any

import work as works
from compare import Comparison, Limits, Row
from drivers import choose_driver
from environments import PEERS
from goals import GOALS, WRONG
from rich.console import Console
from rich.table import Table

from vkfold.engine.errors import VkfoldError
from vkfold.engine.host_memory import available_bytes


def chosen_works(only: list[str]) -> list[works.Work]:
    """Default works whose name holds one of the words, or the one work of that exact name. Raises ValueError."""
    if not only:
        return [works.work_named(name) for name in works.DEFAULT]
    names: dict[str, None] = {}
    for word in only:
        try:
            found = [works.work_named(word).name]
        except ValueError:
            found = [name for name in works.DEFAULT if word in name]
            if not found:
                raise
        names |= dict.fromkeys(found)
    return [works.work_named(name) for name in names]


def check_fits(work: works.Work) -> None:
    """Raises ValueError for a work whose operands and float64 results this machine's RAM cannot hold."""
    if not isinstance(work, works.Matmul | works.Attention):
        return
    needed, available = work.least_bytes, available_bytes()
    if needed > available:
        raise ValueError(
            f"{work.name} needs at least {needed:,} bytes of RAM (operands, and results in float64 to compare with); "
            f"{available:,} are available: choose a smaller size"
        )


def check_limits(limits: Limits) -> None:
    """Raises ValueError, with the option's name, for numbers that bound nothing."""
    if limits.rounds < 1:
        raise ValueError(f"--rounds {limits.rounds}: at least 1 is needed")
    if not 0 < limits.seconds < math.inf:
        raise ValueError(f"--seconds {limits.seconds:g}: it must be a finite number above 0")
    if not 0 < limits.timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"--timeout {limits.timeout:g}: it must be a number of seconds above 0, at most {threading.TIMEOUT_MAX:.0f}"
        )


def check_writable(path: Path) -> None:
    """Raises ValueError when no rows can be written to this file; one that is not there yet is not left behind."""
    try:
        if path.is_dir():
            raise ValueError(f"--json {path} is a folder: name a file in it, such as {path / 'rows.json'}")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--json {path}: its folder does not exist")
        is_new = not path.exists()
        if is_new or path.is_file():  # a pipe or a device may tell its reader that this was all
            with path.open("a"):
                pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error.strerror}") from None


def write_rows(path: Path, rows: list[Row]) -> str:
    """Write them all; what went wrong, or "". A full disk shall not cost the rest of the run."""
    try:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return f"--json {path} could not be written: {error.strerror}"
    return ""


def significant(value: float | None, digits: int = 3) -> str:
    """A number for a table."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if value < 100 else f"{value:,.0f}"


def table_of(rows: list[Row], driver: str) -> Table:
    """One line a row, works apart."""
    table = Table(title=f"{driver}; medians", title_justify="left")
    for heading in ("work", "library", "version"):
        table.add_column(heading)
    for heading in ("ms", "spread", "best", "cpu ms", "error", "x vkfold"):
        table.add_column(heading, justify="right")
    last = ""
    for row in (row for row in rows if "failed" not in row):
        if last and row["work"] != last:
            table.add_section()
        name = row["work"] if row["work"] != last else ""
        last = row["work"]
        error = "[red]wrong[/red]" if row["error"] is None else f"{row['error']:.0e}"
        if row["error"] is not None and row["error"] > WRONG:
            error = f"[red]wrong: {error}[/red]"
        times = (significant(row["ms"]), significant(row["spread"], 2), *map(significant, (row["best"], row["cpu_ms"])))
        table.add_row(name, row["library"], row["version"], *times, error, significant(row["ratio"]))
    return table


def left_out(rows: list[Row]) -> list[str]:
    """One line for each library and reason: which works it was not timed on, and why."""
    works_of: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "failed" in row:
            works_of.setdefault((row["library"], row["failed"]), []).append(row["work"])
    return [f"not timed: {library} at {', '.join(names)}: {why}" for (library, why), names in works_of.items()]


def goals_table(rows: list[Row]) -> Table:
    """Goals that the rows tell about."""
    table = Table(title="goals", title_justify="left")
    table.add_column("what")
    for heading in ("at least", "here", ""):
        table.add_column(heading, justify="right")
    for goal in GOALS:
        value = goal.value(rows)
        if value is not None:
            verdict = "[green]reached[/green]" if value >= goal.least else "[red]missed[/red]"
            table.add_row(goal.text, significant(goal.least), significant(value), verdict)
    return table


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="./run bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", action="append", default=[], metavar="NAME", help="works whose name holds this; repeat")
    made.add_argument("--library", action="append", default=[], choices=PEERS, help="only these; repeat (default: all)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows as one JSON list")
    made.add_argument(
        "--driver", metavar="ICD", help="ICD file of the Vulkan driver (default: that of vkfold's device)"
    )
    made.add_argument("--rounds", type=int, default=Limits.rounds, help="rounds over all libraries")
    made.add_argument(
        "--seconds", type=float, default=Limits.seconds, help="of timed work of one library at a work, about"
    )
    made.add_argument("--timeout", type=float, default=Limits.timeout, help="seconds for any one answer of a library")
    made.add_argument("--list", action="store_true", help="name works and libraries, and stop")
    return made


def list_all(console: Console) -> None:
    """Works and libraries."""
    console.print("works (any size goes: matmul MxKxN [NN|NT|TN|TT], attention BxHxSxD f+b):")
    for name in works.DEFAULT:
        console.print(f"  {name}", highlight=False)
    console.print("products are MxKxN here, MxNxK for kernel_lab and `vkfold tune --shapes`", highlight=False)
    console.print("libraries:")
    for peer in PEERS.values():
        what = ", ".join(peer.requirements) or "this environment"
        console.print(f"  {peer.name:12s} {'Vulkan' if peer.vulkan else 'CPU':7s}{what}", highlight=False, markup=False)


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 for bad input and rows that could not be written; a library that fails is a row, not an error."""
    options = parser().parse_args(arguments)
    console, notes = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    if options.list:
        list_all(console)
        return 0
    try:
        limits = Limits(options.rounds, options.seconds, options.timeout)
        check_limits(limits)
        if options.json is not None:
            check_writable(options.json)
        chosen = chosen_works(options.only)
        for work in chosen:
            check_fits(work)
        driver = choose_driver(options.driver)
        libraries = [name for name in PEERS if not options.library or name in options.library]

        def say(text: str) -> None:
            notes.print(text, highlight=False, markup=False)

        say(f"driver: {driver.icd}")
        comparison = Comparison(libraries, driver, limits, say)
        rows: list[dict[str, Any]] = []
        unwritten = ""
        for row in comparison.run(chosen):
            rows.append(row)
            if options.json is not None:  # what is there is kept if the run is interrupted
                unwritten = write_rows(options.json, rows)
    except (ValueError, VkfoldError) as error:
        notes.print(str(error), style="bold red", highlight=False, markup=False)
        return 2
    console.print(table_of(rows, comparison.driver_text))
    for line in left_out(rows):
        console.print(line, highlight=False, markup=False)
    goals = goals_table(rows)
    if goals.row_count:
        console.print(goals)
    if unwritten:
        notes.print(unwritten, style="bold red", highlight=False, markup=False)
    return 2 if unwritten else 0


if __name__ == "__main__":
    sys.exit(main())
