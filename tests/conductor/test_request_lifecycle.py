# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a request: its admission, and the reasons of its placement."""

from __future__ import annotations

from typing import Any

import numpy as np

from mooncake.conductor.admission import AdmissionResult, PoolCapacity
from mooncake.conductor.keyed_prompt import NO_KEYS
from mooncake.conductor.messages import Decision, Finished, Place, Placed, Prediction, Prefilled
from mooncake.conductor.policies import PRIORITY_S, CandidateColumns, InstanceChoice
from mooncake.conductor.prediction import DecodeModel
from mooncake.conductor.prefix_index import PrefixIndex
from mooncake.conductor.request_lifecycle import (
    DueTimes,
    RequestLifecycle,
    bounded,
    candidates_of,
    prompt_blocks_of,
    refusal_of,
)
from mooncake.conductor.settings import SchedulingSettings
from mooncake.kvlayout import KEY_PREFIX
from mooncake.types import Tier

POOLS = PoolCapacity(1, 1, DecodeModel(0.02, 0.002, 1e-6))
SLOW = Prediction(queue_s=20.0, prefill_s=1.0, ttft_s=21.0, tbt_s=0.03, output_tokens=10)
MEASURED, GUESSED = (True, True), (False, False)


def lifecycle_with(**fields: Any) -> RequestLifecycle:
    return RequestLifecycle(SchedulingSettings(**{"admission": "early", "slo_ttft_s": 10.0, **fields}))


def decide(
    one: RequestLifecycle, is_measured: tuple[bool, bool] = MEASURED, **fields: Any
) -> AdmissionResult | None:
    place = Place(**{"request_id": "r", "num_tokens": 100, **fields})
    return one.decide(place, SLOW, 1.0, NO_KEYS, POOLS, is_measured, 0.0)


def test_no_request_is_rejected_because_of_a_guess() -> None:
    assert decide(lifecycle_with(), GUESSED) == AdmissionResult(True, prefill_load=0.0)
    verdict = decide(lifecycle_with(), MEASURED)
    assert verdict is not None and verdict.code == "slo_ttft"


def test_a_request_s_own_objective_overrides_the_setting() -> None:
    verdict = decide(lifecycle_with(), slo_ttft_s=60.0)
    assert verdict is not None and verdict.is_admitted


def test_an_admitted_request_only_needs_another_instance() -> None:
    one = lifecycle_with()
    verdict = decide(one, slo_ttft_s=60.0)
    assert verdict is not None and verdict.is_admitted
    assert decide(one) is None, "its worker failed; the objective no longer counts"
    assert decide(lifecycle_with(), needs_prefill=False) is None, "its prompt is computed"
    one.finished(Finished("r", 10, 1.0, 0.01, True), 5.0)
    assert decide(one) is not None, "a new request of that name is decided anew"
    one.check()


def test_admission_is_checked_again_when_the_prompt_is_computed() -> None:
    one = lifecycle_with(slo_ttft_s=0.0, slo_tbt_s=0.021)
    verdict = one.decide(Place("r", 100), SLOW, 1.0, NO_KEYS, POOLS, (True, False), 0.0)
    assert verdict is not None and verdict.is_admitted, "steps were a guess at that time"
    # Its objectives at admission count: none for decode, so it goes on.
    assert one.prefilled(Prefilled("r"), lambda: POOLS, 1.0) is None
    strict = lifecycle_with(admission="baseline", slo_ttft_s=0.0, slo_tbt_s=0.021)
    assert strict.decide(Place("r", 100), SLOW, 1.0, NO_KEYS, POOLS, MEASURED, 0.0) is not None
    refusal = strict.prefilled(Prefilled("r"), lambda: POOLS, 1.0)
    assert refusal is not None and refusal.refusal.code == "slo_tbt" and refusal.retry_after_s > 0
    assert strict.status().rejected == {"slo_tbt": 1}
    assert strict.prefilled(Prefilled("r"), lambda: POOLS, 2.0) is None, "it is no longer known"
    assert one.prefilled(Prefilled("another"), lambda: POOLS, 2.0) is None


def test_without_admission_all_requests_are_admitted() -> None:
    assert lifecycle_with(admission="none").is_admitting_all and not lifecycle_with().is_admitting_all


def test_a_refusal_carries_the_fields_of_the_result() -> None:
    refuse = refusal_of("r", AdmissionResult(False, "overload", "too expensive", 3.0), SLOW)
    assert (refuse.request_id, refuse.refusal.code, refuse.retry_after_s) == ("r", "overload", 3.0)
    assert refuse.refusal.reason == "too expensive"


def test_prompt_blocks_record_the_holders_at_that_time() -> None:
    index = PrefixIndex()
    keys = [11, 12, 13]
    index.store("computes", keys[:1], Tier.DEVICE)
    index.store("another", keys[:2], Tier.MEMORY)
    index.store("third", keys[:1], Tier.SSD)
    index.store("pool", keys, Tier.MEMORY, KEY_PREFIX)
    place = Place("r", 48, keys, bare_keys=[1, 2, 3, 4])
    prompt = prompt_blocks_of(place, index.match(keys), index, "computes", 7.0)
    assert list(prompt.tiers) == [1, 0, 0]
    assert prompt.others == {"another": 2}, "the one that had most, not the one that computes"
    assert len(prompt.pools) <= 1 and all(held == 3 for held in prompt.pools.values())
    empty = prompt_blocks_of(Place("r", 5), index.match([]), index, "computes", 7.0)
    assert not empty.tiers and not empty.others and not empty.pools
    nowhere = prompt_blocks_of(place, index.match(keys), index, "", 7.0)
    assert list(nowhere.tiers) == [0, 0, 0] and nowhere.others == {"another": 2}


def test_candidates_are_listed_best_first_with_a_few_of_the_others() -> None:
    names = ["a", "b", "c"]
    others = [(f"x{number}", "draining") for number in range(20)]
    none = candidates_of(names, None, others)
    assert none.names == [] and len(none.not_weighed) == 8
    alone = candidates_of(names, InstanceChoice(1, "its turn", 0.1, 0.2), others[:1])
    assert alone.names == ["b"] and alone.not_weighed == others[:1]
    columns = (np.array([0.1, 0.2]),) * 5
    choice = InstanceChoice(2, "soonest", considered=CandidateColumns(np.array([2, 0]), *columns))
    assert candidates_of(names, choice, []).names == ["c", "a"]


def test_all_numbers_of_a_placement_elsewhere_are_bounded() -> None:
    decision = Decision("r", None, "d1", "")
    wild = Place("r", 2**63, lifetime_s=1e300, slo_tbt_s=-1.0, priority=-(2**63), max_output_tokens=-5)
    found = bounded(Placed(wild, decision)).place
    assert (found.num_tokens, found.lifetime_s, found.slo_tbt_s) == (2**32, 86_400.0, 0.0)
    assert (found.priority, found.max_output_tokens) == (-1_000_000, 0)
    for priority in (-1000, 1000):
        waiting = Decision("r", None, "d1", "", turn=priority * PRIORITY_S + 5.0)
        usual = Placed(Place("r", 100, priority=priority, max_output_tokens=9), waiting)
        assert bounded(usual) == usual, "a turn is within its priority's"


# --- instants


def test_what_is_due_comes_in_order_and_once() -> None:
    times = DueTimes()
    for key, at in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        times.set("expiry", key, at)
    times.set("probe", "a", 1.5)
    assert times.next_at == 1.0
    assert list(times.take_due(2.0)) == [("expiry", "a"), ("probe", "a"), ("expiry", "b")]
    assert list(times.take_due(2.0)) == [] and times.keys("expiry") == ["c"]
    times.check()


def test_an_instant_replaces_the_earlier_one_of_its_key() -> None:
    times = DueTimes()
    times.set("expiry", "later", 1.0)
    times.set("expiry", "later", 3.0)
    times.set("expiry", "sooner", 3.0)
    times.set("expiry", "sooner", 1.0)
    times.set("expiry", "gone", 1.0)
    times.cancel("expiry", "gone")
    times.cancel("probe", "unknown")
    assert list(times.take_due(2.0)) == [("expiry", "sooner")]
    assert times.at("expiry", "later") == 3.0 and times.at("expiry", "gone") is None
    assert list(times.take_due(3.0)) == [("expiry", "later")]
    assert times.next_at is None
    times.check()


def test_what_is_set_while_others_are_taken_comes_as_well() -> None:
    times = DueTimes()
    times.set("probe", "a", 1.0)
    seen = []
    for _, key in times.take_due(2.0):
        seen.append(key)
        if key == "a":
            times.set("probe", "b", 2.0)
            times.set("probe", "c", 3.0)
    assert seen == ["a", "b"] and times.keys("probe") == ["c"]


def test_entries_that_no_longer_count_are_dropped() -> None:
    times = DueTimes()
    times.set("probe", "kept", 5.0)
    for number in range(5000):
        times.set("expiry", f"r{number % 7}", float(number))
        times.cancel("expiry", f"r{number % 7}")
        assert len(times) < 1100
    times.check()
    assert list(times.take_due(1e9)) == [("probe", "kept")]
