"""Where compiled kernels come from: memory, package, the user's cache, the compiler, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

from vkfold.__main__ import main
from vkfold.engine import glsl_compiler, kernel_registry
from vkfold.engine.glsl_compiler import CompilerUnavailableError, compile_glsl, compiler_name
from vkfold.engine.kernel import Kernel
from vkfold.engine.kernel_registry import cache_path, cached_names, kernels_by_op, known_kernels, spirv_for
from vkfold.engine.op import OPS
from vkfold.engine.spirv import preserve_special_values
from vkfold.tools.kernels import detail_table

from .spirv_validator import complaint

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


def test_files_that_changed_places_are_damaged(compiled: list[str]) -> None:
    """Each is whole, and of another kernel than its name says."""
    one, other = kernel(), Kernel("other", SOURCE.replace("3.0", "4.0"), "inout f32 y, uint n", local_size=8)
    first, second = spirv_for(one), spirv_for(other)
    paths = cache_path(one), cache_path(other)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    forget()
    assert (spirv_for(one), spirv_for(other)) == (first, second) and len(compiled) == 4
    assert [path.read_bytes() for path in paths] == contents


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


@pytest.mark.deviceless
def test_every_kernel_is_valid_spirv() -> None:
    """After the NoContraction pass, by the validator of SPIRV-Tools, under Vulkan 1.2's rules."""
    spirv = b""
    for i, each in enumerate(known_kernels()):
        spirv = spirv_for(each)
        assert not complaint(spirv), each
        if i % 8 == 0:  # as devices get it
            assert not complaint(preserve_special_values(spirv)), each
    assert "OpFunctionEnd" in complaint(spirv[:-4])  # and it would notice


def test_every_known_kernel_has_a_line(compiled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Its twin in 64-bit words too, and those that fusion is known to make."""
    by_op = kernels_by_op()
    assert {k.digest for group in by_op.values() for k in group} == {k.digest for k in known_kernels()}
    table = detail_table(by_op, [], [""])
    ops, names, *_ = (list(column.cells) for column in table.columns)
    assert list(zip(ops, names, strict=True)) == [(op, k.name) for op in sorted(by_op) for k in by_op[op]]
    assert main(["kernels", "swiglu_backward__swiglu"]) == 0
    assert "compiled at first use" in capsys.readouterr().out


def test_the_cache_knows_names(compiled: list[str]) -> None:
    """Those of this version; a damaged file has none."""
    spirv_for(kernel())
    other = Kernel("registry_other", SOURCE, "inout f32 y, uint n", local_size=8, defines={"A": 1})
    spirv_for(other)
    assert cached_names() == {kernel().digest: "registry_test", other.digest: "registry_other"}
    cache_path(other).write_bytes(cache_path(other).read_bytes()[:-1])
    cache_path(kernel()).rename(cache_path(kernel()).with_stem(f"{kernel().digest}-00000000"))
    assert cached_names() == {}


def test_the_list_of_kernels(
    compiled: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every op that has kernels is there, with what is compiled already and what is not."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["kernels"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for op in OPS.values():
        assert (op.name in lines) == bool(list(op.kernels())), op
    assert "4 compiled at first use" in lines["softmax"] and "scalar" in lines["softmax"]
    assert "(in" not in lines
    for each in OPS["softmax"].kernels():
        spirv_for(each.in_words)
    spirv_for(kernel())
    assert main(["kernels", "softmax"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    origins = {(row[1], "WORDS64=1" in row): row[-1] for row in rows}
    names = [f"softmax_{what}" for what in ("vec4", "scalar", "backward_vec4", "backward_scalar")]
    assert origins == {
        (name, twin): "cache" if twin and "backward" not in name else "use" for name in names for twin in (False, True)
    }
    assert main(["kernels", "registry"]) == 0  # no op declares it: the cache knows its name
    assert capsys.readouterr().out.splitlines()[1].split()[2:] == ["cache)", "registry_test", "in", "the", "cache"]
    assert main(["kernels"]) == 0
    text = capsys.readouterr().out
    assert "in the cache also 1 more: of ops, for a head_dim" in text and "registry_test" in text
    assert main(["kernels", "no such"]) == 1 and main(["kernel"]) == 2
