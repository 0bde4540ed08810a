"""The block pool against an oracle of live intervals, and each promise of its own."""

from __future__ import annotations

import gc
import itertools
import pickle
import random
import runpy
import sys
import time
from bisect import bisect_left
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vkfold.memory_pool import (
    BlockPool,
    DirectLedger,
    NullBlockSource,
    OutOfBlockMemory,
    PoolExhaustedError,
    PoolRange,
    fitted_block_bytes,
    pool_debug_stats,
)

MIB = 2**20


class LimitedSource(NullBlockSource):
    """A source with a limit, which records what it gave and took back."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.sizes: list[int] = []

    def allocate(self, nbytes: int) -> int:
        if self.reserved_bytes + nbytes > self.limit:
            raise OutOfBlockMemory(f"the source has {self.limit - self.reserved_bytes} bytes left")
        self.sizes.append(nbytes)
        return super().allocate(nbytes)


class IntervalOracle:
    """First fit in the plainest way: for each block the sorted live intervals; the gaps between them are the holes."""

    def __init__(self, block_bytes: int, alignment: int) -> None:
        self.block_bytes = block_bytes
        self.alignment = alignment
        self.sequence = 0
        self.blocks: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # in order of sequence number

    def gaps(self, sequence: int) -> list[tuple[int, int]]:
        nbytes, live = self.blocks[sequence]
        position, found = 0, []
        for start, end in [*live, (nbytes, nbytes)]:
            if start > position:
                found.append((position, start - position))
            position = end
        return found

    def allocate(self, nbytes: int) -> tuple[int, int, int]:
        size = max(1, -(-nbytes // self.alignment)) * self.alignment
        for sequence, (total, live) in self.blocks.items():
            position = 0
            for index, (start, end) in enumerate(live):
                if start - position >= size:
                    live.insert(index, (position, position + size))
                    return sequence, position, size
                position = end
            if total - position >= size:
                live.append((position, position + size))
                return sequence, position, size
        total = max(size, self.block_bytes)
        if 16 * size >= self.block_bytes:
            total -= total % size  # whole multiples of the request fill it
        self.blocks[self.sequence] = (total, [(0, size)])
        self.sequence += 1
        return self.sequence - 1, 0, size

    def free(self, sequence: int, start: int, size: int) -> None:
        live = self.blocks[sequence][1]
        index = bisect_left(live, (start, 0))
        assert live[index] == (start, start + size)
        del live[index]

    def release(self) -> int:
        idle = [sequence for sequence, (_, live) in self.blocks.items() if not live]
        return sum(self.blocks.pop(sequence)[0] for sequence in idle)


def check_against_oracle(pool: BlockPool, oracle: IntervalOracle) -> None:
    """Everything the pool says of itself, worked out again from the oracle's intervals."""
    detail = pool_debug_stats(pool)
    assert [(b.sequence, b.nbytes) for b in detail.block_details] == [(s, b[0]) for s, b in oracle.blocks.items()]
    for block in detail.block_details:
        assert list(block.holes) == oracle.gaps(block.sequence)
        assert block.largest_hole_bytes == max((size for _, size in block.holes), default=0)
        assert block.live_bytes + sum(size for _, size in block.holes) == block.nbytes
        assert block.num_ranges == len(oracle.blocks[block.sequence][1])
    assert detail.allocated_bytes == sum(nbytes for nbytes, _ in oracle.blocks.values())
    assert detail.live_bytes == sum(end - start for _, live in oracle.blocks.values() for start, end in live)
    assert detail.largest_hole_bytes == max((b.largest_hole_bytes for b in detail.block_details), default=0)


@pytest.mark.parametrize(
    ("operations", "block_bytes", "alignment", "largest", "live"),
    [
        (500_000, MIB, 256, 300_000, 40),  # whole pages come and go; every size crosses page borders
        (200_000, 256 * 1024, 256, 400_000, 25),  # many exact blocks
        (200_000, 4 * MIB, 256, 4_000, 120),  # many holes a page
        (100_000, 4096, 1, 600, 40),  # no rounding at all
    ],
)
def test_a_million_random_operations(
    operations: int, block_bytes: int, alignment: int, largest: int, live: int
) -> None:
    rng = random.Random(operations + alignment)
    pool = BlockPool(NullBlockSource(), block_bytes=block_bytes, alignment=alignment)
    oracle = IntervalOracle(pool.block_bytes, alignment)
    held: list[PoolRange] = []
    target = live
    peak = 0
    for count in range(operations):
        if rng.random() * 2 * target < len(held):
            index = int(rng.random() * len(held))
            held[index], held[-1] = held[-1], held[index]
            range_ = held.pop()
            oracle.free(range_.block.sequence, range_.offset, range_.nbytes)
            pool.free(range_)
        else:
            nbytes = int(largest ** rng.random()) if rng.random() < 0.7 else int(rng.random() * largest)
            range_ = pool.allocate(nbytes)
            place = oracle.allocate(nbytes)
            assert (range_.block.sequence, range_.offset, range_.nbytes) == place
            assert range_.requested == nbytes
            held.append(range_)
            peak = max(peak, pool.live_bytes)
        if count % 1000 == 0:
            target = rng.choice((1, live // 4, live, live))  # the pool empties and fills
            assert pool.release_idle_blocks() == oracle.release()
        if count % 5000 == 0:
            check_against_oracle(pool, oracle)
    assert pool.stats().peak_live_bytes == peak
    for range_ in held:
        oracle.free(range_.block.sequence, range_.offset, range_.nbytes)
        pool.free(range_)
    check_against_oracle(pool, oracle)
    assert pool.release_idle_blocks() == oracle.release()
    assert pool.stats().allocated_bytes == 0
    assert isinstance(pool.source, NullBlockSource) and pool.source.reserved_bytes == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(0, 200_000)),
            st.tuples(st.just("free"), st.integers(0, 10_000)),
            st.tuples(st.just("release"), st.integers(0, 300_000)),
        ),
        max_size=80,
    )
)
def test_properties(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(NullBlockSource(), block_bytes=128 * 1024)
    held: list[PoolRange] = []
    for kind, number in operations:
        if kind == "allocate":
            held.append(pool.allocate(number))
        elif kind == "free" and held:
            pool.free(held.pop(number % len(held)))
        elif kind == "release":
            pool.set_retain_free_bytes(number)
            idle = pool.stats().idle_bytes
            released = pool.release_idle_blocks()
            assert idle - released >= min(idle, number)
        places = sorted((r.block.sequence, r.offset, r.offset + r.nbytes) for r in held)
        for (block, _, end), (next_block, start, _) in itertools.pairwise(places):
            assert block != next_block or end <= start  # ranges never overlap
        detail = pool_debug_stats(pool)
        for shown in detail.block_details:
            ends = {start + size for start, size in shown.holes}
            assert not ends & {start for start, _ in shown.holes}  # neighbours are one hole
        assert detail.live_bytes == sum(r.nbytes for r in held)
        assert detail.live_bytes + detail.free_bytes == detail.allocated_bytes
        assert all(r.offset % 256 == 0 and r.nbytes % 256 == 0 and r.nbytes >= max(256, r.requested) for r in held)


def test_20000_small_tensors_cost_one_driver_allocation() -> None:
    source = LimitedSource(2**40)
    pool = BlockPool(source)
    held = [pool.allocate(1024) for _ in range(20_000)]
    assert len(source.sizes) == 1 <= -(-20_000 * 1024 // pool.block_bytes) + 1
    assert len({(r.block.sequence, r.offset) for r in held}) == 20_000


@pytest.mark.parametrize("budget", [256 * MIB, 100 * MIB, 1000 * 256])
def test_large_request_among_holes(budget: int) -> None:
    # allocate and free 0.6 of the budget, fill with small ones, free every other one, ask for 0.4
    pool = BlockPool(NullBlockSource(), name="step", budget_bytes=budget)
    pool.free(pool.allocate(budget * 6 // 10))
    reserved = pool.stats().allocated_bytes
    small = [pool.allocate(budget // 1000) for _ in range(500)]
    assert pool.stats().allocated_bytes == reserved
    for range_ in small[::2]:
        pool.free(range_)
    wanted = budget * 4 // 10
    before = pool.stats()
    try:
        assert pool.allocate(wanted).nbytes >= wanted
    except PoolExhaustedError as error:
        assert error.is_fragmented and "fragmentation" in str(error) and "exhaustion" not in str(error)
        assert error.requested == -(-wanted // 256) * 256
        assert (error.budget, error.live, error.free) == (budget, before.live_bytes, before.free_bytes)
        assert (error.largest_hole, error.fragmentation) == (before.largest_hole_bytes, before.fragmentation)
        for number in (error.requested, budget, error.live, error.free, error.largest_hole):
            assert str(number) in str(error)
        assert "--checkpoint-every 1" in str(error)


def test_exhaustion_and_fragmentation_are_told_apart() -> None:
    pool = BlockPool(NullBlockSource(), block_bytes=MIB, budget_bytes=MIB, name="p")
    quarters = [pool.allocate(MIB // 4) for _ in range(4)]
    with pytest.raises(PoolExhaustedError, match="exhaustion") as full:
        pool.allocate(MIB // 2)
    assert not full.value.is_fragmented and full.value.free == 0 and full.value.fragmentation == 0
    pool.free(quarters[0])
    pool.free(quarters[2])
    with pytest.raises(PoolExhaustedError, match="fragmentation") as holes:
        pool.allocate(MIB // 2)
    assert holes.value.is_fragmented and holes.value.free == MIB // 2
    assert holes.value.largest_hole == MIB // 4 and holes.value.fragmentation == 0.5
    again = pickle.loads(pickle.dumps(holes.value))
    assert str(again) == str(holes.value) and again.largest_hole == MIB // 4
    pool.free(quarters[1])  # the hole is whole now, and the failed calls left nothing behind
    assert pool.allocate(MIB // 2).offset == 0
    with pytest.raises(PoolExhaustedError, match="exhaustion"):
        pool.allocate(100 * MIB)


def test_blocks_shrink_before_the_pool_gives_up() -> None:
    source = LimitedSource(200 * MIB)
    pool = BlockPool(source, block_bytes=128 * MIB)
    held = [pool.allocate(20 * MIB) for _ in range(9)]
    assert source.sizes == [120 * MIB, 60 * MIB]
    with pytest.raises(PoolExhaustedError, match="the source has 20971520 bytes left"):
        pool.allocate(21 * MIB)
    assert pool.allocate(5 * MIB).block.sequence == 2
    assert source.sizes[2:] == [16 * MIB]
    assert len(held) == 9
    within = BlockPool(NullBlockSource(), block_bytes=128 * MIB, budget_bytes=130 * MIB)
    within.allocate(100 * MIB)
    assert within.allocate(28 * MIB).block.nbytes == 30 * MIB
    assert within.allocate(2 * MIB).block.sequence == 1


def test_blocks_are_filled_by_multiples_of_what_asked_for_them() -> None:
    """24 and 12 MiB tensors leave nothing empty; small requests share full blocks; sizes rounded to the alignment."""
    source = LimitedSource(2**50)
    pool = BlockPool(source, block_bytes=32 * MIB)
    for size in (24, 12, 12, 32, 33):
        pool.allocate(size * MIB)
    assert source.sizes == [24 * MIB, 24 * MIB, 32 * MIB, 33 * MIB]
    assert pool.allocate(2 * MIB - 256).block.nbytes == 32 * MIB
    assert fitted_block_bytes(2 * MIB, 32 * MIB) == 32 * MIB
    assert fitted_block_bytes(3 * MIB, 32 * MIB) == 30 * MIB
    assert fitted_block_bytes(256, 32 * MIB) == 32 * MIB


def test_larger_than_a_block_gets_one_of_its_exact_size() -> None:
    source = LimitedSource(2**50)
    pool = BlockPool(source, block_bytes=MIB)
    range_ = pool.allocate(154_389_504 + 1)
    assert source.sizes == [154_389_504 + 256] and range_.nbytes == 154_389_504 + 256
    pool.free(range_)
    assert pool.allocate(10).block is range_.block  # a free large block serves small requests too
    huge = pool.allocate(80 * 2**30)
    assert huge.block.nbytes == 80 * 2**30


def test_zero_bytes_get_a_place_of_their_own() -> None:
    pool = BlockPool(NullBlockSource())
    a, b = pool.allocate(0), pool.allocate(0)
    assert (a.nbytes, b.nbytes, a.offset, b.offset) == (256, 256, 0, 256)


def test_release_keeps_what_is_retained() -> None:
    source = LimitedSource(2**40)
    pool = BlockPool(source, block_bytes=MIB)
    held = [pool.allocate(MIB) for _ in range(6)]
    for range_ in (held[0], held[2], held[3], held[5]):
        pool.free(range_)
    pool.set_retain_free_bytes(MIB + 1)
    assert pool.stats().idle_bytes == 4 * MIB
    assert pool.release_idle_blocks() == 2 * MIB  # two blocks are needed to keep 1 MiB and a byte
    assert [b.sequence for b in pool.blocks()] == [0, 1, 2, 4] and pool.generation == 1
    assert pool.release_idle_blocks() == 0 and pool.generation == 1  # nothing more to give, nothing changes
    assert pool.release_idle_blocks(keep_retained=False) == 2 * MIB and pool.generation == 2
    assert pool.stats().allocated_bytes == source.reserved_bytes == 2 * MIB
    assert pool.allocate(MIB).block.sequence == 6  # sequence numbers are never used twice
    pool.free(held[4])
    assert pool.allocate(100).block.sequence == 4
    with pytest.raises(ValueError, match="negative"):
        pool.set_retain_free_bytes(-1)


def test_retained_blocks_stop_thrash() -> None:
    source = LimitedSource(2**40)
    pool = BlockPool(source, block_bytes=MIB)
    for step in range(10):
        held = [pool.allocate(400_000) for _ in range(7)]
        for range_ in held:
            pool.free(range_)
        if step == 0:
            pool.set_retain_free_bytes(pool.stats().peak_reserved_bytes)
        pool.release_idle_blocks()
    assert source.total_blocks == 4 and pool.generation == 0


def test_finished_step_keeps_its_blocks() -> None:
    """The blocks a step used stay, those of work between two steps go, and a smaller step gives back the rest."""
    source = LimitedSource(2**40)
    pool = BlockPool(source, block_bytes=MIB)

    def use(*sizes: int) -> None:
        for range_ in [pool.allocate(size) for size in sizes]:
            pool.free(range_)

    def finish() -> int:
        used_bytes = pool.finish_step()
        pool.set_retain_free_bytes(used_bytes)
        pool.release_idle_blocks()
        return used_bytes

    for _ in range(3):
        use(MIB, 3 * MIB, MIB)
        assert finish() == 5 * MIB
        assert [block.sequence for block in pool.blocks()] == [0, 1, 2] and pool.generation == 0
    use(4 * MIB)  # between two steps, and none of the step's blocks is large enough
    assert pool.release_idle_blocks() == 4 * MIB
    assert [block.sequence for block in pool.blocks()] == [0, 1, 2]
    use(3 * MIB)
    assert finish() == 3 * MIB and [block.sequence for block in pool.blocks()] == [1]
    held = pool.allocate(MIB)
    pool.finish_step()
    assert pool.finish_step() == 3 * MIB  # in use all the time, though nothing new came from it
    pool.free(held)


def test_wrong_use_is_refused() -> None:
    pool, other = BlockPool(NullBlockSource(), name="mine"), BlockPool(NullBlockSource())
    range_ = pool.allocate(100)
    foreign = other.allocate(100)
    with pytest.raises(ValueError, match="not of memory pool"):
        pool.free(foreign)
    pool.free(range_)
    with pytest.raises(ValueError, match="double free"):
        pool.free(range_)
    pool.release_idle_blocks()
    with pytest.raises(ValueError, match="double free"):
        pool.free(range_)
    with pytest.raises(ValueError, match="-1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="power of two"):
        BlockPool(NullBlockSource(), alignment=48)
    with pytest.raises(ValueError, match="block_bytes"):
        BlockPool(NullBlockSource(), block_bytes=0)
    other.free(foreign)
    assert pool.stats().live_bytes == other.stats().live_bytes == 0


def test_destroy_returns_all_blocks() -> None:
    source = NullBlockSource()
    pool = BlockPool(source)
    range_ = pool.allocate(1000)
    pool.destroy()
    pool.free(range_)  # a tensor that outlives its engine
    pool.free(range_)
    assert source.reserved_bytes == 0 and pool.stats().allocated_bytes == 0 and pool.generation == 1
    with pytest.raises(RuntimeError, match="destroyed"):
        pool.allocate(1)


def trace(seed: int, collect: str) -> list[tuple[str, int, int, int]]:
    """Allocations of objects that die by reference count, with the garbage collector off or running at random."""
    events: list[tuple[str, int, int, int]] = []
    pool = BlockPool(NullBlockSource(), block_bytes=MIB, observer=lambda *event: events.append(event))

    class Owner:
        def __init__(self, nbytes: int) -> None:
            self.range_ = pool.allocate(nbytes)

        def __del__(self) -> None:
            pool.free(self.range_)

    rng, moments = random.Random(seed), random.Random(seed + 1)
    held: list[Owner] = []
    if collect == "off":
        gc.disable()
    try:
        for _ in range(3000):
            if held and rng.random() < 0.5:
                held.pop(rng.randrange(len(held)))
            else:
                held.append(Owner(rng.randrange(100_000)))
            if rng.random() < 0.01:
                pool.release_idle_blocks()
            if collect == "random" and moments.random() < 0.02:
                gc.collect(0)
        held.clear()
    finally:
        gc.enable()
    return events


def test_traces_are_the_same_whatever_the_garbage_collector_does() -> None:
    plain = trace(3, "on")
    assert len(plain) > 3000 and {event[0] for event in plain} == {"allocate", "free", "add_block", "release_block"}
    assert trace(3, "off") == plain
    assert trace(3, "random") == plain


def test_free_in_the_middle_of_another_call_is_put_off() -> None:
    # A collection may run finalizers anywhere; an observer is such a place that a test can reach.
    pool = BlockPool(NullBlockSource(), block_bytes=MIB)
    victims = [pool.allocate(1000) for _ in range(3)]

    def observer(event: str, sequence: int, offset: int, nbytes: int) -> None:
        if victims:
            before = pool.num_ranges
            pool.free(victims.pop())
            assert pool.num_ranges == before

    pool.observer = observer
    range_ = pool.allocate(500)
    assert pool.num_ranges == 1
    pool.observer = None
    pool.free(range_)
    assert pool_debug_stats(pool).block_details[0].holes == ((0, MIB),)


def test_first_fit_stays_quick_among_many_holes() -> None:
    pool = BlockPool(NullBlockSource())
    held = [pool.allocate(256) for _ in range(400_000)]
    for range_ in held[::2]:
        pool.free(range_)
    assert pool_debug_stats(pool).block_details[0].holes[1] == (512, 256)
    start = time.perf_counter()
    for _ in range(2000):
        pool.free(pool.allocate(1000))  # fits behind all 200,000 holes only
    assert time.perf_counter() - start < 2.0  # a scan of the holes takes 10 s or more


def test_statistics() -> None:
    pool = BlockPool(NullBlockSource(), block_bytes=MIB, name="step")
    assert pool.stats().fragmentation == 0 and pool.stats().largest_hole_bytes == 0
    a, b, c = (pool.allocate(MIB // 4) for _ in range(3))
    pool.free(b)
    stats = pool.stats()
    assert (stats.blocks, stats.allocated_bytes, stats.live_bytes, stats.free_bytes) == (1, MIB, MIB // 2, MIB // 2)
    assert (stats.largest_hole_bytes, stats.fragmentation, stats.num_ranges) == (MIB // 4, 0.5, 2)
    assert (stats.peak_live_bytes, stats.peak_reserved_bytes, stats.total_allocations) == (MIB * 3 // 4, MIB, 3)
    pool.reset_peak()
    assert pool.stats().peak_live_bytes == MIB // 2
    assert str(stats).startswith(f"step{{ blocks=1 allocated_bytes={MIB} live_bytes={MIB // 2} ")
    assert stats.as_dict()["fragmentation"] == 0.5 and str(pool) == str(pool.stats())
    detail = pool_debug_stats(pool)
    assert detail.block_details[0].holes == ((MIB // 4, MIB // 4), (MIB * 3 // 4, MIB // 4))
    assert "block 0:" in str(detail) and detail.as_dict()["block_details"][0]["num_ranges"] == 2
    pool.free(a)
    pool.free(c)
    assert pool.stats().idle_bytes == MIB


def test_direct_ledger() -> None:
    ledger = DirectLedger()
    ledger.allocate(100)
    ledger.allocate(50)
    ledger.free(100)
    ledger.allocate(20)
    assert str(ledger) == "direct{ blocks=2 live_bytes=70 peak_bytes=150 total_blocks=3 total_bytes=170 }"
    ledger.reset_peak()
    assert ledger.stats().as_dict()["peak_bytes"] == 70
    with pytest.raises(ValueError, match="free of 71 bytes"):
        ledger.free(71)


def test_allocator_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "allocator.py"
    monkeypatch.setattr(sys, "argv", ["allocator.py", "--operations", "2000"])
    runpy.run_path(str(script), run_name="__main__")
    assert "training step" in capsys.readouterr().out
