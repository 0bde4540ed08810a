"""How much RAM this process takes and may still take: on software Vulkan drivers that is what device memory is."""

from __future__ import annotations

import mmap
from pathlib import Path


def available_bytes() -> int:
    """Available RAM, within the control group's limit where there is one; 4 GiB where nothing tells."""
    found = [value for value in (_system_bytes(), _group_bytes()) if value is not None]
    return min(found, default=4 * 2**30)


def process_bytes() -> int | None:
    """RAM that this process takes now (its resident set); None where nothing tells."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        pass
    try:
        import psutil

        return int(psutil.Process().memory_info().rss)
    except ImportError:
        return None


def _system_bytes() -> int | None:
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except ImportError:
        pass
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group_bytes(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((root / limit).read_text())
            taken = int((root / used).read_text())
        except (OSError, ValueError):  # no control group, or "max"
            continue
        # Pages of the file cache count as used and are given back on demand.
        try:
            for line in (root / limit).with_name("memory.stat").read_text().splitlines():
                if line.startswith(("inactive_file ", "total_inactive_file ")):
                    taken -= int(line.split()[1])
                    break
        except (OSError, ValueError):
            pass
        return max(0, most - max(0, taken))
    return None
