# SPDX-License-Identifier: Apache-2.0
"""Handing KV blocks from the engine that computed a prompt straight into the memory of the one that decodes.

Both ends of a small protocol. The decoding end (``Receiver``) has allocated blocks for a request that has a
``transfer_id``, and requests them from the computing end's listener (``Sender``): ``PushRequest`` has the
address of its memory, the blocks, and their identity. When the prompt with that ``transfer_id`` is computed,
before or after, the sender writes them there and answers ``PushResult``, with a reason where it did not.
Every wait has a deadline.

A receiver that gets no answer, or the answer that a write was interrupted, can't know which bytes may still
arrive. So it revokes access to its memory (registers it anew: nothing that addresses the old registration
can touch it) before it reports that the blocks are free to be computed. At both ends a ``Claim`` defines when
blocks are free: the sender's when its write has ended, the receiver's when the answer says that all is
written, or its memory has been revoked. A revocation that fails is repeated until it succeeds.

The memory may be a device's: transfer moves it, within a host directly where processes can open it, else
through staging memory or the network card. What transfer moves has no order with the work of the device, so
both ends wait for an event first: the sender until the prompt is computed, the receiver until nothing of its
engine's earlier work uses the blocks.

The engine's shell knows the requests; nothing here knows an engine or a tensor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake import clock
from mooncake.connectors.claim import LOG_EVERY_S, Claim
from mooncake.connectors.device_streams import POLL_S, reached
from mooncake.connectors.memory import DeviceEvent, SlabMemory, StagedBlocks
from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.kvlayout import SlabLayout
from mooncake.log import get_logger
from mooncake.rpc import AsyncClient, Call, RpcServer
from mooncake.rpc.client import split_address
from mooncake.security import EVERYBODY, TRUSTED, Access, is_loopback
from mooncake.transfer import Region, TransferEngine
from mooncake.transfer.descriptor import SegmentDescriptor, decode_descriptor
from mooncake.transfer.host import canonical_host, has_ipv6, host_towards, numeric_hosts, with_port

log = get_logger(__name__)

GREETING_S = 5.0
"""Timeout of the probe, after which a sender counts as unreachable."""

MAX_TIMEOUT_S = 3600.0
"""Longest timeout that a receiver may request of a sender."""

LISTENER_OFFSET = 1000
"""Default difference of a sender's port to the port of its engine's HTTP server."""

GRACE_S = 2.0
"""Time beyond the sender's own deadline in which its answer may arrive."""


class PushRequest(msgspec.Struct, frozen=True, array_like=True, tag="kv_take"):
    """Request to write the blocks of a transfer into the receiver's memory."""

    transfer_id: str
    layout: str
    """Digest of the identity and the layout of the blocks (``ForeignIdentity.digest``)."""
    prompt: bytes
    """Digest of the tokens of the blocks."""
    descriptor: bytes
    first_addresses: bytes
    """Little-endian u64 [layers, slabs], as in ``SlabMemory``."""
    strides: bytes
    """Little-endian u64 [layers]."""
    first_block: int
    """Index in the prompt of the first wanted block; the receiver has those before it."""
    block_ids: list[int]
    timeout_s: float


class PushProbe(msgspec.Struct, frozen=True, array_like=True, tag="kv_greet"):
    """Reachability check before a request: an unreachable sender never gets the memory's address."""


class PushResult(msgspec.Struct, frozen=True, array_like=True, tag="kv_taken"):
    """Result of a push request."""

    reason: str = ""
    """Why the blocks were not written; empty when they were."""
    has_begun: bool = False
    """Whether a write was begun."""
    num_layers: int = 0
    """Leading layers that are written, where they are pushed one by one (``layer_push.py``)."""


ACCESS = Access({PushRequest: TRUSTED, PushProbe: EVERYBODY})
"""Clients of a prefill engine where peers authenticate: engines, without a tenant."""


def wrong_timeout(take: PushRequest) -> str:
    """Why a request may not wait for as long as it wants; empty if it may."""
    if math.isfinite(take.timeout_s) and 0 < take.timeout_s <= MAX_TIMEOUT_S:
        return ""
    return f"timeout_s is {take.timeout_s:g}; allowed: more than 0, at most {MAX_TIMEOUT_S:g}"


def target_memory(take: PushRequest, layout: SlabLayout) -> SlabMemory | None:
    """The receiver's memory, as a request describes it; None if that describes no memory of ``layout``."""
    shape = (layout.num_layers, layout.num_slabs)
    first, strides = take.first_addresses, take.strides
    if len(first) != 8 * shape[0] * shape[1] or len(strides) != 8 * shape[0]:
        return None
    addresses = np.frombuffer(first, dtype="<u8").reshape(shape).astype(np.uint64)
    return SlabMemory((), addresses, np.frombuffer(strides, dtype="<u8").tolist())


@dataclasses.dataclass(frozen=True)
class BlockOffer:
    """Blocks that are computed and wait to be taken."""

    transfer_id: str
    prompt: bytes
    block_ids: list[int]


@dataclasses.dataclass(frozen=True)
class PushOutcome:
    """Outcome of some blocks at one end, for statistics."""

    outcome: str
    """``pushed``, ``refused``, ``expired``, ``received`` or ``recomputed``."""
    num_blocks: int
    num_bytes: int = 0
    seconds: float | None = None
    """Duration, where they were moved."""


class Sender:
    """The computing end. All methods but the constructor are called on its loop.

    Args:
        hold_s: how long a computed prompt waits for its receiver.
        ended: called with the ``transfer_id`` of an offer whose blocks are no longer needed.
        on_outcome: called with the outcome of blocks, before ``ended`` is.
        accepts: whether a request from that address is accepted.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        layout: SlabLayout,
        digest: str,
        memory: SlabMemory,
        hold_s: float,
        ended: Callable[[str], None],
        on_outcome: Callable[[PushOutcome], None] = lambda outcome: None,
        accepts: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        self._transfer, self._layout, self._digest, self._memory = transfer, layout, digest, memory
        self._hold_s, self._ended, self._on_outcome = hold_s, ended, on_outcome
        self._accepts = accepts
        self._offers: dict[str, asyncio.Future[BlockOffer | str]] = {}
        """Offers by transfer, or the reason for having none; requests wait for an unfinished future."""
        self._num_waiting: Counter[str] = Counter()
        """By transfer: the requests that wait for its future."""
        self._server = RpcServer(
            {PushRequest: self._take, PushProbe: lambda greet, call: PushResult()},
            access=ACCESS,
            name="direct",
            is_peer=True,
        )
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            AddressInUse, InvalidArgument: as ``RpcServer.start``.
        """
        self.port = await self._server.start(host, port)

    async def close(self) -> None:
        await self._server.close()

    def offer(self, offer: BlockOffer, computed: DeviceEvent | None = None) -> None:
        """Offer blocks, which are not written to until ``ended`` is called, once ``computed`` is reached."""
        if computed is not None and not computed.query():
            asyncio.get_running_loop().call_later(POLL_S, self.offer, offer, computed)
            return
        if not self._settle(offer.transfer_id, offer):
            log.warning("transfer_refused", transfer=offer.transfer_id, reason="its id was used before")
            self._ended(offer.transfer_id)

    def drop(self, transfer_id: str, reason: str) -> None:
        """Record that there will be no offer, and why."""
        self._settle(transfer_id, reason)

    def _settle(self, transfer_id: str, what: BlockOffer | str) -> bool:
        known = self._awaited(transfer_id)
        if known.done():
            return False
        known.set_result(what)
        asyncio.get_running_loop().call_later(self._hold_s, self._expire, transfer_id, known)
        return True

    def _awaited(self, transfer_id: str) -> asyncio.Future[BlockOffer | str]:
        if transfer_id not in self._offers:
            self._offers[transfer_id] = asyncio.get_running_loop().create_future()
        return self._offers[transfer_id]

    def _expire(self, transfer_id: str, known: asyncio.Future[BlockOffer | str]) -> None:
        if self._offers.get(transfer_id) is known:
            del self._offers[transfer_id]
            offer = known.result()
            if isinstance(offer, BlockOffer):
                self._on_outcome(PushOutcome("expired", len(offer.block_ids)))
                log.warning("transfer_expired", transfer=transfer_id, held_s=self._hold_s)
                self._ended(transfer_id)

    async def _take(self, take: PushRequest, call: Call) -> PushResult:
        if not self._accepts(call.connection.peer):
            return self._refused(take, f"{call.connection.peer} is not in this engine's decode_addr")
        if reason := wrong_timeout(take):
            return self._refused(take, reason)
        deadline = clock.monotonic() + take.timeout_s
        if take.layout != self._digest:
            return self._refused(take, f"the blocks have layout {self._digest}, not {take.layout}")
        awaited = self._awaited(take.transfer_id)
        self._num_waiting[take.transfer_id] += 1
        try:
            async with asyncio.timeout_at(deadline):
                found = await asyncio.shield(awaited)
        except TimeoutError:
            return self._refused(take, f"not computed within {take.timeout_s:g} s")
        finally:
            self._num_waiting[take.transfer_id] -= 1
            if not self._num_waiting[take.transfer_id]:  # another one may still get an answer
                del self._num_waiting[take.transfer_id]
                if not awaited.done() and self._offers.get(take.transfer_id) is awaited:
                    del self._offers[take.transfer_id]
        if isinstance(found, str):
            return self._refused(take, found)
        if self._offers.get(take.transfer_id) is not awaited:
            return self._refused(take, "another receiver has taken it")
        # From here on it belongs to this call: it neither expires nor is taken twice.
        self._offers[take.transfer_id] = gone = asyncio.get_running_loop().create_future()
        gone.set_result("it was taken before")
        asyncio.get_running_loop().call_later(self._hold_s, self._expire, take.transfer_id, gone)
        claim = Claim("push", deadline)
        claim.when_free(lambda: self._ended(take.transfer_id))
        try:
            return await self._write(take, found, claim)
        finally:
            claim.close()

    async def _write(self, take: PushRequest, offer: BlockOffer, claim: Claim) -> PushResult:
        if take.prompt != offer.prompt:
            return self._refused(take, "the prompts differ")
        source = offer.block_ids[take.first_block :]
        target = target_memory(take, self._layout)
        if target is None or len(source) != len(take.block_ids):
            return self._refused(take, "the blocks don't fit each other")
        local, remote = self._columns(self._memory, source), self._columns(target, take.block_ids)
        lengths = np.full(len(local), self._layout.slab_bytes, dtype=np.uint64)
        try:
            segment = self._transfer.open(decode_descriptor(take.descriptor))
            began = clock.monotonic()
            if not claim.enter(began):
                return self._refused(take, "no time is left")
            try:
                left_s = claim.deadline - began
                await self._transfer.write(segment, local, remote, lengths, timeout_s=left_s)
            finally:
                claim.leave()  # a cancelled write has ended by now, too
        except MooncakeError as error:
            self._on_outcome(PushOutcome("refused", len(take.block_ids)))
            log.warning("transfer_failed", transfer=take.transfer_id, reason=str(error))
            return PushResult(str(error), has_begun=True)
        seconds = clock.monotonic() - began
        self._on_outcome(PushOutcome("pushed", len(source), int(lengths.sum()), seconds))
        return PushResult()

    def _columns(self, memory: SlabMemory, block_ids: Sequence[int]) -> Any:
        held, members = StagedBlocks(list(block_ids)), range(len(block_ids))
        layers = range(self._layout.num_layers)
        return np.concatenate([memory.addresses(held, layer, members) for layer in layers])

    def _refused(self, take: PushRequest, reason: str) -> PushResult:
        self._on_outcome(PushOutcome("refused", len(take.block_ids)))
        log.warning("transfer_refused", transfer=take.transfer_id, reason=reason)
        return PushResult(reason)


@dataclasses.dataclass(frozen=True)
class BlockRequest:
    """The blocks that a decoding request wants, and their sender."""

    transfer_id: str
    prompt: bytes
    first_block: int
    block_ids: list[int]
    address: str
    """Address of the sender's listener."""


class Listeners:
    """The prefill engines' listeners that a decode engine takes blocks from.

    A listener that gets a request learns the decode engine's KV memory and how to write to it, so a client's
    request may choose among the configured addresses and name no other.
    """

    def __init__(self, configured: str | Sequence[str], offset: int = 0) -> None:
        """Configure the prefill engines. Their names are resolved once, so it may block.

        Args:
            configured: addresses ``host:port``; a string holds one, or several separated by commas.
            offset: difference of a listener's port to the configured one.

        Raises:
            InvalidArgument: not an address, or no port has that offset.
        """
        engines = [split_address(address) for address in _listed(configured)]
        self._engines = [
            _PrefillEngine(host, port, _listener_port(host, port, offset), _spellings(host))
            for host, port in engines
        ]

    @property
    def addresses(self) -> list[str]:
        """Addresses of the listeners."""
        return [one.address for one in self._engines]

    @property
    def hosts(self) -> list[str]:
        return [one.host for one in self._engines]

    def chosen(self, params: Mapping[str, Any]) -> str | None:
        """The sender for a request with these ``kv_transfer_params``; None if it is not configured.

        ``remote_host`` and ``remote_port`` are an engine's configured address, or its listener's; a port that
        is one engine's listener and another's HTTP server on that host is the listener. The host may be an
        address of the configured name. It may be spelt otherwise, or be absent, if no other engine has that
        port. A name in a request is not resolved: a client could make this process wait for it.
        """
        host, port = params.get("remote_host"), params.get("remote_port")
        if not host and not port:
            return self.addresses[0] if self._engines else None
        named = canonical_host(str(host)) if host else ""
        same_port = [
            [one for one in self._engines if str(one.listener) == str(port)],
            [one for one in self._engines if str(one.port) == str(port)],
        ]
        for engines in same_port:
            found = [one for one in engines if named in one.spellings]
            if found:
                return found[0].address
        for engines in same_port:
            others = list(dict.fromkeys(one.address for one in engines))
            if others:
                return others[0] if len(others) == 1 else None
        return None


@dataclasses.dataclass(frozen=True)
class _PrefillEngine:
    """A configured prefill engine: its HTTP server's address, its listener's port, and what it is called."""

    host: str
    port: int
    listener: int
    spellings: frozenset[str]
    """The host's name and addresses, as ``canonical_host`` gives them."""

    @property
    def address(self) -> str:
        """Address of the listener."""
        return with_port(self.host, self.listener)


def _spellings(host: str) -> frozenset[str]:
    try:
        addresses = numeric_hosts(host, "prefill_addr")
    except InvalidArgument:  # it may be started later: connecting resolves the name again
        addresses = []
    return frozenset(map(canonical_host, (host, *addresses)))


def _listener_port(host: str, port: int, offset: int) -> int:
    if not 0 < port + offset < 1 << 16:
        allowed = f"a port of an engine whose listener's, {offset} more, is 1 to 65535"
        raise InvalidArgument("address", with_port(host, port), allowed)
    return port + offset


@dataclasses.dataclass(frozen=True)
class PushAddresses:
    """Where an engine listens, where it connects, and from where it accepts requests of blocks.

    Engines are named by the addresses of their HTTP servers (``prefill_addr``, ``decode_addr``); a sender's
    listener has that server's port plus ``offset``.
    """

    listen_host: str
    """Empty: all addresses of both families."""
    listen_port: int
    transfer_host: str
    """Address at which this engine's memory is reached."""
    listeners: Listeners
    accepted: frozenset[str] | None
    """Hosts that may request blocks; None for every host."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], own_port: int) -> PushAddresses:
        """Derive the addresses from a connector's options and the port of the engine's own HTTP server.

        Raises:
            InvalidArgument: names the option.
        """
        offset = _offset_of(extra)
        listeners = Listeners(extra.get("prefill_addr", ""), offset)
        decodes = [host for host, _ in map(split_address, _listed(extra.get("decode_addr", "")))]
        accepted = frozenset(
            canonical_host(address) for host in decodes for address in numeric_hosts(host, "decode_addr")
        )
        peers = [*listeners.hosts, *decodes]
        own_host = str(extra.get("local_hostname", "")) or (host_towards(peers[0]) if peers else "127.0.0.1")
        if "listen_addr" in extra:
            host, port = split_address(str(extra["listen_addr"]))
        else:
            host = _listen_host(own_host, accepted)
            port = _listener_port(own_host, own_port, offset)
        return cls(host, port, own_host, listeners, accepted or None)

    @property
    def listener_host(self) -> str:
        """Host of the listener, as decode engines can name it."""
        return self.transfer_host if self.listen_host in ("", "0.0.0.0", "::") else self.listen_host

    def accepts(self, peer: str) -> bool:
        """Whether a request from ``peer`` (``host:port``) is accepted."""
        host = canonical_host(peer.rpartition(":")[0])
        return self.accepted is None or host in self.accepted or is_loopback(host)


def _listen_host(own_host: str, accepted: frozenset[str]) -> str:
    """Where a listener without ``listen_addr`` listens: beyond this host only for decodes that are named."""
    if is_loopback(own_host) and all(map(is_loopback, accepted)):
        return own_host
    if not accepted:
        return "127.0.0.1"
    named = [host for host in (canonical_host(own_host), *accepted) if not is_loopback(host)]
    families = {address.version for address in map(_address, named) if address is not None}
    if families == {4, 6}:
        return "" if has_ipv6() else "0.0.0.0"
    return "::" if families == {6} else "0.0.0.0"


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None  # a name


def _listed(addresses: str | Sequence[str]) -> list[str]:
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    return [str(address).strip() for address in parts if str(address).strip()]


def _offset_of(extra: Mapping[str, Any]) -> int:
    given = extra.get("listener_offset", LISTENER_OFFSET)
    if isinstance(given, bool) or not isinstance(given, int) or abs(given) >= 1 << 16:
        raise InvalidArgument("listener_offset", given, "a whole number between -65535 and 65535")
    return given


class Receiver:
    """The decoding end. All methods but the constructor run on its loop; no memory is registered twice."""

    def __init__(
        self,
        transfer: TransferEngine,
        layout: SlabLayout,
        digest: str,
        memory: SlabMemory,
        timeout_s: float,
        on_outcome: Callable[[PushOutcome], None] = lambda outcome: None,
        regions: Sequence[Region] | None = None,
    ) -> None:
        """``regions``: those of the memory, if it is registered with ``transfer``."""
        self._transfer, self._layout, self._digest, self._memory = transfer, layout, digest, memory
        self._timeout_s, self._on_outcome = timeout_s, on_outcome
        self._regions = transfer.register_all(memory.buffers) if regions is None else list(regions)
        self._generation = 0
        self._lock = asyncio.Lock()
        self._clients: dict[str, AsyncClient] = {}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def receive(self, wanted: BlockRequest, after: DeviceEvent | None = None) -> str:
        """Receive blocks. Returns "" on success, else a reason; nothing writes to the blocks afterwards.

        Nothing is written to them before ``after`` is reached.
        """
        await reached(after)
        async with self._lock:
            if not self._regions:
                self._register()
            generation, descriptor = self._generation, self._describe()
        first, strides = self._memory.description()
        take = PushRequest(
            wanted.transfer_id,
            self._digest,
            wanted.prompt,
            descriptor,
            first.astype("<u8").tobytes(),
            strides.astype("<u8").tobytes(),
            wanted.first_block,
            wanted.block_ids,
            self._timeout_s,
        )
        began = clock.monotonic()
        claim = Claim("receive", began + GREETING_S + GRACE_S)
        taken = PushResult("cancelled", has_begun=True)
        try:
            taken = await self._request(wanted.address, take, claim)
        finally:  # also when it is cancelled
            if claim.num_inside:
                if taken.reason and taken.has_begun:
                    await self._take_back(generation)
                claim.leave()
            claim.close()
        if taken.reason:
            log.warning("transfer_missed", transfer=wanted.transfer_id, reason=taken.reason)
            self._on_outcome(PushOutcome("recomputed", len(wanted.block_ids)))
        else:
            seconds = clock.monotonic() - began
            num_bytes = len(wanted.block_ids) * self._layout.object_bytes(self._layout.block_tokens)
            self._on_outcome(PushOutcome("received", len(wanted.block_ids), num_bytes, seconds))
        return str(taken.reason)

    async def _request(self, address: str, take: PushRequest, claim: Claim) -> PushResult:
        """The result, as far as it is known. From ``claim.enter`` on, the sender may write to the memory."""
        try:
            client = self._client(address)
            await client.call(PushProbe(), GREETING_S)
            if not claim.enter(clock.monotonic()):
                return PushResult("no time is left")
            taken: PushResult = await client.call(take, self._timeout_s + GRACE_S)
            return taken
        except MooncakeError as error:
            return PushResult(str(error), has_begun=bool(claim.num_inside))
        except Exception as error:  # a bug of ours is no reason to fail the engine's request
            log.exception("transfer_failed", transfer=take.transfer_id)
            return PushResult(type(error).__name__, has_begun=bool(claim.num_inside))

    def _describe(self) -> bytes:
        """The descriptor without the address for a newer one: a sender whose access was revoked stays out."""
        descriptor: SegmentDescriptor = self._transfer.describe()
        return msgspec.structs.replace(descriptor, handshake="").encode()

    async def _take_back(self, generation: int) -> None:
        """Revoke access to the memory for every sender that got its descriptor in ``generation``."""
        async with self._lock:
            if generation != self._generation:
                return  # another call has done it
            while self._regions:
                try:
                    await asyncio.to_thread(self._transfer.unregister, self._regions[-1])
                    self._regions.pop()
                except Exception as error:  # until this succeeds the blocks must not be reused
                    log.error("memory_kept", operation="receive", reason=str(error))
                    await asyncio.sleep(LOG_EVERY_S)
            self._generation += 1
            self._register()

    def _register(self) -> None:
        try:
            self._regions = self._transfer.register_all(self._memory.buffers)
        except MooncakeError as error:  # the next ``receive`` tries again
            log.error("memory_not_registered", reason=str(error))

    def _client(self, address: str) -> AsyncClient:
        if address not in self._clients:
            self._clients[address] = AsyncClient(
                address, (PushResult,), "prefill", is_patient=False, servers=TRUSTED
            )
        return self._clients[address]
