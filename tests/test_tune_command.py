"""`vkfold tune` and kernel_lab, as people run them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkfold.__main__ import main as vkfold_main
from vkfold.engine.compute_engine import ComputeEngine
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.matmul_variants import Product
from vkfold.engine.ops.attention import attention_calls
from vkfold.engine.ops.matmul import layout_of
from vkfold.engine.tensor import Tensor, TensorSpec
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.tools import kernel_lab, lab_ops
from vkfold.tools.device_peaks import Peaks, measure_peaks
from vkfold.tools.model_setup import make_model, make_optimizer, make_training_step
from vkfold.tools.run_config import RunConfig
from vkfold.tools.tune_calls import (
    Calls,
    FoldCall,
    KernelCall,
    ProductCall,
    calls_of_step,
    calls_of_text,
)

from .op_checks import EPS32

FOLDS = attention_calls(1, 1, 4, 8)


def test_shapes_from_text() -> None:
    """Batches and layouts; strides are those of the layout."""
    calls = [call for call, _ in calls_of_text("5x6x7, 2x5x6x7:NT,5x6x7:TT").items()]
    assert all(isinstance(call, ProductCall) for call in calls)
    assert [(call.layout.product, call.letters) for call in calls] == [
        (Product(1, 5, 6, 7), "NN"),
        (Product(2, 5, 6, 7), "NT"),
        (Product(1, 5, 6, 7), "TT"),
    ]
    plain, batched, turned = (call.layout for call in calls)
    assert (plain.a_row, plain.a_k, plain.b_col, plain.b_k) == (7, 1, 1, 6)
    assert (batched.batch_a, batched.batch_b, batched.b_col, batched.b_k) == (35, 42, 7, 1)
    assert (turned.a_row, turned.a_k) == (1, 5)
    for text in (
        "5x6",
        "5x6x7:NX",
        "axbxc",
        "0x5x6",
        "",
        "5x6x7x8x9",
        "attention",
        "attention:1x4x9",
        "attention:0x4x9x8",
    ):
        with pytest.raises(BadInputError):
            calls_of_text(text)


def test_calls_of_a_step() -> None:
    """Forward is NN, the input's gradient NT, the weight's TN; blocks of a model repeat the same products."""
    config = RunConfig(inputs=[], d_model=16, num_layers=3, num_heads=2, seq_len=8, batch_size=2)
    products = {call: n for call, n in calls_of_step(config, 64).items() if isinstance(call, ProductCall)}
    assert {call.letters for call in products} == {"NN", "NT", "TN"}
    sizes = {call: call.layout.product for call in products}
    head = {call.letters: n for call, n in products.items() if 64 in sizes[call] and 16 in sizes[call]}
    assert head == {"NN": 1, "NT": 1, "TN": 1}
    assert {n for call, n in products.items() if 48 in sizes[call]} == {3}  # qkv of three blocks


def test_attention_of_text_and_of_a_step() -> None:
    """Forward, and the two folds of backward, under one key wherever q, k and v lie."""
    written = [call.key for call, _ in calls_of_text("3x4x5, attention:2x4/2x8x4").items()]
    keys = [f"attention_{kind} 2x4(2)x8x4 causal" for kind in ("forward", "d_q", "d_kv")]
    assert written == ["matmul 1x3x4x5 NN", *keys]
    config = RunConfig(
        inputs=[], d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, seq_len=8, batch_size=2, accum_steps=2
    )
    of_step = {call.key: n for call, n in calls_of_step(config, 64).items() if isinstance(call, FoldCall)}
    assert of_step == dict.fromkeys(keys, 6)
    with pytest.raises(BadInputError, match="4 heads cannot share 3 kv heads evenly"):
        calls_of_text("attention:1x4/3x8x4")


def test_calls_of_a_step_are_those_that_an_engine_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined as fusion joins them."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    monkeypatch.setenv("VKFOLD_FUSION", "1")
    config = RunConfig(inputs=[], d_model=16, num_layers=2, num_heads=2, seq_len=8, batch_size=2, dropout=0.1)
    calls = {call.key.split()[1]: n for call, n in calls_of_step(config, 64).items() if isinstance(call, KernelCall)}
    launched: list[str] = []
    with VulkanEngine() as engine:
        model = make_model(engine, config, 64)
        step = make_training_step(model, make_optimizer(model, config), config)
        engine.recorder.trace = launched.append
        tokens = np.zeros((2, 8), np.int32)
        step([(tokens, tokens)], step=0, learning_rate=1e-3)
        engine.end_batch()
    variant = re.compile(r"(?<=vec4|alar|many|inks)_(\d+x\d(_tail)?|rows\d+|kept\d+_of\d+)$")
    assert dict(Counter(variant.sub("", name) for name in launched if variant.search(name))) == calls
    assert "swiglu_backward__swiglu_vec4" in calls and calls["dropout_vec4"] > 2


def test_what_has_one_key_is_one_call() -> None:
    """Products that differ by where their operands lie are measured once, and count together."""
    shared, own = (layout_of(TensorSpec((3, 6, 5)), TensorSpec(b), True, False) for b in ((6, 7), (3, 6, 7)))
    calls = Calls()
    for layout in (shared, own, own):
        calls.add(ProductCall(layout, "TN"))
    assert shared != own and calls.items() == [(ProductCall(shared, "TN"), 3)]


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_tune_measures_once(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> None:
    """The second time what was measured is shown; --again measures anew."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    arguments = ["tune", "--shapes", "24x40x16:NT", "--rounds", "1", "--json"]
    assert vkfold_main(arguments) == 0
    first = report(capsys)
    (row,) = first["calls"]
    assert row["call"] == "matmul 1x24x40x16 NT" and row["best"] == next(iter(row["all_ms"])) and row["note"] == ""
    assert Path(first["files"][0]).is_file() and first["barred"] == {}
    assert vkfold_main(arguments) == 0
    (again,) = report(capsys)["calls"]
    assert again == {**row, "note": "measured before"}
    assert vkfold_main([*arguments, "--again"]) == 0
    assert report(capsys)["calls"][0]["note"] == ""
    assert vkfold_main(arguments[:-1]) == 0
    text = capsys.readouterr().out
    assert "matmul 1x24x40x16 NT" in text and f"kept in {first['files'][0]}" in text


def test_tune_that_keeps_nothing_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file stands where the folder of the tables should be: what was measured is shown and lost, exit code 1."""
    (tmp_path / "tuning").write_text("")
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    assert vkfold_main(["tune", "--shapes", "24x40x16", "--rounds", "1"]) == 1
    text = capsys.readouterr()
    assert "matmul 1x24x40x16 NN" in text.out and "kept in" not in text.out
    assert "warning: nothing was kept: cannot write" in text.err and str(tmp_path / "tuning") in text.err


def test_tune_that_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Operands that fit no device: exit code 1, the reason below the table. With another that fits: 0."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    large = "100000x100000x100000"
    assert vkfold_main(["tune", "--shapes", large]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["call", "a", "step", "unmeasured", "fastest", "ms", "GFLOP/s", "gain"]
    assert lines[1].split() == ["matmul", f"1x{large}", "NN", "1", "not", "measured"]
    assert lines[2].startswith(f"not measured: matmul 1x{large} NN: ") and len(lines) == 3
    assert vkfold_main(["tune", "--shapes", f"{large},8x8x8", "--rounds", "1"]) == 0
    assert "kept in" in capsys.readouterr().out


def test_tune_measures_attention(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> None:
    """Each of its three kernels, with the times of every tile that was worth it, into a file of its own."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    assert vkfold_main(["tune", "--shapes", "attention:1x2x40x8", "--rounds", "1", "--json"]) == 0
    found = report(capsys)
    assert [row["call"].partition(" ")[0] for row in found["calls"]] == [
        "attention_forward",
        "attention_d_q",
        "attention_d_kv",
    ]
    for row in found["calls"]:
        assert len(row["all_ms"]) > 1 and row["best"] == next(iter(row["all_ms"])) and row["gflops"] > 0
    (file,) = found["files"]
    assert set(json.loads(Path(file).read_text())["times"]) == {row["call"] for row in found["calls"]}


def test_tune_takes_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path) -> None:
    """The options of text_train."""
    monkeypatch.setenv("VKFOLD_CACHE_DIR", str(tmp_path))
    small = {"d-model": 8, "num-layers": 1, "num-heads": 1, "seq-len": 4, "batch-size": 1, "rounds": 1}
    assert vkfold_main(["tune", *(f"--{name}={value}" for name, value in small.items()), "--json"]) == 0
    rows = report(capsys)["calls"]
    assert len(rows) > 6 and all(row["ms"] > 0 for row in rows)
    assert {row["call"].partition(" ")[0] for row in rows} == {
        "matmul",
        "map",
        "row_fold",
        "loop",
        *(call.fold.name for call in FOLDS),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--shapes", "big"], "'big' is no product"),
        (["tune", "--rounds", "0"], "rounds"),
        (["tune", "--engine", "cpu"], "vkfold tune measures a Vulkan device: leave out --engine cpu"),
        (["tune", "--resume", "x"], "--resume has no effect in vkfold tune"),
        (
            ["tune", "--shapes", "8x8x8", "--d-model", "8"],
            "measured, --d-model what a model does: give one",
        ),
        (["turn"], "takes nothing, `kernels` or `tune`"),
        (["kernels", "--all"], "takes words of names, not '--all'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vkfold_main(arguments) == 2
    assert message in capsys.readouterr().err


def test_lab_checks_and_measures_matmul(capsys: pytest.CaptureFixture[str]) -> None:
    """Every variant, against the roof."""
    assert kernel_lab.main(["matmul", "20x36x24", "--layout", "TN", "--rounds", "2", "--json"]) == 0
    found = report(capsys)
    assert found["right"] and len(found["results"]) > 3
    for row in found["results"]:
        assert 0 < row["error"] <= 1 and row["same_bits"] and row["seconds"] > 0
        assert row["flops_per_second"] == pytest.approx(2 * 20 * 36 * 24 / row["seconds"])
    seconds = [row["seconds"] for row in found["results"]]
    assert seconds == sorted(seconds)


@pytest.fixture(scope="module")
def peaks() -> list[Peaks]:
    return []


@pytest.fixture
def known_peaks(peaks: list[Peaks], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device can do at most is measured once: it takes longer than a small op's every variant."""

    def measured(engine: VulkanEngine) -> Peaks:
        peaks[:] = peaks or [measure_peaks(engine)]
        return peaks[0]

    monkeypatch.setattr(kernel_lab, "measure_peaks", measured)


LAB_FOLDS = ["attention", "attention_backward", "attention_qkv", "attention_qkv_backward", "block_fold"]


@pytest.mark.parametrize("name", LAB_FOLDS)
@pytest.mark.parametrize("heads", ["2", "2(1)"])
def test_lab_measures_every_tile_of_block_folds(
    known_peaks: None, name: str, heads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of backward its own op alone, all its gradients right and equal to the bit."""
    assert kernel_lab.main([name, f"1x{heads}x40x8", "--rounds", "2", "--json"]) == 0
    found = report(capsys)
    assert found["right"] and len(found["results"]) >= 3
    assert {"rows4", "rows2", "rows1"} <= {row["variant"] for row in found["results"]}
    for row in found["results"]:
        assert 0 < row["error"] <= 1 and row["same_bits"]
        if name != "block_fold":
            products = 7 if "backward" in name else 2
            flops = products * 2 * 8 * 2 * (40 * 41 // 2)
            assert row["flops_per_second"] == pytest.approx(flops / row["seconds"])


def lab_shape(name: str) -> str:
    """A small odd one."""
    sizes = {"HEADS": "2", "BATCH": "1", "HEAD_DIM": "8", "SEQ": "9", "ELEMENTS": "9001", "VOCABULARY": "40"}
    sizes["HEADS(KV_HEADS)"] = "4(2)"
    return "x".join(sizes.get(word, "24") for word in lab_ops.SUBJECTS[name].meaning.split("x"))


@pytest.mark.parametrize("name", sorted(lab_ops.SUBJECTS))
def test_lab_checks_other_ops(
    vulkan: VulkanEngine, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right as it is; wrong when any of its outputs is two in a thousand off on the device. Kernels are made once."""
    monkeypatch.setattr(kernel_lab, "VulkanEngine", lambda device: nullcontext(vulkan))
    assert kernel_lab.main([name, lab_shape(name), "--check-only"]) == 0
    assert "equal" in capsys.readouterr().out
    subject = lab_ops.SUBJECTS[name]
    outputs = 0

    def spoiled(engine: ComputeEngine, *tensors: Tensor, **settings: Any) -> list[Tensor]:
        nonlocal outputs
        result = subject.call(engine, *tensors, **settings)
        made = [result] if isinstance(result, Tensor) else list(result)
        outputs = len(made)
        if not isinstance(engine, CpuEngine):
            made[which] = engine.scale(made[which], 1.002)
        return made

    monkeypatch.setitem(lab_ops.SUBJECTS, name, subject._replace(call=spoiled))
    which = 0
    while which == 0 or which < outputs:
        assert kernel_lab.main([name, lab_shape(name), "--check-only"]) == 1, f"output {which}"
        which += 1


@pytest.mark.parametrize(
    ("name", "shape", "factor"),
    [("softmax", "33x1000", 1.0005), ("layer_norm", "16x16384", 1.001), ("rms_norm", "16x8192", 1.0005)],
)
def test_lab_bounds_grow_with_columns_a_lane(
    name: str, shape: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long rows hide no error."""
    subject = lab_ops.SUBJECTS[name]

    def spoiled(engine: ComputeEngine, *tensors: Tensor) -> list[Tensor]:
        result = subject.call(engine, *tensors)
        first, *others = [result] if isinstance(result, Tensor) else result
        return [first if isinstance(engine, CpuEngine) else engine.scale(first, factor), *others]

    assert kernel_lab.main([name, shape, "--check-only"]) == 0
    monkeypatch.setitem(lab_ops.SUBJECTS, name, subject._replace(call=spoiled))
    assert kernel_lab.main([name, shape, "--check-only"]) == 1


def test_lab_groups_heads(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of a group share keys and values, and no others: swapped groups are wrong."""
    assert kernel_lab.main(["attention", "2x6(3)x17x8", "--check-only", "--json"]) == 0
    assert report(capsys)["sizes"] == [2, 6, 3, 17, 8]
    subject = lab_ops.SUBJECTS["attention"]

    def swapped(engine: ComputeEngine, q: Tensor, k: Tensor, v: Tensor) -> Any:
        if not isinstance(engine, CpuEngine):
            v = engine.tensor(v.numpy()[:, :, [1, 0, 2]])
        return subject.call(engine, q, k, v)

    monkeypatch.setitem(lab_ops.SUBJECTS, "attention", subject._replace(call=swapped))
    assert kernel_lab.main(["attention", "2x6(3)x17x8", "--check-only"]) == 1


@pytest.mark.parametrize("name", ["adamw", "adafactor", "rope", "cross_entropy_backward", "embedding_backward"])
def test_lab_measures_ops_that_change_their_inputs(
    known_peaks: None, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The op alone, without copies."""
    assert kernel_lab.main([name, lab_shape(name), "--rounds", "2", "--json"]) == 0
    rows = report(capsys)["results"]
    assert bool(lab_ops.SUBJECTS[name].forced) == (len(rows) > 1)
    for row in rows:
        assert row["seconds"] > 0 and row["error"] <= 1 and row["same_bits"] and row["bytes_per_second"] > 0


def test_lab_tells_wrong_results(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that computes something else on the device: exit code 1."""

    def call(engine: ComputeEngine, x: Tensor, y: Tensor) -> Tensor:
        return engine.add(x, y) if isinstance(engine, CpuEngine) else engine.multiply(x, y)

    monkeypatch.setitem(lab_ops.SUBJECTS, "add", lab_ops.SUBJECTS["add"]._replace(call=call))
    assert kernel_lab.main(["add", "4x4", "--check-only"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["matmul"], "takes an op and a shape"),
        (["conv", "4x4"], "no op 'conv' in the lab: there are adafactor"),
        (["softmax", "4x4x4"], "no shape for softmax: write ROWSxCOLS"),
        (["softmax", "4x0"], "greater than 0"),
        (["softmax", "4(2)x4"], "no shape for softmax: write ROWSxCOLS"),
        (["attention", "1x4(0)x9x8"], "write BATCHxHEADS(KV_HEADS)xSEQxHEAD_DIM in numbers greater than 0"),
        (["attention", "1x4(2x9x8"], "is no shape for attention"),
        (["attention", "1x3(2)x9x8", "--check-only"], "attention 1x3(2)x9x8 cannot be run here"),
        (["softmax", "2x1048560", "--check-only"], "softmax 2x1048560 cannot be run here: softmax: "),
        (["rope", "1x1x4x7", "--check-only"], "rope 1x1x4x7 cannot be run here"),
        (["add", "1000000000x1000000000", "--check-only"], "cannot be run here"),
        (["add", "4x4", "--layout", "TT"], "--layout TT is how matmul's operands lie, add has none"),
    ],
)
def test_lab_bad_arguments(words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_lab.main(words) == 2
    assert message in capsys.readouterr().err


def test_lab_bounds_are_of_the_arithmetic() -> None:
    """Matmul: 2 k 2^-24 |A| |B|, whatever the layout."""
    a, b = np.full((3, 2), -2.0, np.float32), np.full((3, 4), 5.0, np.float32)
    (allowed,) = lab_ops.matmul_subject("TN").bounds((a, b), [np.zeros((2, 4))])
    assert np.array_equal(allowed, np.full((2, 4), 2 * 3 * EPS32 * 30))


@pytest.mark.parametrize("arguments", [["--help"], ["kernels", "--help"], ["-h"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert vkfold_main(arguments) == 0
    assert capsys.readouterr().out.strip()
