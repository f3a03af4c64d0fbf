# SPDX-License-Identifier: Apache-2.0
"""Whether the bytes of a small object travel in the messages to and from the master.

A get of a few KiB over a network or TCP takes two round trips: to the master, and to the node. A master that
maps the memory of the node, because both run on one host, can answer the lookup with the bytes, and take them
with the message that ends a put. Where client and node share memory nothing is gained: bytes that the client
copies itself take less time than bytes in a message.

A client can't know where the master runs, so it tries: after a small object was moved over a network it asks
for the next one's bytes, and when they do not come it waits for a number of operations that grows.
"""

from __future__ import annotations

MAX_SENT_BYTES = 32 << 10
"""Largest object that is sent to the master: a larger one takes the client no longer to write itself."""
FIRST_REST = 4
MAX_REST = 256
"""Number of operations without a further attempt, after failed ones."""


class SmallValues:
    """What a client has learned about its master. Threads may share it: a lost update costs one attempt."""

    __slots__ = ("_rest", "_resting", "is_remote", "takes_values")

    def __init__(self) -> None:
        self.is_remote = False
        """The last small object was moved by others than this process."""
        self._rest = FIRST_REST
        self._resting = 0
        self.takes_values = False
        """The master writes values for this client."""

    def moved(self, is_direct: bool) -> None:
        """A small object was moved without the master, ``is_direct``: by this process itself."""
        self.is_remote = not is_direct
        if is_direct:
            self.takes_values = False

    def sends(self, size_bytes: int) -> bool:
        """Whether the master may be sent an object of that size, if it takes values."""
        return size_bytes <= MAX_SENT_BYTES and self.wants()

    def wants(self) -> bool:
        """Whether to ask the master for the bytes of an object, or whether it takes them."""
        if not self.is_remote:
            return False
        if self._resting:
            self._resting -= 1
            return False
        return True

    def answered(self, is_given: bool) -> None:
        """The master has moved the bytes as was asked, or not."""
        if is_given:
            self._rest = FIRST_REST
        else:
            self.takes_values = False
            self._resting, self._rest = self._rest, min(2 * self._rest, MAX_REST)
