# SPDX-License-Identifier: Apache-2.0
"""Space for puts: found, freed by evicting no more than a budget, and never beyond a tenant's quota."""

from __future__ import annotations

import dataclasses

import pytest

from mooncake.store import messages as m
from tests.store.conftest import SETTINGS, Voice

KIB = 1024


def refusal(voice: Voice, key: str, **more: object) -> str:
    started = voice.start(key, **more)  # type: ignore[arg-type]
    assert started.reserved == [None]
    return f"{started.refusals[0].code}: {started.refusals[0].reason}"


def test_a_refusal_names_why_no_segment_takes_a_put(voice: Voice) -> None:
    assert "no segment is mounted" in refusal(voice, "k")
    voice.mount("a", 4 * KIB)
    assert refusal(voice, "k", size_bytes=5 * KIB).startswith("too_large: 5120 bytes; the largest")
    voice.lose("node a")
    assert "no segment is mounted" in refusal(voice, "k")


def test_resting_space_is_allocated_later_and_the_refusal_names_when(voice: Voice) -> None:
    voice.mount("a", 4 * KIB, rest_s=9.0)
    assert refusal(voice, "k").endswith("space is allocated again in 9 s")


def test_a_put_that_finds_no_hole_does_not_flush_the_cache(voice: Voice) -> None:
    """Pinned objects between all others: the budget is 8 times its size, or the share of an eviction."""
    voice.mount("a", 64 * KIB)
    for number in range(64):
        voice.put(f"k{number}", size_bytes=KIB, policy=m.PutPolicy(is_hard_pinned=number % 2 == 0))
    assert refusal(voice, "large", size_bytes=2 * KIB).startswith("no_space")
    num_left = len(voice.master.objects.readable)
    assert 64 - 17 <= num_left < 64


def test_replicas_are_best_effort_but_the_first(voice: Voice) -> None:
    voice.mount("a", 2 * KIB)
    voice.mount("b", 2 * KIB, host="other")
    two = m.PutPolicy(num_replicas=2, is_hard_pinned=True)
    voice.put("full", size_bytes=2 * KIB, policy=m.PutPolicy(is_hard_pinned=True), host="h")
    (place,) = voice.put("k", size_bytes=KIB, policy=two)
    assert [one.segment for one in place.replicas] == ["b"]


def test_a_tenant_over_its_quota_gives_its_own_away_first(voice: Voice) -> None:
    voice.mount("a", 64 * KIB)
    voice.say(m.SetQuota("red", 3 * KIB))
    for key in "abc":
        voice.put(key, size_bytes=KIB, tenant="red")
    voice.put("other", size_bytes=KIB)
    voice.put("d", size_bytes=KIB, tenant="red")
    assert voice.inspect("a", "red") is None and voice.inspect("other") is not None
    assert refusal(voice, "e", size_bytes=4 * KIB, tenant="red").startswith("quota_exceeded: 4096 bytes")
    assert voice.inspect("b", "red") is not None, "nothing goes for what can never fit"
    for key in "bcd":
        voice.find(key, "red")
    assert "3072 of 3072 bytes are used" in refusal(voice, "e", size_bytes=KIB, tenant="red")


def test_a_second_replica_stays_within_the_quota(voice: Voice) -> None:
    voice.mount("a", 64 * KIB)
    voice.mount("b", 64 * KIB, host="other")
    voice.say(m.SetQuota("red", 3 * KIB))
    (place,) = voice.put("k", size_bytes=2 * KIB, tenant="red", policy=m.PutPolicy(num_replicas=2))
    assert len(place.replicas) == 1


@pytest.mark.parametrize("watermark", [0.5, 0.8])
def test_eviction_ahead_of_need_follows_the_ratio(watermark: float) -> None:
    voice = Voice(dataclasses.replace(SETTINGS, high_watermark=watermark, eviction_ratio=0.2))
    voice.mount("a", 100 * KIB)
    most = 0
    for number in range(150):
        voice.put(f"k{number}", size_bytes=KIB)
        most = max(most, voice.allocated_bytes)
    assert most <= (watermark + 0.02) * 100 * KIB
    assert voice.allocated_bytes >= (watermark - 0.2) * 100 * KIB - KIB
    assert voice.inspect("k149") is not None and voice.inspect("k0") is None
