"""Compiled kernels: shipped with the package, kept in the user's cache, or compiled when first needed."""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

from . import switches
from .glsl_compiler import compile_glsl, compiler_name
from .kernel import SHADER_DIR, Kernel
from .op import OPS

SHIPPED_DIR = SHADER_DIR / "spirv"
_MAGIC = b"\x03\x02\x23\x07"
_CHECKSUM_BYTES = 32
_loaded: dict[str, bytes] = {}
_available: set[str] = set()


def spirv_for(kernel: Kernel) -> bytes:
    """SPIR-V of a kernel: from memory, the package, the user's cache, else compiled and put into the cache.

    Raises GlslCompileError or CompilerUnavailableError where it must be compiled and cannot.
    """
    found = _loaded.get(kernel.digest)
    if found is None:
        found = _shipped(kernel.digest) or _cached(kernel.digest)
        if found is None:
            kernel.check_text()
            found = compile_glsl(kernel.glsl, kernel.name)
            named = kernel.name.encode() + b"\0" + found
            write_atomically(cache_path(kernel), _checksum(kernel.digest, named) + named)
        _loaded[kernel.digest] = found
    return found


def is_available(kernel: Kernel) -> bool:
    """Whether `spirv_for` can give it: it is there already, or there is a compiler."""
    if compiler_name():
        return True
    digest = kernel.digest
    if digest in _loaded or digest in _available:
        return True
    found = bool(_shipped(digest) or _cached(digest))
    if found:
        _available.add(digest)
    return found


def spirv_of_digest(digest: str) -> bytes | None:
    """SPIR-V of a kernel known by its digest alone; None where it would have to be compiled."""
    return _loaded.get(digest) or _shipped(digest) or _cached(digest)


def cache_path(kernel: Kernel) -> Path:
    """Where the kernel is kept once compiled on this machine: a SHA-256 of its digest and of what follows, its name,
    NUL, the SPIR-V."""
    return _path_of(kernel.digest)


def _path_of(digest: str) -> Path:
    return switches.cache_folder() / "spirv" / f"{digest}-{_revision()}.spv"


def origin(kernel: Kernel) -> str:
    """Where a kernel would come from in a fresh process: "package", "cache", or "" when it must be compiled."""
    if _shipped(kernel.digest) is not None:
        return "package"
    return "cache" if _cached(kernel.digest) is not None else ""


def cached_names() -> dict[str, str]:
    """Digest -> name of the kernels in the user's cache that this version would use."""
    found = {}
    for path in sorted((switches.cache_folder() / "spirv").glob(f"*-{_revision()}.spv")):
        digest = path.name.partition("-")[0]
        if (kept := _read_cached(path)) is not None:
            found[digest] = kept[0]
    return found


def kernels_by_op() -> dict[str, list[Kernel]]:
    """Every op's name, and those of joint ops that fusion is known to make -> its kernels.

    Where a kernel has a twin that reads and writes two 64-bit words, which some drivers are given, it comes next.
    """
    package = importlib.import_module(".ops", __package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    fusion = importlib.import_module(".fusion_map", __package__)
    declared: dict[str, Iterable[Kernel]] = {name: op.kernels() for name, op in OPS.items()}
    for joint in fusion.known_ops():
        declared[joint.name] = [*declared.get(joint.name, ()), *joint.kernels()]
    return {
        name: list({text.digest: text for kernel in kernels for text in (kernel, kernel.in_words)}.values())
        for name, kernels in declared.items()
    }


def known_kernels() -> Iterator[Kernel]:
    """Every kernel the ops declare, and those that fusion makes of them, each text once: compiled ahead of time."""
    seen: set[str] = set()
    for kernel in chain(*kernels_by_op().values()):
        if kernel.digest not in seen:
            seen.add(kernel.digest)
            yield kernel


@cache
def _revision() -> str:
    """Changes with the code between GLSL and SPIR-V: what another version compiled is not what this one would."""
    folder = Path(__file__).parent
    sources = b"".join((folder / name).read_bytes() for name in ("glsl_compiler.py", "spirv.py"))
    return hashlib.sha256(b"name, NUL, SPIR-V, checked with its digest" + sources).hexdigest()[:8]


_revision()  # of the files as they are imported


def _checksum(digest: str, named: bytes) -> bytes:
    """With the digest, so that two files that changed places are damaged ones."""
    return hashlib.sha256(digest.encode() + named).digest()


def _shipped(digest: str) -> bytes | None:
    data = _read(SHIPPED_DIR / f"{digest}.spv")
    return data if data[:4] == _MAGIC else None


def _cached(digest: str) -> bytes | None:
    """From the user's cache; None when missing or damaged (drivers trust SPIR-V and crash on half of one)."""
    kept = _read_cached(_path_of(digest))
    return None if kept is None else kept[1]


def _read_cached(path: Path) -> tuple[str, bytes] | None:
    raw, digest = _read(path), path.name.partition("-")[0]
    named = raw[_CHECKSUM_BYTES:]
    name, _, spirv = named.partition(b"\0")
    if spirv[:4] != _MAGIC or _checksum(digest, named) != raw[:_CHECKSUM_BYTES]:
        return None
    return name.decode(errors="replace"), spirv


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def write_atomically(path: Path, data: bytes) -> str:
    """Write a cache file complete or not at all; a cache that cannot be written is no error. Returns what was wrong."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        switches.logger.info("cannot write the cache file %s: %s", path, error)
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)
        return f"cannot write {path}: {error.strerror or error}"
    return ""
