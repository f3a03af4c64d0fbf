# SPDX-License-Identifier: Apache-2.0
"""Draining decode instances: their answers move, whatever fails, and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from mooncake import metrics
from mooncake.conductor.messages import Drain
from mooncake.conductor.server import ConductorService
from mooncake.gateway import moves
from mooncake.gateway.moves import outcome_of
from mooncake.http.worker_stats import ResumedStats
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import ADMIN_KEY, Stack, Streamed, running
from tests.gateway.doubles import BLOCK_TOKENS, WorkerDouble, answer_ids, answer_text

PROMPT = list(range(20, 32))
NUM_TOKENS = 30
PAUSE_S = 0.01
KEY = {"X-API-Key": ADMIN_KEY}


def count(outcome: str) -> float:
    """Moves with this outcome so far."""
    page = metrics.page().decode()
    name = re.escape(f'mooncake_gateway_moves_total{{outcome="{outcome}"}}')
    found = re.search(rf"^{name} (\S+)$", page, re.M)
    return float(found.group(1)) if found else 0.0


@contextlib.asynccontextmanager
async def moving(tokenizer: Tokenizer, can_push: bool = True, **more: Any) -> AsyncIterator[Stack]:
    """Workers that generate slowly enough for a drain in the middle."""
    async with running(tokenizer, **more) as stack:
        for one in (*stack.prefill, *stack.decode):
            one.token_pause_s = PAUSE_S
            one.push_port = 7000 if can_push else 0
        yield stack


async def change(stack: Stack, one: WorkerDouble, verb: str) -> None:
    body = {"type": "decode", "instance": one.address}
    status, answer, _ = await stack.post(f"/instances/{verb}", body, KEY)
    assert status == 200, answer


async def begun(stack: Stack, num_tokens: int = NUM_TOKENS, **fields: Any) -> tuple[Any, WorkerDouble]:
    """An answer in progress, and the worker that decodes it."""
    task = asyncio.create_task(stack.stream(PROMPT, num_tokens, **fields))
    async with asyncio.timeout(10):
        while not (busy := [one for one in stack.decode if one.streams]):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await asyncio.sleep(4 * PAUSE_S)
    return task, busy[0]


async def drained(stack: Stack, **fields: Any) -> tuple[Streamed, WorkerDouble, WorkerDouble]:
    """An answer, its worker, which was drained in the middle of it, and the other worker."""
    answering, source = await begun(stack, **fields)
    [target] = [one for one in stack.decode if one is not source]
    await change(stack, source, "drain")
    answer: Streamed = await answering
    assert answer.token_ids() == answer_ids(PROMPT, NUM_TOKENS)
    assert answer.text() == answer_text(PROMPT, NUM_TOKENS)
    assert answer.choices()[-1]["finish_reason"] == "length"
    await stack.until(lambda health: source.address not in health)
    return answer, source, target


async def test_an_answer_moves_with_its_kv(tokenizer: Tokenizer) -> None:
    before = count("pushed")
    async with moving(tokenizer) as stack:
        answer, source, target = await drained(stack, stream_options={"include_usage": True})
        assert count("pushed") == before + 1
        assert answer.chunks[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        [call] = target.calls
        params = call["kv_transfer_params"]
        assert params["push_from"] == "127.0.0.1:7000"
        assert params["transfer_id"] not in (
            params["move_id"],
            source.calls[0]["kv_transfer_params"]["move_id"],
        )
        assert 0 < params["num_output_tokens"] < NUM_TOKENS
        assert [one["num_computed_tokens"] for one in target.resumed] == [0]
        lines = await stack.gateway.scheduling.story(source.address)
        assert any(f"from {source.address} to {target.address}: KV pushed" in line for line in lines)


async def test_the_drained_instance_leaves_before_the_answer_ends(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack, 50)
        [target] = [one for one in stack.decode if one is not source]
        target.stall_after = 49  # so that the answer can't end
        await change(stack, source, "drain")
        await stack.until(lambda health: source.address not in health)
        assert not answering.done() and target.streams
        target.stall_after = None
        await target.stop()  # the stalled stream breaks, and the answer goes on there
        await target.start()
        assert (await answering).token_ids() == answer_ids(PROMPT, 50)


async def test_a_gateway_notices_a_drain_by_another_one(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "POLL_S", 0.02)
    before = count("pushed")
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack, 50)
        service = stack.gateway.scheduling
        assert isinstance(service, ConductorService)
        service.post(Drain(source.address))
        assert (await answering).token_ids() == answer_ids(PROMPT, 50)
        assert count("pushed") == before + 1


async def test_without_a_push_the_pool_serves(tokenizer: Tokenizer) -> None:
    before = count("pool")
    async with moving(tokenizer, can_push=False) as stack:
        _, _, target = await drained(stack)
        assert count("pool") == before + 1
        assert "push_from" not in target.calls[0]["kv_transfer_params"]
        assert target.resumed[0]["num_loaded_tokens"] == len(PROMPT)


@pytest.mark.parametrize("status", [404, 409, 500, 503])
async def test_an_answer_that_is_not_handed_over_ends_where_it_is(tokenizer: Tokenizer, status: int) -> None:
    before = count("refused")
    async with moving(tokenizer) as stack:
        for one in stack.decode:
            one.hand_over_status = status
        _, source, target = await drained(stack)
        assert count("refused") == before + 1, "the next attempt is not made at once"
        assert len(source.calls) == 1 and not target.calls


async def test_a_hand_over_whose_answer_is_lost(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer) as stack:
        for one in stack.decode:
            one.hand_over_status = 0
        _, _, target = await drained(stack)
        assert "push_from" not in target.calls[0]["kv_transfer_params"]


@pytest.mark.parametrize("fault", ["dies", "is busy", "is broken", "has other weights", "is gone"])
async def test_an_answer_whose_new_worker_fails_goes_on_where_it_was(
    tokenizer: Tokenizer, fault: str
) -> None:
    before = count("returned")
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack)
        [target] = [one for one in stack.decode if one is not source]
        if fault == "dies":
            target.refuse = (500, {"message": "out of order"})
        elif fault == "is busy":
            target.refuse = (503, {"message": "full"})
        elif fault == "is broken":
            target.refuse = (200, {"message": "no stream"})
        elif fault == "has other weights":
            target.version = 7
        else:
            await target.stop()
        await change(stack, source, "drain")
        answer = await answering
        assert answer.token_ids() == answer_ids(PROMPT, NUM_TOKENS)
        assert answer.text() == answer_text(PROMPT, NUM_TOKENS)
        assert count("returned") == before + 1
        assert len(source.calls) == 2


async def test_both_workers_fail_and_a_third_goes_on(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer, num_decode=3) as stack:
        answering, source = await begun(stack)
        for one in stack.decode:
            one.die_after = NUM_TOKENS - 8
        await change(stack, source, "drain")
        assert (await answering).token_ids() == answer_ids(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_the_last_decode_instance_keeps_its_answers(tokenizer: Tokenizer, num_prefill: int) -> None:
    async with moving(tokenizer, num_prefill=num_prefill, num_decode=1) as stack:
        answering, source = await begun(stack)
        await change(stack, source, "drain")
        assert (await answering).token_ids() == answer_ids(PROMPT, NUM_TOKENS)
        assert len(source.calls) == 1


async def test_every_choice_of_an_answer_moves(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer, num_decode=2) as stack:
        answering, source = await begun(stack, n=4, seed=5)
        await change(stack, source, "drain")
        answer = await answering
        for index in range(4):
            assert answer.token_ids(index) == answer_ids(PROMPT, NUM_TOKENS, 5 + index)


async def test_a_stop_string_is_found_across_the_move(tokenizer: Tokenizer) -> None:
    expected = answer_ids(PROMPT, NUM_TOKENS)
    stop = f"w{expected[20]}"
    position = answer_text(PROMPT, NUM_TOKENS).index(stop)
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack, stop=[stop])
        await change(stack, source, "drain")
        answer = await answering
        assert answer.text() == answer_text(PROMPT, NUM_TOKENS)[:position]
        assert answer.choices()[-1]["finish_reason"] == "stop"


async def test_a_client_that_leaves_during_a_move_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack)
        for one in stack.decode:
            one.stall_after = 0  # nothing more comes, from the old worker or the new one
        await change(stack, source, "drain")
        await asyncio.sleep(5 * PAUSE_S)
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        await stack.until(lambda health: source.address not in health)
        assert stack.gateway.moves.slots._value == moves.MAX_MOVES


async def test_not_all_answers_move_at_the_same_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MAX_MOVES", 2)
    async with moving(tokenizer) as stack:
        slots = stack.gateway.moves.slots
        assert slots._value == 2
        answers = [asyncio.create_task(stack.stream(PROMPT, 50)) for _ in range(8)]
        await asyncio.sleep(10 * PAUSE_S)
        source, target = stack.decode
        assert len(source.streams) == 4
        await change(stack, source, "drain")
        for answer in answers:
            assert (await answer).token_ids() == answer_ids(PROMPT, 50)
        assert len(target.resumed) == 4 and slots._value == 2


async def test_fifty_drains_under_load(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go to and fro between two workers, each of which is drained again and again."""
    monkeypatch.setattr(moves, "POLL_S", 0.01)
    random, num_drains = Random(3), 50
    before = {outcome: count(outcome) for outcome in ("pushed", "returned", "refused", "unknown")}
    async with moving(tokenizer) as stack:
        is_over = False
        num_answers = 0

        async def ask(number: int) -> None:
            nonlocal num_answers
            source = Random(number)
            while not is_over:
                prompt = [source.randrange(10, 90) for _ in range(source.randint(2, 20))]
                num_tokens = source.randint(20, 40)
                answer = await stack.stream(prompt, num_tokens)
                assert answer.token_ids() == answer_ids(prompt, num_tokens)
                assert answer.text() == answer_text(prompt, num_tokens)
                num_answers += 1

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(ask(number))
            for number in range(num_drains):
                one = stack.decode[number % 2]
                await asyncio.sleep(random.uniform(2, 8) * PAUSE_S)
                await change(stack, one, "drain")
                await stack.until(lambda health, one=one: one.address not in health)  # type: ignore[misc]
                await change(stack, one, "add")
                await stack.until(lambda health, one=one: health[one.address] == "ready")  # type: ignore[misc]
            is_over = True
        moved = count("pushed") - before["pushed"]
        assert num_answers > 20 and moved >= num_drains, (num_answers, moved)
        assert count("returned") == before["returned"] and count("unknown") == before["unknown"]
        reports = [report for one in stack.decode for report in one.resumed]
        assert max(report["num_computed_tokens"] for report in reports) <= BLOCK_TOKENS


@pytest.mark.parametrize(
    ("resumed", "outcome"),
    [
        (None, "unknown"),
        (ResumedStats(0, 9, 0, True), "pushed"),
        (ResumedStats(4, 4, 1), "pool"),
        (ResumedStats(8, 0, 1), "local"),
        (ResumedStats(0, 0, 9), "recomputed"),
    ],
)
def test_outcomes(resumed: ResumedStats | None, outcome: str) -> None:
    assert outcome_of(resumed) == outcome
