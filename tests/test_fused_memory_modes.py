"""Fused updates and every optimizer together with recomputation, offload and submits: bits, books, resumed runs."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_memory_modes import AUTOMATIC, AXES, MODELS, RECOMPUTE, assert_same_bits, make_model, micro_batches, pairs_of
from test_memory_modes import pairwise as few_cells
from test_memory_plan import VOCAB, compare

from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, Adafactor, AdamW, TrainingStep
from vkfold.tools import text_train
from vkfold.tools.run_config import RunConfig
from vkfold.tools.saves import open_save

OPTIMIZERS = {"adamw": AdamW, "adafactor": Adafactor, "sgd": SGD}
FUSED_AXES: dict[str, list[Any]] = {
    "recompute": [name for name in RECOMPUTE if name != AUTOMATIC],
    "offload": [False, True],
    "flush": [0, 1, 2],
    "dropout": [0.0, 0.1],
    "model": list(MODELS),
    "optimizer": list(OPTIMIZERS),
    "fused": [False, True],
}
CELLS = few_cells(FUSED_AXES)


def test_the_axes_of_the_matrices_are_complete() -> None:
    """What the design asks for, value by value; and each pair of values is in some cell."""
    assert AXES["recompute"][:4] == ["none", "every 1", "every 2", "every 3"]
    assert {"norm", "activation", "attention", "qkv", "mlp", AUTOMATIC} <= set(AXES["recompute"])
    assert {name: AXES[name] for name in AXES if name != "recompute"} == {
        "offload": [False, True],
        "flush": [0, 1, 2],
        "accumulate": [1, 3],
        "dropout": [0.0, 0.1],
        "model": ["gpt", "llama"],
    }
    for axes, cells in ((AXES, few_cells(AXES)), (FUSED_AXES, CELLS)):
        wanted = sum(len(axes[a]) * len(axes[b]) for a, b in itertools.combinations(axes, 2))
        assert len(set().union(*(pairs_of(cell) for cell in cells))) == wanted
        assert len(set().union(*(pairs_of(cell) for cell in cells[:-1]))) < wanted  # the count can fail


def trained(engine: VulkanEngine, cell: dict[str, Any], plain: bool) -> dict[str, np.ndarray]:
    """Losses, weights and moments after three steps."""
    model = make_model(engine, cell["model"], cell["dropout"])
    if not plain:
        mode = RECOMPUTE[cell["recompute"]]
        assert mode is not None
        mode.apply(model)
        model.set_activation_offload(cell["offload"])
        model.set_flush_interval(cell["flush"])
    optimizer = OPTIMIZERS[cell["optimizer"]](model, weight_decay=0.1)
    step = TrainingStep(model, optimizer, seed=11, fused_update=cell["fused"] and not plain)
    losses = [step(micro_batches(n, 1), step=n, learning_rate=1e-2).loss for n in range(3)]
    state = {f"moment {name}": value for name, value in optimizer.state_dict().items()}
    return model.state_dict() | state | {"losses": np.array(losses)}


@pytest.fixture(scope="module")
def baselines() -> dict[Any, dict[str, np.ndarray]]:
    return {}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(str(value) for value in cell.values()))
def test_no_mode_changes_a_bit(vulkan: VulkanEngine, baselines: dict[Any, Any], cell: dict[str, Any]) -> None:
    key = cell["model"], cell["dropout"], cell["optimizer"]
    if key not in baselines:
        baselines[key] = trained(vulkan, cell, plain=True)
    copied = vulkan.offloaded_bytes
    assert_same_bits(trained(vulkan, cell, plain=False), baselines[key])
    assert (vulkan.offloaded_bytes > copied) == cell["offload"]


# -- plan = measured ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"fused_update": True},
        {"fused_update": True, "activation_offload": True, "flush_interval": 1},
        {"fused_update": True, "activation_offload": True, "optimizer": "adafactor", "checkpoint_every": 1},
        {"fused_update": True, "optimizer": "sgd", "recompute": "mlp,qkv", "tie_head": True, "dropout": 0.1},
        {"activation_offload": True, "optimizer": "adafactor", "accum_steps": 2, "recompute": "norm,attention"},
        {"activation_offload": True, "checkpoint_every": 2, "recompute": "mlp", "accum_steps": 2, "max_norm": 1.0},
    ],
    ids=lambda options: " ".join(options),
)
@pytest.mark.parametrize("queue", ["off", "shared"])
def test_plan_equals_measured(options: dict[str, Any], queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies on the compute queue and on one of their own."""
    monkeypatch.setenv("VKFOLD_TRANSFER_QUEUE", queue)
    config = RunConfig(
        **({"d_model": 32, "num_heads": 4, "num_layers": 3, "seq_len": 17, "batch_size": 2, "max_norm": 0.0} | options)
    )
    plan, real = compare(config, VOCAB, monkeypatch)
    if config.activation_offload:
        assert plan.host_bytes == real.pools["host"].peak_live_bytes > 0
    if config.fused_update:  # never all gradients
        assert plan.bytes_of("gradients") < 0.8 * plan.bytes_of("parameters")


# -- resumed under another mode ----------------------------------------------------------------------------------------
RUN = [
    "--seq-len",
    "16",
    "--d-model",
    "16",
    "--num-heads",
    "4",
    "--num-layers",
    "3",
    "--batch-size",
    "4",
    "--lr",
    "0.01",
]
RUN += ["--lr", "0.01", "--max-norm", "0", "--dropout", "0.1", "--held-out", "0.1", "--engine", "vulkan"]
LEGS = [
    ["--fused-update", "--activation-offload"],
    ["--no-fused-update", "--no-activation-offload", "--checkpoint-every", "2", "--recompute", "mlp"],
    ["--fused-update", "--activation-offload", "--checkpoint-every", "1", "--flush-interval", "1"],
    ["--no-fused-update", "--activation-offload", "--checkpoint-every", "0", "--recompute", "qkv,norm"],
]


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_run_goes_through_every_mode(tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All legs on one engine, so that kernels are made once; test_text_train.py has the ones with engines anew."""
    with VulkanEngine() as engine:
        monkeypatch.setattr(text_train, "make_engine", lambda name, device: nullcontext(engine))
        check_every_mode(tmp_path, optimizer)


def check_every_mode(tmp_path: Path, optimizer: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(40)), encoding="utf-8")
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    options = [str(text), *RUN, "--optimizer", optimizer]
    assert text_train.main([*options, "--max-steps", "8", "--save", str(straight)]) == 0
    assert text_train.main([*options, "--max-steps", "2", "--schedule-steps", "8", "--save", str(parts), *LEGS[0]]) == 0
    for steps, leg in zip((4, 6, 8), LEGS[1:], strict=True):
        assert text_train.main(["--resume", str(parts), "--max-steps", str(steps), *leg]) == 0
    expected, got = open_save(straight), open_save(parts)
    for one, other in ((expected.model(), got.model()), (expected.optimizer(), got.optimizer())):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert np.array_equal(other[name], value), name
