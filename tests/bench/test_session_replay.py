# SPDX-License-Identifier: Apache-2.0
"""A closed load against an endpoint: conversations hold the real answers, and what is measured adds up."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from bench.session_replay import (
    EndlessTokenCache,
    SentTurn,
    SessionReplay,
    attainable_hit_rate,
    figures_of,
    simulated_figures,
)
from mooncake.cli.replay.endpoint import Endpoint
from mooncake.sim.serving.results import DONE, FAILED, Recorder, Timeline
from mooncake.sim.traces.generators import Agentic
from mooncake.sim.traces.sessions import ClosedLoop, recipe_sessions
from tests.cli.replay.openai_double import Served, serving

RECIPE = Agentic(common_tokens=64, first_tokens=40, turn_tokens=20, output_tokens=6, turns=5, pause_s=0.01)
NUM_AT_ONCE, NUM_REQUESTS = 3, 9


def replayed(served: Served, begun: list[int] | None = None, seed: str = "0") -> list[SentTurn]:
    async def run(url: str) -> list[SentTurn]:
        loop = ClosedLoop(recipe_sessions(RECIPE, 8), NUM_AT_ONCE, NUM_REQUESTS)
        async with Endpoint(url) as endpoint:

            def between() -> None:
                if begun is not None:
                    begun.append(len(served.bodies))

            return await SessionReplay(endpoint, loop, 16, seed, between).run()

    with serving(served) as url:
        return asyncio.run(run(url))


def test_a_prompt_goes_on_behind_the_answer_before_it() -> None:
    served, begun = Served(), list[int]()
    sent = replayed(served, begun)
    assert len(sent) == NUM_AT_ONCE + NUM_REQUESTS
    assert len(served.bodies) < len(sent) + NUM_AT_ONCE, "others may be under way when the load is over"
    assert begun == [NUM_AT_ONCE], "the load begins once, when the first phase has ended"
    assert len({tuple(one.prompt[:64]) for one in sent}) == 1, "instructions in common"
    num_followed = 0
    for number in {one.upcoming.number for one in sent}:
        mine = sorted(
            (one for one in sent if one.upcoming.number == number), key=lambda one: one.upcoming.index
        )
        for before, after in pairwise(mine):
            held = before.prompt + before.answer.token_ids
            assert before.answer.token_ids == list(range(6))
            assert after.prompt[: len(held)] == held and len(after.prompt) == len(held) + 20
            num_followed += 1
    assert num_followed > NUM_REQUESTS // 2
    assert [one.prompt for one in replayed(Served(), seed="other")] != [one.prompt for one in sent]


def test_an_answer_that_breaks_off_ends_no_session() -> None:
    served = Served(reject_every=4)
    sent = replayed(served)
    assert len(sent) == NUM_AT_ONCE + NUM_REQUESTS
    assert all(len(one.prompt) == one.upcoming.turn.num_input for one in sent)
    figures = figures_of(sent)
    assert figures.num_failed > 0 and figures.num_done + figures.num_failed == NUM_REQUESTS


def test_figures_leave_out_the_first_phase() -> None:
    sent = replayed(Served())
    figures = figures_of(sent)
    assert figures.num_done == NUM_REQUESTS and figures.num_failed == 0
    load = [one for one in sent if not one.upcoming.is_first_phase]
    assert figures.ttft(0.5) == pytest.approx(np.median([one.answer.token_at_s[0] for one in load]))
    assert figures.latency(0.9) >= figures.latency(0.5) >= figures.ttft(0.5) > 0
    assert figures.per_s == pytest.approx(NUM_REQUESTS / figures.span_s)
    assert figures.hit_rate == 0, "no prompt was sent twice"
    # Of each next turn all but its new tokens, the answer's last one and what fills no block.
    assert 0.6 < attainable_hit_rate(sent) < 1
    for one in load:
        if one.upcoming.index:
            assert one.attainable_tokens == (one.upcoming.turn.num_kept - 1) // 16 * 16


def test_an_endless_cache_has_whole_blocks_and_leaves_the_last_token() -> None:
    cache = EndlessTokenCache(16)
    cache.add(range(40))
    assert cache.match(range(40)) == 32
    assert cache.match([*range(32)]) == 16, "the last token is computed, and with it its block"
    assert cache.match([*range(20), *range(100, 130)]) == 16
    assert cache.match(range(1, 40)) == 0


def test_a_simulated_run_has_the_same_figures() -> None:
    recorder = Recorder()
    for number, (arrival_s, e2e_s, status) in enumerate(
        [(0.0, 4.0, DONE), (5.0, 2.0, DONE), (6.0, 4.0, DONE), (7.0, float("nan"), FAILED)]
    ):
        recorder.add(arrival_s, 100, 5)
        recorder.status[number] = status
        recorder.ttft_s[number], recorder.e2e_s[number] = e2e_s / 2, e2e_s
        recorder.cached_tokens[number] = 20 * number
    results = recorder.outcome(Timeline(1.0, *np.zeros((10, 0))), 0.0, 0.0)
    figures = simulated_figures(results, 1, 2)
    assert (figures.num_done, figures.num_failed) == (2, 0)
    assert figures.span_s == pytest.approx(6.0), "from the end of the first phase to the last answer"
    assert figures.ttft_s.tolist() == [1.0, 2.0] and figures.latency_s.tolist() == [2.0, 4.0]
    assert figures.hit_rate == pytest.approx((20 + 40) / 200)
    shorter = simulated_figures(results, 1, 1)
    assert shorter.latency_s.tolist() == [2.0], "what ended later was under way when the load was over"
    assert shorter.per_s == pytest.approx(1 / 3.0)


def test_a_salt_reaches_the_server_and_only_where_it_is_wanted() -> None:
    served = Served()

    async def run(url: str) -> list[int]:
        async with Endpoint(url) as endpoint:
            await endpoint.complete([1000, 1001], 2)
            return (await endpoint.complete([1000, 1001], 3, cache_salt="alone")).token_ids

    with serving(served) as url:
        assert asyncio.run(run(url)) == [0, 1, 2]
    assert [body.get("cache_salt") for body in served.bodies] == [None, "alone"]
