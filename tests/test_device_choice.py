"""Choosing a device, with plain data: no driver takes part."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from vkfold.engine import device_choice
from vkfold.engine.device_choice import choose_device, unique_devices
from vkfold.engine.errors import BadInputError, VulkanUnavailableError
from vkfold.engine.physical_device import PhysicalDevice

CPU = PhysicalDevice(0, "llvmpipe (LLVM 15)", "cpu", uuid="6d657361" + "0" * 24, driver_name="llvmpipe")
INTEGRATED = PhysicalDevice(1, "Intel UHD 770", "integrated", uuid="1" * 32, driver_name="ANV")
DISCRETE = PhysicalDevice(2, "AMD Radeon RX 6800", "discrete", uuid="2" * 32, driver_name="radv")
VIRTUAL = PhysicalDevice(3, "Virtio-GPU Venus", "virtual", uuid="3" * 32)
SECOND = PhysicalDevice(4, "AMD Radeon RX 7900", "discrete", uuid="4" * 32, driver_name="radv")


@pytest.fixture(autouse=True)
def fresh_warning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device_choice, "_warned_cpu", False)
    yield


def test_discrete_before_integrated_before_virtual_before_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vkfold"):
        assert choose_device([CPU, INTEGRATED, DISCRETE]) is DISCRETE
        assert choose_device([CPU, VIRTUAL, INTEGRATED]) is INTEGRATED
        assert choose_device([CPU, VIRTUAL]) is VIRTUAL
        assert choose_device([DISCRETE, SECOND]) is DISCRETE
        assert choose_device([SECOND, DISCRETE]) is SECOND
    assert not caplog.records


def test_the_cpu_comes_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vkfold"):
        assert choose_device([CPU]) is CPU
        assert choose_device([CPU]) is CPU
    assert len(caplog.records) == 1
    assert "llvmpipe" in caplog.text


def test_the_cpu_asked_for_by_name_comes_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vkfold"):
        assert choose_device([DISCRETE, CPU], "llvmpipe") is CPU
    assert not caplog.records


def test_one_uuid_counts_once_and_no_uuid_is_no_uuid() -> None:
    twin = PhysicalDevice(5, "AMD Radeon RX 6800 (other driver)", "discrete", uuid=DISCRETE.uuid)
    nameless = [PhysicalDevice(i, f"old {i}", "discrete") for i in (6, 7)]
    assert unique_devices([DISCRETE, twin, SECOND, *nameless]) == [DISCRETE, SECOND, *nameless]
    assert choose_device([DISCRETE, twin]) is DISCRETE
    assert choose_device([DISCRETE, twin], 5) is twin  # still within reach by its index


@pytest.mark.parametrize(
    ("wanted", "device"),
    [
        (0, CPU),
        ("1", INTEGRATED),
        ("uhd", INTEGRATED),
        ("RADEON", DISCRETE),
        ("rx 7900", SECOND),
        ("7900", SECOND),  # digits that are no index are a word of a name
        ("001", INTEGRATED),
        ("4" * 32, SECOND),
        ("6D657361-0000-0000-0000-000000000000", CPU),
        ("", DISCRETE),
        (None, DISCRETE),
    ],
)
def test_choice_by_index_name_or_uuid(wanted: str | int | None, device: PhysicalDevice) -> None:
    assert choose_device([CPU, INTEGRATED, DISCRETE, SECOND], wanted) is device


@pytest.mark.parametrize("wanted", ["9", 9, "geforce", "f" * 32, -1, "15", "680", "800", "\u0663", "1" * 5000])
def test_a_wrong_choice_lists_what_there_is(wanted: str | int) -> None:
    with pytest.raises(BadInputError) as caught:
        choose_device([CPU, DISCRETE], wanted)
    for part in (str(wanted), CPU.name, CPU.uuid, "[0]", DISCRETE.name, DISCRETE.uuid, "[2]"):
        assert part in str(caught.value)


@pytest.mark.parametrize("wanted", ["5", 5, "15", "6", "56"])
def test_digits_of_a_version_are_no_device(wanted: str | int) -> None:
    """The name of a software driver has those of its compiler and its vectors."""
    device = PhysicalDevice(0, "llvmpipe (LLVM 15.0.6, 256 bits)", "cpu", uuid="5" * 32)
    with pytest.raises(BadInputError, match=rf"no Vulkan device matches '{wanted}' as index, name or UUID"):
        choose_device([device], wanted)


def test_no_device_says_what_to_install() -> None:
    with pytest.raises(VulkanUnavailableError, match="mesa-vulkan-drivers"):
        choose_device([])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"api_version": (1, 1, 99)}, r"Vulkan 1\.2 \(it offers 1\.1\)"),
        ({"features": frozenset()}, "bufferDeviceAddress"),
        ({"compute_family": None}, "a compute queue"),
        ({"subgroup_operations": 0x1F & ~0x4}, "arithmetic"),
        ({"subgroup_size": 128}, "it has 128"),
    ],
)
def test_a_device_that_lacks_something_is_passed_over_or_named(change: dict[str, object], words: str) -> None:
    lacking = PhysicalDevice(**{"index": 1, "name": "Old GPU", "type": "discrete", "uuid": "9" * 32, **change})  # type: ignore[arg-type]
    assert choose_device([lacking, INTEGRATED]) is INTEGRATED
    with pytest.raises(VulkanUnavailableError, match=words):
        choose_device([lacking])
    with pytest.raises(VulkanUnavailableError, match=words):
        choose_device([lacking, INTEGRATED], "old gpu")


def test_a_named_match_that_fits_wins_over_one_that_does_not() -> None:
    lacking = PhysicalDevice(0, "AMD Radeon R7", "discrete", uuid="9" * 32, features=frozenset())
    assert choose_device([lacking, DISCRETE], "radeon") is DISCRETE


def test_the_driver_key_tells_devices_and_drivers_apart() -> None:
    newer = PhysicalDevice(0, CPU.name, "cpu", uuid=CPU.uuid, driver_name="llvmpipe", driver_info="Mesa 25")
    keys = {device.driver_key for device in (CPU, newer, DISCRETE, SECOND)}
    assert len(keys) == 4
    assert all(key.isalnum() for key in keys)
