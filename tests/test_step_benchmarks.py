"""The measuring commands of a training step, at sizes that take no time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def output_of(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


def test_mlp_gradients_are_those_of_finite_differences(oracle: CpuEngine) -> None:
    from training_steps import Mlp

    rng = np.random.default_rng(0)
    inputs, targets = rng.standard_normal((5, 6)), rng.integers(0, 3, 5).astype(np.int32)
    model = Mlp(oracle, (6, 7, 4, 3))
    model.loss(inputs, targets)
    model.backward()
    for parameter in model.parameters():
        values = parameter.data.numpy()
        assert parameter.grad is not None
        gradient = parameter.grad.numpy().ravel()
        place = int(rng.integers(values.size))
        losses = []
        for shift in (1e-5, -1e-5):
            moved = values.copy()
            moved.ravel()[place] += shift
            oracle.upload(parameter.data, moved)
            losses.append(float(model.loss(inputs, targets).item()))
        oracle.upload(parameter.data, values)
        assert gradient[place] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-4, abs=1e-7)


def test_step_functions_give_a_time_a_step() -> None:
    from training_steps import timed

    ran: list[int] = []
    times = timed(ran.append, 3)
    assert len(times) == 3 and all(ms >= 0 for ms in times)
    assert ran == [0, 1, 2, 3, 4]


def test_shares_and_extrapolation() -> None:
    from step_share import extrapolated, share_outside

    times = extrapolated(
        {"matmul": 10.0, "attention_qkv": 1.0, "add": 3.0}, {"matmul": 14.0, "attention_qkv": 2.0, "add": 3.0}, 12
    )
    assert times == {"matmul": 54.0, "attention_qkv": 12.0, "add": 3.0}
    assert share_outside(times) == pytest.approx(3 / 69)


def test_step_share_prints_every_op() -> None:
    text = output_of("step_share.py", "--layers", "2", "--seq", "8", "--vocab", "64", "--steps", "1")
    for op in ("matmul", "attention_qkv_backward", "adamw_many_", "layer_norm", "outside matmul and attention"):
        assert op in text


def test_recompute_cost_times_the_modes() -> None:
    command = [sys.executable, str(BENCHMARKS / "recompute_cost.py"), "--d-model", "32", "--heads", "2", "--seq", "16"]
    done = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, timeout=240)
    # At this size the ratio means nothing, so either exit status will do; a crash would print no table.
    for mode in ("plain", "full", "mlp"):
        assert f"\n{mode} " in done.stdout


def test_fused_and_materialised_attention_agree() -> None:
    text = output_of("attention.py", "--seq", "37", "--heads", "2", "--head-dim", "9", "--rounds", "1")
    found = re.search(r"largest difference of results ([\d.e+-]+)", text)
    assert found and 0 < float(found.group(1)) < 1e-5  # the same numbers, by other sums
    assert "\nfused " in text and "\nmaterialised " in text


def test_device_share_sets_every_kernel_against_the_device() -> None:
    text = output_of("device_share.py", "--size", "32", "--megabytes", "1", "--rounds", "1")
    assert re.search(r"^f32 peak [\d,]+ GFLOP/s, copy [\d,.]+ GB/s, tensors of 1 MiB$", text, re.M)
    shares = dict(re.findall(r"^(\w[\w ]*?) +[\d,.]+ GF?L?O?P?B?/s +([\d.]+)%$", text, re.M))
    assert shares["copy"] == "100.0"
    assert {"matmul 32", "add", "softmax", "rms_norm backward", "column_sum"} <= shares.keys()
    assert all(float(share) > 0 for share in shares.values())
