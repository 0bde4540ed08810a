"""What every program here does with errors: one clear line and an exit code, a traceback only when asked for."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ..engine import switches
from ..engine.errors import VkfoldError

FILE_WIDTH = 160  # columns where the output is no terminal
WORD_WIDTH = 10  # of these a column of words can do with


class TableConsole(Console):
    """A console that never cuts what stands in a table: where it is too narrow, words and numbers go on below."""

    def __init__(self, *, stderr: bool = False, **settings: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        super().__init__(stderr=stderr, width=None if stream.isatty() else FILE_WIDTH, **settings)

    def print(self, *objects: Any, **settings: Any) -> None:
        """As rich's, tables folded."""
        for shown in objects:
            if isinstance(shown, Table):
                for column in shown.columns:
                    column.overflow = "fold"
                if Measurement.get(self, self.options.update(max_width=10_000), shown).maximum > self.width:
                    self._narrow(shown)
        super().print(*objects, **settings)

    def _narrow(self, table: Table) -> None:
        """Leave lines and edges out, and fold words rather than numbers where these have room."""
        table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)
        numbers = [column for column in table.columns if column.justify == "right"]
        digits = sum(max(cell_len(str(cell)) for cell in (column.header, *column.cells)) + 1 for column in numbers)
        if digits + WORD_WIDTH * (len(table.columns) - len(numbers)) <= self.width:
            for column in numbers:
                column.no_wrap = True


def run_program(name: str, main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run `main` on the arguments (the command line's when None) and return the exit code.

    Errors of this package print as one message and give their own exit code: 2 for bad input, else 1. With
    VKFOLD_LOG=debug the traceback comes first. Ctrl-C gives 130. A switch with a bad value is such an error, before
    anything is done.
    """
    for stream in (sys.stdout, sys.stderr):  # a file name, or a model's text, may have what the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        switches.check()
        return main(sys.argv[1:] if argv is None else argv)
    except VkfoldError as error:
        _show(name, error)
        return error.exit_code
    except MemoryError as error:
        print(f"{name}: error: out of memory: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def _show(name: str, error: VkfoldError) -> None:
    try:
        wanted = switches.get("VKFOLD_LOG") == "debug"
    except VkfoldError:
        wanted = False
    if wanted:
        traceback.print_exception(error)
    print(f"{name}: error: {error}", file=sys.stderr)
