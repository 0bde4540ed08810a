"""Variants of kernels by hand that loop: the same bits for any shape and value, checked before use, chosen by a pure
function."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from variant_checks import damaged

from vkfold.engine.capabilities import Capabilities
from vkfold.engine.errors import BadInputError, VkfoldError
from vkfold.engine.kernel import Kernel
from vkfold.engine.loop_choice import LoopChooser, select_for
from vkfold.engine.loop_variants import LoopVariant, LoopWork, loop_variants, variant_names
from vkfold.engine.op import OPS
from vkfold.engine.ops import loop_kernels
from vkfold.engine.ops.loop_kernels import LoopOp, right_loops, tune_loops
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.tensor import Tensor, TensorSpec
from vkfold.engine.variant_cache import TuningTable
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.variant_families import variant_reasons
from vkfold.engine.vulkan_engine import VulkanEngine

CPU, GPU = Capabilities(8, True, "llvmpipe", 25, 2), Capabilities(32, False, "a GPU", 1)
NAMES = ["4x4", "4x1", "1x4", "1x1"]
BASE = NAMES[-1]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Ordinary numbers, some of them zeros of both signs and subnormals; the first are not finite."""
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    flat = made.reshape(-1)
    flat[:: 7 + seed] = np.resize(np.array([0.0, -0.0, 1e-41], np.float32), flat[:: 7 + seed].size)
    flat[:3] = np.inf, np.nan, -np.inf
    return made


def bits(tensor: Tensor) -> np.ndarray:
    """One pattern for NaN: which of its bits are set is up to a driver's compiler."""
    array = tensor.numpy()
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


Calls = Callable[[VulkanEngine, int], list[Tensor]]


def beginning(engine: VulkanEngine, array: np.ndarray, offset: int) -> Tensor:
    """A tensor that begins so many elements behind 16 bytes."""
    whole = engine.tensor(np.concatenate([np.ones(offset, np.float32), array.ravel()]))
    return Tensor(engine, TensorSpec(array.shape), whole.storage, 4 * offset)


def sums(engine: VulkanEngine, offset: int) -> list[Tensor]:
    """Of all elements, some of which are not finite; of squares, some of them beyond float32."""
    large = np.abs(values(5, 23_457, seed=1)[1:]) * np.float32(1e19)
    made = [engine.sum(beginning(engine, array, offset)) for array in (values(9, 8_191)[1:], values(3, 4_100), large)]
    for arrays in ([large], [values(99, 1_001)[1:], large, values(2, 5)[1:], values(4, 16_384)[1:]]):
        grads = [beginning(engine, array, offset) for array in arrays]
        made += engine.gradient_norm(grads, max_norm=1.0)
    return made


def columns(engine: VulkanEngine, offset: int) -> list[Tensor]:
    """Chunks of rows that end early, few and many columns."""
    made = []
    for rows, cols in ((203, 44), (4_500, 5), (37, 1_028)):
        x, dy = (beginning(engine, values(rows, cols, seed=seed), offset) for seed in range(2))
        mean, rstd = (engine.tensor(np.abs(values(rows, 3, seed=seed)[:, 1:2]).ravel()) for seed in (2, 3))
        out, weight, shift, bias = (engine.tensor(values(1, cols, seed=4)[0]) for _ in range(4))
        engine.column_sum(x, out, accumulate=True)
        engine.rms_norm_weight_backward(dy, x, rstd, weight)
        engine.layer_norm_weight_backward(dy, x, mean, rstd, shift, bias)
        made += [out, weight, shift, bias]
    return made


def updates(engine: VulkanEngine, offset: int) -> list[Tensor]:
    """Tensors longer than any part, shorter, and of one element."""
    engine.set_step_parameters(StepParameters(step=3, learning_rate=0.1, square_weight=0.3))
    sizes = (20_011, 8_192, 300, 1)

    def tensors(seed: int) -> list[Tensor]:
        return [beginning(engine, np.abs(values(2, size + 4, seed=seed)[1, 4:]), offset) for size in sizes]

    p, g, m, v = (tensors(seed) for seed in range(4))
    decays = [0.1, 0.0, 0.2, 0.1]
    engine.adamw_many_(p, g, m, v, weight_decays=decays)
    q, r, b = (tensors(seed) for seed in range(4, 7))
    engine.sgd_many_(q, g, b, weight_decays=decays, momentum=0.5, nesterov=True)
    engine.sgd_many_(r, g, weight_decays=decays)
    return [*p, *m, *v, *q, *b, *r]


def factored(engine: VulkanEngine, offset: int) -> list[Tensor]:
    """Adafactor on matrices of short and long rows, and on vectors."""
    engine.set_step_parameters(StepParameters(step=3, learning_rate=0.1, square_weight=0.3))
    made = []
    for shape in ((67, 45), (19, 1_100), (1, 20_003)):
        p, g = (beginning(engine, values(2, *shape, seed=seed)[1], offset) for seed in (5, 6))
        if shape[0] == 1:
            p, g = (Tensor(engine, TensorSpec(shape[1:]), t.storage, t.offset) for t in (p, g))
            first, second = beginning(engine, np.ones(shape[1:], np.float32), offset), None
        else:
            first, second = engine.tensor(np.ones(shape[0])), beginning(engine, np.ones(shape[1], np.float32), offset)
        engine.adafactor_(p, g, first, second, relative=1e-3, weight_decay=0.1)
        made += [p, first] if second is None else [p, first, second]
    return made


def others(engine: VulkanEngine, offset: int) -> list[Tensor]:
    """Gradients of a table and of sinks."""
    ids = engine.tensor(np.random.default_rng(0).integers(0, 40, 700).astype(np.int32))
    made = []
    for cols in (5, 132):
        table = engine.tensor(values(50, cols, seed=2))
        engine.embedding_backward(beginning(engine, values(700, cols, seed=1), offset), ids, table, accumulate=True)
        made.append(table)
    lse, sinks, out = (
        engine.tensor(values(2, 3 * 70)[1].reshape(1, 3, 70)),
        engine.tensor(np.ones(3)),
        engine.empty((3,)),
    )
    d_o, o = (beginning(engine, values(71, 3 * 20, seed=seed)[1:].reshape(1, 70, 60), offset) for seed in (3, 4))
    engine.attention_sinks_backward(d_o, o, lse, sinks, out)
    return [*made, out]


@pytest.mark.parametrize("calls", [sums, columns, updates, factored, others])
@pytest.mark.parametrize("offset", [0, 1])
def test_every_variant_gives_the_same_bits(vulkan: VulkanEngine, calls: Calls, offset: int) -> None:
    found = {}
    for name in NAMES:
        kernels: list[str] = []
        vulkan.recorder.trace = kernels.append
        try:
            with forced_variant(name, "loop"):
                found[name] = list(map(bits, calls(vulkan, offset)))
        finally:
            vulkan.recorder.trace = None
        factor, turns = name.split("x")
        forced = [kernel for kernel in kernels if kernel.endswith((f"_{name}", f"_{factor}x1", f"_1x{turns}"))]
        assert len(forced) >= 3, kernels
    base = found.pop(BASE)
    for name, got in found.items():
        for i, (one, other) in enumerate(zip(got, base, strict=True)):
            assert np.array_equal(one, other), (name, i)


# -- the choice --------------------------------------------------------------------------------------------------------
def test_selection_is_a_pure_function_of_its_table() -> None:
    table = TuningTable()

    def name(device: Capabilities, pieces: int, rounds: int, *, tuned: bool = True, **more: object) -> str:
        work = LoopWork("sum", pieces, 32 * rounds, rounds, 32 * rounds * pieces, 4, **more)  # type: ignore[arg-type]
        return select_for(device, work, table, tuned).choice.name

    assert variant_names() == NAMES and [v.name for v in loop_variants("k", (1,), (4, 1))] == ["1x4", "1x1"]
    assert name(CPU, 64, 128) == "4x4" and name(CPU, 63, 128) == "1x4" and name(CPU, 2048, 31) == "4x1"
    assert name(CPU, 512, 3) == name(CPU, 1024, 31) == "1x1", "too little to be worth a check"
    assert (
        name(CPU, 512, 128, factors=(1,)) == "1x4"
        and name(CPU, 512, 128, turns=(1,)) == "4x1"
        and name(CPU, 3, 2**20) == "1x4"
    )
    assert name(CPU._replace(parallel=64), 512, 128) == "1x4" and name(GPU, 2**20, 128) == "1x1"
    assert name(CPU, 64, 128, longer=True, factors=(1,)) == "1x4"
    assert name(CPU, 63, 128, longer=True, factors=(1,)) == "1x1", "longer parts would leave cores without work"
    table.note_times("loop sum 64x4096", {"4x1": 1.0, "1x4": 0.5, "no_such_variant": 0.1})
    assert name(GPU, 64, 128) == "1x4" and name(GPU, 64, 128, tuned=False) == "1x1"
    table.bar("sum_1x4", "wrong")
    assert name(GPU, 64, 128) == "4x1"
    for variant in loop_variants("sum", (4, 1), (4, 1)):
        table.bar(variant.barred_as, "wrong")
    with pytest.raises(VkfoldError, match="every variant of loop sum 64x4096 is barred"):
        name(GPU, 64, 128)


def test_forcing(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong name lists what there is, before and after an engine is made; a right one goes as far as a kernel has
    it."""
    x, out = vulkan.tensor(np.ones((300, 8))), vulkan.empty((8,))
    for text in ("loop=2x2", "loop=sum"):
        monkeypatch.setenv("VKFOLD_VARIANT", text)
        with pytest.raises(BadInputError, match=r"no loop variant '.*': there are 4x4, 4x1, 1x4, 1x1"):
            VulkanEngine()
        with pytest.raises(BadInputError, match="no loop variant"):
            vulkan.column_sum(x, out)
            out.numpy()
    monkeypatch.setenv("VKFOLD_VARIANT", "loop=4x4")
    vulkan.column_sum(x, out)
    vulkan.sgd_many_([vulkan.tensor(np.ones(8))], [out], weight_decays=[0.0])
    ids = vulkan.tensor(np.arange(300, dtype=np.int32) % 8)
    vulkan.embedding_backward(x, ids, vulkan.empty((8, 8)))
    out.numpy()
    reasons = variant_reasons(vulkan.recorder)
    assert reasons["column_sum_vec4_4x4"]["loop column_sum_vec4 20x30"] == "4x4, forced"
    assert reasons["sgd_many_1x4"]["loop sgd_many 1x512"] == "1x4, forced"
    assert reasons["embedding_backward_vec4_4x1"]["loop embedding_backward_vec4 600x1"] == "4x1, forced"
    monkeypatch.setattr(vulkan.recorder, "max_invocations", 128)
    vulkan.column_sum(vulkan.tensor(np.ones((301, 8))), out)
    out.numpy()
    assert "loop column_sum_vec4 20x31" in variant_reasons(vulkan.recorder)["column_sum_vec4_1x4"]


# -- checks ------------------------------------------------------------------------------------------------------------
OP_NAMES = [name for name, op in OPS.items() if isinstance(op, LoopOp)]


def kernels_of(op: str) -> list[Kernel]:
    """Its kernels that have variants, base texts alone."""
    return [kernel for kernel in OPS[op].kernels() if kernel in loop_kernels._loops]


def faulty(right: Callable[[Kernel, LoopVariant], Kernel], kernel: Kernel, choice: LoopVariant) -> Kernel:
    """4x1 leaves out every second workgroup, 1x4 the last of its turns."""
    variant = right(kernel, choice)
    if choice.name == "4x1":
        if kernel.subgroups:
            return damaged(variant, "group_index() * gl_NumSubgroups", "group_index() * 2 * gl_NumSubgroups")
        return damaged(variant, "group_index() * gl_WorkGroupSize.x", "group_index() * 2 * gl_WorkGroupSize.x")
    if choice.name == "1x4":
        if "CHUNK" in variant.defines:
            return damaged(variant, "min(wide_end, first + part)", "min(wide_end, first + part / 4 * 3)")
        return damaged(variant, "ROUND(2); ROUND(3);", "ROUND(2);")
    return variant


def test_what_has_variants() -> None:
    assert {"sum", "column_sum", "gradient_norm", "adamw_many_", "sgd_many_", "adafactor_"} <= set(OP_NAMES)
    assert all(kernels_of(name) for name in OP_NAMES)
    assert all(kernel.family == "loop" for name in OP_NAMES for kernel in kernels_of(name))


@pytest.mark.parametrize("op", OP_NAMES)
def test_the_case_of_each_kernel_shows_a_wrong_variant(
    untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """One that is not wrong is found to be right."""
    gpu, chooser = untuned.recorder, LoopChooser.of(untuned.recorder)
    right = loop_kernels.variant_of
    wrong = set()
    for kernel in kernels_of(op):
        has = loop_kernels._loops[kernel]
        for choice in loop_variants(kernel.name, has.factors, has.turns):
            assert right_loops(gpu, chooser, kernel, choice), choice.barred_as
            if choice.name in ("4x1", "1x4"):
                wrong.add(choice)
    monkeypatch.setattr(loop_kernels, "variant_of", lambda kernel, choice: faulty(right, kernel, choice))
    monkeypatch.setattr(chooser.table, "checked", set())
    by_name = {kernel.name: kernel for kernel in kernels_of(op)}
    for choice in wrong:
        assert not right_loops(gpu, chooser, by_name[choice.kernel], choice), choice.barred_as
    assert set(chooser.table.barred) == {choice.barred_as for choice in wrong}


def test_a_wrong_variant_is_barred_and_the_next_best_taken(
    untuned: VulkanEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it computes anything anybody sees; for good; it cannot be forced."""
    array = values(9, 8_192)[1:]

    def summed(engine: VulkanEngine) -> np.ndarray:
        return bits(engine.sum(engine.tensor(array)))

    with forced_variant(BASE, "loop"):
        expected = summed(untuned)
    right = loop_kernels.variant_of
    monkeypatch.setattr(loop_kernels, "variant_of", lambda kernel, choice: faulty(right, kernel, choice))
    chooser = LoopChooser.of(untuned.recorder)
    key = "loop sum_vec4 16x4096"
    chooser.table.note_times(key, {"1x4": 1.0, "4x1": 2.0, "1x1": 3.0})
    assert np.array_equal(summed(untuned), expected)
    assert set(chooser.table.barred) == {"sum_vec4_1x4", "sum_vec4_4x1"}
    assert "loop variant sum_vec4_1x4 is barred on this device" in caplog.text
    assert variant_reasons(untuned.recorder)["sum_vec4_1x1"][key].startswith("1x1, measured")
    with forced_variant("1x4", "loop"), pytest.raises(VkfoldError, match="1x4 is forced and barred"):
        summed(untuned)
    with VulkanEngine() as second:
        assert np.array_equal(summed(second), expected)


# -- tuning ------------------------------------------------------------------------------------------------------------
def test_tuning_is_kept_used_and_changes_no_bit(untuned: VulkanEngine) -> None:
    """Of one tensor, and of a table of them; from planned tensors: nothing but sizes and types is looked at."""

    def norm(engine: VulkanEngine) -> np.ndarray:
        grads = [engine.tensor(values(3, 9_000, seed=seed)[1:]) for seed in range(3)]
        return np.concatenate([bits(tensor) for tensor in engine.gradient_norm(grads)])

    before, planned = norm(untuned), PlanEngine()
    tensors = [planned.zeros((2, 9_000)) for _ in range(12)]
    made = [planned.zeros((3,)), planned.zeros((4,))]
    settings = {"adamw_many_": {"beta1": 0.5, "beta2": 0.5, "eps": 1e-6}, "gradient_norm": {}}
    for name, given, key in (
        ("gradient_norm", [None, *tensors[:3]], "loop square_sums_many 9x6000"),
        ("adamw_many_", [None, *tensors], "loop adamw_many 27x512"),
    ):
        op = OPS[name]
        assert isinstance(op, LoopOp)
        (call,) = op.loop_calls(given, made, **settings[name])
        measured = tune_loops(untuned.recorder, call, rounds=1)
        assert measured.key == call.key == key and len(measured.seconds) > 1
    table = LoopChooser.of(untuned.recorder).table
    assert np.array_equal(norm(untuned), before) and table.path is not None
    data = json.loads(table.path.read_text())
    assert len(data["times"]) == 2
    data["times"]["loop square_sums_many 9x6000"]["4x4"] = 1e-9
    table.path.write_text(json.dumps(data))
    with VulkanEngine() as second:
        assert np.array_equal(norm(second), before)
        reasons = variant_reasons(second.recorder)["square_sums_many_4x4"]
        assert reasons["loop square_sums_many 9x6000"].startswith("4x4, measured 1e-06 ms, the least of")


def test_all_calls_of_an_op_are_tuned(untuned: VulkanEngine) -> None:
    """Adafactor's on a matrix, those of a table's gradient, and a column sum's."""
    planned = PlanEngine()
    x, out = planned.zeros((64, 12)), planned.zeros((12,))
    adafactor = {"eps": 1e-6, "threshold": 1.0, "weight_decay": 0.0, "relative": 0.5}
    scratch = [
        planned.zeros(spec.shape) for spec in OPS["adafactor_"].scratch(x.spec, x.spec, x.spec, x.spec, **adafactor)
    ]
    links = planned.zeros((64, 2), "uint32")
    for name, inputs, outputs, settings in (
        ("adafactor_", [x, x, planned.zeros((64,)), out, None], scratch, adafactor),
        ("embedding_backward", [x, planned.zeros((64,), "int32"), x], [links], {"accumulate": True}),
        ("column_sum", [x, out], [planned.zeros((1, 2, 12))], {"accumulate": False}),
    ):
        op = OPS[name]
        assert isinstance(op, LoopOp)
        calls = op.loop_calls(inputs, outputs, **settings)
        assert len({call.key for call in calls}) == len(calls)
        for call in calls:
            assert BASE in tune_loops(untuned.recorder, call, rounds=1).seconds
