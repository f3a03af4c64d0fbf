# SPDX-License-Identifier: Apache-2.0
"""The existing package's asyncio store: each ``async_<call>`` runs ``<call>`` in the loop's thread pool.

New programs are better served by ``mooncake.store.AsyncStore``, which needs no thread.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from mooncake.compat.store.store import MooncakeDistributedStore

_PREFIX = "async_"


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """Store with ``await store.async_get(key)`` and the like; it also has the blocking calls."""

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        call = getattr(type(self), name.removeprefix(_PREFIX), None) if name.startswith(_PREFIX) else None
        if not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(call)
        async def in_a_thread(*args: Any, **kwargs: Any) -> Any:
            work = functools.partial(call, self, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(None, work)

        return in_a_thread

    def __dir__(self) -> list[str]:
        names = list(super().__dir__())
        return names + [_PREFIX + name for name in names if not name.startswith("_")]
