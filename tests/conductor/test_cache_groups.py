# SPDX-License-Identifier: Apache-2.0
"""The blocks of a hybrid model's groups: what the index claims is what vLLM's rule says it can use."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from mooncake.conductor.cache_groups import (
    BLOCK_SIZE,
    MOST_GROUPS,
    NO_FULL_ATTENTION,
    TOO_MANY,
    UNKNOWN_KIND,
)
from mooncake.conductor.event_subscriptions import EventReader
from mooncake.conductor.key_translation import EngineKeys, KeyScope, SequenceKeys, sequence_hashes
from mooncake.conductor.messages import BlocksCleared, BlocksRemoved, BlocksStored, PrefixWindows, Silent
from mooncake.conductor.prefix_index import PrefixIndex
from mooncake.metrics import registry
from mooncake.prefix import block_hashes, root_hash, short_key

FULL = {"kv_cache_spec_kind": "full_attention"}
MAMBA = {"kv_cache_spec_kind": "mamba"}
SIZE = 8
"""Tokens of an engine's block."""
RECORDING = Path(__file__).parent.parent / "data" / "vllm_hybrid_events.msgpack.gz"


def sliding(window: int) -> dict[str, Any]:
    return {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": window}


class Publisher:
    """An engine's publisher, and the index of the instance that it publishes for."""

    def __init__(self, kinds: list[dict[str, Any]], ours: int = SIZE, translation: Any = None) -> None:
        self.kinds = kinds
        self.ours = ours
        self.reader = EventReader("w", translation or EngineKeys(ours))
        self.index = PrefixIndex()
        self.is_silent = False
        self.sequence = 0
        self.stale = 0

    def publish(self, *events: Any, ts: float = 1.0) -> None:
        payload = msgspec.msgpack.encode([ts, list(events), 0])
        self.take(self.reader.read(self.sequence, payload))
        self.sequence += 1

    def take(self, facts: list[Any]) -> None:
        for fact in facts:
            match fact:
                case BlocksStored():
                    self.index.store(fact.instance, fact.keys, fact.tier, fact.scope)
                case BlocksRemoved():
                    self.index.remove(fact.instance, fact.keys, fact.tier, fact.scope, fact.reason)
                case BlocksCleared():
                    self.index.clear(fact.instance, fact.reason)
                    self.is_silent = False
                case PrefixWindows():
                    self.index.set_windows(fact.instance, fact.windows)
                case Silent():
                    self.is_silent = True
        self.index.check()

    def stored(
        self, group: int | None, tokens: list[int], first: int, end: int, only: Any = None, **more: Any
    ) -> dict[str, Any]:
        """As vLLM encodes it; ``only``: the blocks that are named, while the tokens are of all."""
        names = hashes(tokens)
        fields = {} if group is None else {"group_idx": group, **self.kinds[group]}
        return {
            "type": "BlockStored",
            "block_hashes": [names[at] for at in (range(first, end) if only is None else only)],
            "parent_block_hash": names[first - 1] if first else None,
            "token_ids": tokens[first * SIZE : end * SIZE],
            "block_size": SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            **fields,
            "session_id": "s",
            **more,
        }

    def has(self, tokens: list[int]) -> int:
        """Leading tokens of a prompt that the instance is believed to be able to use."""
        keys = [short_key(one) for one in block_hashes(tokens, self.ours, root_hash("", ""))]
        return self.index.matches(keys).get("w", 0) * self.ours


def hashes(tokens: list[int]) -> list[int]:
    return [hash(tuple(tokens[:end])) & (1 << 64) - 1 for end in range(SIZE, len(tokens) + 1, SIZE)]


def removed(group: int | None, names: list[int], **more: Any) -> dict[str, Any]:
    of_group = {} if group is None else {"group_idx": group}
    return {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", **of_group, **more}


PROMPT = list(range(100, 100 + 10 * SIZE))
CLEARED = {"type": "AllBlocksCleared"}


# --- the rule


def test_a_window_needs_only_the_end_of_the_prefix() -> None:
    one = Publisher([FULL, sliding(2 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10, only=[4, 5, 8, 9]))
    assert one.has(PROMPT) == 10 * SIZE
    assert one.has(PROMPT[: 9 * SIZE]) == 6 * SIZE, "the ninth block alone is no whole window"
    assert one.has(PROMPT[: 6 * SIZE]) == 6 * SIZE
    assert one.has(PROMPT[: 5 * SIZE]) == 0
    one.publish(removed(1, hashes(PROMPT)[9:]))
    assert one.has(PROMPT) == 6 * SIZE
    one.publish(removed(0, hashes(PROMPT)[5:6]))
    assert one.has(PROMPT) == 0
    assert one.index.num_blocks_of("w") == one.index.num_blocks == 9, "windows are no blocks of their own"


def test_a_prefix_shorter_than_the_window_needs_all_of_it() -> None:
    one = Publisher([FULL, sliding(100 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 3))
    assert one.has(PROMPT) == 3 * SIZE
    one.publish(removed(1, hashes(PROMPT)[:1]))
    assert one.has(PROMPT) == 0


def test_the_window_does_not_count_the_current_token() -> None:
    one = Publisher([FULL, sliding(SIZE + 1)])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10, only=[7]))
    assert one.has(PROMPT) == 8 * SIZE
    two = Publisher([FULL, sliding(SIZE + 2)])
    two.publish(two.stored(0, PROMPT, 0, 10), two.stored(1, PROMPT, 0, 10, only=[7]))
    assert two.has(PROMPT) == 0


def test_mamba_needs_the_state_at_the_end_of_the_prefix() -> None:
    one = Publisher([MAMBA, FULL])
    one.publish(one.stored(0, PROMPT, 0, 10, only=[3, 9]), one.stored(1, PROMPT, 0, 10))
    assert one.has(PROMPT) == 10 * SIZE
    one.publish(removed(0, hashes(PROMPT)[9:]))
    assert one.has(PROMPT) == 4 * SIZE


def test_all_full_attention_groups_must_have_a_block() -> None:
    one = Publisher([FULL, {"kv_cache_spec_kind": "mla_attention"}])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 6))
    assert one.has(PROMPT) == 6 * SIZE
    one.publish(removed(1, hashes(PROMPT)[2:3]))
    assert one.has(PROMPT) == 2 * SIZE
    one.publish(one.stored(1, PROMPT, 2, 3))
    assert one.has(PROMPT) == 6 * SIZE, "stored again"


@pytest.mark.parametrize("seed", range(12))
def test_the_index_claims_what_the_rule_allows(seed: int) -> None:
    """Random groups, stores and removals, against sets of blocks and vLLM's rule spelled out."""
    random = Random(seed)
    windows = [sliding(random.randint(1, 5 * SIZE)) for _ in range(random.randint(0, 3))]
    kinds = [FULL, *random.choices([FULL, MAMBA], k=random.randint(0, 2)), *windows]
    if len(kinds) == 1:
        kinds.append(sliding(2 * SIZE))
    random.shuffle(kinds)
    full = [at for at, kind in enumerate(kinds) if kind is FULL]
    one = Publisher(kinds, ours=random.choice([SIZE, SIZE // 2]))
    prompts = _tree(random)
    held: list[Counter[int]] = [Counter() for _ in kinds]
    one.publish(*(one.stored(group, prompts[0], 0, 0) for group in range(len(kinds))))
    for step in range(300):
        events: list[dict[str, Any]] = []
        tokens = random.choice(prompts)
        names = hashes(tokens)
        if random.random() < 0.3:  # space is made for what is computed, perhaps by the same blocks
            events += [_evicted(random, group, names, held) for group in range(len(kinds))]
        match random.random():
            case chance if chance < 0.5:  # the engine computes what it can't use, though it may have it
                end = random.randint(0, len(names))
                first = _usable(names[:end], kinds, held)
                for group, blocks in enumerate(held):
                    only = [at for at in range(first, end) if group in full or random.random() < 0.7]
                    blocks.update(names[at] for at in only)
                    events.append(one.stored(group, tokens, first, end, only))
                if first and random.random() < 0.3:
                    events += [one.stored(group, tokens, 0, first) for group in range(len(kinds))]
            case chance if chance < 0.97:
                events.append(_evicted(random, random.randrange(len(kinds)), names, held))
            case _:
                for blocks in held:
                    blocks.clear()
                events.append(CLEARED)
        one.publish(*events)
        for tokens in prompts:
            expected = _usable(hashes(tokens), kinds, held) * SIZE
            assert one.has(tokens) == expected, (seed, step, kinds)


def _evicted(random: Random, group: int, names: list[int], held: list[Counter[int]]) -> dict[str, Any]:
    some = random.sample(names, random.randint(1, min(8, len(names))))
    gone = [name for name in some if held[group][name]]
    held[group].subtract(gone)
    return removed(group, gone)


def _tree(random: Random) -> list[list[int]]:
    prompts = [[random.randrange(50) for _ in range(12 * SIZE)]]
    for number in range(4):
        base = random.choice(prompts)
        shared = random.randint(0, 8) * SIZE
        prompts.append([*base[:shared], *[100 + number] * (random.randint(1, 6) * SIZE)])
    return prompts


def _usable(names: list[int], kinds: list[dict[str, Any]], held: list[Counter[int]]) -> int:
    """Blocks of the longest usable prefix."""
    for end in range(len(names), 0, -1):
        for kind, blocks in zip(kinds, held, strict=True):
            window = kind.get("kv_cache_spec_sliding_window", 0)
            need = end if kind is FULL else 1 if kind is MAMBA else max(1, -(-(window - 1) // SIZE))
            if not all(blocks[name] for name in names[max(0, end - need) : end]):
                break
        else:
            return end
    return 0


# --- around it


def test_a_model_with_one_group_is_as_before() -> None:
    one, plain = Publisher([FULL]), Publisher([FULL])
    one.publish(one.stored(0, PROMPT, 0, 10), removed(0, hashes(PROMPT)[7:8]))
    plain.publish(plain.stored(None, PROMPT, 0, 10), removed(None, hashes(PROMPT)[7:8]))
    assert one.has(PROMPT) == plain.has(PROMPT) == 7 * SIZE


def test_blocks_without_a_group_count_for_all_groups() -> None:
    one = Publisher([FULL, sliding(2 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 2), one.stored(1, PROMPT, 0, 2))
    one.publish(one.stored(None, PROMPT, 2, 6))
    assert one.has(PROMPT) == 6 * SIZE
    one.publish(removed(None, hashes(PROMPT)[1:2]))
    assert one.has(PROMPT) == SIZE
    one.publish(removed(0, hashes(PROMPT)[:1]))
    assert one.has(PROMPT) == 0


def test_a_block_stored_twice_is_there_until_it_was_removed_twice() -> None:
    """The engine computes a prefix again when its window is gone."""
    one = Publisher([FULL, sliding(2 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10, only=[8, 9]))
    one.publish(removed(1, hashes(PROMPT)[8:]))
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10, only=[8, 9]))
    one.publish(removed(0, hashes(PROMPT)))
    assert one.has(PROMPT) == 10 * SIZE
    one.publish(removed(0, hashes(PROMPT)))
    assert one.has(PROMPT) == 0


def test_a_report_of_reused_blocks_adds_nothing() -> None:
    """Any client of vLLM can request one; blocks before the window are named though they are gone."""
    one = Publisher([FULL, sliding(2 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10, only=[8, 9]))
    for _ in range(3):
        one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10))
    assert (one.has(PROMPT), one.has(PROMPT[: 8 * SIZE])) == (10 * SIZE, 0)
    one.publish(removed(0, hashes(PROMPT)[9:]))
    assert one.has(PROMPT) == 0


@pytest.mark.parametrize("kinds", [[FULL, sliding(2 * SIZE)], [sliding(2 * SIZE), FULL]])
@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_block_that_is_removed_and_stored_in_one_batch_is_there(kinds: Any, medium: str) -> None:
    """Computing a prompt evicts its own blocks, which the same batch of events then stores again."""
    one = Publisher(kinds)
    one.publish(*(one.stored(group, [7] * SIZE, 0, 1) for group in (0, 1)))  # has the size of blocks
    stored = [one.stored(group, PROMPT, 0, 4, medium=medium) for group in (0, 1)]
    gone = [removed(group, hashes(PROMPT)[:4], medium=medium) for group in (0, 1)]
    one.publish(*stored)
    one.publish(*gone, *stored)
    assert one.has(PROMPT) == 4 * SIZE
    one.publish(*stored, *gone)
    assert one.has(PROMPT) == 0, "a report of reused blocks, and then they were removed"
    one.publish(*stored, *gone, *stored)
    assert one.has(PROMPT) == 4 * SIZE
    one.publish(*gone)
    assert (one.has(PROMPT), len(one.reader._groups._blocks)) == (0, 1)


def test_a_window_may_be_stored_before_the_tokens_are_known() -> None:
    one = Publisher([sliding(2 * SIZE), FULL])
    one.publish(one.stored(0, PROMPT, 0, 10, only=[8, 9]), one.stored(1, PROMPT, 0, 10))
    assert one.has(PROMPT) == 10 * SIZE
    one.publish(removed(0, hashes(PROMPT)[8:]))
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10))  # computed again
    one.publish(removed(1, hashes(PROMPT)))
    assert one.has(PROMPT) == 10 * SIZE, "it has them twice"


def test_tiers_are_counted_by_themselves() -> None:
    one = Publisher([FULL, sliding(2 * SIZE)])
    for medium in ("GPU", "CPU"):
        one.publish(*(one.stored(group, PROMPT, 0, 4, medium=medium) for group in (0, 1)))
    one.publish(*(removed(group, hashes(PROMPT)) for group in (0, 1)))
    assert one.has(PROMPT) == 4 * SIZE
    one.publish(removed(1, hashes(PROMPT)[3:4], medium="CPU"))
    assert one.has(PROMPT) == 3 * SIZE


@pytest.mark.parametrize("kinds", [[FULL], [FULL, sliding(2 * SIZE)]], ids=["plain", "hybrid"])
def test_blocks_elsewhere_are_not_the_instance_s(kinds: list[dict[str, Any]]) -> None:
    one = Publisher(kinds)
    one.publish(*(one.stored(group, PROMPT, 0, 4) for group in range(len(kinds))))
    elsewhere = {"medium": "STORAGE", "locality": "REMOTE"}
    one.publish(*(one.stored(group, PROMPT, 4, 8, **elsewhere) for group in range(len(kinds))))
    assert one.has(PROMPT) == 4 * SIZE
    one.publish(removed(0, hashes(PROMPT)[:1], locality="REMOTE"))
    assert one.has(PROMPT) == 4 * SIZE


def test_older_events_are_arrays() -> None:
    one = Publisher([FULL, sliding(2 * SIZE)])
    names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    names += ["extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"]
    events = [one.stored(group, PROMPT, 0, 10, extra_keys=None) for group in (0, 1)]
    arrays = [["BlockStored", *(event.get(name) for name in names)] for event in events]
    one.publish(*arrays, ["BlockRemoved", hashes(PROMPT)[:9], "GPU", 1])
    assert one.has(PROMPT) == 0
    one.publish(["BlockStored", *(one.stored(1, PROMPT, 8, 9).get(name) for name in names)])
    assert one.has(PROMPT) == 10 * SIZE


def test_a_clear_keeps_the_groups_and_a_restart_forgets_them() -> None:
    one = Publisher([FULL, sliding(2 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10))
    one.publish(CLEARED, one.stored(0, PROMPT, 0, 10))
    assert one.has(PROMPT) == 0
    one.take(one.reader.restart())
    one.sequence = 0
    one.kinds = [FULL]
    one.publish(one.stored(0, PROMPT, 0, 10))
    assert one.has(PROMPT) == 10 * SIZE, "the engine was started with another model"


def test_a_group_that_appears_late_makes_what_was_known_unusable() -> None:
    one = Publisher([FULL, sliding(2 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 10))
    assert one.has(PROMPT) == 10 * SIZE
    one.publish(one.stored(1, PROMPT, 0, 10, only=[]))
    assert one.has(PROMPT) == 0
    one.publish(one.stored(0, PROMPT, 0, 4), one.stored(1, PROMPT, 2, 4))
    assert one.has(PROMPT) == 4 * SIZE


def test_an_index_of_the_standard_s_names() -> None:
    scope = KeyScope("default", "m", "", SIZE, "")
    one = Publisher([FULL, sliding(2 * SIZE)], translation=SequenceKeys(scope, 5))
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10, only=[4, 5]))
    names = sequence_hashes(PROMPT, SIZE, 5)
    assert one.index.matches(names, scope.name) == {"w": 6}
    one.publish(removed(0, hashes(PROMPT)), removed(1, hashes(PROMPT)))
    assert one.index.matches(names, scope.name) == {}
    assert one.index.num_blocks == 0


# --- what can't be judged


def unjudged(reason: str) -> float:
    labels = {"reason": reason}
    return registry.get_sample_value("mooncake_conductor_kv_event_groups_unjudged_total", labels) or 0.0


@pytest.mark.parametrize(
    ("kinds", "ours", "reason"),
    [
        ([FULL, {"kv_cache_spec_kind": "chunked_local_attention"}], SIZE, UNKNOWN_KIND),
        ([FULL, {"kv_cache_spec_kind": "sliding_window"}], SIZE, UNKNOWN_KIND),
        ([FULL, {}], SIZE, UNKNOWN_KIND),
        ([sliding(2 * SIZE)], SIZE, NO_FULL_ATTENTION),
        ([MAMBA, MAMBA], SIZE, NO_FULL_ATTENTION),
        ([FULL, sliding(2 * SIZE)], 3 * SIZE, BLOCK_SIZE),
        ([FULL] * (MOST_GROUPS + 1), SIZE, TOO_MANY),
    ],
)
def test_what_cannot_be_judged_counts_as_unknown(
    kinds: Any, ours: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = unjudged(reason)
    one = Publisher(kinds, ours)
    for _ in range(3):
        one.publish(*(one.stored(group, PROMPT, 0, 10) for group in range(len(kinds))))
        assert one.has(PROMPT) == 0
        assert one.is_silent, "its blocks are inferred from prompts"
        one.publish(CLEARED)
        assert one.is_silent
    assert [(line.message, line.fields["reason"]) for line in caplog.records] == [  # type: ignore[attr-defined]
        ("kv_event_groups_unjudged", reason)
    ]
    assert unjudged(reason) == before + 1


def test_groups_with_blocks_of_different_sizes_cannot_be_judged() -> None:
    one = Publisher([FULL, sliding(2 * SIZE)])
    one.publish(one.stored(0, PROMPT, 0, 10), one.stored(1, PROMPT, 0, 10))
    assert one.has(PROMPT) == 10 * SIZE
    one.publish(one.stored(1, PROMPT, 0, 10, block_size=2 * SIZE))
    assert (one.has(PROMPT), one.is_silent) == (0, True)


def test_a_publisher_that_names_a_million_groups_is_refused() -> None:
    one = Publisher([FULL])
    event = one.stored(0, PROMPT, 0, 1)
    one.publish(*({**event, "group_idx": number} for number in range(1_000_000)))
    assert (one.has(PROMPT), one.is_silent) == (0, True)
    assert len(one.reader._groups._groups) == MOST_GROUPS + 1


# --- vLLM's own events


def compare(recording: Path, ours: int) -> int:
    """Assert for each prompt that the index claimed what vLLM had; returns the number of hits."""
    one = Publisher([], ours)
    content = gzip.decompress(recording.read_bytes())
    steps = msgspec.msgpack.decode(content, type=list[tuple[list[int], int, list[bytes]]])
    for prompt, cached, batches in steps:
        assert one.has(prompt[:-1]) == cached, "the last token is always computed"
        for payload in batches:
            one.take(one.reader.read(one.sequence, payload))
            one.sequence += 1
    return sum(cached > 0 for _, cached, _ in steps)


@pytest.mark.parametrize("ours", [128, 32])
def test_real_vllm_had_what_the_index_claimed(ours: int) -> None:
    """A recording of ``tests/vllm/hybrid_events.py``, which says how it was made."""
    assert compare(RECORDING, ours) > 5
