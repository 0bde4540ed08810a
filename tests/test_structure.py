"""What holds the tree together: import directions, one Vulkan file, declared switches, file sizes, compiled kernels."""

from __future__ import annotations

import ast
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from vkfold.engine import switches
from vkfold.engine.glsl_compiler import GlslCompileError, compile_glsl
from vkfold.engine.kernel import Kernel
from vkfold.engine.kernel_registry import known_kernels, spirv_for
from vkfold.engine.spirv import add_no_contraction, uncontracted

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("memory_pool", "engine", "nn", "tools")  # each may import those before it
LONGEST = 500


def tracked(*patterns: str) -> list[Path]:
    """Files of the tree that are not build products."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    skipped = {".venv", "build", "dist", ".git"}
    found = [path for pattern in patterns for path in ROOT.rglob(pattern) if path.is_file()]
    return [path for path in found if not skipped & set(path.relative_to(ROOT).parts)]


def imported_packages(path: Path) -> set[str]:
    """Our own packages a file imports, relative or under the import name."""
    own = path.relative_to(ROOT).parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = own[: len(own) - node.level]
                parts = [*base, *(node.module.split(".") if node.module else [])]
                found |= {parts[0]} if parts else {alias.name for alias in node.names}
            elif node.module and node.module.split(".")[0] == "vkfold":
                parts = node.module.split(".")[1:]
                found |= {parts[0]} if parts else {"vkfold"}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vkfold":
                    found.add(([*alias.name.split("."), "vkfold"])[1])
    return found


def test_imports_run_one_way() -> None:
    """tools -> nn -> engine -> memory_pool, and nothing back; the root package is nobody's import."""
    seen = 0
    for rank, package in enumerate(PACKAGES):
        for path in (ROOT / package).rglob("*.py"):
            seen += 1
            allowed = set(PACKAGES[: rank + 1])
            wrong = imported_packages(path) & (set(PACKAGES) | {"vkfold"}) - allowed
            assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"
    assert seen > 40


def test_one_file_imports_vulkan() -> None:
    """Everything else goes through it."""
    users = [
        p for p in tracked("*.py") if re.search(r"^\s*(import vulkan\b|from vulkan\b)", p.read_text(), re.MULTILINE)
    ]
    assert [p.relative_to(ROOT).as_posix() for p in users if "tests" not in p.parts] == ["engine/vulkan_binding.py"]


def test_every_switch_is_declared() -> None:
    """Any VKFOLD_ word in the code, the scripts or the docs is in the table."""
    used: dict[str, Path] = {}
    for path in tracked("*.py", "*.md", "run", ".ci/run"):
        for word in re.findall(r"VKFOLD_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8")):
            used.setdefault(word, path)
    undeclared = {
        word: path for word, path in used.items() if word not in switches.SWITCHES and "test_switches" not in path.name
    }
    assert not undeclared, undeclared


@pytest.mark.parametrize("pattern", ["*.py", "*.comp", "*.glsl"])
def test_files_stay_small(pattern: str) -> None:
    """Past 500 lines a file is split by idea."""
    long = {
        p.relative_to(ROOT).as_posix(): n for p in tracked(pattern) if (n := len(p.read_text().splitlines())) > LONGEST
    }
    assert not long, long


def test_the_map_of_the_engine_names_every_file() -> None:
    """The table of docs/architecture.md: a file matches a pattern of it, and a pattern matches a file."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Which file of engine/")[1]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    patterns = re.findall(r"`([^`]+)`", " ".join(rows))
    files = [path.name for path in tracked("engine/*.py") if path.parent.name == "engine"]
    assert len(files) > 50
    assert not [name for name in files if name != "__init__.py" and not any(fnmatch(name, p) for p in patterns)]
    assert not [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files)]


def test_no_registry_host_names() -> None:
    """Packages are named, never where they are fetched from."""
    hosts = re.compile(r"pypi[.]org|python[h]osted|deb[.]debian|npm[j]s|docker[.]io", re.IGNORECASE)
    named = [p for p in tracked("*") if p.suffix not in {".png", ".spv"} and hosts.search(p.read_text(errors="ignore"))]
    assert not named, named


def test_no_float_operation_may_be_contracted() -> None:
    """Every kernel of the registry: float add, subtract, multiply, divide carry NoContraction."""
    count = 0
    for kernel in known_kernels():
        spirv = spirv_for(kernel)
        assert not uncontracted(spirv), kernel
        count += 1
    assert count > 30


def test_the_pass_finds_what_is_not_decorated() -> None:
    """The reader reports an undecorated multiply, and the pass mends it without touching what is decorated."""
    kernel = Kernel(
        "k", "void main() { args.y.v[0] = args.y.v[1] * args.y.v[2] + 1.0; }", "inout f32 y, uint n", local_size=1
    )
    spirv = compile_glsl(kernel.glsl)
    words = memoryview(spirv).cast("I")
    # Undecorate: turn the NoContraction decorations (3 words each) into RelaxedPrecision ones.
    damaged = list(words)
    for i in range(5, len(damaged) - 2):
        if damaged[i] == (3 << 16) | 71 and damaged[i + 2] == 42:
            damaged[i + 2] = 0
    raw = b"".join(int(w).to_bytes(4, "little") for w in damaged)
    assert sorted(name for _, name in uncontracted(raw)) == ["FAdd", "FMul"]
    assert not uncontracted(add_no_contraction(raw))
    assert add_no_contraction(spirv) == spirv


def test_compile_errors_show_the_line() -> None:
    """The message names the kernel, the line and its text."""
    kernel = Kernel("broken", "void main() {\n    nothing = 1;\n}\n", "in f32 x, uint n", local_size=1)
    with pytest.raises(GlslCompileError, match=r"(?s)'broken'.*nothing.*2 \| nothing = 1;"):
        compile_glsl(kernel.glsl, kernel.name)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("in f99 x, uint n", "in|out|inout"),
        ("uint n, in f32 x", "before scalars"),
        ("in f32 x, uint x", "repeat"),
        (", ".join(f"in f32 p{i}" for i in range(16)), "132 bytes"),
    ],
)
def test_kernel_arguments_are_checked(args: str, message: str) -> None:
    """Bad declarations are refused when the kernel is made."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Kernel("k", "void main() {}", args, local_size=1)
