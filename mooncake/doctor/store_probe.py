# SPDX-License-Identifier: Apache-2.0
"""The store, as a client meets it: its master's status, and objects that are put, read back and removed.

One is put without a policy, and a durable one for each node with an SSD, because only durable puts fail
where an SSD can't be written. The objects are small, in a name space of their own, and removed at the end.
Calls block: run them in a thread.
"""

from __future__ import annotations

import contextlib
import secrets

from mooncake import clock
from mooncake.doctor.facts import Reach, StoreFacts, Trouble
from mooncake.doctor.http_probe import speaks_tls
from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    PeerLost,
    ProtocolError,
    Refusal,
    StorageError,
)
from mooncake.rpc.client import split_address
from mooncake.security import Identity, tool_identity
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import TransferEngine, transfer_from_environment
from mooncake.types import Tier

OBJECT_BYTES = 256 << 10
MAX_SSDS = 8
"""SSDs that are examined."""
DURABLE_S = 5.0
"""How long one durable put may take. A node that can't write its SSD fails at once, but the master tries
again until the put's time is over, which is longer than an examination should wait."""
IDLE_STATES = 8
"""Segments that are named in a finding."""


class StoreProbe:
    """A connection to the store for one examination. Use it as a context."""

    def __init__(self, master: str, timeout_s: float) -> None:
        self._master, self._timeout_s = master, timeout_s
        self._store: Store | None = None
        self._durable: Store | None = None
        """The same with the timeout of a durable put."""
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        self._stack.close()

    def read(self) -> StoreFacts:
        """Connect, read the status, and try an object."""
        facts = StoreFacts(self._master)
        try:
            self._connect(tool_identity())
            status = self._status()
            _note_status(facts, status)
        except MooncakeError as error:
            facts.reach = Reach(_trouble(error), str(error)[:500])
            return facts
        if facts.capacity_bytes:
            self._try_object(facts)
        if facts.is_read_back:
            self._try_ssds(facts, status)
        return facts

    def num_stored(self) -> int | None:
        """How many objects were ever stored, as far as the master counts; None without a connection."""
        try:
            status = self._status()
        except MooncakeError:
            return None
        return status.num_objects + status.num_writing + status.counts.get("evicted_objects", 0)

    def _connect(self, identity: Identity) -> None:
        settings = transfer_from_environment().for_tool()
        engine = self._stack.enter_context(TransferEngine(settings, identity=identity))
        store = Store(self._master, engine, StoreSettings(self._timeout_s), identity)
        self._store = self._stack.enter_context(store)
        self._store.connect()
        durable = StoreSettings(min(DURABLE_S, self._timeout_s))
        self._durable = self._stack.enter_context(Store(self._master, engine, durable, identity))

    def _status(self) -> m.MasterStatus:
        if self._store is None:
            raise PeerLost("not connected")
        status = self._store.ask(m.GetMasterStatus())
        assert isinstance(status, m.MasterStatus)
        return status

    def _try_object(self, facts: StoreFacts) -> None:
        assert self._store is not None
        key, content = _new_key(), secrets.token_bytes(OBJECT_BYTES)
        try:
            try:
                refusal = self._store.put(key, content)
            except StorageError as error:  # so a master answers at first, until it has noted the disk's error
                refusal = Refusal("storage_error", str(error))
            if refusal is not None:
                facts.put_refusal, facts.put_refusal_code = str(refusal), refusal.code
                return
            facts.is_read_back = self._store.get(key) == content
            self._store.remove([key], force=True)  # reading it has leased it
        except (MooncakeError, OSError) as error:
            facts.is_read_back = False
            facts.object_problem = str(error)[:500]

    def _try_ssds(self, facts: StoreFacts, status: m.MasterStatus) -> None:
        """Put a durable object to the memory of each node whose SSD takes objects."""
        memory = {
            one.node: one.segment for one in status.segments if one.tier is Tier.MEMORY and one.is_writable
        }
        ssds = [one for one in status.segments if one.tier is Tier.SSD and one.is_writable]
        ends_at = clock.monotonic() + self._timeout_s
        for ssd in [one for one in ssds if one.node in memory][:MAX_SSDS]:
            if clock.monotonic() > ends_at:
                break  # those that were examined have used up the time, and are findings
            self._try_ssd(facts, ssd.segment, memory[ssd.node])

    def _try_ssd(self, facts: StoreFacts, ssd: str, memory: str) -> None:
        assert self._store is not None and self._durable is not None
        key = _new_key()
        policy = m.PutPolicy(preferred_segments=[memory], is_durable=True)
        try:
            refusal = self._durable.put(key, secrets.token_bytes(OBJECT_BYTES), policy)
            if refusal is not None:
                facts.ssd_failures[ssd] = str(refusal)
        except DeadlineExceeded:
            failure = self._failure_of_copy(key)
            seen = f"no copy was on SSD within {self._durable.settings.timeout_s:g} s"
            if failure:
                facts.ssd_failures[ssd] = f"{seen}; {failure}"[:500]
            else:
                facts.ssd_delays[ssd] = seen
        except (MooncakeError, OSError) as error:
            facts.ssd_failures[ssd] = str(error)[:500]
        finally:
            with contextlib.suppress(MooncakeError, OSError):
                self._store.remove([key], force=True)

    def _failure_of_copy(self, key: str) -> str:
        """Why the last copy of this object failed, as far as the master knows; "" if none did."""
        assert self._store is not None
        try:
            answer = self._store.ask(m.ObjectStory(key, self._store.settings.tenant))
        except MooncakeError:
            return ""
        assert isinstance(answer, m.StoryLines)
        reasons = [line.partition(": ")[2] for line in answer.lines if " given up: " in line]
        return reasons[-1] if reasons else ""


def _new_key() -> str:
    return f"mooncake-doctor/{secrets.token_hex(16)}"


async def explain_trouble(facts: StoreFacts) -> None:
    """Find out whether the master can't be reached because only one side uses TLS."""
    if facts.reach.trouble not in (Trouble.REFUSED, Trouble.SILENT, Trouble.OTHER):
        return
    try:
        host, port = split_address(facts.address.split(",")[0])
    except InvalidArgument:
        return
    speaks = await speaks_tls(host, port)
    has_tls = tool_identity().has_tls
    if speaks is not None and speaks != has_tls:
        sides = ("speaks TLS", "has no certificate") if speaks else ("does not speak TLS", "has one")
        facts.reach = Reach(
            Trouble.TLS, f"the master {sides[0]}, this process {sides[1]}; {facts.reach.detail}"
        )


def _note_status(facts: StoreFacts, status: m.MasterStatus) -> None:
    facts.capacity_bytes, facts.allocated_bytes = status.capacity_bytes, status.allocated_bytes
    facts.num_objects, facts.num_segments = status.num_objects, len(status.segments)
    facts.num_wrong_reports = sum(one.num_reports for one in status.reporters)
    idle = [one for one in status.segments if not one.is_writable]
    facts.idle_segments = tuple(
        f"{one.segment} ({one.tier}): {'draining' if one.is_draining else one.state}" for one in idle
    )[:IDLE_STATES]
    facts.num_writable = sum(one.is_writable and one.tier is not Tier.SSD for one in status.segments)


def _trouble(error: MooncakeError) -> Trouble:
    if isinstance(error, AccessDenied):
        return Trouble.DENIED
    if isinstance(error, DeadlineExceeded):
        return Trouble.SILENT
    return Trouble.OTHER if isinstance(error, ProtocolError) else Trouble.REFUSED
