"""The Vulkan binding on a real driver: buffers, pipelines, commands, fences, caches, validation, errors."""

from __future__ import annotations

import builtins
import gc
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkfold.engine import host_memory, pipeline_cache, switches, vulkan_binding
from vkfold.engine.errors import (
    DeviceLostError,
    OutOfDeviceMemoryError,
    VkfoldError,
    VulkanError,
    VulkanUnavailableError,
)
from vkfold.engine.kernel import Kernel
from vkfold.engine.kernel_registry import spirv_for
from vkfold.engine.physical_device import PhysicalDevice
from vkfold.engine.vulkan_api import Buffer, Device, Instance, Pipeline

ROOT = Path(vulkan_binding.__file__).resolve().parent.parent

# y[i] += value for i < n, one invocation an element
ADD = Kernel(
    "test_add",
    "void main() { uint i = gl_GlobalInvocationID.x; if (i < args.n) args.y.v[i] += args.value; }",
    "inout u32 y, uint n, uint value",
    local_size=64,
)
# y[0] = the local size, as the pipeline sees its specialization constant
SIZE = Kernel(
    "test_size",
    "void main() { if (gl_GlobalInvocationID.x == 0u) args.y.v[0] = gl_WorkGroupSize.x; }",
    "out u32 y",
    local_size=64,
)


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    """An instance with the validation layers where they are installed; in the end they must have said nothing."""
    try:
        made = Instance(validation=True)
    except VulkanUnavailableError:
        if switches.get("VKFOLD_DEBUG"):
            raise
        made = Instance()
    yield made
    messages = list(made.messages)
    made.destroy()
    made.destroy()
    assert not messages, messages[0]


@pytest.fixture(scope="module")
def device(instance: Instance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """The device that VKFOLD_DEVICE or else the loader puts first, with a pipeline cache of its own."""
    made = open_device(instance, tmp_path_factory.mktemp("cache"))
    yield made
    assert (made.num_buffers, made.buffer_bytes) == (0, 0)
    made.destroy()
    made.destroy()


def open_device(instance: Instance, cache: Path) -> Device:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKFOLD_CACHE_DIR", str(cache))
        return Device(instance, instance.physical_devices()[0])


class Run:
    """Records, submits, waits; destroys everything it made."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.commands = device.create_command_buffer()
        self.fence = device.create_fence()

    def __enter__(self) -> Run:
        self.commands.begin()
        return self

    def submit(self) -> None:
        self.device.submit(self.commands, self.fence)
        assert self.fence.wait()
        self.fence.reset()

    def finish(self) -> None:
        self.commands.host_barrier()
        self.commands.end()
        self.submit()

    def __exit__(self, *_: object) -> None:
        self.commands.destroy()
        self.commands.destroy()
        self.fence.destroy()
        self.fence.destroy()


def words(buffer: Buffer) -> list[int]:
    return buffer.mapping.cast("I").tolist()


def make_pipeline(device: Device, kernel: Kernel, size: int = 64, **settings: Any) -> Pipeline:
    return device.create_pipeline(spirv_for(kernel), size, kernel.packer.size, kernel.name, **settings)


def test_one_file_imports_pyvulkan() -> None:
    found = [
        file.relative_to(ROOT).as_posix()
        for folder in ("engine", "memory_pool", "nn", "tools")
        for file in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(import|from) vulkan\b", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert found == ["engine/vulkan_binding.py"]


@pytest.mark.parametrize(
    ("error", "message"),
    [(OSError("no libvulkan"), "no Vulkan loader was found.*(install|update)"), (ImportError("x"), "pip install")],
)
def test_a_missing_loader_or_binding_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "vulkan":
            raise error
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(VulkanUnavailableError, match=message) as caught:
        vulkan_binding.binding.__wrapped__()
    assert caught.value.exit_code == 2


def test_devices_describe_themselves(instance: Instance) -> None:
    devices = instance.physical_devices()
    assert [device.index for device in devices] == list(range(len(devices)))
    for found in devices:
        assert found.name and found.driver_name and re.fullmatch("[0-9a-f]{32}", found.uuid)
        assert found.heaps and found.memory_types and found.max_allocation_bytes >= 2**27
        assert found.subgroup_size & (found.subgroup_size - 1) == 0
    assert devices[0].missing() == []


def test_results_become_typed_errors_with_names_and_numbers() -> None:
    vulkan_binding.check(0, "vkX")
    vulkan_binding.check(5, "vkX")
    for result, kind, name in (
        (-4, DeviceLostError, "VK_ERROR_DEVICE_LOST"),
        (-1, OutOfDeviceMemoryError, "VK_ERROR_OUT_OF_HOST_MEMORY"),
        (-2, OutOfDeviceMemoryError, "VK_ERROR_OUT_OF_DEVICE_MEMORY"),
        (-3, VulkanError, "VK_ERROR_INITIALIZATION_FAILED"),
    ):
        with pytest.raises(kind, match=re.escape(f"vkX failed: {name} ({result})")) as caught:
            vulkan_binding.check(result, "vkX")
        assert type(caught.value) is kind
        assert (caught.value.call, caught.value.result, caught.value.result_name) == ("vkX", result, name)


def test_buffers_map_count_and_die(device: Device) -> None:
    first = device.create_buffer(4096, host_visible=True)
    second = device.create_buffer(1000, host_visible=False)
    assert device.num_buffers == 2 and device.buffer_bytes >= 5096
    assert first.address and second.address and first.address != second.address
    assert second.mapping is None
    first.mapping[:4] = b"abcd"
    assert bytes(first.mapping[:4]) == b"abcd" and len(first.mapping) == 4096
    for buffer in (first, second, first):
        device.destroy_buffer(buffer)
    assert (device.num_buffers, device.buffer_bytes, first.mapping, first.address) == (0, 0, None, 0)


def test_fill_copy_dispatch_and_replay(device: Device) -> None:
    pipeline = make_pipeline(device, ADD)
    data = device.create_buffer(4096, host_visible=False)
    back = device.create_buffer(4096, host_visible=True)
    with Run(device) as run:
        commands = run.commands
        commands.fill(data.handle, 0, 4096, 5)
        commands.barrier()
        commands.copy(data.handle, 0, back.handle, 0, 4096)
        run.finish()
        assert words(back) == [5] * 1024
        commands.reset()
        commands.begin()
        for value in (10, 100):
            commands.barrier()
            commands.bind(pipeline)
            commands.push(ADD.packer.pack(data.address, 1000, value, 0))
            commands.dispatch(16)
        commands.barrier()
        commands.copy(data.handle, 4, back.handle, 0, 4092)
        commands.host_barrier()
        commands.end()
        for times in (1, 2, 3):  # the same recording again
            run.submit()
            assert words(back)[:1023] == [5 + 110 * times] * 999 + [5] * 24
    device.destroy_buffer(data)
    device.destroy_buffer(back)
    device.destroy_pipeline(pipeline)
    device.destroy_pipeline(pipeline)


def test_500_specialization_constants_survive_the_collector(device: Device, frozen_objects: None) -> None:
    """Structs that point to structs, while the garbage collector runs."""
    sizes = [1 + (7 * i) % min(128, device.max_workgroup_invocations) for i in range(500)]
    back = device.create_buffer(2000, host_visible=True)
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            gc.collect()
            time.sleep(0.0005)

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    collector = threading.Thread(target=collect)
    collector.start()
    pipelines = []
    try:
        for size in sizes:
            pipelines.append(make_pipeline(device, SIZE, size))
    finally:
        stop.set()
        collector.join()
        gc.set_threshold(*thresholds)
    with Run(device) as run:
        for index, pipeline in enumerate(pipelines):
            run.commands.bind(pipeline)
            run.commands.push(SIZE.packer.pack(back.address + 4 * index, 0))
            run.commands.dispatch(1)
        run.finish()
    assert words(back) == sizes
    for pipeline in pipelines:
        device.destroy_pipeline(pipeline)
    device.destroy_buffer(back)


def test_a_required_subgroup_size(device: Device) -> None:
    pipeline = make_pipeline(device, SIZE, 4 * device.subgroup_size, subgroup_size_required=device.subgroup_size)
    device.destroy_pipeline(pipeline)
    if device.physical.max_subgroup_size < 128:
        with pytest.raises(VkfoldError, match="needs subgroups of 128"):
            make_pipeline(device, SIZE, 64, subgroup_size_required=128)


def test_bad_pipelines_are_named(device: Device) -> None:
    spirv = spirv_for(SIZE)
    too_many = device.max_workgroup_invocations + 1
    with pytest.raises(VkfoldError, match=r"'mine'.*not SPIR-V"):
        device.create_pipeline(b"GLSL" * 8, 1, 16, "mine")
    with pytest.raises(VkfoldError, match=f"'mine': {too_many} invocations.*allows 1 to"):
        device.create_pipeline(spirv, too_many, 16, "mine")
    with pytest.raises(VkfoldError, match="'mine': 132 bytes"):
        device.create_pipeline(spirv, 1, 132, "mine")


def test_a_buffer_above_the_limit_is_an_error_with_numbers(device: Device) -> None:
    limit = device.max_allocation_bytes
    kept = device.create_buffer(1024, host_visible=True)
    with pytest.raises(OutOfDeviceMemoryError, match=f"{limit + 4} bytes.*largest single allocation {limit}") as caught:
        device.create_buffer(limit + 4, host_visible=False)
    assert caught.value.requested_bytes == limit + 4
    assert caught.value.allocated_bytes == kept.memory_bytes == device.buffer_bytes
    assert caught.value.budget_bytes > 0
    device.destroy_buffer(kept)
    for size in (0, -1):
        with pytest.raises(ValueError, match="must be positive"):
            device.create_buffer(size, host_visible=False)


def test_the_budget_is_what_can_be_had(device: Device) -> None:
    budget = device.memory_budget()
    if device.is_cpu:
        available = host_memory.available_bytes()
        assert abs(budget - available) < 0.2 * available + 2**28  # others take and give RAM meanwhile
    else:
        assert 0 < budget <= max(heap.size_bytes for heap in device.physical.heaps)


def test_fences_wait_with_a_limit(device: Device) -> None:
    with Run(device) as run:
        assert not run.fence.is_signaled()
        start = time.monotonic()
        assert run.fence.wait(0.05) is False
        assert 0.04 < time.monotonic() - start < 5
        run.commands.end()
        device.submit(run.commands, run.fence)
        assert run.fence.wait(10) is True
        assert run.fence.is_signaled()
        run.fence.reset()
        assert not run.fence.is_signaled()


def test_timestamps_grow(device: Device) -> None:
    if not device.physical.timestamp_bits:
        pytest.skip("the queue writes no timestamps")
    pool = device.create_query_pool(3)
    buffer = device.create_buffer(2**20, host_visible=False)
    with Run(device) as run:
        run.commands.reset_queries(pool)
        for index in range(3):
            run.commands.write_timestamp(pool, index)
            run.commands.fill(buffer.handle, 0, 2**20, index)
            run.commands.barrier()
        run.finish()
    first, second, third = pool.seconds()
    assert first <= second <= third and third - first < 60
    pool.destroy()
    pool.destroy()
    device.destroy_buffer(buffer)


def test_recording_is_cheap(device: Device) -> None:
    """Bind, push, dispatch and barrier cost a few microseconds; PyVulkan's wrappers cost 45."""
    pipeline = make_pipeline(device, ADD)
    commands = device.create_command_buffer()
    packed = ADD.packer.pack(256, 0, 0, 0)
    best = 1.0
    for _ in range(5):
        commands.begin()
        start = time.perf_counter()
        for _ in range(500):
            commands.barrier()
            commands.bind(pipeline)
            commands.push(packed)
            commands.dispatch(1)
        best = min(best, (time.perf_counter() - start) / 500)
        commands.end()
        commands.reset()
    commands.destroy()
    device.destroy_pipeline(pipeline)
    assert best < 25e-6, f"{best * 1e6:.1f} us an op"


# -- pipeline cache --------------------------------------------------------------------------------------------------
def test_the_pipeline_cache_comes_back(instance: Instance, tmp_path: Path) -> None:
    first = open_device(instance, tmp_path)
    first.destroy_pipeline(make_pipeline(first, ADD))
    first.destroy()
    files = list(tmp_path.rglob("*.bin"))
    assert [file.stem for file in files] == [first.physical.driver_key]
    saved = pipeline_cache.load_cache(files[0], first.physical)
    assert len(saved) >= 32
    assert [file for file in tmp_path.rglob("*") if file.suffix == ".tmp"] == []
    second = open_device(instance, tmp_path)
    second.destroy_pipeline(make_pipeline(second, ADD))
    second.destroy()
    assert pipeline_cache.load_cache(files[0], first.physical)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "noise"])
def test_a_damaged_cache_is_ignored_and_replaced(instance: Instance, tmp_path: Path, damage: str) -> None:
    physical = instance.physical_devices()[0]
    file = tmp_path / "pipelines" / f"{physical.driver_key}.bin"
    header = struct.pack("<IIII", 32, 1, physical.vendor_id, physical.device_id) + bytes.fromhex(physical.cache_uuid)
    assert pipeline_cache.save_cache(file, header + b"payload")
    assert pipeline_cache.load_cache(file, physical) == header + b"payload"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    changes = {"cut": raw[:-3], "flipped": raw, "empty": b"", "noise": b"\xff" * 5000}
    file.write_bytes(changes[damage])
    assert pipeline_cache.load_cache(file, physical) == b""
    device = open_device(instance, tmp_path)
    device.destroy_pipeline(make_pipeline(device, ADD))
    device.destroy()
    assert len(pipeline_cache.load_cache(file, physical)) >= 32


def test_another_drivers_cache_is_ignored(tmp_path: Path) -> None:
    device = PhysicalDevice(0, "a", "cpu", vendor_id=1, device_id=2, cache_uuid="ab" * 16)
    data = struct.pack("<IIII", 32, 1, 1, 2) + b"\xab" * 16
    file = tmp_path / "x.bin"
    pipeline_cache.save_cache(file, data)
    assert pipeline_cache.load_cache(file, device) == data
    for change in ({"vendor_id": 9}, {"device_id": 9}, {"cache_uuid": "cd" * 16}):
        fields = {"vendor_id": 1, "device_id": 2, "cache_uuid": "ab" * 16, **change}
        assert pipeline_cache.load_cache(file, PhysicalDevice(0, "a", "cpu", **fields)) == b""  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert pipeline_cache.save_cache(tmp_path / "file" / "below.bin", b"data") is False


# -- validation ------------------------------------------------------------------------------------------------------
def test_violations_are_reported_each_time(tmp_path: Path) -> None:
    try:
        instance = Instance(validation=True)
    except VulkanUnavailableError:
        if switches.get("VKFOLD_DEBUG"):
            raise
        pytest.skip("the validation layers are not installed")
    device = open_device(instance, tmp_path)
    lib, ffi, _, null = vulkan_binding.binding()
    assert instance.messages == []
    info = vulkan_binding.struct("VkFenceCreateInfo", flags=0x40000000)  # no such flag
    for _ in range(15):
        out = ffi.new("VkFence*")
        lib.vkCreateFence(device.handle, info, null, out)
        lib.vkDestroyFence(device.handle, out[0], null)
    device.destroy()
    instance.destroy()
    about = [message for message in instance.messages if "VkFenceCreateInfo" in message]
    assert len(about) == 15, f"{len(about)} of 15 repeats were reported"


def test_use_by_two_threads_at_once_is_reported(tmp_path: Path) -> None:
    """The layers leave this check off unless asked."""
    try:
        instance = Instance(validation=True)
    except VulkanUnavailableError:
        if switches.get("VKFOLD_DEBUG"):
            raise
        pytest.skip("the validation layers are not installed")
    device = open_device(instance, tmp_path)
    fence = device.create_fence()
    deadline = time.monotonic() + 20

    def use() -> None:
        while not instance.messages and time.monotonic() < deadline:
            fence.reset()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fence.destroy()
    device.destroy()
    instance.destroy()
    assert any("THREADING" in message.upper() for message in instance.messages)


def test_a_missing_layer_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkfold.engine.vulkan_instance.VALIDATION_LAYER", "VK_LAYER_NOT_THERE")
    with pytest.raises(VulkanUnavailableError, match="VK_LAYER_NOT_THERE is not installed"):
        Instance(validation=True)


# -- host memory -----------------------------------------------------------------------------------------------------
def test_the_control_group_limits_the_budget(tmp_path: Path) -> None:
    assert host_memory._group_bytes(tmp_path) is None
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory._group_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert host_memory._group_bytes(tmp_path) == 400
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\n")
    assert host_memory._group_bytes(tmp_path) == 650
    assert host_memory.available_bytes() > 2**20
