# SPDX-License-Identifier: Apache-2.0
"""Addresses of peers: which are known, which do not answer, and which sent wrong bytes.

Peers learn of each other from each other, so an address is a hint and their number is bounded. A peer that
does not answer is tried again later, at growing intervals; one that sent wrong chunks repeatedly is marked
and not asked for a while.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mooncake.errors import InvalidArgument
from mooncake.rpc.client import split_address

MAX_PEERS = 512
MAX_ADDRESS = 262
"""Characters of a host name, a colon and a port."""
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
MARKED_S = 600.0
"""How long a marked peer is not asked."""
STORY_LINES = 32


def is_peer_address(text: str) -> bool:
    """Whether ``text``, which came from a peer, may be connected to and shown: ``host:port`` in ASCII."""
    if len(text) > MAX_ADDRESS or not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        host, _ = split_address(text)
        host.encode("idna")
    except (InvalidArgument, UnicodeError):
        return False
    return True


@dataclass
class PeerRecord:
    """What is known of one address."""

    is_configured: bool = False
    seen_at: float = 0.0
    num_failures: int = 0
    has_left: bool = False
    """Its end was announced, and it has neither asked nor answered since."""
    retry_at: float = 0.0
    marked_until: float = 0.0
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LINES))


class SwarmPeers:
    """Addresses (``host:port``) of peers. ``configured`` ones are never dropped for others."""

    def __init__(self, configured: tuple[str, ...] = (), own: str = "") -> None:
        self.own = own
        self._records = {address: PeerRecord(is_configured=True) for address in configured if address != own}

    def __len__(self) -> int:
        return len(self._records)

    def name_own(self, address: str) -> None:
        """Set this peer's own address, which may have been configured as that of a peer."""
        self.own = address
        self._records.pop(address, None)

    def add(self, address: str, now: float) -> bool:
        """Add an address that another peer named; False when it is known, is none, or there is no room."""
        if address == self.own or address in self._records or not is_peer_address(address):
            return False
        if len(self._records) >= MAX_PEERS and not self._drop_one(now):
            return False
        self._records[address] = PeerRecord(seen_at=now)
        return True

    def usable(self, now: float) -> list[str]:
        """Addresses that may be asked now, those without failures first."""
        found = [
            (record.num_failures, address)
            for address, record in self._records.items()
            if record.retry_at <= now and record.marked_until <= now
        ]
        return [address for _, address in sorted(found)]

    def recent(self, now: float, limit: int) -> list[str]:
        """The addresses to name to others: those that answered last."""
        found = [
            (-record.seen_at, address)
            for address, record in self._records.items()
            if not record.num_failures and record.marked_until <= now
        ]
        return [address for _, address in sorted(found)[:limit]]

    def answered(self, address: str, now: float) -> None:
        record = self._records.get(address)
        if record is not None:
            record.seen_at, record.num_failures, record.retry_at = now, 0, 0.0
            record.has_left = False

    def failed(self, address: str, now: float, reason: str) -> None:
        """Record that a peer did not answer; it is asked again after a growing interval."""
        record = self._records.get(address)
        if record is None:
            return
        record.num_failures += 1
        record.retry_at = now + min(MAX_RETRY_S, FIRST_RETRY_S * 2 ** min(record.num_failures - 1, 10))
        record.lines.append(f"{now:.3f} failed: {reason}")

    def left(self, address: str, now: float) -> None:
        """Record that a peer has ended. It is tried again like one that does not answer: it may come back."""
        record = self._records.get(address)
        if record is not None and not record.has_left:
            self.failed(address, now, "it has ended")
            record.has_left = True

    def returned(self, address: str, now: float) -> None:
        """Record that a peer asks; if it had ended, it is there again."""
        record = self._records.get(address)
        if record is not None and record.has_left:
            self.answered(address, now)

    def mark(self, address: str, now: float, reason: str) -> None:
        """Record that a peer sent wrong bytes: it is not asked for ``MARKED_S``."""
        record = self._records.setdefault(address, PeerRecord(seen_at=now))
        record.marked_until = now + MARKED_S
        record.lines.append(f"{now:.3f} marked: {reason}")

    def is_marked(self, address: str, now: float) -> bool:
        record = self._records.get(address)
        return record is not None and record.marked_until > now

    def check(self) -> None:
        assert self.own not in self._records
        num_learned = sum(not record.is_configured for record in self._records.values())
        assert num_learned <= MAX_PEERS

    def story(self, key: str) -> list[str]:
        """Failures and marks of an address, oldest first."""
        record = self._records.get(key)
        return [] if record is None else list(record.lines)

    def _drop_one(self, now: float) -> bool:
        """Drop the learned address with the most failures; a marked one would come back unmarked."""
        worst = max(
            (
                (record.num_failures, -record.seen_at, address)
                for address, record in self._records.items()
                if not record.is_configured and record.num_failures and record.marked_until <= now
            ),
            default=None,
        )
        if worst is None:
            return False
        del self._records[worst[2]]
        return True
