"""A call that fusion holds back is never lost: its errors are its own, or it is tried again, or its outputs say so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from vkfold.engine import kernel_registry
from vkfold.engine.errors import BadInputError, NeverMadeError, OutOfDeviceMemoryError, VkfoldError
from vkfold.engine.expr import variables
from vkfold.engine.fold import FoldSpec, State, Walk
from vkfold.engine.fusion_map_op import FusedMapOp
from vkfold.engine.glsl_compiler import CompilerUnavailableError, GlslCompileError
from vkfold.engine.kernel import Kernel
from vkfold.engine.ops.attention_qkv import ATTENTION_QKV
from vkfold.engine.ops.scale import SCALE
from vkfold.engine.ops.softmax import SOFTMAX
from vkfold.engine.tensor import Tensor
from vkfold.engine.vulkan_engine import VulkanEngine
from vkfold.nn import AdamW, GPTConfig, GPTModel, TrainingStep

ROW = np.array([[1.0, 2.0, 5.0]], np.float32)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[VulkanEngine]:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    monkeypatch.setenv("VKFOLD_FUSION", "1")
    with VulkanEngine() as made:
        yield made


def live_bytes(engine: VulkanEngine) -> int:
    return engine.pool_stats()["step"].live_bytes


class Fault:
    """Makes an op's next launches fail, rehearsals apart. after: commands of the launch that are recorded before."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, op: Any, error: Callable[[], BaseException], after: bool = False
    ) -> None:
        self.left = 0
        launch = op.launch

        def faulty(gpu: Any, *args: Any, **settings: Any) -> None:
            if self.left and not gpu.rehearsing:
                self.left -= 1
                if after:
                    launch(gpu, *args, **settings)
                raise error()
            launch(gpu, *args, **settings)

        monkeypatch.setattr(op, "launch", faulty)


def test_a_kernel_that_does_not_compile_is_an_error_of_its_own_call(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, s = variables("row s")
    walk = Walk([State("s", "sum", row * 0.71875)])
    bad = FoldSpec("twice", inputs={"row": "row"}, walks=[walk], values={"o": s}, elements={"z": row * 2.0})
    a = engine.tensor(ROW)
    glsl = Kernel.glsl.func

    def broken(kernel: Kernel) -> str:
        return glsl(kernel).replace("void main", "nonsense main") if "twice" in kernel.name else glsl(kernel)

    spoiled = cached_property(broken)
    spoiled.__set_name__(Kernel, "glsl")
    monkeypatch.setattr(Kernel, "glsl", spoiled)
    before = live_bytes(engine)
    for _ in range(2):
        with pytest.raises(GlslCompileError, match="twice"):
            engine.fold(bad, row=a)
        assert live_bytes(engine) == before
    np.testing.assert_allclose(engine.softmax(a).numpy().sum(), 1, rtol=1e-6)


@pytest.mark.parametrize("error", [CompilerUnavailableError, KeyboardInterrupt])
def test_what_stops_compilation_stops_the_call(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    (x,) = variables("x")
    odd = 8.75 if error is KeyboardInterrupt else 9.75  # a kernel that this process has not made
    a = engine.tensor(ROW)

    def stop(*args: Any) -> bytes:
        raise error

    expression = x * x * odd
    compile_glsl = kernel_registry.compile_glsl
    monkeypatch.setattr(kernel_registry, "_cached", lambda digest: None)
    monkeypatch.setattr(kernel_registry, "compile_glsl", stop)
    before = live_bytes(engine)
    with pytest.raises(error):
        engine.map(expression, x=a)
    assert live_bytes(engine) == before
    monkeypatch.setattr(kernel_registry, "compile_glsl", compile_glsl)
    np.testing.assert_allclose(engine.map(expression, x=a).numpy(), ROW * ROW * odd, rtol=1e-6)


@pytest.mark.parametrize("op", ["matmul", "attention"])
@pytest.mark.parametrize("variable", ["VKFOLD_VARIANT", "VKFOLD_TUNE"])
def test_a_bad_switch_is_an_error_of_the_call_that_it_meets(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, op: str, variable: str
) -> None:
    """A program may change it while it runs, when calls of the kind were made and their kernels compiled."""
    a, q = engine.tensor(np.eye(8)), engine.tensor(np.ones((1, 4, 1, 8)))

    def call() -> np.ndarray:
        return (engine.matmul(a, a) if op == "matmul" else engine.attention(q, q, q)[0]).numpy()

    monkeypatch.delenv(variable, raising=False)
    expected = call()
    before = live_bytes(engine)
    for _ in range(2):
        monkeypatch.setenv(variable, f"{op}=rows3" if variable == "VKFOLD_VARIANT" else "maybe")
        for _ in range(2):
            with pytest.raises(BadInputError, match=r"rows3|maybe"):
                engine.matmul(a, a) if op == "matmul" else engine.attention(q, q, q)
        assert live_bytes(engine) == before
        assert np.array_equal(engine.copy(a).numpy(), np.eye(8))
        monkeypatch.delenv(variable)
        assert np.array_equal(call(), expected)


def no_memory() -> OutOfDeviceMemoryError:
    return OutOfDeviceMemoryError("vkCreateFence", -2, "out of device memory")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, no_memory])
def test_a_launch_that_is_interrupted_is_made_again(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]
) -> None:
    a = engine.tensor(ROW)
    fault = Fault(monkeypatch, SCALE, error)
    y = engine.scale(a, 3.0)
    fault.left = 2
    for _ in range(2):
        with pytest.raises(type(error())):
            y.numpy()
    assert np.array_equal(y.numpy(), 3 * ROW)


def test_the_call_that_hears_of_anothers_failure_was_not_made(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it can be called again: an addition in place is made once."""
    a, other = engine.tensor(ROW), engine.tensor(np.ones((3, 3)))
    totals = [engine.tensor(np.zeros((1, 3))) for _ in range(9)]
    fault = Fault(monkeypatch, SOFTMAX, KeyboardInterrupt)
    before = live_bytes(engine)
    y = engine.softmax(a)
    fault.left, heard = 1, 0
    for total in totals:
        product = engine.matmul(a, other)  # keeps the additions from being joined
        try:
            engine.add_(total, product)
        except KeyboardInterrupt:
            heard += 1
            engine.add_(total, product)
        del product
    with_error = y.numpy()
    assert heard == 1
    for total in totals:
        assert np.array_equal(total.numpy(), np.full((1, 3), 8.0))
    assert np.array_equal(with_error, engine.softmax(a).numpy())
    del y
    assert live_bytes(engine) == before


def lost(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A tensor whose launch broke off, one made of it, one that has nothing to do with it."""
    fault = Fault(monkeypatch, SOFTMAX, KeyboardInterrupt, after=True)
    y = engine.softmax(a)
    z = engine.sum(y)
    apart = engine.scale(a, 2.0)
    fault.left = 1
    with pytest.raises(KeyboardInterrupt):
        engine.flush_batch()
    return y, z, apart


def test_what_a_broken_off_launch_should_have_made_cannot_be_used(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = engine.tensor(ROW)
    before = live_bytes(engine)
    y, z, apart = lost(engine, monkeypatch, a)
    assert np.array_equal(apart.numpy(), 2 * ROW)
    message = r"float32 \(1, 3\) were never made, since softmax failed \(KeyboardInterrupt\): make it again"
    for use in (
        Tensor.numpy,
        lambda y: y[0].numpy(),
        lambda y: engine.add(a, y),
        lambda y: engine.zero_(y),
        lambda y: engine.offload(y),
    ):
        with pytest.raises(NeverMadeError, match="were never made, since softmax failed"):
            use(y)
    with pytest.raises(NeverMadeError, match=message):
        engine.copy(y)
    with pytest.raises(NeverMadeError, match="since sum failed"):
        z.item()
    engine.upload(y, ROW)
    assert np.array_equal(y.numpy(), ROW)
    assert np.array_equal(engine.softmax(a).numpy(), engine.softmax(engine.tensor(ROW)).numpy())
    del y, z, apart
    assert live_bytes(engine) == before


def test_memory_of_a_tensor_never_made_serves_others(engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    a = engine.tensor(ROW)
    y, z, _ = lost(engine, monkeypatch, a)
    address = y.address
    del y, z
    again = [engine.scale(a, float(i)) for i in range(4)]
    assert any(tensor.address == address for tensor in again)
    for i, tensor in enumerate(again):
        assert np.array_equal(tensor.numpy(), i * ROW)


def test_a_call_that_cannot_be_made_does_not_stop_the_others(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = engine.tensor(ROW)
    fault = Fault(monkeypatch, SOFTMAX, lambda: VkfoldError("barred since"))
    y = engine.softmax(a)
    fault.left = 1
    with pytest.raises(VkfoldError, match="barred since"):
        engine.flush_batch()
    with pytest.raises(NeverMadeError, match="barred since"):
        y.numpy()
    assert np.array_equal(engine.scale(a, 2.0).numpy(), 2 * ROW)


def test_an_engine_closes_with_a_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    with VulkanEngine() as engine:
        fault = Fault(monkeypatch, SOFTMAX, MemoryError)
        y = engine.softmax(engine.tensor(ROW))
        fault.left = 10**6
    assert engine.closed and y.shape == (1, 3)


@pytest.mark.parametrize("error", [GlslCompileError, MemoryError])
def test_a_joint_kernel_that_cannot_be_made_leaves_two_calls(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    (x,) = variables("x")

    def call() -> np.ndarray:
        a = engine.tensor(ROW)
        y = engine.map(x * 0.4375 + 2.0, x=a)
        z = engine.map(x * x - 0.3125, x=y)
        del y
        return z.numpy()

    def failing(*args: Any, **settings: Any) -> None:
        raise error

    assert engine.fusion is not None
    with monkeypatch.context() as patch:
        patch.setattr(FusedMapOp, "launch", failing)
        apart = call()
    assert not engine.fusion.report()
    assert np.array_equal(apart, (np.float32(0.4375) * ROW + 2) ** 2 - np.float32(0.3125))


def steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[VulkanEngine, int], None]) -> tuple[list[Any], list[int]]:
    """What five training steps give, each called again where it raises, and how often they raised."""
    with VulkanEngine() as engine:
        model = GPTModel(engine, GPTConfig(40, 24, 16, num_heads=2, num_layers=1))
        optimizer = AdamW(model)
        step = TrainingStep(model, optimizer)
        tokens = np.random.default_rng(0).integers(0, 40, (2, 8))
        seen, raised = [], []
        for number in range(5):
            change(engine, number)
            try:
                result = step([(tokens, tokens)], step=number, learning_rate=1e-2)
            except KeyboardInterrupt:
                raised.append(number)
                result = step([(tokens, tokens)], step=number, learning_rate=1e-2)
            seen.append((result.loss, result.updated, optimizer.num_updates))
        return [*seen, *model.state_dict().values()], raised


@pytest.mark.parametrize("replay", ["0", "1"])
def test_a_training_step_that_was_interrupted_in_forward_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, replay: str
) -> None:
    monkeypatch.setenv("VKFOLD_DEBUG", "0")
    monkeypatch.setenv("VKFOLD_REPLAY", replay)
    plain, raised = steps(monkeypatch, lambda engine, number: None)
    assert not raised
    fault = Fault(monkeypatch, ATTENTION_QKV, KeyboardInterrupt)

    def change(engine: VulkanEngine, number: int) -> None:
        fault.left = int(number == 1)

    interrupted, raised = steps(monkeypatch, change)
    assert raised == [1]
    for one, other in zip(plain, interrupted, strict=True):
        assert np.array_equal(one, other)


def test_joined_calls_are_taken_apart_when_one_of_them_cannot_be_made(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do not read what was never made are launched, a value in between that nobody holds too."""
    a = engine.tensor(ROW)
    fault = Fault(monkeypatch, SOFTMAX, lambda: VkfoldError("barred since"))
    before = live_bytes(engine)
    y = engine.softmax(a)
    sums = [engine.add(y if i == 2 else a, a) for i in range(4)]
    between = engine.scale(a, 0.5)
    last = engine.add(between, a)
    del between
    fault.left = 1
    with pytest.raises(VkfoldError, match="barred since"):
        engine.flush_batch()
    assert engine.fusion is not None and engine.fusion.report()["elementwise neighbours"].times >= 4
    for i, made in enumerate(sums):
        if i == 2:
            with pytest.raises(NeverMadeError, match="since add failed"):
                made.numpy()
        else:
            assert np.array_equal(made.numpy(), 2 * ROW)
    assert np.array_equal(last.numpy(), np.float32(1.5) * ROW)
    del y, sums, made, last
    assert live_bytes(engine) == before


@pytest.mark.parametrize("seed", range(12))
def test_what_does_not_depend_on_a_failed_call_is_made(
    engine: VulkanEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random programs that drop tensors, so that their memory serves others, with a launch that fails now and then.

    Bits are compared with those of the same program without failures and without fusion.
    """
    rng = np.random.default_rng(seed)
    fault = Fault(monkeypatch, SOFTMAX, lambda: VkfoldError("barred since"))
    monkeypatch.setenv("VKFOLD_FUSION", "0")
    plain = VulkanEngine()
    start = np.float32(rng.standard_normal((5, 4, 4)) / 2)
    w, plain_w = (made.tensor(start[0]) for made in (engine, plain))
    # each tensor with its like in the plain program: None for what is made of what was never made
    held: list[tuple[Tensor, Tensor | None]] = [(engine.tensor(x), plain.tensor(x)) for x in start[1:]]

    def call(kind: int, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        gpu = x.engine
        if kind < 3:
            return gpu.add(x, y)
        if kind == 3:
            return gpu.add(gpu.scale(gpu.add(x, y), 0.5), gpu.scale(x, -0.25))
        if kind == 4:
            return gpu.scale(x, 0.5)
        if kind == 5:
            return gpu.matmul(x, w)
        if kind == 6:
            product = gpu.matmul(x, w)
            gpu.add_bias_(product, y.rows(1, 2).reshape(4))
            return gpu.gelu(product)
        gpu.add_(x, y)
        return x

    for number in range(240):
        i, j = (int(i) for i in rng.choice(len(held), 2, replace=False))
        (x, plain_x), (y, plain_y) = held[i], held[j]
        kind = int(rng.integers(0, 9))
        fails = number % 20 == 10
        try:
            made = engine.softmax(w) if fails else call(kind, x, y, w)
        except VkfoldError:  # an input was never made, or this heard of the failure: the call was not made
            continue
        if fails:
            fault.left += 1
            held.append((made, None))
            continue
        if plain_y is None and kind in (4, 5):  # which do not read it
            plain_y = plain_x
        like = None if plain_x is None or plain_y is None else call(kind, plain_x, plain_y, plain_w)
        if kind > 6:
            held[i] = made, like
        else:
            held.append((made, like))
        del made, like, x, y, plain_x, plain_y
        while len(held) > 7 or sum(like is not None for _, like in held) > 5:
            held.pop(int(rng.integers(0, len(held))))
        while sum(like is None for _, like in held) > 2:
            held.pop(next(i for i, (_, like) in enumerate(held) if like is None))
        if number % 60 == 30:
            for tensor, like in held:
                if like is not None:
                    if fault.left:
                        with contextlib.suppress(VkfoldError):
                            engine.flush_batch()
                    assert tensor.numpy().tobytes() == like.numpy().tobytes(), number
    while fault.left:
        with pytest.raises(VkfoldError):
            engine.flush_batch()
    for tensor, like in held:
        if like is None:
            with pytest.raises(NeverMadeError):
                tensor.numpy()
        else:
            assert tensor.numpy().tobytes() == like.numpy().tobytes()
    plain.close()
