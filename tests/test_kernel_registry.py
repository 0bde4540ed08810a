"""Where compiled kernels come from: memory, package, the user's cache, the compiler, in this order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from vkfold.engine import glsl_compiler, kernel_registry
from vkfold.engine.glsl_compiler import CompilerUnavailableError, compile_glsl, compiler_name
from vkfold.engine.kernel import Kernel
from vkfold.engine.kernel_registry import cache_path, known_kernels, spirv_for

SOURCE = "void main() { uint i = gl_GlobalInvocationID.x; if (i < args.n) args.y.v[i] = args.y.v[i] * 3.0 + 1.0; }"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the kernels that the registry compiles; it starts with nothing in memory and an empty cache."""
    names: list[str] = []

    def counted(text: str, name: str) -> bytes:
        names.append(name)
        return compile_glsl(text, name)

    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_registry, "compile_glsl", counted)
    monkeypatch.setattr(kernel_registry, "_loaded", {})
    return names


def forget() -> None:
    """As a new process would start."""
    kernel_registry._loaded.clear()


def kernel() -> Kernel:
    """One that no op declares."""
    return Kernel("registry_test", SOURCE, "inout f32 y, uint n", local_size=8)


def test_a_kernel_is_compiled_once(compiled: list[str]) -> None:
    """Then it comes from memory, and in the next process from the cache."""
    first = spirv_for(kernel())
    assert spirv_for(kernel()) == first and compiled == ["registry_test"]
    forget()
    assert spirv_for(kernel()) == first and compiled == ["registry_test"]
    assert [p.name for p in cache_path(kernel()).parent.iterdir()] == [cache_path(kernel()).name]  # no temporary left


@pytest.mark.parametrize("damage", ["empty", "half", "one bit", "text"])
def test_a_damaged_cache_file_is_ignored(compiled: list[str], damage: str) -> None:
    """It is compiled again and the file is mended."""
    first = spirv_for(kernel())
    whole = cache_path(kernel()).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    half = whole[: len(whole) // 8 * 4]
    cache_path(kernel()).write_bytes({"empty": b"", "half": half, "one bit": bytes(flipped), "text": b"no"}[damage])
    forget()
    assert spirv_for(kernel()) == first
    assert len(compiled) == 2
    assert cache_path(kernel()).read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_error(compiled: list[str], tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "spirv").write_text("")
    assert spirv_for(kernel())
    assert compiled == ["registry_test"]


def test_shipped_kernels_come_first(compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file in the package's folder, under the kernel's digest."""
    spirv = compile_glsl(kernel().glsl)
    (tmp_path / f"{kernel().digest}.spv").write_bytes(spirv)
    monkeypatch.setattr(kernel_registry, "SHIPPED_DIR", tmp_path)
    assert spirv_for(kernel()) == spirv
    assert not compiled


def test_without_a_compiler_the_message_says_what_to_install(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown kernel, and neither glslang nor pyshaderc."""
    monkeypatch.setattr(glsl_compiler, "_library_folder", lambda: None)
    monkeypatch.setattr(glsl_compiler.importlib.util, "find_spec", lambda name: None)
    assert compiler_name() is None
    with pytest.raises(CompilerUnavailableError, match=r"'registry_test'.*pip install 'vkfold\[compiler\]'"):
        spirv_for(kernel())


def test_the_digest_is_of_the_text_alone() -> None:
    """The same on every platform: Windows checkouts have other line ends, and Python reads both as one."""
    first, second = kernel(), kernel()
    assert first.digest == second.digest
    assert "\r" not in "".join(each.glsl for each in known_kernels())
    other = Kernel("registry_test", SOURCE, "inout f32 y, uint n", local_size=8, defines={"A": 1})
    assert other.digest != first.digest
    names = [each.digest for each in known_kernels()]
    assert len(set(names)) == len(names) > 30


def test_every_kernel_is_valid_spirv(tmp_path: Path) -> None:
    """After the NoContraction pass, by the validator of SPIRV-Tools, under Vulkan 1.2's rules."""
    folder = glsl_compiler._library_folder()
    validator = folder.parent / "bin" / "spirv-val" if folder else Path("spirv-val")
    if not validator.exists():
        pytest.skip("spirv-val is not installed")
    command = [str(validator), "--target-env", "vulkan1.2", "--scalar-block-layout"]
    count = 0
    for each in known_kernels():
        path = tmp_path / "kernel.spv"
        path.write_bytes(spirv_for(each))
        checked = subprocess.run([*command, str(path)], capture_output=True, text=True)
        assert checked.returncode == 0, f"{each}: {checked.stdout}{checked.stderr}"
        count += 1
    assert count > 30
    path.write_bytes(path.read_bytes()[:-8])  # the last instruction, OpFunctionEnd, and a word before it
    assert subprocess.run([*command, str(path)], capture_output=True).returncode != 0
