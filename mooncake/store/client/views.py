# SPDX-License-Identifier: Apache-2.0
"""Views of objects without a copy: a memoryview of the node's memory, under a lease that is renewed.

A view is valid only while its lease is: afterwards the master may give the space to another object. An open
view therefore renews its lease well before it ends; when renewals fail for too long, the end of the ``with``
block raises, because the data read in it can't be trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from mooncake import clock
from mooncake.errors import MooncakeError, Unavailable
from mooncake.log import get_logger
from mooncake.store.client.grants import ReadGrant
from mooncake.types import ObjectKey

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from mooncake.store.client.store import AsyncStore, Store

log = get_logger(__name__)

MIN_RENEWAL_S = 0.02


def _renewal_s(grant: ReadGrant) -> float:
    """Seconds until the next renewal: a third of the time left, so that two failures are survived."""
    return max(MIN_RENEWAL_S, (grant.expires_at - clock.monotonic()) / 3)


def _check_lease(grant: ReadGrant) -> None:
    if clock.monotonic() >= grant.expires_at:
        raise Unavailable(f"the lease on {grant.key!r} ended while it was viewed; discard what was read")


class ObjectView:
    """``with store.view(key) as data``: a read-only memoryview, or None for a miss."""

    def __init__(self, store: Store, key: ObjectKey, verify: bool) -> None:
        self._store = store
        self._key = key
        self._verify = verify
        self._grant: ReadGrant | None = None
        self._view: memoryview | None = None

    def __enter__(self) -> memoryview | None:
        self._view, self._grant = self._store.open_view(self._key, self._verify)
        if self._grant is not None:
            self._store.keep(self._grant)
        return self._view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._view is not None:
            self._view.release()
        if self._grant is not None:
            self._store.let_go(self._grant)
            if kind is None:
                _check_lease(self._grant)


class AsyncObjectView:
    """``async with store.view(key) as data``: as ``ObjectView``."""

    def __init__(self, store: AsyncStore, key: ObjectKey, verify: bool) -> None:
        self._store = store
        self._key = key
        self._verify = verify
        self._grant: ReadGrant | None = None
        self._view: memoryview | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> memoryview | None:
        self._view, self._grant = await self._store.open_view(self._key, self._verify)
        if self._grant is not None:
            self._renewing = asyncio.create_task(self._renew(self._grant))
        return self._view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._view is not None:
            self._view.release()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._grant is not None and kind is None:
            _check_lease(self._grant)

    async def _renew(self, grant: ReadGrant) -> None:
        while True:
            wait_s = _renewal_s(grant)
            await asyncio.sleep(wait_s)
            with contextlib.suppress(MooncakeError):
                await self._store.renew([grant], wait_s)


class LeaseKeeper:
    """Renews the leases of open views from one thread, which ends when no view is open."""

    def __init__(self, renew: Callable[[list[ReadGrant], float], object]) -> None:
        self._renew = renew
        self._changed = threading.Condition()
        self._grants: dict[int, ReadGrant] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        """Time of the thread's next renewal."""

    def add(self, grant: ReadGrant) -> None:
        with self._changed:
            self._grants[id(grant)] = grant
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="store-leases", daemon=True)
                self._thread.start()
            elif self._wakes_at > clock.monotonic() + _renewal_s(grant):
                # Only then: waking the thread for every short view would cost more than the view.
                self._changed.notify()

    def remove(self, grant: ReadGrant) -> None:
        with self._changed:
            self._grants.pop(id(grant), None)

    def close(self) -> None:
        with self._changed:
            self._grants.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._grants:
                    self._thread = None
                    return
                wait_s = min(map(_renewal_s, self._grants.values()))
                self._wakes_at = clock.monotonic() + wait_s
                self._changed.wait(wait_s)
                grants = list(self._grants.values())
            try:
                if grants:
                    self._renew(grants, wait_s)
            except MooncakeError as error:
                log.warning("lease_not_renewed", num_views=len(grants), reason=str(error))
