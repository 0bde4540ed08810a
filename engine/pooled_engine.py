"""What the Vulkan and Plan engines share: every tensor in a block pool, and the same order of allocations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..memory_pool import BlockPool, PoolExhaustedError, PoolRange, PoolStats
from .allocation_ledger import AllocationLedger
from .compute_engine import ComputeEngine, Rule
from .host_copy import HostCopy
from .host_values import checked_spec
from .op import Op
from .tensor import Storage, Tensor, TensorSpec

STEP, PARAMETER, HOST = "step", "parameter", "host"


class PooledEngine(ComputeEngine):
    """Allocates outputs and temporaries of ops from two pools: parameters and moments, and what one step needs.

    Offloaded tensors lie in a third pool, of host memory, whose bytes are never counted with the others'.
    Subclasses say where blocks come from and what launching means.
    """

    def __init__(self, source: Any, host_source: Any, *, block_bytes: int) -> None:
        super().__init__()
        self.pools = {
            STEP: BlockPool(source, block_bytes=block_bytes, name=STEP),
            PARAMETER: BlockPool(source, block_bytes=block_bytes, name=PARAMETER),
        }
        self.host_pool = BlockPool(host_source, block_bytes=block_bytes, name=HOST)
        self._pool = self.pools[STEP]
        self._retain_last_step = True
        self.guard_bytes = 0  # around every tensor; VKFOLD_DEBUG
        self.ledger: AllocationLedger | None = None  # hears of every op while one is attached

    # -- allocation --------------------------------------------------------------------------------------------------
    def _allocate(self, spec: TensorSpec, nbytes: int = -1) -> Tensor:
        """nbytes: the spec's, where it is known."""
        if nbytes < 0:
            nbytes = spec.nbytes
        guard = self.guard_bytes
        pool = self._pool
        try:
            range_ = pool.allocate(nbytes + 2 * guard)
        except PoolExhaustedError:
            # Idle blocks of the other pool, and blocks waiting for a fence, may be what is missing.
            self._recover_memory()
            range_ = pool.allocate(nbytes + 2 * guard)
        if self.ledger is not None:
            self.ledger.note_requested(pool.name, range_.block.sequence, range_.offset, range_.requested)
        storage = Storage((pool, range_), nbytes, self._address(range_) + guard, self._give_back)
        if guard:
            self._guard(storage)
        return Tensor(self, spec, storage)

    def _guard(self, storage: Storage) -> None:
        """Called for each fresh storage when guard_bytes is set."""

    def _give_back(self, storage: Storage) -> None:
        if not self.closed:
            self._return(storage, self._free)

    def _free(self, storage: Storage) -> None:
        pool, range_ = storage.handle
        pool.free(range_)

    def _recover_memory(self) -> None:
        for pool in (*self.pools.values(), self.host_pool):
            pool.release_idle_blocks(keep_retained=False)

    @abstractmethod
    def _address(self, range_: PoolRange) -> int:
        """Device address of a range; 0 where there is no device."""

    @abstractmethod
    def _launch(self, op: Op, rule: Rule, inputs: Sequence[Tensor | None], made: list[Tensor], settings: Any) -> None:
        """Record one op: `made` holds its outputs, then its temporaries."""

    def execute(self, op: Op, inputs: tuple[Tensor | None, ...], **settings: Any) -> tuple[Tensor, ...]:
        """Allocate the outputs and record the op."""
        rule = self.rule_of(op, inputs, settings)
        ledger = self.ledger
        if ledger is not None:
            ledger.begin_op(op, inputs, rule)
        allocate = self._allocate
        made = [allocate(spec, nbytes) for spec, nbytes in rule.made]
        outputs = tuple(made)
        if rule.scratch:
            made += [allocate(spec) for spec in rule.scratch]
        if ledger is not None:
            ledger.end_op(list(outputs))
        self._launch(op, rule, inputs, made, settings)
        return outputs

    def empty(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """A tensor with undefined contents."""
        self.check_open()
        return self._allocate(checked_spec(shape, dtype))

    @contextmanager
    def parameter_pool(self) -> Iterator[None]:
        """Tensors made inside come from the parameter pool."""
        self.check_open()
        before, self._pool = self._pool, self.pools[PARAMETER]
        try:
            yield
        finally:
            self._pool = before

    def note_kind(self, tensor: Tensor, kind: str, label: str = "") -> None:
        """Say what a tensor is for, to the ledger that is attached, if any."""
        if self.ledger is not None:
            self.ledger.label(tensor, kind, label)

    # -- host memory -------------------------------------------------------------------------------------------------
    def _copy_to_host(self, tensor: Tensor) -> HostCopy:
        try:
            range_ = self.host_pool.allocate(tensor.nbytes)
        except PoolExhaustedError:  # idle blocks may wait for a fence
            self.host_pool.release_idle_blocks(keep_retained=False)
            self._recover_memory()
            range_ = self.host_pool.allocate(tensor.nbytes)
        storage = Storage(range_, tensor.nbytes, 0, self._give_back_host)
        self._record_offload(tensor, range_)
        return HostCopy(self, tensor.spec, storage)

    def _give_back_host(self, storage: Storage) -> None:
        if not self.closed:
            self._return(storage, self._free_host)

    def _free_host(self, storage: Storage) -> None:
        self.host_pool.free(storage.handle)

    def _copy_from_host(self, copy: HostCopy) -> Tensor:
        tensor = self._allocate(copy.spec)
        self._record_restore(copy.storage.handle, tensor)
        return tensor

    def _record_offload(self, tensor: Tensor, range_: PoolRange) -> None:
        """Record the copy of a tensor into a range of the host pool."""

    def _record_restore(self, range_: PoolRange, tensor: Tensor) -> None:
        """Record the copy of a range of the host pool into a tensor."""

    # -- statistics --------------------------------------------------------------------------------------------------
    def pool_stats(self) -> dict[str, PoolStats]:
        """Statistics of the step pool and the parameter pool, and of the host pool once something was offloaded."""
        self._settle_frees()
        stats = {name: pool.stats() for name, pool in self.pools.items()}
        if self.host_pool.total_blocks:
            stats[HOST] = self.host_pool.stats()
        return stats

    def reset_peak(self) -> None:
        """Start the peaks anew from what is live."""
        self._settle_frees()
        for pool in (*self.pools.values(), self.host_pool):
            pool.reset_peak()

    def set_retain_free_bytes(self, nbytes: int | None) -> None:
        """Idle bytes of the step pool that `release_idle_pool_blocks` keeps, against thrash.

        None, the default: the bytes of the blocks that the last finished step used. Raises ValueError below 0.
        """
        self.pools[STEP].set_retain_free_bytes(nbytes or 0)
        self._retain_last_step = nbytes is None

    def start_step(self) -> None:
        """A step begins: what was allocated before is no part of it."""
        for pool in (*self.pools.values(), self.host_pool):
            pool.start_step()

    def end_step(self) -> None:
        """A step is over: from now on keep the blocks that it used, or as `set_retain_free_bytes` said."""
        for pool in (self.pools[STEP], self.host_pool):
            used_bytes = pool.finish_step()
            if self._retain_last_step:
                pool.set_retain_free_bytes(used_bytes)

    def finish_step(self) -> int:
        """Keep the blocks that the step used (or as `set_retain_free_bytes` said), return other idle ones."""
        self.end_step()
        return self.release_idle_pool_blocks()

    def release_idle_pool_blocks(self) -> int:
        """Return wholly idle blocks to the driver, except the retained bytes. Returns the bytes given back."""
        self.check_open()
        return sum(pool.release_idle_blocks() for pool in (*self.pools.values(), self.host_pool))
