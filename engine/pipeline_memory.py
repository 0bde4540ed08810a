"""Which pipelines a training step used the last time, so that the next run makes them before its first step.

With them is kept what their kernels' texts were (kernel_text.py): nothing is printed to find them; and what kinds of
calls the step made (remembered_calls.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .kernel import Kernel
from .kernel_registry import write_atomically
from .kernel_text import SOURCES, Printed, hash_of_sources, note_text
from .remembered_calls import CallKind
from .switches import cache_folder
from .vulkan_api import Device

_DIGEST = re.compile("[0-9a-f]{32}")
_MOST_PUSH_BYTES = 4096  # more than any kernel has
MAX_PROGRAMS = 64  # files kept in the cache; the oldest go


class Recipe(NamedTuple):
    """All that makes a pipeline. digest: of the kernel, whose SPIR-V is shipped or in the cache."""

    digest: str
    name: str
    local_size: int
    push_bytes: int
    subgroup_size: int | None
    constants: tuple[int, ...] = ()

    @classmethod
    def of(cls, kernel: Kernel, subgroup_size: int, max_invocations: int) -> Recipe:
        """The recipe of a kernel on a device with these limits."""
        size = kernel.workgroup_size(subgroup_size, max_invocations)
        required = subgroup_size if kernel.subgroups else None
        constants = tuple(kernel.constants.values())
        return cls(kernel.digest, kernel.name, size, kernel.packer.size, required, constants)


class Program(NamedTuple):
    """What is remembered of a program: recipes of its pipelines, and kinds of its calls, as JSON gives them."""

    recipes: list[Recipe]
    calls: list[CallKind]


NOTHING = Program([], [])


def program_path(device: Device, program: str) -> Path:
    """Where the recipes of a program are kept. program: any text that tells what will be run."""
    digest = hashlib.sha256(program.encode(errors="surrogatepass")).hexdigest()[:16]
    return cache_folder() / "programs" / f"{device.physical.driver_key}-{digest}.json"


def load_program(path: Path) -> Program:
    """What was remembered; the kernels' texts are known from now on. Nothing where there is no such file, or a damaged
    one; no calls and texts where they are another version's."""
    try:
        first, _, content = path.read_text(encoding="utf-8").partition("\n")
        if first != checksum(content):
            return NOTHING
        data = json.loads(content)
        recipes = [Recipe(*row[:5])._replace(constants=tuple(row[5])) for row in data["recipes"]]
        texts = {str(key): Printed(str(digest), bool(has_words)) for key, (digest, has_words) in data["texts"].items()}
        calls = [(str(op), list(inputs), dict(settings)) for op, inputs, settings in data["calls"]]
        sources = data["sources"]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return NOTHING
    if not sources or sources != SOURCES:
        texts, calls = {}, []
    for key, printed in texts.items():
        note_text(key, printed)
    return Program(list(dict.fromkeys(recipe for recipe in recipes if _is_recipe(recipe))), calls)


def _is_recipe(recipe: Recipe) -> bool:
    if not (isinstance(recipe.digest, str) and _DIGEST.fullmatch(recipe.digest) and isinstance(recipe.name, str)):
        return False
    size = 0 if recipe.subgroup_size is None else recipe.subgroup_size
    numbers = (recipe.local_size, recipe.push_bytes, size, *recipe.constants)
    if not (recipe.name.isprintable() and all(type(number) is int and 0 <= number < 2**32 for number in numbers)):
        return False
    return recipe.push_bytes <= _MOST_PUSH_BYTES


def save_program(
    path: Path, recipes: Sequence[Recipe], texts: Mapping[str, Printed], calls: Sequence[CallKind] = ()
) -> None:
    """Remember recipes, texts by the kernels' keys, and kinds of calls, unless they are there already; a folder that
    cannot be written is no error. No texts and calls where sources changed since they were imported: they may be of
    both."""
    raw = _packed(recipes, texts, calls)
    with suppress(OSError):
        if path.read_bytes() == raw:
            path.touch()  # of the oldest that go below, this is none
            return
    if hash_of_sources() != SOURCES:  # takes milliseconds
        raw = _packed(recipes, {}, ())
    write_atomically(path, raw)
    with suppress(OSError):
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-MAX_PROGRAMS]:
            old.unlink()


def _packed(recipes: Sequence[Recipe], texts: Mapping[str, Printed], calls: Sequence[CallKind]) -> bytes:
    data = {
        "sources": SOURCES,
        "recipes": sorted(recipes, key=lambda recipe: (recipe.name, recipe.digest)),
        "texts": dict(sorted(texts.items())),
        "calls": sorted(calls, key=repr),
    }
    content = json.dumps(data)
    return f"{checksum(content)}\n{content}".encode()


def checksum(content: str) -> str:
    """What the first line of a program's file says of the rest."""
    return hashlib.sha256(content.encode()).hexdigest()
