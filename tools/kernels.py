"""`python -m vkfold kernels [WORD ...]`: every kernel that ops can launch, its variants, and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from ..engine.errors import BadInputError
from ..engine.kernel import Kernel
from ..engine.kernel_registry import cached_kernels, known_kernels, origin
from ..engine.op import OPS
from .console import TableConsole

_SHOWN = 4
_FROM = {"package": "compiled ahead of time", "cache": "in the cache", "": "compiled at first use"}


def main(words: Sequence[str]) -> int:
    """Print one line an op, or with words one a kernel whose op or name has any of them. 1 when none has."""
    for word in words:
        if word in ("-h", "--help"):
            print(main.__doc__)
            return 0
        if word.startswith("-"):
            raise BadInputError(f"vkfold kernels takes words of names, not {word!r}: name an op, for example softmax")
    console = TableConsole(highlight=False)
    table = detail_table(words) if words else overview_table()
    if not table.row_count:
        console.print(f"no op and no kernel is called anything like {' or '.join(words)}", markup=False)
        return 1
    console.print(table)
    if not words:
        console.print(
            f"{sum(1 for _ in known_kernels())} different kernels of ops. {len(cached_kernels())} files in the cache, "
            "engine.map's and kernels of your own among them. One line a kernel: python -m vkfold kernels OP",
            soft_wrap=True,
        )
    return 0


def overview_table() -> Table:
    """One line an op: its kernels counted by where they come from."""
    table = Table("op", "kernels", "variants", "from", box=None, pad_edge=False)
    for name, kernels in kernels_by_op():
        if not kernels:
            continue
        origins = [origin(kernel) for kernel in kernels]
        counts = [f"{origins.count(key)} {_FROM[key]}" for key in _FROM if key in origins]
        table.add_row(name, str(len(kernels)), _variants(name, kernels), ", ".join(counts))
    return table


def detail_table(words: Sequence[str]) -> Table:
    """One line a kernel."""
    table = Table("op", "kernel", "workgroup", "arguments", "defines", "from", box=None, pad_edge=False)
    for name, kernels in kernels_by_op():
        for kernel in kernels:
            if any(word in name or word in kernel.name for word in words):
                size = f"{kernel.subgroups} subgroups" if kernel.subgroups else str(kernel.local_size)
                arguments = f"{kernel.num_pointers} pointers, {kernel.packer.size} bytes"
                defines = " ".join(f"{key}={value}" for key, value in kernel.defines.items())
                table.add_row(name, kernel.name, size, arguments, defines, _FROM[origin(kernel)])
    return table


def kernels_by_op() -> list[tuple[str, list[Kernel]]]:
    """Every op and its kernels, by name."""
    for _ in known_kernels():  # imports the ops
        break
    return [(name, list(op.kernels())) for name, op in sorted(OPS.items())]


def _variants(op: str, kernels: Sequence[Kernel]) -> str:
    """The first few names, without the op's own."""
    names = [kernel.name.removeprefix(op.rstrip("_") + "_") for kernel in kernels]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
