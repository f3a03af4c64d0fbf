# SPDX-License-Identifier: Apache-2.0
"""Each cause of a miss, and which one is named when several apply."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from mooncake.conductor.explain.miss_reasons import BlockVerdict, PromptBlocks, block_verdicts
from mooncake.conductor.index.key_table import key_column
from mooncake.conductor.index.prefix_index import PrefixIndex
from mooncake.types import Tier

KEYS = array("Q", [11, 12, 13, 14])


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(1000)


def prompt_of(**fields: Any) -> PromptBlocks:
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
    assert verdicts_on(index, prompt_of()) == [BlockVerdict(0, 4, "never_stored")]


def test_hits_follow_the_index_until_the_worker_reports_them(index: PrefixIndex) -> None:
    one = prompt_of(tiers=bytes([1, 1, 2, 0]))
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
    one = prompt_of(others={"p2": 1}, pools={"kv/mine": 2})
    assert verdicts_on(index, one) == [
        BlockVerdict(0, 1, "elsewhere", "p2, pool"),
        BlockVerdict(1, 1, "elsewhere", "pool"),
        BlockVerdict(2, 2, "never_stored"),
    ]


def test_a_block_that_is_just_being_computed(index: PrefixIndex) -> None:
    other = prompt_of(keys=array("Q", [11, 12, 99]), instance="p2", at=99.0)
    assert verdicts_on(index, prompt_of(), other)[0] == BlockVerdict(0, 2, "being_written", "p2")
    salted = prompt_of(keys=array("Q", [11]), scope="another")
    assert verdicts_on(index, prompt_of(), salted) == [BlockVerdict(0, 4, "never_stored")]


def test_evicted_when_and_by_which_rule(index: PrefixIndex) -> None:
    index.store("p1", [11, 12])
    index.remove("p1", [11, 12], reason="evicted: least recently used", now=93.0)
    assert verdicts_on(index, prompt_of()) == [
        BlockVerdict(0, 2, "evicted", "p1 device", "least recently used", 7.0),
        BlockVerdict(2, 2, "never_stored"),
    ]


def test_a_removal_after_the_request_is_no_cause(index: PrefixIndex) -> None:
    index.store("p1", [11])
    index.remove("p1", [11], now=101.0)
    assert verdicts_on(index, prompt_of())[0].verdict == "never_stored"


@pytest.mark.parametrize(("how", "verdict"), [("clear", "cleared"), ("forget", "lost")])
def test_a_lost_instance_s_blocks_are_lost(index: PrefixIndex, how: str, verdict: str) -> None:
    index.store("p2", KEYS)
    getattr(index, how)("p2", now=90.0)
    assert verdicts_on(index, prompt_of()) == [BlockVerdict(0, 4, verdict, "p2", "", 10.0)]


def test_the_pool_evicts_too(index: PrefixIndex) -> None:
    index.store("pool", [11], Tier.MEMORY, "kv/mine")
    index.remove("pool", [11], Tier.MEMORY, "kv/mine", "evicted: lru", 98.0)
    assert verdicts_on(index, prompt_of())[0] == BlockVerdict(0, 1, "evicted", "pool memory", "lru", 2.0)


def test_blocks_of_a_lost_segment_are_lost(index: PrefixIndex) -> None:
    index.store("pool", [11, 12], Tier.MEMORY, "kv/mine")
    index.remove("pool", [11], Tier.MEMORY, "kv/mine", "lost: a, given up", 98.0)
    index.remove("pool", [12], Tier.MEMORY, "kv/mine", "#7 is newer and on b: b", 98.0)
    assert verdicts_on(index, prompt_of())[:2] == [
        BlockVerdict(0, 1, "lost", "pool memory", "a, given up", 2.0),
        BlockVerdict(1, 1, "removed", "pool memory", "#7 is newer and on b: b", 2.0),
    ], "an unknown reason is no verdict"


def test_other_weights_or_another_layout(index: PrefixIndex) -> None:
    one = prompt_of(pools={"kv/theirs": 2})
    assert verdicts_on(index, one)[0] == BlockVerdict(0, 2, "other_digest", "theirs")
    assert verdicts_on(index, one, identity="")[0].verdict == "never_stored", "the wanted identity is unknown"


def test_the_same_tokens_under_another_salt(index: PrefixIndex) -> None:
    index.removal_log.note_prompt(key_column([1, 2]), [501, 502])
    one = prompt_of(bare_keys=array("Q", [501, 502, 503, 504]))
    assert verdicts_on(index, one) == [BlockVerdict(0, 2, "other_salt"), BlockVerdict(2, 2, "never_stored")]
