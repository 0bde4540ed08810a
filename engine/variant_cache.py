"""What is known of a device's kernel variants, kept on disk: those checked, those barred, what tuning measured.

One file a family of kernels, their version, device and driver, in the cache folder under `tuning/`; its name holds
them all and its content repeats them for people. A file that is missing, damaged or of another shape counts as empty.
Programs that run at the same time add to one file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import switches
from .kernel_registry import write_atomically
from .physical_device import PhysicalDevice

FORMAT = 1


class TuningTable:
    """checked: kernels whose result was compared with the base variant's and equal. barred: variant -> what was wrong.

    times: op and shape ("matmul 1x512x512x512 NN") -> variant -> seconds. path: None keeps it in memory alone.
    """

    def __init__(self, path: Path | None = None, about: dict[str, str] | None = None) -> None:
        self.path = path
        self.about = about or {}
        self.checked: set[str] = set()
        self.barred: dict[str, str] = {}
        self.times: dict[str, dict[str, float]] = {}
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
        self.checked |= checked
        self.barred |= barred
        self.times |= times

    def _save(self) -> None:
        """Write the file, whole or not at all; a cache that cannot be written is no error."""
        if self.path is None:
            return
        data: dict[str, Any] = {
            "format": FORMAT,
            "about": self.about,
            "checked": sorted(self.checked),
            "barred": self.barred,
            "times": self.times,
        }
        write_atomically(self.path, (json.dumps(data, indent=1) + "\n").encode())

    def note_checked(self, kernel: str) -> None:
        """A kernel agreed with the base variant."""
        self.load()
        self.checked.add(kernel)
        self._save()

    def bar(self, variant: str, reason: str) -> None:
        """Never use a variant again on this device with this driver."""
        self.load()
        self.barred[variant] = reason
        self._save()

    def note_times(self, key: str, seconds: dict[str, float]) -> None:
        """Put down what tuning measured for one op and shape, in place of what was there."""
        self.load()
        self.times[key] = dict(seconds)
        self._save()
