"""What VKFOLD_DEBUG turns on around device memory: guard words, NaN poison, and a check of what an op changed.

Guard words lie before and after every tensor and are compared by a recorded kernel when the tensor dies and at every
`end_batch`. Fresh and freed memory is filled with NaN, so that a read before the first write shows. The strictest
level copies all pool blocks before and after each op and names bytes that changed without being declared.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import VkfoldError
from .kernel import Kernel
from .op import Op
from .tensor import Storage, Tensor

if TYPE_CHECKING:
    from .vulkan_engine import VulkanEngine

GUARD_BYTES = 256
_GUARD_WORD = 0xFDB5C0DE
_POISON_WORD = 0xFFFFFFFF  # a NaN as float32, -1 as int32

GUARD_KERNEL = Kernel(
    "guard_check",
    """
void main() {
    uint i = group_index() * gl_WorkGroupSize.x + gl_LocalInvocationID.x;
    if (i < args.words && args.guard.v[i] != args.pattern) atomicMax(args.report.v[0], args.id);
}
""",
    "in u32 guard, inout u32 report, uint words, uint pattern, uint id",
    local_size=64,
)


class MemoryChecks:
    """The checks of one VulkanEngine; levels as VKFOLD_DEBUG documents them."""

    def __init__(self, engine: VulkanEngine, level: int) -> None:
        self._engine = weakref.proxy(engine)
        self._watch_changes = level >= 3
        self._report = engine.device.create_buffer(256, host_visible=False)
        engine.recorder.write(self._report, 0, bytes(256))
        self._live: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._names: list[str] = ["(no tensor)"]
        self._before: dict[int, bytearray] = {}

    # -- tensors -----------------------------------------------------------------------------------------------------
    def _guards(self, storage: Storage) -> list[tuple[int, int]]:
        """(address, words) of the two guards of a storage."""
        _, range_ = storage.handle
        end = storage.address + (storage.nbytes + 3 & ~3)
        range_end = storage.address - GUARD_BYTES + range_.nbytes
        return [(storage.address - GUARD_BYTES, GUARD_BYTES // 4), (end, (range_end - end) // 4)]

    def allocated(self, storage: Storage) -> None:
        """Write guards and poison around and into a fresh storage."""
        storage.tag = "upload"
        self._live.add(storage)
        self._fill(storage, storage.address, storage.nbytes + 3 & ~3, _POISON_WORD)
        for address, words in self._guards(storage):
            self._fill(storage, address, 4 * words, _GUARD_WORD)

    def freed(self, storage: Storage) -> None:
        """Compare the guards of a dying storage, then poison it."""
        with suppress(ReferenceError):  # an engine that went first, with an exception on its way, has nothing to guard
            self._compare(storage)
            _, range_ = storage.handle
            self._fill(storage, storage.address - GUARD_BYTES, range_.nbytes, _POISON_WORD)

    def _fill(self, storage: Storage, address: int, nbytes: int, word: int) -> None:
        _, range_ = storage.handle
        buffer = range_.block.handle
        self._engine.recorder.fill_buffer(buffer, address - buffer.address, nbytes, word)

    def _compare(self, storage: Storage) -> None:
        if not self._names or self._names[-1] != storage.tag:
            self._names.append(storage.tag)
        recorder = self._engine.recorder
        recorder.op_work = 0.0
        for address, words in self._guards(storage):
            groups = -(-words // 64)
            report, name = self._report.address, len(self._names) - 1
            recorder.dispatch(GUARD_KERNEL, groups, address, report, words, _GUARD_WORD, name)

    def check_guards(self) -> None:
        """Compare the guards of all live storages and raise for any that broke since the last call. Waits."""
        for storage in list(self._live):
            self._compare(storage)
        (broken,) = struct.unpack("<I", self._engine.recorder.read(self._report, 0, 4))
        if broken:
            self._engine.recorder.write(self._report, 0, bytes(4))
            name = self._names[broken]
            raise VkfoldError(
                f"guard words of a tensor made by {name!r} were overwritten: a kernel wrote outside its tensor"
            )

    # -- ops ---------------------------------------------------------------------------------------------------------
    def before_op(self, op: Op, made: Sequence[Tensor]) -> None:
        """Call the tensors it made after the op; remember what memory holds (strictest level only)."""
        for tensor in made:
            tensor.storage.tag = op.name
        if self._watch_changes:
            self._before = self._snapshot()

    def after_op(self, op: Op, inputs: Sequence[Tensor | None], made: Sequence[Tensor], settings: Any) -> None:
        """Raise VkfoldError when bytes changed that the op did not declare as written."""
        if not self._watch_changes:
            return
        declared = [inputs[i] for i in op.written(len(inputs), **settings) if inputs[i] is not None] + list(made)
        after = self._snapshot()
        for key, old in self._before.items():
            changed = np.frombuffer(old, np.uint32) != np.frombuffer(after[key], np.uint32)
            for tensor in declared:
                assert tensor is not None
                start = tensor.address - key
                if 0 <= start < len(old):
                    changed[start // 4 : -(-(start + tensor.nbytes) // 4)] = False
            if changed.any():
                offset = 4 * int(np.flatnonzero(changed)[0])
                raise VkfoldError(
                    f"op {op.name!r} changed {4 * int(changed.sum())} bytes it did not declare, "
                    f"the first at {key + offset:#x} (byte {offset} of its block)"
                )
        self._before = {}

    def _snapshot(self) -> dict[int, bytearray]:
        """Contents of every pool block, by address."""
        recorder = self._engine.recorder
        blocks = [block.handle for pool in self._engine.pools.values() for block in pool.blocks()]
        return {buffer.address: recorder.read(buffer, 0, buffer.nbytes) for buffer in blocks}

    def close(self) -> None:
        """Give back the report buffer."""
        self._engine.device.destroy_buffer(self._report)
