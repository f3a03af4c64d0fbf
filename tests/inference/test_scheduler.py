# SPDX-License-Identifier: Apache-2.0
"""Every request ends with all its tokens, for all pool sizes, answers of the cache and aborts."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from mooncake.connectors.kv_link import PushSource
from mooncake.errors import InvalidArgument, Refusal
from mooncake.inference.request import FinishReason, Request, RequestState, SamplingParams
from mooncake.inference.scheduler import PRIORITY_YIELD_S, Chunk, Scheduler, SchedulerSettings, Step

BLOCK = 4
SETTINGS = SchedulerSettings(num_blocks=33, block_tokens=BLOCK, max_batch_tokens=16, max_running=8)


def request_of(name: str, num_tokens: int, max_tokens: int = 4, **fields: object) -> Request:
    prompt = [int(name) * 100 + index for index in range(num_tokens)] if name.isdigit() else [7] * num_tokens
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), **fields)  # type: ignore[arg-type]


def run_step(scheduler: Scheduler, now: float = 0.0) -> Step:
    """One step in which every sampled token is 1."""
    step = scheduler.schedule(now)
    tokens = {chunk.request.id: 1 for chunk in step.chunks if chunk.samples}
    scheduler.step_finished(step, tokens, (), now)
    scheduler.check()
    return step


def shape(step: Step) -> list[tuple[str, int, int]]:
    return [(chunk.request.id, chunk.start, chunk.num_tokens) for chunk in step.chunks]


def test_long_prompts_are_cut_and_decodes_go_first() -> None:
    scheduler = Scheduler(SETTINGS)
    scheduler.add(request_of("1", 3), 0.0)
    run_step(scheduler)
    scheduler.add(request_of("2", 40), 0.0)
    assert shape(run_step(scheduler)) == [("1", 3, 1), ("2", 0, 15)]
    assert shape(run_step(scheduler)) == [("1", 4, 1), ("2", 15, 15)]
    assert shape(run_step(scheduler)) == [("1", 5, 1), ("2", 30, 10)]
    assert shape(run_step(scheduler)) == [("2", 40, 1)]


def test_prompts_that_keep_the_device_busy_are_computed_one_after_another() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, saturating_tokens=8))
    for name, num_tokens in (("1", 3), ("2", 5), ("3", 2), ("4", 20), ("5", 2)):
        scheduler.add(request_of(name, num_tokens, 1), 0.0)
    assert shape(run_step(scheduler)) == [("1", 0, 3), ("2", 0, 5)], "small ones share a step"
    assert shape(run_step(scheduler)) == [("3", 0, 2)], (
        "sharing a step with a long prompt would not end it sooner"
    )
    assert shape(run_step(scheduler)) == [("4", 0, 16)]
    assert shape(run_step(scheduler)) == [("4", 16, 4), ("5", 0, 2)]


def test_a_saturating_prompt_leaves_decodes_their_turn() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, saturating_tokens=4))
    scheduler.add(request_of("1", 3), 0.0)
    run_step(scheduler)
    scheduler.add(request_of("2", 6), 0.0)
    scheduler.add(request_of("3", 6), 0.0)
    assert shape(run_step(scheduler)) == [("1", 3, 1), ("2", 0, 6)]
    assert shape(run_step(scheduler)) == [("1", 4, 1), ("2", 6, 1), ("3", 0, 6)]


def test_priority_then_arrival() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, max_running=1))
    for name, priority in (("1", 1), ("2", 0), ("3", 0)):
        scheduler.add(request_of(name, 4, 1, priority=priority), 0.0)
    assert [run_step(scheduler).chunks[0].request.id for _ in range(3)] == ["2", "3", "1"]


def test_shared_prefix_is_computed_once() -> None:
    scheduler = Scheduler(SETTINGS)
    scheduler.add(request_of("a", 9, 1), 0.0)
    run_step(scheduler)
    second = request_of("b", 9, 1)
    scheduler.add(second, 0.0)
    assert shape(run_step(scheduler)) == [("b", 8, 1)]
    assert second.num_local_hit_tokens == 8


def test_wholly_cached_prompt_computes_its_last_token_without_writing() -> None:
    scheduler = Scheduler(SETTINGS)
    scheduler.add(request_of("a", 8, 1), 0.0)
    run_step(scheduler)
    scheduler.add(request_of("b", 8, 1), 0.0)
    chunk = run_step(scheduler).chunks[0]
    assert (chunk.start, chunk.num_tokens, chunk.num_cached) == (7, 1, 8)


def test_last_in_rank_is_preempted_and_comes_back() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, num_blocks=6))
    first, second = request_of("1", 8, 12), request_of("2", 7, 9)
    for request in (first, second):
        scheduler.add(request, 0.0)
    while first.state is not RequestState.FINISHED or second.state is not RequestState.FINISHED:
        run_step(scheduler)
    assert first.num_preemptions == 0 and second.num_preemptions > 0
    assert (first.num_output_tokens, second.num_output_tokens) == (12, 9)
    assert any("preempted" in line for line in scheduler.story("2"))


def test_what_a_preempted_prompt_has_computed_itself_is_not_reported_as_cached() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, num_blocks=15, max_batch_tokens=5, max_running=4))
    for name in "12":
        scheduler.add(request_of(name, 3, 20), 0.0)
    for _ in range(3):
        run_step(scheduler)
    request = request_of("3", 28, 2)
    scheduler.add(request, 0.0)
    while request.state is not RequestState.FINISHED:
        run_step(scheduler)
    assert request.num_preemptions and any("admitted local=8" in line for line in scheduler.story("3"))
    assert (request.num_local_hit_tokens, request.num_external_hit_tokens) == (0, 0)


def test_what_never_fits_is_refused_with_a_reason() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, num_blocks=3, max_waiting=1))
    refused = scheduler.add(request_of("1", 9), 0.0)
    assert isinstance(refused, Refusal) and "takes up to 8" in refused.reason
    assert scheduler.add(request_of("2", 8), 0.0) is None
    refused = scheduler.add(request_of("3", 1), 0.0)
    assert isinstance(refused, Refusal) and refused.code == "queue_full"


def test_bad_settings_name_the_field() -> None:
    with pytest.raises(InvalidArgument, match="max_running"):
        dataclasses.replace(SETTINGS, max_running=17)
    with pytest.raises(InvalidArgument, match="block_tokens"):
        dataclasses.replace(SETTINGS, block_tokens=0)


EXTERNAL = dataclasses.replace(SETTINGS, has_external_cache=True)


def look_up(scheduler: Scheduler, request: Request, num_found: int) -> list[int] | None:
    scheduler.add(request, 0.0)
    step = scheduler.schedule(0.0)
    assert [lookup.request for lookup in step.lookups] == [request] and not step.chunks
    return scheduler.lookup_finished(request.id, num_found, 0.0)


def test_lookup_asks_for_full_blocks_and_the_tail() -> None:
    scheduler = Scheduler(EXTERNAL)
    request = request_of("1", 10)
    scheduler.add(request, 0.0)
    blocks = scheduler.schedule(0.0).lookups[0].blocks
    assert [num_tokens for _, num_tokens in blocks] == [4, 4, 2]
    assert [block_hash for block_hash, _ in blocks] == [*request.hash_blocks(BLOCK), request.tail_hash]


def test_waiting_for_the_cache_delays_no_other_request() -> None:
    scheduler = Scheduler(EXTERNAL)
    slow, quick = request_of("1", 8), request_of("2", 8)
    scheduler.add(slow, 0.0)
    scheduler.add(quick, 0.0)
    scheduler.schedule(0.0)
    assert scheduler.lookup_finished("2", 0, 0.0) is None
    assert shape(run_step(scheduler)) == [("2", 0, 8)]


def test_a_prompt_that_could_begin_gives_way_to_one_before_it_that_is_looked_up() -> None:
    scheduler = Scheduler(EXTERNAL)
    scheduler.add(request_of("1", 40, priority=5), 0.0)
    scheduler.schedule(0.0)
    scheduler.add(request_of("2", 8, 1, priority=1), 0.01)
    assert scheduler.lookup_finished("1", 0, 0.01) is None
    step = scheduler.schedule(0.01)
    assert [lookup.request.id for lookup in step.lookups] == ["2"]
    assert not step.chunks and step.gives_way_until == pytest.approx(0.01 + PRIORITY_YIELD_S)
    assert scheduler.lookup_finished("2", 0, 0.02) is None
    assert shape(run_step(scheduler, 0.02)) == [("2", 0, 8), ("1", 0, 8)]
    scheduler.add(request_of("3", 8, 1, priority=1), 0.03)
    assert shape(run_step(scheduler, 0.03)) == [("1", 8, 16)], "a prompt that was begun is finished first"


def test_it_gives_way_for_a_moment_only() -> None:
    scheduler = Scheduler(EXTERNAL)
    scheduler.add(request_of("1", 8, priority=5), 0.0)
    scheduler.add(request_of("2", 8, priority=1), 0.0)
    scheduler.schedule(0.0)
    assert scheduler.lookup_finished("1", 0, 0.0) is None
    assert not scheduler.schedule(PRIORITY_YIELD_S / 2).chunks
    assert shape(run_step(scheduler, PRIORITY_YIELD_S)) == [("1", 0, 8)]


def test_loaded_request_joins_when_everything_has_arrived() -> None:
    scheduler = Scheduler(EXTERNAL)
    request = request_of("1", 10)
    block_ids = look_up(scheduler, request, 2)
    assert block_ids == request.block_ids[:2]
    assert run_step(scheduler).chunks == []
    scheduler.load_ready("1", 0.0)
    step = run_step(scheduler)
    assert shape(step) == [("1", 8, 2)] and step.chunks[0].has_load and not step.awaits_layers
    assert step.saves == []  # loaded blocks are not saved again
    scheduler.release(block_ids)
    scheduler.check()


def test_a_request_that_is_alone_runs_while_its_layers_arrive() -> None:
    scheduler = Scheduler(EXTERNAL)
    block_ids = look_up(scheduler, request_of("1", 10), 2)
    assert block_ids is not None
    scheduler.first_layer_loaded("1")
    step = run_step(scheduler)
    assert shape(step) == [("1", 8, 2)] and step.chunks[0].has_load and step.awaits_layers
    assert not run_step(scheduler).awaits_layers, "the load has ended with the step"
    scheduler.release(block_ids)
    scheduler.check()


def test_in_a_pipeline_a_load_ends_with_the_step_that_has_waited_for_its_layers() -> None:
    scheduler = Scheduler(EXTERNAL)
    block_ids = look_up(scheduler, request_of("1", 10), 2)
    assert block_ids is not None
    scheduler.first_layer_loaded("1")
    step = scheduler.schedule(0.0)
    assert step.awaits_layers
    scheduler.step_begun(step, (), 0.0)
    scheduler.check()
    scheduler.step_finished(step, {"1": 1}, (), 0.0)
    scheduler.release(block_ids)
    scheduler.check()


def test_no_step_of_others_waits_for_the_layers_of_a_load() -> None:
    scheduler = Scheduler(EXTERNAL)
    scheduler.add(request_of("1", 3, 3), 0.0)
    scheduler.schedule(0.0)
    scheduler.add(request_of("2", 10), 0.0)
    scheduler.schedule(0.0)
    assert scheduler.lookup_finished("1", 0, 0.0) is None
    block_ids = scheduler.lookup_finished("2", 2, 0.0)
    assert block_ids is not None
    scheduler.first_layer_loaded("2")
    for start, size in ((0, 3), (3, 1)):
        step = run_step(scheduler)
        assert shape(step) == [("1", start, size)] and not step.awaits_layers
    scheduler.add(request_of("3", 4, 1), 0.0)
    assert shape(run_step(scheduler)) == [("1", 4, 1)], "the last token of the first"
    assert run_step(scheduler).chunks == [], "the third, looked up now, would wait for those layers"
    scheduler.abort("3", 0.0)
    step = run_step(scheduler)
    assert shape(step) == [("2", 8, 2)] and step.awaits_layers, "alone now"
    scheduler.release(block_ids)
    scheduler.check()


def test_a_load_that_fails_after_its_first_layer_is_computed() -> None:
    scheduler = Scheduler(EXTERNAL)
    block_ids = look_up(scheduler, request_of("1", 10), 2)
    assert block_ids is not None
    scheduler.first_layer_loaded("1")
    scheduler.load_failed("1", 0.0)
    scheduler.release(block_ids)
    step = run_step(scheduler)
    assert shape(step) == [("1", 0, 10)] and not step.awaits_layers
    scheduler.check()


def test_failed_load_starts_over_from_the_local_prefix() -> None:
    scheduler = Scheduler(EXTERNAL)
    request = request_of("1", 10)
    block_ids = look_up(scheduler, request, 2)
    assert block_ids is not None
    scheduler.load_ready("1", 0.0)
    step = scheduler.schedule(0.0)
    assert scheduler.step_finished(step, {"1": 9}, {"1"}, 0.0) == []
    scheduler.release(block_ids)
    assert request.num_output_tokens == 0
    step = run_step(scheduler)
    assert shape(step) == [("1", 0, 10)]
    assert [block.block_id for block in step.saves[0].blocks] == request.block_ids[:2]


def test_blocks_are_saved_when_they_fill_and_tails_on_request() -> None:
    scheduler = Scheduler(EXTERNAL)
    request = request_of("1", 10, 1, save_tail=True)
    look_up(scheduler, request, 0)
    step = scheduler.schedule(0.0)
    assert [block.num_tokens for block in step.saves[0].blocks] == [4, 4, 2]
    assert step.saves[0].blocks[-1].hash == request.tail_hash
    scheduler.step_finished(step, {"1": 5}, (), 0.0)
    assert request.state is RequestState.FINISHED
    assert scheduler.pool.num_free == scheduler.pool.num_usable - 3  # still being read
    scheduler.release(step.saves[0].block_ids)
    scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_prefill_offers_locally_cached_blocks_again() -> None:
    """The store may have dropped them, and a decode worker waits for the whole prompt."""
    scheduler = Scheduler(EXTERNAL)
    look_up(scheduler, request_of("a", 8, 1), 0)
    scheduler.release(run_step(scheduler).saves[0].block_ids)
    scheduler.add(request_of("b", 8, 1, save_tail=True), 0.0)
    step = run_step(scheduler)
    assert [block.num_tokens for block in step.saves[0].blocks] == [4, 4]


def test_a_failed_load_leaves_the_tail_to_be_saved_again() -> None:
    """The saves of a failed step are aborted with it, and decode waits for the tail."""
    scheduler = Scheduler(EXTERNAL)
    request = request_of("1", 10, save_tail=True)
    block_ids = look_up(scheduler, request, 2)
    assert block_ids is not None
    scheduler.load_ready("1", 0.0)
    step = scheduler.schedule(0.0)
    assert [block.num_tokens for block in step.saves[0].blocks] == [2], (
        "the tail alone: the others were loaded"
    )
    scheduler.step_finished(step, {"1": 9}, {"1"}, 0.0)
    scheduler.release(block_ids)
    step = run_step(scheduler)
    assert [block.num_tokens for block in step.saves[0].blocks] == [4, 4, 2]
    assert step.saves[0].blocks[-1].hash == request.tail_hash


def test_a_request_that_is_still_loading_is_not_preempted() -> None:
    """Its load may still be found wrong, and its blocks are in use by it."""
    scheduler = Scheduler(dataclasses.replace(EXTERNAL, num_blocks=6))
    first, second = request_of("1", 8, 12), request_of("2", 8, 12)
    for request in (first, second):
        scheduler.add(request, 0.0)
    scheduler.schedule(0.0)
    block_ids = scheduler.lookup_finished("2", 2, 0.0)
    assert block_ids is not None and scheduler.lookup_finished("1", 0, 0.0) is None
    while first.num_tokens < 3 * BLOCK + 1:
        run_step(scheduler)
    assert scheduler.pool.num_free == 0
    scheduler.load_ready("2", 0.0)
    step = scheduler.schedule(0.0)  # the first needs a fourth block
    scheduler.check()
    assert second.num_preemptions == 0 and second.block_ids[:2] == block_ids
    failed = {chunk.request.id for chunk in step.chunks if chunk.has_load}
    assert failed == {"2"}
    tokens = {chunk.request.id: 1 for chunk in step.chunks if chunk.samples}
    scheduler.step_finished(step, tokens, failed, 0.0)
    scheduler.release(block_ids)
    scheduler.check()


def test_a_prompt_waits_rather_than_be_preempted_for_the_next_token_of_others() -> None:
    """Every running request may soon need one more block, so that many are left."""
    scheduler = Scheduler(dataclasses.replace(SETTINGS, num_blocks=6))
    first, second = request_of("1", 6, 4), request_of("2", 12, 1)
    scheduler.add(first, 0.0)
    run_step(scheduler)
    scheduler.add(second, 0.0)
    assert shape(run_step(scheduler)) == [("1", 6, 1)], "three blocks are free and three are needed"
    while second.state is not RequestState.FINISHED:
        run_step(scheduler)
    assert first.num_preemptions == second.num_preemptions == 0


PUSHED = PushSource("t", "127.0.0.1:1")


def pushes(step: Step) -> list[tuple[int, tuple[int, ...], int]]:
    return [(push.first, push.block_ids, push.num_blocks) for push in step.pushes]


def test_a_prompt_is_pushed_as_it_is_computed() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, has_external_cache=True, max_batch_tokens=10))
    request = request_of("1", 2 * BLOCK, 1, save_tail=True)
    look_up(scheduler, request, 0)
    run_step(scheduler)  # its blocks are cached for the next request
    other = request_of("1", 5 * BLOCK + 1, 1, save_tail=True, push_id="t")
    look_up(scheduler, other, 0)
    ids = tuple(other.block_ids)
    steps = [run_step(scheduler) for _ in range(2)]
    assert [pushes(step) for step in steps] == [[(0, ids[:4], 6)], [(4, ids[4:], 6)]]
    assert scheduler.take_ended_pushes() == []
    for step in steps:
        scheduler.release(step.pushes[0].block_ids)


@pytest.mark.parametrize("num_before", range(1, 6))
def test_a_request_that_leaves_pushes_all_its_tokens_and_discards_one(num_before: int) -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, has_external_cache=True))
    request = request_of("1", BLOCK, 20)
    look_up(scheduler, request, 0)
    for _ in range(num_before):
        run_step(scheduler)
    assert request.num_tokens == BLOCK + num_before
    assert scheduler.hand_over("1", "t", 1.0) is None
    assert scheduler.hand_over("1", "u", 1.0) is None, "it is leaving already"
    step = run_step(scheduler)
    num_blocks = -(-request.num_tokens // BLOCK)
    assert [(push.transfer_id, push.first, push.num_blocks) for push in step.pushes] == [("t", 0, num_blocks)]
    assert request.finish_reason is FinishReason.MOVED and request.num_tokens == BLOCK + num_before
    other = Request("2", request.token_ids, push_source=PUSHED)
    assert request.pushed_hash(BLOCK) == other.prompt_hash(BLOCK)
    assert scheduler.take_ended_pushes() == []
    assert len(step.pushes[0].block_ids) == num_blocks
    scheduler.release(step.pushes[0].block_ids)
    scheduler.check()


def test_a_request_that_leaves_without_a_push_ends_at_once() -> None:
    scheduler = Scheduler(SETTINGS)
    request = request_of("1", BLOCK, 20)
    scheduler.add(request, 0.0)
    run_step(scheduler)
    assert scheduler.hand_over("1", "", 1.0) is request
    assert scheduler.hand_over("2", "t", 1.0) is None, "unknown"
    assert request.finish_reason is FinishReason.MOVED and scheduler.num_running == 0
    waiting = request_of("3", BLOCK, 20)
    scheduler.add(waiting, 1.0)
    assert scheduler.hand_over("3", "t", 1.0) is waiting
    assert scheduler.take_ended_pushes() == ["t"], "the other worker would wait for it"
    scheduler.check()


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_push_whose_request_ends_early_is_ended(num_steps: int) -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, has_external_cache=True, max_batch_tokens=8))
    request = request_of("1", 5 * BLOCK, 1, save_tail=True, push_id="t")
    look_up(scheduler, request, 0)
    for _ in range(num_steps):
        run_step(scheduler)
    scheduler.abort("1", 1.0)
    assert scheduler.take_ended_pushes() == ["t"]
    waiting = request_of("2", 5, 1, push_id="u")
    scheduler.add(waiting, 1.0)
    scheduler.abort("2", 1.0)
    assert scheduler.take_ended_pushes() == ["u"]


def test_a_failed_push_is_looked_up_and_then_computed() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, has_external_cache=True))
    request = request_of("1", 2 * BLOCK + 1, push_source=PUSHED)
    block_ids = look_up(scheduler, request, 3)
    assert block_ids is not None
    scheduler.load_failed("1", 1.0)
    scheduler.release(block_ids)
    scheduler.check()
    assert request.state is RequestState.LOOKING and request.push_source is None
    step = scheduler.schedule(1.0)
    assert [len(lookup.blocks) for lookup in step.lookups] == [3] and not step.chunks
    assert not scheduler.schedule(1.0).lookups, "once"
    again = scheduler.lookup_finished("1", 1, 1.0)
    assert again is not None
    scheduler.load_failed("1", 2.0)
    scheduler.release(again)
    assert shape(run_step(scheduler)) == [("1", 0, 2 * BLOCK + 1)]


def test_a_push_that_fails_while_its_request_runs() -> None:
    scheduler = Scheduler(dataclasses.replace(SETTINGS, has_external_cache=True))
    request = request_of("1", 2 * BLOCK + 1, push_source=PUSHED)
    block_ids = look_up(scheduler, request, 3)
    assert block_ids is not None
    scheduler.first_layer_loaded("1")
    step = scheduler.schedule(1.0)
    assert step.awaits_layers
    scheduler.step_finished(step, {"1": 1}, {"1": None}, 1.0)
    scheduler.release(block_ids)
    scheduler.check()
    assert request.state is RequestState.LOOKING and request.num_output_tokens == 0
    assert len(scheduler.schedule(1.0).lookups) == 1
    scheduler.abort("1", 1.0)
    scheduler.check()


class World:
    """A double of everything around a scheduler: random requests, a random cache, random aborts."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=self.random.choice([8, 14, 40]),
                block_tokens=BLOCK,
                max_batch_tokens=self.random.choice([4, 9, 32]),
                saturating_tokens=self.random.choice([0, 0, 1, 6]),
                max_running=self.random.choice([1, 4]),
                has_external_cache=self.random.random() < 0.7,
            )
        )
        self.requests: list[Request] = []
        self.lookups: list[tuple[Request, int]] = []
        self.loads: dict[str, list[int]] = {}
        self.pins: list[list[int]] = []
        self.now = 0.0

    def arrive(self) -> None:
        longest = self.scheduler.max_total_tokens - 1
        family, length = self.random.randint(1, 3), self.random.randint(1, min(longest, 24))
        prompt = [family * 100 + index for index in range(length)]
        sampling = SamplingParams(max_tokens=self.random.randint(1, 20), ignore_eos=True)
        save_tail = self.random.random() < 0.3
        priority = self.random.choice([0, 0, 1])
        request = Request(f"r{len(self.requests)}", prompt, sampling, save_tail=save_tail, priority=priority)
        assert self.scheduler.add(request, self.now) is None
        self.requests.append(request)

    def answer_the_cache(self) -> None:
        for request, num_wanted in self.lookups:
            if request.state is RequestState.LOOKING:
                found = self.random.choice([0, self.random.randint(0, num_wanted), num_wanted])
                block_ids = self.scheduler.lookup_finished(request.id, found, self.now)
                if block_ids is not None:
                    self.loads[request.id] = block_ids
        self.lookups = []
        for request in self.requests:
            if request.state is RequestState.LOADING and self.random.random() < 0.7:
                if self.random.random() < 0.4:
                    self.scheduler.first_layer_loaded(request.id)
                elif self.random.random() < 0.3:
                    self.scheduler.load_failed(request.id, self.now)
                    self.pins.append(self.loads.pop(request.id))
                else:
                    self.scheduler.load_ready(request.id, self.now)
        self.random.shuffle(self.pins)
        for block_ids in self.pins[: len(self.pins) // 2 + 1]:
            self.scheduler.release(block_ids)
        self.pins = self.pins[len(self.pins) // 2 + 1 :]

    def step(self) -> None:
        self.now += self.random.choice([0.01, 1.0])
        self.answer_the_cache()
        step = self.scheduler.schedule(self.now)
        self.verify(step)
        self.lookups += [(lookup.request, len(lookup.blocks)) for lookup in step.lookups]
        self.pins += [save.block_ids for save in step.saves]
        failed = {c.request.id for c in step.chunks if c.has_load and self.random.random() < 0.3}
        tokens = {c.request.id: self.random.randint(1, 9) for c in step.chunks if c.samples}
        self.scheduler.step_finished(step, tokens, failed, self.now)
        for chunk in step.chunks:
            if chunk.request.id in self.loads:
                self.pins.append(self.loads.pop(chunk.request.id))
        self.scheduler.check()

    def verify(self, step: Step) -> None:
        assert step.num_tokens <= self.scheduler.settings.max_batch_tokens
        assert not step.awaits_layers or len(step.chunks) == self.scheduler.num_running == 1
        ids = [chunk.request.id for chunk in step.chunks]
        assert len(ids) == len(set(ids))
        written: dict[int, str] = {}
        for chunk in step.chunks:
            self.verify_chunk(chunk, written)

    def verify_chunk(self, chunk: Chunk, written: dict[int, str]) -> None:
        request = chunk.request
        assert chunk.end <= request.num_tokens <= self.scheduler.max_total_tokens
        assert chunk.samples == (chunk.end == request.num_tokens)
        for position in range(max(chunk.start, chunk.num_cached), chunk.end):
            slot = request.block_ids[position // BLOCK] * BLOCK + position % BLOCK
            assert slot not in written, f"{request.id} and {written.get(slot)} write one slot"
            assert slot >= BLOCK, "block 0 is scratch"
            written[slot] = request.id


@pytest.mark.parametrize("seed", range(60))
def test_random_worlds(seed: int) -> None:
    world = World(seed)
    aborted: dict[str, None] = {}
    for _ in range(40):
        if world.random.random() < 0.5:
            world.arrive()
        if world.requests and world.random.random() < 0.05:
            request = world.random.choice(world.requests)
            if request.state is not RequestState.FINISHED:
                world.scheduler.abort(request.id, world.now)
                aborted[request.id] = None
                if request.id in world.loads:
                    world.pins.append(world.loads.pop(request.id))
        world.step()
    for _ in range(3000):
        if all(request.state is RequestState.FINISHED for request in world.requests):
            break
        world.step()
    for request in world.requests:
        assert request.state is RequestState.FINISHED, (request, world.scheduler.story(request.id))
        if request.id in aborted:
            continue
        assert request.finish_reason is FinishReason.LENGTH
        is_full = request.num_tokens == world.scheduler.max_total_tokens
        assert request.num_output_tokens == request.sampling.max_tokens or is_full
    for block_ids in world.pins:
        world.scheduler.release(block_ids)
    world.scheduler.check()
    assert world.scheduler.pool.num_free == world.scheduler.pool.num_usable
