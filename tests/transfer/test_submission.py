"""When a batch is planned, and when there is nothing to plan."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from mooncake.transfer import Op, Status, TransferEngine
from tests.transfer.mute import PATIENCE_S, Mute


def test_memory_that_one_path_alone_carries_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, here = np.zeros(100, dtype=np.uint8), np.arange(100, dtype=np.uint8)
    planned: list[Any] = []
    with TransferEngine() as far, TransferEngine() as near:
        plan = near._move

        def note(*arguments: Any) -> Any:
            planned.append(arguments)
            return plan(*arguments)

        monkeypatch.setattr(near, "_move", note)
        lent, ours, pool = far.register(plain), near.register(here), far.allocate(4096)
        segment = near.open(far.describe())
        for there in (lent.address, pool.address):
            done = near.run(Op.WRITE, segment, [ours.address], [there], [100])
            assert (done.status, done.num_bytes) == (Status.OK, 100)
        assert not planned and (plain == here).all() and bytes(pool.view()[:100]) == here.tobytes()
        both = near.run(Op.WRITE, segment, [ours.address] * 2, [lent.address, pool.address], [100] * 2)
        assert both.status == Status.OK and len(planned) == 1
        assert near.run(Op.WRITE, segment, [ours.address], [1], [1]).status == Status.ACCESS_DENIED
        assert near.run(Op.WRITE, segment, [], [], []).status == Status.OK
        far.close()
        assert near.run(Op.WRITE, segment, [ours.address], [lent.address], [100]).status == Status.PEER_LOST


async def test_a_coroutine_that_meets_a_mute_peer_does_not_hold_its_loop() -> None:
    with TransferEngine() as far, TransferEngine() as near, Mute() as mute:
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = near.open(mute.instead_of(far.describe()))
        columns = [here.address], [pool.address], [4096]
        moving = asyncio.ensure_future(near.transfer(Op.READ, segment, *columns, timeout_s=PATIENCE_S))
        await mute.met()
        assert mute.is_waited_for() and not moving.done()
        mute.close()
        assert (await moving).status == Status.PEER_LOST


async def test_a_coroutine_gives_a_mute_peer_no_more_than_its_time() -> None:
    with TransferEngine() as far, TransferEngine() as near, Mute() as mute:
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = near.open(mute.instead_of(far.describe()))
        done = await near.transfer(Op.READ, segment, [here.address], [pool.address], [4096], timeout_s=0.01)
        assert done.status == Status.TIMED_OUT and not segment.is_connected


def test_a_peer_is_met_again_when_it_has_other_memory() -> None:
    with TransferEngine() as far, TransferEngine() as near:
        lent = far.register(np.zeros(100, dtype=np.uint8))
        segment = near.open(far.describe())
        assert segment.connect(PATIENCE_S), "over tcp: there is nothing to share"
        far.allocate(4096)
        far.unregister(lent)
        assert (near.open(far.describe()), segment.is_connected) == (segment, False)
        assert segment.connect(PATIENCE_S)
