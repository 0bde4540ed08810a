"""Compiled kernels: shipped with the package, kept in the user's cache, or compiled when first needed."""

from __future__ import annotations

import importlib
import os
import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import switches
from .glsl_compiler import compile_glsl
from .kernel import SHADER_DIR, Kernel
from .op import OPS

SHIPPED_DIR = SHADER_DIR / "spirv"
_MAGIC = b"\x03\x02\x23\x07"
_loaded: dict[str, bytes] = {}


def spirv_for(kernel: Kernel) -> bytes:
    """SPIR-V of a kernel: from memory, the package, the user's cache, else compiled and put into the cache.

    Raises GlslCompileError or CompilerUnavailableError where it must be compiled and cannot.
    """
    found = _loaded.get(kernel.digest)
    if found is None:
        name = f"{kernel.digest}.spv"
        found = _read(SHIPPED_DIR / name) or _read(cached_dir() / name)
        if found is None:
            found = compile_glsl(kernel.glsl, kernel.name)
            write_atomically(cached_dir() / name, found)
        _loaded[kernel.digest] = found
    return found


def cached_dir() -> Path:
    """Where kernels compiled on this machine are kept."""
    return switches.cache_folder() / "spirv"


def known_kernels() -> Iterator[Kernel]:
    """Every kernel the ops declare, each text once: what is compiled ahead of time."""
    package = importlib.import_module(".ops", __package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    seen: set[str] = set()
    for op in OPS.values():
        for kernel in op.kernels():
            if kernel.digest not in seen:
                seen.add(kernel.digest)
                yield kernel


def _read(path: Path) -> bytes | None:
    """A SPIR-V file; None when it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if data[:4] == _MAGIC and len(data) % 4 == 0 else None


def write_atomically(path: Path, data: bytes) -> None:
    """Write a cache file complete or not at all; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        switches.logger.info("cannot write the cache file %s: %s", path, error)
