# SPDX-License-Identifier: Apache-2.0
"""Recordings of the requests that the gateway has served, without their content.

Owns the files and the latest requests in memory. A request is noted when it ends, from what the gateway knows
of it anyway: its place event, its end, and what its instances measured. With a folder set, it becomes a line
of a file (``recorded_requests``), whose ids are made under the file's own key. The key is drawn when the file
is begun, is only in memory, and is dropped with the file: afterwards no guess of a prompt can be checked
against the file.

The latest requests are kept in memory for questions about the present load; their keys are those that the
conductor has in memory as well, and they leave the process only as sums.

Lines are collected on the event loop and written in a thread. Memory and disk are bounded: rows that can't be
written are dropped and counted, and the oldest files are deleted first. Nothing here fails a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import Counter

from mooncake import clock, metrics
from mooncake.conductor.messages import Finished
from mooncake.errors import InvalidArgument
from mooncake.gateway.retries import PlacedRequest
from mooncake.log import get_logger
from mooncake.prefix import BlockHash, BlockKey, block_hashes, short_key
from mooncake.recorded_requests import (
    MAX_RECORDED_TOKENS,
    RECORDING_VERSION,
    KeyedIds,
    RecordedRequest,
    RecordingHeader,
    coarsened,
)
from mooncake.types import InstanceId

log = get_logger(__name__)

FLUSH_INTERVAL_S = 1.0
MAX_PENDING_BYTES = 16 << 20
"""Most bytes of rows that wait for the disk."""
MAX_SESSIONS = 65_536
"""Sessions whose last end is remembered, for the gap before their next request."""
MAX_INSTANCES = 4096
_PATTERN = "requests-*.jsonl"

_rows = Counter(
    "mooncake_gateway_recorded_requests",
    "Requests that ended while a recording was written, by outcome: written, or dropped.",
    ["outcome"],
    registry=metrics.registry,
)
_bytes = Counter(
    "mooncake_gateway_recorded_bytes",
    "Bytes written to recordings.",
    registry=metrics.registry,
)


@dataclass(frozen=True)
class RecordingLimits:
    """Where recordings are written, and how much of them is kept."""

    folder: str
    file_size_bytes: int
    file_s: float
    keep_s: float
    keep_size_bytes: int
    block_tokens: int
    "Tokens of a block in the conductor's keys."
    recorded_block_tokens: int
    "Tokens of a block in the files, a multiple of it."
    longest_s: float


def aes_ids() -> KeyedIds:
    """Ids under a fresh random key, which nothing else holds. Raises InvalidArgument without the package."""
    try:
        # Late: a gateway that writes no recording needs no such package.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ModuleNotFoundError as error:
        raise InvalidArgument("record_folder", "set", "empty without the package `cryptography`") from error
    # Every block is a different prefix: equal ones must give equal ids, so there is nothing to chain.
    encryptor = Cipher(algorithms.AES(secrets.token_bytes(32)), modes.ECB()).encryptor()
    return KeyedIds(encryptor.update, secrets.token_bytes(32))


class RecordingFile:
    """One file and its key. Rows are added on the event loop; ``write`` may run in a thread."""

    def __init__(self, limits: RecordingLimits, now: float, wall: float, has_answers: bool) -> None:
        self._ids = aes_ids()
        self._limits = limits
        self._began = now
        key_id = secrets.token_hex(4)
        began = datetime.fromtimestamp(wall, UTC)
        self.path = Path(limits.folder) / f"requests-{began:%Y%m%dT%H%M%S}-{key_id}.jsonl"
        self._factor = limits.recorded_block_tokens // limits.block_tokens
        self._numbers: dict[InstanceId, int] = {}
        self._encode = msgspec.json.Encoder().encode
        header = RecordingHeader(
            RECORDING_VERSION,
            limits.recorded_block_tokens,
            key_id,
            round(wall, 3),
            limits.longest_s,
            has_answers,
        )
        self.pending = [self._encode(header) + b"\n"]
        self.pending_bytes = len(self.pending[0])
        self._num_pending = 0
        """Rows in ``pending``."""
        self.size_bytes = 0
        self._descriptor = -1

    def is_full(self, now: float) -> bool:
        limits = self._limits
        size_bytes = self.size_bytes + self.pending_bytes
        return size_bytes >= limits.file_size_bytes or now - self._began >= limits.file_s

    def add(self, row: EndedRequest) -> None:
        """Add a line. Raises BufferError when the disk is too far behind."""
        if self.pending_bytes > MAX_PENDING_BYTES:
            raise BufferError
        line = self._encode(self._recorded(row)) + b"\n"
        self.pending.append(line)
        self.pending_bytes += len(line)
        self._num_pending += 1

    def _recorded(self, row: EndedRequest) -> RecordedRequest:
        ids, facts = self._ids, row.facts
        whole = coarsened(row.keys, self._factor)
        num_input = row.num_prompt_keys // self._factor
        hash_ids = ids.blocks(whole)
        return msgspec.structs.replace(
            facts,
            timestamp=round(max(0.0, row.arrived_at - self._began) * 1e3, 3),
            hash_ids=hash_ids[:num_input],
            output_hash_ids=hash_ids[num_input:],
            session=ids.name("session", row.session),
            tenant=ids.name("tenant", row.tenant),
            prefill=self._number(row.prefill),
            decode=self._number(row.decode),
        )

    def _number(self, instance: InstanceId | None) -> int:
        if not instance or (instance not in self._numbers and len(self._numbers) >= MAX_INSTANCES):
            return -1
        return self._numbers.setdefault(instance, len(self._numbers))

    def take(self) -> tuple[bytes, int]:
        """What is to be written next, and the number of rows in it."""
        content, num_rows = b"".join(self.pending), self._num_pending
        self.pending, self.pending_bytes, self._num_pending = [], 0, 0
        return content, num_rows

    def write(self, content: bytes) -> None:
        """Append to the file, which only its owner may read. Raises OSError."""
        if self._descriptor < 0:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = os.open(self.path, flags, 0o600)
        view = memoryview(content)
        while view:
            num_written = os.write(self._descriptor, view)
            self.size_bytes += num_written
            view = view[num_written:]

    def close(self) -> None:
        """End the file; repeated calls have no effect. Raises OSError."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended, as the gateway remembers it."""

    arrived_at: float
    "On the monotonic clock."
    num_prompt_keys: int
    keys: array[int]
    "The conductor's keys of the prompt's full blocks, then of those that the answer completes."
    session: str
    tenant: str
    prefill: InstanceId | None
    decode: InstanceId
    facts: RecordedRequest
    "The other fields; its times and ids are those of no file."


class RequestRecorder:
    """Notes requests as they end. ``start`` and ``close`` it on one loop."""

    def __init__(self, limits: RecordingLimits, num_recent: int, recent_blocks: int) -> None:
        """Raises InvalidArgument."""
        if limits.recorded_block_tokens % limits.block_tokens:
            allowed = f"a multiple of block_tokens, {limits.block_tokens}"
            raise InvalidArgument("record_block_tokens", limits.recorded_block_tokens, allowed)
        self._limits = limits
        self._num_recent, self._recent_blocks = num_recent, recent_blocks
        self._recent: deque[EndedRequest] = deque()
        self._num_blocks = 0
        self._ended_at: OrderedDict[str, float] = OrderedDict()
        self._file: RecordingFile | None = None
        self._is_broken = False
        self._writing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        if limits.folder:
            aes_ids()  # refuses now what could not be written later

    @property
    def is_on(self) -> bool:
        return bool(self._limits.folder) or self._num_recent > 0

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of ``recent``."""
        return self._limits.block_tokens

    async def start(self) -> None:
        if self._limits.folder:
            self._writing = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Write what is pending and end the file."""
        self._closing.set()
        if self._writing is not None:
            # Not cancelled: its thread would write on, beside the last write and after the file is closed.
            await self._writing
            self._writing = None
        await self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def watch(self, request: PlacedRequest, http: Any, tail: BlockHash = b"") -> None:
        """Have ``request`` noted when it ends. ``tail``: hash of its prompt's last full block."""
        if self.is_on:
            client = http.state.client
            request.end_listeners.append(self._ended)
            request.tenant = client.entry.tenant_name if client is not None else ""
            request.tail = tail

    def recent(self, since: float) -> list[EndedRequest]:
        """The remembered requests that arrived since then, in the order of their ends."""
        return [row for row in self._recent if row.arrived_at >= since]

    def _ended(self, request: PlacedRequest, finished: Finished, output: Sequence[int]) -> None:
        try:
            row = self._row_of(request, finished, output)
        except (OverflowError, TypeError):  # ids of an instance that are no tokens
            _rows.labels("dropped").inc()
            return
        self._remember(row)
        if not self._limits.folder:
            return
        now = clock.monotonic()
        if self._file is None:
            has_answers = bool(request.tail)
            self._file = RecordingFile(
                self._limits, min(now, row.arrived_at), self._wall(row, now), has_answers
            )
        try:
            self._file.add(row)
        except BufferError:
            _rows.labels("dropped").inc()

    def _wall(self, row: EndedRequest, now: float) -> float:
        return clock.wall() - max(0.0, now - row.arrived_at)

    def _row_of(self, request: PlacedRequest, finished: Finished, output: Sequence[int]) -> EndedRequest:
        place, now = request.place_event, clock.monotonic()
        keys = array("Q", place.keys)
        num_prompt_keys = len(keys)
        if request.tail and output:
            keys.extend(self._answer_keys(request, output))
        session = place.affinity
        gap_s = self._gap_s(session, request.arrived_at, now)
        is_refused = bool(request.refusal) and not finished.is_complete
        measured = request.prefilled
        status = "done" if finished.is_complete else "rejected" if is_refused else "failed"
        facts = RecordedRequest(
            0.0,
            min(max(1, place.num_tokens), MAX_RECORDED_TOKENS),
            min(finished.num_output_tokens, MAX_RECORDED_TOKENS),
            [],
            status=status,  # type: ignore[arg-type]
            reason=request.refusal[:64] if is_refused else "",
            gap_ms=_millis(gap_s),
            ttft_ms=_millis(finished.ttft_s),
            tbt_ms=_millis(finished.tbt_s),
            e2e_ms=_millis(now - request.arrived_at),
            cached_tokens=min(request.num_cached_tokens, place.num_tokens),
            loaded_tokens=measured.num_loaded_tokens if measured is not None else 0,
            queued_ms=_millis(measured.queued_s) if measured is not None else 0.0,
            computed_ms=_millis(measured.computed_s) if measured is not None else 0.0,
            computed_tokens=measured.num_computed_tokens if measured is not None else 0,
            is_text=place.is_text,
        )
        route = request.route
        return EndedRequest(
            request.arrived_at,
            num_prompt_keys,
            keys,
            session,
            request.tenant,
            route.prefill,
            route.decode,
            facts,
        )

    def _answer_keys(self, request: PlacedRequest, output: Sequence[int]) -> list[BlockKey]:
        """Keys of the blocks that the answer completes: those that the session's next prompt begins with."""
        size = self._limits.block_tokens
        rest = request.prompt_tokens[len(request.place_event.keys) * size :]
        return [short_key(one) for one in block_hashes([*rest, *output], size, request.tail)]

    def _gap_s(self, session: str, arrived_at: float, now: float) -> float:
        if not session:
            return 0.0
        before = self._ended_at.pop(session, None)
        self._ended_at[session] = now
        if len(self._ended_at) > MAX_SESSIONS:
            self._ended_at.popitem(last=False)
        return max(0.0, arrived_at - before) if before is not None else 0.0

    def _remember(self, row: EndedRequest) -> None:
        if not self._num_recent:
            return
        self._recent.append(row)
        self._num_blocks += len(row.keys)
        while len(self._recent) > self._num_recent or self._num_blocks > self._recent_blocks:
            self._num_blocks -= len(self._recent.popleft().keys)

    async def _run(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), FLUSH_INTERVAL_S)
            await self._flush()

    async def _flush(self) -> None:
        """Write what is pending, and end a file that is full. A disk that fails loses rows, not requests."""
        file = self._file
        if file is None:
            return
        is_full = file.is_full(clock.monotonic())
        if is_full:
            self._file = None  # the next row begins another one, under another key
        content, num_rows = file.take()
        try:
            if content:
                await asyncio.to_thread(file.write, content)
                _bytes.inc(len(content))
                _rows.labels("written").inc(num_rows)
                num_rows = 0  # an error from here on loses none of them
            if is_full:
                file.close()
                log.info("recording_ended", file=file.path.name, size_bytes=file.size_bytes)
                await asyncio.to_thread(self._delete_old)
            if self._is_broken:
                self._is_broken = False
                log.info("recording_resumed", file=file.path.name)
        except OSError as error:
            # A line may be torn, and a reader refuses that: the file ends here.
            with contextlib.suppress(OSError):  # for the same reason, as on a network file system
                file.close()
            if self._file is file:  # rows that ended during the write may have begun another file
                self._file = None
            _, num_later = file.take()
            _rows.labels("dropped").inc(num_rows + num_later)
            if not self._is_broken:
                self._is_broken = True
                log.error("recording_failed", file=str(file.path), reason=error.strerror or str(error))

    def _delete_old(self) -> None:
        """Delete files that are too old, or beyond the size that is kept, the oldest first."""
        found = []
        for path in Path(self._limits.folder).glob(_PATTERN):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        oldest, kept_bytes = clock.wall() - self._limits.keep_s, 0
        for changed_at, size_bytes, path in sorted(found, reverse=True):
            kept_bytes += size_bytes
            if changed_at < oldest or kept_bytes > self._limits.keep_size_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()
                    log.info("recording_deleted", file=path.name, size_bytes=size_bytes)


def _millis(seconds: float) -> float:
    return round(max(0.0, seconds) * 1e3, 3)
