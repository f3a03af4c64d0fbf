# SPDX-License-Identifier: Apache-2.0
"""Parts of one answer wait for one another, and never for themselves."""

from __future__ import annotations

import asyncio

import pytest

from mooncake import clock
from mooncake.gateway import retries
from mooncake.gateway.retries import AnswerConcurrency, Attempts
from tests.waiting import until


async def test_the_limit_grows_with_each_part_that_ends_up_to_the_most() -> None:
    concurrency = AnswerConcurrency(3)
    tasks = [asyncio.create_task(concurrency.enter()) for _ in range(6)]
    await until(lambda: sum(task.done() for task in tasks) == 3)
    concurrency.leave()
    await until(lambda: sum(task.done() for task in tasks) == 4)
    concurrency.leave()
    concurrency.leave()
    await asyncio.gather(*tasks)


async def test_a_part_without_room_waits_for_another_one() -> None:
    concurrency = AnswerConcurrency(8)
    for _ in range(2):
        await concurrency.enter()
    waiting = asyncio.create_task(concurrency.wait_for_room(Attempts()))
    further = asyncio.create_task(concurrency.enter())
    await asyncio.sleep(0)
    assert not waiting.done() and not further.done(), "as many as instances have taken"
    concurrency.leave()
    assert await waiting is True
    await further


async def test_a_part_that_is_alone_waits_only_when_another_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retries, "POLL_S", 0.0)
    concurrency, attempts = AnswerConcurrency(), Attempts()
    await concurrency.enter()
    assert await concurrency.wait_for_room(attempts) is False
    concurrency.leave()
    await concurrency.enter()
    assert await concurrency.wait_for_room(attempts) is True
    attempts.full_since = clock.monotonic() - retries.ROOM_TIMEOUT_S
    assert await concurrency.wait_for_room(attempts) is False, "others take all the room"
