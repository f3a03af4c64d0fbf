# SPDX-License-Identifier: Apache-2.0
"""The conductor: requests and facts about instances in, placements with their reasons out.

It composes the index, the load accounts and the policies, and owns what joins them: which request is placed
where, until its end is reported or its lifetime is over. It refuses to know HTTP, sockets and clocks;
``server.py`` performs its effects. A wrong or missing hint costs speed, never an answer: every worker can
compute every prompt, so when no instance of a role is ready one of the other role does the work ("degraded"),
and a request is refused only when no instance is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.conductor.admission import SOONEST_RETRY_S, AdmissionResult, PoolCapacity
from mooncake.conductor.explanation import Explanation
from mooncake.conductor.health import Health, Instance, ProbeOutcome
from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.conductor.kv_handover import book_push, choose_handover, expect_move
from mooncake.conductor.load import LoadAccounts
from mooncake.conductor.messages import (
    POOL,
    AddInstance,
    Assumed,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    ChunkMeasured,
    Decision,
    Drain,
    Effect,
    Event,
    Failed,
    Fetch,
    FetchMeasured,
    Finished,
    InstanceStatus,
    Moved,
    Place,
    Placed,
    Prediction,
    Prefilled,
    PrefixWindows,
    Probe,
    Probed,
    Refuse,
    RemoveInstance,
    ReportedFact,
    Silent,
    StateChanged,
    StepMeasured,
    TransferMeasured,
    Unwatch,
    Watch,
)
from mooncake.conductor.policies import POLICIES, ClusterView, InstanceChoice, Policy, PromptJob
from mooncake.conductor.prediction import (
    TRUSTED_SAMPLES,
    CostModels,
    DecodeModel,
    Floats,
    Predictor,
    Slots,
    prefill_terms,
)
from mooncake.conductor.prefix_index import InferredBlocks, PrefixIndex, PrefixMatch
from mooncake.conductor.request_lifecycle import (
    ActivePlacement,
    DueTimes,
    ObservedPlacement,
    RequestLifecycle,
    bounded,
    candidates_of,
    invalid_number,
    measured,
    passed_over,
    prompt_blocks_of,
    refusal_of,
)
from mooncake.conductor.scaling_signal import INTERVAL_S, NO_STEP, PoolNow, ScalingSignal
from mooncake.conductor.settings import SchedulingSettings
from mooncake.errors import Refusal
from mooncake.kvlayout import KEY_PREFIX
from mooncake.machine import Wake
from mooncake.prefix import BlockKey
from mooncake.types import InstanceId, WorkerRole

_STORY_LENGTH = 4000
_REMEMBERED_BLOCKS = 1 << 20


class Conductor:
    """The core. ``random`` serves the policy "random" only; ``costs`` apply until something is measured."""

    def __init__(self, settings: SchedulingSettings, random: Random, costs: CostModels | None = None) -> None:
        self.index = PrefixIndex(_REMEMBERED_BLOCKS if settings.explained_requests else 0)
        self.lifecycle = RequestLifecycle(settings)
        self.scaling = ScalingSignal(settings)
        self._has_given_costs = costs is not None
        self.instances: dict[InstanceId, Instance] = {}
        self.predict = Predictor(costs or CostModels())
        self.loads = LoadAccounts()
        self.inferred_blocks = InferredBlocks(settings.assumed_tokens // settings.block_tokens)
        self.cluster = ClusterView(settings, random, self.loads, self.predict)
        self._grow()
        self._settings, self._block_tokens = settings, settings.block_tokens
        self.placements: dict[str, ActivePlacement] = {}
        self._choosable: dict[
            WorkerRole, tuple[Slots, Slots]
        ] = {}  # ready and suspect; dropped at any change
        self._reports_chunks: dict[int, None] = {}  # slots that measure chunk by chunk
        self._has_prefill = False
        self._pool_slot = -1
        self._mean_duration_s = 1.0
        # When instances are to be probed and requests expire, also those that were admitted and then found no
        # instance when they were placed anew.
        self._timers = DueTimes()
        self._story: deque[tuple[float, tuple[str, ...], str]] = deque(maxlen=_STORY_LENGTH)
        self._handlers: dict[type, Callable[..., list[Effect]]] = {
            Place: self._place,
            Placed: self._placed,
            Moved: self._moved,
            Assumed: self._assumed,
            Prefilled: self._prefilled,
            Finished: self._finished,
            Failed: self._failed,
            Probed: self._probed,
            ChunkMeasured: self._chunk_measured,
            StepMeasured: self._step_measured,
            TransferMeasured: self._transfer_measured,
            FetchMeasured: self._fetch_measured,
            BlocksStored: self._blocks_stored,
            BlocksRemoved: self._blocks_removed,
            BlocksCleared: self._blocks_cleared,
            PrefixWindows: self._prefix_windows,
            Silent: self._silent,
            AddInstance: self._add,
            RemoveInstance: self._remove,
            Drain: self._drain,
            Wake: self._wake,
        }

    def __repr__(self) -> str:
        states = ", ".join(f"{one.id} {one.state}" for one in self.instances.values())
        return f"<Conductor [{states}] {len(self.placements)} requests, {self.index.num_blocks} blocks>"

    def handle(self, event: Event | Wake, now: float) -> list[Effect]:
        return self._handlers[type(event)](event, now)

    def deadline(self) -> float | None:
        due_at, timer_at = self.scaling.deadline(), self._timers.next_at
        return timer_at if due_at is None or (timer_at is not None and timer_at < due_at) else due_at

    def status(self) -> list[InstanceStatus]:
        """Every instance, in the order in which they joined."""
        return [
            InstanceStatus(
                instance=one.id,
                role=one.role,
                health=one.state,
                detail=one.detail,
                num_requests=int(self.loads.num_requests[one.slot]),
                queued_tokens=int(self.loads.queued_tokens[one.slot]),
                num_blocks=self.index.num_blocks_of(one.id),
                num_placed=int(self.loads.num_placed[one.slot]),
                is_silent=one.is_silent,
                has_answered=one.has_answered,
            )
            for one in self.instances.values()
        ]

    def story(self, key: str) -> list[str]:
        """What happened to a request or an instance."""
        return [f"{now:.3f} {text}" for now, keys, text in self._story if key in keys]

    def explain(
        self, request_id: str, identity_of: Callable[[InstanceId], str], now: float
    ) -> Explanation | None:
        """Why a request was served as it was; None when it is not remembered.

        ``identity_of`` an instance: the digest under which its blocks lie in the pool, or "".
        """
        return self.lifecycle.explain(request_id, self.index, identity_of, now)

    def check(self) -> None:
        self.index.check()
        self.loads.check()
        self.predict.check()
        self.lifecycle.check()
        self.scaling.check()
        for instance in self.instances.values():
            instance.check()
            assert self.cluster.names[instance.slot] == instance.id
            for request_id in self.loads.prompts_of(instance.slot):
                placement = self.placements[request_id]
                assert instance.id == (placement.prefill or placement.decode)
            for request_id in self.loads.decodes_of(instance.slot):
                assert self.placements[request_id].decode == instance.id
            assert self._timers.at("probe", instance.id) == instance.next_probe_at
        assert sum(1 for name in self.cluster.names if name not in ("", POOL)) == len(self.instances)
        assert self.loads.num_slots == len(self.cluster.names) == self.index.num_slots
        for role, pools in self._choosable.items():
            assert [pool.tolist() for pool in pools] == [pool.tolist() for pool in self._pools(role)]
        for request_id, placement in self.placements.items():
            assert self._timers.at("expiry", request_id) == placement.expires_at
        admitted = self.lifecycle.admission.request_ids
        assert {*self._timers.keys("expiry")} == {*self.placements, *admitted}
        assert {*self._timers.keys("probe")} <= {*self.instances}
        self._timers.check()

    # --- requests

    def _place(self, event: Place, now: float) -> list[Effect]:
        effects = self._release(event.request_id, now)
        if (error := invalid_number(event)) is not None:
            refusal = Refusal(error.code, str(error))
            self._record_story(now, (event.request_id,), f"refused {event.request_id}: {refusal}")
            return [*effects, Refuse(event.request_id, refusal, 0.0)]
        job = self._job(event, now)
        prefill_policy, decode_policy = POLICIES[self._settings.scheduling]
        exclude = dict.fromkeys(event.exclude)
        # Without instances that only prefill, the decode instance is chosen as the one that computes the
        # prompt.
        is_one_pool = event.needs_prefill and not self._has_prefill
        wants_prefill, prefill = event.needs_prefill and not is_one_pool, None
        if wants_prefill:
            expect_move(self.cluster, job, self._pools_of(WorkerRole.DECODE)[0])
            prefill = self._choose(WorkerRole.PREFILL, prefill_policy, job, exclude)
            if prefill is not None:
                job.computed_at(prefill)
        policy = prefill_policy if is_one_pool else decode_policy
        decode = self._choose(WorkerRole.DECODE, policy, job, exclude)
        if decode is None and self._is_full(WorkerRole.DECODE, exclude):
            return [*effects, self._refuse(event, exclude, WorkerRole.DECODE, now)]
        if decode is None and not wants_prefill:
            prefill = self._choose(WorkerRole.PREFILL, prefill_policy, job, exclude)
        is_short = prefill is None and (wants_prefill or decode is None)
        if is_short and self._is_full(WorkerRole.PREFILL, exclude):
            return [*effects, self._refuse(event, exclude, WorkerRole.PREFILL, now)]
        degraded = ""
        if decode is None:
            if prefill is None:
                return [*effects, self._refuse(event, exclude, None, now)]
            degraded, decode, prefill = "no decode instance is ready", prefill, None
        elif prefill is None and event.needs_prefill and not is_one_pool:
            degraded = "no prefill instance is ready"
        if prefill is None and event.needs_prefill and not decode.done_s:
            queue_s, prefill_s = self.cluster.estimate(job, decode.slot)
            decode = replace(decode, queue_s=queue_s, prefill_s=prefill_s, busy_s=prefill_s)
            decode.done_s = queue_s + prefill_s
        prediction = self._predicted(job, prefill or decode, decode.slot)
        is_new = self._offer(event, (prefill or decode).busy_s or prediction.prefill_s, prediction, now)
        observed = self._observed(event, prefill or decode, now, job.matched)
        verdict = self._decide_admission(event, job, prefill or decode, decode.slot, prediction)
        if is_new:
            lacks = verdict.lacks if verdict is not None else None
            self.scaling.served(lacks or WorkerRole.PREFILL, lacks is not None)
        if verdict is not None and not verdict.is_admitted:
            refuse = refusal_of(event.request_id, verdict, prediction)
            self._record_story(now, (event.request_id,), f"rejected {event.request_id}: {refuse.refusal}")
            self.lifecycle.placed(event, refuse, observed, verdict, now)
            return [*effects, refuse]
        decision = self._decide(event, job, prefill, decode, degraded, prediction)
        self.lifecycle.placed(event, decision, observed, verdict, now)
        return [*effects, decision]

    def _decide_admission(
        self, event: Place, job: PromptJob, computing: InstanceChoice, decode: int, prediction: Prediction
    ) -> AdmissionResult | None:
        if self.lifecycle.is_admitting_all:
            return None
        busy_s, pools = computing.busy_s or prediction.prefill_s, self._pools_with(decode)
        prompt, is_measured = job.keyed(job.num_cached(computing), self._block_tokens), self._is_measured
        return self.lifecycle.decide(event, prediction, busy_s, prompt, pools, is_measured, job.now)

    def _offer(self, event: Place, busy_s: float, prediction: Prediction, now: float) -> bool:
        """Record the work of a request for the scaling signal, whether it is admitted or not. Returns whether
        it is new: further choices, answers that move and retries of what was refused ask again and again."""
        if not event.needs_prefill or not self.scaling.is_new(event.request_id):
            return False
        settings, num_output = self._settings, prediction.output_tokens
        own_s = max(busy_s, prediction.ttft_s - prediction.queue_s)
        self.scaling.offered(busy_s, (event.slo_ttft_s or settings.slo_ttft_s) - own_s, now)
        slo_s = event.slo_tbt_s or settings.slo_tbt_s
        self.scaling.answer_offered(num_output, event.num_tokens + num_output / 2, slo_s, now)
        return True

    def _scale(self, now: float) -> list[Effect]:
        """Have the numbers of instances decided that the pools should have."""
        pools: dict[WorkerRole, PoolNow] = {}
        prefill, decode = self._is_measured
        for role in WorkerRole:
            members = [one for one in self.instances.values() if one.role is role]
            if not members:
                continue
            ready, suspect = self._pools_of(role)
            queue_s, _ = self.loads.queue_s(ready, now)
            pools[role] = PoolNow(
                len(ready) + len(suspect),
                sum(one.is_coming for one in members),
                float(queue_s.min()) if len(ready) else 0.0,
                float(queue_s.sum()),
                prefill if role is WorkerRole.PREFILL else decode and (self._has_prefill or prefill),
                DecodeModel(*self.predict.decode.of(ready).mean(axis=1).tolist()) if len(ready) else NO_STEP,
                float(self.loads.capacity_tokens[ready].mean()) if len(ready) else np.inf,
            )
        return [*self.scaling.decide(pools, now)]

    @property
    def _is_measured(self) -> tuple[bool, bool]:
        """Whether the times of prefill and of decode were given or measured; else they are guesses."""
        fits = (self.predict.prefill.common, self.predict.decode.common)
        prefill, decode = (self._has_given_costs or fit.num_samples >= TRUSTED_SAMPLES for fit in fits)
        return prefill, decode

    def _observed(
        self, event: Place, computing: InstanceChoice | None, now: float, matched: PrefixMatch | None
    ) -> ObservedPlacement | None:
        """What later explanations show, as it is before the decision changes the index and the accounts."""
        if not self.lifecycle.explainer.is_on:
            return None
        if matched is None:
            matched = self.index.match(event.keys[: event.num_tokens // self._block_tokens])
        self.index.removal_log.note_prompt(matched.keys, event.bare_keys[: len(matched.keys)])
        where = self.cluster.names[computing.slot] if computing is not None else ""
        prompt = prompt_blocks_of(event, matched, self.index, where, now)
        ready, names = np.concatenate([self._pools_of(role)[0] for role in WorkerRole]), self.cluster.names
        full, limit = [], self._settings.max_requests_per_instance
        if len(self.placements) >= limit:
            full = [names[slot] for slot in ready[~self._has_room(ready)].tolist()]
        unready = self.instances.values() if len(ready) < len(self.instances) else ()
        exclude = [name for name in event.exclude if name in self.instances]
        others = passed_over(exclude, full, limit, unready)
        return ObservedPlacement(candidates_of(names, computing, others), prompt)

    def _pools_with(self, decode: int) -> PoolCapacity:
        """The capacity of both pools; every decode instance is assumed to be like this one."""
        ready = {role: len(self._pools_of(role)[0]) for role in WorkerRole}
        step = self.predict.decode_model(decode)
        num_decode = ready[WorkerRole.DECODE] or ready[WorkerRole.PREFILL]
        kv_tokens = float(self.loads.capacity_tokens[decode])
        num_prefill = ready[WorkerRole.PREFILL] or num_decode
        holds = self.predict.costs.decode_makes_first_token
        return PoolCapacity(num_prefill, num_decode, step, kv_tokens, holds)

    def _pools_of(self, role: WorkerRole) -> tuple[Slots, Slots]:
        pools = self._choosable.get(role)
        if pools is None:
            pools = self._choosable[role] = self._pools(role)
        return pools

    def _job(self, event: Place, now: float) -> PromptJob:
        keys, block_tokens = event.keys[: event.num_tokens // self._block_tokens], self._block_tokens
        matched = self.index.match(keys)
        cached: Floats = np.multiply(matched.leading, float(block_tokens))
        in_memory = cached
        if matched.leading_memory is not matched.leading:
            in_memory = np.multiply(matched.leading_memory, float(block_tokens))
        if self._pool_slot >= 0:
            cached[self._pool_slot] = in_memory[self._pool_slot] = self._in_pool(event) * block_tokens
        output_tokens = self.predict.lengths.expected(event.scope, event.max_output_tokens)
        return PromptJob(
            now,
            event.num_tokens,
            cached,
            in_memory,
            event.affinity,
            output_tokens,
            event.priority,
            event.slo_ttft_s or self._settings.slo_ttft_s,
            event.slo_tbt_s or self._settings.slo_tbt_s,
            matched=matched,
            keys=keys,
        )

    def _in_pool(self, event: Place) -> int:
        """Leading blocks of a prompt that the store has, under the identity with most of them."""
        most = 0
        for scope in self.index.scopes_of(event.keys[0], KEY_PREFIX) if event.keys else []:
            most = max(most, int(self.index.match(event.keys, scope).leading[self._pool_slot]))
        return most

    def _pools(self, role: WorkerRole) -> tuple[Slots, Slots]:
        """Slots of a role's instances that may be chosen: those that are ready, and suspects."""
        pool = [one for one in self.instances.values() if one.role is role and one.may_be_chosen]
        ready = np.array([one.slot for one in pool if one.health is Health.READY], np.int64)
        suspect = np.array([one.slot for one in pool if one.health is not Health.READY], np.int64)
        for slots in (ready, suspect):
            slots.flags.writeable = False  # so that values computed for them can be cached with them
        return ready, suspect

    def _choose(
        self, role: WorkerRole, policy: Policy, job: PromptJob, exclude: dict[InstanceId, None]
    ) -> InstanceChoice | None:
        """The policy's choice among ready instances, else among suspects, else None."""
        for pool in self._pools_of(role):
            eligible = self._without(pool, exclude)
            if len(self.placements) >= self._settings.max_requests_per_instance:  # else none can have so many
                has_room = self._has_room(eligible)
                if np.count_nonzero(has_room) < len(eligible):
                    eligible = eligible[has_room]
            if len(eligible):
                return policy(self.cluster, job, eligible)
        return None

    def _has_room(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these instances may get one more request."""
        return self.loads.num_requests.take(slots) < self._settings.max_requests_per_instance

    def _without(self, pool: Slots, exclude: dict[InstanceId, None]) -> Slots:
        for instance in exclude:
            known = self.instances.get(instance)
            if known is not None:
                pool = pool[pool != known.slot]
        return pool

    def _ready(self, role: WorkerRole, exclude: dict[InstanceId, None]) -> Slots:
        return self._without(self._pools(role)[0], exclude)

    def _is_full(self, role: WorkerRole, exclude: dict[InstanceId, None]) -> bool:
        """Whether no instance of the role may be chosen only because all have too much work. Then the other
        role must not help out, or overload of one would spread to both."""
        return bool(len(self._ready(role, exclude)))

    def _predicted(self, job: PromptJob, prefill: InstanceChoice, decode: int) -> Prediction:
        context = float(self.loads.context_tokens[decode]) + job.num_tokens + job.output_tokens
        tbt_s = self.predict.decode_model(decode).seconds(float(self.loads.batch_size[decode]) + 1, context)
        return Prediction(
            prefill.queue_s,
            prefill.fetch_s,
            prefill.prefill_s,
            prefill.done_s or tbt_s,
            tbt_s,
            job.output_tokens,
        )

    def _decide(
        self,
        event: Place,
        job: PromptJob,
        prefill: InstanceChoice | None,
        decode: InstanceChoice,
        degraded: str,
        prediction: Prediction,
    ) -> Decision:
        now, computing = job.now, prefill or decode
        turn = computing.turn or job.turn(0.0)
        fetches = self._book_fetch(event, job, computing)
        num_cached = job.num_cached(computing)
        decode_id = self.cluster.names[decode.slot]
        parts = [f"decode {decode_id} ({decode.reason})"]
        prefill_id = None
        if prefill is not None:
            prefill_id = self.cluster.names[prefill.slot]
            parts.insert(0, f"prefill {prefill_id} ({prefill.reason})")
        if event.needs_prefill:
            slot, busy_s, num_computed = computing.slot, computing.busy_s, event.num_tokens - num_cached
            prompt = job.keyed(job.cached[slot], self._block_tokens)
            least_s = computing.least_s
            self.loads.add_prompt(slot, event.request_id, busy_s, num_computed, turn, now, prompt, least_s)
        num_tokens = event.num_tokens + job.output_tokens // 2
        self.loads.add_decode(decode.slot, event.request_id, num_tokens)
        if degraded:
            parts.append(f"degraded: {degraded}")
        push_from = ""
        if prefill is not None and event.needs_prefill:
            self.cluster.handovers.add(decode.slot, *job.moves, now)
            push_from = self._push_from(job, prefill, decode.slot, parts)
        reason = "; ".join(parts)
        placement = ActivePlacement(prefill_id, decode_id, now, now + event.lifetime_s, event, prediction)
        self.placements[event.request_id] = placement
        self._timers.set("expiry", event.request_id, placement.expires_at)
        keys = (
            (event.request_id, decode_id) if prefill_id is None else (event.request_id, prefill_id, decode_id)
        )
        self._record_story(now, keys, f"placed {event.request_id}: {reason}")
        for instance in dict.fromkeys((prefill_id or decode_id, decode_id)):
            self._assume(instance, event, now)
        policy = self._settings.scheduling
        return Decision(
            event.request_id,
            prefill_id,
            decode_id,
            reason,
            num_cached,
            degraded,
            prediction,
            fetches,
            turn,
            policy,
            push_from,
            self._held_tokens(job),
        )

    def _held_tokens(self, job: PromptJob) -> int:
        """Leading tokens of a prompt that some instance or the pool holds."""
        num_blocks = job.matched.num_held if job.matched is not None else 0
        in_pool = int(job.cached[self._pool_slot]) if self._pool_slot >= 0 else 0
        return max(num_blocks * self._block_tokens, in_pool)

    def _push_from(self, job: PromptJob, prefill: InstanceChoice, decode: int, parts: list[str]) -> str:
        """Address of the listener from which ``decode`` gets the prompt's KV; empty if by the pool.

        Adds the reason to ``parts``."""
        source, target = (self.instances[self.cluster.names[slot]] for slot in (prefill.slot, decode))
        if not (source.push_port and target.push_port):
            return ""
        handover = choose_handover(
            self.cluster, job, prefill, decode, self._pool_slot, self._settings.kv_transfer
        )
        parts.append(handover.reason)
        if not handover.is_push:
            return ""
        book_push(self.cluster, job, prefill.slot, decode)
        return f"{source.id.rpartition(':')[0]}:{source.push_port}"

    def _book_fetch(self, event: Place, job: PromptJob, choice: InstanceChoice) -> list[Fetch]:
        """Book the network cards for the blocks that the chosen instance is to load, and return these."""
        if choice.source < 0:
            return []
        first, end = choice.fetch_tokens
        block_tokens, links = self._block_tokens, self.predict.links
        links.book(choice.source, choice.slot, choice.card_s, job.now)
        if choice.source == self._pool_slot:
            links.egress_free_at[self._pool_slot] = -np.inf  # it has many cards
        source = self.cluster.names[choice.source]
        return [Fetch(source, first // block_tokens, (end - first) // block_tokens)]

    def _refuse(
        self, event: Place, exclude: dict[InstanceId, None], full: WorkerRole | None, now: float
    ) -> Refuse:
        """``full``: the role whose instances all have as many requests as they may; None: none is ready."""
        prefill_s = self.predict.prefill.common.expected(prefill_terms(0, event.num_tokens))
        num_output = self.predict.lengths.expected(event.scope, event.max_output_tokens)
        work = Prediction(ttft_s=prefill_s, output_tokens=num_output)
        if self._offer(event, prefill_s, work, now) and full is not None:
            self.scaling.served(full, True)
        if full is not None:
            # The next place is free when the first of so many requests ends.
            ready = self._ready(full, exclude)
            num_there = float(self.loads.num_requests[ready].sum())
            wait_s = max(SOONEST_RETRY_S, self._mean_duration_s / max(1.0, num_there))
            limit = self._settings.max_requests_per_instance
            refusal = Refusal(
                "overloaded", f"all ready {full} instances ({len(ready)}) have {limit} requests"
            )
        else:
            wait_s = self._settings.suspect_probe_interval_s
            states = ", ".join(f"{one.id} is {one.state}" for one in self.instances.values())
            refusal = Refusal("no_instance", f"no instance can serve: {states or 'none was added'}")
        self._record_story(now, (event.request_id,), f"refused {event.request_id}: {refusal}")
        refuse = Refuse(event.request_id, refusal, wait_s)
        self.lifecycle.placed(event, refuse, self._observed(event, None, now, None), None, now)
        return refuse

    # --- what several conductors share

    def placed_of(self, place: Place, decision: Decision, now: float) -> Placed:
        """A placement as another conductor enters it; the keys only where it must infer blocks from them."""
        instances = (self.instances.get(one) for one in (decision.prefill or "", decision.decode))
        is_inferred = place.is_text or any(one is not None and one.is_silent for one in instances)
        keys = place.keys if is_inferred else []
        decision = msgspec.structs.replace(decision, turn=decision.turn - now)
        return Placed(msgspec.structs.replace(place, keys=keys, bare_keys=[]), decision)

    def shared_state(self, request_ids: Sequence[str], now: float) -> list[ReportedFact]:
        """The members, and these of the requests in flight, as facts for another conductor."""
        facts: list[ReportedFact] = []
        for one in self.instances.values():
            capacity = float(self.loads.capacity_tokens[one.slot])
            kv_tokens = int(capacity) if np.isfinite(capacity) else 0
            facts.append(AddInstance(one.id, one.role, kv_tokens, is_reminder=True))
            if one.is_draining:
                facts.append(Drain(one.id))
        for request_id in request_ids:
            placement = self.placements.get(request_id)
            if placement is not None:
                facts.append(self._shared_placement(placement, now))
        return facts

    def _shared_placement(self, placement: ActivePlacement, now: float) -> Placed:
        place, computing = placement.place, self.instances.get(placement.prefill or placement.decode)
        prompt = None if computing is None else self.loads.prompt(computing.slot, place.request_id)
        seconds, num_tokens, turn = prompt or (placement.prediction.prefill_s, place.num_tokens, 0.0)
        decision = Decision(
            place.request_id,
            placement.prefill,
            placement.decode,
            "",
            num_cached_tokens=place.num_tokens - num_tokens,
            prediction=msgspec.structs.replace(placement.prediction, prefill_s=seconds),
            turn=turn - now,
        )
        return Placed(
            msgspec.structs.replace(place, keys=[], bare_keys=[]),
            decision,
            now - placement.placed_at,
            is_prefilled=prompt is None,
        )

    def assumptions(self, num_keys: int) -> Iterator[Assumed]:
        """The blocks that instances without KV events are assumed to hold, at most ``num_keys`` in one."""
        for instance, keys in self.inferred_blocks.all():
            for first in range(0, len(keys), num_keys):
                yield Assumed(instance, keys[first : first + num_keys])

    def _placed(self, event: Placed, now: float) -> list[Effect]:
        event = bounded(event)
        place, decision = event.place, event.decision
        request_id, effects = place.request_id, list[Effect]()
        known = self.placements.get(request_id)
        if known is not None and (known.prefill, known.decode) != (decision.prefill, decision.decode):
            effects, known = self._release(request_id, now), None
        if known is None and event.age_s < place.lifetime_s:
            self._enter(event, now)
            if event.age_s < INTERVAL_S:  # older ones arrived long before they were reported
                prediction = self.placements[request_id].prediction
                self._offer(place, prediction.prefill_s, prediction, now)
        computing = self.instances.get(decision.prefill or decision.decode)
        if event.is_prefilled and computing is not None:
            self.loads.end_prompt(computing.slot, request_id, now)
            pools = self.instances.get(decision.decode, computing).slot
            begun = Prefilled(request_id, has_begun=True)
            self.lifecycle.prefilled(begun, lambda: self._pools_with(pools), now)
            effects += self._leave_if_drained(computing, now)
        return effects

    def _enter(self, event: Placed, now: float) -> None:
        """Enter a placement that was decided elsewhere."""
        place, decision = event.place, event.decision
        request_id, placed_at = place.request_id, now - event.age_s
        computing = self.instances.get(decision.prefill or decision.decode)
        decode = self.instances.get(decision.decode)
        prediction = decision.prediction or Prediction()
        if decision.prediction is None:
            num_expected = self.predict.lengths.expected(place.scope, place.max_output_tokens)
            prediction = msgspec.structs.replace(prediction, output_tokens=num_expected)
            if computing is not None:
                queue_s, prefill_s = self.cluster.estimate(self._job(place, now), computing.slot)
                prediction = msgspec.structs.replace(prediction, queue_s=queue_s, prefill_s=prefill_s)
        prefill_s = prediction.prefill_s
        if computing is not None and place.needs_prefill and not event.is_prefilled:
            num_computed = max(0, place.num_tokens - decision.num_cached_tokens)
            turn, slot, prompt = now + decision.turn, computing.slot, KeyedPrompt(place.keys)
            self.loads.add_prompt(slot, request_id, prefill_s, num_computed, turn, now, prompt)
        if decode is not None:
            num_tokens = place.num_tokens + prediction.output_tokens // 2
            self.loads.add_decode(decode.slot, request_id, num_tokens)
            if not self.lifecycle.is_admitting_all:
                pools = self._pools_with(decode.slot)
                self.lifecycle.placed_elsewhere(place, prediction, prefill_s, pools, self._is_measured, now)
        expires_at = placed_at + place.lifetime_s
        placement = ActivePlacement(
            decision.prefill, decision.decode, placed_at, expires_at, place, prediction
        )
        self.placements[request_id] = placement
        self._timers.set("expiry", request_id, expires_at)
        keys = [request_id, decision.decode, *([decision.prefill] if decision.prefill else [])]
        self._record_story(now, keys, f"placed {request_id} elsewhere: {decision.reason}")
        for instance in dict.fromkeys((decision.prefill or decision.decode, decision.decode)):
            if instance in self.instances:
                self._assume(instance, place, now)

    def _moved(self, event: Moved, now: float) -> list[Effect]:
        target = self.placements.get(event.place_id)
        if target is None or event.place_id == event.request_id:
            return []
        source = self.placements.get(event.request_id, target)
        effects = self._release(event.request_id, now)
        place = msgspec.structs.replace(source.place, request_id=event.request_id)
        placement = msgspec.structs.replace(source, decode=target.decode, place=place)
        self.placements[event.request_id] = placement
        self._timers.set("expiry", event.request_id, placement.expires_at)
        instance = self.instances.get(target.decode)
        if instance is not None:
            num_tokens = source.place.num_tokens + source.prediction.output_tokens // 2
            self.loads.add_decode(instance.slot, event.request_id, num_tokens)
        keys = tuple(dict.fromkeys((event.request_id, source.decode, target.decode)))
        route = f"from {source.decode} to {target.decode}"
        self._record_story(now, keys, f"moved {event.request_id} {route}: KV {event.outcome[:64]}")
        # Released last: its instance may be draining, too, and must not leave in between.
        return [*effects, *self._release(event.place_id, now)]

    def _assumed(self, event: Assumed, now: float) -> list[Effect]:
        if event.instance in self.instances:
            self._infer(event.instance, event.keys[::-1], now)
        return []

    # --- facts about requests

    def _prefilled(self, event: Prefilled, now: float) -> list[Effect]:
        placement = self.placements.get(event.request_id)
        if placement is None:
            return []
        instance = self.instances.get(placement.prefill or placement.decode)
        if instance is None:
            return []
        event, accuracy, predicted = measured(event), self.predict.accuracy, placement.prediction
        if not event.is_assumed:
            accuracy["ttft_s"].add(predicted.ttft_s, now - placement.placed_at)
        accuracy["queue_s"].add(predicted.queue_s, event.queued_s)
        accuracy["prefill_s"].add(predicted.prefill_s, event.computed_s)
        accuracy["fetch_s"].add(predicted.fetch_s, event.loaded_s)
        if instance.slot not in self._reports_chunks:
            first = event.num_cached_tokens + event.num_loaded_tokens
            self.predict.chunk_measured(instance.slot, first, event.num_computed_tokens, event.computed_s)
        self.loads.end_prompt(instance.slot, event.request_id, now)
        decode = self.instances.get(placement.decode, instance)
        refuse = self.lifecycle.prefilled(event, lambda: self._pools_with(decode.slot), now)
        if refuse is not None:
            # The gateway may not receive this and go on: only the end of the request releases the account.
            placement.is_refused = True
            self._record_story(now, (event.request_id,), f"rejected {event.request_id}: {refuse.refusal}")
            return [refuse]
        return self._leave_if_drained(instance, now)

    def _chunk_measured(self, event: ChunkMeasured, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is not None:
            self._reports_chunks[instance.slot] = None
            self.predict.chunk_measured(instance.slot, event.first_token, event.num_tokens, event.seconds)
        return []

    def _step_measured(self, event: StepMeasured, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is not None:
            self.predict.step_measured(instance.slot, event.batch_size, event.context_tokens, event.seconds)
        return []

    def _transfer_measured(self, event: TransferMeasured, now: float) -> list[Effect]:
        source, target = self.instances.get(event.source), self.instances.get(event.target)
        if source is not None and target is not None:
            self.predict.links.add(source.slot, target.slot, event.size_bytes, event.seconds)
        return []

    def _fetch_measured(self, event: FetchMeasured, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is not None and self._pool_slot >= 0:
            size_bytes = event.num_tokens * self.predict.costs.kv_bytes_per_token
            # Not general: it may come from an SSD, and one slow loader would slow all that is pushed.
            links = self.predict.links
            links.add(self._pool_slot, instance.slot, size_bytes, event.seconds, is_general=False)
        return []

    def _finished(self, event: Finished, now: float) -> list[Effect]:
        event = measured(event)
        self.lifecycle.finished(event, now)
        placement = self.placements.get(event.request_id)
        if placement is None:
            self._timers.cancel("expiry", event.request_id)
            return []
        if placement.is_refused and not event.is_complete:
            return self._release(event.request_id, now)
        accuracy = self.predict.accuracy
        accuracy["tbt_s"].add(placement.prediction.tbt_s, event.tbt_s)
        slo_tbt_s = placement.place.slo_tbt_s or self._settings.slo_tbt_s
        if slo_tbt_s and event.tbt_s:
            self.scaling.served(WorkerRole.DECODE, event.tbt_s > slo_tbt_s)
        if event.is_complete and event.num_output_tokens:
            accuracy["output_tokens"].add(placement.prediction.output_tokens, event.num_output_tokens)
            self.predict.lengths.add(placement.place.scope, event.num_output_tokens)
        self._mean_duration_s += 0.1 * (now - placement.placed_at - self._mean_duration_s)
        self._record_story(now, (event.request_id,), f"finished {event.request_id}")
        return self._release(event.request_id, now)

    def _release(self, request_id: str, now: float) -> list[Effect]:
        placement = self.placements.pop(request_id, None)
        if placement is None:
            return []
        if not self.lifecycle.admission.knows(request_id):
            self._timers.cancel("expiry", request_id)
        effects: list[Effect] = []
        for instance_id in dict.fromkeys((placement.prefill, placement.decode)):
            instance = self.instances.get(instance_id) if instance_id is not None else None
            if instance is not None:
                self.loads.end_prompt(instance.slot, request_id, now)
                self.loads.end_decode(instance.slot, request_id)
                effects += self._leave_if_drained(instance, now)
        return effects

    # --- health

    def _failed(self, event: Failed, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is None:
            return []
        keys = (event.instance, event.request_id)
        self._record_story(now, keys, f"failed {event.request_id} on {event.instance}: {event.reason}")
        before = instance.state
        instance.on_failure(event.reason, now)
        self._choosable.clear()
        effects = self._changed(instance, before)
        if instance.probe_started_at is None:
            effects.append(self._probe(instance, now))
        return effects

    def _probed(self, event: Probed, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is None or instance.probe_started_at is None:
            return []  # removed, and perhaps added again, while the probe was in flight
        before, health, was_lost = instance.state, instance.health, instance.is_lost
        instance.on_probe(event.outcome, event.detail, now, self._settings)
        assert instance.next_probe_at is not None
        self._timers.set("probe", instance.id, instance.next_probe_at)
        effects = self._changed(instance, before)
        if event.outcome is ProbeOutcome.READY:
            instance.push_port = event.push_port
            self.loads.report_memory(instance.slot, event.kv_memory)
        if event.outcome is ProbeOutcome.READY and instance.is_engine is not event.is_engine:
            instance.is_engine = event.is_engine
            self._members_changed()
        if instance.health is not health:
            self._choosable.clear()
            self._record_story(now, (instance.id,), f"{instance.id} is {instance.state}: {instance.detail}")
            if instance.health is Health.READY:
                if health is not Health.SUSPECT:
                    others = self._ready(instance.role, {instance.id: None})
                    self.loads.became_ready(instance.slot, now, others)
                # Also after a short absence: it may have been restarted in between.
                effects.append(Watch(instance.id, health is Health.SUSPECT and instance.is_watched))
                instance.is_watched = True
        if instance.is_lost is not was_lost:
            self._members_changed()
        if instance.is_lost and not was_lost:  # also one that was starting or shutting down
            self.index.clear(instance.id, "lost", now)
            self.inferred_blocks.forget(instance.id)
            effects += [Unwatch(instance.id)] * instance.is_watched
            instance.is_watched = False
        return effects

    def _probe(self, instance: Instance, now: float) -> Probe:
        instance.probe_started_at, instance.next_probe_at = now, None
        self._timers.cancel("probe", instance.id)
        return Probe(instance.id)

    def _wake(self, event: Wake, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if (due_at := self.scaling.deadline()) is not None and due_at <= now:
            effects += self._scale(now)
        for kind, key in self._timers.take_due(now):
            if kind == "probe":
                effects.append(self._probe(self.instances[key], now))
            else:
                self._record_story(now, (key,), f"expired {key}: its end was not reported in time")
                self.lifecycle.finished(Finished(key), now)
                effects += self._release(key, now)
        return effects

    # --- blocks

    def _blocks_stored(self, event: BlocksStored, now: float) -> list[Effect]:
        if event.instance == POOL and self._pool_slot < 0:
            self._pool_slot = self._slot_of(POOL)
            self.cluster.set_name(self._pool_slot, POOL)
            self._members_changed()
        if event.instance in self.instances or event.instance == POOL:
            self.index.store(event.instance, event.keys, event.tier, event.scope)
            self._grow()  # the pool gets its slot here
        return []

    def _blocks_removed(self, event: BlocksRemoved, now: float) -> list[Effect]:
        self.index.remove(event.instance, event.keys, event.tier, event.scope, event.reason, now)
        return []

    def _blocks_cleared(self, event: BlocksCleared, now: float) -> list[Effect]:
        num_blocks = self.index.clear(event.instance, event.reason, now)
        self._record_story(now, (event.instance,), f"{event.instance} cleared its {num_blocks} blocks")
        instance = self.instances.get(event.instance)
        if instance is not None:
            instance.is_silent = False
            self.inferred_blocks.forget(instance.id)
        return []

    def _prefix_windows(self, event: PrefixWindows, now: float) -> list[Effect]:
        if event.instance in self.instances:
            self.index.set_windows(event.instance, event.windows)
            self._grow()
        return []

    def _silent(self, event: Silent, now: float) -> list[Effect]:
        instance = self.instances.get(event.instance)
        if instance is not None:
            instance.is_silent = True
        return []

    def _assume(self, instance: InstanceId, event: Place, now: float) -> None:
        """Infer that an instance without KV events holds the blocks of a prompt that it was given."""
        if self.instances[instance].is_silent or event.is_text:
            self._infer(instance, event.keys[: event.num_tokens // self._block_tokens], now)

    def _infer(self, instance: InstanceId, keys: Sequence[BlockKey], now: float) -> None:
        kept, dropped = self.inferred_blocks.note(instance, keys)
        self.index.store(instance, kept)
        self.index.remove(instance, dropped, reason="assumed", now=now)

    # --- membership

    def _add(self, event: AddInstance, now: float) -> list[Effect]:
        self._choosable.clear()
        known = self.instances.get(event.instance)
        if known is not None and event.is_reminder:
            return []
        if known is not None and known.role is event.role:
            before = known.state
            known.is_draining = False
            return self._changed(known, before)
        effects = self._drop(known, "changes its role", now) if known is not None else []
        instance = Instance(event.instance, event.role, self._slot_of(event.instance))
        self.instances[event.instance] = instance
        self.cluster.set_name(instance.slot, instance.id)
        self.loads.capacity_tokens[instance.slot] = max(0, event.kv_tokens) or np.inf
        self.scaling.started(now)
        self._members_changed()
        self._record_story(now, (event.instance,), f"added {event.instance} for {event.role}")
        return [*effects, self._probe(instance, now)]

    def _slot_of(self, instance: InstanceId) -> int:
        slot = self.index.slot(instance)
        self._grow()
        return slot

    def _grow(self) -> None:
        """The index gives slots out; all columns are as long as its arrays."""
        if self.index.num_slots > self.loads.num_slots:
            self.loads.grow(self.index.num_slots)
            self.predict.grow(self.index.num_slots)
            self.cluster.grow(self.index.num_slots)

    def _members_changed(self) -> None:
        self._choosable.clear()
        self._has_prefill = any(one.role is WorkerRole.PREFILL for one in self.instances.values())
        sources = [one.slot for one in self.instances.values() if self._is_kv_source(one)]
        if self._pool_slot >= 0:
            sources = [self._pool_slot]  # instances share through the store, whose contents are known
        self.cluster.sources = np.array(sources, np.int64)

    def _is_kv_source(self, instance: Instance) -> bool:
        settings = self._settings
        shares = settings.engines_share_blocks if instance.is_engine else settings.shares_blocks
        return shares and not instance.is_lost

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
        if instance.is_draining and not self.loads.num_requests[instance.slot]:
            return self._drop(instance, "drained", now)
        return []

    def _drop(self, instance: Instance, reason: str, now: float) -> list[Effect]:
        del self.instances[instance.id]
        self._timers.cancel("probe", instance.id)
        self.index.forget(instance.id, reason, now)
        self.inferred_blocks.forget(instance.id)
        self.cluster.set_name(instance.slot, "")
        self.loads.forget(instance.slot)
        self.predict.forget(instance.slot)
        self.cluster.handovers.forget(instance.slot)
        self._reports_chunks.pop(instance.slot, None)
        self._members_changed()
        self._record_story(now, (instance.id,), f"{instance.id} left: {reason}")
        gone = StateChanged(instance.id, instance.role, instance.state, "gone", reason)
        return [Unwatch(instance.id), gone]

    def _changed(self, instance: Instance, before: str) -> list[Effect]:
        after = instance.state
        if after == before:
            return []
        return [StateChanged(instance.id, instance.role, before, after, instance.detail)]

    def _record_story(self, now: float, keys: Sequence[str], text: str) -> None:
        self._story.append((now, tuple(keys), text))
