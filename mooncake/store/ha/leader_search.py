# SPDX-License-Identifier: Apache-2.0
"""One search for the leading master: which address to query next, and what each one answered.

Several masters are tried in turn; one that does not lead names the leader. It sends nothing itself: where
addresses come from and how one is queried is up to ``master_client.py`` for processes, and to the simulator.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from mooncake.errors import DeadlineExceeded, MooncakeError
from mooncake.security.principal import EVERYBODY, Level

PROBE_S = 1.0
"""How long one of several masters may take to name the leader."""
PAUSE_S = 0.05
"""Pause between two rounds over all addresses."""
DOUBT_S = 3.0
"""Time without an answer until the other masters are queried for a new leader."""


class WhoLeads(msgspec.Struct, frozen=True, array_like=True, tag="who_leads"):
    """Query for the leader, which any client may send to any master."""


class Leads(msgspec.Struct, frozen=True, array_like=True, tag="leads"):
    """Reply to ``WhoLeads``."""

    address: str
    """Address of the leader; "" when it is not known."""
    term: int
    is_here: bool
    """The master that answers is the leader."""


ACCESS: dict[type[msgspec.Struct], frozenset[Level]] = {WhoLeads: EVERYBODY}
"""Permitted senders, as in ``store.messages.ACCESS``."""


class LeaderHint(Protocol):
    """Where a cluster's masters are searched for."""

    master: str
    """The name that a user gave."""
    hint: str
    """Address of the master last reported as the leader."""


class LeaderSearch:
    """State of one search: addresses still to query, and the answers so far."""

    def __init__(self, resolver: LeaderHint, name: str) -> None:
        self._resolver = resolver
        self._name = name
        self._to_query: list[str] = []
        self._queried: dict[str, None] = {}
        self.reasons: dict[str, str] = {}

    def begin_round(self, addresses: list[str]) -> None:
        self._to_query, self._queried = list(addresses), {}
        if not addresses:
            self.reasons[self._resolver.master] = "no master has led yet"

    def next(self) -> str | None:
        while self._to_query:
            address = self._to_query.pop(0)
            if address not in self._queried:
                self._queried[address] = None
                return address
        return None

    def take_answer(self, address: str, answer: Leads | MooncakeError) -> bool:
        """Enter an answer; returns whether ``address`` is the leader."""
        if isinstance(answer, MooncakeError):
            self.reasons[address] = str(answer)
            if self._resolver.hint == address:
                self._resolver.hint = ""
            return False
        if answer.is_here:
            self._resolver.hint = address
            return True
        self.reasons[address] = f"{address} does not lead"
        if answer.address:
            self._to_query.insert(0, answer.address)
        return False

    def failure(self, timeout_s: float) -> DeadlineExceeded:
        why = "; ".join(self.reasons.values()) or "no answer"
        return DeadlineExceeded(f"{self._name} can't be reached within {timeout_s:.3g} s: {why}")
