"""The names of what must hold in the simulated worlds: one for each rule of each checker.

A violation says which rule it breaks. For each of them ``tests/sim`` has a bug in shipped code that is
found by exactly this rule, so that no rule is there in name only.
"""

from __future__ import annotations

import enum


class Violation(AssertionError):
    """A rule is broken. Without ``rule``: an invariant that a core checks by itself."""

    def __init__(self, message: str, rule: Invariant | None = None) -> None:
        super().__init__(message)
        self.rule = rule


class Invariant(enum.StrEnum):
    """Of the store's worlds, and then of the transfer world."""

    CORE = "core"
    """Every core's own check holds after every step."""
    VALUE = "value"
    """A read that succeeds returns a value that somebody put under that key, whole."""
    PHANTOM = "phantom"
    """After an acknowledged removal nobody reads the key, until somebody begins to put it."""
    STALE = "stale"
    """After an acknowledged put of an absent key, or a replacement, nobody reads another value."""
    LEASE = "lease"
    """Until a lease ends its bytes stay what they are, also for a reader who looks without checking."""
    SPACE = "space"
    """No space is promised to two at once, not by a master and its successor either."""
    REASON = "reason"
    """What is not readable any more went for a reason that the master can tell."""
    CAUSE = "cause"
    """What went was evicted, removed or replaced, or its nodes were lost, and for nothing else."""
    REPLICA = "replica"
    """An object is not lost with one node while another has it in memory."""
    QUOTA = "quota"
    """A put that is granted leaves its tenant within its quota."""
    DEADLINE = "deadline"
    """Every operation ends by its deadline."""
    HEALTH = "health"
    """When all is well again, every client can put and get."""
    PROMISE = "promise"
    """When all is well again, what was acknowledged and not lost with its nodes can be read."""
    WRITING = "writing"
    """When all is quiet, no object is still being written."""
    COPYING = "copying"
    """When all is quiet, no copy is half done, and no task is left."""
    LEAK = "leak"
    """When all is quiet, every byte taken is an object's."""
    JOURNAL = "journal"
    """When all is quiet, each node's journal says of its segments what the master does."""

    SLICES = "slices"
    """What a batch that is done was to move lies where it was to go, and is counted."""
    KEPT = "kept"
    """Memory that a batch has written stays as written until the next batch writes it."""
    ENDS = "ends"
    """Every batch ends by its deadline."""
    STATUS = "status"
    """A batch that failed says why."""
    BLAME = "blame"
    """A batch fails only if every way to its peer failed it, or there was no time; none when all is well."""
    RETURN = "return"
    """When all is well again, every rail is taken back."""
