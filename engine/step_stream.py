"""What one step hands to the device, as plain data that can be compared and submitted again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .vulkan_api import Buffer, CommandBuffer, Device

# Kinds of commands. A dispatch has none of these in front: it is (pipeline, push-constant bytes, workgroups).
WRITE = "write"  # (WRITE, buffer, offset, bytes, what): what is the bytes themselves, or the Input that they come from
COPY = "copy"  # (COPY, buffer, offset, buffer, offset, bytes)
FILL = "fill"  # (FILL, buffer, offset, bytes, 32-bit word)
SUBMIT = ("submit",)  # what came before was handed to the queue by itself

Place = tuple["Buffer", int, int]  # buffer, offset, bytes


class Input(NamedTuple):
    """Host data that differs from step to step. kind: "parameters", "tokens" or "targets". shape: of the latter two."""

    kind: str
    micro_batch: int
    shape: tuple[int, ...] = ()


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


def encode(device: Device, stream: StepStream, staging: Buffer, places: Sequence[int]) -> list[CommandBuffer]:
    """Command buffers of a whole step, one for each of its submits, that can be submitted over and over.

    staging: where its host data lies, each write at the next of `places`, and then what is read back.
    """
    finished: list[CommandBuffer] = []
    commands: CommandBuffer | None = None
    place = iter(places)

    def close() -> None:
        nonlocal commands
        if commands is not None:
            commands.host_barrier()
            commands.end()
            finished.append(commands)
            commands = None

    for command in stream.commands:
        if command is SUBMIT:
            close()
            continue
        if commands is None:
            commands = device.create_command_buffer()
            commands.begin()
        commands.barrier()
        kind = command[0]
        if kind == WRITE:
            _, target, offset, nbytes, _ = command
            commands.copy(staging.handle, next(place), target.handle, offset, nbytes)
        elif kind == COPY:
            _, source, source_offset, target, offset, nbytes = command
            commands.copy(source.handle, source_offset, target.handle, offset, nbytes)
        elif kind == FILL:
            _, target, offset, nbytes, word = command
            commands.fill(target.handle, offset, nbytes, word)
        else:
            commands.bind(kind)
            commands.push(command[1])
            commands.dispatch(command[2])
    for source, source_offset, nbytes in stream.results:
        if commands is None:
            commands = device.create_command_buffer()
            commands.begin()
        commands.barrier()
        commands.copy(source.handle, source_offset, staging.handle, next(place), nbytes)
    close()
    return finished
