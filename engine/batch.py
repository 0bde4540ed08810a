"""One submit of the recorder."""

from __future__ import annotations

from typing import Any

from .vulkan_api import Buffer, CommandBuffer, Fence


class Batch:
    """One submit: its command buffer, and what may be destroyed or reused once its fence has signalled.

    sent: [0] once the queue has it. finished: its fence has signalled, and may be reset by now. work: of its
    commands and of the batches that were submitted early before it. new_work: since it was last looked whether the
    device is idle. early: it was submitted for that.
    """

    __slots__ = ("commands", "early", "fence", "finished", "new_work", "number", "retired", "sent", "staging", "work")

    def __init__(self, commands: CommandBuffer | None, fence: Fence) -> None:
        self.commands: Any = commands  # None: a replay, whose command buffers stay recorded
        self.fence = fence
        self.sent: list[int] = []
        self.number = 0  # among compute submits, where there is a queue for copies
        self.finished = False
        self.retired: list[Buffer | CommandBuffer | Fence] = []
        self.staging: list[Buffer] = []
        self.work = self.new_work = 0.0
        self.early = False
