# SPDX-License-Identifier: Apache-2.0
"""Live peers in one process: contents arrive as they were, whatever is corrupted, lost or interrupted."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake import clock
from mooncake.errors import AccessDenied, AddressInUse, InvalidArgument, PeerLost, Unavailable
from mooncake.http.server import HttpServer, listen
from mooncake.metrics import registry
from mooncake.p2p import LoadProgress, P2pSettings, P2PStore, store
from mooncake.p2p import messages as m
from mooncake.p2p import upload as u
from mooncake.p2p.held_version import HeldVersion
from mooncake.p2p.partial_folder import PartialFolder
from mooncake.p2p.peer_link import PeerDirectory
from mooncake.p2p.swarm_peers import PeerRecord, SwarmPeers
from mooncake.security import Identity, Role, SecuritySettings
from mooncake.security.keys import format_secret
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.handshake import HandshakeClient
from mooncake.transfer.metadata_server import make_app
from tests.p2p.peers import LyingStore, contents, elements_of, running, write_model
from tests.waiting import until


async def test_a_folder_arrives_as_it_is(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(2) as (one, two):
        info = await one.register("m", source)
        shown: list[LoadProgress] = []
        found = await two.get("m", tmp_path / "copy", progress=shown.append)
        assert found is not None and (found.digest, found.number) == (info.digest, 1)
        assert contents(tmp_path / "copy") == contents(source)
        assert not (tmp_path / "copy.partial").exists()
        assert shown[-1].have_bytes == shown[-1].size_bytes == info.size_bytes
        listed = await one.list()
        assert {(row.name, row.num_have == row.num_chunks) for row, _ in listed} == {("m", True)}


async def test_what_no_peer_has_is_none_and_no_peer_at_all_an_error(tmp_path: Path) -> None:
    async with running(2) as (_, two):
        assert await two.get("m", tmp_path / "copy") is None
    async with running(1, "127.0.0.1:9") as (alone,):
        with pytest.raises(PeerLost, match="no peer answers"):
            await alone.get("m", tmp_path / "copy")


async def test_several_peers_load_from_each_other(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(5, limit_rate_bytes=20_000_000) as (one, *others):
        info = await one.register("m", source)
        await asyncio.gather(*(peer.get("m", tmp_path / f"{i}") for i, peer in enumerate(others)))
        assert all(contents(tmp_path / f"{i}") == contents(source) for i in range(4))
        sent = sum(one._uploads.num_sent(info.digest))
        assert one.num_copies_sent(info.digest) >= 1 and sent < 4 * info.num_chunks


async def test_a_peer_knows_the_others_from_the_first(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(3) as (one, two, three):
        await one.register("m", source)
        await two.get("m", tmp_path / "a")
        async with running(1, two.address) as (four,):
            assert await four.get("m", tmp_path / "b") is not None
            assert {address for _, address in await four.list("m")} == {
                one.address,
                two.address,
                four.address,
            }
        assert await three.find("m") is not None


async def test_a_flipped_bit_is_refused_and_the_chunk_comes_from_another_peer(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1) as (good,), LyingStore(P2pSettings(port=0)) as liar:
        await good.register("m", source)
        await liar.register("m", source)
        settings = P2pSettings(port=0, peers=(good.address, liar.address), stall_s=20.0)
        async with P2PStore(settings) as reader:
            await reader.get("m", tmp_path / "copy")
            assert contents(tmp_path / "copy") == contents(source)


async def test_a_peer_that_only_lies_is_marked_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    liar = LyingStore(P2pSettings(port=0))
    async with liar:
        await liar.register("m", source)
        settings = P2pSettings(port=0, peers=(liar.address,), stall_s=1.0)
        async with P2PStore(settings) as reader:
            with pytest.raises(Unavailable, match="excluded"):
                await reader.get("m", tmp_path / "copy")
            assert reader.peers.is_marked(liar.address, 0.0)
            assert not (tmp_path / "copy").exists() and reader.held == []
        liar.is_lying = False  # it was repaired; another process asks it
        async with P2PStore(P2pSettings(port=0, peers=(liar.address,))) as other:
            await other.get("m", tmp_path / "copy")
        assert contents(tmp_path / "copy") == contents(source)


async def test_a_registered_file_that_changes_is_not_sent_as_what_it_was(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    before = contents(source)
    async with running(2, stall_s=1.0) as (one, two):
        await one.register("m", source)
        with (source / "model.safetensors").open("r+b") as file:
            file.seek(5_000_000)
            file.write(b"changed")
        with pytest.raises(Unavailable, match="at no known peer"):
            await two.get("m", tmp_path / "copy")
        assert one.held[0].info().num_have < one.held[0].info().num_chunks
        (source / "model.safetensors").write_bytes(before["model.safetensors"])
        async with running(1) as (other,):
            await other.register("m", source)
            two.peers.add(other.address, 0.0)
            await two.get("m", tmp_path / "copy")
        assert contents(tmp_path / "copy") == before


async def test_the_source_may_go_when_the_peers_together_have_everything(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(4, limit_rate_bytes=4_000_000) as (one, *others):
        info = await one.register("m", source)
        loads = [asyncio.create_task(peer.get("m", tmp_path / f"{i}")) for i, peer in enumerate(others)]
        await until(lambda: one.num_copies_sent(info.digest), "one copy")
        await one.close()
        await asyncio.gather(*loads)
        assert all(contents(tmp_path / f"{i}") == contents(source) for i in range(3))


async def test_a_load_goes_on_where_it_was(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1, limit_rate_bytes=3_000_000) as (one,):
        info = await one.register("m", source)
        async with running(1, one.address) as (two,):
            load = asyncio.create_task(two.get("m", tmp_path / "copy"))
            await until(lambda: two.held and two.held[0].info().num_have >= 3, "three chunks")
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
        assert not (tmp_path / "copy").exists()
        damaged = tmp_path / "copy.partial" / "content" / "model.safetensors"
        noted = np.fromfile(tmp_path / "copy.partial" / "chunks", dtype="<u4")
        chunks = (await one._manifest(info.digest)).chunks
        place = next(chunks[number] for number in noted if chunks[number].item == 1)
        with damaged.open("r+b") as file:  # as a crash of the machine may leave it
            file.seek(place.offset)
            file.write(os.urandom(100))
        async with running(1, one.address) as (two,):
            shown: list[LoadProgress] = []
            await two.get("m", tmp_path / "copy", progress=shown.append)
            assert contents(tmp_path / "copy") == contents(source)
            missing = info.size_bytes - sum(chunks[number].size_bytes for number in set(noted))
            assert shown[-1].received_bytes == missing + place.size_bytes


async def test_two_processes_may_not_load_into_one_folder(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(3, limit_rate_bytes=1_000_000) as (one, two, three):
        await one.register("m", source)
        load = asyncio.create_task(two.get("m", tmp_path / "copy"))
        await until((tmp_path / "copy.partial" / "chunks").exists)
        with pytest.raises(InvalidArgument, match="no other process"):
            await three.get("m", tmp_path / "copy")
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        (tmp_path / "there").mkdir()
        with pytest.raises(InvalidArgument, match="does not exist"):
            await three.get("m", tmp_path / "there")


async def test_a_new_version_moves_the_elements_that_differ(tmp_path: Path) -> None:
    old = write_model(tmp_path / "old")
    elements = elements_of(old)
    places = np.flatnonzero(np.random.default_rng(1).random(len(elements)) < 0.01)
    elements[places] ^= 3
    new = write_model(tmp_path / "new", elements)
    async with running(3) as (one, two, three):
        await one.register("m", old)
        await two.get("m", tmp_path / "two-1")
        info = await one.register("m", new)
        (delta,) = info.deltas
        assert info.number == 2 and delta.size_bytes < 6 * len(places) < info.size_bytes / 20
        before = received_bytes()
        await two.get("m", tmp_path / "two-2")
        assert contents(tmp_path / "two-2") == contents(new)
        assert received_bytes() - before <= delta.size_bytes + (1 << 17)
        # A peer without the version before loads it whole, also from one that made it by a delta.
        await one.close()
        await three.list()
        three.peers.add(two.address, 0.0)
        await three.get("m", tmp_path / "three")
        assert contents(tmp_path / "three") == contents(new)


def received_bytes() -> float:
    return registry.get_sample_value("mooncake_p2p_received_bytes_total") or 0.0


async def test_a_delta_that_is_not_there_or_wrong_costs_nothing_but_time(tmp_path: Path) -> None:
    old = write_model(tmp_path / "old")
    elements = elements_of(old)
    elements[::200] += 1
    new = write_model(tmp_path / "new", elements)
    other = write_model(tmp_path / "other", elements[::-1].copy())
    async with running(2) as (one, two):
        await one.register("m", old)
        await two.get("m", tmp_path / "1")
        info = await one.register("m", new)
        wrong = await one.register("x", other)
        base = (await one.find("m", number=1)) or info
        # Announce a delta that is none, and one that does not exist.
        for digest, number in ((wrong.digest, 2), ("0" * 64, 3)):
            held = one._held[info.digest]
            held.deltas = [m.DeltaInfo(base.digest, digest, 1000)]
            await two.get("m", tmp_path / f"{number}", digest=info.digest)
            assert contents(tmp_path / f"{number}") == contents(new)
            await two.drop("m", info.digest)


def folders_of_deltas(peer: P2PStore) -> list[str]:
    return sorted(os.listdir(peer._deltas_dir))


async def test_a_delta_goes_with_the_last_version_that_it_makes(tmp_path: Path) -> None:
    old = write_model(tmp_path / "0")
    elements = elements_of(old)
    async with running(2) as (one, two):
        await one.register("m", old)
        await two.get("m", tmp_path / "two-0")
        for number in range(1, 4):
            elements[number::150] += 1
            new = write_model(tmp_path / f"{number}", elements)
            (before,) = one.held
            info = await one.register("m", new)
            assert [delta.base for delta in info.deltas] == [before.manifest.digest]
            await one.drop("m", before.manifest.digest)
            await two.get("m", tmp_path / f"two-{number}")
            await two.drop("m", before.manifest.digest, delete=True)
            assert contents(tmp_path / f"two-{number}") == contents(new)
            for peer in (one, two):  # of the versions before, nothing is left
                assert len(folders_of_deltas(peer)) == 1
                assert set(peer._held) == {info.digest, info.deltas[0].digest}
        for peer in (one, two):
            assert await peer.drop("m") == [info.digest]
            assert folders_of_deltas(peer) == [] and not peer._held


async def test_equal_deltas_are_kept_until_both_versions_have_gone(tmp_path: Path) -> None:
    first = np.random.default_rng(1).integers(0, 1 << 16, 1_000_000, dtype=np.uint16)
    second = first.copy()
    second[::300] ^= 5
    async with running(1) as (one,):
        before = await one.register_buffers("w", {"a": first})
        after = await one.register_buffers("w", {"a": second})
        await one.drop("w", before.digest)
        again = await one.register_buffers("w", {"a": first})  # the same elements differ, by the same bits
        assert [delta.digest for delta in again.deltas] == [delta.digest for delta in after.deltas]
        await until(lambda: len(folders_of_deltas(one)) == 1, "the end of the second copy")
        await one.drop("w", after.digest)
        assert again.deltas[0].digest in one._held and len(folders_of_deltas(one)) == 1
        await one.drop("w", again.digest)
        assert not one._held and folders_of_deltas(one) == []


async def test_a_delta_that_is_dropped_while_it_is_sent_is_right_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write_model(tmp_path / "old")
    elements = elements_of(old)
    elements[::150] += 1
    new = write_model(tmp_path / "new", elements)
    async with running(1) as (keeper,), running(1) as (one,), running(1, one.address) as (two,):
        first = await one.register("m", old)
        await two.get("m", tmp_path / "two-1")
        await keeper.register("m", new, number=2)
        info = await one.register("m", new)
        delta = one._held[info.deltas[0].digest]
        put, loop = one._put_into_slot, asyncio.get_running_loop()
        dropped: list[Any] = []

        def dropped_before(held: HeldVersion, send: u.SendChunk) -> bool:
            if held is delta and not dropped:
                dropped.append(asyncio.run_coroutine_threadsafe(one.drop("m", info.digest), loop))
                assert dropped[0].result(30.0) == [info.digest]
                assert folders_of_deltas(one) == []
            return put(held, send)

        monkeypatch.setattr(one, "_put_into_slot", dropped_before)
        two.peers.add(keeper.address, 0.0)
        found = await asyncio.wait_for(two.get("m", tmp_path / "two-2", digest=info.digest), 60.0)
        assert found is not None and dropped
        assert contents(tmp_path / "two-2") == contents(new)
        assert {held.manifest.digest for held in two.held} == {first.digest, info.digest}


async def test_an_interrupted_load_leaves_no_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_model(tmp_path / "old")
    elements = elements_of(old)
    elements[::150] += 1
    new = write_model(tmp_path / "new", elements)
    async with running(2) as (one, two):
        await one.register("m", old)
        await two.get("m", tmp_path / "1")
        info = await one.register("m", new)
        answer = one._server.handlers[m.FetchChunk]
        asked = asyncio.Event()

        async def silent(*_: object) -> m.Declined:
            asked.set()
            await asyncio.sleep(3600.0)
            raise AssertionError

        one._server.handlers[m.FetchChunk] = silent
        load = asyncio.create_task(two.get("m", tmp_path / "2"))
        await asyncio.wait_for(asked.wait(), 30.0)
        assert len(folders_of_deltas(two)) == 1
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        await until(lambda: not folders_of_deltas(two), "the end of the delta")
        one._server.handlers[m.FetchChunk] = answer
        assert await two.get("m", tmp_path / "2") is not None
        assert info.deltas[0].digest in two._held and contents(tmp_path / "2") == contents(new)


async def test_deltas_do_not_outlive_their_process(tmp_path: Path) -> None:
    first = {"a": np.arange(1_000_000)}
    second = {"a": first["a"] ^ (first["a"] % 99 == 0)}
    (tmp_path / "delta-of-a-killed-process").mkdir(parents=True)
    (tmp_path / "delta-of-a-killed-process" / "delta").write_bytes(b"x")
    async with P2PStore(P2pSettings(port=0), state_dir=tmp_path) as peer:
        assert folders_of_deltas(peer) == []
        await peer.register_buffers("w", first)
        assert (await peer.register_buffers("w", second)).deltas
        assert len(folders_of_deltas(peer)) == 1
    assert os.listdir(tmp_path) == []


async def test_chunks_that_are_here_do_not_move_again(tmp_path: Path) -> None:
    old = write_model(tmp_path / "old")
    elements = elements_of(old)
    elements[-5:] += 1
    new = write_model(tmp_path / "new", elements, extra=640)  # a longer header moves all tensors
    async with running(2) as (one, two):
        await one.register("m", old)
        await two.get("m", tmp_path / "1")
        info = await one.register("m", new)
        one._held[info.digest].deltas = []
        before = received_bytes()
        await two.get("m", tmp_path / "2")
        assert contents(tmp_path / "2") == contents(new)
        assert received_bytes() - before < 100_000


async def test_buffers_are_loaded_into_buffers(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    buffers: dict[str, np.ndarray[Any, Any]] = {
        "a": random.random(300_000),
        "b": np.arange(10, dtype=np.int16),
        "none": np.zeros(0),
    }
    async with running(2) as (one, two):
        info = await one.register_buffers("w", buffers)
        into = {name: np.zeros_like(array) for name, array in buffers.items()}
        found = await two.get_buffers("w", into)
        assert found is not None and found.digest == info.digest
        assert all(np.array_equal(into[name], buffers[name]) for name in buffers)
        with pytest.raises(InvalidArgument, match="of buffers"):
            async with running(1, one.address) as (three,):
                await three.get("w", tmp_path / "x")
        async with running(1, one.address) as (four,):
            with pytest.raises(InvalidArgument, match="sizes"):
                await four.get_buffers("w", {"a": into["a"]})
            buffers["a"][:] = 0  # its chunks are no longer what they were
            await four.get_buffers("w", {name: np.zeros_like(array) for name, array in buffers.items()})
            assert one.held[0].info().num_have < info.num_chunks  # they came from the other peer


async def test_the_highest_number_is_loaded_and_equal_numbers_are_an_error(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first", np.zeros(2000, dtype=np.uint16))
    second = write_model(tmp_path / "second", np.ones(2000, dtype=np.uint16))
    async with running(3) as (one, two, three):
        await one.register("m", first)
        info = await two.register("m", second)
        assert info.number == 2
        found = await three.find("m")
        assert found is not None and found.digest == info.digest
        assert (await one.register("m", first)).number == 1  # it is that version still
        third = write_model(tmp_path / "third", np.full(2000, 7, dtype=np.uint16))
        await one.register("m", third, number=2)
        with pytest.raises(InvalidArgument, match="one of the digests"):
            await three.find("m")
        assert await three.get("m", tmp_path / "copy", digest=info.digest) is not None


async def test_a_dropped_version_is_not_served(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(2) as (one, two):
        info = await one.register("m", source)
        await two.get("m", tmp_path / "copy")
        with pytest.raises(InvalidArgument, match="loaded"):
            await one.drop("m", delete=True)
        assert await one.drop("m") == [info.digest] and await one.drop("m") == []
        assert [address for _, address in await one.list()] == [two.address]
        assert await two.drop("m", info.digest, delete=True) == [info.digest]
        assert not (tmp_path / "copy").exists() and source.exists()
        assert await two.list() == []


async def test_a_peer_that_has_ended_is_not_named_to_others(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(2) as (one, two):
        info = await one.register("m", source)
        await two.get("m", tmp_path / "copy")
        held = one._held[info.digest]
        held.watched_by(two.address, clock.monotonic())
        assert one.peers.recent(clock.monotonic(), 9) == [two.address]
        assert held.state(clock.monotonic()).peers == [two.address]
        await two.close()
        assert one.peers.recent(clock.monotonic(), 9) == []
        assert held.state(clock.monotonic()).peers == []


async def test_peers_find_each_other_through_a_metadata_service(tmp_path: Path) -> None:
    server = HttpServer(make_app(identity=Identity()), listen("127.0.0.1", 0))
    await server.start()
    url = f"http://127.0.0.1:{server.port}/metadata"
    source = write_model(tmp_path / "model")
    try:
        async with running(2, metadata=url, peers=()) as (one, two):
            await one.register("m", source)
            await until(lambda: len(two.peers), "the peer's address")
            assert await two.get("m", tmp_path / "copy") is not None
    finally:
        await server.close()


async def test_other_hosts_are_served_with_a_credential_only() -> None:
    store = P2PStore(P2pSettings(host="0.0.0.0", port=0), identity=Identity())
    with pytest.raises(InvalidArgument, match="credential"):
        await store.start()
    await store.close()
    allowed = P2PStore(
        P2pSettings(host="0.0.0.0", port=0), identity=Identity(SecuritySettings(insecure=True))
    )
    async with allowed:
        assert not allowed.address.startswith("0.0.0.0")


@pytest.mark.parametrize("address", ["a..b:1", "xyz", "\x1b[2J:1"])
async def test_what_a_peer_says_are_addresses_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    source = write_model(tmp_path / "model")
    async with running(2) as (one, two):
        info = await one.register("m", source)
        monkeypatch.setattr(one.peers, "recent", lambda now, limit: [address])
        held = one._held[info.digest]
        monkeypatch.setattr(
            held, "state", lambda now: m.VersionState(0, m.pack_bits(held.have), [address] * 1000)
        )
        assert len(await two.list()) == 1 and await two.find("m") is not None
        two.peers._records[address] = PeerRecord(is_configured=True)  # as if the settings named it
        assert await two.get("m", tmp_path / "copy") is not None
        assert len(two.peers) <= 2


async def test_watchers_are_named_if_they_have_addresses(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1) as (one,):
        info = await one.register("m", source)
        held = one._held[info.digest]
        for text in ("x" * 1_000_000, "a..b:1", "\x1b:1", "host:1"):
            held.watched_by(text, 0.0)
        assert held.state(0.0).peers == ["host:1"]


async def test_copies_that_no_reader_could_use_are_not_counted(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with LyingStore(P2pSettings(port=0)) as liar:
        info = await liar.register("m", source)
        async with P2PStore(P2pSettings(port=0, peers=(liar.address,), stall_s=1.0)) as reader:
            with pytest.raises(Unavailable):
                await reader.get("m", tmp_path / "copy")
        await until(lambda: len(liar._uploads._free) == liar.settings.num_slots, "all slots")
        assert not liar._uploads._read[info.digest].any()


async def test_a_lease_of_an_impossible_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model")
    async with running(2, stall_s=1.0) as (one, two):
        await one.register("m", source)
        for lease_s in (float("nan"), 0.0, -1.0, 1e9):
            monkeypatch.setattr(one, "_lease_s", lease_s)
            with pytest.raises(Unavailable):
                await two.get("m", tmp_path / "copy")
        assert two.held == []


async def test_a_peer_that_does_not_answer_delays_no_manifest_and_no_delta(
    tmp_path: Path,
) -> None:
    old = write_model(tmp_path / "old")
    elements = elements_of(old)
    elements[::200] += 1
    new = write_model(tmp_path / "new", elements)

    async def silent(*_: object) -> m.Declined:
        await asyncio.sleep(3600.0)
        raise AssertionError

    async with running(1, stall_s=2.0) as (one,), running(1) as (liar,):
        first = await one.register("m", old)
        info = await one.register("m", new)
        liar._server.handlers[m.AskManifest] = silent
        async with running(1, one.address, liar.address, stall_s=2.0) as (two,):
            await asyncio.wait_for(two.get("m", tmp_path / "1", digest=first.digest), 30.0)
            held = one._held[info.digest]
            held.deltas = [m.DeltaInfo(first.digest, "0" * 64, 1000)]
            await asyncio.wait_for(two.get("m", tmp_path / "2", digest=info.digest), 30.0)
        assert contents(tmp_path / "2") == contents(new)


async def test_one_peer_has_contents_under_one_name(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1) as (one,):
        info = await one.register("m", source)
        with pytest.raises(InvalidArgument, match="has these contents"):
            await one.register("other", source)
        assert [held.name for held in one.held] == ["m"] and one.held[0].manifest.digest == info.digest
        both = await asyncio.gather(
            *(one.register_buffers(name, {"a": bytearray(9)}) for name in ("x", "y")), return_exceptions=True
        )
        assert sum(isinstance(found, InvalidArgument) for found in both) == 1
        for number in (-1, 1 << 62):
            with pytest.raises(InvalidArgument, match="number"):
                await one.register("n", source, number=number)


async def test_a_huge_number_is_not_counted_on_from(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    other = write_model(tmp_path / "other", elements_of(source) ^ 1)
    async with running(2) as (one, two):
        await one.register("m", source, number=(1 << 62) - 1)
        assert (await two.register("m", other)).number == 1


async def test_buffers_are_loaded_once_at_a_time() -> None:
    buffers = {"a": np.arange(1_000_000)}
    async with running(2) as (one, two):
        await one.register_buffers("w", buffers)
        into = [{"a": np.zeros(1_000_000, dtype=np.int64)} for _ in range(2)]
        found = await asyncio.gather(*(two.get_buffers("w", each) for each in into), return_exceptions=True)
        assert sum(isinstance(each, InvalidArgument) for each in found) == 1
        good = next(i for i in range(2) if not isinstance(found[i], BaseException))
        assert np.array_equal(into[good]["a"], buffers["a"]) and len(two.held) == 1


def two_versions() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    first = np.random.default_rng(2).integers(0, 1 << 16, 3_000_000, dtype=np.uint16)
    second = first.copy()
    second[::200] ^= 9
    return first, second


async def test_an_engine_goes_to_the_next_version_and_back_in_the_same_memory() -> None:
    first, second = two_versions()
    async with running(2) as (trainer, engine):
        await trainer.register_buffers("w", {"a": first})
        info = await trainer.register_buffers("w", {"a": second})
        memory = np.zeros_like(first)
        for number, expected in ((1, first), (2, second), (1, first), (2, second)):
            before = received_bytes()
            found = await engine.get_buffers("w", {"a": memory}, number=number)
            assert found is not None and found.number == number and np.array_equal(memory, expected)
            assert [(one.number, one.is_complete) for one in engine.held] == [(number, True)]
            assert all(address == trainer.address for one, address in await trainer.list() if one != found)
            if number == 2:  # made from what was there
                (delta,) = info.deltas
                assert received_bytes() - before <= delta.size_bytes < memory.nbytes / 20


async def test_a_version_that_is_there_is_compared_and_repaired() -> None:
    first, _ = two_versions()
    async with running(2) as (trainer, engine):
        info = await trainer.register_buffers("w", {"a": first})
        memory = np.zeros_like(first)
        await engine.get_buffers("w", {"a": memory})
        held = engine._held[info.digest]
        before = received_bytes()
        held.lose(2)  # as if a reader had come while it was changed for a moment
        found = await engine.get_buffers("w", {"a": memory})
        assert found == held.info() and held.have.all() and engine._held[info.digest] is held
        assert received_bytes() == before
        memory[5] ^= 1
        found = await engine.get_buffers("w", {"a": memory})
        assert found is not None and np.array_equal(memory, first)
        assert 0 < received_bytes() - before <= 1 << 20  # the chunk that was wrong
        other = np.zeros_like(first)
        await trainer.close()
        assert await engine.get_buffers("w", {"a": other}) == found and np.array_equal(other, first)
        assert engine._held[info.digest].content.read(0, 0, 4) == first.tobytes()[:4]


async def test_a_version_that_is_overwritten_is_read_right_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = two_versions()
    async with running(2) as (trainer, engine), running(1, engine.address, stall_s=5.0) as (reader,):
        before = await trainer.register_buffers("w", {"a": first})
        memory, read = np.zeros_like(first), np.zeros_like(first)
        await engine.get_buffers("w", {"a": memory})
        await trainer.register_buffers("w", {"a": second})
        put, loop = engine._put_into_slot, asyncio.get_running_loop()
        loads: list[Any] = []
        once = threading.Lock()

        def overwritten_before(held: HeldVersion, send: u.SendChunk) -> bool:
            with once:  # several chunks are put at a time
                if not loads:
                    load = engine.get_buffers("w", {"a": memory}, number=2)
                    loads.append(asyncio.run_coroutine_threadsafe(load, loop))
                    assert loads[0].result(30.0).number == 2
            return put(held, send)

        monkeypatch.setattr(engine, "_put_into_slot", overwritten_before)
        found = await asyncio.wait_for(reader.get_buffers("w", {"a": read}, digest=before.digest), 60.0)
        assert found is not None and loads
        await asyncio.wait_for(asyncio.wrap_future(loads[0]), 60.0)
        assert np.array_equal(read, first) and np.array_equal(memory, second)


async def test_two_versions_are_not_loaded_into_the_same_memory_at_a_time() -> None:
    first, second = two_versions()
    async with running(2) as (trainer, engine):
        await trainer.register_buffers("w", {"a": first})
        await trainer.register_buffers("w", {"a": second})
        memory = np.zeros_like(first)
        found = await asyncio.gather(
            *(engine.get_buffers("w", {"a": memory}, number=number) for number in (1, 2)),
            return_exceptions=True,
        )
        (error,) = (one for one in found if isinstance(one, InvalidArgument))
        (info,) = (one for one in found if isinstance(one, m.VersionInfo))
        assert "nothing is being loaded into" in str(error)
        assert np.array_equal(memory, first if info.number == 1 else second)
        other = [np.zeros_like(first) for _ in range(2)]  # into others they are
        await engine.drop("w")
        await asyncio.gather(
            *(engine.get_buffers("w", {"a": other[number - 1]}, number=number) for number in (1, 2))
        )
        assert np.array_equal(other[0], first) and np.array_equal(other[1], second)


async def test_a_closed_peer_refuses_to_register_and_to_load(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    (one, buffers) = P2PStore(P2pSettings(port=0)), {"a": bytearray(9)}
    async with one:
        await one.register("m", source)
    for call in (
        one.register("m", source),
        one.register_buffers("w", buffers),
        one.register_buffers("w", buffers, number=3),
        one.get("m", tmp_path / "copy"),
        one.get_buffers("w", buffers),
    ):
        with pytest.raises(Unavailable, match="closed"):
            await call
    assert one.held == []


async def test_a_load_ends_when_its_peer_is_closed(tmp_path: Path) -> None:
    """Its caller learns that at once, and not when no chunk has come for the longest time."""
    async with running(1, stall_s=3600.0, chunk_s=3600.0) as (one,):
        await one.register("m", write_model(tmp_path / "model"))
        await one.register_buffers("w", {"a": bytearray(9)})
        asked = asyncio.Event()

        async def unanswered(message: Any, call: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        for begin in ("folder", "buffers"):
            asked.clear()
            one._server.handlers[m.FetchChunk] = unanswered
            async with running(1, one.address, stall_s=3600.0, chunk_s=3600.0) as (two,):
                load = asyncio.create_task(
                    two.get("m", tmp_path / "copy")
                    if begin == "folder"
                    else two.get_buffers("w", {"a": bytearray(9)})
                )
                await asked.wait()
                await two.close()
                with pytest.raises(Unavailable, match="this peer was closed"):
                    await load
                assert two.held == [] and two.progress_of(tmp_path / "copy") is None


@pytest.mark.parametrize("num_steps", range(7))
async def test_a_peer_closes_although_its_load_is_cancelled_at_any_time(num_steps: int) -> None:
    async with running(1, stall_s=3600.0, chunk_s=3600.0) as (one,):
        await one.register_buffers("w", {"a": bytearray(9)})
        asked = asyncio.Event()

        async def unanswered(message: Any, call: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        one._server.handlers[m.FetchChunk] = unanswered
        async with running(1, one.address, stall_s=3600.0, chunk_s=3600.0) as (two,):
            load = asyncio.create_task(two.get_buffers("w", {"a": bytearray(9)}))
            await asked.wait()
            closing = asyncio.create_task(two.close())
            for _ in range(num_steps):
                await asyncio.sleep(0)
            load.cancel()
            await asyncio.wait_for(closing, 30)
            with pytest.raises((asyncio.CancelledError, Unavailable)):
                await load


async def test_a_base_that_is_dropped_meanwhile_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(1) as (one,):
        base = await one.register("m", write_model(tmp_path / "old"))
        make_manifest = store.make_manifest  # type: ignore[attr-defined]
        reading, may_end = threading.Event(), threading.Event()

        def slow(*arguments: Any) -> Any:
            reading.set()
            assert may_end.wait(30.0)
            return make_manifest(*arguments)

        monkeypatch.setattr(store, "make_manifest", slow)
        new = write_model(tmp_path / "new", elements_of(tmp_path / "old")[::-1].copy())
        registering = asyncio.create_task(one.register("m", new, base=base.digest))
        await until(reading.is_set)
        await one.drop("m")
        may_end.set()
        with pytest.raises(InvalidArgument, match="base"):
            await registering
        assert one.held == []


async def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with P2PStore(P2pSettings(port=0)) as one:
        before = os.listdir(tmp_path)
        port = int(one.address.rpartition(":")[2])
        two = P2PStore(P2pSettings(port=port))
        closed: list[Any] = []
        close = TransferEngine.close

        def noted(engine: TransferEngine) -> None:
            closed.append(engine)
            close(engine)

        monkeypatch.setattr(TransferEngine, "close", noted)
        with pytest.raises(AddressInUse):
            await two.start()
        assert closed == [two.engine] and os.listdir(tmp_path) == before
        await two.close()
        assert closed == [two.engine]


async def test_a_load_that_is_cancelled_while_it_opens_its_folder_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model")
    opening, may_open = threading.Event(), threading.Event()

    def slow(folder: Path, manifest: Any) -> PartialFolder:
        opening.set()
        assert may_open.wait(30.0)
        return PartialFolder(folder, manifest)

    async with running(2) as (one, two):
        await one.register("m", source)
        monkeypatch.setattr(store, "PartialFolder", slow)
        load = asyncio.create_task(two.get("m", tmp_path / "copy"))
        await until(opening.is_set)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        may_open.set()
        await until((tmp_path / "copy.partial" / "manifest").exists)
        monkeypatch.undo()

        async def is_free() -> bool:
            try:
                return await two.get("m", tmp_path / "copy") is not None
            except InvalidArgument:
                return False

        await until(is_free, "the lock")
        assert contents(tmp_path / "copy") == contents(source)


class Reader:
    """Stands for the connection of a reader."""

    peer = "a reader"


def call_of(reader: Reader) -> Any:
    return types.SimpleNamespace(connection=reader)


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_slot_that_becomes_free_for_a_reader_that_leaves_is_free(is_gone: bool) -> None:
    """Both happen in one pass of the event loop: the reader is given the slot, and never learns of it."""
    async with P2PStore(P2pSettings(port=0, num_slots=2)) as one:
        info = await one.register_buffers("m", {"a": np.arange(1 << 16, dtype=np.uint8)})
        first, second, third = Reader(), Reader(), Reader()
        wanted = m.FetchChunk(info.digest, [0])
        ready: list[Any] = [await one._fetch_chunk(wanted, call_of(first)) for _ in range(2)]
        assert all(isinstance(reply, m.ChunkReady) for reply in ready)
        waiting = asyncio.create_task(one._fetch_chunk(wanted, call_of(second)))
        await until(lambda: one._uploads._waiting)
        one._return_slot(m.ReturnSlot(ready[0].lease, True), call_of(first))
        waiting.cancel()
        if is_gone:
            one._connection_lost(second)  # type: ignore[arg-type]
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(one._uploads._free) == 1
        assert isinstance(await one._fetch_chunk(wanted, call_of(third)), m.ChunkReady)
        one._uploads.check()


async def test_clients_neither_see_nor_reach_the_memory_of_peers(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(format_secret(b"s" * 32))
    path.chmod(0o600)
    settings = SecuritySettings(cluster_key_file=str(path))
    listening = P2pSettings(port=0, transfer=TransferSettings(handshake_port=0))
    async with P2PStore(listening, identity=Identity(settings)) as one:
        tenant, node = (
            HandshakeClient(Identity(settings, Role.CLIENT, "t")),
            HandshakeClient(Identity(settings)),
        )
        with pytest.raises(AccessDenied, match="client of tenant"):
            await asyncio.to_thread(tenant.describe, one.engine.handshake, 20)
        described = await asyncio.to_thread(node.describe, one.engine.handshake, 20)
        assert [region.address for region in described.regions] == [one._sending.address]
        tenant.close()
        node.close()


async def test_versions_that_are_registered_at_once_have_numbers_of_their_own() -> None:
    buffers = [np.full(1 << 12, value, dtype=np.uint8) for value in range(6)]
    async with running(2) as (_, two):
        found = await asyncio.gather(*(two.register_buffers("m", {"a": buffer}) for buffer in buffers))
        assert sorted(info.number for info in found) == [1, 2, 3, 4, 5, 6]
        latest = await two.find("m")
        assert latest is not None and latest.number == 6


async def test_a_peer_whose_own_address_is_configured_does_not_count_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with P2PStore(P2pSettings(port=port, peers=(f"127.0.0.1:{port}", "127.0.0.1:9"))) as one:
        assert one.peers.usable(clock.monotonic()) == ["127.0.0.1:9"]
        with pytest.raises(PeerLost, match="no peer answers"):
            await one.find("m")


async def test_the_metric_counts_versions_that_are_served(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first")
    changed = elements_of(first)
    changed[5] ^= 1
    second = write_model(tmp_path / "second", changed)
    async with running(1) as (one,):
        await one.register("m", first)
        await one.register("m", second)
        assert len(one._held) == 3 and len(one.held) == 2  # and a delta
        assert registry.get_sample_value("mooncake_p2p_versions") == 2
    assert registry.get_sample_value("mooncake_p2p_versions") == 0


async def test_peers_find_each_other_through_the_metadata_service_of_a_cluster_with_tls(
    tmp_path: Path,
) -> None:
    """It takes clients with certificates of the cluster's authority only, which no system knows."""
    pytest.importorskip("cryptography", reason="makes the certificates: pip install 'mooncake-serving[tls]'")
    from mooncake.cli.certs import CertsSettings, make

    make(CertsSettings(folder=tmp_path, name="node", host=("127.0.0.1",)))
    cert, key, ca = (str(tmp_path / file) for file in ("node.pem", "node.key", "ca.pem"))
    identity = Identity(SecuritySettings(tls_cert=cert, tls_key=key, tls_ca=ca))
    server = HttpServer(make_app(identity=identity), listen("127.0.0.1", 0), tls=identity.server_tls)
    await server.start()
    peers = SwarmPeers(own="127.0.0.1:1")
    directory = PeerDirectory(f"https://127.0.0.1:{server.port}/metadata", "", identity, peers)
    try:
        await asyncio.to_thread(directory._backend.put, "mooncake/p2p/127.0.0.1:2", b"peer", 60.0)
        await directory.refresh()
        assert peers.usable(clock.monotonic()) == ["127.0.0.1:2"]
    finally:
        directory._backend.close()
        await server.close()
