"""Kernels' texts: printed when needed, known by a key before, and remembered from run to run."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import UserList, deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkfold.engine import expr as e
from vkfold.engine import kernel_registry, kernel_text, pipeline_memory
from vkfold.engine.block_fold import SeenRows
from vkfold.engine.errors import VkfoldError
from vkfold.engine.fold import FoldSpec, State, Walk
from vkfold.engine.kernel import Kernel
from vkfold.engine.kernel_registry import kernels_by_op, spirv_for
from vkfold.engine.kernel_text import SOURCES, KernelText, Printed, frozen, key_of, note_text
from vkfold.engine.map_kernel import MapKernel
from vkfold.engine.vulkan_engine import VulkanEngine

from .test_expr import LEAVES, WORK, general

SOURCE = "void main() { if (gl_GlobalInvocationID.x < args.n) args.y.v[gl_GlobalInvocationID.x] = 2.0; }"


class Pair(NamedTuple):
    a: object
    b: object


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_text, "_known", {})


def kernel(number: float = 2.0) -> tuple[Kernel, list[float]]:
    """A kernel that is printed from a number, and the numbers it was printed for."""
    printed: list[float] = []

    def write() -> str:
        printed.append(number)
        return SOURCE.replace("2.0", repr(number))

    return Kernel("text_test", KernelText(("test", number), write), "out f32 y, uint n", local_size=8), printed


def test_every_known_kernel_has_a_key_of_its_own() -> None:
    """One key is one text, and of one text there are not many keys: an argument's spaces may differ, its name not."""
    digests: dict[str, str] = {}
    for one in itertools.chain(*kernels_by_op().values()):
        if one.key:
            assert digests.setdefault(one.key, one.digest) == one.digest, one.name
    assert len(digests) > 1000
    assert len(set(digests.values())) > 0.9 * len(digests)


@WORK
@given(st.lists(st.recursive(LEAVES, general, max_leaves=12), min_size=2, max_size=2))
def test_fingerprints_tell_expressions_apart(roots: list[e.Expr]) -> None:
    one, two = map(e.fingerprint, roots)
    assert len(one) == 16 and (one == two) == (roots[0] is roots[1])


def test_fingerprints_are_those_of_every_process() -> None:
    """Of a long chain too, and of numbers by their bits."""
    x = e.variable("x")
    for _ in range(3000):
        x = x * x + 1.0
    script = (
        "import vkfold.engine.expr as e\nx = e.variable('x')\n"
        "for _ in range(3000): x = x * x + 1.0\nprint(e.fingerprint(x).hex())"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.strip() == e.fingerprint(x).hex()
    assert e.fingerprint(e.constant(0.0)) != e.fingerprint(e.constant(-0.0))
    assert e.fingerprint(e.variable("n")) != e.fingerprint(e.whole("n"))


def test_keys_tell_descriptions_apart() -> None:
    a = e.variable("a")
    different = [1, "1", 1.0, -0.0, 0.0, None, True, (1,), ((1,),), (1, 1), ("1, 1",), ("(1)",), {"a": 1}, {"a": "1"}]
    different += [a, e.whole("a"), "a", (a,), {"b": 1, "a": 2}, {"a": 2, "b": 1}, Pair(1, 2), (1, 2), Pair((1, 2), ())]
    different += [State("s", "sum", a), State("s", "sum", a, a), Walk([State("s", "sum", a)]), Walk([])]
    folds = [FoldSpec("f", {"x": "row"}, elements={"y": e.variable("x") * n}) for n in (2.0, 3.0)]
    different += [folds[0], folds[1], FoldSpec("g", {"x": "row"}, elements={"y": e.variable("x") * 2.0})]
    keys = [key_of(what) for what in different]
    assert len(set(keys)) == len(keys)
    assert key_of([1, [2]]) == key_of((1, (2,)))
    for wrong in (object(), {1, 2}, b"x", lambda: 1):
        with pytest.raises(TypeError, match="cannot be part of what a kernel is printed from"):
            key_of(("kernel", wrong))


def test_a_text_is_printed_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not for its digest, where that is known, nor again for a kernel that is the same."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_registry, "_loaded", {})
    one, printed = kernel()
    assert one.key and not printed
    assert spirv_for(one) and one.digest == Printed.of(one.glsl).digest and printed == [2.0]
    again, printed_again = kernel()
    monkeypatch.setattr(kernel_registry, "_loaded", {})
    assert spirv_for(again) == spirv_for(one) and again.digest == one.digest and again.in_words is again
    twin = again.specialized("_twin", local_size=4)
    assert twin.digest == one.digest and not printed_again
    other, printed_other = kernel(3.0)
    assert other.digest != one.digest and printed_other == [3.0]


def test_what_is_remembered_wrongly_is_found_before_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    one, _ = kernel()
    note_text(one.key, Printed("0" * 32, False))
    with pytest.raises(VkfoldError, match=r"'text_test': its text is not .* remembered.*VKFOLD_CACHE_DIR"):
        spirv_for(one)
    assert not (tmp_path / "spirv").exists()


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_text, "_MOST_KNOWN", 4)
    monkeypatch.setattr(kernel_text, "_MOST_REMEMBERED", 2)
    for number in range(4):
        assert kernel(float(number))[0].digest
    assert len(kernel_text.last_texts()) == 2 and kernel(3.0)[0].key in kernel_text.last_texts()
    assert kernel(4.0)[0].digest
    assert list(kernel_text.last_texts()) == [kernel(4.0)[0].key]


def test_without_sources_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A frozen program has no sources to tell its versions by."""
    monkeypatch.setattr(kernel_text, "__file__", str(tmp_path / "engine" / "kernel_text.py"))
    assert kernel_text.hash_of_sources() == ""
    monkeypatch.setattr(pipeline_memory, "SOURCES", "")
    pipeline_memory.save_program(tmp_path / "program", [], {"key": Printed("0" * 32, False)})
    assert (
        pipeline_memory.load_program(tmp_path / "program") == pipeline_memory.NOTHING
        and kernel_text.known_text("key") is None
    )


def test_sources_that_change_under_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it prints with the old ones is not remembered for the new ones, nor what may be of both."""
    texts = {"key": Printed("0" * 32, False)}
    pipeline_memory.save_program(tmp_path / "same", [], texts)
    monkeypatch.setattr(pipeline_memory, "hash_of_sources", lambda: "other")
    pipeline_memory.save_program(tmp_path / "changed", [], texts)
    pipeline_memory.load_program(tmp_path / "changed")
    assert kernel_text.known_text("key") is None
    pipeline_memory.load_program(tmp_path / "same")
    assert kernel_text.known_text("key") == texts["key"]


def test_descriptions_are_copied(vulkan: VulkanEngine) -> None:
    """A caller may use a dict or list again: a text is printed later, from what was described."""
    x, y, out = vulkan.tensor([1.0, 3.0]), e.variable("x"), vulkan.empty((2,))
    body, inputs = {}, {"x": "row"}
    kernels, folds = [], []
    for factor in (2.0, 3.0, 4.0):
        body["y"] = y * factor
        kernels.append(MapKernel("again", ["x"], ["y"], body))
        states = [State("total", "sum", y * factor)]
        folds.append(FoldSpec("again", dict(inputs), [Walk(states)], values={"y": e.variable("total")}))
        states.clear()
    for factor, kernel_of_map, fold in zip((2.0, 3.0, 4.0), kernels, folds, strict=True):
        kernel_of_map.launch(vulkan, 2, x, out)
        assert out.numpy().tolist() == [factor, 3 * factor]
        assert vulkan.fold(fold, x=x.reshape(1, 2))["y"].numpy().tolist() == [4 * factor]
    with pytest.raises(TypeError, match="does not support item assignment"):
        folds[0].values["y"] = y  # type: ignore[index]
    made = frozen({"a": [1, np.int64(2)], "b": (np.float32(0.5), Pair([1], 2))})
    assert made["a"] == (1, 2) and made["b"] == (0.5, Pair([1], 2)) and type(made["b"][0]) is float


def test_map_kernels_include_files_of_the_package(tmp_path: Path) -> None:
    """Any other may change without its key."""
    own = tmp_path / "own.glsl"
    own.write_text("#define TWO 2.0\n")
    with pytest.raises(ValueError, match=r"map kernel 'm': .*own.glsl' is no file of .*shaders.*: make it part of the"):
        MapKernel("m", ["x"], ["y"], "y = TWO * x;", includes=[str(own)])


def test_numbers_of_numpy_are_numbers() -> None:
    assert key_of(np.float32(0.5)) == key_of(0.5) != key_of(np.int64(5)) == key_of(5)
    assert key_of(deque([1, 2])) == key_of([1, 2]) == key_of(UserList((1, 2)))
    mask = SeenRows("see_all.glsl", deque(["lengths"]), {"N": np.int64(3)})
    assert mask.defines == {"N": 3} and mask.tensors == ("lengths",)


def test_a_twin_has_no_constants_of_its_own() -> None:
    """They would be in its text."""
    with pytest.raises(ValueError, match="'text_test' has no constant STEPS"):
        kernel()[0].specialized("_twin", constants={"STEPS": 2})


STEP = """
import sys
import numpy as np
import vkfold as vf
from vkfold.engine import kernel_text

printed = []
of = kernel_text.Printed.of
kernel_text.Printed.of = classmethod(lambda cls, glsl: (printed.append(glsl), of(glsl))[1])
with vf.VulkanEngine() as engine:
    model = vf.nn.GPTModel(engine, vf.nn.GPTConfig(17, 8, 16, 2, 1, d_ff=24, dropout=0.1))
    step = vf.nn.TrainingStep(model, vf.nn.AdamW(model), max_norm=1.0)
    tokens = np.arange(32).reshape(2, 2, 8) % 17
    losses = [step([(tokens[0], tokens[1])], step=n, learning_rate=1e-2).loss for n in range(3)]
print(len(printed), sorted(losses))
"""


def test_the_second_run_prints_nothing(tmp_path: Path) -> None:
    """It finds its kernels by what was remembered; a version whose sources differ prints them again."""
    environment = {**os.environ, "VKFOLD_CACHE_DIR": str(tmp_path), "VKFOLD_DEBUG": "0"}

    def run() -> tuple[int, str]:
        command = [sys.executable, "-c", STEP]
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
        number, _, losses = told.stdout.partition(" ")
        return int(number), losses

    first, losses = run()
    assert first > 20 and run() == (0, losses)
    (file,) = (tmp_path / "programs").iterdir()
    content = file.read_text().partition("\n")[2].replace(SOURCES, "0" * 32)
    file.write_text(f"{pipeline_memory.checksum(content)}\n{content}")
    again, same = run()  # fewer: no variants are compared any more
    assert 20 < again < first and same == losses and run() == (0, losses)


def test_files_elsewhere_are_read_each_time(tmp_path: Path) -> None:
    """What lies outside the package may change: no key stands for it."""
    source = tmp_path / "own.comp"
    source.write_text(SOURCE)
    one = Kernel("elsewhere", str(source), "out f32 y, uint n", local_size=8)
    assert one.key == "" and one.body == SOURCE
    for shader in (str(tmp_path / "own.comp"), "../kernel.py", "no.glsl", 3):
        with pytest.raises(ValueError, match=r"seen: .* is no file of .*shaders"):
            SeenRows(shader)  # type: ignore[arg-type]
