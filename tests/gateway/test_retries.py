# SPDX-License-Identifier: Apache-2.0
"""Parts of one answer wait for one another, never for themselves, and for busy workers a limited time."""

from __future__ import annotations

import asyncio

import pytest

from mooncake import clock
from mooncake.conductor.messages import Decision, Finished, Place, Prediction, Prefilled, Refuse
from mooncake.errors import Refusal
from mooncake.gateway import retries
from mooncake.gateway.retries import AnswerConcurrency, Attempts, PlacedRequest
from mooncake.gateway.worker_client import WorkerBusy
from mooncake.http.openai import ApiError
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


class Full:
    """A conductor that has no instance which is not excluded; it notes how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def place(self, event: Place) -> Refuse:
        self.num_asked += 1
        return Refuse(event.request_id, Refusal("no_instance", "none"), 0.01)


async def test_busy_workers_are_waited_for_from_the_first_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    conductor, attempts = Full(), Attempts()
    request = PlacedRequest(conductor, Place("r", 1))  # type: ignore[arg-type]

    async def refusal(timeout_s: float) -> str | int | None:
        with pytest.raises(ApiError) as caught:
            await request._place("r", attempts, False, timeout_s)
        return caught.value.detail.code

    def busy() -> None:
        error = ApiError(429, "full", code="queue_full")
        request._note(WorkerBusy("a", error), "r", attempts, "decode")

    busy()
    assert await refusal(0.0) == "queue_full"
    assert conductor.num_asked == 1, "a new request does not wait"
    now += 30.0
    busy()  # as it is tried again and again
    assert await refusal(30.0) == "queue_full"
    assert conductor.num_asked == 2
    attempts.found_room()
    waiting = asyncio.create_task(refusal(30.0))
    await until(lambda: conductor.num_asked >= 4)
    assert not waiting.done(), "what was full before the last call had begun does not count"
    now += 30.0
    assert await waiting == "no_instance"


async def test_a_request_with_an_impossible_number_is_not_tried_again() -> None:
    class Strict:
        async def place(self, event: Place) -> Refuse:
            return Refuse(event.request_id, Refusal("invalid_argument", "num_tokens is -1"), 0.0)

    attempts = Attempts(num_failures=1)
    request = PlacedRequest(Strict(), Place("r", -1))  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        await request._place("r", attempts, True, 1e9)
    assert (caught.value.status, caught.value.detail.code) == (400, "invalid_argument")
    assert caught.value.retry_after_s is None


async def test_a_first_token_that_is_not_seen_is_expected_of_the_latest_placement_only() -> None:
    posted: list[Prefilled | Finished] = []

    class Conductor:
        async def place(self, event: Place) -> Decision:
            return Decision("r", None, "d:1", "", prediction=Prediction(ttft_s=0.0))

        def post(self, event: Prefilled | Finished) -> None:
            posted.append(event)

    async def turns() -> None:
        for _ in range(4):
            await asyncio.sleep(0)

    request = PlacedRequest(Conductor(), Place("r", 1))  # type: ignore[arg-type]
    decision = await request._place("r", Attempts(), True, 0.0)
    request._expect_first_token(decision)
    await request._place("r", Attempts(), True, 0.0)
    await turns()
    assert not posted
    request._expect_first_token(decision)
    await until(lambda: posted == [Prefilled("r", has_begun=True, is_assumed=True)])
    request._expect_first_token(decision)
    request.end(Finished("r"))
    await turns()
    assert posted[1:] == [Finished("r")]
