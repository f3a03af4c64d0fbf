"""Handing KV blocks from the engine that computed a prompt straight into the memory of the one that decodes.

Both ends of a small protocol. The decoding end (``Receiver``) has allocated blocks for a request that has a
``transfer_id``, and asks the computing end's listener (``Sender``) for them: ``PushRequest`` says where its
memory lies, which blocks, and what they must mean. When the prompt with that ``transfer_id`` is computed,
before or after, the sender writes them there and answers ``Taken``; or it answers why not. Every wait has a
deadline.

Whoever gets no answer, or hears that a write was broken off, can't know what is still on its way. So the
receiver then takes its memory back from everybody (registers it anew: nothing that addresses the old
registration touches it any more) before it says that the blocks are free to be computed. At both ends a
``Claim`` says when blocks are free: the sender's when its write has ended, the receiver's when it was told
that all is written, or has taken its memory back. Where that fails it is tried until it succeeds.

Which requests these are, the engine's shell knows; nothing here knows an engine or a tensor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mooncake import clock
from mooncake.connectors.claim import LOG_EVERY_S, Claim
from mooncake.connectors.memory import SlabMemory, StagedBlocks
from mooncake.errors import MooncakeError
from mooncake.kvlayout import SlabLayout
from mooncake.log import get_logger
from mooncake.rpc import AsyncClient, Call, RpcServer
from mooncake.security import EVERYBODY, TRUSTED, Access
from mooncake.transfer import TransferEngine
from mooncake.transfer.descriptor import SegmentDescriptor, decode_descriptor

log = get_logger(__name__)

GREETING_S = 5.0
"""Who does not answer in time is not there."""

MAX_TIMEOUT_S = 3600.0
"""The longest that a receiver may ask a sender to take."""

GRACE_S = 2.0
"""What an answer may take beyond the sender's own deadline."""


class PushRequest(msgspec.Struct, frozen=True, array_like=True, tag="kv_take"):
    """Write the blocks of this transfer into this memory."""

    transfer_id: str
    layout: str
    """Digest of whose numbers and in which shape (``ForeignIdentity.digest``)."""
    prompt: bytes
    """Digest of the tokens the blocks are of."""
    descriptor: bytes
    first_addresses: bytes
    """Little-endian u64 [layers, slabs], as in ``SlabMemory``."""
    strides: bytes
    """Little-endian u64 [layers]."""
    first_block: int
    """Of the prompt's blocks, the first that is wanted; those before it are there already."""
    block_ids: list[int]
    timeout_s: float


class PushProbe(msgspec.Struct, frozen=True, array_like=True, tag="kv_greet"):
    """Are you there? Who fails here was told of no memory."""


class PushResult(msgspec.Struct, frozen=True, array_like=True, tag="kv_taken"):
    """How it ended."""

    reason: str = ""
    """Why the blocks are not there; empty: they are."""
    has_begun: bool = False
    """Something was written."""


ACCESS = Access({PushRequest: TRUSTED, PushProbe: EVERYBODY})
"""Who may ask a prefill engine, where peers have to prove who they are: engines, of no tenant."""


@dataclasses.dataclass(frozen=True)
class BlockOffer:
    """Blocks that are computed and wait to be taken."""

    transfer_id: str
    prompt: bytes
    block_ids: list[int]


@dataclasses.dataclass(frozen=True)
class PushOutcome:
    """What became of some blocks at one end, for whoever counts."""

    outcome: str
    """``pushed``, ``refused``, ``expired``, ``received`` or ``recomputed``."""
    num_blocks: int
    num_bytes: int = 0
    seconds: float | None = None
    """What it took, where they were moved."""


class Sender:
    """The computing end. All but the constructor on its loop.

    Args:
        hold_s: how long a computed prompt waits for whoever takes it.
        ended: called with the ``transfer_id`` of an offer whose blocks are not needed any more.
        tell: called with what became of blocks, before ``ended`` is.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        layout: SlabLayout,
        digest: str,
        memory: SlabMemory,
        hold_s: float,
        ended: Callable[[str], None],
        tell: Callable[[PushOutcome], None] = lambda told: None,
    ) -> None:
        self._transfer, self._layout, self._digest, self._memory = transfer, layout, digest, memory
        self._hold_s, self._ended, self._tell = hold_s, ended, tell
        self._offers: dict[str, asyncio.Future[BlockOffer | str]] = {}
        """What is offered, or why it won't be; a future that is not done is waited for by somebody."""
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

    def offer(self, offer: BlockOffer) -> None:
        """These blocks are computed; nobody else writes to them until ``ended`` is called."""
        if not self._settle(offer.transfer_id, offer):
            log.warning("transfer_refused", transfer=offer.transfer_id, reason="its id was used before")
            self._ended(offer.transfer_id)

    def drop(self, transfer_id: str, reason: str) -> None:
        """It won't be offered."""
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
                self._tell(PushOutcome("expired", len(offer.block_ids)))
                log.warning("transfer_expired", transfer=transfer_id, held_s=self._hold_s)
                self._ended(transfer_id)

    async def _take(self, take: PushRequest, call: Call) -> PushResult:
        if not (math.isfinite(take.timeout_s) and 0 < take.timeout_s <= MAX_TIMEOUT_S):
            allowed = f"more than 0, at most {MAX_TIMEOUT_S:g}"
            return self._refused(take, f"timeout_s is {take.timeout_s:g}; allowed: {allowed}")
        deadline = clock.monotonic() + take.timeout_s
        if take.layout != self._digest:
            return self._refused(take, f"blocks of layout {self._digest} are none of layout {take.layout}")
        awaited = self._awaited(take.transfer_id)
        try:
            async with asyncio.timeout_at(deadline):
                found = await asyncio.shield(awaited)
        except TimeoutError:
            return self._refused(take, f"not computed within {take.timeout_s:g} s")
        finally:
            if not awaited.done() and self._offers.get(take.transfer_id) is awaited:
                del self._offers[take.transfer_id]
        if isinstance(found, str):
            return self._refused(take, found)
        if self._offers.get(take.transfer_id) is not awaited:
            return self._refused(take, "somebody else has taken it")
        # From here on it is this call's: it neither expires nor is taken twice.
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
        shape = (self._layout.num_layers, self._layout.num_slabs)
        first = np.frombuffer(take.first_addresses, dtype="<u8")
        strides = np.frombuffer(take.strides, dtype="<u8")
        if (
            len(source) != len(take.block_ids)
            or first.size != shape[0] * shape[1]
            or strides.size != shape[0]
        ):
            return self._refused(take, "the blocks don't fit each other")
        target = SlabMemory((), first.reshape(shape).astype(np.uint64), strides.tolist())
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
                claim.leave()  # also when it is cancelled, it has ended by now
        except MooncakeError as error:
            self._tell(PushOutcome("refused", len(take.block_ids)))
            log.warning("transfer_failed", transfer=take.transfer_id, reason=str(error))
            return PushResult(str(error), has_begun=True)
        seconds = clock.monotonic() - began
        self._tell(PushOutcome("pushed", len(source), int(lengths.sum()), seconds))
        return PushResult()

    def _columns(self, memory: SlabMemory, block_ids: Sequence[int]) -> Any:
        held, members = StagedBlocks(list(block_ids)), range(len(block_ids))
        layers = range(self._layout.num_layers)
        return np.concatenate([memory.addresses(held, layer, members) for layer in layers])

    def _refused(self, take: PushRequest, reason: str) -> PushResult:
        self._tell(PushOutcome("refused", len(take.block_ids)))
        log.warning("transfer_refused", transfer=take.transfer_id, reason=reason)
        return PushResult(reason)


@dataclasses.dataclass(frozen=True)
class BlockRequest:
    """What a decoding request wants, and who has it."""

    transfer_id: str
    prompt: bytes
    first_block: int
    block_ids: list[int]
    address: str
    """Of the sender's listener."""


class Listeners:
    """The prefill engines' listeners that a decode engine takes blocks from.

    Whoever is asked is told where the decode engine's KV memory lies and how to write to it, so a request may
    choose among the addresses of the configuration and name no other.
    """

    def __init__(self, configured: str | Sequence[str]) -> None:
        """``configured``: addresses ``host:port``; text holds one, or several with commas between them."""
        words = configured.split(",") if isinstance(configured, str) else configured
        self.addresses = [str(word).strip() for word in words if str(word).strip()]

    def chosen(self, params: Mapping[str, Any]) -> str | None:
        """Who has the blocks of a request with these ``kv_transfer_params``; None for a stranger."""
        host, port = params.get("remote_host"), params.get("remote_port")
        if not host and not port:
            return self.addresses[0] if self.addresses else None
        named = f"{host}:{port}"
        return named if named in self.addresses else None


class Receiver:
    """The decoding end. All but the constructor on its loop; no memory is registered twice."""

    def __init__(
        self,
        transfer: TransferEngine,
        layout: SlabLayout,
        digest: str,
        memory: SlabMemory,
        timeout_s: float,
        tell: Callable[[PushOutcome], None] = lambda told: None,
    ) -> None:
        self._transfer, self._layout, self._digest, self._memory = transfer, layout, digest, memory
        self._timeout_s, self._tell = timeout_s, tell
        self._regions = transfer.register_all(memory.buffers)
        self._generation = 0
        self._lock = asyncio.Lock()
        self._clients: dict[str, AsyncClient] = {}

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def receive(self, wanted: BlockRequest) -> str:
        """Empty when the blocks are there; else why not, and then nothing writes to them any more."""
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
        taken = PushResult("given up", has_begun=True)
        try:
            taken = await self._asked(wanted.address, take, claim)
        finally:  # also when it is cancelled
            if claim.num_inside:
                if taken.reason and taken.has_begun:
                    await self._take_back(generation)
                claim.leave()
            claim.close()
        if taken.reason:
            log.warning("transfer_missed", transfer=wanted.transfer_id, reason=taken.reason)
            self._tell(PushOutcome("recomputed", len(wanted.block_ids)))
        else:
            seconds = clock.monotonic() - began
            num_bytes = len(wanted.block_ids) * self._layout.object_bytes(self._layout.block_tokens)
            self._tell(PushOutcome("received", len(wanted.block_ids), num_bytes, seconds))
        return str(taken.reason)

    async def _asked(self, address: str, take: PushRequest, claim: Claim) -> PushResult:
        """How it ended, as far as that is known. From ``claim.enter`` on, somebody knows of the memory."""
        try:
            client = self._client(address)
            await client.call(PushProbe(), GREETING_S)
            if not claim.enter(clock.monotonic()):
                return PushResult("no time is left")
            taken: PushResult = await client.call(take, self._timeout_s + GRACE_S)
            return taken
        except MooncakeError as error:
            return PushResult(str(error), has_begun=bool(claim.num_inside))
        except Exception as error:  # a mistake of ours is no reason to fail the engine's request
            log.exception("transfer_failed", transfer=take.transfer_id)
            return PushResult(type(error).__name__, has_begun=bool(claim.num_inside))

    def _describe(self) -> bytes:
        """Without the place to ask for a newer one: a sender that was shut out stays out."""
        descriptor: SegmentDescriptor = self._transfer.describe()
        return msgspec.structs.replace(descriptor, handshake="").encode()

    async def _take_back(self, generation: int) -> None:
        """Nothing that was told of the memory in ``generation`` can write to it any more."""
        async with self._lock:
            if generation != self._generation:
                return  # somebody did it since
            while self._regions:
                try:
                    await asyncio.to_thread(self._transfer.unregister, self._regions[-1])
                    self._regions.pop()
                except Exception as error:  # until then the blocks are nobody's
                    log.error("memory_kept", operation="receive", reason=str(error))
                    await asyncio.sleep(LOG_EVERY_S)
            self._generation += 1
            self._register()

    def _register(self) -> None:
        try:
            self._regions = self._transfer.register_all(self._memory.buffers)
        except MooncakeError as error:  # who receives next tries again
            log.error("memory_not_registered", reason=str(error))

    def _client(self, address: str) -> AsyncClient:
        if address not in self._clients:
            self._clients[address] = AsyncClient(
                address, (PushResult,), "prefill", is_patient=False, servers=TRUSTED
            )
        return self._clients[address]
