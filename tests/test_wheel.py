"""The wheel holds what the tree holds, and runs without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vkfold.engine.kernel_registry import known_kernels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engine", "engine/ops", "memory_pool", "nn", "tools")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree with what is installed here (no network)."""
    source = tmp_path_factory.mktemp("source") / "tree"
    out = tmp_path_factory.mktemp("wheel")
    products = (
        ".git",
        ".venv",
        "build",
        "dist",
        "spirv",
        "*.egg-info",
        "__pycache__",
        ".*_cache",
        ".hypothesis",
        "demo-run",
    )
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*products))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, env=_build_environment(out))
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def _build_environment(folder: Path) -> dict[str, str]:
    """As isolated as pip builds unless told otherwise: of what running needs, only what building asks for imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed, there = (
        {re.split(r"[^\w-]", line)[0] for line in lines}
        for lines in (project["project"]["dependencies"], project["build-system"]["requires"])
    )
    absent = needed - there
    assert {"safetensors", "tokenizers", "vulkan"} <= absent
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {sorted(absent)!r}:\n"
        "            raise ModuleNotFoundError(f'{name} is not there in an isolated build')\n"
        "sys.meta_path.insert(0, Absent)\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_every_module_and_shader_is_in_it(wheel: Path) -> None:
    """A package left out of `packages` would be missing from the wheel only."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"vkfold/{folder}/{p.name}" for folder in FOLDERS for p in (ROOT / folder).glob("*.py")}
    expected |= {f"vkfold/shaders/{p.name}" for p in (ROOT / "shaders").iterdir() if p.suffix in (".comp", ".glsl")}
    expected |= {"vkfold/__init__.py", "vkfold/__main__.py", "vkfold/py.typed"}
    assert not expected - names, sorted(expected - names)
    folders = {p.parent.relative_to(ROOT).as_posix() for top in FOLDERS for p in (ROOT / top).rglob("*.py")}
    assert folders == set(FOLDERS)
    assert not [n for n in names if re.match(r"vkfold/(tests|build|benchmarks|setup\.py)", n)]


def test_every_known_kernel_is_compiled_in_it(wheel: Path) -> None:
    """Ahead of time, under the digest it is looked up by."""
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [k.name for k in known_kernels() if f"vkfold/shaders/spirv/{k.digest}.spv" not in names]
    assert not missing, missing


BASE = (
    "--max-steps 3 --seq-len 16 --batch-size 2 --d-model 32 --num-layers 1 --accum-steps 2 --dropout 0.1 --save saves"
)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into, and nothing else."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "-t", str(target), str(wheel)]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return target


@pytest.mark.parametrize(
    "options",
    [
        "--num-heads 2 --optimizer adamw --checkpoint-every 1",
        "--num-heads 4 --num-kv-heads 2 --norm layernorm --activation gelu --positions learned --tie-head "
        "--optimizer sgd",
    ],
)
def test_it_trains_without_a_compiler(site: Path, tmp_path: Path, options: str) -> None:
    """With every compiler hidden and an empty cache: a few steps of text_train, then text_generate."""
    (tmp_path / "text.txt").write_text("To measure is to know; to know is to measure again. " * 60, encoding="utf-8")
    hidden = (
        "import sys, vkfold.engine.glsl_compiler as compiler\n"
        f"assert compiler.__file__.startswith({str(site)!r}), compiler.__file__\n"
        "compiler._library_folder = lambda: None\n"
        "compiler.importlib.util.find_spec = lambda name: None\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "VKFOLD_CACHE_DIR": str(tmp_path / "cache")}
    for tool, arguments in (
        ("text_train", f"text.txt {BASE} {options}"),
        ("text_generate", "saves --prompt To --length 4"),
    ):
        program = f"{hidden}from vkfold.tools.{tool} import main\nsys.exit(main({arguments.split()!r}))\n"
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=environment
        )
        assert run.returncode == 0, run.stdout + run.stderr
    assert list((tmp_path / "saves").glob("step-*"))
    assert not (tmp_path / "cache" / "spirv").exists()


def test_a_build_without_a_compiler_says_so(tmp_path: Path) -> None:
    """One line with what is missing, and no wheel."""
    program = (
        "import sys, runpy\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import vkfold.engine.glsl_compiler as compiler\n"
        "compiler.compiler_name = lambda: None\n"
        f"sys.argv = ['setup.py', '-q', 'build_py', '--build-lib', {str(tmp_path / 'lib')!r}]\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "no GLSL compiler is installed here" in run.stderr and "Traceback" not in run.stderr, run.stderr
