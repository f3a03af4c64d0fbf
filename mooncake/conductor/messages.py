# SPDX-License-Identifier: Apache-2.0
"""The messages of the conductor: the events and effects of its core, and its RPC messages.

Owns the data types only. They are msgspec structs because most of them also travel by RPC between a gateway
and a conductor of its own process.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.scaling_signal import DesiredChanged, ScalingStatus
from mooncake.errors import Refusal
from mooncake.http.worker_stats import KvMemoryStats, StageStats
from mooncake.prefix import BlockKey
from mooncake.security.principal import NODES, NODES_AND_ADMINS, TRUSTED, Level
from mooncake.tracing.spans import Span
from mooncake.types import InstanceId, Tier, WorkerRole

MAX_TERM = (1 << 63) - 1
"""Largest term of a leader: there it stays, since a message can't hold a larger number."""

POOL: InstanceId = "pool"
"""The store as an instance of the index: it holds blocks like others but serves no requests."""

# --- events ------------------------------------------------------------------------------------------


class Place(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Find instances for a request. Placing the same request again replaces its earlier placement."""

    request_id: str
    num_tokens: int
    keys: list[BlockKey] = []
    "The prompt's full blocks, in order."
    affinity: str = ""
    exclude: list[InstanceId] = []
    "Instances that already failed this request."
    needs_prefill: bool = True
    "False when the prompt's KV was computed before and only a decode instance is wanted."
    lifetime_s: float = 3600.0
    "After this time the placement counts as finished even if its end was not reported."
    slo_ttft_s: float = 0.0
    "The first token is wanted within this time; 0 for the conductor's setting."
    slo_tbt_s: float = 0.0
    "The next ones are wanted within this time of each other; 0 for the conductor's setting."
    priority: int = 0
    "Lower goes first."
    max_output_tokens: int = 0
    "Limit on the answer's length; 0 when unknown."
    scope: str = ""
    "Tenant, model and adapter: requests of one scope resemble each other."
    bare_keys: list[BlockKey] = []
    "The same tokens' blocks without a salt, to distinguish a miss by salt from others. May be empty."
    is_text: bool = False
    "The keys name pieces of text, because the tokens are unknown; no instance publishes such blocks."
    trace: str = ""
    "The gateway's span as a `traceparent`; empty where the request is not traced."


class Prefilled(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The prompt is computed; from now on only its decode instance is busy with it. 0: not measured."""

    request_id: str
    queued_s: float = 0.0
    computed_s: float = 0.0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    "Tokens that were in the instance's own memory."
    loaded_s: float = 0.0
    num_loaded_tokens: int = 0
    "Tokens whose KV came from elsewhere."
    has_begun: bool = False
    "Its answer has begun, so admission can't reject it now."
    stages: list[StageStats] = []
    "The stages of the prefill group that computed it; none for a single worker."
    is_assumed: bool = False
    "Its answer comes whole, so its first token is not seen: this is the instant for which it was predicted."


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request has ended, well or not; its instances no longer work on it. 0: not measured."""

    request_id: str
    num_output_tokens: int = 0
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    is_complete: bool = False
    "The client got its whole answer."


class ChunkMeasured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` computed the prompt tokens from ``first_token`` on in one go."""

    instance: InstanceId
    first_token: int
    num_tokens: int
    seconds: float


class StepMeasured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` made one token for each of ``batch_size`` requests."""

    instance: InstanceId
    batch_size: int
    context_tokens: int
    "Context tokens of all requests of the batch together."
    seconds: float


class TransferMeasured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """KV went from ``source`` to ``target``."""

    source: InstanceId
    target: InstanceId
    size_bytes: int
    seconds: float


class FetchMeasured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` loaded the KV of ``num_tokens`` from the pool. In tokens, since fetches are predicted from
    tokens, and how many bytes these have depends on the model."""

    instance: InstanceId
    num_tokens: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request failed through the fault of ``instance``."""

    instance: InstanceId
    reason: str
    request_id: str = ""


class Probed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The result of a ``Probe``; ``detail`` explains it as text."""

    instance: InstanceId
    outcome: ProbeOutcome
    detail: str = ""
    is_engine: bool = False
    "It is not this package's worker, so others can load only those of its blocks that are in the store."
    push_port: int = 0
    "Port at which it answers requests for KV that it computes; 0: nothing is pushed to or from it."
    kv_memory: KvMemoryStats | None = None
    "None where it does not report it."


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    instance: InstanceId
    keys: list[BlockKey]
    tier: Tier = Tier.DEVICE
    scope: str = ""
    "Blocks of different scopes are never the same; empty for our own workers, whose keys suffice."


class BlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    instance: InstanceId
    keys: list[BlockKey]
    tier: Tier = Tier.DEVICE
    scope: str = ""
    reason: str = "evicted"


class BlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    instance: InstanceId
    reason: str = "cleared"


class Window(msgspec.Struct, frozen=True, array_like=True):
    """A condition on prefixes that an instance can use: the last ``num_blocks`` blocks are marked, or all."""

    num_blocks: int
    step: int
    "And the prefix has a multiple of this number of blocks."


class PrefixWindows(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` can use a prefix only if it fulfils all these conditions; see ``cache_groups.py``."""

    instance: InstanceId
    windows: list[Window]


class Silent(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` publishes no KV events: it is assumed to hold the blocks of the prompts it was given."""

    instance: InstanceId


class AddInstance(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` joins. Adding it again ends a drain; with another role it changes sides."""

    instance: InstanceId
    role: WorkerRole
    kv_tokens: int = 0
    "Tokens whose KV fits into its memory; 0 when not reported."
    is_reminder: bool = False
    "It was added before: a conductor that has it, draining or not, changes nothing."


class RemoveInstance(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance`` gets no more requests; requests in flight continue."""

    instance: InstanceId


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No new requests for ``instance``; it leaves when the last one is done."""

    instance: InstanceId


class Placed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request was placed elsewhere: by another conductor, or by a gateway that could reach none.

    It is entered into the accounts as it was decided. Repeating it changes nothing.
    """

    place: Place
    "Without the keys of blocks where no instance's blocks are inferred from its prompts."
    decision: Decision
    "Its ``turn`` counts from now, as clocks of hosts differ."
    age_s: float = 0.0
    "Seconds since it was placed."
    is_prefilled: bool = False
    "Its prompt is computed."
    claim: int = 0
    "Number of the latest claim of its gateway that named it; 0: none has."


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An answer left its decode instance for that of another placement, ``place_id``: its instance drains, or
    an operator has moved it.

    From now on ``request_id`` is placed there, and ``place_id`` is forgotten. Repeating it changes nothing.
    """

    request_id: str
    place_id: str
    outcome: str
    "Where its KV came from, as in ``mooncake_gateway_moves``."


class Assumed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``instance``, which publishes no KV events, was assumed to hold these blocks; the latest used last."""

    instance: InstanceId
    keys: list[BlockKey]


Event = (
    Place
    | Placed
    | Moved
    | Assumed
    | Prefilled
    | Finished
    | Failed
    | Probed
    | ChunkMeasured
    | StepMeasured
    | TransferMeasured
    | FetchMeasured
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | PrefixWindows
    | Silent
    | AddInstance
    | RemoveInstance
    | Drain
)


# --- effects -----------------------------------------------------------------------------------------


class Prediction(msgspec.Struct, frozen=True, array_like=True):
    """Expected times of a request when it was placed."""

    queue_s: float = 0.0
    "Seconds until its prompt's turn comes."
    fetch_s: float = 0.0
    "Seconds for loading its cached blocks from elsewhere."
    prefill_s: float = 0.0
    "Seconds for computing the rest."
    ttft_s: float = 0.0
    "Seconds until its first token; at most the sum of the above, as they overlap."
    tbt_s: float = 0.0
    "Seconds between its next tokens."
    output_tokens: int = 0


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of the prompt that its prefill instance should have from ``source`` rather than compute."""

    source: InstanceId
    first_block: int
    num_blocks: int


class Decision(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where a request goes. Without ``prefill`` the decode instance computes the prompt itself."""

    request_id: str
    prefill: InstanceId | None
    decode: InstanceId
    reason: str
    num_cached_tokens: int = 0
    "Prompt tokens that the instance which computes the prompt was believed to hold."
    degraded: str = ""
    "Why this is not the usual path; empty when it is."
    prediction: Prediction | None = None
    fetches: list[Fetch] = []
    turn: float = 0.0
    "Among the prompts that wait at the prefill instance, the one with the lowest turn is computed next."
    policy: str = ""
    "The policy that chose (``SchedulingSettings.scheduling``)."
    push_from: str = ""
    "``host:port`` of the prefill instance's listener, if it pushes the KV to ``decode``; else the pool does."
    num_held_tokens: int = 0
    "Leading tokens of the prompt that some instance or the pool was believed to hold."


class Refuse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No instance can take the request now; a retry may succeed after ``retry_after_s``."""

    request_id: str
    refusal: Refusal
    retry_after_s: float
    prediction: Prediction | None = None
    "Expected times on the best instances; None when there were none."


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Query an instance's health and report ``Probed``."""

    instance: InstanceId


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Follow the instance's KV events from the oldest one it can replay."""

    instance: InstanceId
    was_suspect: bool = False
    "It is followed, and was absent for a moment at most: the same publishers need not be followed anew."


class Unwatch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop following the instance's KV events."""

    instance: InstanceId


class StateChanged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An instance's state for logs; "gone" after its removal."""

    instance: InstanceId
    role: WorkerRole
    before: str
    after: str
    reason: str


Effect = Decision | Refuse | Probe | Watch | Unwatch | StateChanged | DesiredChanged


class InstanceStatus(msgspec.Struct, frozen=True):
    """One row of ``/status``."""

    instance: InstanceId
    role: WorkerRole
    health: str
    detail: str
    num_requests: int
    queued_tokens: int
    num_blocks: int
    num_placed: int
    is_silent: bool = False
    "No KV events of it are read: its blocks are inferred from the prompts it was given."
    has_answered: bool = True
    "It has answered a probe of this conductor; one that never did may not exist yet. True where unknown."


# --- the rest of the wire ----------------------------------------------------------------------------


class Noted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to every fact."""


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class AdmissionStatus(msgspec.Struct, frozen=True):
    """How requests are placed and admitted, and counts of recent rejections, for ``/status``.

    The settings are the conductor's own; those of a gateway before it may be others.
    """

    rule: str = ""
    rejected: dict[str, int] = {}
    "Number of rejected requests by the code of the refusal."
    audited: int = 0
    "Requests that were rejected and served all the same, to check the rejection."
    audited_ended: int = 0
    audited_in_slo: int = 0
    scheduling: str = ""
    "How instances are chosen."
    slo_ttft_s: float = 0.0
    "Objectives of requests that name none; 0 for no limit."
    slo_tbt_s: float = 0.0
    audit_share: float = 0.0
    turn_share: float = 0.0


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """What one of several conductors states of itself. Leaders are compared by term, then by id."""

    id: int
    "Drawn at random by each process."
    term: Annotated[int, msgspec.Meta(ge=0, le=MAX_TERM)] = 0
    "Number of the leader's term that it last knew of, 0 for none."
    is_leader: bool = False

    @property
    def rank(self) -> int:
        """The conductor with the highest rank is the one to use; followers have none."""
        return self.term if self.is_leader else 0


class Status(msgspec.Struct, frozen=True, array_like=True, tag=True):
    rows: list[InstanceStatus]
    admission: AdmissionStatus = AdmissionStatus()
    standing: Standing | None = None
    scaling: list[ScalingStatus] = []


class ClaimRequests(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests that a gateway has in flight; it will report their ends to the conductor that gets this.

    A claim may have several parts. What came by the same connection before the first one, and what none of
    them names, has ended; without its first or its last part a claim ends nothing.
    """

    placed: list[Placed]
    number: int = 0
    "A later claim of the same gateway has a higher number."
    is_first: bool = False
    is_last: bool = False
    pending: list[str] = []
    """In the last part: further requests that have not ended, or whose ends are reported later. This claim
    does not say where they are placed."""


class Abandoned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The connection of the request's gateway is lost: it has ended, unless its gateway has changed over."""

    request_id: str


ReportedFact = (
    Placed
    | Moved
    | Assumed
    | Prefilled
    | Finished
    | Failed
    | ChunkMeasured
    | StepMeasured
    | TransferMeasured
    | FetchMeasured
    | BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | AddInstance
    | RemoveInstance
    | Drain
)
"""A fact that a gateway may report to a conductor, or a conductor to another one."""

SharedFact = ReportedFact | Abandoned
"""A fact that a conductor passes on to the others of its cluster."""


class Replicate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Facts that clients reported to the sender, in order; also its heartbeat."""

    sender: Standing
    first: int
    "Number of the first fact in the sender's stream to this receiver."
    facts: list[SharedFact]
    is_snapshot: bool = False
    "The facts are the instances and all requests of the sender's clients: what it reported before is over."
    ended: list[tuple[str, float]] = []
    """In a snapshot: requests that ended lately, each with the seconds since then. The receiver may have
    missed their ends."""


class Replicated(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to ``Replicate``."""

    standing: Standing
    next: int
    "Number of the fact that is expected next; -1: facts are missing and a snapshot is wanted."


class GetStory(msgspec.Struct, frozen=True, array_like=True, tag=True):
    key: str


class Story(msgspec.Struct, frozen=True, array_like=True, tag=True):
    lines: list[str]


class GetSpans(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request the conductor's part of a trace: the spans below a gateway's. Answered with ``FoundSpans``."""

    parent_id: str


class FoundSpans(msgspec.Struct, array_like=True, tag=True):
    spans: list[Span]


ACCESS: dict[type[msgspec.Struct], frozenset[Level]] = {
    Place: TRUSTED,
    Prefilled: TRUSTED,
    Finished: TRUSTED,
    Failed: TRUSTED,
    Moved: TRUSTED,
    ChunkMeasured: NODES,
    StepMeasured: NODES,
    TransferMeasured: NODES,
    FetchMeasured: NODES,
    BlocksStored: NODES,
    BlocksRemoved: NODES,
    BlocksCleared: NODES,
    AddInstance: NODES_AND_ADMINS,
    RemoveInstance: NODES_AND_ADMINS,
    Drain: NODES_AND_ADMINS,
    GetStatus: TRUSTED,
    GetStory: TRUSTED,
    GetSpans: TRUSTED,
    ClaimRequests: TRUSTED,
    Replicate: NODES,
}
"""Which role may send which message to a conductor, where peers are authenticated."""

REPLIES = (Decision, Refuse, Noted, Status, Story, FoundSpans)
PEER_REPLIES = (Replicated,)
