# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from tests.store.conftest import Voice

TWO = m.PutPolicy(num_replicas=2)


def two_nodes(voice: Voice) -> None:
    voice.mount("a")
    voice.mount("b", host="other")


def test_a_pattern_removes_what_it_is_found_in_and_leaves_what_is_leased(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("kv/1", "kv/2", "kv/3", "other")
    voice.find("kv/2")
    assert voice.say(m.RemoveMatching("^kv/[12]$", force=False)) == m.Removed(1, 1)
    assert voice.say(m.RemoveMatching("v/", force=True)) == m.Removed(2, 0)
    assert voice.say(m.RemoveMatching("", force=False)) == m.Removed(1, 0)


def test_a_pattern_ends_at_the_tenant(voice: Voice) -> None:
    voice.mount(size_bytes=65536)
    voice.put("k")
    voice.put("k", tenant="red")
    voice.put("k", tenant="blue")
    assert voice.say(m.RemoveMatching("", False, "red")) == m.Removed(1, 0)
    assert voice.say(m.RemoveMatching("red", False)) == m.Removed(0, 0)
    assert [voice.find("k", tenant) is not None for tenant in ("", "red", "blue")] == [True, False, True]


@pytest.mark.parametrize("pattern", ["(", "x" * 2000])
def test_an_invalid_pattern_is_refused(voice: Voice, pattern: str) -> None:
    assert isinstance(voice.say(m.RemoveMatching(pattern, False)), Failure)


def test_one_replica_is_dropped_and_the_object_with_the_last(voice: Voice) -> None:
    two_nodes(voice)
    voice.put("k", "l", policy=TWO)
    assert voice.say(m.DropReplicas(["k", "k", "none"], "a")).outcomes == [True, False, False]
    assert voice.where("k") == ["b"]
    assert voice.say(m.DropReplicas(["k", "l"], "")).outcomes == [True, True]
    assert voice.there("kl") == "" and voice.allocated_bytes == 0


def test_a_leased_replica_is_not_dropped(voice: Voice) -> None:
    two_nodes(voice)
    voice.put("k", policy=TWO)
    voice.find("k")
    assert voice.say(m.DropReplicas(["k"], "a")).outcomes[0].code == "leased"
