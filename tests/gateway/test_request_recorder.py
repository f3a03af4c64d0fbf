# SPDX-License-Identifier: Apache-2.0
"""Recordings: what is in them, what is not, and that they never cost a request."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.conductor.messages import Place, Refuse
from mooncake.errors import InvalidArgument, Refusal
from mooncake.gateway import request_recorder
from mooncake.gateway.gateway import Gateway, GatewaySettings
from mooncake.gateway.request_recorder import RecordingFile
from mooncake.inference.tokenizer import Tokenizer
from mooncake.prefix import block_hashes, root_hash, short_key
from mooncake.recorded_requests import RecordedRequest, RecordingHeader, decode_lines
from mooncake.sim.traces.trace import TraceRow, read_trace
from tests.gateway.conftest import Stack, running
from tests.gateway.doubles import BLOCK_TOKENS
from tests.gateway.engines import Front, fronting

PROMPT = list(range(20, 32))
SESSION = {"X-Session-ID": "session-of-alice"}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("requests-*.jsonl"))


def read(folder: Path) -> tuple[RecordingHeader, list[RecordedRequest]]:
    [path] = files(folder)
    return decode_lines(path.read_bytes().splitlines())


async def complete(
    stack: Stack, prompt: list[int], max_tokens: int = 6, headers: dict[str, str] | None = None
) -> list[int]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
    status, answer, _ = await stack.post("/v1/completions", body, headers)
    assert status == 200, answer
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


async def recorded(
    tokenizer: Tokenizer, folder: Path, act: Callable[[Stack], Any], **settings: Any
) -> tuple[RecordingHeader, list[RecordedRequest]]:
    async with running(tokenizer, record_folder=str(folder), **settings) as stack:
        await act(stack)
    return read(folder)


async def test_a_request_becomes_a_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def act(stack: Stack) -> None:
        await complete(stack, PROMPT, headers=SESSION)
        await complete(stack, [*PROMPT, 50], headers=SESSION)

    header, [first, second] = await recorded(tokenizer, tmp_path, act)
    assert header.block_tokens == BLOCK_TOKENS
    assert header.answers
    assert (first.input_length, first.output_length, first.cached_tokens) == (12, 6, 0)
    assert (second.input_length, second.output_length, second.cached_tokens) == (13, 6, 12)
    assert len(first.hash_ids) == len(PROMPT) // BLOCK_TOKENS
    assert second.hash_ids == first.hash_ids
    assert first.status == second.status == "done"
    assert first.session == second.session != ""
    assert first.gap_ms == 0.0 < second.gap_ms
    assert 0 < first.ttft_ms <= first.e2e_ms
    assert first.timestamp <= second.timestamp
    assert (first.prefill, second.prefill) == (0, 0)
    assert first.decode >= 1


async def test_the_next_turn_begins_with_the_ids_of_the_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def act(stack: Stack) -> None:
        answer = await complete(stack, PROMPT[:-1], 11)
        await complete(stack, [*PROMPT[:-1], *answer, 50])

    _, [first, second] = await recorded(tokenizer, tmp_path, act)
    assert first.output_hash_ids
    assert second.hash_ids == [*first.hash_ids, *first.output_hash_ids]


async def test_what_is_written_has_no_content(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A reader of the file who guesses the prompt finds neither it nor its session in there."""
    random = Random(1)
    prompt = [random.randrange(1, 60) for _ in range(40)]

    async def act(stack: Stack) -> None:
        await complete(stack, prompt, headers=SESSION)

    _, [row] = await recorded(tokenizer, tmp_path, act)
    content = files(tmp_path)[0].read_text()
    assert "alice" not in content
    guesses = {short_key(one) for one in block_hashes(prompt, BLOCK_TOKENS, root_hash())}
    plain = {guess & mask for guess in guesses for mask in ((1 << 60) - 1, (1 << 53) - 1, (1 << 64) - 1)}
    assert not plain & {*row.hash_ids, *row.output_hash_ids}
    # The dictionary: every first block of these tokens is hashed without the key, and by another one's.
    some = [[a, b, *prompt[2:BLOCK_TOKENS]] for a in range(60) for b in range(60)]
    keys = [short_key(block_hashes(one, BLOCK_TOKENS, root_hash())[0]) for one in some]
    assert row.hash_ids[0] not in {*keys, *(key & ((1 << 60) - 1) for key in keys)}
    assert row.hash_ids[0] not in request_recorder.aes_ids().blocks(keys)


async def test_the_same_prompt_has_other_ids_in_the_next_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        await recorded(tokenizer, tmp_path / name, lambda stack: complete(stack, PROMPT, headers=SESSION))
    (first_header, [first]), (second_header, [second]) = (read(tmp_path / name) for name in ("a", "b"))
    assert not set(first.hash_ids) & set(second.hash_ids)
    assert first.session != second.session
    assert first_header.key_id != second_header.key_id


async def test_only_the_owner_may_read_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    await recorded(tokenizer, tmp_path / "new", lambda stack: complete(stack, PROMPT))
    assert stat.S_IMODE(files(tmp_path / "new")[0].stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


async def test_a_refused_request_is_recorded_with_the_reason(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(place: Place) -> Refuse:
        return Refuse(place.request_id, Refusal("overloaded", "too much"), 1.0)

    async def act(stack: Stack) -> None:
        monkeypatch.setattr(stack.gateway.scheduling, "place", refuse)
        status, _, _ = await stack.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4})
        assert status == 429

    _, [row] = await recorded(tokenizer, tmp_path, act)
    assert (row.status, row.reason, row.output_length) == ("rejected", "overloaded", 0)
    assert row.hash_ids


async def test_a_full_file_is_followed_by_another_and_the_oldest_are_deleted(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_recorder, "FLUSH_INTERVAL_S", 3600.0)
    monkeypatch.setattr(RecordingFile, "is_full", lambda file, now: True)
    async with running(tokenizer, record_folder=str(tmp_path), record_keep_size=1 << 16) as stack:
        for number in range(3):
            await complete(stack, [number, *PROMPT])
            await stack.gateway.recorder._flush()
        assert len(files(tmp_path)) == 3
        os.utime(files(tmp_path)[0], (1, 1))
        await complete(stack, PROMPT)
        await stack.gateway.recorder._flush()
        assert len(files(tmp_path)) == 3  # the first one was too old


async def test_a_gateway_that_closes_waits_for_the_write_that_has_begun(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_recorder, "FLUSH_INTERVAL_S", 0.01)
    begun, write, num_writing = threading.Event(), RecordingFile.write, 0

    def slow(file: RecordingFile, content: bytes) -> None:
        nonlocal num_writing
        num_writing += 1
        assert num_writing == 1, "two threads write one file"
        begun.set()
        time.sleep(0.2)
        write(file, content)
        num_writing -= 1

    monkeypatch.setattr(RecordingFile, "write", slow)
    async with running(tokenizer, record_folder=str(tmp_path)) as stack:
        await complete(stack, PROMPT)
        await asyncio.to_thread(begun.wait, 30)
        await complete(stack, [*PROMPT, 50])
    assert num_writing == 0
    _, rows = read(tmp_path)
    assert [row.input_length for row in rows] == [12, 13]


async def test_a_disk_that_fails_costs_rows_and_no_request(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: RecordingFile, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    async with running(tokenizer, record_folder=str(tmp_path)) as stack:
        dropped, written = (request_recorder._rows.labels(name) for name in ("dropped", "written"))
        before = dropped._value.get(), written._value.get()
        with monkeypatch.context() as patched:
            patched.setattr(RecordingFile, "write", fail)
            await complete(stack, PROMPT)
            await stack.gateway.recorder._flush()
        assert (dropped._value.get(), written._value.get()) == (before[0] + 1, before[1])
        await complete(stack, PROMPT)
    _, rows = read(tmp_path)
    assert len(rows) == 1
    assert (dropped._value.get(), written._value.get()) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("is_full", [False, True])
async def test_rows_that_end_during_a_write_that_fails_are_written_or_counted(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr(request_recorder, "FLUSH_INTERVAL_S", 3600.0)
    begun, may_fail, closed = threading.Event(), threading.Event(), []

    def fail(file: RecordingFile, content: bytes) -> None:
        begun.set()
        may_fail.wait(30)
        raise OSError(errno.ENOSPC, "no space left")

    def close(file: RecordingFile) -> None:
        closed.append(file)
        raise OSError(errno.ENOSPC, "no space left")  # as on a network file system

    async with running(tokenizer, record_folder=str(tmp_path)) as stack:
        dropped, written = (request_recorder._rows.labels(name) for name in ("dropped", "written"))
        before = dropped._value.get(), written._value.get()
        with monkeypatch.context() as patched:
            patched.setattr(RecordingFile, "write", fail)
            patched.setattr(RecordingFile, "close", close)
            patched.setattr(RecordingFile, "is_full", lambda file, now: is_full)
            await complete(stack, PROMPT)
            flushing = asyncio.create_task(stack.gateway.recorder._flush())
            await asyncio.to_thread(begun.wait, 30)
            for number in range(2):
                await complete(stack, [*PROMPT, number])
            may_fail.set()
            await flushing
        assert len(closed) == 1
        # Those that ended meanwhile were added to the same file, unless it was full.
        assert dropped._value.get() == before[0] + (1 if is_full else 3)
    assert dropped._value.get() + written._value.get() == sum(before) + 3
    rows = [row for path in files(tmp_path) for row in decode_lines(path.read_bytes().splitlines())[1]]
    assert len(rows) == (2 if is_full else 0)


async def test_rows_are_dropped_while_the_disk_is_too_far_behind(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_recorder, "MAX_PENDING_BYTES", 0)
    monkeypatch.setattr(request_recorder, "FLUSH_INTERVAL_S", 3600.0)
    _, rows = await recorded(tokenizer, tmp_path, lambda stack: complete(stack, PROMPT))
    assert rows == []


async def test_the_latest_requests_are_kept_within_limits(tokenizer: Tokenizer) -> None:
    async with running(tokenizer, recent_requests=3, recent_blocks=8) as stack:
        for number in range(5):
            await complete(stack, [number, *PROMPT], 1)
        recent = stack.gateway.recorder.recent(0.0)
        assert len(recent) == 2  # of 3 blocks each
        assert all(len(row.keys) == row.num_prompt_keys == 3 for row in recent)
        assert stack.gateway.recorder.recent(float("inf")) == []
    async with running(tokenizer, recent_requests=0) as stack:
        await complete(stack, PROMPT, 1)
        assert stack.gateway.recorder.recent(0.0) == []


def test_blocks_of_a_recording_are_whole_blocks_of_the_conductor() -> None:
    with pytest.raises(InvalidArgument, match="multiple of block_tokens"):
        Gateway(GatewaySettings(record_block_tokens=48), None)


async def test_longer_blocks_have_fewer_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def act(stack: Stack) -> None:
        await complete(stack, PROMPT)

    header, [row] = await recorded(tokenizer, tmp_path, act, record_block_tokens=2 * BLOCK_TOKENS)
    assert header.block_tokens == 2 * BLOCK_TOKENS
    assert len(row.hash_ids) == len(PROMPT) // header.block_tokens


async def test_a_recording_is_a_trace(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def act(stack: Stack) -> None:
        for number in range(3):
            await complete(stack, [*PROMPT, number], headers=SESSION)

    _, lines = await recorded(tokenizer, tmp_path, act)
    trace = read_trace(str(files(tmp_path)[0]))
    assert (trace.format, trace.block_tokens) == ("recording", BLOCK_TOKENS)
    rows: list[TraceRow] = list(trace)
    assert [row.recorded for row in rows] == lines
    assert [row.keys for row in rows] == [tuple(line.hash_ids) for line in lines]


async def test_requests_to_other_engines_are_recorded(tmp_path: Path) -> None:
    async with fronting(record_folder=str(tmp_path)) as front:
        assert isinstance(front, Front)
        await front.complete("one two three four five six seven eight", 4)
    header, [row] = read(tmp_path)
    assert not header.answers
    assert (row.status, row.output_length, row.output_hash_ids) == ("done", 4, [])
    assert row.input_length >= 1
