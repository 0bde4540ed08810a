"""Calls of a step are prepared before the next run's first step: nothing is recorded for it, and no bit changes."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from replay_checks import CONFIG, LEARNED, Run, data

from vkfold import expr
from vkfold.engine import pipeline_memory
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.launcher import OpLauncher
from vkfold.engine.op import OPS, Op
from vkfold.engine.pipeline_memory import NOTHING, checksum, load_program, save_program
from vkfold.engine.recorder import Recorder
from vkfold.engine.remembered_calls import MAX_CALLS, calls_since, prepare_calls, start_counting
from vkfold.engine.tensor import TensorSpec, nowhere
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, Adafactor, AdamW, GPTConfig, GPTModel, TrainingStep, step_replay
from vkfold.tools.lab_ops import SUBJECTS, matmul_subject
from vkfold.tools.lab_subject import STEP, Subject

SIZES = {"HEADS": [3], "BATCH": [2], "HEAD_DIM": [8], "SEQ": [9], "ELEMENTS": [1001], "HEADS(KV_HEADS)": [4, 2]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that nobody else knows; compiled kernels as they are."""
    monkeypatch.setattr(pipeline_memory, "cache_folder", lambda: tmp_path)


asides: list[str] = []  # what was done in recorders of their own


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Recorder.aside

    def aside(self: Recorder) -> Recorder:
        asides.append("aside")
        return plain(self)

    asides.clear()
    monkeypatch.setattr(Recorder, "aside", aside)


@contextmanager
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the ops whose kernels calls look for meanwhile."""
    names: list[str] = []
    plain = OpLauncher.make_ready

    def make_ready(self: OpLauncher, op: Op, *rest: Any) -> None:
        names.append(op.name)
        plain(self, op, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(OpLauncher, "make_ready", make_ready)
        yield names


def traces(engine: VulkanEngine) -> Any:
    """All that preparing must leave as it is."""
    recorder = engine.recorder
    pools = engine.pool_stats(), engine.replayer.placement(), engine.staging_bytes()
    return len(asides), recorder.num_commands, recorder.num_submits, engine.device.num_pipelines_made, *pools


@pytest.mark.parametrize(
    ("config", "optimizer", "settings"),
    [
        (CONFIG, None, {"max_norm": 1.0}),
        (LEARNED, SGD, {}),
        (GPTConfig(13, 8, 8, 2, 1, num_kv_heads=1), Adafactor, {"max_norm": 0.5}),
    ],
)
def test_the_first_step_of_a_later_run(
    config: GPTConfig, optimizer: Any, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for no kernels, but of calls that read where no tensor starts, and gives the bits of the first run."""
    if optimizer is not None:
        settings = {**settings, "optimizer": optimizer}
    states = []
    for number in range(2):
        with VulkanEngine() as engine:
            run = Run(engine, config, **settings)
            rules = len(engine.known_rules)
            with rehearsed(monkeypatch) as names:
                run.step()
            if number:
                assert names == [] and len(engine.known_rules) == rules
            else:
                assert len(names) > 10 and len(engine.known_rules) >= rules + len(names)
            run.steps(3)
            states.append((run.results, run.state()))
    (file,) = (tmp_path / "programs").iterdir()
    assert len(load_program(file).calls) > 10
    assert states[0][0] == states[1][0]
    for name, array in states[0][1].items():
        assert np.array_equal(array, states[1][1][name]), name


def lab_subjects() -> dict[str, Subject]:
    return SUBJECTS | {f"matmul_{layout}": matmul_subject(layout) for layout in ("NN", "NT", "TN", "TT")}


@pytest.mark.parametrize("name", sorted(lab_subjects()))
def test_any_call_can_be_prepared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain data through JSON, with no trace on the engine; the call itself looks for nothing then. Same bits."""
    subject = lab_subjects()[name]
    sizes = [size for word in subject.meaning.split("x") for size in SIZES.get(word, [12])]
    arrays = subject.inputs(np.random.default_rng(3), *sizes)

    def call(engine: VulkanEngine) -> list[np.ndarray]:
        engine.set_step_parameters(STEP)
        made = subject.call(engine, *[engine.tensor(array) for array in arrays], **subject.settings(*sizes))
        return [tensor.numpy() for tensor in (made if isinstance(made, (list, tuple)) else [made])]

    with VulkanEngine() as engine:
        start_counting(engine)
        expected = call(engine)
        calls = json.loads(json.dumps(calls_since(engine)))
        ops = {key[0].name for key, rule in engine.known_rules.items() if rule.used}
    assert name == "block_fold" or {known for known, *_ in calls} == ops, "a fold's description is no plain value"
    with VulkanEngine() as engine:
        before = traces(engine)
        assert prepare_calls(engine, calls) == len(calls)
        assert traces(engine) == before
        with rehearsed(monkeypatch) as names:
            found = call(engine)
        assert names == ([] if calls else [name])
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]


def test_calls_are_of_this_step(vulkan: VulkanEngine) -> None:
    x = vulkan.tensor(np.ones((3, 5)))
    vulkan.add(x, x)
    start_counting(vulkan)
    vulkan.softmax(x)
    vulkan.map(expr.variable("x") * 2.0, x=x)  # an expression is no plain value
    assert calls_since(vulkan) == [("softmax", [[[3, 5], "float32"]], {})]
    vulkan.add(x, x)
    assert [name for name, *_ in calls_since(vulkan)] == ["add", "softmax"]


BAD: list[tuple[Any, Any, Any]] = [
    ("no_such_op", [], {}),
    ("softmax", [], {}),
    ("softmax", [None], {}),
    ("softmax", [[[3, 5], "float32"]] * 2, {}),
    ("softmax", [[[3, -5], "float32"]], {}),
    ("softmax", [[[2**31, 2**31], "float32"]], {}),
    ("softmax", [[[3, 0.5], "float32"]], {}),
    ("softmax", [[[3, 5], "float8"]], {}),
    ("softmax", [[[3, 5], ["float32"]]], {}),
    ("softmax", [[3, 5]], {}),
    ("softmax", [5], {}),
    ("softmax", [[[3, 5], "int32"]], {}),
    ("softmax", [[[3, 5], "float32"]], {"axis": 0}),
    ("softmax", [[[3, 5], "float32"]] * 100_000, {}),
    ("dropout", [[[3, 5], "float32"]], {"p": "0.5", "site": 3}),
    ("dropout", [[[3, 5], "float32"]], {"p": [0.5], "site": {}}),
    ("matmul", [[[3, 5], "float32"], [[3, 5], "float32"], None, None, None, None], {"trans_a": False}),
    ("adamw_many_", [[[4], "float32"]] * 5, {"weight_decays": [], "beta1": 0.9, "beta2": 0.9, "eps": 1e-8}),
]


def test_what_is_no_call_is_left_out(vulkan: VulkanEngine, tmp_path: Path) -> None:
    good = ("softmax", [[[7, 5], "float32"]], {})
    vulkan.softmax(vulkan.tensor(np.ones((7, 5)))).numpy()  # its variants are checked, and its kernels made
    vulkan.known_rules.clear()
    before = traces(vulkan)
    assert prepare_calls(vulkan, [*BAD, good]) == 1
    assert traces(vulkan) == before
    path = tmp_path / "program.json"
    save_program(path, [], {}, [*BAD, good])
    loaded = load_program(path).calls
    assert len(loaded) == len(BAD) + 1 and list(good) in [list(call) for call in loaded]
    assert prepare_calls(vulkan, loaded) == 1
    packed = path.read_text().partition("\n")[2]
    for calls in (None, 3, "abc", [1], [[]], [["softmax", [], {}, 1]], [["softmax", 1, {}]], [["softmax", [], 1]]):
        content = json.dumps({**json.loads(packed), "calls": calls})
        path.write_text(f"{checksum(content)}\n{content}")
        assert load_program(path) == NOTHING, calls
    x = np.random.default_rng(0).standard_normal((3, 5))
    assert np.allclose(vulkan.softmax(vulkan.tensor(x)).numpy().sum(axis=1), 1)


def test_calls_of_other_sources_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op may have changed what its settings mean."""
    calls = [("softmax", [[[7, 5], "float32"]], {})]
    save_program(tmp_path / "same", [], {}, calls)
    assert load_program(tmp_path / "same").calls == calls
    with monkeypatch.context() as patch:
        patch.setattr(pipeline_memory, "hash_of_sources", lambda: "other")
        save_program(tmp_path / "changed", [], {}, calls)
    assert load_program(tmp_path / "changed").calls == []
    for other in ("", "0" * 32):
        monkeypatch.setattr(pipeline_memory, "SOURCES", other)
        assert load_program(tmp_path / "same").calls == []


def test_variants_without_a_record_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step then, on the device, as its calls would."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))  # keeps what is compiled, too
    results = []
    for _ in range(2):
        shutil.rmtree(tmp_path / "tuning", ignore_errors=True)
        with VulkanEngine() as engine:
            run = Run(engine)
            made = len(asides)
            run.steps(2)
            results.append((run.results, [array.tobytes() for array in run.state().values()], made, len(asides)))
            asides.clear()
    assert results[0][:2] == results[1][:2]
    assert results[0][2] == 0 < results[0][3], "the first run checks in its first step"
    assert results[1][2] == results[1][3] > 0, "the second before"


@pytest.mark.parametrize(("name", "value"), [("VKFOLD_REPLAY", "0"), ("VKFOLD_DEBUG", "2")])
def test_a_run_that_replays_nothing_is_remembered(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    made, results = [], []
    for _ in range(2):
        with VulkanEngine() as engine:
            run = Run(engine)
            made.append(engine.device.num_pipelines_made)
            run.steps(2)
            made.append(engine.device.num_pipelines_made)
            results.append(run.results)
        (file,) = (tmp_path / "programs").iterdir()
        assert len(load_program(file).calls) > 10
    assert results[0] == results[1]
    assert made[1] - made[0] > 10 and made[2] - made[0] > 10 and made[3] == made[2]


@pytest.mark.parametrize(("name", "value"), [("VKFOLD_FUSION", "0"), ("VKFOLD_DEBUG", "2")])
def test_without_fusion_rules_alone_are_prepared(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for on in (False, False, True):
        if on:
            monkeypatch.setenv(name, value)
        with VulkanEngine() as engine:
            run = Run(engine)
            run.steps(2)
            results.append((run.results, [array.tobytes() for array in run.state().values()]))
    assert results[0] == results[1] == results[2]


def test_variants_forced_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared for other variants is looked for anew."""
    with VulkanEngine() as engine:
        Run(engine).step()
    with VulkanEngine() as engine:
        run = Run(engine)
        monkeypatch.setenv("VKFOLD_VARIANT", "map=64x4")
        with rehearsed(monkeypatch) as names:
            run.step()
        assert "swiglu" in names


def test_a_step_of_a_closed_engine_and_of_another_thread_is_refused() -> None:
    """Before any work on the device."""
    with VulkanEngine() as engine:
        run = Run(engine)
        run.step()
    with pytest.raises(RuntimeError, match="closed"):
        TrainingStep(run.model, run.optimizer)
    with VulkanEngine() as engine:
        model = GPTModel(engine, CONFIG, seed=1)
        optimizer = AdamW(model)
        before, errors = traces(engine), []

        def make() -> None:
            try:
                TrainingStep(model, optimizer)
            except RuntimeError as error:
                errors.append(str(error))

        thread = Thread(target=make)
        thread.start()
        thread.join()
        assert "belongs to thread" in errors[0] and traces(engine) == before


def test_ctrl_c_in_a_rehearsal(vulkan: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine records again."""
    x = vulkan.tensor(np.arange(3.0))
    with monkeypatch.context() as patch:

        def launch(*arguments: Any, **settings: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(type(OPS["softmax"]), "launch", launch)
        with pytest.raises(KeyboardInterrupt):
            vulkan.prepare_call(OPS["softmax"], [TensorSpec((11, 13))], {})
    assert np.array_equal(vulkan.scale(x, 3.0).numpy(), [0, 3, 6])
    vulkan.recorder.rehearsing = True  # as an interrupt between two steps of the interpreter might leave it
    assert np.array_equal(vulkan.scale(x, 2.0).numpy(), [0, 2, 4])


def test_garbage_is_collected_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    step_replay._collect_once.cache_clear()
    for number in range(3):
        with VulkanEngine() as engine:
            Run(engine).step()
        assert len(collected) == min(number, 1), "not in a first run, which has nothing to prepare"
    step_replay._collect_once.cache_clear()
    gc.disable()
    try:
        with VulkanEngine() as engine:
            Run(engine)
    finally:
        gc.enable()
    assert len(collected) == 1


@pytest.mark.deviceless
def test_tensors_without_memory_lie_apart(cpu: CpuEngine) -> None:
    specs = [TensorSpec((3, 5)), TensorSpec(()), TensorSpec((0,)), TensorSpec((1000,))]
    first = nowhere(cpu, specs)
    tensors = [*first, *nowhere(cpu, specs, behind=[None, *first])]
    assert [tensor.spec for tensor in tensors] == specs * 2
    assert all(tensor.address > 0 and tensor.address % 256 == 0 for tensor in tensors)
    for before, after in itertools.pairwise(tensors):
        assert before.address + max(1, before.nbytes) <= after.address


def test_no_more_than_a_few_hundred_are_kept(vulkan: VulkanEngine) -> None:
    start_counting(vulkan)
    for size in range(1, MAX_CALLS + 20):
        vulkan.rule_of(OPS["softmax"], [vulkan.empty((1, size))], {})
    assert len(calls_since(vulkan)) == MAX_CALLS


def test_another_batch_shape_is_remembered_instead(tmp_path: Path) -> None:
    """The file has the calls of the last run's first step, not of all there ever were."""
    known = []
    for rows in (2, 3, 2):
        with VulkanEngine() as engine:
            run = Run(engine)
            run.step(data(0, rows))
        (file,) = (tmp_path / "programs").iterdir()
        known.append(load_program(file).calls)
    assert known[0] == known[2] != known[1]
