# SPDX-License-Identifier: Apache-2.0
"""Which items are looked up, what a scheduler may count on, and what is staged meanwhile."""

from __future__ import annotations

from random import Random

import numpy as np

from mooncake.connectors.encoder_cache import EncoderCache, ItemPlan
from mooncake.connectors.encoder_output import EncoderOutput

TIMEOUT_S = 2.0


def output(size_bytes: int = 8) -> EncoderOutput:
    return EncoderOutput("uint8", (1, size_bytes), np.zeros(size_bytes, dtype=np.uint8))


def a_cache(max_staged_bytes: int = 100) -> EncoderCache:
    return EncoderCache(TIMEOUT_S, max_staged_bytes)


def test_an_item_that_was_found_is_used_and_not_saved() -> None:
    cache, staged = a_cache(), output()
    lookups = cache.wants("r", ["image"], 0.0)
    assert list(lookups) == ["image"] and cache.is_waiting("r", 1.0) and not cache.has("image")
    assert cache.found(lookups["image"], "key", staged) == "hit"
    cache.check()
    assert not cache.is_waiting("r", 1.0) and cache.has("image") and cache.staged_bytes == 8
    assert cache.take("r", "image") == ItemPlan(staged, None)
    cache.check()
    assert cache.staged_bytes == 0 and not cache.has("image")


def test_an_item_that_was_missed_is_computed_and_saved_under_its_key() -> None:
    cache = a_cache()
    lookups = cache.wants("r", ["image"], 0.0)
    cache.missed(lookups["image"], "key", "not in the store")
    assert not cache.is_waiting("r", 1.0) and not cache.has("image")
    assert cache.take("r", "image") == ItemPlan(None, "key")
    assert cache.story("image") == ["lookup for r", "missed: not in the store", "computed by r"]


def test_an_item_without_a_key_is_not_saved() -> None:
    cache = a_cache()
    cache.missed(cache.wants("r", ["image"], 0.0)["image"], None, "unknown type")
    assert cache.take("r", "image") == ItemPlan(None, None)
    assert cache.take("r", "another") == ItemPlan(None, None), "it was never asked for"


def test_an_item_is_looked_up_once_per_request() -> None:
    cache = a_cache()
    assert set(cache.wants("r", ["a", "b"], 0.0)) == {"a", "b"}
    assert cache.wants("r", ["a", "b"], 0.1) == {}
    assert set(cache.wants("s", ["a"], 0.2)) == {"a"}, "another request, whose content may be another"


def test_an_item_in_the_engines_own_cache_is_not_looked_up() -> None:
    cache = a_cache()
    cache.missed(cache.wants("r", ["image"], 0.0)["image"], "key", "")
    cache.take("r", "image")
    assert cache.wants("s", ["image"], 1.0) == {}
    cache.evicted(["image", "unknown"])
    assert set(cache.wants("t", ["image"], 1.0)) == {"image"}


def test_a_late_lookup_is_a_miss_but_its_key_counts() -> None:
    cache = a_cache()
    number = cache.wants("r", ["image"], 5.0)["image"]
    assert cache.is_waiting("r", 5.0 + TIMEOUT_S - 0.1) and not cache.is_waiting("r", 5.0 + TIMEOUT_S)
    assert cache.found(number, "key", output()) == "late"
    assert not cache.has("image") and cache.staged_bytes == 0
    assert cache.take("r", "image") == ItemPlan(None, "key")


def test_what_does_not_fit_is_refused_and_computed() -> None:
    cache = a_cache(max_staged_bytes=10)
    lookups = cache.wants("r", ["a", "b"], 0.0)
    assert cache.found(lookups["a"], "key a", output(8)) == "hit"
    assert cache.found(lookups["b"], "key b", output(8)) == "refused"
    cache.check()
    assert cache.has("a") and not cache.has("b")
    assert cache.take("r", "b") == ItemPlan(None, "key b")
    cache.take("r", "a")
    assert cache.found(cache.wants("s", ["b"], 0.0).get("b", 0), "key b", output(8)) == "late", "it is local"


def test_an_item_that_the_engine_has_is_not_staged_for_others_any_longer() -> None:
    cache, staged = a_cache(), output()
    for request_id in "rs":
        cache.found(cache.wants(request_id, ["image"], 0.0)["image"], "key", staged)
    cache.found(cache.wants("t", ["other"], 0.0)["other"], "other key", output())
    assert cache.staged_bytes == 24
    assert cache.take("r", "image") == ItemPlan(staged, None)
    cache.check()
    assert cache.staged_bytes == 8, "that of another item"
    cache.wants("s", ["image"], 1.0)
    assert not cache.has("image") and cache.take("s", "image") == ItemPlan(None, "key")


def test_lookups_are_bounded_and_the_items_beyond_wait() -> None:
    cache = EncoderCache(TIMEOUT_S, 100, max_lookups=2)
    first = cache.wants("r", ["a", "b", "c"], 0.0)
    assert set(first) == {"a", "b"} and cache.wants("s", ["d"], 0.0) == {}
    assert cache.is_waiting("r", 0.1) and cache.is_waiting("s", 0.1)
    cache.missed(first["a"], "key", "")
    cache.check()
    assert set(cache.wants("r", ["a", "b", "c"], 0.2)) == {"c"} and cache.wants("s", ["d"], 0.2) == {}
    assert cache.is_waiting("s", 0.2)
    assert not cache.is_waiting("r", 0.2 + TIMEOUT_S), "late lookups no longer count"
    assert set(cache.wants("s", ["d"], 0.2 + TIMEOUT_S)) == {"d"}
    cache.finished("s")
    cache.check()
    assert not cache.is_waiting("s", 5.0)


def test_a_request_that_ends_leaves_nothing() -> None:
    cache = a_cache()
    lookups = cache.wants("r", ["a", "b"], 0.0)
    cache.found(lookups["a"], "key", output())
    cache.finished("r")
    cache.check()
    assert cache.staged_bytes == 0
    assert cache.found(lookups["b"], "key", output()) == "late" and not cache.has("b")
    cache.finished("unknown")


def test_nothing_of_an_old_encoder_is_used_or_saved() -> None:
    cache = a_cache()
    old = cache.wants("r", ["a", "b"], 0.0)
    cache.found(old["a"], "old a", output())
    cache.forget()
    cache.check()
    assert not cache.has("a")
    new = cache.wants("r", ["a", "b"], 1.0)
    assert set(new) == {"a", "b"} and not set(new.values()) & set(old.values())
    assert cache.found(old["b"], "old b", output()) == "late"
    assert not cache.has("b") and cache.take("r", "b") == ItemPlan(None, None), "no key of the old encoder"


def test_what_was_confirmed_in_a_step_is_provided_to_whichever_request_takes_it() -> None:
    """The engine has left out the computation, so that there must be an output."""
    cache, staged = a_cache(), output()
    cache.found(cache.wants("r", ["image"], 0.0)["image"], "key", staged)
    assert cache.has("image")
    assert cache.take("other", "image") == ItemPlan(staged, None)
    cache.end_step()
    assert cache.take("another", "image") == ItemPlan(None, None)


def test_an_engine_that_only_produces_needs_no_output() -> None:
    cache = a_cache()
    assert cache.found(cache.wants("r", ["image"], 0.0)["image"], "key", None) == "hit"
    assert cache.has("image") and cache.take("r", "image") == ItemPlan(None, None)


def test_any_order_of_calls_keeps_the_invariants() -> None:
    for seed in range(200):
        random, cache = Random(seed), EncoderCache(TIMEOUT_S, 20, max_lookups=3)
        numbers, now = [0], 0.0
        requests, names = ["r", "s", "t"], ["a", "b", "c"]
        for _ in range(60):
            now += random.random()
            request, name, number = random.choice(requests), random.choice(names), random.choice(numbers)
            step = random.randrange(9)
            if step == 0:
                numbers += cache.wants(request, random.sample(names, 2), now).values()
            elif step == 1:
                cache.found(number, f"key {name}", output(random.randrange(15)))
            elif step == 2:
                cache.missed(number, random.choice([None, "key"]), "")
            elif step == 3 and cache.has(name):
                plan = cache.take(random.choice(requests), name)
                assert plan.output is not None, f"seed {seed}: confirmed and not there"
                cache.end_step()
            elif step == 4:
                cache.take(request, name)
            elif step == 5:
                cache.finished(request)
            elif step == 6:
                cache.evicted([name])
            elif step == 7:
                cache.is_waiting(request, now)
            elif random.random() < 0.2:
                cache.forget()
            cache.check()


def test_a_promise_that_was_used_leaves_no_key_to_another_request_of_the_name() -> None:
    cache = a_cache()
    lookups = cache.wants("second", ["image"], 0.0)
    cache.missed(lookups["image"], "key of the second", "not in the store")
    lookups = cache.wants("first", ["image"], 0.0)
    assert cache.found(lookups["image"], "key of the first", output()) == "hit"
    assert cache.has("image") and cache.take("first", "image").output is not None
    cache.evicted(["image"])
    assert cache.take("second", "image") == ItemPlan(None, "key of the second")
