# SPDX-License-Identifier: Apache-2.0
"""The lookups, loads and saves in flight between the pool and the external cache, by request.

It owns the pairing of requests with their lookups, loads and saves, and the references that keep
blocks from being reused while something reads or writes them. It does not know tensors and
answers. The engine calls it before a step for the loads that may join, and after the step with the
result; everything that arrives is passed on to the scheduler::

    begin_lookups ──▶ poll: found ──▶ load ──▶ poll: loaded ──▶ in a step ──▶ end_load
    begin_saves ──▶ (in a step) ──▶ finish_saves ──▶ poll: done ──▶ blocks released

What is pushed between two workers takes the same ways: a push is a save that nothing waits for, and what
another worker pushes is a load that begins without a lookup and, when it fails, is looked up. A load that the
link can not begin is one that has failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from mooncake import clock
from mooncake.connectors.kv_link import AnyLink, AnyPushingLink, KvLoad, KvLookup, KvSave
from mooncake.inference.request import Mark, Request
from mooncake.inference.scheduler import CacheLookup, PushBlocks, SaveBlocks, Scheduler, Step
from mooncake.log import get_logger
from mooncake.prefix import BlockHash

log = get_logger(__name__)


@dataclasses.dataclass(slots=True)
class ActiveLoad:
    """A load and the blocks it writes into."""

    load: KvLoad
    block_ids: list[int]
    is_pushed: bool = False
    joins_at: int = 1
    """Number of loaded layers from which on a step may wait for the others."""
    mark: Mark | None = None
    """Its interval, where its request is traced."""


@dataclasses.dataclass(slots=True)
class ActiveSave:
    """A save and the blocks it reads."""

    save: KvSave
    what: SaveBlocks
    mark: Mark | None = None


@dataclasses.dataclass(slots=True)
class ActivePush:
    """A push and the blocks it reads."""

    push: KvSave
    what: PushBlocks
    mark: Mark | None = None


class KvTransfers:
    """Lookups, loads, saves and pushes of one engine; all calls but ``begin_loads`` come from its thread.

    ``pushing``: ``link``, if it pushes, with the number of the model's layers. ``on_loaded``: called with the
    tokens and seconds of each load from the external cache that has arrived.
    """

    def __init__(
        self,
        link: AnyLink,
        scheduler: Scheduler,
        pushing: AnyPushingLink | None = None,
        num_layers: int = 1,
        on_loaded: Callable[[int, float], None] = lambda num_tokens, seconds: None,
    ) -> None:
        self._link = link
        self._pushing = pushing
        self._num_layers = num_layers
        self._on_loaded = on_loaded
        self._scheduler = scheduler
        self._pushes: list[ActivePush] = []
        """Pushes whose steps have run."""
        self._lookups: dict[str, KvLookup] = {}
        self._traced: dict[str, tuple[Request, Mark | None]] = {}
        """Requests of these lookups that are traced, with the lookup's interval."""
        self._loads: dict[str, ActiveLoad] = {}
        self._ending_loads: list[ActiveLoad] = []
        """Loads whose request has ended and which may still write."""
        self._saves: dict[str, list[ActiveSave]] = {}
        self._stored: dict[str, dict[BlockHash, None]] = {}
        """Blocks of ``save_tail`` requests that the external cache has stored, from the request's first save
        until it is forgotten."""
        self.num_failed_loads = 0

    @property
    def is_quiet(self) -> bool:
        """Whether no lookup, load or save touches the pool."""
        return not (self._loads or self._ending_loads or self._saves or self._pushes)

    @property
    def is_looking_up(self) -> bool:
        """Whether an answer to a lookup is awaited."""
        return bool(self._lookups)

    def is_saving(self, request_id: str) -> bool:
        return request_id in self._saves

    def poll(self, now: float) -> None:
        """Pass what has arrived since the last call on to the scheduler."""
        self.begin_loads(now)
        self._poll_loads(now)
        self.poll_saves()
        self._poll_pushes()

    def begin_lookups(self, lookups: Sequence[CacheLookup], now: float) -> None:
        for lookup in lookups:
            if lookup.request.push_source is None:
                if lookup.request.marks is not None:
                    mark = lookup.request.mark("store lookup", now, blocks=len(lookup.blocks))
                    self._traced[lookup.request.id] = (lookup.request, mark)
                self._lookups[lookup.request.id] = self._link.lookup(lookup.blocks)
            else:
                self._begin_receive(lookup, now)

    def _begin_receive(self, lookup: CacheLookup, now: float) -> None:
        """Begin the load of blocks that another worker pushes: all that are missing here."""
        request, block_tokens = lookup.request, self._scheduler.settings.block_tokens
        assert self._pushing is not None and request.push_source is not None
        first = request.num_computed_tokens // block_tokens
        block_ids = self._scheduler.lookup_finished(request.id, len(lookup.blocks), now)
        assert block_ids is not None
        source, prompt = request.push_source, request.prompt_hash(block_tokens)
        try:
            load = self._pushing.start_receive(source, prompt, first, block_ids)
        except Exception as error:
            self._not_begun(request.id, block_ids, error, now)
            return
        # The other worker computes each layer of a whole chunk, and this one of a token: waiting from the
        # first layer on would keep a new request waiting longer, and the token would not come earlier.
        joins_at = self._num_layers // 2 + 1
        mark = request.mark("receive push", now, blocks=len(block_ids), source=source.address)
        self._loads[request.id] = ActiveLoad(load, block_ids, True, joins_at, mark)

    def begin_loads(self, now: float) -> None:
        """Begin the loads of lookups that have ended. Called on any thread while a step is computed."""
        for request_id, lookup in list(self._lookups.items()):
            # Gone when a link answered at once, and its wake came here again.
            if not lookup.done or self._lookups.pop(request_id, None) is None:
                continue
            traced, looking = self._traced.pop(request_id, (None, None))
            _end(looking, found_blocks=lookup.num_blocks)
            block_ids = self._scheduler.lookup_finished(request_id, lookup.num_blocks, now)
            if block_ids is None:
                self._link.release(lookup)
                continue
            try:
                load = self._link.start_load(lookup, block_ids)
            except Exception as error:
                self._not_begun(request_id, block_ids, error, now)
                self._link.release(lookup)
                continue
            mark = None
            if traced is not None:
                source = str(getattr(lookup, "source", ""))
                mark = traced.mark("load from pool", clock.monotonic(), blocks=len(block_ids), source=source)
            self._loads[request_id] = ActiveLoad(load, block_ids, mark=mark)

    def _not_begun(self, request_id: str, block_ids: Sequence[int], error: Exception, now: float) -> None:
        """Have a request computed whose load the link could not begin: the fault is that of one load, and
        neither the requests of the step nor the request itself should end for it."""
        log.exception("load_not_begun", request=request_id, blocks=len(block_ids), error=error)
        self.num_failed_loads += 1
        self._scheduler.release(block_ids)
        self._scheduler.load_failed(request_id, now)

    def loads_of(self, step: Step) -> dict[str, KvLoad]:
        """The loads that write cached positions of the step's chunks, by request."""
        return {c.request.id: self._loads[c.request.id].load for c in step.chunks if c.has_load}

    def end_load(self, request_id: str) -> None:
        """End the load of a request; its blocks stay in use until nothing writes into them."""
        if (entry := self._loads.pop(request_id, None)) is None:
            return
        _end(entry.mark, failed=entry.load.failed)
        if entry.load.done:
            self._ended(entry)
        else:
            if entry.is_pushed and self._pushing is not None:
                self._pushing.withdraw(entry.load)
            self._ending_loads.append(entry)

    def begin_saves(self, step: Step, started: list[ActiveSave]) -> None:
        """Start the step's saves; ``started`` grows with each, also when the next one raises."""
        for what in step.saves:
            if what.request.save_tail:
                self._stored.setdefault(what.request.id, {})
            columns = [(block.hash, block.num_tokens, block.block_id) for block in what.blocks]
            save = self._link.start_save(columns)
            mark = None
            if what.request.marks is not None:
                mark = what.request.mark("save", clock.monotonic(), blocks=len(columns))
            started.append(ActiveSave(save, what, mark))

    def finish_saves(self, step: Step, started: Sequence[ActiveSave], failed: Collection[str]) -> None:
        """Finish the saves of a step that has run; those of requests in ``failed`` are aborted."""
        for what in step.saves[len(started) :]:
            self._scheduler.release(what.block_ids)
        for entry in started:
            self._saves.setdefault(entry.what.request.id, []).append(entry)
            if entry.what.request.id in failed:
                self._link.abort_save(entry.save)
            else:
                self._link.finish_save(entry.save)
        self.poll_saves()

    def begin_pushes(self, step: Step, started: list[ActivePush]) -> None:
        """Start the step's pushes; ``started`` grows with each, also when the next one raises."""
        for what in step.pushes:
            assert self._pushing is not None
            prompt = what.request.pushed_hash(self._scheduler.settings.block_tokens)
            load = self._loads[what.request.id].load if what.has_load else None
            push = self._pushing.start_push(
                what.transfer_id, prompt, what.num_blocks, what.first, what.block_ids, load
            )
            mark = None
            if what.request.marks is not None:
                mark = what.request.mark("push", clock.monotonic(), blocks=len(what.block_ids))
            started.append(ActivePush(push, what, mark))

    def finish_pushes(self, step: Step, started: Sequence[ActivePush], failed: Collection[str]) -> None:
        """Note the pushes of a step that has run; those of requests in ``failed`` are discarded."""
        for what in step.pushes[len(started) :]:
            self._scheduler.release(what.block_ids)
        for what in step.pushes:
            if what.request.id in failed and self._pushing is not None:
                self._pushing.end_push(what.transfer_id, "prefill's step has failed")
        self._pushes += started
        self._poll_pushes()

    def _poll_pushes(self) -> None:
        """Discard the pushes that have ended early, and release the blocks of those that are done."""
        for transfer_id in self._scheduler.take_ended_pushes():
            if self._pushing is not None:
                self._pushing.end_push(transfer_id, "prefill's request has ended before it was computed")
        for entry in [entry for entry in self._pushes if entry.push.done]:
            self._pushes.remove(entry)
            _end(entry.mark)
            self._scheduler.release(entry.what.block_ids)

    def poll_saves(self) -> None:
        """Release the blocks of saves that are done."""
        for request_id, entries in list(self._saves.items()):
            for entry in [entry for entry in entries if entry.save.done]:
                entries.remove(entry)
                _end(entry.mark, stored_blocks=entry.save.num_stored_blocks)
                self._scheduler.release(entry.what.block_ids)
                stored = self._stored.get(request_id)
                if stored is not None:  # not forgotten while it was saved
                    taken = entry.what.blocks[: entry.save.num_stored_blocks]
                    stored.update((block.hash, None) for block in taken)
            if not entries:
                del self._saves[request_id]

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended. What was begun for it ends by itself."""
        if (lookup := self._lookups.pop(request_id, None)) is not None:
            self._link.release(lookup)
        self._traced.pop(request_id, None)
        self.end_load(request_id)
        self._stored.pop(request_id, None)

    def num_stored_tokens(self, request: Request, block_tokens: int) -> int:
        """Leading prompt tokens in the external cache: those loaded from there, and those it stored."""
        stored = self._stored.get(request.id, {})
        first = request.num_local_cached_tokens
        end = first + request.num_external_cached_tokens
        num_tokens = 0
        for block_hash in request.hash_blocks(block_tokens)[: request.num_prompt_tokens // block_tokens]:
            if block_hash not in stored and not first <= num_tokens < end:
                return num_tokens
            num_tokens += block_tokens
        is_tail_stored = request.tail_hash in stored or end >= request.num_prompt_tokens
        return request.num_prompt_tokens if is_tail_stored else num_tokens

    def check(self, known: Collection[str]) -> None:
        """Assert the invariants; ``known``: ids of the engine's requests that have not ended."""
        assert self._lookups.keys().isdisjoint(self._loads.keys())
        assert all(self._saves.values()), "an empty list of saves was kept"
        assert self._stored.keys() <= set(known), "stored blocks of a request that has ended were kept"

    def _poll_loads(self, now: float) -> None:
        for request_id, entry in list(self._loads.items()):
            if entry.load.failed:
                self.num_failed_loads += 1
                self._scheduler.load_failed(request_id, now)
                self.end_load(request_id)
            elif entry.load.done:
                _end(entry.mark)
                self._scheduler.load_ready(request_id, now)
            elif entry.load.num_layers_loaded >= entry.joins_at:
                self._scheduler.first_layer_loaded(request_id)
        ended = [entry for entry in self._ending_loads if entry.load.done]
        for entry in ended:
            self._ending_loads.remove(entry)
            self._ended(entry)

    def _ended(self, entry: ActiveLoad) -> None:
        """A load no longer writes into its blocks."""
        self._scheduler.release(entry.block_ids)
        if (moved := entry.load.moved) is not None:
            self._on_loaded(*moved)


def _end(mark: Mark | None, **attributes: int | bool) -> None:
    """End the interval of an operation whose request is traced."""
    if mark is not None and mark.ended is None:
        mark.ended = clock.monotonic()
        mark.attributes.update(attributes)
