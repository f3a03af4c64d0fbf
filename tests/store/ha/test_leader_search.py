# SPDX-License-Identifier: Apache-2.0
"""Search for the leader: which address is next, and the effect of each answer."""

from __future__ import annotations

from mooncake.errors import PeerLost
from mooncake.store.ha.leader_search import LeaderSearch, Leads


class Known:
    """Known addresses of masters."""

    def __init__(self, hint: str = "") -> None:
        self.master, self.hint = "a:1,b:1", hint


def test_a_master_that_does_not_lead_names_the_leader() -> None:
    resolver = Known()
    search = LeaderSearch(resolver, "the master")
    search.begin_round(["a:1", "b:1"])
    assert search.next() == "a:1"
    assert not search.take_answer("a:1", Leads("c:1", 3, False))
    assert search.next() == "c:1", "before those that are only known by their address"
    assert search.take_answer("c:1", Leads("c:1", 3, True)) and resolver.hint == "c:1"


def test_no_address_is_queried_twice_in_a_round() -> None:
    search = LeaderSearch(Known(), "the master")
    search.begin_round(["a:1", "b:1"])
    assert search.next() == "a:1"
    search.take_answer("a:1", Leads("b:1", 3, False))
    assert search.next() == "b:1"
    search.take_answer("b:1", Leads("a:1", 3, False))
    assert search.next() is None


def test_a_hint_that_does_not_answer_is_dropped_and_the_failure_names_the_reason() -> None:
    resolver = Known("a:1")
    search = LeaderSearch(resolver, "the master")
    search.begin_round(["a:1"])
    assert search.next() == "a:1"
    assert not search.take_answer("a:1", PeerLost("a:1 is not there"))
    assert resolver.hint == "" and "a:1 is not there" in str(search.failure(1.0))
