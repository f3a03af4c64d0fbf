"""One search for the master that leads: whom to ask next, and what was heard. It asks nobody itself.

Several masters are tried one after the other; one that does not lead says who does. Where the addresses come
from, and how one is asked, ``master_client.py`` knows for live processes and the simulator for its own.
"""

from __future__ import annotations

from typing import Protocol

from mooncake.errors import DeadlineExceeded, MooncakeError
from mooncake.store.ha.standby_replication import Leads

PROBE_S = 1.0
"""How long one of several masters may take to say who leads."""
PAUSE_S = 0.05
"""Between two rounds of asking all of them."""
DOUBT_S = 3.0
"""After so long without an answer, the others are asked whether the leader is another by now."""


class LeaderHint(Protocol):
    """Where a cluster's masters are looked for."""

    master: str
    """As people name it."""
    hint: str
    """Address of who was last said to lead."""


class LeaderSearch:
    """One search for the leader: whom to ask next, and what was heard."""

    def __init__(self, resolver: LeaderHint, name: str) -> None:
        self._resolver = resolver
        self._name = name
        self._to_ask: list[str] = []
        self._asked: dict[str, None] = {}
        self.reasons: dict[str, str] = {}

    def begin_round(self, addresses: list[str]) -> None:
        self._to_ask, self._asked = list(addresses), {}
        if not addresses:
            self.reasons[self._resolver.master] = "nobody has led yet"

    def next(self) -> str | None:
        while self._to_ask:
            address = self._to_ask.pop(0)
            if address not in self._asked:
                self._asked[address] = None
                return address
        return None

    def heard(self, address: str, answer: Leads | MooncakeError) -> bool:
        """Whether that is the leader."""
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
            self._to_ask.insert(0, answer.address)
        return False

    def failure(self, timeout_s: float) -> DeadlineExceeded:
        why = "; ".join(self.reasons.values()) or "no answer"
        return DeadlineExceeded(f"{self._name} can't be reached within {timeout_s:.3g} s: {why}")
