# SPDX-License-Identifier: Apache-2.0
"""Messages of several masters: replication from a leader to its standbys, and the query for the leader.

They are not among the store's messages, because they carry the master's log records, which those do not know.
"""

from __future__ import annotations

import msgspec

from mooncake.security.principal import EVERYBODY, NODES, Level
from mooncake.store.master.log_records import Record


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="follow"):
    """A standby has everything up to ``have`` of ``session`` (0: nothing) and wants what comes next."""

    standby: str
    address: str
    term: int
    session: int
    have: int


class Followed(msgspec.Struct, frozen=True, array_like=True, tag="followed"):
    """With these records, the standby has everything up to ``number``, if ``is_complete``.

    A ``session`` other than the requested one means that a new snapshot begins.
    """

    session: int
    number: int
    records: list[Record]
    is_complete: bool


class WhoLeads(msgspec.Struct, frozen=True, array_like=True, tag="who_leads"):
    """Query for the leader, which any client may send to any master."""


class Leads(msgspec.Struct, frozen=True, array_like=True, tag="leads"):
    """Reply to ``WhoLeads``."""

    address: str
    """Address of the leader; "" when it is not known."""
    term: int
    is_here: bool
    """The master that answers is the leader."""


ACCESS: dict[type[msgspec.Struct], frozenset[Level]] = {Follow: NODES, WhoLeads: EVERYBODY}
"""Permitted senders of each request, as in ``store.messages.ACCESS``. Only nodes may follow: a standby gets
a copy of the whole state, and replies wait for it."""
