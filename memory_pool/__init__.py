"""Backs every device tensor: first-fit blocks, statistics, and a ledger for engines that allocate directly.

Plain integers: knows no Vulkan and imports nothing else of this package.
"""

from __future__ import annotations

from .block import Block
from .block_pool import DEFAULT_BLOCK_BYTES, BlockPool, PoolRange, fitted_block_bytes
from .block_source import BlockSource, NullBlockSource, OutOfBlockMemory
from .direct_ledger import DirectLedger, DirectStats
from .pool_errors import PoolExhaustedError
from .pool_stats import BlockStats, PoolDebugStats, PoolStats, pool_debug_stats

__all__ = [
    "DEFAULT_BLOCK_BYTES",
    "Block",
    "BlockPool",
    "BlockSource",
    "BlockStats",
    "DirectLedger",
    "DirectStats",
    "NullBlockSource",
    "OutOfBlockMemory",
    "PoolDebugStats",
    "PoolExhaustedError",
    "PoolRange",
    "PoolStats",
    "fitted_block_bytes",
    "pool_debug_stats",
]
