# SPDX-License-Identifier: Apache-2.0
"""Answers of draining instances move, whatever fails, and no client notices; operators move KV by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake import metrics
from mooncake.conductor.messages import Decision, Drain, Place
from mooncake.conductor.server import ConductorService
from mooncake.gateway import moves
from mooncake.gateway.moves import AnswerMove, outcome_of
from mooncake.gateway.worker_client import WorkerFailed
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
        _, source, target = await drained(stack)
        assert not target.calls, "it goes on where it was"
        assert "push_from" not in source.calls[1]["kv_transfer_params"]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_move_keeps_no_other_one_from_beginning(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Whether its client reads or not, which would end it."""
    monkeypatch.setattr(moves, "SLOT_S", 0.0)

    async def hand_over(*arguments: object) -> int:
        if is_refused:
            raise WorkerFailed("d", "it does not")
        return 7000

    async with moving(tokenizer) as stack:
        monkeypatch.setattr(stack.gateway.workers, "hand_over", hand_over)
        slots = stack.gateway.moves.slots = asyncio.Semaphore(1)
        origin = Decision("r", None, stack.decode[0].address, "")
        place = Place("r/moved/1", 8, exclude=[origin.decode], needs_prefill=False)
        move = AnswerMove(stack.gateway.moves, place, origin, "its stream", {})
        await stack.until(lambda health: move.has_failed if is_refused else move.target is not None)
        await asyncio.wait_for(slots.acquire(), 10)
        move.close()
        assert slots.locked(), "it has released its place once"


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
        source, target = stack.decode
        await stack.until(lambda health: len(source.streams) == len(target.streams) == 4)
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


# --- by hand: POST /v1/kv/move

MOVE = "/v1/kv/move"
LONG = list(range(30, 44))
"""Three full blocks and a rest of two tokens."""


async def moved(stack: Stack, one: WorkerDouble, **fields: Any) -> dict[str, Any]:
    """The answer to a move that must succeed."""
    status, answer, _ = await stack.post(MOVE, {"to": one.address, **fields}, KEY)
    assert status == 200, answer
    assert answer["to"] == one.address and answer["seconds"] >= 0
    return answer


async def refused(stack: Stack, to: str, headers: Any = None, **fields: Any) -> tuple[int, str, str | None]:
    """Status, code and field of a move that must fail."""
    status, answer, _ = await stack.post(MOVE, {"to": to, **fields}, KEY if headers is None else headers)
    assert status != 200, answer
    return status, answer["error"]["code"], answer["error"]["param"]


def blocks_of(answer: dict[str, Any]) -> tuple[int, int, int, int]:
    names = ("blocks_total", "blocks_local", "blocks_loaded", "blocks_computed")
    total, local, loaded, computed = (answer[name] for name in names)
    return total, local, loaded, computed


def measuring(stack: Stack) -> None:
    for one in (*stack.prefill, *stack.decode):
        one.is_measuring = True


def all_calls(stack: Stack) -> int:
    return sum(len(one.calls) for one in (*stack.prefill, *stack.decode))


# --- by hand: prompts


async def test_a_prompt_that_is_in_the_pool_is_loaded(stack: Stack) -> None:
    measuring(stack)
    before, local_before = count("pool"), count("local")
    await stack.complete(LONG)
    for one in (*stack.prefill, *stack.decode):
        one.calls.clear()
    target = stack.decode[1]
    answer = await moved(stack, target, prompt=LONG)
    assert (answer["outcome"], blocks_of(answer)) == ("pool", (3, 0, 3, 0))
    assert all_calls(stack) == len(target.calls) == 1
    answer = await moved(stack, target, prompt=LONG)
    assert (answer["outcome"], blocks_of(answer)) == ("local", (3, 3, 0, 0))
    assert (count("pool"), count("local")) == (before + 1, local_before + 1)
    assert any(answer["id"] in line for line in await stack.gateway.scheduling.story(target.address))


async def test_what_is_nowhere_is_computed_and_reported(stack: Stack) -> None:
    measuring(stack)
    await stack.complete(LONG[:9])
    for target in (stack.decode[0], stack.prefill[0]):  # the role of the instance does not matter
        target.own.clear()
        target.pool.pop(tuple(LONG[:12]), None)
        answer = await moved(stack, target, prompt=LONG)
        assert (answer["outcome"], blocks_of(answer)) == ("pool", (3, 0, 2, 1))
    answer = await moved(stack, stack.decode[0], prompt=[77] * 8)
    assert (answer["outcome"], blocks_of(answer)) == ("recomputed", (2, 0, 0, 2))
    answer = await moved(stack, stack.decode[0], prompt=[78])
    assert blocks_of(answer) == (0, 0, 0, 0)


async def test_a_text_a_chat_and_a_salt_are_what_clients_send(stack: Stack, tokenizer: Tokenizer) -> None:
    measuring(stack)
    target = stack.decode[0]
    await moved(stack, target, prompt="w20 w21 w22 w23 w24", cache_salt="pepper", model="tiny")
    assert target.calls[-1]["prompt"] == tokenizer.encode("w20 w21 w22 w23 w24")
    assert target.calls[-1]["cache_salt"] == "pepper"
    messages = [{"role": "user", "content": "w30 w31"}]
    await moved(stack, target, messages=messages)
    assert target.calls[-1]["prompt"] == tokenizer.chat(messages)
    assert "cache_salt" not in target.calls[-1]


async def test_events_of_the_beginning_and_the_end(stack: Stack) -> None:
    measuring(stack)
    target = stack.decode[0]

    async def events(one: WorkerDouble) -> list[str]:
        body = {"to": one.address, "prompt": LONG, "stream": True}
        async with stack.session.post(stack.url + MOVE, json=body, headers=KEY) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            return (await response.text()).strip().split("\n\n")

    started, done, end = await events(target)
    assert json.loads(started.removeprefix("data: ")) == {"status": "started", "to": target.address}
    found = json.loads(done.removeprefix("data: "))
    assert (found["status"], blocks_of(found), end) == ("done", (3, 0, 0, 3), "data: [DONE]")
    target.refuse = (503, {"message": "full", "type": "x"})
    _, error = await events(target)
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "full"


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        ((500, {"message": "out of order"}), 503, "worker_failed"),
        ((503, {"message": "full", "code": "queue_full"}), 503, "queue_full"),
        ((400, {"message": "no", "type": "x", "code": "invalid_value"}), 400, "invalid_value"),
        ((200, {"message": "no completion"}), 503, "worker_failed"),
    ],
)
async def test_an_instance_that_fails_is_named(stack: Stack, answer: Any, status: int, code: str) -> None:
    before = count("refused")
    target = stack.decode[0]
    error = {"type": "server_error", **answer[1]}
    target.refuse = (answer[0], error)
    assert (await refused(stack, target.address, prompt=LONG))[:2] == (status, code)
    assert count("refused") == before + 1
    assert all_calls(stack) == len(target.calls) == 1, "no other instance gets the prompt"


async def test_an_instance_without_measurements_is_refused(stack: Stack) -> None:
    assert (await refused(stack, stack.decode[0].address, prompt=LONG))[:2] == (503, "worker_failed")


async def test_a_move_ends_at_its_deadline(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, request_timeout_s=0.2) as stack:
        target = stack.decode[0]
        target.stall_after = 0
        assert (await refused(stack, target.address, prompt=LONG))[:2] == (504, "deadline_exceeded")
        async with asyncio.timeout(5):
            while not target.num_cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_an_operator_that_leaves_stops_the_move(stack: Stack) -> None:
    target = stack.decode[0]
    target.stall_after = 0
    move = asyncio.create_task(stack.post(MOVE, {"to": target.address, "prompt": LONG}, KEY))
    async with asyncio.timeout(5):
        while not target.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        move.cancel()
        while not target.num_cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (target.num_cancelled, all_calls(stack)) == (1, 1)


# --- by hand: who may, and what is wrong


@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}, {"Authorization": "Bearer wrong"}])
async def test_without_the_key_nothing_moves(stack: Stack, headers: dict[str, str]) -> None:
    for fields in ({"prompt": LONG}, {"id": "cmpl-1"}, {}):
        found = await refused(stack, stack.decode[0].address, headers, **fields)
        assert found == (401, "invalid_api_key", None)
    assert all_calls(stack) == 0


async def test_a_clients_own_key_moves_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = "sk-of-a-client-0123456789"
    keys.write_text(json.dumps({"keys": [{"name": "anna", "key": secret}]}))
    keys.chmod(0o600)
    async with running(tokenizer, api_keys_file=str(keys)) as stack:
        for headers in ({"Authorization": f"Bearer {secret}"}, {"X-API-Key": secret}):
            found = await refused(stack, stack.decode[0].address, headers, prompt=LONG)
            assert found == (401, "invalid_api_key", None)
        assert all_calls(stack) == 0
        measuring(stack)
        await moved(stack, stack.decode[0], prompt=LONG)


async def test_without_a_key_set_nothing_moves(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, admin_api_key="") as stack:
        found = await refused(stack, stack.decode[0].address, prompt=LONG)
        assert found == (403, "admin_key_not_set", None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": LONG, "id": "cmpl-1"}, "id"),
        ({"prompt": LONG, "messages": []}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [[20], [21]]}, "prompt"),
        ({"prompt": [20] * 64}, "prompt"),
        ({"prompt": "w20 " * 64}, "prompt"),
        ({"messages": [{"role": "king", "content": "w20"}]}, "messages[0].role"),
        ({"prompt": LONG, "cache_salt": ""}, "cache_salt"),
        ({"prompt": LONG, "cache_salt": "x" * 1025}, "cache_salt"),
        ({"prompt": LONG, "stream": "yes"}, "stream"),
        ({"id": ""}, "id"),
        ({"id": "x" * 201}, "id"),
        ({"id": 7}, "id"),
        ({"prompt": LONG, "to": None}, "to"),
        ({"prompt": LONG, "to": "nowhere"}, "to"),
        ({"prompt": LONG, "to": "host:99999"}, "to"),
    ],
)
async def test_a_wrong_body_names_the_field(stack: Stack, fields: dict[str, Any], param: str) -> None:
    body = {"to": stack.decode[0].address, **fields}
    status, answer, _ = await stack.post(MOVE, body, KEY)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert all_calls(stack) == 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"prompt": "w20"}', 400),
        (b'{"to": "a:1", "prompt": ' + b"[" * 100_000, 400),
        (b'{"to": "a:1", "prompt": "' + b"x" * 4096 + b'"}', 413),
    ],
)
async def test_a_body_that_is_none(tokenizer: Tokenizer, body: bytes, status: int) -> None:
    most = 2048 if status == 413 else 8 << 20
    async with running(tokenizer, max_body_bytes=most) as stack:
        found, answer, _ = await stack.post(MOVE, body, KEY)
        assert found == status, answer


async def test_instances_that_can_not_be_the_target(stack: Stack) -> None:
    unknown = (404, "no_such_instance", "to")
    assert await refused(stack, "127.0.0.1:9", prompt=LONG) == unknown
    assert await refused(stack, "127.0.0.1:9", id="cmpl-1") == unknown
    prefill = stack.prefill[0].address
    assert await refused(stack, prefill, id="cmpl-1") == (409, "wrong_role", "to")
    gone = stack.decode[1]
    await gone.stop()
    await stack.until(lambda health: health[gone.address] != "ready")
    assert await refused(stack, gone.address, prompt=LONG) == (409, "instance_not_ready", "to")
    await gone.start()
    await stack.until(lambda health: health[gone.address] == "ready")


async def test_a_draining_instance_gets_nothing(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer, num_decode=1) as stack:
        answering, source = await begun(stack)
        await change(stack, source, "drain")
        for fields in ({"prompt": LONG}, {"id": "cmpl-1"}):
            found = await refused(stack, source.address, **fields)
            assert found == (409, "instance_not_ready", "to")
        await answering


async def test_what_is_not_here(stack: Stack) -> None:
    target = stack.decode[0].address
    assert await refused(stack, target, prompt=LONG, model="other") == (404, "model_not_found", "model")
    ended = (await stack.complete([20, 21]))["id"]
    for answer_id in ("cmpl-1", "../status", ended):
        assert await refused(stack, target, id=answer_id) == (404, "request_not_found", "id")


async def test_other_engines_move_nothing(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, protocol="pool") as stack:
        for fields in ({"prompt": LONG}, {"id": "cmpl-1"}):
            found = await refused(stack, stack.decode[0].address, **fields)
            assert found == (404, "endpoint_not_served", None)


async def test_the_log_has_no_prompt(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    measuring(stack)
    target, text = stack.decode[0], "w91 w92 w93 w94 w95"
    answer = await moved(stack, target, prompt=text)
    await refused(stack, target.address, prompt=f"{text} " * 64)
    target.refuse = (400, {"message": f"no {text}", "type": "x", "code": "invalid_value"})
    await refused(stack, target.address, prompt=text)
    written = str([vars(record) for record in caplog.records if record.name.startswith("mooncake")])
    assert answer["id"] in written and "400 invalid_value" in written
    assert "w93" not in written and "93, 94" not in written


# --- by hand: answers in progress


def live_id(stack: Stack) -> str:
    [answer_id] = stack.gateway.moves._live
    return answer_id


async def test_an_answer_moves_and_comes_back(tokenizer: Tokenizer) -> None:
    before = count("pushed")
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack, 50)
        [target] = [one for one in stack.decode if one is not source]
        answer_id = live_id(stack)
        for one in (target, source, target):
            found = await moved(stack, one, id=answer_id)
            assert found["id"] == answer_id
            assert found["choices"] == [{"index": 0, "outcome": "pushed", "reason": ""}]
            assert [*one.streams] and len(stack.gateway.moves._live) == 1
        answer = await answering
        assert answer.chunks[0]["id"] == answer_id
        assert answer.token_ids() == answer_ids(PROMPT, 50)
        assert answer.text() == answer_text(PROMPT, 50)
        assert (len(target.calls), len(source.calls)) == (2, 2)
        assert count("pushed") == before + 3
        assert {*(await stack.health()).values()} == {"ready"}, "nothing was drained"


async def test_an_answer_goes_where_it_was_ordered(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer, num_decode=4, can_push=False) as stack:
        answering, source = await begun(stack, 50)
        for one in [one for one in stack.decode if one is not source]:
            found = await moved(stack, one, id=live_id(stack))
            assert [choice["outcome"] for choice in found["choices"]] == ["pool"]
            assert len(one.calls) == 1 and one.streams
        assert (await answering).token_ids() == answer_ids(PROMPT, 50)


async def test_every_choice_is_moved(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer, num_decode=2) as stack:
        answering, _ = await begun(stack, 45, n=3, seed=5)
        target = stack.decode[1]
        there = len(target.streams)
        found = await moved(stack, target, id=live_id(stack), stream=False)
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
        outcomes = [choice["outcome"] for choice in found["choices"]]
        assert outcomes.count("refused") == there and outcomes.count("pushed") == 3 - there
        assert len(target.streams) == 3
        answer = await answering
        for index in range(3):
            assert answer.token_ids(index) == answer_ids(PROMPT, 45, 5 + index)


async def test_orders_that_are_refused(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack, 45)
        [target] = [one for one in stack.decode if one is not source]
        answer_id = live_id(stack)
        [choice] = (await moved(stack, source, id=answer_id))["choices"]
        assert (choice["outcome"], choice["reason"]) == ("refused", "it is there already")
        source.hand_over_status = 409
        [choice] = (await moved(stack, target, id=answer_id))["choices"]
        assert choice["outcome"] == "refused" and "no" in choice["reason"]
        source.hand_over_status = 200
        target.refuse = (500, {"message": "out of order"})
        [choice] = (await moved(stack, target, id=answer_id))["choices"]
        assert choice["outcome"] == "returned" and "out of order" in choice["reason"]
        target.refuse = None
        assert (await answering).token_ids() == answer_ids(PROMPT, 45)


async def test_a_second_order_waits_for_nothing(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer, num_decode=3) as stack:
        answering, source = await begun(stack, 45)
        first, second = (one for one in stack.decode if one is not source)
        answer_id = live_id(stack)
        both = await asyncio.gather(*(moved(stack, one, id=answer_id) for one in (first, second)))
        outcomes = [choice for found in both for choice in found["choices"]]
        assert {choice["outcome"] for choice in outcomes} == {"pushed", "refused"}
        assert any("it is being moved to" in choice["reason"] for choice in outcomes)
        assert (await answering).token_ids() == answer_ids(PROMPT, 45)


async def test_an_order_for_an_answer_that_ends(tokenizer: Tokenizer) -> None:
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack)
        [target] = [one for one in stack.decode if one is not source]
        source.stall_after = 0
        [[choosing]] = stack.gateway.moves._live.values()
        move = asyncio.create_task(moved(stack, target, id=live_id(stack)))
        await stack.until(lambda health: choosing._order is not None)
        answering.cancel()
        [choice] = (await move)["choices"]
        assert (choice["outcome"], choice["reason"]) == ("refused", "the answer has ended")


async def test_an_order_has_a_deadline(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "ORDER_TIMEOUT_S", 0.2)
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack)
        [target] = [one for one in stack.decode if one is not source]
        target.stall_after = 0
        [choice] = (await moved(stack, target, id=live_id(stack)))["choices"]
        assert choice["outcome"] == "unknown" and "no token from" in choice["reason"]
        await target.stop()  # the answer returns
        assert (await answering).token_ids() == answer_ids(PROMPT, NUM_TOKENS)
        await target.start()


async def test_an_order_that_was_withdrawn_moves_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "MAX_MOVES", 0)  # so that it waits for its turn
    async with moving(tokenizer) as stack:
        answering, source = await begun(stack)
        [target] = [one for one in stack.decode if one is not source]
        ordered = stack.gateway.moves.move_answer(live_id(stack), target.address, [source.address])
        task = asyncio.create_task(ordered)
        await asyncio.sleep(4 * PAUSE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stack.gateway.moves.slots.release()
        answer = await answering
        assert answer.token_ids() == answer_ids(PROMPT, NUM_TOKENS)
        assert len(source.calls) == 1 and not target.calls


async def test_an_ordered_answer_goes_to_no_other_instance(tokenizer: Tokenizer) -> None:
    """An instance that has joined since the order was made is not excluded by it, and may be chosen."""
    async with moving(tokenizer, num_decode=3) as stack:
        answering, source = await begun(stack)
        target, other = (one for one in stack.decode if one is not source)
        found = await stack.gateway.moves.move_answer(live_id(stack), "127.0.0.1:9", [source.address])
        assert found is not None and found[0].outcome == "refused"
        assert "it was placed on" in found[0].reason
        assert (await answering).token_ids() == answer_ids(PROMPT, NUM_TOKENS)
        assert not target.calls and not other.calls
