"""`python -m vkfold kernels [WORD ...]`: every kernel there is a name for, its variants, and where each comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from ..engine.errors import BadInputError
from ..engine.fold_variants import variant_names as row_names
from ..engine.kernel import Kernel
from ..engine.kernel_registry import cached_names, kernels_by_op, origin
from ..engine.loop_variants import variant_names as loop_names
from ..engine.map_variants import map_variants
from .console import TableConsole

_SHOWN = 4
_FROM = {"package": "compiled ahead of time", "cache": "in the cache", "": "compiled at first use"}
FAMILIES = {
    "map": [choice.name for choice in map_variants("", 2**16)],
    "row_fold": row_names(),
    "loop": loop_names(),
}
_NO_OP = "(in the cache)"  # compiled when they were needed, and declared by no op: see _OTHERS
_OTHERS = (
    "of ops, for a head_dim, an expression or rows kept in registers that no kernel is compiled ahead of time for; of "
    "engine.map, engine.fold or a Kernel of your own; made by fusion; or left by an op that was since changed"
)


def main(words: Sequence[str]) -> int:
    """Print one line an op, or with words one a kernel whose op or name has any of them. 1 when none has."""
    for word in words:
        if word in ("-h", "--help"):
            print(main.__doc__)
            return 0
        if word.startswith("-"):
            raise BadInputError(f"vkfold kernels takes words of names, not {word!r}: name an op, for example softmax")
    console = TableConsole(highlight=False)
    kernels = kernels_by_op()
    known = {kernel.digest for group in kernels.values() for kernel in group}
    others = sorted(name for digest, name in cached_names().items() if digest not in known)
    table = detail_table(kernels, others, words) if words else overview_table(kernels, others)
    if not table.row_count:
        console.print(f"no op and no kernel is called anything like {' or '.join(words)}", markup=False)
        return 1
    console.print(table)
    if not words:
        for family, names in FAMILIES.items():
            console.print(f"variants of each kernel of the family {family}: {', '.join(names)}", soft_wrap=True)
        console.print(
            f"{len(known)} different kernels that ops declare; in the cache also {len(others)} more: {_OTHERS}. "
            "One line a kernel: python -m vkfold kernels OP",
            soft_wrap=True,
        )
    return 0


def overview_table(kernels: Mapping[str, Sequence[Kernel]], others: Sequence[str]) -> Table:
    """One line an op: its kernels counted by where they come from; the last, those in the cache that no op declares."""
    table = Table("op", "kernels", "variants", "from", box=None, pad_edge=False)
    for name, group in sorted(kernels.items()):
        if group:
            origins = [origin(kernel) for kernel in group]
            counts = [f"{origins.count(key)} {_FROM[key]}" for key in _FROM if key in origins]
            table.add_row(name, str(len(group)), _variants(name, [k.name for k in group]), ", ".join(counts))
    if others:
        table.add_row(_NO_OP, str(len(others)), _variants("", others), f"{len(others)} {_FROM['cache']}")
    return table


def detail_table(kernels: Mapping[str, Sequence[Kernel]], others: Sequence[str], words: Sequence[str]) -> Table:
    """One line a kernel. One that has two texts, the second with WORDS64 for drivers that are given that, has two."""
    table = Table("op", "kernel", "family", "workgroup", "arguments", "defines", "from", box=None, pad_edge=False)
    for op, group in sorted(kernels.items()):
        for kernel in group:
            if any(word in op or word in kernel.name for word in words):
                size = f"{kernel.subgroups} subgroups" if kernel.subgroups else str(kernel.local_size)
                arguments = f"{kernel.num_pointers} pointers, {kernel.packer.size} bytes"
                defines = " ".join(f"{key}={value}" for key, value in kernel.defines.items())
                table.add_row(op, kernel.name, kernel.family, size, arguments, defines, _FROM[origin(kernel)])
    for name in others:
        if any(word in name for word in words):
            table.add_row(_NO_OP, name, "", "", "", "", _FROM["cache"])
    return table


def _variants(op: str, names: Sequence[str]) -> str:
    """The first few names, without the op's own."""
    short = list(dict.fromkeys(name.removeprefix(op.rstrip("_") + "_") for name in names))
    return ", ".join(short[:_SHOWN]) + (f" and {len(short) - _SHOWN} more" if len(short) > _SHOWN else "")
