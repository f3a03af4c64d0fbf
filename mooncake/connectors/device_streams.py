# SPDX-License-Identifier: Apache-2.0
"""A device's streams and events, as an interface: which copies run after which work.

A device executes what it is given later, in the order of a stream; work of different streams has no order
but that of events. Copies between an engine's KV memory and host memory run on streams of their own, so that
the engine goes on computing::

    engine's stream    … layer 0 ─▶ layer 1 ───────▶ …        computed(): an event after layer 0
    stream of saves         └─after─▶ copy layer 0 ─▶ event    the host may read the copy

``cuda_device.py`` implements it with torch; tests have a double whose work is done as late as events allow
(``tests/connectors/late_device.py``). This module does without torch, as engines may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mooncake.connectors.memory import DeviceEvent

if TYPE_CHECKING:
    from torch import Tensor

POLL_S = 0.0005
"""Interval at which an event loop looks whether a copy has ended: a wait for it would block the loop."""


class DeviceStream(Protocol):
    """A queue of copies. May be called from any thread."""

    def run(self, work: Callable[[], None], after: DeviceEvent | None) -> DeviceEvent:
        """Enqueue the torch operations of ``work`` behind ``after`` and all earlier work of the stream.

        No operation of another ``work`` comes between them, whatever thread it is from.
        ``work`` may be called at once or later, on any thread. The event that is returned is the end of its
        operations.
        """
        ...


class KvDevice(Protocol):
    """A device on which an engine computes."""

    def new_stream(self) -> DeviceStream: ...

    def computed(self) -> DeviceEvent:
        """The end of all work that the calling thread has enqueued in its current stream."""
        ...

    def compute_after(self, event: DeviceEvent) -> None:
        """Let work that the calling thread enqueues in its current stream from now on wait for ``event``."""
        ...

    def host_bytes(self, size_bytes: int) -> Tensor:
        """New host memory that the device copies from and to without the processor: u8 [size_bytes], zeroed.

        Raises:
            OutOfMemory: the system does not lock so much.
        """
        ...

    def scratch_bytes(self, size_bytes: int) -> Tensor:
        """New memory of the device: u8 [size_bytes]."""
        ...

    def to_device(self, numbers: Sequence[int]) -> Tensor:
        """The numbers in memory of the device: int64 [n]. Only within the work of a stream."""
        ...


async def reached(event: DeviceEvent | None) -> None:
    """Wait for ``event`` without blocking the loop."""
    while event is not None and not event.query():  # noqa: ASYNC110 - it can't be awaited
        await asyncio.sleep(POLL_S)
