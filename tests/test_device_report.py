"""`python -m vkfold`, as people run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vkfold.engine import switches


def report(**environment: str) -> subprocess.CompletedProcess[str]:
    """Run the report with more environment variables, 200 columns wide."""
    return subprocess.run(
        [sys.executable, "-m", "vkfold"],
        env={**os.environ, "COLUMNS": "200", "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


def test_the_report_names_device_driver_compiler_caches_and_switches(tmp_path: Path) -> None:
    done = report(VKFOLD_CACHE_DIR=str(tmp_path / "cache"), VKFOLD_DEBUG="2")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in (
        "device 0",
        "(used)",
        "driver",
        "bufferDeviceAddress",
        "subgroup size",
        "compiler",
        "pipeline cache",
        "cooperative matrices",
    ):
        assert word in done.stdout
    for name in switches.SWITCHES:
        assert name in done.stdout
    assert not (tmp_path / "cache").exists()  # a report changes nothing


def test_no_driver_is_said_plainly(tmp_path: Path) -> None:
    none = str(tmp_path / "no_driver.json")
    done = report(VK_ICD_FILENAMES=none, VK_DRIVER_FILES=none)
    assert done.returncode == 2
    assert "mesa-vulkan-drivers" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_an_unknown_device_lists_what_there_is() -> None:
    done = report(VKFOLD_DEVICE="no such device")
    assert done.returncode == 2
    assert "'no such device'" in done.stdout and "[0]" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_bad_switch_is_said_plainly() -> None:
    done = report(VKFOLD_DEBUG="9")
    assert done.returncode == 2
    assert "VKFOLD_DEBUG=9: expected 0, 1, 2 or 3" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
