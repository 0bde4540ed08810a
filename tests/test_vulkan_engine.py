"""The Vulkan engine itself: transfers, batches, splitting, memory recovery, and the debug checks that must fire."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from vkfold.engine.cpu_engine import CpuEngine
from vkfold.engine.errors import VkfoldError
from vkfold.engine.kernel import Kernel
from vkfold.engine.op import Op
from vkfold.engine.tensor import TensorSpec
from vkfold.engine.vulkan_engine import VulkanEngine

COUNT_GROUPS = Kernel(
    "count_groups",
    "void main() { if (gl_LocalInvocationID.x == 0) args.y.v[group_index()] = group_index() + 1u; }",
    "out u32 y, uint unused",
    local_size=4,
)
ADD_ONE = Kernel(
    "add_one",
    """void main() {
        uint i = group_index() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
        if (i < args.n) args.y.v[i] += 1.0;
    }""",
    "inout f32 y, uint n",
    local_size=64,
)

SET_FIVE = Kernel("set_five", "void main() { args.y.v[0] = 5.0; }", "out f32 y, uint unused", local_size=1)


@pytest.mark.parametrize("count", [1, 3, 255, 1_100_000, 3_000_001])
def test_round_trip(vulkan: VulkanEngine, count: int) -> None:
    """Uploads of any size, over several staging buffers too, come back equal."""
    array = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    assert np.array_equal(vulkan.tensor(array).numpy(), array)


@pytest.mark.parametrize("dtype", ["float16", "int32", "uint32"])
def test_round_trip_of_other_types(vulkan: VulkanEngine, dtype: str) -> None:
    """Odd counts of 16-bit elements included."""
    array = np.arange(7).astype(dtype)
    assert np.array_equal(vulkan.tensor(array).numpy(), array)


def test_host_array_may_change_at_once(vulkan: VulkanEngine) -> None:
    """What was uploaded is what was there at the call."""
    array = np.ones(1000, np.float32)
    tensor = vulkan.tensor(array)
    array[:] = 7
    assert np.array_equal(tensor.numpy(), np.ones(1000, np.float32))


def test_more_groups_than_a_dispatch_may_have(vulkan: VulkanEngine) -> None:
    """200,000 workgroups in one call: every index once."""
    y = vulkan.zeros((200_000,), "uint32")
    vulkan.dispatch(COUNT_GROUPS, 200_000, y, 0)
    assert np.array_equal(y.numpy(), np.arange(200_000) + 1)


def test_dispatches_see_what_earlier_ones_wrote(vulkan: VulkanEngine) -> None:
    """A chain in one batch, and over flushes."""
    y = vulkan.zeros((1000,))
    for i in range(60):
        vulkan.dispatch(ADD_ONE, 16, y, 1000)
        if i % 7 == 0:
            vulkan.flush_batch()
    assert np.array_equal(y.numpy(), np.full(1000, 60.0))


def test_freed_bytes_serve_a_later_op(vulkan: VulkanEngine) -> None:
    """A dead tensor's bytes are reused in recording order, without waiting."""
    x = vulkan.tensor(np.ones(64))
    results = []
    for i in range(20):
        temporary = vulkan.scale(x, float(i))
        results.append(vulkan.scale(temporary, 2.0))
        del temporary
    assert [r.numpy()[0] for r in results] == [2.0 * i for i in range(20)]


def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """begin inside a batch is an error; nothing is submitted for an empty one."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")  # guard words are compared at the end of a batch
    with VulkanEngine() as engine:
        engine.end_batch()
        engine.begin_batch()
        with pytest.raises(RuntimeError, match="end_batch"):
            engine.begin_batch()
        before = engine.recorder.num_submits
        engine.end_batch()
        assert engine.recorder.num_submits == before


def test_tensors_of_two_engines_do_not_mix(vulkan: VulkanEngine) -> None:
    """The message names both engines."""
    other = CpuEngine()
    with pytest.raises(ValueError, match="lives on"):
        vulkan.add(vulkan.tensor([1.0]), other.tensor([1.0]))


def test_bad_arguments_are_refused_before_recording(vulkan: VulkanEngine) -> None:
    """Shapes, dtypes, argument counts, integers that do not fit."""
    with pytest.raises(ValueError, match="negative"):
        vulkan.empty((-1,))
    with pytest.raises(ValueError, match="unknown dtype"):
        vulkan.empty((1,), "float8")
    with pytest.raises(ValueError, match="do not fit"):
        vulkan.tensor(np.array([2**40]))
    with pytest.raises(TypeError, match="takes 2 arguments"):
        vulkan.dispatch(ADD_ONE, 1, vulkan.tensor([1.0]))


def test_the_pool_recovers_idle_blocks_before_it_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget of three blocks: idle ones are returned and retried; too large is an error with numbers."""
    monkeypatch.setenv("VKFOLD_DEBUG", "0")  # guard words make tensors larger
    block = 2**20
    with VulkanEngine(block_bytes=block, budget_bytes=3 * block) as engine:
        small = [engine.empty((block // 4,)) for _ in range(3)]
        del small
        large = engine.empty((2 * block // 4,))  # needs a block of its own: idle ones must go first
        assert large.nbytes == 2 * block
        with pytest.raises(MemoryError, match=str(2 * block)):
            engine.empty((2 * block // 4,))


class _Overreach(Op):
    """Writes one element behind its output: what the debug levels must catch."""

    name = "overreach"

    def outputs(self, x: TensorSpec) -> tuple[TensorSpec]:
        return (x,)

    def flops(self, x: TensorSpec) -> int:
        return 0

    def launch(self, gpu, inputs, made) -> None:  # type: ignore[no-untyped-def]
        gpu.fill_zero(made[0])
        gpu.dispatch(SET_FIVE, 1, (made[0], made[0].nbytes), 0)


class _Undeclared(_Overreach):
    """Changes its input without saying so."""

    name = "undeclared"

    def launch(self, gpu, inputs, made) -> None:  # type: ignore[no-untyped-def]
        gpu.fill_zero(made[0])
        gpu.dispatch(ADD_ONE, 1, inputs[0], 1)


def test_guard_words_catch_a_write_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """VKFOLD_DEBUG=2 names the op whose tensor's guard broke."""
    monkeypatch.setenv("VKFOLD_DEBUG", "2")
    with VulkanEngine() as engine:
        x = engine.tensor(np.ones(64))
        (y,) = engine.execute(_Overreach(), (x,))
        with pytest.raises(VkfoldError, match="overreach"):
            engine.end_batch()
        del y


def test_fresh_and_freed_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """VKFOLD_DEBUG=2 makes a read before the first write show."""
    monkeypatch.setenv("VKFOLD_DEBUG", "2")
    with VulkanEngine() as engine:
        assert np.isnan(engine.empty((33,)).numpy()).all()


def test_an_undeclared_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """VKFOLD_DEBUG=3 compares memory around each op."""
    monkeypatch.setenv("VKFOLD_DEBUG", "3")
    with VulkanEngine() as engine:
        x = engine.tensor(np.ones(64))
        with pytest.raises(VkfoldError, match="'undeclared' changed 4 bytes"):
            engine.execute(_Undeclared(), (x,))


def test_a_violation_is_reported_by_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberate violation must be heard, so that a missing layer cannot pass for a clean run."""
    monkeypatch.setenv("VKFOLD_DEBUG", "1")
    with VulkanEngine() as engine:
        buffer = engine.device.create_buffer(256, host_visible=False)
        commands = engine.recorder._open().commands
        commands.copy(buffer.handle, 0, buffer.handle, 128, 0)  # a copy of no bytes: forbidden, and harmless
        assert engine.validation_messages, "the validation layers said nothing"
        engine.recorder.submit()
        engine.recorder.wait()
        engine.device.destroy_buffer(buffer)


def test_a_tensor_over_the_device_limit_names_the_limit(vulkan: VulkanEngine) -> None:
    """The limit comes first in the message, not holes of the pool."""
    limit = vulkan.device.max_allocation_bytes
    with pytest.raises(MemoryError, match=f"by a limit: the device gives at most {limit} bytes") as caught:
        vulkan.empty((limit // 4 + 1,))
    assert "fragmentation: enough" not in str(caught.value)


def test_a_closed_engine_says_so() -> None:
    """Ops, uploads, downloads and dispatches after close."""
    engine = VulkanEngine()
    tensor = engine.tensor([1.0])
    engine.close()
    for use in (tensor.numpy, lambda: engine.add(tensor, tensor), lambda: engine.dispatch(ADD_ONE, 1, tensor, 1)):
        with pytest.raises(RuntimeError, match="is closed"):
            use()


@pytest.mark.parametrize("groups", [-1, 2**32])
def test_impossible_numbers_of_groups(vulkan: VulkanEngine, groups: int) -> None:
    """Refused before anything is recorded."""
    with pytest.raises(ValueError, match="workgroups"):
        vulkan.dispatch(ADD_ONE, groups, vulkan.tensor([1.0]), 1)


def test_a_program_that_dies_shows_its_own_error_only() -> None:
    """With memory checks on, too, tensors that outlive their engine say nothing."""
    program = (
        "import numpy as np, vkfold as vf\n"
        "engine = vf.VulkanEngine()\n"
        "one = engine.tensor(np.ones((8, 8)))\n"
        "model = vf.nn.GPTModel(engine, vf.nn.GPTConfig(16, 8, 16, 2, 1))\n"
        "def main():\n"
        "    kept = [engine.tensor(np.ones(4)) for _ in range(5)]\n"
        "    product = engine.matmul(one, one)\n"
        "    raise RuntimeError('the only line')\n"
        "main()\n"
    )
    environment = {**os.environ, "VKFOLD_DEBUG": "2"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert "the only line" in ended.stderr and "ignored" not in ended.stderr
