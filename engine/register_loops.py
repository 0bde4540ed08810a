"""Text of kernels that keep tiles in registers: loops over them as loops, or written out for a driver that needs it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Braces(NamedTuple):
    """Statements in braces, under any head; or a loop over registers: an index `over` those `below` a count such as
    "ROWS * BLOCK".

    begin: the first index.
    """

    body: Sequence[str | Braces]
    head: str = ""
    over: str = ""
    below: str = ""
    begin: int = 0


Code = Sequence[str | Braces]
Lines = list[str | Braces]
_INDEX = re.compile(r"\b[a-z]\b")  # the indices of registers are the only names of one letter


def loop(index: str, count: str, body: Code, begin: int = 0) -> Lines:
    """A loop over registers."""
    return [Braces(body, over=index, below=count, begin=begin)]


def as_loops(code: Code, indent: str = "") -> str:
    """The text with loops over registers as loops, to be unrolled by the driver or not (macro UNROLL)."""
    text = ""
    for part in code:
        if isinstance(part, str):
            text += f"{indent}{part}\n"
            continue
        head = f"{part.head} " if part.head else ""
        if part.over:
            head = f"UNROLL for (uint {part.over} = {part.begin}; {part.over} < {part.below}; {part.over}++) "
        text += f"{indent}{head}{{\n{as_loops(part.body, indent + '    ')}{indent}}}\n"
    return text


def written_out(code: Code, sizes: Mapping[str, int], at: Mapping[str, int] | None = None) -> str:
    """The text with loops over registers written out. sizes: what counts are made of; at: the indices around it."""
    known = at or {}

    def placed(line: str) -> str:
        return _INDEX.sub(lambda match: str(known.get(match.group(), match.group())), line)

    text = ""
    for part in code:
        if isinstance(part, str):
            text += placed(part) + "\n"
        elif part.over:
            for i in range(part.begin, _number(part.below, sizes)):
                text += "{\n" + written_out(part.body, sizes, {**known, part.over: i}) + "}\n"
        else:
            text += f"{placed(part.head)} {{\n{written_out(part.body, sizes, known)}}}\n"
    return text


def _number(text: str, values: Mapping[str, int]) -> int:
    """A sum of products of names and numbers."""
    return sum(
        math.prod(int(name) if name.isdigit() else values[name] for name in term.split(" * "))
        for term in text.split(" + ")
    )
