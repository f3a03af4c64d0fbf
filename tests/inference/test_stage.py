# SPDX-License-Identifier: Apache-2.0
"""Stages that compute for a group: right answers over the wire, one group at a time, clear refusals."""

from __future__ import annotations

import asyncio
import threading
from random import Random
from typing import Any

import msgspec
import pytest

from mooncake.errors import DeadlineExceeded, InvalidArgument, MooncakeError, ProtocolError
from mooncake.inference.pipeline import ChunkRows, layer_ranges
from mooncake.inference.prefill_group import bubble_seconds
from mooncake.inference.stage import (
    CHUNK,
    CHUNK_DONE,
    BlocksMoved,
    Hop,
    JoinGroup,
    MoveBlocks,
    Ring,
    Stage,
    StageAlive,
    StageChunk,
    StageJoined,
    StageProbe,
)
from mooncake.rpc import AsyncClient
from mooncake.transfer import Notification
from tests.inference.conftest import Reference, prompt_of
from tests.inference.groups import HOST, TIMEOUT_S, running_group, running_stage
from tests.inference.test_engine import LENGTHS, NUM_TOKENS, greedy
from tests.waiting import until


@pytest.mark.parametrize("num_stages", [2, 3])
async def test_a_group_answers_as_one_worker_does(llama: Reference, num_stages: int) -> None:
    async with running_group(llama, num_stages) as group:
        for length in (*LENGTHS, 200):
            prompt = prompt_of(length)
            answer = await group.ask(greedy(prompt, name=f"r{length}"))
            assert answer.tokens == llama.greedy(prompt, NUM_TOKENS), length
        prompts = {f"many{seed}": prompt_of(90 + seed, seed) for seed in range(6)}
        answers = await asyncio.gather(*(group.ask(greedy(p, name=n)) for n, p in prompts.items()))
        expected = [llama.greedy(prompt, NUM_TOKENS) for prompt in prompts.values()]
        assert [answer.tokens for answer in answers] == expected
        group.group.pipeline.check()
        assert all(seconds > 0 for seconds in group.group.pipeline.computed_s)
        story = group.group.pipeline.story("")
        assert story and "chunk" in story[-1] and story[-1].count("+") == num_stages + 1


async def test_a_long_prompt_passes_in_several_chunks(llama: Reference) -> None:
    async with running_group(llama, 3) as group:
        prompt = prompt_of(300)
        answer = await group.ask(greedy(prompt, 1))
        assert answer.tokens == llama.greedy(prompt, 1)
        assert group.group.pipeline.latest >= 5
        again = await group.ask(greedy(prompt, 1, name="again"))
        assert again.tokens == answer.tokens and again.last.num_local_cached == 288


async def test_stages_may_have_other_numbers_of_layers(
    llama: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mooncake.inference.prefill_group.BALANCE_AFTER", 2)
    caplog.set_level("INFO")
    async with running_group(llama, 2, counts=(1, 2)) as group:
        assert group.group.ranges == [range(1), range(1, 3)]
        prompt = prompt_of(200)
        assert (await group.ask(greedy(prompt, 4))).tokens == llama.greedy(prompt, 4)
    found = [vars(line)["fields"] for line in caplog.records if line.message == "group_balance"]
    assert found and all(line["layers"] == [1, 2] and sum(line["balanced"]) == 3 for line in found)
    assert all(min(line["computed_s"]) >= 0 for line in found)
    async with running_stage(llama, range(1, 3)) as stage:
        with pytest.raises(InvalidArgument, match=r"layers is \[2, 3\]; allowed: \[1, 3\], as this stage"):
            async with running_group(llama, 2, stages=[stage]):
                pass


async def test_each_stage_reports_its_part_of_a_prompt(llama: Reference) -> None:
    async with running_group(llama, 3) as group:
        before = [bubble_seconds.labels(str(stage))._value.get() for stage in range(3)]
        answer = await group.ask(greedy(prompt_of(300), 3))
        assert answer.last.measured is not None
        stages, whole_s = answer.last.measured.stages, answer.last.measured.computed_s
        ranges = layer_ranges(3, 3)
        assert [range(one.first_layer, one.end_layer) for one in stages] == ranges
        assert len({one.num_chunks for one in stages}) == 1 and stages[0].num_chunks >= 5
        assert stages[0].began_s == 0.0 < stages[1].began_s < stages[2].began_s
        for one in stages:
            # It computed, waited, or one of its chunks was there, and the thread on its way. Where a stage's
            # times lie on the first one's clock is an estimate, so only the whole bounds them.
            assert 0 < one.computed_s <= whole_s and 0 <= one.waited_s <= whole_s
            assert one.began_s < one.ended_s <= whole_s * (1 + 1e-6)
        assert stages[1].waited_s > 0, "it waited for the first chunk"
        after = [bubble_seconds.labels(str(stage))._value.get() for stage in range(3)]
        assert after[1] >= before[1] + stages[1].waited_s
        steps = group.engine.step_log.read()
        assert [(first, num) for first, num, _ in steps.chunks] == [(0, 300)], "one prompt, not its chunks"
        assert steps.num_steps == 2 and 0 < steps.chunks[0][2] <= stages[2].ended_s * 1.5
        again = await group.ask(greedy(prompt_of(300), 1, name="again"))
        assert again.last.measured is not None and again.last.measured.stages[2].num_chunks < 5
        assert group.engine.step_log.read().chunks[-1][:2] == (288, 12)


async def test_a_lost_stage_fails_requests_and_a_new_group_answers(llama: Reference) -> None:
    ranges = layer_ranges(3, 2)
    async with running_stage(llama, ranges[1]) as stage:
        async with running_group(llama, 2, stages=[stage]) as group:
            assert (await group.ask(greedy(prompt_of(20), 2))).last.error is None
            waiting = [group.add(greedy(prompt_of(250, n), 50, name=f"lost{n}")) for n in range(3)]
            for connection in list(stage.server.connections):
                connection.close()
            answers = await asyncio.wait_for(asyncio.gather(*waiting), TIMEOUT_S)
            assert all(answer.last.error and "lost a stage" in answer.last.error for answer in answers)
            assert "the connection broke" in str(await asyncio.wait_for(group.group.lost, TIMEOUT_S))
            late = await group.ask(greedy(prompt_of(20), 2, name="late"))
            assert late.last.error and "may be sent again" in late.last.error
        async with running_group(llama, 2, stages=[stage]) as group:
            answer = await group.ask(greedy(prompt_of(60)))
            assert answer.tokens == llama.greedy(prompt_of(60), NUM_TOKENS)


@pytest.mark.parametrize("seed", range(8))
async def test_a_stage_lost_at_any_point_costs_no_wrong_token(llama: Reference, seed: int) -> None:
    """Cut off after a random number of chunks; the stage's next group has none of the former one's blocks."""
    random = Random(seed)
    prompts = [prompt_of(random.randint(1, 150), n) for n in range(5)]
    right = [llama.greedy(prompt, 8) for prompt in prompts]
    async with running_stage(llama, layer_ranges(3, 2)[1], num_blocks=50) as stage:
        for turn in range(3):
            async with running_group(llama, 2, stages=[stage], num_blocks=50) as group:
                waiting = [group.add(greedy(p, 8, name=f"{turn} {n}")) for n, p in enumerate(prompts)]
                last = random.randrange(40)
                while (  # noqa: ASYNC110  a chunk sets no event
                    group.group.pipeline.latest < last and not all(one.done() for one in waiting)
                ):
                    await asyncio.sleep(0.001)
                for connection in list(stage.server.connections):
                    connection.close()
                answers = await asyncio.wait_for(asyncio.gather(*waiting), TIMEOUT_S)
                for answer, expected in zip(answers, right, strict=True):
                    if answer.last.error is None:
                        assert answer.tokens == expected
                    else:
                        assert answer.tokens == expected[: len(answer.tokens)]
                        assert "may be sent again" in answer.last.error
        async with running_group(llama, 2, stages=[stage], num_blocks=50) as group:
            answers = await asyncio.gather(
                *(group.ask(greedy(p, 8, name=f"{n}")) for n, p in enumerate(prompts))
            )
            assert [answer.tokens for answer in answers] == right


async def test_another_group_takes_a_stage_over_and_the_former_one_notices(llama: Reference) -> None:
    async with (
        running_stage(llama, layer_ranges(3, 2)[1]) as stage,
        running_group(llama, 2, stages=[stage]) as former,
        running_group(llama, 2, stages=[stage]) as group,
    ):
        loss = await asyncio.wait_for(former.group.lost, TIMEOUT_S)
        assert "belongs to" in str(loss)
        answer = await group.ask(greedy(prompt_of(60)))
        assert answer.tokens == llama.greedy(prompt_of(60), NUM_TOKENS)
        failed = await former.ask(greedy(prompt_of(60)))
        assert failed.tokens == [] and failed.last.error


async def test_a_stage_that_fails_to_compute_ends_the_group(
    llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_group(llama, 2) as group:

        def broken(*_: Any) -> int:
            raise RuntimeError("out of device memory")

        monkeypatch.setattr(group.stages[0], "_compute", broken)
        answer = await group.ask(greedy(prompt_of(30)))
        assert answer.last.error and "out of device memory" in answer.last.error


async def test_a_stage_that_stands_still_is_noticed(
    llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.inference.prefill_group.PROBE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("mooncake.inference.prefill_group.PROBE_INTERVAL_S", 0.05)
    async with running_group(llama, 2) as group:
        stage = group.stages[0]
        silent: asyncio.Future[StageAlive] = asyncio.get_running_loop().create_future()
        stage.server.handlers[StageProbe] = lambda probe, call: silent
        monkeypatch.setattr(stage, "_queue_chunk", lambda one: None)
        answer = await group.ask(greedy(prompt_of(30)))
        assert answer.last.error and "didn't answer StageProbe" in answer.last.error
        silent.cancel()


def join_of(stage: Stage, **changed: Any) -> JoinGroup:
    descriptor = stage._transfer.describe().encode()
    fields: dict[str, Any] = {
        "group": "g",
        "first_layer": 2,
        "end_layer": 3,
        "num_stages": 2,
        "weights": "w",
        "dtype": "float32",
        "block_tokens": 16,
        "num_slots": 4,
        "max_rows": 32,
        "max_samples": 4,
        "next_descriptor": descriptor,
        "next_address": 4096,
        "leader_descriptor": descriptor,
    }
    return JoinGroup(**fields | changed)


def client_of(stage: Stage) -> AsyncClient:
    return AsyncClient(f"{HOST}:{stage.server.port}", (StageJoined, StageAlive, BlocksMoved))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_layer", 1),
        ("weights", "other"),
        ("dtype", "bfloat16"),
        ("block_tokens", 32),
        ("num_slots", 100_000),
        ("max_rows", 0),
    ],
)
async def test_a_group_with_other_settings_is_refused(llama: Reference, field: str, value: Any) -> None:
    async with running_stage(llama, layer_ranges(3, 2)[1]) as stage:
        client = client_of(stage)
        named = "layers" if field == "first_layer" else field
        with pytest.raises(InvalidArgument, match=f"{named} is"):
            await client.call(join_of(stage, **{field: value}), TIMEOUT_S)
        assert (await client.call(StageProbe(), TIMEOUT_S)).group == ""
        await client.close()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Ring]:
    """The rings that were closed, in order."""
    found: list[Ring] = []
    close = Ring.close

    def noted(ring: Ring) -> None:
        found.append(ring)
        close(ring)

    monkeypatch.setattr(Ring, "close", noted)
    return found


async def test_a_group_is_left_whole_when_the_request_for_it_is_cancelled(
    llama: Reference, closed: list[Ring]
) -> None:
    async with running_stage(llama, layer_ranges(3, 2)[1]) as stage:
        clients = [client_of(stage) for _ in range(3)]
        await clients[0].call(join_of(stage), TIMEOUT_S)
        former = stage._member
        assert former is not None
        chunk = threading.Event()
        stage._computer.submit(chunk.wait)
        try:
            second = asyncio.create_task(clients[1].call(join_of(stage, group="second"), TIMEOUT_S))
            await until(lambda: stage._member is None)
            await clients[1].close()
            await asyncio.gather(second, return_exceptions=True)
            await until(lambda: not stage._joining.locked(), "the end of the second join")
            third = asyncio.create_task(clients[2].call(join_of(stage, group="third"), TIMEOUT_S))
            await until(lambda: stage._joining.locked() or third.done())
            assert not third.done() and not closed, "a chunk of the first group is still computed"
        finally:
            chunk.set()
        await third
        assert closed == [former.inbox, former.outbox]
        assert (await clients[2].call(StageProbe(), TIMEOUT_S)).group == "third"
        for client in clients:
            await client.close()


async def test_a_join_that_fails_leaves_no_ring(llama: Reference, closed: list[Ring]) -> None:
    async with running_stage(llama, layer_ranges(3, 2)[1]) as stage:
        client = client_of(stage)
        with pytest.raises(MooncakeError):
            await client.call(join_of(stage, leader_descriptor=b"none"), TIMEOUT_S)
        assert len(closed) == 2
        assert (await client.call(StageProbe(), TIMEOUT_S)).group == ""
        await client.close()


async def test_a_stage_whose_error_can_not_be_reported_leaves_its_group(
    llama: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probes of the group's first stage, which uses another connection, then find that it has left."""
    async with running_stage(llama, layer_ranges(3, 2)[1]) as stage:
        client = client_of(stage)
        await client.call(join_of(stage), TIMEOUT_S)
        member = stage._member
        assert member is not None

        async def fails(*arguments: Any, **more: Any) -> None:
            raise DeadlineExceeded("no answer")

        def fails_at_once(*arguments: Any, **more: Any) -> None:
            raise DeadlineExceeded("no answer")

        with monkeypatch.context() as patch:
            patch.setattr(stage._transfer, "write", fails)
            patch.setattr(stage._transfer, "notify", fails_at_once)
            member.next.put(Hop(0, 1, CHUNK_DONE, b""))
            await until(lambda: stage._member is None, "leaving")
        assert (await client.call(StageProbe(), TIMEOUT_S)).group == ""
        await client.close()


async def test_bad_chunks_and_moves_are_refused(llama: Reference) -> None:
    """Rows without blocks, blocks outside of the pool and columns that differ never reach memory."""
    async with running_stage(llama, layer_ranges(3, 2)[1], num_blocks=8) as stage:
        client = client_of(stage)
        await client.call(join_of(stage), TIMEOUT_S)
        move = MoveBlocks("g", True, -1, b"", [9], [16], [0], 1.0)
        for bad in (
            move,
            msgspec.structs.replace(move, block_ids=[1], num_tokens=[17]),
            msgspec.structs.replace(move, block_ids=[1, 2]),
        ):
            with pytest.raises(MooncakeError, match="block"):
                await client.call(bad, TIMEOUT_S)
        former = msgspec.structs.replace(move, group="former", block_ids=[1])
        assert (await client.call(former, TIMEOUT_S)).status == "CANCELLED"
        # What would come behind a chunk that never comes ends at its deadline.
        late = msgspec.structs.replace(move, block_ids=[1], after=7, timeout_s=0.1)
        assert (await client.call(late, TIMEOUT_S)).status == "TIMED_OUT"

        good = ChunkRows(0, 16, 0, False, [1])
        member = stage._member
        assert member is not None
        for rows in (
            [],
            [msgspec.structs.replace(good, num_tokens=33, block_ids=[1, 2, 3])],
            [msgspec.structs.replace(good, block_ids=[8])],
            [msgspec.structs.replace(good, start=1)],
            [msgspec.structs.replace(good, num_tokens=0)],
        ):
            message = msgspec.msgpack.encode(StageChunk("g", 0, rows, []))
            with pytest.raises(ProtocolError):
                stage._queue_chunk(Notification("peer", CHUNK, message))
        assert member.queue.latest == -1
        await client.close()
