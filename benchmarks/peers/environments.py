"""The libraries, and a virtual environment for each, made at first use in a cache folder and kept."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs


@dataclass(frozen=True)
class Peer:
    """A library. requirements: for pip; empty: this interpreter. environment: whose environment it shares, "" its own.

    vulkan: runs on the Vulkan driver (the others are the machine's yardstick). python: (major, minor) that its wheels
    need for the version compared; with an older one pip takes the newest version there is.
    """

    name: str
    requirements: tuple[str, ...] = ()
    vulkan: bool = True
    environment: str = ""
    python: tuple[int, int] = (3, 10)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vkfold"),
        Peer("torchvulkan", ("torchvulkan>=0.2.1,<0.3", "torch>=2.10,<2.14", "numpy>=1.26")),
        Peer("ggml", ("cyllama-vulkan>=0.2.18,<0.8", "numpy>=1.26"), python=(3, 12)),
        Peer("computeml", ("computeml>=0.4.4,<0.5", "numpy>=1.26")),
        Peer("tinygrad", ("tinygrad>=0.11,<0.15", "dawn-python>=0.3,<0.4", "numpy>=1.26")),
        Peer("aule", ("aule-attention>=0.5,<0.6", "numpy>=1.26")),
        Peer("numpy", vulkan=False),
        Peer("torch", ("torchvulkan>=0.2.1,<0.3", "torch>=2.10,<2.14", "numpy>=1.26"), False, "torchvulkan"),
    )
}


class InstallFailed(Exception):
    """pip or venv failed; the text is the last line of what it said."""


def cache_folder() -> Path:
    """Where the environments are."""
    return platformdirs.user_cache_path("vkfold") / "benchmark_peers"


def find_python(wanted: tuple[int, int]) -> str:
    """An interpreter at least that new: this one, one on the PATH, or one installed beside this one; else this one."""
    if sys.version_info[:2] >= wanted:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(wanted[1], 15)]
    beside = Path(sys.base_prefix).resolve().parent
    found = [path for name in names for path in sorted(beside.glob(f"*{name[6:]}*/bin/{name}"))]
    for candidate in (*names, *map(str, found)):
        try:
            if subprocess.run([candidate, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return sys.executable


def python_of(peer: Peer, timeout: float = 1800) -> str:
    """The interpreter of a peer's environment, which is made if it is not there. Raises InstallFailed."""
    if not peer.requirements:
        return sys.executable
    python = find_python(peer.python)
    key = hashlib.sha256(repr((peer.requirements, python)).encode()).hexdigest()[:8]
    folder = cache_folder() / f"{peer.environment or peer.name}-{key}"
    inside = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    complete = folder / "complete"
    if not complete.exists():
        _run([python, "-m", "venv", "--clear", str(folder)], timeout)
        _run([str(inside), "-m", "pip", "install", "--quiet", *peer.requirements], timeout)
        complete.touch()
    return str(inside)


def _run(command: list[str], timeout: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise InstallFailed(f"not installed within {timeout:.0f} s") from None
    if done.returncode:
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in (done.stderr or done.stdout).splitlines()]
        errors = [line for line in lines if line.startswith("ERROR")] or [line for line in lines if line]
        raise InstallFailed(errors[-1] if errors else f"exit code {done.returncode}")
