# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.errors import InvalidArgument
from mooncake.sim.traces.generators import Agentic, Bursts, Generator, Poisson, parse
from mooncake.sim.traces.trace import TraceRow


def check(rows: list[TraceRow], block_tokens: int) -> None:
    """Check what a consumer may rely on: order of time, keys for all of the prompt, each with one parent."""
    parents: dict[int, int] = {}
    assert all(before.timestamp_s <= after.timestamp_s for before, after in pairwise(rows))
    for row in rows:
        assert row.num_input >= 1 and row.num_output >= 1
        assert len(row.keys) == -(-row.num_input // block_tokens)
        for parent, key in pairwise((-1, *row.keys)):
            assert parents.setdefault(key, parent) == parent, f"{key} names two prefixes"


@settings(deadline=None, max_examples=40)
@given(
    st.builds(
        Agentic,
        sessions=st.integers(1, 6),
        turns=st.integers(1, 5),
        requests=st.integers(0, 40),
        common_tokens=st.integers(0, 3000),
        first_tokens=st.integers(1, 2000),
        turn_tokens=st.integers(0, 2000),
        output_tokens=st.integers(1, 900),
        groups=st.integers(1, 3),
        jitter=st.sampled_from([0.0, 0.5]),
        block_tokens=st.sampled_from([16, 512]),
        seed=st.integers(0, 3),
    )
    | st.builds(
        Poisson,
        requests=st.integers(1, 60),
        prefixes=st.integers(0, 3),
        prefix_tokens=st.integers(0, 3000),
        spread=st.sampled_from([0.0, 1.0]),
        peak=st.sampled_from([1.0, 5.0]),
    )
)
def test_rows_are_in_order_and_keys_name_prefixes(generator: Generator) -> None:
    rows = list(generator)
    check(rows, generator.block_tokens)
    assert rows == list(generator), "the same rows each time"
    if not isinstance(generator, Agentic) or generator.requests or not generator.jitter:
        assert len(rows) == generator.num_rows


def test_a_seed_decides() -> None:
    first, again, other = (list(Poisson(requests=50, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_session_shares_the_common_prompt_and_grows_by_answers_and_inputs() -> None:
    rows = list(Agentic(sessions=3, turns=4))
    assert len(rows) == 12
    by_session: dict[str | None, list[TraceRow]] = {}
    for row in rows:
        by_session.setdefault(row.session, []).append(row)
    for turns in by_session.values():
        assert [row.num_input for row in turns] == [30_000 + 2_948 * number for number in range(4)]
        for before, after in pairwise(turns):
            num_full = before.num_input // 512
            assert after.keys[:num_full] == before.keys[:num_full]
    first, second, _ = (turns[0].keys for turns in by_session.values())
    assert first[: 20_000 // 512] == second[: 20_000 // 512]
    assert not set(first[20_000 // 512 :]) & set(second)


def test_the_agentic_recipe_reuses_what_its_source_says() -> None:
    """94.2 % of the tokens were hits there, in sessions of 33 turns; without any eviction slightly more."""
    seen: set[int] = set()
    num_hits = num_blocks = 0
    for row in Agentic(sessions=75):
        num_hits += sum(key in seen for key in row.keys)
        num_blocks += len(row.keys)
        seen.update(row.keys)
    assert 0.93 < num_hits / num_blocks < 0.97


def test_a_day_of_a_thousand_nodes_is_made_row_by_row() -> None:
    """Any number of rows, of which only the running sessions need to be held."""
    day = Agentic(sessions=4_340, requests=10**12)
    rows = list(islice(day, 30_000))
    check(rows, 512)
    running = {row.session for row in rows[-5_000:]}
    assert len(running) <= 4_340


def test_sessions_replace_each_other_until_the_requests_are_made() -> None:
    rows = list(Agentic(sessions=2, turns=3, requests=20))
    assert len(rows) == 20
    assert len({row.session for row in rows}) in (7, 8)


def test_poisson_has_its_rate_and_bursts_their_peak() -> None:
    rows = list(Poisson(rate=5.0, requests=5_000))
    assert 900 < rows[-1].timestamp_s < 1_100
    rows = list(Bursts(rate=5.0, requests=5_000))
    in_burst = sum(row.timestamp_s % 300 < 30 for row in rows)
    assert 0.4 < in_burst / len(rows) < 0.7, "30 s at ten times the rate, 270 s at the rate: about half"


def test_the_first_beginning_is_shared_most() -> None:
    counts = [0, 0, 0]
    for row in Poisson(requests=2_000, prefixes=3, prefix_tokens=512, spread=0.0):
        counts[row.keys[0] >> 20] += 1
    assert counts[0] > counts[1] > counts[2] > 0


def test_a_spec_is_a_generator() -> None:
    assert parse("agentic") == Agentic()
    assert parse("agentic:sessions=75,turns=20,pause_s=2.5") == Agentic(sessions=75, turns=20, pause_s=2.5)
    assert parse("bursts:peak=4,seed=9") == Bursts(peak=4.0, seed=9)
    assert parse("conversation_trace.jsonl") is None


WRONG: dict[str, str] = {
    "agentic:session=3": "sessions, turns",
    "agentic:sessions=many": "agentic:sessions is 'many'; allowed: a whole number",
    "poisson:input_tokens=1e12": "poisson:input_tokens is '1e12'; allowed: a whole number",
    "poisson:rate=fast": "poisson:rate is 'fast'; allowed: a number",
    "poisson:rate=1,rate=2": "poisson:rate is '2'; allowed: one value; 1.0 was given",
    "agentic:sessions=0": "sessions is 0; allowed: 1 or more",
    "agentic:turns=2.5": "agentic:turns is '2.5'",
    "poisson:rate=-1": "rate is -1.0; allowed: 1e-12 to 1e+12",
    "poisson:rate=nan": "rate is nan",
    "poisson:rate": "poisson:rate is ''",
    "bursts:burst_s=-3": "burst_s is -3.0; allowed: 0 or more",
    "poisson:spread=1000": "spread is 1000.0; allowed: 0 or more, up to 10",
    "agentic:pause_p99_s=1e308": "pause_p99_s is 1e+308; allowed: 0 or more, up to 1e+12",
    "agentic:jitter=1e200": "jitter is 1e+200; allowed: 0 or more, up to 1",
    "bursts:rate=1e200,peak=1e200": "rate is 1e+200; allowed: 1e-12 to 1e+12",
    "bursts:peak=1e200": "peak is 1e+200; allowed: 1e-12 to 10000",
    "poisson:rate=9e-13": "rate is 9e-13; allowed: 1e-12 to 1e+12",
    "poisson:input_tokens=1000000000": "input_tokens is 1000000000; allowed: 1 or more, up to 1e+08",
}


@pytest.mark.parametrize("spec", WRONG)
def test_a_wrong_spec_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(spec)
    assert WRONG[spec] in str(caught.value)


def test_what_is_out_of_range_is_refused_before_the_first_row() -> None:
    wrong: list[dict[str, Any]] = [{"pause_s": 0.0}, {"groups": 0}, {"jitter": -1.0}, {"turns": 10**6}]
    for fields in wrong:
        with pytest.raises(InvalidArgument):
            next(iter(Agentic(**fields)))
