"""./run on machines that lack this or that: no network, no packages, no root; every program it calls is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")

ROOT = Path(__file__).parents[1]
TOOLS = "sh dash env cat sed tr cksum cut sort tail head rm mkdir dirname chmod ln cp true"

# Every program notes its call. Python makes an environment whose python is itself; $STATE/no-X makes X fail.
PYTHON = """#!/bin/sh
echo "python $*" >>"$STATE/calls"
case "$*" in
    "-m venv "*)
        [ ! -e "$STATE/no-venv" ] || exit 1
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*) [ ! -e "$STATE/no-network" ] && : >"$STATE/installed" ;;
    "-c"*python%d*) echo python3.11-venv ;;
    "-c"*samefile*) [ -e "$STATE/installed" ] ;;
    "-") [ -e "$STATE/loader" ] ;;
esac
"""
APT_GET = """#!/bin/sh
echo "apt-get $*" >>"$STATE/calls"
case "$*" in
    update*) [ ! -e "$STATE/no-network" ] ;;
    install*)
        [ ! -e "$STATE/no-packages" ] || exit 100
        case "$*" in *venv*) rm -f "$STATE/no-venv" ;; esac
        case "$*" in *vulkan*) : >"$STATE/loader"; mkdir -p "$STATE/icd"; : >"$STATE/icd/lvp.json" ;; esac ;;
esac
"""
APT_CACHE = """#!/bin/sh
case $1 in
    madison) cat "$STATE/madison" 2>/dev/null ;;
    policy) echo "  Candidate: $(cat "$STATE/candidate" 2>/dev/null)" ;;
esac
"""
SUDO = """#!/bin/sh
echo "sudo $*" >>"$STATE/calls"
[ "$1" != -n ] || [ ! -e "$STATE/no-sudo" ] || exit 1
[ "$1" != -n ] || shift
exec "$@"
"""


class Machine:
    """A folder with ./run in it, and a PATH of stand-ins. Folders of the system that ./run looks into are its own."""

    def __init__(self, tmp_path: Path) -> None:
        self.state = tmp_path / "state"
        self.bin = tmp_path / "bin"
        self.checkout = tmp_path / "a check out"
        for folder in (self.state, self.bin, self.checkout):
            folder.mkdir()
        for name in TOOLS.split():
            found = shutil.which(name)
            if found:
                (self.bin / name).symlink_to(found)
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        text = (ROOT / "run").read_text()
        for there, here in (
            ("/etc/os-release", "os-release"),
            ("/usr/share/vulkan/icd.d", "icd"),
            ("/usr/local/share/vulkan/icd.d", "none"),
            ("/etc/vulkan/icd.d", "none"),
            ("/dev/dri", "dri"),
        ):
            assert there in text
            text = text.replace(there, f"{self.state}/{here}")
        (self.checkout / "run").write_text(text)
        (self.checkout / "run").chmod(0o755)
        self.has("python3", PYTHON)
        self.has("id", "#!/bin/sh\necho ${UID_HERE:-0}\n")

    def has(self, name: str, text: str = "#!/bin/sh\n") -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def note(self, name: str, text: str = "") -> None:
        (self.state / name).write_text(text)

    def has_apt(self) -> None:
        for name, text in (("apt-get", APT_GET), ("apt-cache", APT_CACHE), ("sudo", SUDO)):
            self.has(name, text)

    def has_vulkan(self) -> None:
        self.note("loader")
        (self.state / "icd").mkdir()
        self.note("icd/lvp.json")

    def run(
        self, *argv: str, uid: int = 0, cwd: Path | None = None, shell: str = "sh"
    ) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "STATE": str(self.state), "UID_HERE": str(uid)}  # and no HOME
        return subprocess.run(
            [shell, str(self.checkout / "run"), *argv],
            env=environment,
            cwd=cwd or self.checkout,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        path = self.state / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def demos(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("python -m vkfold.tools.demo")]


@pytest.mark.parametrize("shell", ["sh", "dash", "bash"])
def test_a_bare_machine(machine: Machine, tmp_path: Path, shell: str) -> None:
    """As root, from another folder, in a path with a space: packages, environment, demo."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}")
    machine.has_apt()
    machine.note("no-venv")
    done = machine.run("demo", "--steps", "3", cwd=tmp_path, shell=program)
    assert done.returncode == 0, done.stderr
    calls = machine.calls()
    assert demos(calls) == ["python -m vkfold.tools.demo --steps 3"]
    installs = [call for call in calls if call.startswith("apt-get install")]
    assert len(installs) == 1  # what Vulkan needs came with the environment's package
    for package in ("python3.11-venv", "libvulkan1", "mesa-vulkan-drivers"):
        assert package in installs[0]
    assert not [call for call in calls if call.startswith("sudo")]


def test_a_second_time_without_a_network(machine: Machine) -> None:
    machine.has_apt()
    assert machine.run("setup").returncode == 0
    machine.calls()
    for name in ("no-network", "no-packages", "no-venv"):
        machine.note(name)
    done = machine.run("demo")
    assert done.returncode == 0, done.stderr
    calls = machine.calls()
    assert len(demos(calls)) == 1
    assert not [call for call in calls if "apt-get" in call or "pip" in call or "venv" in call]


def test_the_first_time_without_a_network(machine: Machine) -> None:
    machine.has_apt()
    machine.note("no-network")
    done = machine.run("demo")
    assert done.returncode == 2
    assert "the first run needs the network" in done.stderr
    assert not demos(machine.calls())


def test_sudo_when_not_root(machine: Machine) -> None:
    machine.has_apt()
    done = machine.run("setup", uid=1000)
    assert done.returncode == 0, done.stderr
    calls = machine.calls()
    assert len([call for call in calls if call.startswith("sudo env")]) == 1
    assert any("mesa-vulkan-drivers" in call for call in calls if call.startswith("apt-get install"))


@pytest.mark.parametrize("missing", ["sudo", "its password"])
def test_no_way_to_become_root(machine: Machine, missing: str) -> None:
    machine.has_apt()
    machine.note("no-sudo")
    if missing == "sudo":
        (machine.bin / "sudo").unlink()
    done = machine.run("demo", uid=1000)
    assert done.returncode == 2
    assert "sudo apt-get update && sudo apt-get install libvulkan1 mesa-vulkan-drivers" in done.stderr
    assert not [call for call in machine.calls() if call.startswith(("apt-get", "sudo env"))]


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        ("dnf", "sudo dnf install vulkan-loader mesa-vulkan-drivers"),
        ("pacman", "sudo pacman -S vulkan-icd-loader vulkan-swrast"),
        ("zypper", "sudo zypper install libvulkan1 libvulkan_lvp"),
        ("apk", "sudo apk add vulkan-loader mesa-vulkan-swrast"),
        ("brew", "brew install vulkan-loader molten-vk"),
        (None, "install your system's Vulkan loader"),
    ],
)
def test_other_systems(machine: Machine, tool: str | None, command: str) -> None:
    """The exact command, nothing installed; and no more questions once it was typed."""
    if tool:
        machine.has(tool, '#!/bin/sh\necho "called $0" >>"$STATE/calls"\n')
    done = machine.run("demo")
    assert done.returncode == 2
    assert command in done.stderr
    calls = machine.calls()
    assert not demos(calls) and not [call for call in calls if call.startswith("called")]
    machine.has_vulkan()
    done = machine.run("demo")
    assert done.returncode == 0, done.stderr
    assert len(demos(machine.calls())) == 1


def test_no_venv_and_no_apt(machine: Machine) -> None:
    machine.note("no-venv")
    done = machine.run("demo")
    assert done.returncode == 2
    assert "cannot make virtual environments" in done.stderr


def test_no_python(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    done = machine.run("demo")
    assert done.returncode == 2
    assert "Python 3.10 or newer is needed" in done.stderr


@pytest.mark.parametrize(
    ("release", "madison", "expected"),
    [
        ("bookworm", "22.3.6-1", "apt-get install -t bookworm-backports mesa-vulkan-drivers"),
        ("noble", "25.2.8-0ubuntu1", "apt-get install mesa-vulkan-drivers=25.2.8-0ubuntu1"),
        ("jammy", "23.2.1-1ubuntu3", "(jammy) do not have it"),
        (None, "", "(unknown release) do not have it"),
    ],
)
def test_newer_mesa_is_told_once(machine: Machine, release: str | None, madison: str, expected: str) -> None:
    """Which way to get it depends on the release; told once for each version of Mesa found, and not with a GPU."""
    machine.has_apt()
    machine.has_vulkan()
    machine.has("dpkg-query", '#!/bin/sh\ncat "$STATE/mesa"\n')
    machine.note("mesa", "22.3.6-1+deb12u1")
    machine.note("madison", f" mesa-vulkan-drivers | {madison} | http://archive {release}/main amd64 Packages\n")
    if release:
        machine.note("os-release", f'NAME="Some"\nVERSION_CODENAME={release}\n')
    done = machine.run("demo")
    assert done.returncode == 0
    assert expected in done.stderr and "Mesa 22.3.6-1+deb12u1" in done.stderr
    assert "several times faster" not in machine.run("demo").stderr
    machine.note("mesa", "22.3.7-1")
    assert "Mesa 22.3.7-1" in machine.run("test").stderr
    machine.note("mesa", "25.0.7-2")
    assert "several times faster" not in machine.run("demo").stderr
    machine.note("mesa", "21.0")
    (machine.state / "dri").mkdir()
    machine.note("dri/renderD128")
    assert "several times faster" not in machine.run("demo").stderr
    assert not [call for call in machine.calls() if call.startswith("apt-get")]


def test_the_newest_mesa_on_offer_is_taken(machine: Machine) -> None:
    """Backports among the sources are used, which apt would pass over."""
    machine.has_apt()
    offers = " mesa-vulkan-drivers | 22.3.6-1 | http://archive bookworm/main amd64 Packages\n"
    offers += " mesa-vulkan-drivers | 25.0.7-2~bpo12+1 | http://archive bookworm-backports/main amd64 Packages\n"
    machine.note("madison", offers)
    machine.note("candidate", "22.3.6-1")
    assert machine.run("setup").returncode == 0
    installs = [call for call in machine.calls() if call.startswith("apt-get install")]
    assert len(installs) == 1 and "-t bookworm-backports libvulkan1 mesa-vulkan-drivers" in installs[0]


def test_lint_fails_when_any_linter_does(machine: Machine) -> None:
    assert machine.run("lint").returncode != 0  # there is no ruff in this environment
    ruff = machine.checkout / ".venv" / "bin" / "ruff"
    for failing, code in (("check", 1), ("format", 1), ("none", 0)):
        ruff.write_text(f'#!/bin/sh\n[ "$1" != {failing} ]\n')
        ruff.chmod(0o755)
        assert machine.run("lint").returncode == code


def test_help_and_unknown_verbs(machine: Machine) -> None:
    assert machine.run().returncode == machine.run("help").returncode == 0
    assert "./run demo" in machine.run().stdout
    assert machine.run("dmeo").returncode == 2
    assert not machine.calls()


def test_no_bashisms() -> None:
    """Parsed by a shell that knows POSIX alone, where there is one."""
    dash = shutil.which("dash") or shutil.which("sh")
    assert dash
    assert subprocess.run([dash, "-n", str(ROOT / "run")], check=False, env=dict(os.environ)).returncode == 0
