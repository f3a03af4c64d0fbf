# SPDX-License-Identifier: Apache-2.0
"""Workers crash, stall, refuse and restart; the client sees one right answer or one clear error."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import pytest
from aiohttp import web

from mooncake.conductor.messages import Failed, Prefilled, Refuse
from mooncake.conductor.server import ConductorServer, ConductorService
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import Refusal
from mooncake.gateway import own_workers, retries, worker_client
from mooncake.inference.tokenizer import Tokenizer
from tests.gateway.conftest import Stack, running
from tests.gateway.doubles import WorkerDouble, answer_ids, answer_text

PROMPT = list(range(20, 32))


async def test_an_answer_involves_two_processes(stack: Stack) -> None:
    answer = await stack.complete(PROMPT)
    assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["headers"]["x-mooncake-prefill"] == stack.prefill[0].address
    [decode] = [worker for worker in stack.decode if worker.calls]
    assert answer["headers"]["x-mooncake-decode"] == decode.address
    assert answer["headers"]["x-mooncake-route"] == "prefill, decode"
    [call] = decode.calls
    params = call["kv_transfer_params"]
    assert params.pop("move_id")
    assert params == {"do_remote_prefill": True, "num_stored_tokens": len(PROMPT)}
    assert call["prompt"] == PROMPT


async def test_cached_tokens_are_those_of_prefill(stack: Stack) -> None:
    first = await stack.complete(PROMPT)
    again = await stack.complete([*PROMPT, 50])
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
    assert (again["usage"]["prompt_tokens"], again["usage"]["completion_tokens"]) == (13, 6)


@pytest.mark.parametrize("die_after", [0, 1, 4, 11])
async def test_the_loss_of_a_decode_worker_in_mid_answer_is_hidden(stack: Stack, die_after: int) -> None:
    for worker in stack.decode:
        worker.die_after = die_after
    streamed = await stack.stream(PROMPT, 12, stream_options={"include_usage": True})
    assert streamed.text() == answer_text(PROMPT, 12)
    assert streamed.token_ids() == answer_ids(PROMPT, 12)
    assert streamed.chunks[-1]["usage"]["completion_tokens"] == 12
    resumed = [call for worker in stack.decode for call in worker.calls][-1]
    if die_after:
        transfer = resumed["kv_transfer_params"]
        assert transfer["num_output_tokens"] == die_after
        assert transfer["output_text_offset"] == len(answer_text(PROMPT, die_after))
        assert resumed["prompt"] == PROMPT + answer_ids(PROMPT, die_after)
    assert resumed["max_tokens"] == 12


async def test_an_answer_moves_more_than_once(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_decode=3) as stack:
        for worker, after in zip(stack.decode, (2, 5, 9), strict=True):
            worker.die_after = after
        streamed = await stack.stream(PROMPT, 12)
        assert streamed.text() == answer_text(PROMPT, 12)


async def test_a_stop_string_across_the_move_still_stops(stack: Stack) -> None:
    ids = answer_ids(PROMPT, 6)
    stop = f"w{ids[3]} w{ids[4]}"
    whole = await stack.complete(PROMPT, 10, stop=[stop])
    for worker in stack.decode:
        worker.die_after = 4
    moved = await stack.complete(PROMPT, 10, stop=[stop])
    assert moved["choices"] == whole["choices"]
    assert whole["choices"][0]["finish_reason"] == "stop"


async def test_a_worker_that_aborts_is_replaced(stack: Stack) -> None:
    for worker in stack.decode:
        worker.abort_after = 3
    assert (await stack.stream(PROMPT, 8)).text() == answer_text(PROMPT, 8)


async def test_a_killed_decode_process_is_replaced(stack: Stack) -> None:
    await stack.decode[0].stop()
    for _ in range(4):
        assert (await stack.complete(PROMPT))["choices"][0]["text"] == answer_text(PROMPT, 6)
    await stack.until(lambda health: health[stack.decode[0].address] == "down")
    await stack.decode[0].start()
    await stack.until(lambda health: health[stack.decode[0].address] == "ready")


async def test_an_answer_that_has_begun_is_not_continued_with_other_weights(stack: Stack) -> None:
    for worker in stack.decode:
        worker.replace_after = 3
    body = {"prompt": PROMPT, "max_tokens": 8, "stream": True}
    async with stack.session.post(stack.url + "/v1/completions", json=body) as response:
        events = (await response.read()).decode().strip().split("\n\n")
    assert "weights_replaced" in events[-1] and "[DONE]" not in events
    assert sum(len(worker.calls) for worker in stack.decode) == 1
    status, answer, _ = await stack.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8})
    assert (status, answer["error"]["code"]) == (409, "weights_replaced")
    assert set((await stack.health()).values()) == {"ready"}


async def test_an_answer_is_not_continued_on_a_worker_with_other_weights(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_prefill=0, num_decode=2) as stack:
        first, second = stack.decode
        for one in stack.decode:
            one.die_after = 3
        assert (await stack.stream(PROMPT, 8)).text() == answer_text(PROMPT, 8)
        resumed = [call for one in stack.decode for call in one.calls if len(call["prompt"]) > len(PROMPT)]
        assert (
            [call["kv_transfer_params"]["weights"] for call in resumed] == ["weights-0"] * len(resumed) != []
        )

        second.version = 1
        for is_streamed in (True, False):
            first.calls, second.calls = [], []
            first.die_after = second.die_after = 3
            body = {"prompt": PROMPT, "max_tokens": 8, "stream": is_streamed}
            async with stack.session.post(stack.url + "/v1/completions", json=body) as response:
                status, text = response.status, await response.text()
            assert status == (200 if is_streamed else 409)
            last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
            assert last["error"]["code"] == "weights_replaced" and "[DONE]" not in text
            assert [len(one.calls) for one in stack.decode] == [1, 1], "it was not tried on and on"
        await stack.until(lambda health: set(health.values()) == {"ready"})


async def test_an_answer_of_which_nothing_was_sent_moves_to_a_worker_with_other_weights(
    tokenizer: Tokenizer,
) -> None:
    async with running(tokenizer, num_prefill=0, num_decode=2) as stack:
        for one, version in zip(stack.decode, (0, 1), strict=True):
            one.version, one.die_after = version, 0
        seeds = [answer_text(PROMPT, 8, seed) for seed in (0, 1)]
        assert (await stack.stream(PROMPT, 8)).text() in seeds
        assert not any(
            "weights" in call.get("kv_transfer_params", {}) for one in stack.decode for call in one.calls
        )


async def test_an_answer_of_which_nothing_was_sent_begins_again_with_other_weights(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tokenizer, num_decode=1) as stack:
        posted = stack.posted(monkeypatch)
        for worker in (*stack.prefill, *stack.decode):
            worker.replace_after = 0
        streamed = await stack.stream(PROMPT, 8)
        assert streamed.token_ids() == answer_ids(PROMPT, 8, seed=1)
        assert [len(worker.calls) for worker in (*stack.prefill, *stack.decode)] == [2, 2]
        assert posted and not any(isinstance(event, Failed) for event in posted)


async def test_weights_that_are_replaced_all_the_time_end_a_request(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_prefill=0, num_decode=1) as stack:
        error = {"message": "weights replaced", "type": "conflict_error", "code": "weights_replaced"}
        stack.decode[0].refuse = (409, error)
        status, answer, _ = await stack.post("/v1/completions", {"prompt": PROMPT})
        assert (status, answer["error"]["code"]) == (409, "weights_replaced")
        assert len(stack.decode[0].calls) == retries.MAX_FAILURES


async def test_a_stalled_worker_counts_as_failed(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, stall_timeout_s=0.2) as stack:
        stack.decode[0].stall_after = 3
        for _ in range(2):  # in turn, so one of them begins at the stalled one
            assert (await stack.stream(PROMPT, 8)).text() == answer_text(PROMPT, 8)
        assert stack.decode[0].num_cancelled == 1


async def test_a_silent_worker_is_probed_before_it_counts_as_failed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "SILENCE_BEFORE_PROBE_S", 0.05)
    for worker in stack.decode:
        worker.token_pause_s = 0.2  # slow, but it answers /health
    answer = await stack.complete(PROMPT, 3)
    assert answer["choices"][0]["text"] == answer_text(PROMPT, 3)
    assert sum(len(worker.calls) for worker in stack.decode) == 1


async def test_a_prefill_worker_lost_under_a_prompt_is_replaced(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_prefill=2) as stack:
        for worker in stack.prefill:
            worker.die_after = 0  # once each: the third attempt is fine
        answer = await stack.complete(PROMPT)
        assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
        assert sum(len(worker.calls) for worker in stack.prefill) >= 2


async def test_without_prefill_the_decode_instance_computes_the_prompt(stack: Stack) -> None:
    await stack.prefill[0].stop()
    answer = await stack.complete(PROMPT)
    assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
    assert "x-mooncake-prefill" not in answer["headers"]
    assert answer["headers"]["x-mooncake-route"] == "degraded: no prefill instance is ready"
    await stack.until(lambda health: health[stack.prefill[0].address] == "down")
    _, status = await stack.get("/status")
    assert status["degraded"] == "no prefill instance is ready"


async def test_without_decode_the_prefill_instance_decodes(stack: Stack) -> None:
    for worker in stack.decode:
        await worker.stop()
    answer = await stack.complete(PROMPT)
    assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
    assert answer["headers"]["x-mooncake-decode"] == stack.prefill[0].address
    await stack.until(lambda health: sum(state == "down" for state in health.values()) == 2)
    _, status = await stack.get("/status")
    assert status["degraded"] == "no decode instance is ready"


async def test_no_instance_left_is_a_503_with_a_time_to_retry(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_TIMEOUT_S", 0.1)
    await stack.complete(PROMPT)
    for worker in [*stack.prefill, *stack.decode]:
        await worker.stop()
    await stack.until(lambda health: set(health.values()) == {"down"})
    status, answer, headers = await stack.post("/v1/completions", {"prompt": PROMPT})
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    assert answer["error"]["code"] == "no_instance"
    assert f"{stack.prefill[0].address} is down" in answer["error"]["message"]
    assert (await stack.get("/ready"))[0] == 503
    assert (await stack.get("/health"))[0] == 200


async def test_an_answer_in_progress_waits_for_a_worker_to_come_back(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_prefill=0, num_decode=1) as stack:
        [worker] = stack.decode
        worker.die_after = 3  # the connection breaks, the process lives: the answer continues on it
        assert (await stack.stream(PROMPT, 8)).text() == answer_text(PROMPT, 8)


async def test_a_request_that_kills_every_worker_is_stopped(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_prefill=0, num_decode=6) as stack:
        for worker in stack.decode:
            worker.refuse = (500, {"message": "out of luck", "type": "server_error"})
        status, answer, _ = await stack.post("/v1/completions", {"prompt": PROMPT})
        assert (status, answer["error"]["code"]) == (503, "workers_failed")
        assert "out of luck" in answer["error"]["message"]
        assert sum(len(worker.calls) for worker in stack.decode) == retries.MAX_FAILURES


async def test_a_busy_worker_is_skipped_and_does_not_count_as_failed(stack: Stack) -> None:
    error = {"message": "queue is full", "type": "rate_limit_error", "code": "queue_full"}
    stack.decode[0].refuse = (429, error)
    for _ in range(2):
        assert (await stack.complete(PROMPT))["choices"][0]["text"] == answer_text(PROMPT, 6)
    assert set((await stack.health()).values()) == {"ready"}
    for worker in [*stack.prefill, *stack.decode]:
        worker.refuse = (429, error)
    status, answer, headers = await stack.post("/v1/completions", {"prompt": PROMPT})
    assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "queue_full", "7")


async def test_a_refusal_of_the_worker_passes_through(stack: Stack) -> None:
    status, answer, _ = await stack.post("/v1/completions", {"prompt": [20, 10**6]})
    assert status == 400
    assert answer["error"] == {
        "message": "no such token",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "invalid_value",
    }
    assert set((await stack.health()).values()) == {"ready"}


@pytest.mark.parametrize(
    ("num_prompts", "n"), [(1, 2), (7, 1), (1, 7), (4, 3)], ids=["pair", "prompts", "choices", "both"]
)
async def test_an_answer_that_is_larger_than_the_limit_of_instances_is_served_in_portions(
    tokenizer: Tokenizer, num_prompts: int, n: int
) -> None:
    prompts = [[20 + number, 30] for number in range(num_prompts)]
    async with running(tokenizer, num_decode=1, max_requests_per_instance=1) as stack:
        answer = await stack.complete(prompts, 3, n=n, seed=1)
        expected = [answer_text(prompt, 3, 1 + seed) for prompt in prompts for seed in range(n)]
        assert [choice["text"] for choice in answer["choices"]] == expected
        streamed = await stack.stream(prompts, 3, n=n, seed=1)
        assert [streamed.text(index) for index in range(len(expected))] == expected


async def test_an_answer_in_portions_lets_others_in(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, num_decode=2, max_requests_per_instance=1) as stack:
        for worker in stack.decode:
            worker.token_pause_s = 0.01
        whole = asyncio.create_task(stack.complete([[20 + number] for number in range(20)], 10))
        async with asyncio.timeout(10):
            while not any(worker.calls for worker in stack.decode):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        statuses = []
        while not whole.done():
            status, _, _ = await stack.post("/v1/completions", {"prompt": [90], "max_tokens": 1})
            statuses.append(status)
        assert len((await whole)["choices"]) == 20
        assert 200 in statuses and set(statuses) <= {200, 429}


async def test_a_worker_that_is_busy_with_the_answer_gets_the_rest_of_it_later(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tokenizer, num_prefill=0, num_decode=1) as stack:
        [decode] = stack.decode
        serve, num_refused = decode._stream, 0

        async def bounded(request: Any, body: dict[str, Any]) -> Any:
            nonlocal num_refused
            if len(decode.streams) > 2:
                num_refused += 1
                error = {"message": "full", "type": "rate_limit_error", "code": "queue_full"}
                return web.json_response({"error": error}, status=429)
            return await serve(request, body)

        monkeypatch.setattr(decode, "_stream", bounded)
        answer = await stack.complete([[20 + number] for number in range(6)], 3)
        assert [one["text"] for one in answer["choices"]] == [answer_text([20 + one], 3) for one in range(6)]
        assert num_refused


@pytest.mark.parametrize("is_room_found", [True, False])
async def test_an_answer_that_has_begun_waits_while_all_workers_are_busy(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, is_room_found: bool
) -> None:
    if not is_room_found:
        monkeypatch.setattr(own_workers, "RESUME_TIMEOUT_S", 1.0)
        monkeypatch.setattr(retries, "RETRY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(retries, "POLL_S", 0.05)
    num_refused = 0
    async with running(tokenizer, num_prefill=0, num_decode=2) as stack:

        def busy_for_the_rest(worker: WorkerDouble) -> Callable[[Any, dict[str, Any]], Awaitable[Any]]:
            serve = worker._stream
            worker.die_after = 5

            async def stream(request: Any, body: dict[str, Any]) -> Any:
                nonlocal num_refused
                if "num_output_tokens" not in body["kv_transfer_params"]:
                    return await serve(request, body)
                worker.die_after = None
                if is_room_found and num_refused == 5:
                    return await serve(request, body)
                num_refused += 1
                error = {"message": "full", "type": "rate_limit_error", "code": "queue_full"}
                return web.json_response({"error": error}, status=429)

            return stream

        for worker in stack.decode:
            monkeypatch.setattr(worker, "_stream", busy_for_the_rest(worker))
        streamed = await stack.stream(PROMPT, 12)
        assert num_refused > 2, "no worker was tried again"
        if is_room_found:
            assert streamed.token_ids() == answer_ids(PROMPT, 12)
        else:
            assert "queue_full" in streamed.events[-1], "it does not wait without an end"


async def test_an_answer_for_whose_first_part_there_is_no_room_is_refused_at_once(
    tokenizer: Tokenizer,
) -> None:
    async with running(tokenizer, num_decode=1, max_requests_per_instance=1) as stack:
        stack.decode[0].stall_after = 0
        waiting = asyncio.create_task(stack.post("/v1/completions", {"prompt": PROMPT}))
        async with asyncio.timeout(10):
            while not stack.decode[0].calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        status, answer, headers = await stack.post("/v1/completions", {"prompt": [[20], [21], [22]]})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
        waiting.cancel()


async def test_a_call_of_a_choice_repeats_only_what_its_worker_needs(stack: Stack) -> None:
    text = "x" * 100_000
    answer = await stack.complete(PROMPT, n=3, user=text, metadata={"note": text}, prompt_cache_key=text)
    assert len(answer["choices"]) == 3
    calls = [call for worker in (*stack.prefill, *stack.decode) for call in worker.calls]
    assert len(calls) == 4
    assert all(len(json.dumps(call)) < 1000 for call in calls)


async def test_a_conductor_of_its_own_and_its_loss(tokenizer: Tokenizer) -> None:
    service = ConductorService(SchedulingSettings(block_tokens=4, suspect_probe_interval_s=0.05))
    await service.start()
    server = ConductorServer(service)
    port = await server.start("127.0.0.1", 0)
    async with running(tokenizer, conductor=f"127.0.0.1:{port}") as stack:
        async with asyncio.timeout(10):
            while "(connected)" not in stack.gateway.conductor_state:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        answer = await stack.complete(PROMPT)
        assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
        _, story = await stack.get(f"/story/{answer['id']}")
        assert any(line.split(" ", 1)[1].startswith("placed") for line in story["story"])
        await server.close()
        await service.close()
        for _ in range(3):
            lost = await stack.complete(PROMPT)
            assert lost["choices"][0]["text"] == answer_text(PROMPT, 6)
        assert lost["headers"]["x-mooncake-route"] == "degraded: no conductor"
        _, status = await stack.get("/status")
        assert "can't be reached" in status["conductor"]


@pytest.mark.parametrize("seed", range(3))
async def test_answers_are_right_whatever_fails(tokenizer: Tokenizer, seed: int) -> None:
    """Thirty clients while workers lose connections, abort, are killed and restart."""
    random = Random(seed)
    async with running(tokenizer, num_prefill=3, num_decode=3, scheduling="random") as stack:
        all_workers = [*stack.prefill, *stack.decode]
        for worker in all_workers:
            worker.token_pause_s = 0.002

        async def complete_one(number: int) -> None:
            prompt = [random.randrange(20, 90) for _ in range(random.randrange(1, 20))]
            num_tokens = random.randrange(1, 30)
            await asyncio.sleep(random.random())
            if number % 2:
                answer = await stack.complete(prompt, num_tokens, return_token_ids=True)
                assert answer["choices"][0]["token_ids"] == answer_ids(prompt, num_tokens)
                assert answer["choices"][0]["text"] == answer_text(prompt, num_tokens)
            else:
                streamed = await stack.stream(prompt, num_tokens)
                assert streamed.text() == answer_text(prompt, num_tokens)

        async def disturb() -> None:
            for _ in range(12):
                await asyncio.sleep(0.1)
                victim = random.choice(all_workers)
                fault = random.randrange(4)
                if fault == 0:
                    victim.die_after = random.randrange(6)
                elif fault == 1:
                    victim.abort_after = random.randrange(1, 6)
                else:
                    await victim.stop()
                    await asyncio.sleep(0.05)
                    await victim.start()

        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(complete_one(number))
            group.create_task(disturb())


# --- KV that is pushed from prefill to decode


@contextlib.asynccontextmanager
async def pushing(tokenizer: Tokenizer, **settings: Any) -> AsyncIterator[Stack]:
    """A stack whose workers can push."""
    async with running(tokenizer, probe_interval_s=0.02, **settings) as stack:
        for number, worker in enumerate((*stack.prefill, *stack.decode)):
            worker.push_port = 7000 + number
        service = stack.gateway.scheduling
        assert isinstance(service, ConductorService)
        instances = [service.core.instances[one.address] for one in (*stack.prefill, *stack.decode)]
        await stack.until(lambda health: all(one.push_port for one in instances))
        yield stack


async def test_prefill_and_decode_get_the_same_transfer(tokenizer: Tokenizer) -> None:
    async with pushing(tokenizer) as stack:
        answer = await stack.complete(PROMPT)
        assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
        assert answer["headers"]["x-mooncake-kv"] == "push"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "those of prefill"
        [prefill] = stack.prefill[0].calls
        [decode] = [call for worker in stack.decode for call in worker.calls]
        transfer_id = prefill["kv_transfer_params"]["transfer_id"]
        params = decode["kv_transfer_params"]
        assert params.pop("move_id") != transfer_id
        assert params == {"transfer_id": transfer_id, "push_from": "127.0.0.1:7000"}
        streamed = await stack.stream(PROMPT, 8, stream_options={"include_usage": True})
        assert streamed.text() == answer_text(PROMPT, 8)
        assert streamed.chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 12
        assert stack.prefill[0].calls[1]["kv_transfer_params"]["transfer_id"] != transfer_id


async def test_a_client_names_no_transfer_and_no_address(tokenizer: Tokenizer) -> None:
    async with pushing(tokenizer) as stack:
        named = {"transfer_id": "mine", "push_from": "10.6.6.6:1", "do_remote_prefill": True}
        answer = await stack.complete(PROMPT, kv_transfer_params=named)
        assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
        [decode] = [call for worker in stack.decode for call in worker.calls]
        assert decode["kv_transfer_params"]["push_from"] == "127.0.0.1:7000"
        assert decode["kv_transfer_params"]["transfer_id"] != "mine"


async def test_what_is_not_pushed_goes_through_the_pool(tokenizer: Tokenizer) -> None:
    async with pushing(tokenizer) as stack:
        several = await stack.complete(PROMPT, n=2)
        assert several["headers"]["x-mooncake-kv"] == "pool"
    async with pushing(tokenizer, kv_transfer="pool") as stack:
        answer = await stack.complete(PROMPT)
        assert answer["headers"]["x-mooncake-kv"] == "pool"
        assert "transfer_id" not in stack.prefill[0].calls[0]["kv_transfer_params"]


async def test_a_prefill_that_fails_while_decode_waits_is_placed_again(tokenizer: Tokenizer) -> None:
    async with pushing(tokenizer, num_prefill=2) as stack:
        for worker in stack.prefill:
            worker.die_after = 0
        answer = await stack.complete(PROMPT)
        assert answer["choices"][0]["text"] == answer_text(PROMPT, 6)
        assert sum(worker.num_cancelled for worker in stack.decode) == 1
        params = [call["kv_transfer_params"] for worker in stack.prefill for call in worker.calls]
        assert sum("transfer_id" in one for one in params) == 1, "the second attempt has no push"
        last = [call for worker in stack.decode for call in worker.calls][-1]
        assert "push_from" not in (last.get("kv_transfer_params") or {})


@pytest.mark.parametrize("die_after", [0, 1, 4])
async def test_a_decode_worker_that_is_lost_during_a_push_is_replaced(
    tokenizer: Tokenizer, die_after: int
) -> None:
    async with pushing(tokenizer, num_decode=2) as stack:
        for worker in stack.decode:
            worker.die_after = die_after
        streamed = await stack.stream(PROMPT, 8)
        assert streamed.text() == answer_text(PROMPT, 8)
        calls = [call.get("kv_transfer_params") or {} for worker in stack.decode for call in worker.calls]
        assert sum("push_from" in params for params in calls) == 1


async def test_a_decode_worker_whose_weights_are_replaced_gets_no_second_push(tokenizer: Tokenizer) -> None:
    """A transfer goes to one worker: its sender would not know which blocks of it another one needs."""
    async with pushing(tokenizer, num_decode=1) as stack:
        stack.decode[0].replace_after = 0
        answer = await stack.complete(PROMPT)
        assert answer["choices"][0]["text"] == answer_text(PROMPT, 6, 1)
        calls = [call.get("kv_transfer_params") or {} for call in stack.decode[0].calls]
        assert ["push_from" in params for params in calls] == [True, False]


async def test_a_refusal_after_prefill_ends_the_call_of_decode(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pushing(tokenizer) as stack:
        refuse = Refuse("r", Refusal("slo_tbt", "no room"), 1.0)

        async def prefilled(event: Prefilled) -> Refuse | None:
            return None if event.has_begun else refuse

        for worker in stack.decode:
            worker.stall_after = 0
        monkeypatch.setattr(stack.gateway.scheduling, "prefilled", prefilled)
        status, answer, _ = await stack.post("/v1/completions", {"prompt": PROMPT})
        assert (status, answer["error"]["code"]) == (429, "slo_tbt")
        await stack.until(lambda health: any(worker.num_cancelled for worker in stack.decode))


async def test_a_client_that_leaves_ends_both_calls(tokenizer: Tokenizer) -> None:
    async with pushing(tokenizer) as stack:
        stack.prefill[0].stall_after = 0
        asking = asyncio.ensure_future(stack.complete(PROMPT))
        await stack.until(lambda health: any(worker.calls for worker in stack.decode))
        asking.cancel()
        cancelled = [stack.prefill[0], *stack.decode]
        await stack.until(lambda health: sum(worker.num_cancelled for worker in cancelled) == 2)


async def test_a_refusal_of_decode_during_a_push_releases_the_request(tokenizer: Tokenizer) -> None:
    async with pushing(tokenizer) as stack:
        stack.prefill[0].stall_after = 0
        for worker in stack.decode:
            worker.refuse = (400, {"message": "no", "type": "invalid_request_error", "code": "invalid_value"})
        status, answer, _ = await stack.post("/v1/completions", {"prompt": PROMPT})
        assert (status, answer["error"]["code"]) == (400, "invalid_value")
        rows = await stack.gateway.scheduling.status()
        assert sum(row.num_placed for row in rows) == 2
        assert not any(row.num_requests for row in rows)
