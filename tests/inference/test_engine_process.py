# SPDX-License-Identifier: Apache-2.0
"""What the process around an engine publishes of it."""

from __future__ import annotations

from mooncake.inference.blocks import BlockPool
from mooncake.inference.engine_process import _as_kv_event
from mooncake.kv_events import BlockRemoved
from mooncake.prefix import BlockHash


def test_a_removal_is_published_with_its_own_reason() -> None:
    """After a flip of weights nothing was evicted: a conductor would name the wrong cause of a miss."""
    pool: BlockPool[BlockHash] = BlockPool(3, 4)
    hashes = [BlockHash(bytes([number]) * 32) for number in range(3)]
    for block_hash in hashes:  # the third needs the place of the first
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.publish(blocks, [block_hash], BlockHash(b""))
        pool.free(blocks)
    pool.clear()
    removed = [
        event
        for event in (_as_kv_event(one, 4) for one in pool.drain_events())
        if isinstance(event, BlockRemoved)
    ]
    assert [(event.block_hashes, event.reason) for event in removed] == [
        ([hashes[0]], "evicted: least recently used"),
        ([hashes[2], hashes[1]], "cleared: weights replaced"),
    ]
