# SPDX-License-Identifier: Apache-2.0
"""The store, as a client meets it: its master's status, and an object that is put, read back and removed.

The object is small, in a name space of its own, and removed at the end. Calls block: run them in a thread.
"""

from __future__ import annotations

import contextlib
import secrets

from mooncake.doctor.facts import Reach, StoreFacts, Trouble
from mooncake.doctor.http_probe import speaks_tls
from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    PeerLost,
    ProtocolError,
)
from mooncake.rpc.client import split_address
from mooncake.security import Identity, tool_identity
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import TransferEngine, transfer_from_environment
from mooncake.types import Tier

OBJECT_BYTES = 256 << 10
IDLE_STATES = 8
"""Segments that are named in a finding."""


class StoreProbe:
    """A connection to the store for one examination. Use it as a context."""

    def __init__(self, master: str, timeout_s: float) -> None:
        self._master, self._timeout_s = master, timeout_s
        self._store: Store | None = None
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        self._stack.close()

    def read(self) -> StoreFacts:
        """Connect, read the status, and try an object."""
        facts = StoreFacts(self._master)
        try:
            self._connect(tool_identity())
            self._read_status(facts)
        except MooncakeError as error:
            facts.reach = Reach(_trouble(error), str(error)[:500])
            return facts
        if facts.capacity_bytes:
            self._try_object(facts)
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

    def _status(self) -> m.MasterStatus:
        if self._store is None:
            raise PeerLost("not connected")
        status = self._store.ask(m.GetMasterStatus())
        assert isinstance(status, m.MasterStatus)
        return status

    def _read_status(self, facts: StoreFacts) -> None:
        status = self._status()
        facts.capacity_bytes, facts.allocated_bytes = status.capacity_bytes, status.allocated_bytes
        facts.num_objects, facts.num_segments = status.num_objects, len(status.segments)
        facts.num_wrong_reports = sum(one.num_reports for one in status.reporters)
        idle = [one for one in status.segments if not one.is_writable]
        facts.idle_segments = tuple(
            f"{one.segment} ({one.tier}): {'draining' if one.is_draining else one.state}" for one in idle
        )[:IDLE_STATES]
        facts.num_writable = sum(one.is_writable and one.tier is not Tier.SSD for one in status.segments)

    def _try_object(self, facts: StoreFacts) -> None:
        assert self._store is not None
        key, content = f"mooncake-doctor/{secrets.token_hex(16)}", secrets.token_bytes(OBJECT_BYTES)
        try:
            refusal = self._store.put(key, content)
            if refusal is not None:
                facts.put_refusal = str(refusal)
                return
            facts.is_read_back = self._store.get(key) == content
            self._store.remove([key], force=True)  # reading it has leased it
        except (MooncakeError, OSError) as error:
            facts.is_read_back = False
            facts.object_problem = str(error)[:500]


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


def _trouble(error: MooncakeError) -> Trouble:
    if isinstance(error, AccessDenied):
        return Trouble.DENIED
    if isinstance(error, DeadlineExceeded):
        return Trouble.SILENT
    return Trouble.OTHER if isinstance(error, ProtocolError) else Trouble.REFUSED
