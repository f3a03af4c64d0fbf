# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.buffer_pool``, by its name; see ``compat/store/buffer_pool.py``."""

from mooncake.compat.store.buffer_pool import (
    BufferLease,
    BufferLeaseView,
    BufferPool,
    RegisteredBufferLease,
    RegisteredBufferLeaseView,
    RegisteredBufferPool,
)

__all__ = [
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
]
