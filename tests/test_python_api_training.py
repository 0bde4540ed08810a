"""What a training loop is given: rates, steps, data, layers, kernels; each mistake is named, with what to do."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from replay_checks import Run

import vkfold as vf
from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import BadInputError
from vkfold.engine.kernel import Kernel
from vkfold.engine.plan_engine import PlanEngine
from vkfold.engine.step_parameters import StepParameters
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import SGD, Adafactor, AdamW, GPTConfig, GPTModel, Layer, TrainingStep

CONFIG = GPTConfig(13, 8, 8, 2, 1, d_ff=12)
TOKENS = np.arange(8).reshape(1, 8)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0, 1e39, "a", None, True], ids=str)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (AdamW, "learning_rate"), (AdamW, "weight_decay"), (AdamW, "eps"), (AdamW, "beta1"), (AdamW, "beta2"),
        (SGD, "learning_rate"), (SGD, "weight_decay"), (SGD, "momentum"),
        (Adafactor, "learning_rate"), (Adafactor, "weight_decay"), (Adafactor, "eps"), (Adafactor, "decay_power"),
    ],
)  # fmt: skip
def test_settings_of_optimizers(cpu: CpuEngine, make: Any, name: str, value: Any) -> None:
    if (name, value) == ("decay_power", -1.0):
        value = -1.5
    with pytest.raises(ValueError, match=rf"{name}.* is .*{str(value)[:3]}.*(must|fit)"):
        make(GPTModel(cpu, CONFIG, seed=0), **{name: value})


@pytest.mark.parametrize("engine_of", ["vulkan", "cpu"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0, it must not be negative"),
        ({"learning_rate": math.inf}, "learning_rate is inf .*finite"),
        ({"learning_rate": "1"}, "learning_rate is '1' .*finite number"),
        ({"step": -1}, "step is -1, it must be 0 to 4294967295"),
        ({"step": 2**32}, "step is 4294967296"),
        ({"step": 1.5}, "step is 1.5 .*whole number"),
        ({"micro_batches": []}, "at least one micro-batch"),
        ({"micro_batches": (TOKENS, TOKENS)}, r"list of \(tokens, targets\).*micro-batch 0 is a NumPy array"),
        ({"micro_batches": [TOKENS]}, "micro-batch 0 is a NumPy array"),
        ({"micro_batches": TOKENS}, "given is a NumPy array"),
        ({"micro_batches": [(TOKENS.tolist(), TOKENS)]}, r"micro-batch 0 holds \[\[0, 1.*numpy.asarray"),
        ({"micro_batches": [(TOKENS, None)]}, "micro-batch 0 holds None"),
    ],
)
def test_arguments_of_a_step(request: pytest.FixtureRequest, engine_of: str, given: Any, message: str) -> None:
    model = GPTModel(request.getfixturevalue(engine_of), CONFIG, seed=0)
    before = model.state_dict()
    training_step = TrainingStep(model, AdamW(model))
    arguments = {"micro_batches": [(TOKENS, TOKENS)], "step": 0, "learning_rate": 0.1, **given}
    with pytest.raises(BadInputError, match=message):
        training_step(arguments.pop("micro_batches"), **arguments)
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())


def test_tensors_are_no_data_of_a_step(vulkan: VulkanEngine) -> None:
    model = GPTModel(vulkan, CONFIG, seed=0)
    tokens: Any = vulkan.tensor(TOKENS)
    with pytest.raises(BadInputError, match=r"micro-batch 0 holds Tensor.*convert it with tensor\.numpy\(\)"):
        TrainingStep(model, SGD(model))([(tokens, tokens)], step=0, learning_rate=0.1)


def test_settings_of_a_step(cpu: CpuEngine) -> None:
    model = GPTModel(cpu, CONFIG, seed=0)
    for given, message in (({"max_norm": "1"}, "max_norm is '1'"), ({"seed": 1.5}, "seed is 1.5.*whole")):
        with pytest.raises(BadInputError, match=message):
            TrainingStep(model, SGD(model), **given)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="learning_rate is -1"):
        SGD(model).step(-1.0)
    for step in (-1, 2**32, 0.5, "a"):
        with pytest.raises(ValueError, match="step parameter step is"):
            StepParameters(step=step)  # type: ignore[arg-type]


def test_a_model_takes_lists(cpu: CpuEngine) -> None:
    model: Any = GPTModel(cpu, CONFIG, seed=0)
    want = model.loss(TOKENS, TOKENS).item()
    assert model.loss(TOKENS.tolist(), TOKENS.tolist()).item() == want
    assert np.array_equal(model(TOKENS.tolist()).numpy(), model(TOKENS).numpy())
    for bad, message in (
        ("ab", "not empty, got shape"),
        ([[1, 2], [3]], "inhomogeneous"),
        ([[1.5, 2.0]], "must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            model.loss(bad, bad)


MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: AdamW([1]), r"AdamW: the model is \[1\] of type list, needed is a Layer"),
    (lambda m: AdamW(m.engine), "AdamW: the model is CpuEngine"),
    (lambda m: TrainingStep(m, None), "TrainingStep: model .*GPTModel.*optimizer None"),
    (lambda m: TrainingStep(None, SGD(m)), "TrainingStep: model None"),
    (lambda m: m.load_state_dict(None), "load_state_dict: None, needed is a dict"),
    (lambda m: vf.save("never.safetensors", 5), "save: 5 of type int, needed is a layer"),
    (lambda m: Kernel("k", None, "in f32 x", local_size=1), "kernel 'k': source is None, needed is a string"),
    (lambda m: Kernel("k", "", None, local_size=1), "kernel 'k': args is None"),
    (lambda m: Kernel("k", "", "in f32 x", local_size="1"), "kernel 'k': local_size is '1', needed is a whole"),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_the_wrong_thing_is_named(cpu: CpuEngine, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(GPTModel(cpu, CONFIG, seed=0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocab_size": 13.0}, "vocab_size is 13.0 of type float, needed is a whole number"),
        ({"window": 1.5, "tie_head": "no"}, "tie_head is 'no'.*; .*window is 1.5"),
        ({"num_layers": True}, "num_layers is True"),
        ({"norm": None}, "norm is None, needed is a string"),
        ({"dropout": "0"}, "dropout is '0'.*a number"),
        ({"norm_eps": math.inf}, "norm_eps is inf.*finite"),
    ],
)
def test_settings_of_a_model(given: Any, message: str) -> None:
    sizes = {"vocab_size": 13, "max_seq_len": 8, "d_model": 8, "num_heads": 2, "num_layers": 1}
    with pytest.raises(BadInputError, match=message):
        GPTConfig(**{**sizes, **given})


class Forgetful(Layer):
    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def forward(self, x: Any) -> Any:
        self.start_forward()
        return x


def test_a_layer_that_forgets_its_base(cpu: CpuEngine) -> None:
    with pytest.raises(AttributeError, match=r"Forgetful.__init__ must call super\(\).__init__\(engine\) first"):
        Forgetful(cpu)(cpu.tensor([1.0]))
    with pytest.raises(AttributeError, match="'GPTModel' object has no attribute 'los'"):
        GPTModel(cpu, CONFIG, seed=0).los  # type: ignore[attr-defined]  # noqa: B018


def test_a_kernel_of_a_file_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"kernel 'k': there is no 'nope\.comp' in .*shaders: give the GLSL text"):
        Kernel("k", "nope.comp", "in f32 x", local_size=64)


@pytest.mark.parametrize("make", [CpuEngine, PlanEngine])
def test_engines_without_a_device_run_no_kernels(make: Callable[[], Any]) -> None:
    engine = make()
    kernel = vf.Kernel("k", "void main() {}", "in f32 x", local_size=64)
    with pytest.raises(NotImplementedError, match=r"(cpu|plan) \(engine \d+\) runs no hand-written kernels.*Vulkan"):
        engine.dispatch(kernel, 1, engine.tensor([1.0]))


def test_a_uint32_array_becomes_a_uint32_tensor(cpu: CpuEngine) -> None:
    assert cpu.tensor(np.arange(3, dtype=np.uint32)).dtype == "uint32"
    assert {cpu.tensor(np.arange(3, dtype=t)).dtype for t in ("int8", "uint8", "int16", "uint16", "int64")} == {"int32"}
    with pytest.raises(ValueError, match="uint64"):
        cpu.tensor(np.arange(3, dtype=np.uint64))


def test_a_capture_dropped_in_another_thread_waits_for_the_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer runs in whatever thread the collector is in; the recorder is the owner's alone."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")  # with memory checks nothing is captured
    monkeypatch.setenv("VKFOLD_REPLAY", "1")
    with VulkanEngine() as engine:
        run = Run(engine)
        run.steps(5)
        retired: list[int] = []
        retire = engine.recorder.retire

        def noted(what: Any) -> None:
            retired.append(threading.get_ident())
            retire(what)

        engine.recorder.retire = noted  # type: ignore[method-assign]
        stats = engine.replay_stats()
        assert stats.captured > sum(stats.dropped.values())
        before = sum(stats.dropped.values())
        boxed = [run]
        del run

        def drop() -> None:
            boxed.clear()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        assert not retired and sum(stats.dropped.values()) == before
        engine.tensor([1.0])
        assert retired and set(retired) == {threading.get_ident()}
        assert stats.dropped["its training step is gone"] == 1
