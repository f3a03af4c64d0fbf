"""Who waits for a transfer on a loop waits for its end, however often that wait is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from mooncake.transfer.loop import wait_until_done
from mooncake.transfer.transports import Completion


async def test_a_cancelled_wait_ends_when_the_transfer_has() -> None:
    transfer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(wait_until_done(transfer))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
    assert not waiting.done(), "its memory is in use"
    transfer.set_result(Completion(1))
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_completion_is_the_result() -> None:
    transfer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(wait_until_done(transfer))
    transfer.set_result(Completion(7))
    assert (await waiting).token == 7
