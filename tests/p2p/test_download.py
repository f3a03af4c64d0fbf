# SPDX-License-Identifier: Apache-2.0
"""The choice of chunks and peers: alone, and as a swarm on virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake.machine import Wake
from mooncake.p2p import download as d
from mooncake.p2p.download import Bits, Download, DownloadEffect, DownloadLimits
from mooncake.p2p.token_bucket import TokenBucket
from tests.p2p.swarm_world import World

SIZE = 1 << 20


def bits(*chunks: int, number: int = 64) -> Bits:
    found = np.zeros(number, dtype=np.bool_)
    found[list(chunks)] = True
    return found


def make(have: Bits | None = None, *, bucket: TokenBucket | None = None, **limits: float) -> Download:
    found = bits() if have is None else have
    chosen = DownloadLimits(**limits)  # type: ignore[arg-type]
    return Download([SIZE] * len(found), found, chosen, np.random.default_rng(7), 0.0, bucket)


def requests(effects: list[DownloadEffect]) -> list[d.RequestChunk]:
    return [one for one in effects if isinstance(one, d.RequestChunk)]


def bring(download: Download, request: d.RequestChunk, now: float, chunk: int = -1) -> list[DownloadEffect]:
    """Let a request end well."""
    chunk = request.candidates[0] if chunk < 0 else chunk
    effects = download.handle(d.ChunkPromised(request.request_id, chunk), now)
    effects += download.handle(d.ChunkArrived(request.request_id), now)
    download.check()
    return effects


def test_the_rarest_chunks_are_requested_first() -> None:
    download = make(requests_per_peer=1)
    common = bits(*range(60))
    for peer in ("a", "b", "c"):
        download.handle(d.PeerHas(peer, common), 0.0)
    effects = download.handle(d.PeerHas("d", ~bits()), 0.0)
    (request,) = requests(effects)
    assert request.peer == "d" and set(request.candidates) & {60, 61, 62, 63}
    assert request.candidates[0] in {60, 61, 62, 63}
    download.check()


def test_no_chunk_is_in_two_requests_at_first() -> None:
    download = make()
    found = [one for peer in "abcd" for one in requests(download.handle(d.PeerHas(peer, ~bits()), 0.0))]
    candidates = [chunk for one in found for chunk in one.candidates]
    assert len(found) == 8 and len(candidates) == len(set(candidates))
    download.check()


def test_candidates_that_were_not_chosen_are_free_again() -> None:
    download = make(requests_per_peer=1)
    (first,) = requests(download.handle(d.PeerHas("a", bits(1, 2)), 0.0))
    effects = download.handle(d.PeerHas("b", bits(1, 2)), 0.0)
    if len(first.candidates) == 2:
        assert not requests(effects)
        effects = download.handle(d.ChunkPromised(first.request_id, first.candidates[1]), 0.0)
    (second,) = requests(effects)
    assert second.peer == "b" and second.candidates != first.candidates[1:]
    download.check()


def test_a_wrong_chunk_is_requested_from_another_peer() -> None:
    download = make(requests_per_peer=1)
    (request,) = requests(download.handle(d.PeerHas("bad", bits(5)), 0.0))
    download.handle(d.PeerHas("good", bits(5)), 0.0)
    download.handle(d.ChunkPromised(request.request_id, 5), 0.0)
    (again,) = requests(download.handle(d.ChunkWrong(request.request_id), 0.1))
    assert (again.peer, again.candidates) == ("good", (5,))
    assert not download.have[5]
    bring(download, again, 0.2)
    assert download.have[5]
    assert any("wrong digest" in line for line in download.story("bad"))


def test_a_peer_that_sends_wrong_chunks_is_excluded() -> None:
    download = make(requests_per_peer=1, max_wrong=3)
    effects = download.handle(d.PeerHas("bad", ~bits()), 0.0)
    for _ in range(3):
        (request,) = requests(effects)
        download.handle(d.ChunkPromised(request.request_id, request.candidates[0]), 0.0)
        effects = download.handle(d.ChunkWrong(request.request_id), 0.0)
        download.check()
    assert [one.peer for one in effects if isinstance(one, d.ExcludePeer)] == ["bad"]
    assert not requests(download.handle(d.PeerHas("bad", ~bits()), 1.0))
    assert download.is_excluded("bad") and download.num_unavailable == 64


def test_a_chunk_that_was_not_requested_counts_as_wrong() -> None:
    download = make(bits(*range(63)), requests_per_peer=1, max_wrong=1)
    (request,) = requests(download.handle(d.PeerHas("bad", ~bits()), 0.0))
    effects = download.handle(d.ChunkPromised(request.request_id, 3), 0.0)
    assert d.AbandonRequest(request.request_id) in effects and download.is_excluded("bad")


def test_a_silent_peer_is_left_and_its_chunk_requested_elsewhere() -> None:
    download = make(bits(*range(63)), deadline_s=5.0, endgame_s=100.0)
    (request,) = requests(download.handle(d.PeerHas("slow", ~bits()), 0.0))
    download.handle(d.PeerHas("other", ~bits()), 0.0)
    assert download.deadline() == 5.0
    effects = download.handle(Wake(), 5.0)
    assert d.AbandonRequest(request.request_id) in effects
    assert [one.peer for one in requests(effects)] == ["other"]
    download.check()


def test_the_last_chunk_is_requested_twice_when_it_is_slow() -> None:
    download = make(bits(*range(63)), endgame_s=1.0)
    (first,) = requests(download.handle(d.PeerHas("slow", ~bits()), 0.0))
    assert not requests(download.handle(d.PeerHas("fast", ~bits()), 0.5))
    assert download.deadline() == 1.0
    (second,) = requests(download.handle(Wake(), 1.0))
    assert (second.peer, second.candidates) == ("fast", (63,))
    download.handle(d.ChunkPromised(first.request_id, 63), 1.1)
    effects = bring(download, second, 1.2)
    assert d.AbandonRequest(first.request_id) in effects and d.DownloadComplete() in effects
    assert download.handle(d.ChunkArrived(first.request_id), 1.3) == []


def test_a_download_without_sources_gives_up_with_the_number_of_chunks() -> None:
    download = make(stall_s=10.0)
    download.handle(d.PeerHas("half", bits(*range(32))), 0.0)
    download.handle(d.PeerLeft("half", "closed"), 1.0)
    assert download.handle(Wake(), 9.9) == []
    (effect,) = download.handle(Wake(), 10.0)
    assert (
        isinstance(effect, d.DownloadStalled)
        and "64 are missing, 64 of them at no known peer" in effect.reason
    )
    assert download.deadline() is None


def test_the_rate_bounds_requests() -> None:
    bucket = TokenBucket(SIZE, SIZE)
    download = make(requests_per_peer=4, bucket=bucket)
    found = requests(download.handle(d.PeerHas("a", ~bits()), 0.0))
    for one in found:
        download.handle(d.ChunkPromised(one.request_id, one.candidates[0]), 0.0)
    for one in found:
        assert not requests(download.handle(d.ChunkArrived(one.request_id), 0.0))
    deadline = download.deadline()
    assert deadline is not None and deadline == pytest.approx(3.0, abs=0.01)
    assert requests(download.handle(Wake(), deadline))


def test_bits_of_another_length_are_ignored() -> None:
    download = make()
    assert not requests(download.handle(d.PeerHas("a", bits(1, number=8)), 0.0))
    download.check()


# Swarms


def test_seven_peers_take_little_longer_than_one_and_the_source_sends_about_one_copy() -> None:
    times = {}
    for num_peers in (1, 7):
        world = World(1, num_chunks=269)
        source = world.add("source", world.whole())
        peers = [world.add(f"p{i}") for i in range(num_peers)]
        for peer in peers:
            world.load(peer)
        world.kernel.run(200.0)
        world.check()
        assert all(peer.outcome == "complete" for peer in peers)
        times[num_peers] = max(peer.done_at for peer in peers)
        copies = source.sent_bytes / sum(world.sizes)
        assert copies < 1.3, copies
    assert times[7] < 1.3 * times[1], times


@pytest.mark.parametrize("seed", range(12))
def test_everybody_ends_if_and_only_if_every_chunk_survives(seed: int) -> None:
    world = World(seed, num_chunks=80, chunk_bytes=1 << 18)
    random = world.kernel.random
    source = world.add("source", world.whole())
    peers = [world.add(f"p{i}") for i in range(5)]
    world.add("liar", world.whole(), is_corrupt=True)
    for peer in peers:
        world.load(peer, stall_s=20.0)
    victim = random.choice(peers)
    world.kernel.after(random.uniform(0.05, 1.0), lambda: world.crash(victim))
    if random.random() < 0.5:
        world.kernel.after(random.uniform(1.0, 3.0), lambda: world.restart(victim))
    world.kernel.after(random.uniform(0.2, 1.5), lambda: world.crash(source))
    world.kernel.run(300.0)
    world.check()
    living = [peer for peer in peers if peer.is_alive]
    has_all = bool(world.union().all())
    ended = [peer.outcome == "complete" for peer in living]
    assert all(ended) if has_all else not any(ended), (seed, has_all, ended)
    assert all(peer.have.all() == (peer.outcome == "complete") for peer in living)


def test_both_outcomes_occur_among_the_seeds() -> None:
    found = set()
    for seed in range(12):
        world = World(seed, num_chunks=80, chunk_bytes=1 << 18)
        source = world.add("source", world.whole())
        peer = world.add("p")
        world.load(peer, stall_s=5.0)
        world.kernel.run(world.kernel.random.uniform(0.2, 1.5))
        world.crash(source)
        world.kernel.run(60.0)
        found.add(peer.outcome == "complete")
    assert found == {True, False}


def test_a_source_that_comes_back_ends_everything() -> None:
    world = World(3, num_chunks=100)
    source = world.add("source", world.whole())
    peers = [world.add(f"p{i}") for i in range(4)]
    for peer in peers:
        world.load(peer)
    world.kernel.after(0.4 * 100 / 25, lambda: world.crash(source))
    world.kernel.after(5.0, lambda: world.restart(source))
    world.kernel.run(200.0)
    assert all(peer.outcome == "complete" for peer in peers)


def test_a_limited_source_sends_at_its_rate() -> None:
    world = World(4, num_chunks=50)
    world.add("source", world.whole(), limit=5e6)
    peer = world.add("p")
    world.load(peer)
    world.kernel.run(100.0)
    assert peer.outcome == "complete"
    assert peer.done_at >= (sum(world.sizes) - 2 * SIZE) / 5e6
