"""The driver's pipeline cache on disk: loaded only when whole and from this very driver, saved whole or not at all."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from pathlib import Path

from .physical_device import PhysicalDevice
from .switches import logger

_DIGEST_BYTES = 32


def load_cache(path: Path, device: PhysicalDevice) -> bytes:
    """The cached data, b"" when there is none, it is damaged, or another driver wrote it. Never raises."""
    try:
        raw = path.read_bytes()
    except OSError:
        return b""
    data = raw[_DIGEST_BYTES:]
    # Drivers trust the payload, so a checksum of our own comes before they see it.
    if hashlib.sha256(data).digest() != raw[:_DIGEST_BYTES] or len(data) < 32:
        logger.info("pipeline cache %s is damaged: starting a new one", path)
        return b""
    _, version, vendor, number = struct.unpack_from("<IIII", data)
    if (version, vendor, number, data[16:32].hex()) != (1, device.vendor_id, device.device_id, device.cache_uuid):
        logger.info("pipeline cache %s is another driver's: starting a new one", path)
        return b""
    return data


def save_cache(path: Path, data: bytes) -> bool:
    """Write the data under a temporary name, then rename. Whether it worked; what stands in the way is logged."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
        return True
    except OSError as error:
        logger.info("pipeline cache not saved: %s", error)
        if temporary:
            try:
                os.unlink(temporary)
            except OSError:
                logger.info("left behind: %s", temporary)
        return False
