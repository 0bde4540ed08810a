"""What one step hands to the device, as plain data that can be compared and submitted again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .vulkan_api import Buffer

# Kinds of commands. A dispatch has none of these in front: it is (pipeline, push-constant bytes, workgroups).
WRITE = "write"  # (WRITE, buffer, offset, bytes, what): what is the bytes themselves, or the Input that they come from
COPY = "copy"  # (COPY, buffer, offset, buffer, offset, bytes)
FILL = "fill"  # (FILL, buffer, offset, bytes, 32-bit word)
SUBMIT = ("submit",)  # what came before was handed to the queue by itself

Place = tuple["Buffer", int, int]  # buffer, offset, bytes


class Input(NamedTuple):
    """Host data that differs from step to step. kind: "parameters", "tokens" or "targets"."""

    kind: str
    micro_batch: int


class StepStream:
    """The commands of one step in order.

    results: what is read back after the last command. obstacle: why the step cannot be submitted again, "" if it can.
    """

    __slots__ = ("commands", "obstacle", "results")

    def __init__(self) -> None:
        self.commands: list[tuple[Any, ...]] = []
        self.results: list[Place] = []
        self.obstacle = ""

    def same_as(self, other: StepStream) -> bool:
        """Whether both do the same to the same memory, given the same inputs."""
        return self.results == other.results and self.commands == other.commands

    def __repr__(self) -> str:
        return f"StepStream({len(self.commands)} commands)"
