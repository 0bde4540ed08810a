"""Variants of map kernels: the same bits for any shape and value, checked before use, chosen by a pure function."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from variant_checks import damaged

from vkfold.engine.capabilities import Capabilities
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError, VkfoldError
from vkfold.engine.expr import exp, variable, variables
from vkfold.engine.kernel import Kernel
from vkfold.engine.map_choice import MapChooser, select_for, tuning_key
from vkfold.engine.map_kernel import MapKernel, Operand
from vkfold.engine.map_variants import MapVariant, map_variants
from vkfold.engine.op import OPS
from vkfold.engine.ops import map_check, piece_kernels
from vkfold.engine.ops.elementwise import MapOp
from vkfold.engine.ops.map_tuner import MapCall, tune_map
from vkfold.engine.ops.piece_kernels import PieceOp, right_pieces, tune_pieces
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.tensor import Tensor, TensorSpec
from vkfold.engine.variant_cache import TuningTable
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.variant_families import variant_reasons
from vkfold.engine.vulkan_engine import VulkanEngine

CPU, GPU = Capabilities(8, True, "llvmpipe", 25, 2), Capabilities(32, False, "a GPU", 1)
X, B, N = variables("x b n")


def of_map(kernel: str) -> MapOp:
    op = OPS[kernel]
    assert isinstance(op, MapOp)
    return op


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of all kinds: NaN, infinities, zeros of both signs and subnormals among them."""
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    some = made.reshape(-1)[:: 7 + seed]
    some[:] = np.resize(np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-41, -3e38], np.float32), some.size)
    return made


def bits(tensor: Tensor) -> np.ndarray:
    """One pattern for NaN: which of its bits are set is up to a driver's compiler."""
    array = tensor.numpy()
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


Calls = Callable[[VulkanEngine], list[Tensor]]


def on_16_bytes(engine: VulkanEngine) -> list[Tensor]:
    """Three elements behind the last four, and none; in place; two outputs; halves of rows; random numbers."""
    a, b = engine.tensor(values(3, 2201)), engine.tensor(values(3, 2201, seed=1))
    made = [engine.gelu(a), engine.dropout(a, p=0.5, site=2)]
    for x, y in ((a, b), (engine.tensor(values(4, 20)), engine.tensor(values(4, 20, seed=1)))):
        engine.add_(y, x)
        made.append(y)
    made.append(engine.swiglu_backward(engine.tensor(values(9, 12, seed=2)), engine.tensor(values(9, 2 * 12))))
    x, bias, number = engine.tensor(values(7, 12)), engine.tensor(values(12)), engine.tensor(values(7, 1))
    return [*made, *engine.map({"y": exp(X) * B + N, "z": X - B}, x=x, b=bias, n=number).values()]


def elsewhere(engine: VulkanEngine) -> list[Tensor]:
    """Rows that begin anywhere, periods that are no multiple of four."""
    whole = engine.tensor(values(3, 1203))
    x = Tensor(engine, engine.tensor(values(2, 1203)).spec, whole.storage, 4 * 1203)
    made = [engine.silu(x), engine.scale(x, 0.3)]
    engine.add_bias_(x, engine.tensor(values(1203, seed=1)))
    return [*made, x, engine.swiglu(engine.tensor(values(9, 2 * 5)))]


@pytest.mark.parametrize("calls", [on_16_bytes, elsewhere])
def test_every_variant_gives_the_same_bits(vulkan: VulkanEngine, calls: Calls) -> None:
    family = map_variants("", vulkan.recorder.max_invocations)
    found = {}
    for variant in family:
        kernels: list[str] = []
        vulkan.recorder.trace = kernels.append
        try:
            with forced_variant(variant.name, "map"):
                found[variant.name] = list(map(bits, calls(vulkan)))
        finally:
            vulkan.recorder.trace = None
        assert all(f"_{variant.name}" in kernel for kernel in kernels) and len(kernels) >= 3
    base = found.pop(family[-1].name)
    for name, got in found.items():
        for i, (one, other) in enumerate(zip(got, base, strict=True)):
            assert np.array_equal(one, other), (name, i)


def test_bits_of_single_operations_are_those_of_numpy(vulkan: VulkanEngine, cpu: CpuEngine) -> None:
    """The base variant is right, too: other tests use the variant that is chosen."""
    a, b = (np.where(np.abs(x) < 1e-38, np.float32(0.5), x) for x in (values(3, 2201), values(3, 2201, seed=1)))
    with forced_variant("64x1", "map"):
        got = vulkan.add(vulkan.tensor(a), vulkan.tensor(b)).numpy()
    np.testing.assert_array_equal(got, cpu.add(cpu.tensor(a), cpu.tensor(b)).numpy())


PLACES = {
    "min(index, args.n - 1u)": lambda i: np.minimum(i, 99),
    "(index < args.n ? index : 0u)": lambda i: np.where(i < 100, i, 0),
    "args.last - index": lambda i: i[::-1],
    "index & 0xFFu": lambda i: i & 0xFF,
    "index * args.n": lambda i: i * 0,
}


@pytest.mark.parametrize("place", PLACES)
def test_places_that_the_check_does_not_know(vulkan: VulkanEngine, place: str) -> None:
    """Any GLSL may say where elements are: what the check does not understand has no variants to check."""
    size = 4097
    kernel = MapKernel(
        "elsewhere", [Operand("x", "x", place)], ["y"], {"y": X * 2.0}, scalars="uint n, uint last, uint factor"
    )
    x, y = vulkan.tensor(np.arange(size, dtype=np.float32)), vulkan.empty((size,))
    n = 0 if "*" in place else 100
    for name in ("", "256x2"):
        with forced_variant(name, "map"):
            kernel.launch(vulkan, size, x, y, n, size - 1, 1, wide=False)
            np.testing.assert_array_equal(y.numpy(), 2.0 * PLACES[place](np.arange(size)))


def test_which_places_the_check_knows() -> None:
    """Places at random: known are those within reach of which an output has each once, as sorting them shows."""
    rng, seen = random.Random(3), set()
    index = np.arange(map_check._LONGEST)
    for _ in range(300):
        place = "index"
        for _ in range(rng.randrange(1, 4)):
            number = rng.choice(("args.n", "3u", "1u", "0u", "7u", "num", "index", "2.0", "-1"))
            place = f"({place} {rng.choice('+-*/%')} {number})"
        wide = rng.random() < 0.5
        operands = Operand("x", "x", place), Operand("y", "y")
        for inputs, outputs, apart in ((operands[:1], operands[1:], False), (operands[1:], operands[:1], True)):
            kernel = MapKernel("k", inputs, outputs, {outputs[0].name: variable(inputs[0].name)}, scalars="uint n")
            with np.errstate(all="ignore"):  # a division by 0 gives places that lie together, or outside
                try:
                    places = operands[0].indices(index, {"n": map_check._PERIOD[wide]})
                    expected = bool(places.min() >= 0 and places.max() < map_check._FURTHEST)
                    expected &= not apart or len(np.unique(places)) == len(places)
                except (ArithmeticError, NameError):
                    expected = False
                assert kernel.has_variants(wide=wide) == expected, place
            seen.add((apart, expected))
    assert len(seen) == 4


def test_statements_that_reach_for_pointers(vulkan: VulkanEngine) -> None:
    """What they read is not known to the check either."""
    kernel = MapKernel("table", ["x"], ["y"], "y = T(args.x.v[args.at]) + x;", scalars="uint at")
    x, y = vulkan.tensor(np.arange(300, dtype=np.float32)), vulkan.empty((300,))
    with forced_variant("256x2", "map"):
        kernel.launch(vulkan, 300, x, y, 7)
    np.testing.assert_array_equal(y.numpy(), np.arange(300) + 7.0)


# -- the choice --------------------------------------------------------------------------------------------------------
def test_selection_is_a_pure_function_of_its_table() -> None:
    """Unmeasured: wide where all cores have work. Measured: the fastest not barred. Switched off: the estimate."""
    table, key = TuningTable(), tuning_key("add_vec4", 2**20)

    def name(device: Capabilities, num_elements: int, largest: int = 1024, width: int = 4, tuned: bool = True) -> str:
        return select_for(device, "add_vec4", num_elements, width, largest, table, tuned).choice.name

    assert name(CPU, 2**20) == "256x8" and name(CPU._replace(driver_major=22), 2**20) == "256x4"
    assert name(CPU, 2**20, largest=128) == "64x8" and name(CPU, 4096) == "64x4" and name(CPU, 100) == "64x1"
    assert name(CPU, 1024, width=1) == name(CPU, 4096) and name(CPU._replace(parallel=64), 2**17) == "64x4"
    assert name(GPU, 2**20) == "256x1" and name(GPU, 2**20, largest=128) == "64x1"
    table.note_times(key, {"64x2": 1.0, "256x2": 0.5, "no_such_variant": 0.1})
    assert name(GPU, 2**20) == "256x2" and name(GPU, 2**20, tuned=False) == "256x1" and name(GPU, 2**19) == "256x1"
    table.bar("add_vec4_256x2", "wrong")
    assert name(GPU, 2**20) == "64x2"
    for variant in map_variants("add_vec4", 1024):
        table.bar(variant.barred_as, "wrong")
    with pytest.raises(VkfoldError, match="every variant of map add_vec4 1048576 is barred"):
        name(GPU, 2**20)


def test_forcing(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name lists what there is, before and after an engine is made."""
    for text in ("map=64x3", "map=add"):
        monkeypatch.setenv("VKFOLD_VARIANT", text)
        with pytest.raises(BadInputError, match=r"no map variant '.*': there are 256x8, .*, 64x1"):
            VulkanEngine()
        with pytest.raises(BadInputError, match="no map variant"):
            vulkan.relu(vulkan.tensor(np.ones(4)))
    monkeypatch.setenv("VKFOLD_VARIANT", "map=64x2")
    vulkan.relu(vulkan.tensor(np.ones(5))).numpy()
    assert variant_reasons(vulkan.recorder)["relu_vec4_64x2_tail"] == {"map relu_vec4 5": "64x2, forced"}
    monkeypatch.setattr(vulkan.recorder, "max_invocations", 128)
    monkeypatch.setenv("VKFOLD_VARIANT", "map=256x2")
    with pytest.raises(BadInputError, match="256x2: this device allows 128 invocations a workgroup"):
        vulkan.relu(vulkan.tensor(np.ones(6)))


def test_variants_are_one_spirv() -> None:
    """Sizes and steps are put in when the pipeline is made."""
    kernels = of_map("add").kernel
    choices = [(v, wide, tail) for v in map_variants("", 256) for wide in (True, False) for tail in (True, False)]
    made = [kernels.variant(v, wide=wide, tail=tail) for v, wide, tail in choices]
    assert {kernel.digest for kernel in made} == {kernels.wide.digest, kernels.narrow.digest}
    assert {kernel.in_words.digest for kernel in made} == {kernels.wide.in_words.digest, kernels.narrow.digest}
    assert {(k.in_words.local_size, *k.in_words.constants.values()) for k in made} == {
        (v.size, v.steps, *[tail] * wide) for v, wide, tail in choices
    }


# -- tuning ------------------------------------------------------------------------------------------------------------
CALL = MapCall(of_map("add").kernel, 6001, True, (24004,) * 3, ())


def added(engine: VulkanEngine) -> np.ndarray:
    return bits(engine.add(engine.tensor(values(6001)), engine.tensor(values(6001, seed=1))))


def test_tuning_is_kept_used_and_changes_no_bit(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = added(untuned)
    measured = tune_map(untuned.recorder, CALL, rounds=1)
    assert measured.key == "map add_vec4 6001" and len(measured.seconds) > 2 and min(measured.seconds.values()) > 0
    assert np.array_equal(added(untuned), before)
    path = MapChooser.of(untuned.recorder).table.path
    assert path is not None
    data = json.loads(path.read_text())
    assert data["times"] == {measured.key: measured.seconds}
    data["times"][measured.key]["64x2"] = 1e-9
    path.write_text(json.dumps(data))
    with VulkanEngine() as second:
        assert np.array_equal(added(second), before)
        reasons = variant_reasons(second.recorder)["add_vec4_64x2_tail"]
        assert reasons[measured.key].startswith("64x2, measured 1e-06 ms, the least of")
        monkeypatch.setenv("VKFOLD_TUNE", "0")
        assert np.array_equal(added(second), before)
        assert measured.key not in variant_reasons(second.recorder).get("add_vec4_64x2_tail", {})


def test_random_numbers_and_scalars_are_measured(untuned: VulkanEngine) -> None:
    settings: dict[str, dict[str, float]] = {"dropout": {"p": 0.5, "site": 3}, "scale": {"factor": 2.0}}
    for name, given in settings.items():
        kernels, scalars = of_map(name).kernel, of_map(name).scalar_values(TensorSpec((301,)), **given)
        assert len(kernels.scalars) == len(scalars)
        assert tune_map(untuned.recorder, MapCall(kernels, 301, False, (1204,) * 2, scalars), rounds=1).seconds


# -- checks ------------------------------------------------------------------------------------------------------------
DAMAGES = {
    "the last step is left out": ("turn < STEPS;", "turn + 1u < max(STEPS, 2u);"),
    "more is written than there is": ("if (group < whole) {", "if (group <= whole) {"),
    "the last elements are left out": ("if (TAIL != 0 &&", "if (TAIL == 2 &&"),
}


@pytest.fixture(params=DAMAGES)
def wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The variant 256x2 of every kernel is wrong."""
    old, new = DAMAGES[request.param]
    right = MapKernel.variant

    def faulty(kernels: MapKernel, choice: MapVariant, *, wide: bool, tail: bool) -> Kernel:
        kernel = right(kernels, choice, wide=wide, tail=tail)
        if choice.name != "256x2":
            return kernel
        return damaged(kernel, old, new)

    monkeypatch.setattr(MapKernel, "variant", faulty)
    yield request.param


def test_a_wrong_variant_is_barred_and_the_next_best_taken(
    untuned: VulkanEngine, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it computes anything anybody sees; for good; it cannot be forced."""
    with forced_variant("64x1", "map"):
        expected = added(untuned)
    chooser = MapChooser.of(untuned.recorder)
    chooser.table.note_times(CALL.key, {"256x2": 1.0, "64x2": 2.0, "256x4": 3.0})
    assert np.array_equal(added(untuned), expected)
    assert set(chooser.table.barred) == {"add_vec4_256x2"}
    assert "map variant add_vec4_256x2 is barred on this device" in caplog.text
    assert "words differ from the base variant's, the first at y[" in caplog.text
    assert variant_reasons(untuned.recorder)["add_vec4_64x2_tail"][CALL.key].startswith("64x2, measured")
    assert "256x2" not in tune_map(untuned.recorder, CALL, rounds=1).seconds
    with forced_variant("256x2", "map"), pytest.raises(VkfoldError, match="256x2 is forced and barred"):
        added(untuned)
    with forced_variant("256x2", "map"), pytest.raises(VkfoldError, match="256x2 is forced and barred"):
        untuned.relu(untuned.tensor(values(5)))  # one that was never checked is checked first
    with VulkanEngine() as second:
        assert np.array_equal(added(second), expected)
        assert "add_vec4_256x2_tail" not in variant_reasons(second.recorder)


def test_each_kernel_is_checked_once(untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the life of the table, not of the process; the base variant is not compared with itself."""
    with forced_variant("256x2", "map"):
        added(untuned)
        with VulkanEngine() as second:
            table = MapChooser.of(second.recorder).table
            assert len(table.checked) == 1
            monkeypatch.setattr(table, "note_checked", lambda kernel: pytest.fail(f"{kernel} was checked again"))
            added(second)
            with forced_variant("64x1", "map"):
                added(second)


# -- kernels by hand that go from piece to piece -----------------------------------------------------------------------
def by_hand(engine: VulkanEngine) -> list[Tensor]:
    """A look-up, rope, casts and updates, with and without 16-byte loads; words of two elements begin in the middle."""
    ids = engine.tensor(np.random.default_rng(0).integers(0, 9, 700).astype(np.int32))
    x, cos = engine.tensor(values(60, 44).reshape(2, 30, 44)), engine.tensor(values(40, 12))
    made = [engine.embedding(engine.tensor(values(9, 5)), ids), x]
    engine.rope_(x, cos, cos, num_heads=1, head_dim=24, position_offset=7)
    half = engine.cast(engine.tensor(values(4099)), "float16")
    part = Tensor(engine, TensorSpec((4097,), "float16"), half.storage, half.offset + 2)
    made.append(engine.cast(part, "float32"))
    p, g, m, v = (engine.tensor(np.abs(values(4096, seed=seed))) for seed in range(4))
    engine.adamw_(p, g, m, v)
    q, h, b = (engine.tensor(values(4099, seed=seed)) for seed in range(3))
    engine.sgd_(q, h, b, momentum=0.5)
    return [*made, p, m, v, q, b]


def test_every_variant_of_kernels_by_hand_gives_the_same_bits(vulkan: VulkanEngine) -> None:
    family = map_variants("", vulkan.recorder.max_invocations)
    found = {}
    for variant in family:
        with forced_variant(variant.name, "map"):
            found[variant.name] = list(map(bits, by_hand(vulkan)))
    base = found.pop(family[-1].name)
    for name, got in found.items():
        for i, (one, other) in enumerate(zip(got, base, strict=True)):
            assert np.array_equal(one, other), (name, i)


@pytest.mark.parametrize("op", ["embedding", "rope_", "cast", "adamw_", "sgd_"])
def test_the_case_of_each_kernel_by_hand_shows_a_wrong_variant(
    untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """One that leaves out the last step; one that does not is found to be right."""
    chooser = MapChooser.of(untuned.recorder)
    right = piece_kernels.variant_of

    def faulty(kernel: Kernel, choice: MapVariant) -> Kernel:
        variant = right(kernel, choice)
        if choice.name != "256x2":
            return variant
        return damaged(variant, "turn < STEPS;", "turn + 1u < max(STEPS, 2u);")

    monkeypatch.setattr(piece_kernels, "variant_of", faulty)
    for kernel in OPS[op].kernels():
        assert right_pieces(untuned.recorder, chooser, kernel, MapVariant(kernel.name, 64, 4)), kernel.name
        assert not right_pieces(untuned.recorder, chooser, kernel, MapVariant(kernel.name, 256, 2)), kernel.name
    assert set(chooser.table.barred) == {f"{kernel.name}_256x2" for kernel in OPS[op].kernels()}


def test_kernels_by_hand_are_tuned(untuned: VulkanEngine) -> None:
    """From planned tensors: nothing but their sizes and types is looked at."""
    planned = PlanEngine()
    table, tokens = planned.zeros((9, 12)), planned.zeros((500,), "int32")
    op = OPS["embedding"]
    assert isinstance(op, PieceOp)
    call = op.piece_call((table, tokens), (planned.zeros((500, 12)),))
    measured = tune_pieces(untuned.recorder, call, rounds=1)
    assert measured.key == "map embedding_vec4 1500" and len(measured.seconds) > 4
    assert MapChooser.of(untuned.recorder).table.times == {measured.key: measured.seconds}
