"""What a conductor is told and what it answers: the events and effects of the core, and its wire.

Owns the nouns only. They are msgspec structs because most of them also travel by RPC between a gateway
and a conductor of its own process.
"""

from __future__ import annotations

import msgspec

from mooncake.conductor.load import ProbeOutcome
from mooncake.errors import Refusal
from mooncake.prefix import BlockHash
from mooncake.types import InstanceId, Role, Tier

# --- events ------------------------------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Find instances for a request. Placing the same request again replaces its earlier placement."""

    request_id: str
    num_tokens: int
    hashes: list[BlockHash] = []
    "The prompt's full blocks, in order."
    affinity: str = ""
    exclude: list[InstanceId] = []
    "Instances that already failed this request."
    needs_prefill: bool = True
    "False when the prompt's KV was computed before and only a decode instance is wanted."
    lifetime_s: float = 3600.0
    "After so long the placement counts as finished, in case nobody reports it."


class Prefilled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The prompt is computed; from now on only its decode instance is busy with it."""

    request_id: str


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request has ended, well or not; its instances are free of it."""

    request_id: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request failed through the fault of ``instance``."""

    instance: InstanceId
    reason: str
    request_id: str = ""


class Probed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of a ``Probe``; ``detail`` in words."""

    instance: InstanceId
    outcome: ProbeOutcome
    detail: str = ""


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    instance: InstanceId
    hashes: list[BlockHash]
    tier: Tier = Tier.DEVICE


class BlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    instance: InstanceId
    hashes: list[BlockHash]
    tier: Tier = Tier.DEVICE


class BlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    instance: InstanceId


class AddInstance(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` joins. Adding it again ends a drain; with another role it changes sides."""

    instance: InstanceId
    role: Role


class RemoveInstance(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` gets no more requests; those under way are not disturbed."""

    instance: InstanceId


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No new requests for ``instance``; it leaves when the last one is done."""

    instance: InstanceId


Event = (
    Place
    | Prefilled
    | Finished
    | Failed
    | Probed
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | AddInstance
    | RemoveInstance
    | Drain
)


# --- effects -----------------------------------------------------------------------------------------


class Decision(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where a request goes. Without ``prefill`` the decode instance computes the prompt itself."""

    request_id: str
    prefill: InstanceId | None
    decode: InstanceId
    reason: str
    num_cached_tokens: int = 0
    "Prompt tokens that the instance which computes the prompt was believed to hold."
    degraded: str = ""
    "Why this is not the usual walk; empty when it is."


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody can take the request now; the next attempt has a chance after ``retry_after_s``."""

    request_id: str
    refusal: Refusal
    retry_after_s: float


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask an instance for its health and report ``Probed``."""

    instance: InstanceId


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Follow the instance's KV events from the beginning of what it remembers."""

    instance: InstanceId


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop following the instance's KV events."""

    instance: InstanceId


class StateChanged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """For logs: an instance's state as people see it. "gone" after the last."""

    instance: InstanceId
    role: Role
    before: str
    after: str
    reason: str


Effect = Decision | Refuse | Probe | Watch | Unwatch | StateChanged


class InstanceStatus(msgspec.Struct, frozen=True):
    """One row of ``/status``."""

    instance: InstanceId
    role: Role
    health: str
    detail: str
    num_requests: int
    queued_tokens: int
    num_blocks: int
    num_placed: int


# --- the rest of the wire ----------------------------------------------------------------------------


class Noted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to every fact."""


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Status(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rows: list[InstanceStatus]


class GetStory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str


class Story(msgspec.Struct, frozen=True, array_like=True, tag=True):
    lines: list[str]


REPLIES = (Decision, Refuse, Noted, Status, Story)
