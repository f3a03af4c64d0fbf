# SPDX-License-Identifier: Apache-2.0
"""Explanations: what was weighed, predicted and measured for a request, and why its blocks missed."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from mooncake.conductor.admission import AdmissionResult
from mooncake.conductor.explanation import (
    AdmissionOutcome,
    BlockVerdict,
    CandidateInstance,
    CandidateSet,
    Explainer,
    Explanation,
    PredictedTimes,
    PromptBlocks,
    block_verdicts,
)
from mooncake.conductor.key_table import key_column
from mooncake.conductor.messages import Decision, Finished, Place, Prediction, Prefilled, Refuse
from mooncake.conductor.prefix_index import PrefixIndex
from mooncake.errors import Refusal
from mooncake.http.worker_stats import StageStats
from mooncake.types import Tier

PREDICTION = Prediction(queue_s=0.1, prefill_s=0.4, ttft_s=0.5, tbt_s=0.02, output_tokens=100)
PREDICTED = PredictedTimes(0.1, 0.0, 0.4, 0.5, 0.02, 100)
WEIGHED = CandidateSet(["p1"], np.array([[0.5], [0.1], [0.0], [0.4], [0.0]]), [("p2", "draining")])
CANDIDATES = [CandidateInstance("p1", 0.5, 0.1, 0.0, 0.4, 0), CandidateInstance("p2", why_not="draining")]


def decision(name: str = "r") -> Decision:
    return Decision(name, "p1", "d1", "least to compute", 0, "", PREDICTION, policy="overlap")


def prompt_of(keys: tuple[int, ...], now: float) -> PromptBlocks:
    return PromptBlocks(array("Q", keys), array("Q"), bytes(len(keys)), "", "p1", now)


def note(explainer: Explainer, name: str = "r", keys: tuple[int, ...] = (1, 2), now: float = 10.0) -> None:
    place = Place(name, 16 * len(keys), list(keys))
    verdict = AdmissionResult(True, prefill_load=0.2)
    explainer.placed(place, decision(name), WEIGHED, prompt_of(keys, now), "goodput", verdict, now)


def explained(explainer: Explainer, name: str = "r", now: float = 20.0) -> Explanation:
    found = explainer.explain(name, PrefixIndex(), lambda instance: "", now)
    assert found is not None
    return found


def test_candidates_prediction_and_measurements() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    note(explainer)
    found = explained(explainer)
    assert (found.state, found.prefill, found.decode, found.policy) == ("prefill", "p1", "d1", "overlap")
    assert found.candidates == CANDIDATES and found.prediction == PREDICTED
    assert found.admission == AdmissionOutcome("goodput", True, "admitted", prefill_load=0.2)
    assert found.seconds_ago == 10.0
    explainer.prefilled(Prefilled("r", 0.2, 0.3, 16, 16, 0.0, 0), 11.0)
    found = explained(explainer)
    assert found.state == "decode"
    assert [(one.verdict, one.num) for one in found.blocks] == [("hit", 1), ("never_stored", 1)]
    explainer.finished(Finished("r", 7, 0.6, 0.03, True), 12.0)
    found = explained(explainer)
    assert found.state == "finished"
    assert (found.actual.queue_s, found.actual.ttft_s, found.actual.tbt_s) == (0.2, 0.6, 0.03)
    assert found.actual.e2e_s == 2.0
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


def test_the_stages_of_a_group_are_shown_and_count_as_memory() -> None:
    explainer = Explainer(10, 4 * 3_050, 16)
    stages = [StageStats(0, 15, 4, 0.0, 2.0, 1.9, 0.1), StageStats(15, 30, 4, 0.6, 2.6, 1.8, 0.75)]
    for name in ("r", "other", "third"):
        note(explainer, name)
    explainer.prefilled(Prefilled("third", 0.2, 2.6, 32, stages=stages), 13.0)
    assert explained(explainer, "third").actual.stages == stages
    assert explained(explainer, "other").actual.stages == []
    explainer.check()
    explainer.prefilled(Prefilled("other", 0.2, 2.6, 32, stages=stages * 10), 14.0)
    explainer.check()
    assert explainer.explain("r", PrefixIndex(), lambda instance: "", 20.0) is None, "its memory is needed"
    assert explained(explainer, "third").actual.stages == stages


def test_a_refusal_is_remembered_with_its_reason() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    refuse = Refuse("r", Refusal("slo_ttft", "too late"), 3.0, PREDICTION)
    verdict = AdmissionResult(False, "slo_ttft", "too late", 3.0)
    explainer.placed(Place("r", 32, [1, 2]), refuse, WEIGHED, prompt_of((1, 2), 10.0), "early", verdict, 10.0)
    found = explained(explainer)
    assert (found.state, found.reason) == ("refused", "slo_ttft: too late")
    assert found.admission is not None and found.admission.retry_after_s == 3.0
    assert found.prediction == PREDICTED and not found.blocks


def test_a_retry_keeps_the_verdict_of_the_first_try() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    note(explainer)
    explainer.placed(
        Place("r", 32, [1, 2]), decision(), WEIGHED, prompt_of((1, 2), 11.0), "goodput", None, 11.0
    )
    found = explained(explainer)
    assert found.num_placements == 2
    assert found.admission is not None and found.admission.rule == "goodput"
    explainer.check()


def test_two_simultaneous_requests_for_one_prompt() -> None:
    explainer = Explainer(10, 1 << 20, 16)
    note(explainer, "first", (1, 2), now=10.0)
    note(explainer, "second", (1, 2, 3), now=10.1)
    assert [(one.verdict, one.where) for one in explained(explainer, "second").blocks] == [
        ("being_written", "p1"),
        ("never_stored", ""),
    ]
    assert explained(explainer, "first").blocks[0].verdict == "never_stored", "it came before"
    explainer.prefilled(Prefilled("first"), 10.5)
    assert explained(explainer, "second").blocks[0].verdict == "being_written", "the first was in progress"
    note(explainer, "third", (1, 2), now=11.0)
    explainer.prefilled(Prefilled("second"), 10.9)
    assert explained(explainer, "third").blocks[0].verdict == "never_stored"


@pytest.mark.parametrize(("max_requests", "max_bytes"), [(3, 1 << 20), (100, 3 * 3_050)])
def test_only_the_latest_are_kept(max_requests: int, max_bytes: int) -> None:
    explainer = Explainer(max_requests, max_bytes, 16)
    for number in range(10):
        note(explainer, str(number))
    explainer.check()
    assert len(explainer) == 3
    assert explainer.explain("0", PrefixIndex(), lambda instance: "", 20.0) is None
    assert explained(explainer, "9").request_id == "9"


def test_off_it_remembers_nothing() -> None:
    explainer = Explainer(0, 1 << 20, 16)
    note(explainer)
    explainer.prefilled(Prefilled("r"), 11.0)
    explainer.finished(Finished("r"), 12.0)
    assert len(explainer) == 0 and not explainer.is_on


# --- why blocks missed


KEYS = array("Q", [11, 12, 13, 14])


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(1000)


def prompt_with(**fields: Any) -> PromptBlocks:
    """A prompt of four blocks, placed at 100 s on p1, which was believed to hold none of them."""
    given: dict[str, Any] = {
        "bare_keys": array("Q"),
        "tiers": bytes(4),
        "scope": "",
        "instance": "p1",
        "at": 100.0,
    }
    return PromptBlocks(**{"keys": KEYS, **given, **fields})


def verdicts_on(
    index: PrefixIndex, one: PromptBlocks, *in_flight: PromptBlocks, identity: str = "mine"
) -> list[BlockVerdict]:
    return block_verdicts(one, in_flight, index, identity)


def test_blocks_without_events_were_never_stored(index: PrefixIndex) -> None:
    assert verdicts_on(index, prompt_with()) == [BlockVerdict(0, 4, "never_stored")]


def test_hits_follow_the_index_until_the_worker_reports_them(index: PrefixIndex) -> None:
    one = prompt_with(tiers=bytes([1, 1, 2, 0]))
    assert verdicts_on(index, one) == [
        BlockVerdict(0, 2, "hit", "p1 device"),
        BlockVerdict(2, 1, "hit", "p1 memory"),
        BlockVerdict(3, 1, "never_stored"),
    ]
    one.is_measured, one.num_cached, one.num_loaded = True, 1, 2
    assert verdicts_on(index, one) == [
        BlockVerdict(0, 1, "hit", "p1 device"),
        BlockVerdict(1, 2, "hit", "pool"),
        BlockVerdict(3, 1, "never_stored"),
    ]


def test_another_instance_may_hold_it(index: PrefixIndex) -> None:
    one = prompt_with(others={"p2": 1}, pools={"kv/mine": 2})
    assert verdicts_on(index, one) == [
        BlockVerdict(0, 1, "elsewhere", "p2, pool"),
        BlockVerdict(1, 1, "elsewhere", "pool"),
        BlockVerdict(2, 2, "never_stored"),
    ]


def test_a_block_that_is_just_being_computed(index: PrefixIndex) -> None:
    other = prompt_with(keys=array("Q", [11, 12, 99]), instance="p2", at=99.0)
    assert verdicts_on(index, prompt_with(), other)[0] == BlockVerdict(0, 2, "being_written", "p2")
    salted = prompt_with(keys=array("Q", [11]), scope="another")
    assert verdicts_on(index, prompt_with(), salted) == [BlockVerdict(0, 4, "never_stored")]


def test_evicted_when_and_by_which_rule(index: PrefixIndex) -> None:
    index.store("p1", [11, 12])
    index.remove("p1", [11, 12], reason="evicted: least recently used", now=93.0)
    assert verdicts_on(index, prompt_with()) == [
        BlockVerdict(0, 2, "evicted", "p1 device", "least recently used", 7.0),
        BlockVerdict(2, 2, "never_stored"),
    ]


def test_a_removal_after_the_request_is_no_cause(index: PrefixIndex) -> None:
    index.store("p1", [11])
    index.remove("p1", [11], now=101.0)
    assert verdicts_on(index, prompt_with())[0].verdict == "never_stored"


@pytest.mark.parametrize(("how", "verdict"), [("clear", "cleared"), ("forget", "lost")])
def test_a_lost_instance_s_blocks_are_lost(index: PrefixIndex, how: str, verdict: str) -> None:
    index.store("p2", KEYS)
    getattr(index, how)("p2", now=90.0)
    assert verdicts_on(index, prompt_with()) == [BlockVerdict(0, 4, verdict, "p2", "", 10.0)]


def test_the_pool_evicts_too(index: PrefixIndex) -> None:
    index.store("pool", [11], Tier.MEMORY, "kv/mine")
    index.remove("pool", [11], Tier.MEMORY, "kv/mine", "evicted: lru", 98.0)
    assert verdicts_on(index, prompt_with())[0] == BlockVerdict(0, 1, "evicted", "pool memory", "lru", 2.0)


def test_blocks_of_a_lost_segment_are_lost(index: PrefixIndex) -> None:
    index.store("pool", [11, 12], Tier.MEMORY, "kv/mine")
    index.remove("pool", [11], Tier.MEMORY, "kv/mine", "lost: a, given up", 98.0)
    index.remove("pool", [12], Tier.MEMORY, "kv/mine", "#7 is newer and on b: b", 98.0)
    assert verdicts_on(index, prompt_with())[:2] == [
        BlockVerdict(0, 1, "lost", "pool memory", "a, given up", 2.0),
        BlockVerdict(1, 1, "removed", "pool memory", "#7 is newer and on b: b", 2.0),
    ], "an unknown reason is no verdict"


def test_other_weights_or_another_layout(index: PrefixIndex) -> None:
    one = prompt_with(pools={"kv/theirs": 2})
    assert verdicts_on(index, one)[0] == BlockVerdict(0, 2, "other_digest", "theirs")
    assert verdicts_on(index, one, identity="")[0].verdict == "never_stored", "the wanted identity is unknown"


def test_the_same_tokens_under_another_salt(index: PrefixIndex) -> None:
    index.removal_log.note_prompt(key_column([1, 2]), [501, 502])
    one = prompt_with(bare_keys=array("Q", [501, 502, 503, 504]))
    assert verdicts_on(index, one) == [BlockVerdict(0, 2, "other_salt"), BlockVerdict(2, 2, "never_stored")]


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_blocks_are_as_each_block_by_itself(index: PrefixIndex, seed: int) -> None:
    random = Random(seed)
    keys, bare_keys = array("Q", range(1, 41)), array("Q", range(101, 141))
    one = prompt_with(
        keys=keys,
        bare_keys=bare_keys,
        tiers=bytes(random.choice([1, 1, 1, 2]) for _ in range(random.randrange(12))).ljust(40, b"\0"),
        others={"p2": random.randrange(20), "p3": random.randrange(20)},
        pools={"kv/mine": random.randrange(25), "kv/theirs": random.randrange(30)},
    )
    num_written = random.choice([0, 0, 15])
    other = prompt_with(keys=array("Q", [*keys[:num_written], 999]), instance="p4")
    removed: dict[int, str] = {}
    for number in range(6):
        chosen = random.sample(range(1, 41), random.choice([1, 5]))
        index.store("p1", chosen)
        reason = random.choice(["evicted: lru", "cleared", f"{number} is newer"])
        index.remove("p1", chosen, reason=reason, now=90.0 + number)
        removed.update(dict.fromkeys(chosen, reason))
    salted = random.sample(range(101, 141), 10)
    index.removal_log.note_prompt(key_column([1000 + bare for bare in salted]), salted)

    def plainly(block: int) -> tuple[str, str]:
        key = keys[block]
        holders = [name for name, num in one.others.items() if block < num]
        holders += ["pool"] * (block < one.pools["kv/mine"])
        if 0 not in one.tiers[: block + 1]:
            return "hit", "p1 device" if one.tiers[block] == 1 else "p1 memory"
        if block < num_written:
            return "being_written", "p4"
        if holders:
            return "elsewhere", ", ".join(holders)
        if key in removed:
            verdict = removed[key].partition(":")[0]
            return verdict if verdict in ("evicted", "cleared") else "removed", "p1 device"
        if block < one.pools["kv/theirs"]:
            return "other_digest", "theirs"
        return ("other_salt" if bare_keys[block] in salted else "never_stored"), ""

    rows = verdicts_on(index, one, other)
    assert [(row.verdict, row.where) for row in rows for _ in range(row.num)] == [*map(plainly, range(40))]
    assert [row.first for row in rows] == [sum(row.num for row in rows[:n]) for n in range(len(rows))]
