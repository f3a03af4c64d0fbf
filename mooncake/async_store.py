# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.async_store``, by its name; see ``compat/store/async_store.py``."""

from mooncake.compat.store.async_store import MooncakeDistributedStoreAsync

__all__ = ["MooncakeDistributedStoreAsync"]
