"""Errors with numbers and a hint: what went wrong, what it needs, what would help."""

from __future__ import annotations


class VkfoldError(Exception):
    """Base of every error this package raises on purpose. `exit_code` is what the tools leave with."""

    exit_code = 1


class BadInputError(VkfoldError, ValueError):
    """A file, option or setting that cannot be right, found before any device work. The message is for the user."""

    exit_code = 2


class VulkanUnavailableError(VkfoldError):
    """No loader, no device, or a device without what is needed. The message names what would supply it."""

    exit_code = 2


class RecomputeMismatchError(VkfoldError):
    """VKFOLD_CHECK_RECOMPUTE found a recomputed tensor that is not what forward made. The message names it."""


class MissingActivationError(VkfoldError, RuntimeError):
    """A backward was asked for whose forward kept nothing (or whose cache was already used and released)."""


class NeverMadeError(VkfoldError, RuntimeError):
    """A tensor is used whose op failed after the call: its values are not there. The message names the cause."""


class VulkanError(VkfoldError):
    """A Vulkan call failed. call: its name. result: VkResult as a number. result_name: the same in words."""

    def __init__(self, call: str, result: int, result_name: str, hint: str = "") -> None:
        super().__init__(f"{call} failed: {result_name} ({result})" + (f". {hint}" if hint else ""))
        self.call = call
        self.result = result
        self.result_name = result_name


class DeviceLostError(VulkanError):
    """The driver gave up on the device. Every object of the engine is dead; make a new engine."""


class OutOfDeviceMemoryError(VulkanError):
    """The driver has no memory left for a request.

    requested_bytes, allocated_bytes (this device object, before the request), budget_bytes; 0 where not known.
    """

    def __init__(
        self,
        call: str,
        result: int,
        result_name: str,
        hint: str = "",
        *,
        requested_bytes: int = 0,
        allocated_bytes: int = 0,
        budget_bytes: int = 0,
    ) -> None:
        super().__init__(call, result, result_name, hint)
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.budget_bytes = budget_bytes
