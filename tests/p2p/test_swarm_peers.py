# SPDX-License-Identifier: Apache-2.0
"""Addresses of peers: bounded, retried at growing intervals, marked."""

from __future__ import annotations

import pytest

from mooncake.p2p.swarm_peers import MARKED_S, MAX_PEERS, SwarmPeers, is_peer_address


def test_a_peer_that_does_not_answer_is_tried_at_growing_intervals() -> None:
    peers = SwarmPeers(("a:1", "b:1"))
    assert peers.usable(0.0) == ["a:1", "b:1"]
    peers.failed("a:1", 0.0, "refused")
    assert peers.usable(0.5) == ["b:1"]
    assert peers.usable(1.0) == ["b:1", "a:1"]
    peers.failed("a:1", 1.0, "refused")
    assert peers.usable(2.5) == ["b:1"] and peers.usable(3.0) == ["b:1", "a:1"]
    peers.answered("a:1", 3.0)
    assert peers.usable(3.0) == ["a:1", "b:1"]
    assert len(peers.story("a:1")) == 2
    peers.check()


def test_a_marked_peer_is_neither_asked_nor_named() -> None:
    peers = SwarmPeers(("a:1",))
    peers.mark("a:1", 0.0, "wrong chunks")
    peers.mark("new:1", 0.0, "wrong chunks")
    assert peers.usable(MARKED_S - 1) == [] and peers.recent(0.0, 9) == []
    assert peers.is_marked("a:1", 1.0) and not peers.is_marked("a:1", MARKED_S)
    assert not peers.add("new:1", 1.0)


def test_a_peer_that_has_left_is_not_named_until_it_is_back() -> None:
    peers = SwarmPeers(("home:1",))
    peers.add("a:1", 0.0)
    for address in ("a:1", "a:1", "home:1", "unknown:1"):
        peers.left(address, 1.0)
    assert peers.recent(1.0, 9) == [] and peers.usable(1.5) == []
    assert peers.usable(2.0) == ["a:1", "home:1"]  # it may come back at the same address
    peers.returned("a:1", 3.0)
    peers.answered("home:1", 4.0)
    assert peers.recent(4.0, 9) == ["home:1", "a:1"]
    peers.failed("a:1", 5.0, "refused")
    peers.returned("a:1", 5.0)  # that it asks does not show that it can be asked
    assert peers.recent(5.0, 9) == ["home:1"]
    peers.check()


def test_learned_addresses_are_bounded_and_configured_ones_stay() -> None:
    peers = SwarmPeers(("home:1",), own="me:1")
    assert not peers.add("me:1", 0.0) and not peers.add("x" * 400, 0.0)
    assert all(peers.add(f"host-{i}:1", 0.0) for i in range(MAX_PEERS - 1))
    assert not peers.add("late:1", 0.0)
    peers.failed("home:1", 0.0, "refused")
    peers.failed("host-3:1", 0.0, "refused")
    assert peers.add("late:1", 0.0) and len(peers) == MAX_PEERS
    assert "home:1" in peers.usable(5.0) and "host-3:1" not in peers.usable(5.0)
    peers.check()


def test_those_that_answered_last_are_named() -> None:
    peers = SwarmPeers()
    for i in range(5):
        peers.add(f"host-{i}:1", float(i))
    peers.answered("host-0:1", 9.0)
    peers.failed("host-4:1", 9.0, "refused")
    assert peers.recent(9.0, 2) == ["host-0:1", "host-3:1"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "xyz",
        "a..b:1",
        "a:",
        ":1",
        "a:0",
        "a:65536",
        "a b:1",
        "\x1b[2J:1",
        "ä:1",
        "x" * 64 + ":1",
        "x:" + "1" * 300,
    ],
)
def test_what_is_no_address_is_neither_kept_nor_asked(text: str) -> None:
    peers = SwarmPeers()
    assert not is_peer_address(text) and not peers.add(text, 0.0) and peers.usable(0.0) == []


@pytest.mark.parametrize("text", ["a:1", "10.0.0.1:7300", "[::1]:7300", "host-1.example.com:65535"])
def test_addresses_are_kept(text: str) -> None:
    assert is_peer_address(text) and SwarmPeers().add(text, 0.0)


def test_its_own_address_is_no_peer_once_it_is_known() -> None:
    peers = SwarmPeers(("me:1", "other:1"))
    peers.name_own("me:1")
    assert peers.usable(0.0) == ["other:1"] and len(peers) == 1 and not peers.add("me:1", 0.0)
    peers.check()
