"""What is known of a device's kernel variants, kept on disk: those checked, those barred, what tuning measured.

One file a family of kernels, their version, device and driver, in the cache folder under `tuning/`; its name holds
them all and its content repeats them for people. A file that is missing, damaged or of another shape counts as empty.
Programs that run at the same time add to one file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import switches
from .kernel_registry import write_atomically
from .physical_device import PhysicalDevice

try:
    import fcntl
except ImportError:  # Windows: a note of two at the same moment may be lost there
    fcntl = None  # type: ignore[assignment]

FORMAT = 1


class TuningTable:
    """checked: kernels whose result was compared with the base variant's and equal. barred: variant -> what was wrong.

    times: op and shape ("matmul 1x512x512x512 NN") -> variant -> seconds. path: None keeps it in memory alone.
    unsaved: why what was noted last is not in the file; "" where it is.
    """

    def __init__(self, path: Path | None = None, about: dict[str, str] | None = None) -> None:
        self.path = path
        self.about = about or {}
        self.checked: set[str] = set()
        self.barred: dict[str, str] = {}
        self.times: dict[str, dict[str, float]] = {}
        self.unsaved = ""
        self.load()

    @classmethod
    def of_device(cls, device: PhysicalDevice, family: str, kernel_hash: str) -> TuningTable:
        """The table of a device and its driver (UUID, name and version) for a family of kernels with this hash."""
        driver = f"{device.driver_name} {device.driver_info} {device.driver_version:#x}"
        about = {"device": device.name, "uuid": device.uuid, "driver": driver, "kernels": f"{family} {kernel_hash}"}
        name = f"{device.driver_key}-{family}-{kernel_hash}.json"
        return cls(switches.cache_folder() / "tuning" / name, about)

    def load(self) -> None:
        """Add what the file holds, which may be more than when it was last read."""
        path = self.path
        if path is None:
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT or data["about"] != self.about:
                raise ValueError("it is of another device or format")
            checked = {str(name) for name in data["checked"]}
            barred = {str(name): str(reason) for name, reason in data["barred"].items()}
            times = {
                str(key): {str(name): float(seconds) for name, seconds in row.items()}
                for key, row in data["times"].items()
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            switches.logger.warning("tuning file %s is not used: %s", path, error)
            return
        for key, row in times.items():
            impossible = {name: seconds for name, seconds in row.items() if not 0 < seconds < math.inf}
            if impossible:
                switches.logger.warning("tuning file %s: times of %s are not believed: %s", path, key, impossible)
            times[key] = {name: seconds for name, seconds in row.items() if name not in impossible}
        self.checked |= checked
        self.barred |= barred
        self.times |= {key: row for key, row in times.items() if row}

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Load, change, save, with other programs kept from doing the same meanwhile."""
        path = self.path
        if path is None:
            yield
            return
        with _only_one(path.with_suffix(".lock")):
            self.load()
            yield
            self._save(path)

    def _save(self, path: Path) -> None:
        """Write the file, whole or not at all; a cache that cannot be written is no error."""
        data: dict[str, Any] = {
            "format": FORMAT,
            "about": self.about,
            "checked": sorted(self.checked),
            "barred": self.barred,
            "times": self.times,
        }
        self.unsaved = write_atomically(path, (json.dumps(data, indent=1) + "\n").encode())

    def note_checked(self, kernel: str) -> None:
        """A kernel agreed with the base variant."""
        with self._changing():
            self.checked.add(kernel)

    def bar(self, variant: str, reason: str) -> None:
        """Never use a variant again on this device with this driver."""
        with self._changing():
            self.barred[variant] = reason

    def note_times(self, key: str, seconds: dict[str, float]) -> None:
        """Put down what tuning measured for one op and shape, in place of what was there."""
        with self._changing():
            self.times[key] = dict(seconds)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Wait until no other program is in here with the same path; where it cannot be written, go on without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        yield
        return
    with file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
