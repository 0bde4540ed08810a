"""The profiler: times of every op, nothing changed by measuring, and files that open."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fusion_checks import fusing_engine
from op_checks import check_op

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.matmul_choice import MatmulChooser
from vkfold.engine.matmul_variants import variants
from vkfold.engine.ops.matmul_launch import PAIRS_SUBGROUP
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.profiler import OpProfiler, OpSample, Scope
from vkfold.engine.tensor import Tensor
from vkfold.engine.variant_choice import forced_variant
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools import gpu_profile
from vkfold.tools.device_peaks import Peaks, measure_peaks
from vkfold.tools.gpu_profile import ProfileConfig, profile_config
from vkfold.tools.model_setup import make_model, make_optimizer, make_training_step
from vkfold.tools.options import flag
from vkfold.tools.profile_pictures import trace_events
from vkfold.tools.profile_reasons import kernel_reasons
from vkfold.tools.profile_summary import ATTENTION, ELEMENTWISE, MATMUL, OPTIMIZER, OTHER, kind_of, summarize
from vkfold.tools.run_config import RunConfig
from vkfold.tools.step_options import OF_A_RUN

fusing = pytest.fixture(name="fusing")(fusing_engine)
TINY = ["--d-model", "32", "--num-layers", "2", "--num-heads", "2", "--seq-len", "64", "--batch-size", "4"]


def test_every_op_is_timed_and_its_bits_are_the_same(vulkan: VulkanEngine) -> None:
    a = vulkan.tensor(np.random.default_rng(0).standard_normal((64, 64)))
    plain = vulkan.gelu(a @ a).numpy()
    profiler = OpProfiler(vulkan)
    profiler.attach()
    try:
        profiler.scope = Scope("forward", "blocks.7")
        y = vulkan.gelu(a @ a)
        with pytest.raises(BadInputError, match="already"):
            OpProfiler(vulkan).attach()
        samples = profiler.take()
        assert profiler.take() == []
    finally:
        profiler.detach()
    assert np.array_equal(y.numpy(), plain)
    assert [part for sample in samples for part in sample.parts] == ["matmul", "activation"]
    assert samples[0].flops == 2 * 64**3
    for sample in samples:
        assert sample.scope == Scope("forward", "blocks.7")
        assert 0 < sample.seconds < 60
        assert sum(sample.kernels.values()) == 1
    assert all(one.start + one.seconds <= two.start + 1e-9 for one, two in itertools.pairwise(samples))
    assert vulkan.profiler is None


def test_more_ops_than_a_query_pool_holds(vulkan: VulkanEngine) -> None:
    x = vulkan.tensor(np.ones(4))
    profiler = OpProfiler(vulkan)
    profiler.attach()
    try:
        for _ in range(2100):
            vulkan.sum(x)
        samples = profiler.take()
    finally:
        profiler.detach()
    assert len(samples) == 2100
    assert min(sample.seconds for sample in samples) >= 0


def test_longer_work_takes_longer(vulkan: VulkanEngine) -> None:
    x = vulkan.tensor(np.ones(64 * 32))
    profiler = OpProfiler(vulkan)
    profiler.attach()
    try:
        for rounds in (10, 20000, 10, 20000):
            vulkan.fma_chain(x, rounds=rounds)
        short, long, short2, long2 = (sample.seconds for sample in profiler.take())
    finally:
        profiler.detach()
    assert min(long, long2) > 3 * min(short, short2)


@pytest.mark.parametrize("shape", [(32,), (3, 32), (7, 5, 64)])
def test_fma_chain(vulkan: VulkanEngine, oracle: CpuEngine, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check_op(vulkan, oracle, lambda engine, t: engine.fma_chain(t, rounds=50), (x,), 50 * 2.0**-23)
    with pytest.raises(ValueError, match="rounds is 40000"):
        vulkan.fma_chain(vulkan.tensor(x), rounds=40000)
    with pytest.raises(ValueError, match="multiple of 32"):
        vulkan.fma_chain(vulkan.tensor(np.ones(31)), rounds=1)


def test_peaks_are_measured(vulkan: VulkanEngine) -> None:
    peaks = measure_peaks(vulkan, megabytes=1, matmul_sizes=(64,))
    assert 1e6 < peaks.bandwidth < 1e14
    assert peaks.flops >= peaks.matmul_flops > 1e6


def sample(op: str, start: float, seconds: float, flops: int, moved: int, phase: str = "forward") -> OpSample:
    return OpSample(op, (op,), Scope(phase, "blocks.0"), flops, moved, start, seconds, {op: 1})


def test_summary_by_hand() -> None:
    peaks = Peaks(bandwidth=100.0, flops=1000.0, matmul_flops=900.0)
    one = [sample("matmul", 0.0, 2.0, 1000, 50), sample("add", 2.5, 0.5, 10, 40, "recompute")]
    two = [sample("matmul", 9.0, 4.0, 1000, 50), sample("add", 13.5, 0.5, 10, 40, "recompute")]
    other = [sample("copy", 0.0, 99.0, 1, 1)]
    summary = summarize([other, one, two], peaks)  # a step of other ops is left out
    assert summary.step_seconds == pytest.approx((3.0 + 5.0) / 2)
    matmul, add = summary.grouped(lambda s: s.op)
    assert (matmul.name, matmul.seconds, add.seconds) == ("matmul", 3.0, 0.5)
    assert matmul.roofline_share(peaks) == pytest.approx(1.0 / 3.0)  # 1000 FLOPs at 1000 a second
    assert add.roofline_share(peaks) == pytest.approx(0.4 / 0.5)  # 40 bytes at 100 a second
    assert summary.mfu == pytest.approx(1000 / (4.0 * 1000.0))  # recomputation does not count
    assert summary.mbu == pytest.approx(90 / (4.0 * 100.0))
    assert summary.share(MATMUL) == pytest.approx(3.0 / 3.5)
    assert summary.share(ELEMENTWISE) == pytest.approx(0.5 / 3.5)


def test_kinds_cover_every_op() -> None:
    assert kind_of("attention_qkv_backward") == ATTENTION
    assert kind_of("adamw_") == OPTIMIZER
    assert kind_of("rms_norm") == OTHER


def test_program_writes_files_that_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "profile"
    argv = [*TINY, "--steps", "2", "--warmup", "1", "--checkpoint-every", "1", "--out", str(folder), "--json"]
    assert gpu_profile.main([*argv, "--sweep-checkpoints"]) == 0
    result = json.loads(capsys.readouterr().out)
    layers = {row["name"] for row in result["by_layer"]}
    assert layers >= {"embedding", "blocks.0", "blocks.1", "final_norm", "head"}
    assert {row["name"] for row in result["by_phase"]} >= {"forward", "recompute", "backward", "optimizer"}
    assert sum(result["shares"].values()) == pytest.approx(1.0)
    assert result["mfu"] > 0 and result["mbu"] > 0
    assert [point["blocks"] for point in result["checkpoints"]] == [0, 1, 2]
    assert result["checkpoints"][1]["peak_bytes"] < result["checkpoints"][0]["peak_bytes"]
    assert result["kernels"] and all(result["kernels"].values())
    products = [why for kernel, why in result["kernels"].items() if kernel.startswith("matmul")]
    assert products and all(
        re.match(r"matmul 1x\d+x\d+x\d+ [NT]{2}: \w+, least estimate of \d+", why) for why in products
    )
    assert not any("1024x1024x1024" in why for why in products)  # that is the probe's
    attention = [why for kernel, why in result["kernels"].items() if kernel.startswith("attention")]
    assert len(attention) == 3 and all(
        re.match(r"attention_\w+ \d+x[\d()]+x\d+x\d+ causal: rows\d, not measured", why) for why in attention
    )
    assert json.loads((folder / "profile.json").read_text())["mfu"] == result["mfu"]
    for name in ("roofline.png", "checkpoints.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    page = (folder / "profile.html").read_text()
    assert "data:image/png;base64," in page and "http" not in page  # nothing to load
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in complete)
    assert {event["args"]["step"] for event in complete} == {0, 1}
    named = {event["tid"] for event in events if event["ph"] == "M"}
    assert {event["tid"] for event in complete} == named


def test_every_option_has_an_effect(tmp_path: Path) -> None:
    """Those of text_train are refused, or read by what sets up a step."""
    read = set()

    class Watched(ProfileConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    (tmp_path / "run.toml").write_text('save = "elsewhere"\nd-model = 8\nnum-heads = 2\n')
    config, vocab_size = profile_config(["--config", str(tmp_path / "run.toml"), "--tokenizer", "bpe"])
    assert (config.d_model, vocab_size) == (8, 1024)  # a run's own file may say what a run does
    watched = Watched(**dataclasses.asdict(config))
    engine = PlanEngine()
    read.clear()
    model = make_model(engine, watched, vocab_size)
    for optimizer in ("adamw", "sgd"):
        watched.optimizer = optimizer
        make_training_step(model, make_optimizer(model, watched), watched)
    of_a_step = {"batch_size", "accum_steps", "memory_budget", "device", "engine", "tokenizer", "vocab_size", "config"}
    names = {field.name for field in dataclasses.fields(RunConfig)}
    assert names - read == {*OF_A_RUN, *of_a_step, "inputs"}
    assert not read & {*OF_A_RUN}


def test_reasons_by_hand() -> None:
    """Every call that a kernel ran for, once; how many of its launches fusion made."""
    plain = sample("matmul", 0, 1, 1, 1)._replace(kernels={"k_s8": 1}, reasons={"k_s8": {"matmul 1": "first"}})
    other = plain._replace(reasons={"k_s8": {"matmul 2": "second"}})
    longer = plain._replace(kernels={"k_s8_pairs12": 1}, reasons={"k_s8_pairs12": {"matmul 3": "third"}})
    joined = sample("add", 0, 1, 1, 1)._replace(parts=("add", "scale"), kernels={"add_vec4_64x1": 1, "sum_scalar": 1})
    samples = [plain, longer, plain._replace(parts=("matmul", "add_")), other, joined, sample("copy", 0, 1, 1, 1)]
    assert dict(kernel_reasons(samples)) == {
        "k_s8": "matmul 1: first; matmul 2: second; 1 of 3 ops that ran it: one launch for matmul + add_ (fusion)",
        "k_s8_pairs12": "matmul 3: third",
        "add_vec4_64x1": "16-byte loads: every row starts on 16 bytes; one launch for add + scale (fusion)",
        "sum_scalar": "4-byte loads: some row does not start on 16 bytes; one launch for add + scale (fusion)",
        "copy": "the only kernel of copy for these settings",
    }


def profiled(engine: VulkanEngine, work: Callable[[], object]) -> list[OpSample]:
    """Samples of some work, done once before."""
    work()
    profiler = OpProfiler(engine)
    profiler.attach()
    try:
        work()
        return profiler.take()
    finally:
        profiler.detach()


def test_products_are_listed_under_the_kernels_they_ran_in(vulkan: VulkanEngine) -> None:
    """Layouts of one variant have kernels of their own on some devices, and products that go on from what is there."""
    a, b = (vulkan.tensor(np.random.default_rng(i).standard_normal((64, 64))) for i in range(2))
    words = vulkan.recorder.in_words and vulkan.recorder.subgroup_size == PAIRS_SUBGROUP
    name = next(
        v.name for v in variants(MatmulChooser.of(vulkan.recorder).device) if not words or v.spread == "shuffle"
    )

    def products() -> None:
        out = vulkan.matmul(a, b, trans_b=True)
        vulkan.matmul(a, b, trans_a=True)
        vulkan.matmul(a, b, out=out, accumulate=True)

    with forced_variant(name):
        samples = profiled(vulkan, products)
    ran = [(kernel, call) for sample in samples for kernel in sample.kernels for call in sample.reasons[kernel]]
    assert [call for _, call in ran] == [f"matmul 1x64x64x64 {letters}" for letters in ("NT", "TN", "NN")]
    assert all(kernel.startswith(f"matmul_{name}") for kernel, _ in ran)
    assert len(dict(ran)) == (3 if words else 2)
    for kernel, why in kernel_reasons(samples):
        assert why == "; ".join(f"{call}: {name}, forced" for other, call in ran if other == kernel)


def test_only_what_ran_is_listed(fusing: VulkanEngine) -> None:
    """A call of each family, and what fusion made of two: not the kernels of either by itself, planned before."""
    q = fusing.tensor(np.random.default_rng(1).standard_normal((1, 32, 2, 8)))
    x, other = (fusing.tensor(np.random.default_rng(i).standard_normal((33, 64))) for i in range(2))
    weight = fusing.tensor(np.ones(64))

    def work() -> list[Tensor]:
        y, stats = fusing.rms_norm(x, weight)
        product = fusing.matmul(y, other, trans_b=True)
        del y
        soft = [fusing.softmax(x), fusing.softmax(other), fusing.softmax(fusing.tensor(np.ones((44, 48))))]
        return [product, *soft, stats, fusing.gelu(fusing.add(x, x)), fusing.attention(q, q, q, causal=True)[0]]

    samples = profiled(fusing, work)
    assert all(len(sample.reasons.get(kernel, "1")) == 1 for sample in samples for kernel in sample.kernels)
    ran = [(kernel, call) for sample in samples for kernel, calls in sample.reasons.items() for call in calls]
    assert [call for _, call in ran] == [
        "row_fold rms_norm_stats_vec4 33x64",
        "matmul 1x33x33x64 NT after rms_norm_apply",
        *["row_fold softmax_vec4 33x64"] * 2,
        "row_fold softmax_vec4 44x48",
        "map add__activation_vec4 2112",
        "attention_forward 1x2x32x8 causal",
    ]
    assert "_rms_norm_apply_of_" in ran[1][0]
    text = dict(kernel_reasons(samples))[ran[2][0]]
    assert text.count("33x64: ") == 1 and text.count("44x48: ") == (ran[4][0] == ran[2][0])
    plans = {chooser: dict(chooser.plans) for chooser in fusing.recorder.choosers.values()}
    assert [sample.reasons for sample in profiled(fusing, work)] == [sample.reasons for sample in samples]
    assert plans == {chooser: chooser.plans for chooser in fusing.recorder.choosers.values()}  # measuring makes none


def test_trace_starts_at_zero() -> None:
    events = trace_events([[sample("add", 5.0, 0.25, 1, 1)]])["traceEvents"]
    assert isinstance(events, list)
    assert (events[-1]["ts"], events[-1]["dur"]) == (0.0, 0.25e6)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps 0 must be greater than 0"),
        (["--preset", "smal"], "did you mean small"),
        (["--num-heads", "3"], "does not divide"),
        (["--engine", "cpu"], "gpu_profile measures a Vulkan device: leave out --engine cpu"),
        *[([flag(name), "1"], f"{flag(name)} has no effect in gpu_profile") for name in OF_A_RUN],
        (["--resume=runs"], "--resume has no effect"),
    ],
)
def test_bad_options(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_profile.main(argv) == 2
    assert message in capsys.readouterr().err
