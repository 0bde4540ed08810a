"""Recomputation, offload and submits in any combination change no bit (the matrix), and move the bytes they promise."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError, MissingActivationError, RecomputeMismatchError
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep
from vkfold.nn.activation_offload import ActivationOffload
from vkfold.nn.gpt_block import GPTBlock
from vkfold.nn.memory_budget import MemoryMode, cheapest_mode

NUM_STEPS = 3
NUM_LAYERS = 3
BATCH, SEQ, VOCAB = 2, 7, 19
SIZES = {"vocab_size": VOCAB, "max_seq_len": 8, "d_model": 8, "num_heads": 2, "d_ff": 12, "num_layers": NUM_LAYERS}
MODELS = {
    "llama": {"num_kv_heads": 1, "tie_head": False},
    "gpt": {"norm": "layernorm", "activation": "gelu", "positions": "learned"},
}
CHUNK_BYTES = 4 * VOCAB * 7  # fewer rows than a micro-batch has, so that there are several chunks
GROUPS = ("norm", "activation", "attention", "qkv", "mlp")
AUTOMATIC = "automatic"
RECOMPUTE: dict[str, MemoryMode | None] = {
    "none": MemoryMode(),
    "every 1": MemoryMode(1),
    "every 2": MemoryMode(2),
    "every 3": MemoryMode(3),
    **{group: MemoryMode(0, (group,)) for group in GROUPS},
    "mlp,qkv": MemoryMode(0, ("mlp", "qkv")),
    "all": MemoryMode(0, GROUPS),
    "all of 2 blocks": MemoryMode(0, GROUPS, 2),
    "every 2 and mlp,attention": MemoryMode(2, ("attention", "mlp")),
    AUTOMATIC: None,
}
AXES: dict[str, list[Any]] = {
    "recompute": list(RECOMPUTE),
    "offload": [False, True],
    "flush": [0, 1, 2],
    "accumulate": [1, 3],
    "dropout": [0.0, 0.1],
    "model": ["gpt", "llama"],
}


def pairs_of(cell: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
    return {(a, cell[a], b, cell[b]) for a, b in itertools.combinations(sorted(cell), 2)}


def pairwise(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Few cells in which every value of every axis meets every value of every other axis (greedy)."""
    everything = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    open_pairs = set().union(*(pairs_of(cell) for cell in everything))
    cells = []
    while open_pairs:
        cells.append(max(everything, key=lambda cell: len(pairs_of(cell) & open_pairs)))
        open_pairs -= pairs_of(cells[-1])
    return cells


MATRIX = pairwise(AXES)


def make_model(engine: ComputeEngine, kind: str, dropout: float = 0.0, **sizes: int) -> GPTModel:
    config = GPTConfig(**(SIZES | sizes), dropout=dropout, **MODELS[kind])
    return GPTModel(engine, config, seed=2, loss_chunk_bytes=CHUNK_BYTES)


def micro_batches(step: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(step)
    pairs = [tuple(rng.integers(0, VOCAB, (2, BATCH, SEQ))) for _ in range(count)]
    pairs[0][1][1, :3] = -100
    return pairs


def planned_step(kind: str, dropout: float, accumulate: int) -> tuple[GPTModel, Callable[[], object]]:
    model = make_model(PlanEngine(), kind, dropout)
    step = TrainingStep(model, AdamW(model), max_norm=0.5)
    return model, lambda: step(micro_batches(0, accumulate), step=0, learning_rate=1e-2)


def train(model: GPTModel, accumulate: int) -> dict[str, np.ndarray]:
    """Losses, gradients of every step, and the weights and moments at the end."""
    optimizer = AdamW(model)
    step = TrainingStep(model, optimizer, max_norm=0.5, seed=11, keep_gradients=True)
    seen: dict[str, np.ndarray] = {}
    for n in range(NUM_STEPS):
        result = step(micro_batches(n, accumulate), step=n, learning_rate=1e-2)
        seen[f"loss {n}"] = np.array([result.loss, result.grad_norm])
        for name, parameter in model.named_parameters().items():
            assert parameter.grad is not None
            seen[f"gradient {n} {name}"] = parameter.grad.numpy()
    model.clear_gradients()
    seen.update({f"weight {name}": value for name, value in model.state_dict().items()})
    seen.update({f"moment {name}": value for name, value in optimizer.state_dict().items()})
    return seen


def assert_same_bits(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    assert all(np.isfinite(value).all() for value in expected.values())
    worst = {name: float(np.abs(actual[name] - value).max()) for name, value in expected.items()}
    different = {name: value for name, value in worst.items() if value != 0}
    assert not different, f"{len(different)} of {len(expected)} differ: {dict(list(different.items())[:3])}"


# -- the matrix ------------------------------------------------------------------------------------------------------
def test_the_matrix_pairs_every_value_with_every_other() -> None:
    met = set().union(*(pairs_of(cell) for cell in MATRIX))
    for (a, values_a), (b, values_b) in itertools.combinations(sorted(AXES.items()), 2):
        for pair in itertools.product(values_a, values_b):
            assert (a, pair[0], b, pair[1]) in met
    assert len(MATRIX) < 60


@pytest.fixture(scope="module")
def baselines() -> dict[Any, dict[str, np.ndarray]]:
    return {}


@pytest.mark.parametrize("cell", MATRIX, ids=lambda cell: "-".join(str(value) for value in cell.values()))
def test_no_memory_mode_changes_a_bit(vulkan: VulkanEngine, baselines: dict[Any, Any], cell: dict[str, Any]) -> None:
    kind, dropout, accumulate = cell["model"], cell["dropout"], cell["accumulate"]
    key = kind, dropout, accumulate
    if key not in baselines:
        baselines[key] = train(make_model(vulkan, kind, dropout), accumulate)
    model = make_model(vulkan, kind, dropout)
    model.set_activation_offload(cell["offload"])
    model.set_flush_interval(cell["flush"])
    mode = RECOMPUTE[cell["recompute"]] or automatic_mode(kind, dropout, accumulate, cell["offload"])
    mode.apply(model)
    copied = vulkan.offloaded_bytes, vulkan.restored_bytes
    assert_same_bits(train(model, accumulate), baselines[key])
    assert (vulkan.offloaded_bytes > copied[0]) == cell["offload"]
    assert vulkan.offloaded_bytes - copied[0] == vulkan.restored_bytes - copied[1]


def automatic_mode(kind: str, dropout: float, accumulate: int, offload: bool) -> MemoryMode:
    """What the budget halfway between the smallest peak and that without recomputation asks for."""
    model, step = planned_step(kind, dropout, accumulate)
    model.set_activation_offload(offload)
    plain = cheapest_mode(model, step, 10**12)
    try:
        cheapest_mode(model, step, 1)
    except BadInputError as error:
        stated = re.search(r"smallest peak that can be reached is ([0-9,]+) bytes", str(error))
    assert stated is not None
    smallest = int(stated[1].replace(",", ""))
    found = cheapest_mode(model, step, (plain.peak_bytes + smallest) // 2)
    if not offload:  # offloading leaves recomputation little to save at this size
        assert found.mode != MemoryMode()
    assert smallest <= found.peak_bytes <= (plain.peak_bytes + smallest) // 2
    return found.mode


@pytest.mark.parametrize("mode", ["none", "every 1", "every 2"])
def test_a_flush_interval_submits_in_both_directions(vulkan: VulkanEngine, mode: str) -> None:
    """Six blocks: one submit more for each full interval, forward and backward alike."""
    more = {}
    for interval in (0, 1, 2, 3, 4, 7):
        model = make_model(vulkan, "gpt", num_layers=6)
        recompute = RECOMPUTE[mode]
        assert recompute is not None
        recompute.apply(model)
        model.set_flush_interval(interval)
        pairs = micro_batches(0, 1)[0]
        model.loss(*pairs)  # the position table is made once
        vulkan.end_batch()
        counts = [vulkan.recorder.num_submits]
        for phase in (lambda: model.loss(*pairs), model.backward):  # noqa: B023 (called at once)
            phase()
            vulkan.end_batch()
            counts.append(vulkan.recorder.num_submits)
        more[interval] = [after - before for before, after in itertools.pairwise(counts)]
        model.clear_gradients()
    for interval in (1, 2, 3, 4, 7):
        assert [n - plain for n, plain in zip(more[interval], more[0], strict=True)] == [6 // interval] * 2


# -- offload ---------------------------------------------------------------------------------------------------------
def engines(vulkan: VulkanEngine) -> list[ComputeEngine]:
    return [vulkan, CpuEngine(), PlanEngine()]


def device_and_host(engine: ComputeEngine) -> tuple[int, int]:
    """Live bytes of activations' pool and of the host."""
    stats = engine.pool_stats()
    host = stats["host"].live_bytes if "host" in stats else 0
    return (stats["step"] if "step" in stats else stats["direct"]).live_bytes, host


def kept_bytes(model: GPTModel) -> int:
    return sum(t.nbytes for name, t in model.activation_cache().items() if name.startswith(("blocks.", "segment.")))


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("mode", ["none", "every 1", "every 2", "mlp,qkv", "every 2 and mlp,attention"])
def test_kept_bytes_move_to_the_host_and_are_given_up(vulkan: VulkanEngine, kind: str, mode: str) -> None:
    copied = set()
    for engine in engines(vulkan):
        model = make_model(engine, kind, 0.1)
        recompute = RECOMPUTE[mode]
        assert recompute is not None
        recompute.apply(model)
        pairs = micro_batches(0, 1)[0]
        model.loss(*pairs)  # the position table is made once
        model.release_cache()
        model.clear_gradients()
        before = device_and_host(engine)
        loss = model.loss(*pairs)
        kept, plain = kept_bytes(model), device_and_host(engine)
        model.backward()
        model.clear_gradients()
        model.set_activation_offload(True)
        counted = engine.offloaded_bytes
        loss = model.loss(*pairs)
        moved = device_and_host(engine)
        assert kept_bytes(model) == 0
        assert engine.offloaded_bytes - counted == kept
        assert moved[1] - before[1] >= kept > 0
        if not isinstance(engine, CpuEngine):  # both in pools of one alignment
            assert plain[0] - moved[0] == moved[1] - before[1]
        model.backward()
        model.clear_gradients()
        assert engine.restored_bytes == engine.offloaded_bytes or engine is vulkan
        del loss
        assert device_and_host(engine) == before
        copied.add(engine.offloaded_bytes - counted)
        del model
    assert len(copied) == 1  # bytes copied equal the plan


def test_planned_peaks_equal_measured_ones(vulkan: VulkanEngine) -> None:
    seen = {}
    for engine in (vulkan, PlanEngine()):
        model = make_model(engine, "gpt", 0.1)
        model.set_activation_offload(True)
        step = TrainingStep(model, AdamW(model))
        before = {name: stats.live_bytes for name, stats in engine.pool_stats().items()}
        copied = engine.offloaded_bytes
        engine.reset_peak()
        step(micro_batches(0, 2), step=0, learning_rate=0.0)
        seen[engine.name] = {
            name: stats.peak_live_bytes - before.get(name, 0) for name, stats in engine.pool_stats().items()
        }
        seen[engine.name]["copied"] = engine.offloaded_bytes - copied
        del model, step
    first, second = seen.values()
    assert first == second


def test_a_prefetched_block_is_the_only_one_more(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the backward of block i, block i - 1 is on the device and block i - 2 is not."""
    model = make_model(vulkan, "llama")
    model.set_activation_offload(True)
    model.loss(*micro_batches(0, 1)[0])
    entries = model._offloaded._entries
    assert sorted(entries) == [0, 1, 2]
    fetched = []
    plain = GPTBlock.backward

    def watched(self: GPTBlock, dy: Tensor) -> Tensor:
        fetched.append((sorted(entries), sorted(n for n, entry in entries.items() if entry.tensors)))
        return plain(self, dy)

    monkeypatch.setattr(GPTBlock, "backward", watched)
    model.backward()
    assert fetched == [([0, 1], [1]), ([0], [0]), ([], [])]
    model.clear_gradients()


def test_nothing_is_left_on_the_host_without_a_backward(vulkan: VulkanEngine) -> None:
    model = make_model(vulkan, "gpt")
    model.set_activation_offload(True)
    pairs = micro_batches(0, 1)[0]
    before = device_and_host(vulkan)[1]
    forget: list[Callable[[], object]] = [
        model.release_cache,
        lambda: model.set_training(False),
        lambda: model.set_activation_offload(False),
    ]
    for action in forget:
        model.set_training(True)
        model.set_activation_offload(True)
        for _ in range(2):
            model.loss(*pairs)
            held = device_and_host(vulkan)[1] - before
        assert held > 0
        action()
        assert device_and_host(vulkan)[1] == before
        model.set_training(True)
        with pytest.raises(MissingActivationError):
            model.backward()
    model.clear_gradients()


def test_one_tensor_under_two_names_is_copied_once(vulkan: VulkanEngine) -> None:
    tensor = vulkan.tensor(np.arange(5.0))
    holder = {"a": tensor, "b": tensor}
    offload, copied = ActivationOffload(vulkan), vulkan.offloaded_bytes
    offload.store(0, [("a", holder, "a"), ("b", holder, "b")])
    del tensor
    assert not holder
    assert offload.nbytes == vulkan.offloaded_bytes - copied == 20
    for _ in range(2):  # twice is harmless
        offload.prefetch(0)
    for _ in range(2):
        offload.bring_back(0)
    assert holder["a"] is holder["b"]
    assert np.array_equal(holder["a"].numpy(), np.arange(5.0))
    assert offload.nbytes == 0


# -- the automatic choice --------------------------------------------------------------------------------------------
@pytest.mark.deviceless
@pytest.mark.parametrize("kind", list(MODELS))
def test_budget_choice_equals_exhaustive_search(kind: str) -> None:
    """On four layers, every mode planned by itself: the cheapest that fits is the one chosen, at every budget."""
    engine = PlanEngine()
    model = make_model(engine, kind, num_layers=4, max_seq_len=32, d_model=32)
    step = TrainingStep(model, AdamW(model))
    tokens = np.zeros((2, 32), np.int64)

    def run() -> None:
        step([(tokens, tokens)], step=0, learning_rate=0.0)

    groups = [g for n in range(5) for g in itertools.combinations(("norm", "attention", "qkv", "mlp"), n)]
    modes = [MemoryMode()] + [MemoryMode(0, g, k) for g in groups if g for k in (1, 2, 3, 4)]
    modes += [MemoryMode(every, g, 4 if g else None) for every in (1, 2, 3, 4) for g in groups]
    planned = []
    for mode in modes:
        mode.apply(model)
        before = engine.cost.flops
        engine.reset_peak()
        run()
        peak = sum(pool.stats().peak_live_bytes for pool in engine.pools.values())
        planned.append((engine.cost.flops - before, peak))
    MemoryMode().apply(model)
    smallest = min(peak for _, peak in planned)
    for budget in [smallest, *np.linspace(smallest, planned[0][1], 8).astype(int), 10**12]:
        found = cheapest_mode(model, run, int(budget))
        cheapest = min(flops for flops, peak in planned if peak <= budget)
        assert found.flops == cheapest
        assert found.peak_bytes <= budget
    with pytest.raises(ValueError, match=f"smallest.*{smallest:,} bytes"):
        cheapest_mode(model, run, smallest - 1)


# -- the debug check -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [name for name in RECOMPUTE if name != AUTOMATIC])
@pytest.mark.parametrize("kind", list(MODELS))
def test_the_recompute_check_is_quiet_when_all_is_well(
    cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch, mode: str, kind: str
) -> None:
    monkeypatch.setenv("VKFOLD_CHECK_RECOMPUTE", "1")
    model = make_model(cpu, kind, 0.1)
    recompute = RECOMPUTE[mode]
    assert recompute is not None
    recompute.apply(model)
    cpu.set_step_parameters(StepParameters(seed=1))
    model.loss(*micro_batches(0, 1)[0])
    model.backward()
    assert model.recompute_check is not None
    assert model.recompute_check.num_compared >= 3 * NUM_LAYERS
    monkeypatch.delenv("VKFOLD_CHECK_RECOMPUTE")
    model.loss(*micro_batches(0, 1)[0])
    assert model.recompute_check is None
    assert model.blocks[0].attention.recompute_check is None


@pytest.mark.parametrize(
    ("group", "damage", "named"),
    [
        ("attention", lambda block: setattr(block.attention, "causal", False), "blocks.1.attention.o"),
        ("norm", lambda block: setattr(block.norm2, "eps", 0.5), "blocks.1.norm2.0"),
        ("norm", lambda block: setattr(block.norm1, "eps", 0.5), "blocks.1.norm1.0"),
    ],
)
def test_each_group_that_is_rebuilt_is_checked(
    cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch, group: str, damage: Callable[[GPTBlock], None], named: str
) -> None:
    """The damage leaves every other tensor that is compared before this one as it was."""
    monkeypatch.setenv("VKFOLD_CHECK_RECOMPUTE", "1")
    model = make_model(cpu, "llama")
    model.set_recompute({group})
    cpu.set_step_parameters(StepParameters(seed=1))
    model.loss(*micro_batches(0, 1)[0])
    damage(model.blocks[1])
    with pytest.raises(RecomputeMismatchError, match=f"^{re.escape(named)}, recomputed"):
        model.backward()


@pytest.mark.parametrize(
    ("mode", "damage", "named"),
    [
        ("every 1", "blocks.1.attention.qkv.weight", "blocks.1.attention.qkv"),
        ("every 3", "blocks.0.feed_forward.up.weight", "blocks.0.feed_forward.pre"),
        ("mlp", "blocks.2.feed_forward.up.weight", "blocks.2.feed_forward.pre"),
        ("qkv", "blocks.0.attention.qkv.weight", "blocks.0.attention.qkv"),
        ("none", "blocks.1.norm2.weight", "blocks.1.norm2_out"),
        ("every 1", "step", "blocks.2.mid"),
    ],
)
def test_the_recompute_check_names_the_first_that_differs(
    cpu: CpuEngine, monkeypatch: pytest.MonkeyPatch, mode: str, damage: str, named: str
) -> None:
    monkeypatch.setenv("VKFOLD_CHECK_RECOMPUTE", "1")
    model = make_model(cpu, "llama", 0.4)
    recompute = RECOMPUTE[mode]
    assert recompute is not None
    recompute.apply(model)
    cpu.set_step_parameters(StepParameters(seed=1))
    model.loss(*micro_batches(0, 1)[0])
    if damage == "step":  # other dropout masks
        cpu.set_step_parameters(StepParameters(seed=2))
    else:
        weight = model.named_parameters()[damage].data
        cpu.upload(weight, weight.numpy() + 0.5)
    with pytest.raises(RecomputeMismatchError, match=f"^{named}, recomputed"):
        model.backward()
