"""Which Vulkan driver (ICD file) a run uses, so that every library is given the same one and no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ICD_FOLDERS = (
    "/etc/vulkan/icd.d",
    "/usr/local/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
    "/usr/share/vulkan/icd.d",
    "/opt/homebrew/share/vulkan/icd.d",
)
_ICD_VARIABLES = ("VK_ICD_FILENAMES", "VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES")
_PROBE = """
import vkfold as vf
with vf.VulkanEngine() as engine:
    print(engine.device.physical.driver_key)
"""


@dataclass(frozen=True)
class Driver:
    """icd: the ICD file. library: what it names, an absolute path or a bare file name."""

    icd: Path
    library: str

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` with this driver and no other for the Vulkan loader."""
        rest = {name: value for name, value in base.items() if name not in _ICD_VARIABLES}
        return {**rest, "VK_ICD_FILENAMES": str(self.icd), "VK_DRIVER_FILES": str(self.icd)}


def read_icd(path: Path) -> Driver:
    """The driver of an ICD file. Raises ValueError for a file that is none."""
    try:
        library = json.loads(path.read_text(encoding="utf-8"))["ICD"]["library_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no Vulkan ICD file: {type(error).__name__}: {error}") from None
    if "/" in library or os.sep in library:
        library = str((path.parent / library).resolve())
    return Driver(path.resolve(), library)


def installed_icds() -> list[Path]:
    """ICD files in the loader's usual folders."""
    home = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share")) / "vulkan/icd.d"
    return [path for folder in (*map(Path, ICD_FOLDERS), home) for path in sorted(folder.glob("*.json"))]


def choose_driver(asked: str | None) -> Driver:
    """An ICD file; or what the environment names; or the one that drives the device vkfold chooses.

    Raises ValueError when it cannot be found out: then `--driver` must say it.
    """
    if asked:
        return read_icd(Path(asked))
    named = [path for name in _ICD_VARIABLES for path in os.environ.get(name, "").split(os.pathsep) if path]
    if named:
        return read_icd(Path(named[0]))
    chosen = _device(os.environ)
    for path in installed_icds():
        driver = read_icd(path)
        if chosen and _device(driver.environment(os.environ)) == chosen:
            return driver
    raise ValueError("no ICD file was found for the Vulkan device: name one with --driver FILE.json")


def _device(environment: Mapping[str, str]) -> str:
    """What tells device and driver apart, "" when there is none."""
    done = subprocess.run([sys.executable, "-c", _PROBE], env=dict(environment), capture_output=True, text=True)
    return done.stdout.strip()
