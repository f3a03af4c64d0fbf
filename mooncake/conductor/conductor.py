"""The conductor: requests and facts about instances in, placements with their reasons out.

It composes the index, the load accounts and the policies, and owns what joins them: which request is
placed where, until somebody reports its end or its time is over. It refuses to know HTTP, sockets and
clocks; ``server.py`` performs its effects. A wrong or missing hint costs speed, never an answer: every
worker can compute every prompt, so when no instance of a role is ready one of the other role does the work
("degraded"), and only when nobody is left is a request refused.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import msgspec

from mooncake.conductor.health import Health, Instance
from mooncake.conductor.index import PrefixIndex
from mooncake.conductor.messages import (
    AddInstance,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Decision,
    Drain,
    Effect,
    Event,
    Failed,
    Finished,
    InstanceStatus,
    Place,
    Prefilled,
    Probe,
    Probed,
    Refuse,
    RemoveInstance,
    StateChanged,
    Unwatch,
    Watch,
)
from mooncake.conductor.predict import CostModels
from mooncake.conductor.select import POLICIES, Choice, Job, Policy
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import Refusal
from mooncake.machine import Wake
from mooncake.types import InstanceId, Role

_STORY_LENGTH = 4000
_REMEMBERED_BLOCKS = 1 << 20


class _Placement(msgspec.Struct):
    prefill: InstanceId | None
    decode: InstanceId
    placed_at: float
    expires_at: float


class Conductor:
    """The core. ``random`` serves the policy "random" only."""

    def __init__(self, settings: SchedulingSettings, random: Random, costs: CostModels | None = None) -> None:
        self.costs = costs or CostModels()
        self.index = PrefixIndex(_REMEMBERED_BLOCKS)
        self.instances: dict[InstanceId, Instance] = {}
        self._settings = settings
        self._random = random
        self._placements: dict[str, _Placement] = {}
        self._choosable: dict[Role, list[Instance]] = {}  # made when asked for, dropped at any change
        self._turns: dict[str, dict[InstanceId, float]] = {"prefill": {}, "decode": {}}
        self._mean_duration_s = 1.0
        # (instant, "probe" | "expiry", instance or request). An entry counts only if it still agrees with
        # next_probe_at or expires_at; cancelling is done by changing those.
        self._timers: list[tuple[float, str, str]] = []
        self._story: deque[tuple[float, tuple[str, ...], str]] = deque(maxlen=_STORY_LENGTH)
        self._handlers: dict[type, Callable[..., list[Effect]]] = {
            Place: self._place,
            Prefilled: self._prefilled,
            Finished: self._finished,
            Failed: self._failed,
            Probed: self._probed,
            BlocksStored: self._blocks_stored,
            BlocksRemoved: self._blocks_removed,
            BlocksCleared: self._blocks_cleared,
            AddInstance: self._add,
            RemoveInstance: self._remove,
            Drain: self._drain,
            Wake: self._wake,
        }

    def __repr__(self) -> str:
        states = ", ".join(f"{one.id} {one.state}" for one in self.instances.values())
        return f"<Conductor [{states}] {len(self._placements)} requests, {self.index.num_blocks} blocks>"

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        return self._handlers[type(event)](event, now)

    def deadline(self) -> float | None:
        return self._timers[0][0] if self._timers else None

    @property
    def num_timers(self) -> int:
        """Timers kept, stale ones included."""
        return len(self._timers)

    def status(self) -> list[InstanceStatus]:
        """Every instance, in the order in which they joined."""
        return [
            InstanceStatus(
                instance=one.id,
                role=one.role,
                health=one.state,
                detail=one.detail,
                num_requests=one.num_requests,
                queued_tokens=one.queued_tokens,
                num_blocks=self.index.num_blocks_of(one.id),
                num_placed=one.num_placed,
            )
            for one in self.instances.values()
        ]

    def story(self, key: str) -> list[str]:
        """What happened to a request or an instance."""
        return [f"{now:.3f} {text}" for now, keys, text in self._story if key in keys]

    def check(self) -> None:
        self.index.check()
        for instance in self.instances.values():
            instance.check()
            for request_id in instance.prefills:
                assert self._placements[request_id].prefill == instance.id
            for request_id in instance.decodes:
                assert self._placements[request_id].decode == instance.id
            if instance.next_probe_at is not None:
                assert (instance.next_probe_at, "probe", instance.id) in self._timers
        for role, pool in self._choosable.items():
            assert pool == [one for one in self.instances.values() if one.role is role and one.may_be_chosen]
        for request_id, placement in self._placements.items():
            assert (placement.expires_at, "expiry", request_id) in self._timers

    # --- requests

    def _place(self, event: Place, now: float) -> list[Effect]:
        effects = self._release(event.request_id, now)
        settings = self._settings
        full_blocks = event.keys[: event.num_tokens // settings.block_tokens]
        job = Job(
            event.num_tokens,
            self.index.matches(full_blocks),
            settings.block_tokens,
            now,
            settings.slow_start_s,
            event.affinity,
            random=self._random,
        )
        prefill_policy, decode_policy = POLICIES[settings.scheduling]
        exclude = dict.fromkeys(event.exclude)
        decode = self._choose(Role.DECODE, decode_policy, job, exclude)
        if decode is None and self._is_full(Role.DECODE, exclude):
            return [*effects, self._refuse(event, exclude, Role.DECODE, now)]
        prefill = None
        if event.needs_prefill or decode is None:
            prefill = self._choose(Role.PREFILL, prefill_policy, job, exclude)
            if prefill is None and self._is_full(Role.PREFILL, exclude):
                return [*effects, self._refuse(event, exclude, Role.PREFILL, now)]
        degraded = ""
        if decode is None:
            if prefill is None:
                return [*effects, self._refuse(event, exclude, None, now)]
            degraded, decode, prefill = "no decode instance is ready", prefill, None
        elif prefill is None and event.needs_prefill:
            degraded = "no prefill instance is ready"
        return [*effects, self._decide(event, prefill, decode, degraded, job)]

    def _choose(self, role: Role, policy: Policy, job: Job, exclude: dict[InstanceId, None]) -> Choice | None:
        """The policy's choice among ready instances, else among suspects, else None."""
        limit = self._settings.max_requests_per_instance
        pool = self._choosable.get(role)
        if pool is None:
            pool = [one for one in self.instances.values() if one.role is role and one.may_be_chosen]
            self._choosable[role] = pool
        eligible = [one for one in pool if one.num_requests < limit and one.id not in exclude]
        if not eligible:
            return None
        ready = [one for one in eligible if one.health is Health.READY]
        job.turns = self._turns[role]
        return policy(ready or eligible, job)

    def _ready(self, role: Role, exclude: dict[InstanceId, None]) -> list[Instance]:
        pool = [one for one in self.instances.values() if one.role is role and one.may_be_chosen]
        return [one for one in pool if one.health is Health.READY and one.id not in exclude]

    def _is_full(self, role: Role, exclude: dict[InstanceId, None]) -> bool:
        """Nobody of the role may be chosen only because all have too much: then the other role must not
        help out, or a rush on one would drag both down."""
        return bool(self._ready(role, exclude))

    def _decide(
        self,
        event: Place,
        prefill: Choice | None,
        decode: Choice,
        degraded: str,
        job: Job,
    ) -> Decision:
        now = job.now
        num_cached = job.cached_tokens((prefill or decode).instance)
        parts = [f"decode {decode.instance.id} ({decode.reason})"]
        if prefill is not None:
            parts.insert(0, f"prefill {prefill.instance.id} ({prefill.reason})")
            prefill.instance.add_prefill(event.request_id, event.num_tokens - num_cached)
        decode.instance.add_decode(event.request_id)
        if degraded:
            parts.append(f"degraded: {degraded}")
        reason = "; ".join(parts)
        prefill_id = prefill.instance.id if prefill is not None else None
        placement = _Placement(prefill_id, decode.instance.id, now, now + event.lifetime_s)
        self._placements[event.request_id] = placement
        heapq.heappush(self._timers, (placement.expires_at, "expiry", event.request_id))
        self._drop_stale_timers()
        keys = tuple(key for key in (event.request_id, prefill_id, decode.instance.id) if key)
        self._tell(now, keys, f"placed {event.request_id}: {reason}")
        return Decision(
            event.request_id,
            prefill_id,
            decode.instance.id,
            reason,
            num_cached,
            degraded,
            policy=self._settings.scheduling,
        )

    def _refuse(self, event: Place, exclude: dict[InstanceId, None], full: Role | None, now: float) -> Refuse:
        """``full``: the role whose instances all have as many requests as they may; None: nobody is there."""
        if full is not None:
            # The next place is free when the first of so many requests ends.
            ready = self._ready(full, exclude)
            wait_s = self._mean_duration_s / max(1, sum(one.num_requests for one in ready))
            limit = self._settings.max_requests_per_instance
            refusal = Refusal(
                "overloaded", f"all ready {full} instances ({len(ready)}) have {limit} requests"
            )
        else:
            wait_s = self._settings.suspect_probe_interval_s
            states = ", ".join(f"{one.id} is {one.state}" for one in self.instances.values())
            refusal = Refusal("no_instance", f"no instance can serve: {states or 'none was added'}")
        self._tell(now, (event.request_id,), f"refused {event.request_id}: {refusal}")
        return Refuse(event.request_id, refusal, wait_s)

    def _prefilled(self, event: Prefilled, now: float) -> list[Effect]:
        placement = self._placements.get(event.request_id)
        if placement is None or placement.prefill is None:
            return []
        prefill = self.instances.get(placement.prefill)
        if prefill is None:
            return []
        prefill.end_prefill(event.request_id)
        return self._leave_if_drained(prefill, now)

    def _finished(self, event: Finished, now: float) -> list[Effect]:
        placement = self._placements.get(event.request_id)
        if placement is None:
            return []
        self._mean_duration_s += 0.1 * (now - placement.placed_at - self._mean_duration_s)
        self._tell(now, (event.request_id,), f"finished {event.request_id}")
        return self._release(event.request_id, now)

    def _release(self, request_id: str, now: float) -> list[Effect]:
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return []
        effects: list[Effect] = []
        for instance_id in dict.fromkeys((placement.prefill, placement.decode)):
            instance = self.instances.get(instance_id) if instance_id is not None else None
            if instance is not None:
                instance.end_prefill(request_id)
                instance.end_decode(request_id)
                effects += self._leave_if_drained(instance, now)
        return effects

    # --- health

    def _failed(self, event: Failed, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is None:
            return []
        keys = (event.instance, event.request_id)
        self._tell(now, keys, f"failed {event.request_id} on {event.instance}: {event.reason}")
        before = instance.state
        instance.on_failure(event.reason, now)
        effects = self._changed(instance, before)
        if instance.probe_started_at is None:
            effects.append(self._probe(instance, now))
        return effects

    def _probed(self, event: Probed, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is None or instance.probe_started_at is None:
            return []  # removed, and perhaps added again, while the probe was in flight
        before, health = instance.state, instance.health
        instance.on_probe(event.outcome, event.detail, now, self._settings)
        assert instance.next_probe_at is not None
        heapq.heappush(self._timers, (instance.next_probe_at, "probe", instance.id))
        effects = self._changed(instance, before)
        if instance.health is not health:
            self._choosable.clear()
            self._tell(now, (instance.id,), f"{instance.id} is {instance.state}: {instance.detail}")
            if instance.health is Health.READY:
                # Also after a short absence: it may have been restarted in between.
                effects.append(Watch(instance.id))
            elif instance.health is Health.DOWN:
                self.index.clear(instance.id, "lost", now)
                effects.append(Unwatch(instance.id))
        return effects

    def _probe(self, instance: Instance, now: float) -> Probe:
        instance.probe_started_at, instance.next_probe_at = now, None
        return Probe(instance.id)

    def _wake(self, event: Wake, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._timers and self._timers[0][0] <= now:
            at, kind, key = heapq.heappop(self._timers)
            if kind == "probe":
                instance = self.instances.get(key)
                if instance is not None and instance.next_probe_at == at:
                    effects.append(self._probe(instance, now))
            else:
                placement = self._placements.get(key)
                if placement is not None and placement.expires_at == at:
                    self._tell(now, (key,), f"expired {key}: nobody reported its end")
                    effects += self._release(key, now)
        return effects

    def _drop_stale_timers(self) -> None:
        """Requests end long before they expire: without this the heap would hold an hour of them."""
        if len(self._timers) < 1024 + 4 * (len(self._placements) + len(self.instances)):
            return
        live = [(one.expires_at, "expiry", key) for key, one in self._placements.items()]
        for instance in self.instances.values():
            if instance.next_probe_at is not None:
                live.append((instance.next_probe_at, "probe", instance.id))
        heapq.heapify(live)
        self._timers = live

    # --- blocks

    def _blocks_stored(self, event: BlocksStored, now: float) -> list[Effect]:
        if event.instance in self.instances:
            self.index.store(event.instance, event.keys, event.tier, event.scope)
        return []

    def _blocks_removed(self, event: BlocksRemoved, now: float) -> list[Effect]:
        self.index.remove(event.instance, event.keys, event.tier, event.scope, event.reason, now)
        return []

    def _blocks_cleared(self, event: BlocksCleared, now: float) -> list[Effect]:
        num_blocks = self.index.clear(event.instance, event.reason, now)
        self._tell(now, (event.instance,), f"{event.instance} cleared its {num_blocks} blocks")
        return []

    # --- membership

    def _add(self, event: AddInstance, now: float) -> list[Effect]:
        self._choosable.clear()
        known = self.instances.get(event.instance)
        if known is not None and known.role is event.role:
            before = known.state
            known.is_draining = False
            return self._changed(known, before)
        effects = self._drop(known, "changes its role", now) if known is not None else []
        instance = Instance(event.instance, event.role)
        self.instances[event.instance] = instance
        self._tell(now, (event.instance,), f"added {event.instance} for {event.role}")
        return [*effects, self._probe(instance, now)]

    def _remove(self, event: RemoveInstance, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        return self._drop(instance, "removed", now) if instance is not None else []

    def _drain(self, event: Drain, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is None:
            return []
        self._choosable.clear()
        before = instance.state
        instance.is_draining = True
        return [*self._changed(instance, before), *self._leave_if_drained(instance, now)]

    def _leave_if_drained(self, instance: Instance, now: float) -> list[Effect]:
        if instance.is_draining and instance.num_requests == 0:
            return self._drop(instance, "drained", now)
        return []

    def _drop(self, instance: Instance, reason: str, now: float) -> list[Effect]:
        self._choosable.clear()
        del self.instances[instance.id]
        self.index.forget(instance.id, reason, now)
        for turns in self._turns.values():
            turns.pop(instance.id, None)
        self._tell(now, (instance.id,), f"{instance.id} left: {reason}")
        gone = StateChanged(instance.id, instance.role, instance.state, "gone", reason)
        return [Unwatch(instance.id), gone]

    def _changed(self, instance: Instance, before: str) -> list[Effect]:
        after = instance.state
        if after == before:
            return []
        return [StateChanged(instance.id, instance.role, before, after, instance.detail)]

    def _tell(self, now: float, keys: Sequence[str], text: str) -> None:
        self._story.append((now, tuple(keys), text))
