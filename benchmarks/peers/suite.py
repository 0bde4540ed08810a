"""vkfold beside other Vulkan libraries on the same driver, in the same run, with NumPy and PyTorch on the CPU as the
machine's yardstick. Each library gets a virtual environment at first use (the first run needs the network).

    ./run bench                              every work, every library
    ./run bench --only matmul --json FILE    works whose name holds "matmul"; rows also to FILE
    ./run bench --driver /path/to/icd.json   on this Vulkan driver
"""

from __future__ import annotations

import argparse
import json
import sys
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
    made.add_argument("--seconds", type=float, default=Limits.seconds, help="of one library at one work, about")
    made.add_argument("--timeout", type=float, default=Limits.timeout, help="seconds for any one answer of a library")
    made.add_argument("--list", action="store_true", help="name works and libraries, and stop")
    return made


def list_all(console: Console) -> None:
    """Works and libraries."""
    console.print("works (any size goes: matmul MxKxN [NN|NT|TN|TT], attention BxHxSxD f+b):")
    for name in works.DEFAULT:
        console.print(f"  {name}", highlight=False)
    console.print("libraries:")
    for peer in PEERS.values():
        what = ", ".join(peer.requirements) or "this environment"
        console.print(f"  {peer.name:12s} {'Vulkan' if peer.vulkan else 'CPU':7s}{what}", highlight=False, markup=False)


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 for bad input; a library that fails is a row, not an error."""
    options = parser().parse_args(arguments)
    console, notes = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    if options.list:
        list_all(console)
        return 0
    try:
        if options.rounds < 1:
            raise ValueError(f"--rounds {options.rounds}: at least 1 is needed")
        if options.json is not None and not options.json.absolute().parent.is_dir():
            raise ValueError(f"--json {options.json}: its folder does not exist")
        chosen = chosen_works(options.only)
        driver = choose_driver(options.driver)
        libraries = [name for name in PEERS if not options.library or name in options.library]
        limits = Limits(options.rounds, options.seconds, options.timeout)

        def say(text: str) -> None:
            notes.print(text, highlight=False, markup=False)

        say(f"driver: {driver.icd}")
        comparison = Comparison(libraries, driver, limits, say)
        rows: list[dict[str, Any]] = []
        for row in comparison.run(chosen):
            rows.append(row)
            if options.json is not None:  # what is there is kept if the run is interrupted
                options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    except (ValueError, VkfoldError) as error:
        notes.print(str(error), style="bold red", highlight=False, markup=False)
        return 2
    console.print(table_of(rows, comparison.driver_text))
    for line in left_out(rows):
        console.print(line, highlight=False, markup=False)
    goals = goals_table(rows)
    if goals.row_count:
        console.print(goals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
