"""Ctrl-C at every instruction of the pool: what was under way has happened or not, and the pool goes on."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
from test_memory_pool import IntervalOracle, check_against_oracle

from vkfold.memory_pool import BlockPool, NullBlockSource, PoolRange, block, block_pool

FILES = {block.__file__, block_pool.__file__}
HANDED_OUT = 12  # last instructions of `allocate` at which the range is made and the caller does not have it


def interrupted(call: Any, number: int) -> tuple[Any, bool]:
    """What a call gives, and whether a KeyboardInterrupt before its n-th instruction broke it off."""
    left = number

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call(), False
    except KeyboardInterrupt:
        return None, True
    finally:
        sys.settrace(before)


def prepared(seed: int) -> tuple[BlockPool, IntervalOracle, list[PoolRange], random.Random]:
    """A pool with holes in several blocks."""
    rng = random.Random(seed)
    pool, oracle = BlockPool(NullBlockSource(), block_bytes=4096, alignment=16), IntervalOracle(4096, 16)
    ranges = [pool.allocate(size) for size in (rng.choice((16, 80, 256, 700)) for _ in range(60))]
    for range_ in ranges:
        oracle.allocate(range_.nbytes)
    for range_ in rng.sample(ranges, 30):
        free(pool, oracle, ranges, range_)
    check_against_oracle(pool, oracle)
    return pool, oracle, ranges, rng


def free(pool: BlockPool, oracle: IntervalOracle, ranges: list[PoolRange], range_: PoolRange) -> None:
    pool.free(range_)
    oracle.free(range_.block.sequence, range_.offset, range_.nbytes)
    ranges.remove(range_)


def goes_on(pool: BlockPool, oracle: IntervalOracle, ranges: list[PoolRange], rng: random.Random) -> None:
    """Statistics, placement and what comes next are those of a pool that was never interrupted."""
    check_against_oracle(pool, oracle)
    signature = 0
    for sequence, (_, live) in oracle.blocks.items():
        for start, end in live:
            signature ^= hash((sequence, start, end - start))
    assert pool.placement == (signature, sum(len(live) for _, live in oracle.blocks.values()), pool.stats().live_bytes)
    for _ in range(20):
        if ranges and rng.random() < 0.5:
            free(pool, oracle, ranges, rng.choice(ranges))
        else:
            size = rng.choice((16, 80, 256, 700))
            ranges.append(pool.allocate(size))
            made = ranges[-1]
            assert (made.block.sequence, made.offset, made.nbytes) == oracle.allocate(size)
    check_against_oracle(pool, oracle)


@pytest.mark.deviceless
@pytest.mark.parametrize("look", ["stats", "allocate", "free"])
@pytest.mark.parametrize("size", [16, 256, 2000])
def test_an_allocation_is_made_or_not(size: int, look: str) -> None:
    number, broken, handed_out = 0, True, 0
    while broken:
        number += 1
        pool, oracle, ranges, rng = prepared(number % 3)
        made, broken = interrupted(lambda: pool.allocate(size), number)  # noqa: B023
        num_ranges = sum(len(live) for _, live in oracle.blocks.values())
        if broken and sum(len(each.live) for each in pool.blocks()) > num_ranges:
            handed_out += 1
            oracle.allocate(size)
        elif not broken:
            assert oracle.allocate(size) == (made.block.sequence, made.offset, made.nbytes)
            ranges.append(made)
        elif len(pool.blocks()) > len(oracle.blocks):  # its block is there
            oracle.free(*oracle.allocate(size))
        if look == "free":
            free(pool, oracle, ranges, rng.choice(ranges))
        elif look == "allocate":
            ranges.append(pool.allocate(80))
            oracle.allocate(80)
        goes_on(pool, oracle, ranges, rng)
    assert number > 60 and handed_out <= HANDED_OUT


@pytest.mark.deviceless
@pytest.mark.parametrize("seed", range(3))
def test_a_range_is_free_or_not(seed: int) -> None:
    number, broken = 0, True
    while broken:
        number += 1
        pool, oracle, ranges, rng = prepared(seed)
        chosen = rng.choice(ranges)
        _, broken = interrupted(lambda: pool.free(chosen), number)  # noqa: B023
        if chosen.live:
            goes_on(pool, oracle, ranges, rng)
            if chosen in ranges:
                free(pool, oracle, ranges, chosen)
        else:
            oracle.free(chosen.block.sequence, chosen.offset, chosen.nbytes)
            ranges.remove(chosen)
            with pytest.raises(ValueError, match="double free"):
                pool.free(chosen)
        goes_on(pool, oracle, ranges, rng)
    assert number > 60


@pytest.mark.deviceless
def test_mending_may_be_broken_off_too() -> None:
    number, broken = 0, True
    while broken:
        number += 1
        pool, oracle, ranges, rng = prepared(1)
        assert interrupted(lambda: pool.allocate(80), 60)[1]  # noqa: B023
        _, broken = interrupted(pool.stats, number)
        goes_on(pool, oracle, ranges, rng)
    assert number > 100
