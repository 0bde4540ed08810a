"""Every byte has its place: saved tensors, what each saving is worth, accounts, leaks, frees by reference count."""

from __future__ import annotations

import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkfold.engine.allocation_ledger import ACTIVATIONS, AllocationLedger
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.pool_account import PoolAccount, pool_account
from vkfold.engine.pooled_engine import PooledEngine
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.memory_pool import PoolStats
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep
from vkfold.nn.layer import Layer
from vkfold.tools.attribution import Contribution, attribute
from vkfold.tools.memory_estimator import main
from vkfold.tools.memory_plan import TrainingPlan, plan_training
from vkfold.tools.memory_watch import MemoryWatch
from vkfold.tools.model_setup import make_model, make_optimizer, make_training_step
from vkfold.tools.run_config import RunConfig
from vkfold.tools.saved_tensors import SavedRow, saved_rows

VOCAB = 512
SIZES: dict[str, Any] = {
    "d_model": 64,
    "num_heads": 4,
    "num_layers": 3,
    "d_ff": 192,
    "activation": "gelu",
    "norm": "layernorm",
    "positions": "learned",
    "seq_len": 48,
    "batch_size": 2,
    "loss_chunk_bytes": 64 * VOCAB * 4,
}
ROWS = 2 * 48
WIDE: dict[str, Any] = {"accum_steps": 2, "recompute": "mlp,norm", "norm": "rmsnorm", "positions": "rope"}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and recomputation": WIDE,
    "checkpoints and offload": {"checkpoint_every": 2, "activation_offload": True, "dropout": 0.1},
    "fused update": {"fused_update": True, "max_norm": 0.0, "activation": "swiglu", "tie_head": True},
}


def config_of(**values: Any) -> RunConfig:
    return RunConfig(**(SIZES | values))


# -- saved tensors -----------------------------------------------------------------------------------------------------
def by_op(rows: list[SavedRow]) -> dict[str, list[SavedRow]]:
    found: dict[str, list[SavedRow]] = {}
    for row in rows:
        found.setdefault(row.op, []).append(row)
    return found


def test_saved_tensors_by_hand() -> None:
    plan = plan_training(config_of(), VOCAB)
    rows = saved_rows(plan.ledger)
    ops = by_op(rows)
    # An activation function keeps nothing of its own: its input is the matmul's, its output is rebuilt.
    assert [(row.new, row.references) for row in ops["activation"]] == [
        ({}, [f"blocks.{i}.feed_forward.pre"]) for i in range(3)
    ]
    # The block's input is what the add made; the norm keeps scalars and refers to it.
    (made,) = (row for row in rows if "blocks.0.x" in row.new)
    assert (made.op, made.new) == ("add", {"blocks.0.x": ROWS * 64 * 4})
    first_norm = ops["layer_norm"][0]
    assert first_norm.references == ["blocks.0.x"]
    assert first_norm.new == {"blocks.0.norm1.0": 512, "blocks.0.norm1.1": 512}  # 96 floats, rounded up to 256
    attention = ops["attention_qkv"][1]
    assert attention.new == {"blocks.1.attention.o": ROWS * 64 * 4, "blocks.1.attention.lse": 2 * 4 * 48 * 4}
    assert attention.references == ["blocks.1.attention.qkv"]
    # Position numbers live in the parameter pool anyway.
    assert [row.op for row in rows if "positions.tokens" in row.references] == ["embedding"]
    assert not any("positions.tokens" in row.new for row in rows)


@pytest.mark.parametrize("mode", ["plain", "accumulation and recomputation", "fused update"])
def test_newly_held_bytes_add_up(mode: str) -> None:
    plan = plan_training(config_of(**MODES[mode]), VOCAB)
    total = sum(row.new_bytes for row in saved_rows(plan.ledger))
    assert total == sum(sum(layer.values()) for layer in plan.saved_by_layer().values())
    assert total == plan.bytes_of(ACTIVATIONS)


def test_segments_are_what_checkpointing_keeps() -> None:
    plan = plan_training(config_of(checkpoint_every=2), VOCAB)
    new = {name: nbytes for row in saved_rows(plan.ledger) for name, nbytes in row.new.items()}
    blocks = {name: nbytes for name, nbytes in new.items() if name.startswith(("blocks.", "segment."))}
    assert blocks == {"segment.0": ROWS * 64 * 4, "segment.2": ROWS * 64 * 4}


def test_two_names_of_the_same_bytes_count_once() -> None:
    engine = PlanEngine()
    ledger = AllocationLedger(engine)
    ledger.attach()
    ledger.phase = "forward"
    x = engine.empty((32, 8))
    y = engine.relu(x)
    for tensor, name in ((x, "x"), (y, "y"), (y.reshape(256), "flat"), (x.rows(0, 4), "top")):
        ledger.label(tensor, ACTIVATIONS, name)
    (row,) = saved_rows(ledger)
    assert row.new == {"x": 1024, "y": 1024} and row.references == ["top", "flat"]


# -- attribution -------------------------------------------------------------------------------------------------------
def worth(**values: Any) -> tuple[TrainingPlan, dict[str, Contribution]]:
    plan = plan_training(config_of(**values), VOCAB)
    return plan, {row.saving: row for row in attribute(plan, VOCAB)}


def test_savings_that_are_built_in() -> None:
    plan, rows = worth()
    assert set(rows) == {
        "loss chunks",
        "in-place ops",
        "norm outputs rebuilt",
        "activation outputs rebuilt",
        "no score matrix",
        "gradients made late",
    }
    assert rows["no score matrix"].forward_bytes == 3 * 2 * 4 * 48 * 48 * 4
    assert rows["activation outputs rebuilt"].forward_bytes == 3 * ROWS * 192 * 4
    assert rows["activation outputs rebuilt"].flops > 0
    assert rows["norm outputs rebuilt"].forward_bytes == 7 * ROWS * 64 * 4  # two a block, and the last
    assert 0 < rows["norm outputs rebuilt"].flops < 0.01 * plan.flops
    head = VOCAB * 64 * 4  # whose gradient the loss has made by then
    late = sum(-(-4 * size // 256) * 256 for size in parameter_sizes(plan.config)) - head
    assert rows["gradients made late"].forward_bytes == late
    assert rows["gradients made late"].flops == rows["loss chunks"].flops == rows["no score matrix"].flops == 0
    assert all(row.peak_bytes >= 0 for row in rows.values())


def parameter_sizes(config: RunConfig) -> list[int]:
    return [parameter.size for parameter in make_model(PlanEngine(), config, VOCAB).parameters()]


def test_all_logits_at_once() -> None:
    vocab = 8192  # logits are the peak then
    plan = plan_training(config_of(loss_chunk_bytes=64 * vocab * 4), vocab)
    row = attribute(plan, vocab)[0]
    assert row.saving == "loss chunks"
    plain = plan_training(config_of(loss_chunk_bytes=0), vocab)
    assert row.peak_bytes == plain.peak_bytes - plan.peak_bytes > 0.9 * (ROWS - 64) * vocab * 4
    assert row.reserved_bytes == plain.ledger.peak_reserved_bytes - plan.ledger.peak_reserved_bytes


def test_each_recompute_group_alone() -> None:
    plan, rows = worth(recompute="qkv,mlp")
    assert rows["recompute qkv"].forward_bytes == 3 * ROWS * 3 * 64 * 4
    assert rows["recompute mlp"].forward_bytes == 3 * ROWS * 192 * 4
    matmul = 2 * ROWS * 64 * 3 * 64
    assert rows["recompute qkv"].flops >= 3 * matmul
    assert rows["recompute qkv"].flops == plan.flops - plan_training(config_of(recompute="mlp"), VOCAB).flops


def test_checkpoints_offload_and_fused_updates_alone() -> None:
    values = {"checkpoint_every": 1, "activation_offload": True, "fused_update": True, "max_norm": 0.0}
    plan, rows = worth(**values)
    assert set(rows) == {"loss chunks", "checkpoint every 1", "activation offload", "fused update", "in-place ops"}
    assert rows["activation offload"].forward_bytes == 3 * ROWS * 64 * 4 and rows["activation offload"].flops == 0
    assert rows["checkpoint every 1"].flops > 0.15 * plan.flops
    assert rows["fused update"].peak_bytes > 0


def test_in_place_ops_save_at_the_peak_of_a_large_model() -> None:
    config = RunConfig(
        d_model=256, num_layers=2, num_heads=4, seq_len=128, batch_size=4, optimizer="sgd", loss_chunk_bytes=0
    )
    rows = {row.saving: row for row in attribute(plan_training(config, 8192), 8192)}
    # The peak is then where logits become their gradient, not where the head's gradient lies beside them.
    logits, head_gradient = 4 * 128 * 8192 * 4, 8192 * 256 * 4
    assert rows["in-place ops"].peak_bytes == logits - head_gradient


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    argv = ["--num-layers", "2", "--d-model", "32", "--seq-len", "16", "--saved", "--attribution"]
    assert main([*argv, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(row["new_bytes"] for row in told["saved"]) == told["most_by_kind"][ACTIVATIONS]
    assert [row["saving"] for row in told["attribution"]][:2] == ["loss chunks", "in-place ops"]
    account = told["account_at_peak"]
    assert account["reserved_bytes"] == told["reserved_bytes_at_peak"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "blocks.0.attention.qkv" in text and "no score matrix" in text and "of fragmentation" in text


# -- accounts ----------------------------------------------------------------------------------------------------------
class SnapshotEngine(PlanEngine):
    """Notes at each op what the pools say of themselves."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes=block_bytes)
        self.snapshots: list[tuple[int, dict[str, PoolStats], dict[str, int]]] = []
        self.requested: dict[str, int] = {"step": 0, "parameter": 0}

    def _allocate(self, spec: Any, nbytes: int = -1) -> Any:
        pool, nbytes, requested = self._pool.name, spec.nbytes, self.requested
        tensor = super()._allocate(spec)
        requested[pool] += nbytes
        give_back = tensor.storage._give_back

        def counted(storage: Any) -> None:
            requested[pool] -= nbytes
            give_back(storage)

        tensor.storage._give_back = counted
        return tensor

    def _launch(self, *arguments: Any) -> None:
        super()._launch(*arguments)
        assert self.ledger is not None
        self.snapshots.append((self.ledger.events, self.pool_stats(), dict(self.requested)))


def check_account(account: PoolAccount, stats: PoolStats) -> None:
    assert account.reserved_bytes == stats.allocated_bytes
    assert account.live_bytes == stats.live_bytes
    assert account.idle_bytes == stats.idle_bytes
    assert account.fragmentation_bytes == stats.free_bytes - stats.idle_bytes
    parts = account.alignment_bytes + account.fragmentation_bytes + account.idle_bytes
    assert sum(account.by_kind.values()) + parts == account.reserved_bytes


@pytest.mark.parametrize("block_bytes", [2**18, 2**25])
@pytest.mark.parametrize("mode", MODES)
def test_accounts_are_those_of_the_pools_at_every_op(mode: str, block_bytes: int) -> None:
    engine = SnapshotEngine(block_bytes)
    plan = plan_training(config_of(**MODES[mode], d_ff=100), VOCAB, engine=engine)
    assert len(engine.snapshots) == len(plan.ledger.ops) > 100
    seen = {"alignment": 0, "fragmentation": 0, "idle": 0}
    for event, pools, requested in engine.snapshots:
        for name in ("step", "parameter"):
            account = pool_account(plan.ledger, event, name)
            check_account(account, pools[name])
            assert sum(account.by_kind.values()) == requested[name]
            seen["alignment"] += account.alignment_bytes
            seen["fragmentation"] += account.fragmentation_bytes
            seen["idle"] += account.idle_bytes
    assert seen["alignment"] and seen["fragmentation"]
    assert seen["idle"] or block_bytes == 2**25
    peak = pool_account(plan.ledger)
    assert peak.live_bytes == plan.peak_bytes
    assert peak.reserved_bytes == plan.ledger.reserved_at_peak


def test_accounts_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    config = config_of(**WIDE)
    with VulkanEngine() as engine:
        ledger = AllocationLedger(engine)
        ledger.attach()
        model = make_model(engine, config, VOCAB)
        optimizer = make_optimizer(model, config)
        watch = MemoryWatch(ledger, model, optimizer)
        step = make_training_step(model, optimizer, config, watch.on_phase)
        watch.start(2)
        tokens = np.zeros((2, 48), np.int32)
        step([(tokens, tokens)] * 2, step=0, learning_rate=1e-3)
        for release in (False, True):
            if release:
                engine.set_retain_free_bytes(0)
                assert engine.release_idle_pool_blocks() > 0
                engine.end_batch()
            for name, pool in engine.pools.items():
                check_account(pool_account(ledger, ledger.events, name), pool.stats())
            assert pool_account(ledger, ledger.events).reserved_bytes == engine.source.reserved_bytes
        ledger.detach()


def test_no_account_when_attached_late() -> None:
    engine = PlanEngine()
    tensor = engine.empty((4,))
    ledger = AllocationLedger(engine)
    ledger.attach()
    with pytest.raises(ValueError, match="after tensors were made"):
        pool_account(ledger)
    del tensor


# -- leaks -------------------------------------------------------------------------------------------------------------
TINY = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 32, "seq_len": 16, "loss_chunk_bytes": 64 * 32 * 4}
TINY_VOCAB = 32


def run_steps(engine: PooledEngine, config: RunConfig, after: Callable[[int], None], num_steps: int) -> None:
    """Train on random tokens; idle blocks go back after each step, as in text_train."""
    model = make_model(engine, config, TINY_VOCAB)
    optimizer = make_optimizer(model, config)
    step = make_training_step(model, optimizer, config)
    generator = np.random.default_rng(0)
    shape = (config.accum_steps, config.batch_size, config.seq_len)
    for number in range(num_steps):
        tokens = generator.integers(0, TINY_VOCAB, shape)
        step([(batch, batch) for batch in tokens], step=number, learning_rate=1e-3)
        engine.release_idle_pool_blocks()
        after(number)


def check_for_leaks(config: RunConfig, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    books: set[tuple[Any, ...]] = set()
    objects: list[int] = []
    with VulkanEngine() as engine:

        def sample(number: int) -> None:
            if number < 10:  # kernels are built, rules are remembered
                return
            engine.end_batch()  # a batch in flight may hold a staging buffer
            pools = [
                (s.live_bytes, s.allocated_bytes, s.blocks, s.num_ranges, s.peak_live_bytes, s.peak_reserved_bytes)
                for s in engine.pool_stats().values()
            ]
            device = engine.device
            files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
            # How many staging buffers are kept, 4 at most, depends on how many submits happened to be in flight.
            staging = engine.recorder._staging
            assert len(staging) <= 4
            staged = sum(buffer.memory_bytes for buffer in staging)
            books.add((*pools, device.num_buffers - len(staging), device.buffer_bytes - staged, files))
            if number % 15 == 10:
                gc.collect()
                # Batches that are spare are as many as submits happened to be in flight, and seven objects each.
                objects.append(len(gc.get_objects()) - 7 * len(engine.recorder._spare))

        run_steps(engine, config, sample, num_steps)
    assert len(books) == 1, f"{len(books)} different states after a step, two of them: {sorted(books)[:2]}"
    assert len(objects) >= 5
    # One object a step would make 45 of them in 75 steps; a few come and go with the interpreter itself.
    assert max(objects[1:]) - objects[1] <= min(64, max(25, num_steps // 4)), (
        f"Python objects from sample to sample: {objects}"
    )


LEAK_MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": WIDE | {"activation_offload": True, "dropout": 0.1, "flush_interval": 1},
    "fused": {"fused_update": True, "max_norm": 0.0, "optimizer": "adafactor", "activation_offload": True},
}
LEAK_CASES = [("plain", "off"), ("all", "off"), ("all", "shared"), ("fused", "shared")]


@pytest.mark.parametrize(("mode", "queue"), LEAK_CASES)
def test_nothing_grows_over_75_steps(mode: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", queue)
    check_for_leaks(config_of(**TINY, **LEAK_MODES[mode]), 75, monkeypatch)


@pytest.mark.slow  # a minute on a slow processor
@pytest.mark.parametrize(("mode", "queue"), LEAK_CASES)
def test_nothing_grows_over_2000_steps(mode: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", queue)
    check_for_leaks(config_of(**TINY, **LEAK_MODES[mode]), 2000, monkeypatch)


# -- frees follow reference counts -------------------------------------------------------------------------------------
Event = tuple[str, str, int, int, int]


def trace_of(run: Callable[[PlanEngine], None], collect: Callable[[], None]) -> list[Event]:
    """Every event of the pools while `run` runs; collect is called at each event."""
    engine = PlanEngine(block_bytes=2**16)
    events: list[Event] = []
    for name, pool in (*engine.pools.items(), ("host", engine.host_pool)):

        def heard(event: str, block: int, offset: int, nbytes: int, name: str = name) -> None:
            events.append((name, event, block, offset, nbytes))
            collect()

        pool.observer = heard
    run(engine)
    for pool in (*engine.pools.values(), engine.host_pool):
        pool.observer = None
    return events


def traces(run: Callable[[PlanEngine], None]) -> tuple[list[Event], list[list[Event]]]:
    """(trace with the collector off, traces with collections at random moments)."""
    gc.disable()
    plain = trace_of(run, lambda: None)
    collected = []
    for seed in range(3):
        rng = random.Random(seed)

        def maybe(rng: random.Random = rng) -> None:
            if rng.random() < 0.1:
                gc.collect()

        collected.append(trace_of(run, maybe))
    return plain, collected


@pytest.mark.parametrize("mode", MODES)
def test_allocations_do_not_depend_on_the_collector(mode: str, frozen_objects: None) -> None:
    config = config_of(**(TINY | MODES[mode]))
    plain, collected = traces(lambda engine: run_steps(engine, config, lambda number: None, 3))
    assert len(plain) > 500
    assert collected == [plain] * 3
    gc.enable()
    assert trace_of(lambda engine: run_steps(engine, config, lambda number: None, 3), lambda: None) == plain


def test_a_cycle_would_be_seen(frozen_objects: None) -> None:
    """The check above can fail: one layer that holds a kept tensor in a cycle makes the traces differ."""

    class Cyclic(Layer):
        def forward(self, x: Any) -> Any:
            y = self.engine.relu(x)
            holder: list[Any] = [y]
            holder.append(holder)
            return y

    def run(engine: PlanEngine) -> None:
        layer = Cyclic(engine)
        for _ in range(200):
            layer.forward(engine.empty((64,)))

    plain, collected = traces(run)
    assert all(trace != plain for trace in collected)


def test_a_step_of_ones_own_leaves_nothing_in_the_pool() -> None:
    engine = PlanEngine()
    model = GPTModel(engine, GPTConfig(TINY_VOCAB, 16, 16, 2, 2))
    step = TrainingStep(model, AdamW(model))
    tokens = np.zeros((2, 16), np.int32)
    gc.disable()
    try:
        step([(tokens, tokens)], step=0, learning_rate=1e-3)
        assert engine.pool_stats()["step"].live_bytes == 0
        del step, model
    finally:
        gc.enable()


# -- benchmark ---------------------------------------------------------------------------------------------------------
def test_allocator_benchmark_replays_a_recorded_run() -> None:
    program = Path(__file__).resolve().parent.parent / "benchmarks" / "allocator.py"
    command = [sys.executable, str(program), "--json", "--operations", "4000", "--trace-steps", "5"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    replay = told["5 recorded steps"]
    assert replay["operations"] > 1000 and replay["ns_per_operation"] > 0
    assert len(replay["fragmentation_at_peaks"]) == 5
    assert all(0 <= value <= 1 for value in replay["fragmentation_at_peaks"])
    assert all(1 <= value < 1.5 for value in replay["reserved_by_live_at_peaks"])
    numbers, fragmentation, ratios = zip(*replay["series"], strict=True)
    assert len(numbers) > 100 and list(numbers) == sorted(numbers)
    assert numbers[0] < replay["operations"] / 10 and numbers[-1] > replay["operations"] * 9 / 10
    assert len(set(fragmentation)) > 5 and all(0 <= value <= 1 for value in fragmentation)
    assert all(ratio >= 1 for ratio in ratios)
    assert replay["same_places"] is True


@pytest.mark.parametrize("option", ["--operations=0", "--operations=-5", "--trace-steps=0", "--trace-steps=-1"])
def test_allocator_benchmark_refuses_nothing_to_do(option: str) -> None:
    program = Path(__file__).resolve().parent.parent / "benchmarks" / "allocator.py"
    done = subprocess.run([sys.executable, str(program), option], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is less than" in done.stderr and "Traceback" not in done.stderr


def test_allocator_benchmark_tells_nanoseconds_an_operation() -> None:
    program = Path(__file__).resolve().parent.parent / "benchmarks" / "allocator.py"
    command = [sys.executable, str(program), "--operations", "2000", "--trace-steps", "2"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert "ns an op" in lines[0]
    assert 50 < float(lines[1].split()[2]) < 1e7
