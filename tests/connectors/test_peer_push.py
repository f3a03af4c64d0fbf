# SPDX-License-Identifier: Apache-2.0
"""The two ends of a push: in either order, with blocks of another kind, and with the other end missing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from mooncake.connectors.memory import SlabMemory
from mooncake.connectors.peer_push import (
    BlockOffer,
    BlockRequest,
    Listeners,
    PushAddresses,
    PushOutcome,
    PushRequest,
    Receiver,
    Sender,
    target_memory,
)
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.kvlayout import SlabLayout
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.transfer.transports.cuda import why_unavailable
from tests.connectors.late_device import LateDevice
from tests.contract import cuda_double

NUM_BLOCKS, NUM_LAYERS, SLAB_BYTES = 6, 3, 256
LAYOUT = SlabLayout(NUM_LAYERS, 1, SLAB_BYTES, 16)
TIMEOUT_S = 20.0


class Memory:
    """The KV memory of one engine, and the transfer engine that moves it."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.layers = random.integers(0, 256, (NUM_LAYERS, NUM_BLOCKS, SLAB_BYTES), dtype=np.uint8)
        bases = np.array([[layer.ctypes.data] for layer in self.layers], dtype=np.uint64)
        self.slabs = SlabMemory([self.layers], bases, SLAB_BYTES)
        self.transfer = TransferEngine(TransferSettings(listen_host="127.0.0.1"))

    def blocks(self, ids: list[int]) -> bytes:
        return self.layers[:, ids].tobytes()

    def close(self) -> None:
        self.transfer.close()


class DeviceMemory(Memory):
    """The same in memory of a device, by the driver in ``library``."""

    def __init__(self, library: str, seed: int, transports: tuple[str, ...]) -> None:
        super().__init__(seed)
        self.transfer.close()
        settings = TransferSettings(listen_host="127.0.0.1", cuda_library=library)
        self.transfer = TransferEngine(dataclasses.replace(settings, transports=transports))
        self._engine = TransferEngine(settings)  # it allocates and is no peer, as an engine's allocator
        self._region = self._engine.allocate(self.layers.nbytes, device="cuda:0")
        self.write(self.layers)
        layer_bytes = NUM_BLOCKS * SLAB_BYTES
        bases = [[self._region.address + layer * layer_bytes] for layer in range(NUM_LAYERS)]
        span = self._region.address, self.layers.nbytes
        self.slabs = SlabMemory([span], np.array(bases, dtype=np.uint64), SLAB_BYTES)

    def write(self, layers: npt.NDArray[np.uint8]) -> None:
        self._region.write_from(layers.tobytes())

    def blocks(self, ids: list[int]) -> bytes:
        held = bytearray(self.layers.nbytes)
        self._region.read_into(held)
        return np.frombuffer(held, dtype=np.uint8).reshape(self.layers.shape)[:, ids].tobytes()

    def close(self) -> None:
        super().close()
        self._engine.close()


class Watched(Sender):
    """A sender that sets ``has_waiter`` when a request waits for an offer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_waiter = asyncio.Event()

    def _awaited(self, transfer_id: str) -> asyncio.Future[BlockOffer | str]:
        awaited = super()._awaited(transfer_id)
        if not awaited.done():
            self.has_waiter.set()
        return awaited


class Pair:
    """The computing and the decoding engine."""

    def __init__(self, hold_s: float, timeout_s: float, computed: Memory, decoding: Memory) -> None:
        self.computed, self.decoding = computed, decoding
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.outcomes: list[PushOutcome] = []
        self.computed.transfer.register_all(self.computed.slabs.buffers)
        self.sender = Watched(
            self.computed.transfer,
            LAYOUT,
            "kind",
            self.computed.slabs,
            hold_s,
            self.ended.put_nowait,
            self.outcomes.append,
        )
        self.receiver = Receiver(
            self.decoding.transfer, LAYOUT, "kind", self.decoding.slabs, timeout_s, self.outcomes.append
        )

    def wanted(self, name: str, block_ids: list[int], first: int = 0, prompt: bytes = b"p") -> BlockRequest:
        return BlockRequest(name, prompt, first, block_ids, f"127.0.0.1:{self.sender.port}")

    def counted(self) -> list[tuple[str, int, int]]:
        """Outcomes since the last call: (outcome, blocks, bytes)."""
        outcomes, self.outcomes[:] = list(self.outcomes), []
        assert all((one.seconds is not None) == (one.num_bytes > 0) for one in outcomes)
        return [(one.outcome, one.num_blocks, one.num_bytes) for one in outcomes]


@contextlib.asynccontextmanager
async def a_pair(
    hold_s: float = TIMEOUT_S,
    timeout_s: float = TIMEOUT_S,
    computed: Memory | None = None,
    decoding: Memory | None = None,
) -> AsyncIterator[Pair]:
    pair = Pair(hold_s, timeout_s, computed or Memory(1), decoding or Memory(2))
    await pair.sender.start("127.0.0.1", 0)
    try:
        yield pair
    finally:
        await pair.receiver.close()
        await pair.sender.close()
        pair.decoding.close()
        pair.computed.close()


async def test_blocks_arrive_in_either_order() -> None:
    async with a_pair() as pair:
        pair.sender.offer(BlockOffer("early", b"p", [0, 1, 2]))
        assert await pair.receiver.receive(pair.wanted("early", [3, 5], first=1)) == ""
        assert pair.decoding.blocks([3, 5]) == pair.computed.blocks([1, 2])
        assert await pair.ended.get() == "early"
        num_bytes = 2 * NUM_LAYERS * SLAB_BYTES
        assert pair.counted() == [("pushed", 2, num_bytes), ("received", 2, num_bytes)]

        pair.sender.has_waiter.clear()
        received = asyncio.ensure_future(pair.receiver.receive(pair.wanted("late", [4, 0])))
        await pair.sender.has_waiter.wait()
        pair.sender.offer(BlockOffer("late", b"p", [3, 4]))
        assert await received == ""
        assert pair.decoding.blocks([4, 0]) == pair.computed.blocks([3, 4])
        assert await pair.ended.get() == "late"


@pytest.fixture(params=["double", "cuda"])
def driver(request: pytest.FixtureRequest) -> str:
    """The library of a driver: a test double of it, or the real one where there is a GPU."""
    if request.param == "double":
        if not cuda_double.built():
            pytest.skip("no C++ compiler for the test double of the CUDA driver; install g++")
        return str(cuda_double.LIBRARY)
    if why := why_unavailable():
        pytest.skip(f"NOT RUN: no GPU; scripts/test-cuda runs it on one ({why})")
    return "libcuda.so.1"


IPC, TCP, DEFAULT = ("cuda",), ("tcp", "cuda"), ("shm", "file", "cuda", "tcp")


@pytest.mark.parametrize(
    ("transports", "is_mixed"), [(IPC, False), (TCP, False), (DEFAULT, False), (TCP, True), (DEFAULT, True)]
)
async def test_blocks_of_a_device_arrive_in_memory_of_the_other(
    driver: str, transports: tuple[str, ...], is_mixed: bool
) -> None:
    decoding = Memory(2) if is_mixed else DeviceMemory(driver, 2, transports)
    async with a_pair(computed=DeviceMemory(driver, 1, transports), decoding=decoding) as pair:
        untouched = pair.decoding.blocks([0, 1, 2, 4])
        pair.sender.offer(BlockOffer("one", b"p", [0, 1, 2]))
        assert await pair.receiver.receive(pair.wanted("one", [3, 5], first=1)) == ""
        assert pair.decoding.blocks([3, 5]) == pair.computed.blocks([1, 2])
        assert pair.decoding.blocks([0, 1, 2, 4]) == untouched


@pytest.mark.parametrize("transports", [IPC, TCP])
async def test_a_device_s_memory_that_is_revoked_is_not_written_to_any_longer(
    driver: str, transports: tuple[str, ...]
) -> None:
    computed, decoding = DeviceMemory(driver, 1, transports), DeviceMemory(driver, 2, transports)
    async with a_pair(computed=computed, decoding=decoding) as pair:
        early = computed.transfer.open(decode_descriptor(pair.receiver._describe()))
        columns = [np.array([number], dtype=np.uint64) for number in (0, 0, SLAB_BYTES)]
        for column, memory in zip(columns, (computed, decoding), strict=False):
            column += memory.slabs.description()[0][0]
        await computed.transfer.write(early, *columns, timeout_s=TIMEOUT_S)
        assert pair.decoding.blocks([0])[:SLAB_BYTES] == pair.computed.blocks([0])[:SLAB_BYTES]
        await pair.receiver._take_back(pair.receiver._generation)
        before = pair.decoding.blocks([0, 1])
        columns[1] += np.uint64(SLAB_BYTES)
        with pytest.raises(MooncakeError):
            await computed.transfer.write(early, *columns, timeout_s=TIMEOUT_S)
        assert pair.decoding.blocks([0, 1]) == before
        pair.sender.offer(BlockOffer("later", b"p", [4]))
        assert await pair.receiver.receive(pair.wanted("later", [0])) == ""
        assert pair.decoding.blocks([0]) == pair.computed.blocks([4])


@pytest.mark.parametrize("seed", range(5))
async def test_both_ends_wait_for_the_work_of_their_devices(seed: int) -> None:
    """The prompt is computed late, and an earlier request's work on the receiver's blocks ends late."""
    async with a_pair() as pair:
        content = np.random.default_rng(seed).integers(0, 256, (NUM_LAYERS, 2, SLAB_BYTES), dtype=np.uint8)
        prefill, decode = LateDevice(seed), LateDevice(seed + 100)
        prefill.compute(lambda: pair.computed.layers.__setitem__((slice(None), [0, 1]), content))
        decode.compute(lambda: pair.decoding.layers.__setitem__((slice(None), [3, 4]), 0xEE))
        pair.sender.offer(BlockOffer("one", b"p", [0, 1]), prefill.computed())
        assert await pair.receiver.receive(pair.wanted("one", [4, 3]), decode.computed()) == ""
        decode.finish_all()
        assert pair.decoding.blocks([4, 3]) == content.tobytes(), (prefill, decode)


async def test_blocks_that_do_not_match_are_not_written() -> None:
    async with a_pair() as pair:
        before = pair.decoding.layers.copy()
        pair.sender.offer(BlockOffer("prompt", b"p", [0, 1]))
        assert "prompts differ" in await pair.receiver.receive(pair.wanted("prompt", [0, 1], prompt=b"q"))
        pair.sender.offer(BlockOffer("count", b"p", [0, 1]))
        assert pair.counted() == [("refused", 2, 0), ("recomputed", 2, 0)]
        assert "don't fit" in await pair.receiver.receive(pair.wanted("count", [0]))
        pair.sender.drop("aborted", "its client left")
        assert await pair.receiver.receive(pair.wanted("aborted", [0])) == "its client left"
        assert "taken before" in await pair.receiver.receive(pair.wanted("count", [0, 1]))
        assert (pair.decoding.layers == before).all()
        assert {await pair.ended.get(), await pair.ended.get()} == {"prompt", "count"}


async def test_blocks_of_another_kind_are_refused_with_both_named() -> None:
    async with a_pair() as pair:
        await pair.receiver.close()
        stranger = Memory(3)
        receiver = Receiver(stranger.transfer, LAYOUT, "other", stranger.slabs, TIMEOUT_S)
        pair.sender.offer(BlockOffer("one", b"p", [0]))
        reason = await receiver.receive(pair.wanted("one", [0]))
        assert reason == "the blocks have layout kind, not other"
        await receiver.close()
        stranger.transfer.close()


async def test_every_wait_ends() -> None:
    async with a_pair(hold_s=0.05, timeout_s=0.05) as pair:
        assert "not computed within" in await pair.receiver.receive(pair.wanted("never", [0]))
        pair.counted()
        pair.sender.offer(BlockOffer("forgotten", b"p", [0, 3]))
        assert await pair.ended.get() == "forgotten"
        assert pair.counted() == [("expired", 2, 0)]


async def test_memory_known_to_a_lost_sender_is_revoked_and_given_to_the_next() -> None:
    async with a_pair() as pair:
        old = pair.decoding.transfer.describe()
        received = asyncio.ensure_future(pair.receiver.receive(pair.wanted("lost", [0])))
        await pair.sender.has_waiter.wait()
        port = pair.sender.port
        await pair.sender.close()
        assert await received
        keys = [{region.key for region in one.regions} for one in (old, pair.decoding.transfer.describe())]
        assert keys[0].isdisjoint(keys[1])
        assert "can't be reached" in await pair.receiver.receive(pair.wanted("lost", [0]))

        pair.sender = Watched(
            *(pair.computed.transfer, LAYOUT, "kind", pair.computed.slabs, TIMEOUT_S, pair.ended.put_nowait)
        )
        await pair.sender.start("127.0.0.1", port)
        pair.sender.offer(BlockOffer("again", b"p", [2]))
        assert await pair.receiver.receive(pair.wanted("again", [1])) == ""
        assert pair.decoding.blocks([1]) == pair.computed.blocks([2])


def test_a_request_names_no_listener_that_is_not_configured() -> None:
    """A listener that gets a request learns how to write to the decode engine's memory."""
    both = Listeners("10.0.0.1:8200, 10.0.0.2:8200")
    assert both.chosen({}) == "10.0.0.1:8200", "the first, if a request names none"
    assert both.chosen({"remote_host": "10.0.0.2", "remote_port": 8200}) == "10.0.0.2:8200"
    assert both.chosen({"remote_host": "10.0.0.2", "remote_port": "8200"}) == "10.0.0.2:8200"
    for host, port in (("10.6.6.6", 8200), ("10.0.0.2", 666), ("10.0.0.1", None), (None, 8200), ({}, [])):
        named = both.chosen({"remote_host": host, "remote_port": port})
        assert named == ("10.0.0.1:8200" if not host and not port else None)
    assert Listeners(["h:1"]).chosen({}) == "h:1" and Listeners("").chosen({}) is None


def test_engines_are_named_by_their_http_servers_and_reached_at_their_listeners() -> None:
    several = Listeners("10.0.0.1:8200, 10.0.0.1:8201,[fd00::1]:8202", 1000)
    assert several.addresses == ["10.0.0.1:9200", "10.0.0.1:9201", "[fd00::1]:9202"]
    for port in (8201, 9201, "8201"):
        for host in ("10.0.0.1", "localhost", "", None):  # a gateway on that host names it otherwise
            assert several.chosen({"remote_host": host, "remote_port": port}) == "10.0.0.1:9201"
    assert several.chosen({"remote_host": "fd00::1", "remote_port": 9202}) == "[fd00::1]:9202"
    assert several.chosen({"remote_host": "10.0.0.1", "remote_port": 8203}) is None
    alike = Listeners("10.0.0.1:8200,10.0.0.2:8200", 1000)
    assert alike.chosen({"remote_host": "10.0.0.2", "remote_port": 9200}) == "10.0.0.2:9200"
    assert alike.chosen({"remote_host": "10.0.0.3", "remote_port": 9200}) is None
    with pytest.raises(InvalidArgument, match="1 to 65535"):
        Listeners("10.0.0.1:65000", 1000)


def resolve(monkeypatch: pytest.MonkeyPatch, hosts: dict[str, list[str]]) -> None:
    """Let these names have these addresses, and no other name any."""

    def getaddrinfo(host: str, port: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            addresses = [str(ipaddress.ip_address(host))]
        except ValueError:
            addresses = hosts.get(host, [])
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port or 0))
            for one in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_prefills_that_are_named_by_host_are_chosen_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill's answer has its address, whatever name decode has for it."""
    resolve(monkeypatch, {"p1": ["10.0.0.1", "fd00::1"], "p2": ["10.0.0.2"], "P3": ["10.0.0.3"]})
    alike = Listeners("p1:8200,p2:8200,P3:8200,later:8200", 1000)
    for host, address in (
        ("10.0.0.1", "p1:9200"),
        ("FD00:0::1", "p1:9200"),
        ("[fd00::1]", "p1:9200"),
        ("10.0.0.2", "p2:9200"),
        ("::ffff:10.0.0.2", "p2:9200"),
        ("p2", "p2:9200"),
        ("p3", "P3:9200"),
        ("later", "later:9200"),
    ):
        for port in (8200, 9200):
            assert alike.chosen({"remote_host": host, "remote_port": port}) == address
    for host in ("10.0.0.4", "elsewhere", ""):
        assert alike.chosen({"remote_host": host, "remote_port": 9200}) is None


def test_a_port_of_a_listener_and_of_an_http_server_is_the_listener_s() -> None:
    both = Listeners("10.0.0.1:8200,10.0.0.1:9200,10.0.0.2:9200", 1000)
    assert both.chosen({"remote_host": "10.0.0.1", "remote_port": 9200}) == "10.0.0.1:9200"
    assert both.chosen({"remote_host": "10.0.0.2", "remote_port": 9200}) == "10.0.0.2:10200", "no other there"
    assert both.chosen({"remote_host": "gateway-s-name", "remote_port": 9200}) == "10.0.0.1:9200"
    assert both.chosen({"remote_host": "10.0.0.1", "remote_port": 10200}) == "10.0.0.1:10200"
    twice = Listeners("10.0.0.1:8200,10.0.0.1:8200", 1000)
    assert twice.chosen({"remote_host": "other", "remote_port": 8200}) == "10.0.0.1:9200"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"local_hostname": "10.0.0.5"},
        {"prefill_addr": "192.0.2.9:8200"},
        {"prefill_addr": "192.0.2.9:8200", "local_hostname": "fd00::5"},
    ],
)
def test_without_named_decodes_no_other_host_reaches_the_listener(extra: dict[str, Any]) -> None:
    addresses = PushAddresses.read(extra, own_port=8200)
    assert (addresses.listen_host, addresses.listen_port) == ("127.0.0.1", 9200)


def test_ipv6_decodes_are_listened_for_and_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, {"d1": ["fd00::9", "fd00::a"], "d2": ["192.0.2.9", "fd00::b"]})
    monkeypatch.setattr("mooncake.connectors.peer_push.has_ipv6", lambda: True)
    six = PushAddresses.read({"decode_addr": "d1:8201", "local_hostname": "fd00::1"}, own_port=8200)
    assert (six.listen_host, six.listener_host) == ("::", "fd00::1")
    assert six.accepts("fd00::9:4711") and six.accepts("fd00::a:4711") and six.accepts("fd00::a%eth0:4711")
    assert not six.accepts("fd00::b:4711")
    literal = PushAddresses.read({"decode_addr": "[FD00:0:0::9]:8201"}, own_port=8200)
    assert literal.listen_host == "::" and literal.accepts("fd00::9:1")

    both = PushAddresses.read({"decode_addr": "d2:8201", "local_hostname": "p"}, own_port=8200)
    assert (both.listen_host, both.listener_host) == ("", "p"), "all addresses of both families"
    assert both.accepts("192.0.2.9:1") and both.accepts("::ffff:192.0.2.9:1") and both.accepts("fd00::b:1")
    monkeypatch.setattr("mooncake.connectors.peer_push.has_ipv6", lambda: False)
    four = PushAddresses.read({"decode_addr": "d2:8201", "local_hostname": "p"}, own_port=8200)
    assert four.listen_host == "0.0.0.0"
    own = PushAddresses.read({"decode_addr": "[::1]:8201", "local_hostname": "::1"}, own_port=8200)
    assert own.listen_host == "::1", "both on this host"


def test_addresses_of_the_two_commands_of_a_deployment() -> None:
    """A prefill at 8200 and a decode at 8201, each configured with the other's HTTP server only."""
    prefill = PushAddresses.read({"decode_addr": "127.0.0.1:8201"}, own_port=8200)
    decode = PushAddresses.read({"prefill_addr": "127.0.0.1:8200"}, own_port=8201)
    assert (prefill.listen_host, prefill.listen_port) == ("127.0.0.1", 9200)
    assert decode.listeners.chosen({}) == "127.0.0.1:9200" and decode.transfer_host == "127.0.0.1"
    params = {"remote_host": prefill.listener_host, "remote_port": prefill.listen_port}
    assert decode.listeners.chosen(params) == "127.0.0.1:9200"

    apart = PushAddresses.read({"decode_addr": "192.0.2.9:8201, 192.0.2.10:8201"}, own_port=8200)
    assert (apart.listen_host, apart.listen_port) == ("0.0.0.0", 9200)
    accepted = ("192.0.2.9:4711", "192.0.2.10:1", "127.0.0.1:5", "::ffff:192.0.2.9:4711")
    assert all(map(apart.accepts, accepted)) and not apart.accepts("192.0.2.11:4711")
    assert apart.listener_host not in ("0.0.0.0", "")
    assert PushAddresses.read({}, own_port=8200).listen_host == "127.0.0.1"
    assert PushAddresses.read({}, own_port=8200).accepts("192.0.2.11:4711")


def test_addresses_that_are_set() -> None:
    extra = {"listen_addr": "10.0.0.1:7000", "local_hostname": "10.0.0.5", "listener_offset": 0}
    addresses = PushAddresses.read({**extra, "prefill_addr": "10.0.0.1:7000"}, own_port=8200)
    assert (addresses.listen_host, addresses.listen_port) == ("10.0.0.1", 7000)
    assert addresses.transfer_host == "10.0.0.5" and addresses.listeners.addresses == ["10.0.0.1:7000"]
    for bad in ({"listener_offset": "x"}, {"listener_offset": True}, {"prefill_addr": "nowhere"}):
        with pytest.raises(InvalidArgument):
            PushAddresses.read(bad, own_port=8200)
    with pytest.raises(InvalidArgument, match="decode_addr"):
        PushAddresses.read({"decode_addr": "no-such-host.invalid:8201"}, own_port=8200)
    with pytest.raises(InvalidArgument, match="1 to 65535"):
        PushAddresses.read({}, own_port=65000)


async def test_a_request_waits_on_when_another_for_the_same_blocks_has_timed_out() -> None:
    async with a_pair() as pair:
        call = cast(Any, SimpleNamespace(connection=SimpleNamespace(peer="127.0.0.1:1")))
        patient = asyncio.ensure_future(pair.receiver.receive(pair.wanted("one", [1])))
        await pair.sender.has_waiter.wait()
        late = await pair.sender._take(PushRequest("one", "kind", b"p", b"", b"", b"", 0, [0], 0.01), call)
        assert "not computed within" in late.reason
        pair.sender.offer(BlockOffer("one", b"p", [0]))
        assert await patient == ""
        assert pair.decoding.blocks([1]) == pair.computed.blocks([0])
        assert not pair.sender._num_waiting


async def test_only_configured_decodes_get_blocks() -> None:
    async with a_pair() as pair:
        pair.sender._accepts = PushAddresses.read({"decode_addr": "192.0.2.9:8201"}, 8200).accepts
        call = SimpleNamespace(connection=SimpleNamespace(peer="192.0.2.66:1234"))
        take = PushRequest("one", "kind", b"p", b"", b"", b"", 0, [0], 1.0)
        refused = await pair.sender._take(take, cast(Any, call))
        assert "192.0.2.66:1234 is not in this engine's decode_addr" in refused.reason
        assert not refused.has_begun


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan"), 1e9])
async def test_a_timeout_out_of_range_is_refused(timeout_s: float) -> None:
    """It comes from the network; the blocks that it requests would be held for as long."""
    async with a_pair() as pair:
        receiver = Receiver(pair.decoding.transfer, LAYOUT, "kind", pair.decoding.slabs, TIMEOUT_S)
        receiver._timeout_s = timeout_s
        take = PushRequest("one", "kind", b"p", b"", b"", b"", 0, [0], timeout_s)
        call = SimpleNamespace(connection=SimpleNamespace(peer="127.0.0.1:1"))
        taken = await pair.sender._take(take, cast(Any, call))
        assert "timeout_s" in taken.reason and not taken.has_begun
        assert not pair.sender._offers, "no request waits for it"
        await receiver.close()


async def test_offered_blocks_are_the_engines_again_when_the_write_has_ended_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receiver disconnects in the middle of the write, which goes on in the memory all the same."""
    async with a_pair() as pair:
        has_begun, may_end = asyncio.Event(), asyncio.Event()
        write = pair.computed.transfer.write

        async def slow(*args: Any, **kwargs: Any) -> Any:
            has_begun.set()
            cancelled: BaseException | None = None
            while not may_end.is_set():
                try:
                    await may_end.wait()
                except asyncio.CancelledError as error:  # as transfer does
                    cancelled = error
            if cancelled is not None:
                raise cancelled
            return await write(*args, **kwargs)

        monkeypatch.setattr(pair.computed.transfer, "write", slow)
        pair.sender.offer(BlockOffer("one", b"p", [0]))
        received = asyncio.ensure_future(pair.receiver.receive(pair.wanted("one", [1])))
        await has_begun.wait()
        await pair.receiver.close()
        assert await received, "its connection is lost"
        assert pair.ended.empty()
        may_end.set()
        assert await pair.ended.get() == "one"


async def test_a_bug_revokes_the_memory_and_blocks_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_pair() as pair:
        before = pair.decoding.transfer.describe()
        client = pair.receiver._client(f"127.0.0.1:{pair.sender.port}")
        call = client.call

        async def broken(message: Any, timeout_s: float) -> Any:
            if isinstance(message, PushRequest):
                raise KeyError("a bug")
            return await call(message, timeout_s)

        monkeypatch.setattr(client, "call", broken)
        assert await pair.receiver.receive(pair.wanted("one", [0])) == "KeyError"
        keys = [{region.key for region in one.regions} for one in (before, pair.decoding.transfer.describe())]
        assert keys[0].isdisjoint(keys[1]), "a peer may know the memory"
        monkeypatch.undo()
        pair.sender.offer(BlockOffer("two", b"p", [0]))
        assert await pair.receiver.receive(pair.wanted("two", [0])) == ""


async def test_blocks_are_kept_until_the_memory_could_be_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.connectors.peer_push.LOG_EVERY_S", 0.001)
    async with a_pair(timeout_s=0.05) as pair:
        unregister, num_tries = pair.decoding.transfer.unregister, 0

        def unwilling(region: Any) -> None:
            nonlocal num_tries
            num_tries += 1
            if num_tries < 4:
                raise RuntimeError("the device does not answer")
            unregister(region)

        monkeypatch.setattr(pair.decoding.transfer, "unregister", unwilling)
        received = asyncio.ensure_future(pair.receiver.receive(pair.wanted("lost", [0])))
        await pair.sender.has_waiter.wait()
        await pair.sender.close()
        assert await received and num_tries == 4


async def test_memory_that_can_not_be_registered_again_is_tried_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_pair(timeout_s=0.05) as pair:
        register_all = pair.decoding.transfer.register_all

        def refused(buffers: Any) -> Any:
            raise InvalidArgument("buffer", "it", "mapped")

        monkeypatch.setattr(pair.decoding.transfer, "register_all", refused)
        await pair.receiver._take_back(0)
        assert pair.receiver._regions == [] and not pair.decoding.transfer.describe().regions
        monkeypatch.setattr(pair.decoding.transfer, "register_all", register_all)
        pair.sender.offer(BlockOffer("one", b"p", [2]))
        assert await pair.receiver.receive(pair.wanted("one", [1])) == ""
        assert pair.decoding.blocks([1]) == pair.computed.blocks([2])


@pytest.mark.parametrize("cut", [1, 8])
@pytest.mark.parametrize("field", ["first_addresses", "strides"])
def test_a_damaged_description_is_no_memory(field: str, cut: int) -> None:
    whole = {"first_addresses": bytes(8 * NUM_LAYERS * LAYOUT.num_slabs), "strides": bytes(8 * NUM_LAYERS)}

    def memory(**arrays: bytes) -> object:
        take = PushRequest("one", "kind", b"", b"", **arrays, first_block=0, block_ids=[0], timeout_s=1.0)
        return target_memory(take, LAYOUT)

    assert memory(**whole) is not None
    assert memory(**{**whole, field: whole[field][:-cut]}) is None
