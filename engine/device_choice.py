"""Which device to use: a pure function over the list the loader gave."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import BadInputError, VulkanUnavailableError
from .physical_device import PhysicalDevice
from .switches import logger

_RANK = {"discrete": 0, "integrated": 1, "virtual": 2, "other": 3, "cpu": 4}
_UUID = re.compile(r"[0-9a-f]{32}")
_LEAST_DIGITS = 3  # of a number that names a device: fewer are an index that is none, and versions have them too
_warned_cpu = False

DRIVER_HINT = (
    "install your GPU's Vulkan driver, or the software one "
    "(Debian/Ubuntu: apt-get install mesa-vulkan-drivers; Fedora: dnf install mesa-vulkan-drivers; "
    "Arch: pacman -S vulkan-swrast)"
)


def unique_devices(devices: Sequence[PhysicalDevice]) -> list[PhysicalDevice]:
    """The devices in order, each deviceUUID once: two drivers for one GPU show it twice."""
    seen: set[str] = set()
    kept = []
    for device in devices:
        if device.has_uuid:
            if device.uuid in seen:
                continue
            seen.add(device.uuid)
        kept.append(device)
    return kept


def choose_device(devices: Sequence[PhysicalDevice], wanted: str | int | None = None) -> PhysicalDevice:
    """The device to use.

    wanted: None for the best (discrete, integrated, virtual, CPU; of equals the first; the software driver with a
    warning, once a process), or an index of the loader's list, part of a name (any case), or a UUID. Digits are an
    index; where there is no such index, three or more of them name a device if they are a word of its name ("4090").

    Raises VulkanUnavailableError when no device fits, naming what each lacks, and BadInputError, listing what there
    is, for a `wanted` that matches none.
    """
    if not devices:
        raise VulkanUnavailableError(f"no Vulkan device: the loader works but found no driver; {DRIVER_HINT}")
    if wanted is not None and str(wanted).strip():
        chosen = _named(devices, str(wanted).strip())
        lacks = chosen.missing()
        if lacks:
            raise VulkanUnavailableError(
                f"device {chosen.describe()} lacks {'; '.join(lacks)}: choose another or update its driver"
            )
        return chosen
    candidates = [device for device in devices if not device.missing()]
    if not candidates:
        lines = "\n".join(f"  {device.describe()} lacks {'; '.join(device.missing())}" for device in devices)
        raise VulkanUnavailableError(
            f"no device has what vkfold needs:\n{lines}\nA newer driver may supply it; otherwise {DRIVER_HINT}"
        )
    chosen = min(unique_devices(candidates), key=_rank)
    if chosen.is_cpu:
        _warn_cpu(chosen)
    return chosen


def _rank(device: PhysicalDevice) -> int:
    return _RANK.get(device.type, _RANK["other"])


def _named(devices: Sequence[PhysicalDevice], wanted: str) -> PhysicalDevice:
    text = wanted.lower()
    uuid = text.replace("-", "")
    is_number = wanted.isascii() and wanted.isdigit()
    if is_number:
        for device in devices:
            if str(device.index) == (wanted.lstrip("0") or "0"):
                return device
    if _UUID.fullmatch(uuid):
        matches = [device for device in devices if device.uuid == uuid]
    elif is_number:
        enough = len(wanted) >= _LEAST_DIGITS
        matches = [device for device in devices if enough and wanted in re.split(r"[^0-9a-z.]+", device.name.lower())]
    else:
        matches = [device for device in devices if text in device.name.lower()]
    if matches:
        return min(matches, key=lambda device: (bool(device.missing()), _rank(device)))
    lines = "\n".join(f"  {device.describe()}" for device in devices)
    raise BadInputError(f"no Vulkan device matches {wanted!r} as index, name or UUID. There is:\n{lines}")


def _warn_cpu(device: PhysicalDevice) -> None:
    global _warned_cpu
    if not _warned_cpu:
        _warned_cpu = True
        logger.warning(
            "using the software Vulkan driver %s: no GPU driver was found, so this runs on the CPU and is slow",
            device.name,
        )
