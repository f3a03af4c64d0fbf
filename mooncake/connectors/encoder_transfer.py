# SPDX-License-Identifier: Apache-2.0
"""Moves encoder outputs between an engine's processes and the store, and counts what came of it.

The shell around ``encoder_output``: hashes contents and packs values in threads (both take as long as reading
the bytes), asks the store with a deadline, and verifies what arrives. A failure is a miss or an output that
is not saved, never an error of the engine. Callbacks get the results, on the thread of the session's loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from prometheus_client import Counter

from mooncake import clock
from mooncake.connectors.encoder_output import (
    DAMAGES,
    EncoderIdentity,
    EncoderOutput,
    Expectation,
    pack,
    unpack,
)
from mooncake.connectors.session import PoolSession
from mooncake.connectors.store_link import CircuitBreaker, LinkSettings
from mooncake.errors import MooncakeError, Refusal
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.types import ObjectKey

log = get_logger(__name__)

MAX_PENDING_BYTES = 1 << 30
"""Limit of the outputs of one process that are being saved; one beyond it is not saved."""

lookups = Counter(
    "mooncake_connectors_encoder_lookups",
    "Encoder outputs looked up in the store: hit, miss, refused (not what the engine expects), failed.",
    ["outcome"],
    registry=registry,
)
saves = Counter(
    "mooncake_connectors_encoder_saves",
    "Computed encoder outputs: saved (or already there), refused by the store or for want of space, failed.",
    ["outcome"],
    registry=registry,
)
moved_bytes = Counter(
    "mooncake_connectors_encoder_bytes",
    "Bytes of encoder outputs that were loaded and verified, or saved.",
    ["direction"],
    registry=registry,
)


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderLookup:
    """The end of one lookup."""

    outcome: str
    """``hit``, ``miss``, ``refused`` or ``failed``."""
    key: ObjectKey | None
    """The store's key; None if the content can't be named."""
    output: EncoderOutput | None
    """The verified output; None without one, or if only its presence was asked for."""
    reason: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class EncoderSave:
    """The end of one save."""

    outcome: str
    """``saved``, ``refused`` or ``failed``."""
    size_bytes: int
    seconds: float


class EncoderTransfer:
    """One process's transfers of encoder outputs. Its methods may be called from any thread."""

    def __init__(self, session: PoolSession, settings: LinkSettings) -> None:
        self._session = session
        self._settings = settings
        self._breaker = CircuitBreaker(settings.retry_after_s)
        self._pending_bytes = 0

    def look_up(
        self,
        content: Callable[[], bytes],
        identity: EncoderIdentity,
        expected: Expectation,
        is_loaded: bool,
        done: Callable[[EncoderLookup], None],
    ) -> None:
        """Begin to look for the output of ``content``, a function that returns its digest.

        ``is_loaded`` false: only ask whether the store has it. ``done`` is called once, with the result.
        """
        self._session.start(self._look_up(content, identity, expected, is_loaded, done))

    async def _look_up(
        self,
        content: Callable[[], bytes],
        identity: EncoderIdentity,
        expected: Expectation,
        is_loaded: bool,
        done: Callable[[EncoderLookup], None],
    ) -> None:
        began = time.perf_counter()
        key: ObjectKey | None = None
        found: Refusal | EncoderOutput | None = None
        outcome, reason = "failed", "the connector is closing"
        try:
            key = identity.key(await asyncio.to_thread(content))
            if self._breaker.is_open:
                reason = "the store could not be reached a moment ago"
            elif not await self._has(key):
                outcome, reason = "miss", "not in the store"
            elif not is_loaded:
                outcome, reason = "hit", "in the store"
            else:
                found = await self._load(key, expected)
                outcome, reason = _outcome_of(found)
        except MooncakeError as error:
            self._breaker.trip("encoder_lookup", error)
            reason = str(error)
        except Exception as error:  # a bug of ours is no reason to fail the request
            reason = str(error) or type(error).__name__
            log.exception("operation_failed", operation="encoder_lookup")
        finally:
            lookups.labels(outcome).inc()
            output = found if isinstance(found, EncoderOutput) else None
            moved_bytes.labels("loaded").inc(output.size_bytes if output else 0)
            done(EncoderLookup(outcome, key, output, reason, time.perf_counter() - began))

    async def _has(self, key: ObjectKey) -> bool:
        deadline = clock.monotonic() + self._settings.lookup_timeout_s
        return (await self._session.store.exists([key], deadline))[0]

    async def _load(self, key: ObjectKey, expected: Expectation) -> EncoderOutput | Refusal | None:
        value = await self._session.store.get(key)
        if value is None:  # evicted, or no replica of it is intact
            return None
        found = await asyncio.to_thread(unpack, key, value, expected)
        if isinstance(found, Refusal):
            log.warning("encoder_output_refused", key=key, code=found.code, reason=found.reason)
            if found.code in DAMAGES:
                # Else the right one could not be saved while this one is there.
                await self._session.store.remove([key], force=True)
        return found

    def save(self, key: ObjectKey, output: EncoderOutput, done: Callable[[EncoderSave], None]) -> None:
        """Begin to save ``output``, whose memory must not change before ``done`` is called, once."""
        self._session.start(self._save(key, output, done))

    async def _save(self, key: ObjectKey, output: EncoderOutput, done: Callable[[EncoderSave], None]) -> None:
        began = time.perf_counter()
        outcome, size_bytes = "failed", output.size_bytes
        self._pending_bytes += size_bytes
        try:
            if self._pending_bytes > MAX_PENDING_BYTES or self._breaker.is_open:
                outcome = "refused"
                return
            value = await asyncio.to_thread(pack, key, output)
            refusal = await self._session.store.put(key, value)
            outcome = "saved" if refusal is None else "refused"
            if refusal is not None:
                log.debug("encoder_output_not_saved", key=key, reason=str(refusal))
        except MooncakeError as error:
            self._breaker.trip("encoder_save", error)
        except Exception:  # such as a dtype that the format does not have
            log.exception("operation_failed", operation="encoder_save")
        finally:
            self._pending_bytes -= size_bytes
            saves.labels(outcome).inc()
            moved_bytes.labels("saved").inc(size_bytes if outcome == "saved" else 0)
            done(EncoderSave(outcome, size_bytes, time.perf_counter() - began))


def _outcome_of(found: EncoderOutput | Refusal | None) -> tuple[str, str]:
    if found is None:
        return "miss", "evicted since it was found"
    if isinstance(found, Refusal):
        return "refused", str(found)
    return "hit", "loaded"
