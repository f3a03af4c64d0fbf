# SPDX-License-Identifier: Apache-2.0
"""Names of the invariants of the simulated worlds: one for each rule of each checker.

A violation names the invariant that it breaks. For each of them ``tests/sim`` has a bug in shipped code that
is found by exactly this rule, so that no rule exists in name only.
"""

from __future__ import annotations

import enum


class Violation(AssertionError):
    """A broken invariant. Without ``rule``: one that a core checks by itself."""

    def __init__(self, message: str, rule: Invariant | None = None) -> None:
        super().__init__(message)
        self.rule = rule


class Invariant(enum.StrEnum):
    """Invariants of the store's worlds, and then of the transfer world."""

    CORE = "core"
    """Every core's own check holds after every step."""
    VALUE = "value"
    """A read that succeeds returns a value that was put under that key, whole."""
    PHANTOM = "phantom"
    """After an acknowledged removal the key is not read until a put of it begins."""
    STALE = "stale"
    """After an acknowledged put of an absent key, or a replacement, no other value is read."""
    LEASE = "lease"
    """Until a lease ends its bytes do not change, also for a reader that does not verify checksums."""
    SPACE = "space"
    """No space is granted twice at a time, not by a master and its successor either."""
    REASON = "reason"
    """Whatever is no longer readable went for a reason that the master records."""
    CAUSE = "cause"
    """Whatever went was evicted, removed or replaced, or its nodes were lost, and for no other reason."""
    REPLICA = "replica"
    """An object is not lost with one node while another has it in memory."""
    QUOTA = "quota"
    """A put that is granted leaves its tenant within its quota."""
    DEADLINE = "deadline"
    """Every operation ends by its deadline."""
    HEALTH = "health"
    """After everything has healed, every client can put and get."""
    PROMISE = "promise"
    """After everything has healed, what was acknowledged and not lost with its nodes can be read."""
    WRITING = "writing"
    """After everything has settled, no object is still being written."""
    COPYING = "copying"
    """After everything has settled, no copy is half done, and no task is left."""
    LEAK = "leak"
    """After everything has settled, every allocated byte belongs to an object."""
    JOURNAL = "journal"
    """After everything has settled, each node's journal agrees with the master about its segments."""

    SLICES = "slices"
    """The bytes of a completed batch are at their destination, and are counted."""
    KEPT = "kept"
    """Memory that a batch has written does not change until the next batch writes it."""
    ENDS = "ends"
    """Every batch ends by its deadline."""
    STATUS = "status"
    """A failed batch has a reason."""
    BLAME = "blame"
    """A batch fails only if every path to its peer failed or its time ran out; none fails after healing."""
    RETURN = "return"
    """After everything has healed, every rail is used again."""
