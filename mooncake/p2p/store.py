# SPDX-License-Identifier: Apache-2.0
"""Peer of the P2P store: serves the versions that this process has, and loads others from peers.

There is no master. A peer is given addresses of others, or a metadata service where they find each other;
each answers which versions it has and which peers it knows. A version is immutable and named by the digest of
its manifest; a name and a number lead to it. A process that loads a version serves the chunks that it has,
from the first one on. Chunks move through a transfer engine, from memory that peers may only read; messages
go over RPC.

One event loop uses an object. Digests and files are handled in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Counter, Gauge

from mooncake import clock
from mooncake.driver import Driver
from mooncake.errors import (
    InvalidArgument,
    MooncakeError,
    PeerLost,
    ProtocolError,
    Refusal,
    StorageError,
    Unavailable,
)
from mooncake.log import get_logger
from mooncake.metrics import registry
from mooncake.p2p import messages as m
from mooncake.p2p import upload as u
from mooncake.p2p.chunk_reuse import (
    ChunkAssembly,
    chunk_writer,
    is_whole,
    make_delta,
    make_delta_folder,
    remove_deltas,
    reuse_chunks,
)
from mooncake.p2p.content import BufferContent, Content, FolderContent, file_states, find_files, make_manifest
from mooncake.p2p.delta import apply_delta
from mooncake.p2p.download import DownloadLimits
from mooncake.p2p.held_version import HeldVersion
from mooncake.p2p.manifest import Manifest, check_version_name, next_version_number
from mooncake.p2p.messages import DeltaInfo, LoadProgress, VersionInfo, valid_versions
from mooncake.p2p.partial_folder import PartialFolder
from mooncake.p2p.peer_link import PeerDirectory, PeerLinks, fetch_manifest
from mooncake.p2p.settings import P2pSettings
from mooncake.p2p.slots import Slots
from mooncake.p2p.swarm_load import SwarmLoad
from mooncake.p2p.swarm_peers import SwarmPeers
from mooncake.p2p.token_bucket import TokenBucket
from mooncake.rpc import Call, Connection, Limits, RpcServer
from mooncake.rpc.server import Handler
from mooncake.rpc.wire import Message
from mooncake.security import NODES_AND_ADMINS, Identity, check_address, process_identity
from mooncake.transfer import TransferEngine
from mooncake.transfer.host import reachable_host, with_port

log = get_logger(__name__)

ASK_S = 5.0
"""Time for a peer to answer a question; manifests may take longer."""
BURST_BYTES = 4 << 20
"""Bytes that a rate limit allows at once."""
LEAVE_S = 1.0
MAX_REQUEST_BYTES = 1 << 20
"""Requests are small; only replies have manifests."""
MAX_WATCH_S = 60.0
MAX_BASES = 2
"""Earlier versions that a new one gets a delta from."""
DELTA_S = 10.0
DELTA_BYTES_S = 4 << 20
"""A delta has this time, and this rate, to come in; then the chunks are loaded instead."""
MAX_DELTA_SHARE = 0.5
"""A delta is used if it has at most this share of the bytes that chunks alone would take."""

Progress = Callable[[LoadProgress], None]

SENT = Counter("mooncake_p2p_sent_bytes", "Bytes of chunks made ready for peers", registry=registry)
DECLINED = Counter(
    "mooncake_p2p_declined_requests", "Requests for chunks that were declined", ["reason"], registry=registry
)
REUSED = Counter(
    "mooncake_p2p_reused_bytes",
    "Bytes of a load that came from versions that were here, directly or by a delta",
    registry=registry,
)
VERSIONS = Gauge(
    "mooncake_p2p_versions", "Versions that this peer serves, whole or in part", registry=registry
)


class P2PStore:
    """One peer. Use it as an asynchronous context manager, or call ``start`` and ``close``.

    Args:
        settings: see ``P2pSettings``.
        state_dir: folder for deltas, of this store alone; by default a temporary one. A start and ``close``
            empty it: only versions are found again, never deltas.
        identity: identity to use instead of the process's.
        commands: handlers of further messages (``daemon.py``).
    """

    def __init__(
        self,
        settings: P2pSettings | None = None,
        *,
        state_dir: Path | None = None,
        identity: Identity | None = None,
        commands: Mapping[type[Message], Handler] | None = None,
    ) -> None:
        self.settings = settings or P2pSettings(port=0)
        self._identity = identity or process_identity()
        self._state_dir = state_dir
        self._parts = contextlib.AsyncExitStack()
        """What a start has made, the whole of it or a part."""
        self._held: dict[str, HeldVersion] = {}
        self._loading: dict[Path, tuple[HeldVersion, SwarmLoad | None]] = {}
        settings = self.settings
        self.peers = SwarmPeers(settings.peers)
        self._limits = DownloadLimits(
            max_requests=settings.num_slots, deadline_s=settings.chunk_s, stall_s=settings.stall_s
        )
        self._receive_bucket = TokenBucket(settings.limit_receive_rate_bytes, BURST_BYTES)
        self._lease_s = min(m.MAX_LEASE_S, max(1.0, settings.chunk_s))
        self._uploads = u.UploadQueue(
            settings.num_slots, TokenBucket(settings.limit_rate_bytes, BURST_BYTES), self._lease_s
        )
        self._driver: Driver[u.UploadEvent, u.UploadEffect] = Driver(self._uploads, self._perform)
        self._asked: dict[int, asyncio.Future[u.SendChunk | Refusal]] = {}
        self._request_ids = itertools.count(1)
        self._requesters: dict[Connection, int] = {}
        self._filling: set[asyncio.Task[bool]] = set()
        self._removing: set[asyncio.Task[None]] = set()
        self._holders: dict[str, dict[str, None]] = {}
        """Peers that said they have a version, or a delta, by digest; of the last ``find``."""
        self._server = RpcServer(
            {
                m.AskVersions: self._ask_versions,
                m.AskManifest: self._ask_manifest,
                m.AskSegment: self._ask_segment,
                m.WatchVersion: self._watch_version,
                m.FetchChunk: self._fetch_chunk,
                m.ReturnSlot: self._return_slot,
                m.AnnounceEnd: self._leave,
                **(commands or {}),
            },
            on_lost=self._connection_lost,
            access=m.ACCESS,
            identity=self._identity,
            limits=Limits(max_body_bytes=MAX_REQUEST_BYTES),
            name="p2p",
            is_peer=True,
        )
        self._publisher: asyncio.Task[None] | None = None
        self._directory: PeerDirectory | None = None
        self._is_open = False
        self.address = ""
        """Where other peers reach this one (``host:port``); empty before ``start``."""

    async def __aenter__(self) -> P2PStore:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Listen for peers.

        Raises:
            InvalidArgument: other hosts can reach the address, and no authentication is configured.
            AddressInUse: a port is taken.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        settings = self.settings
        check_address(settings.host, self._identity)
        if self._state_dir is None:
            temporary = tempfile.TemporaryDirectory(prefix="mooncake-p2p-")
            self._state_dir = Path(self._parts.enter_context(temporary))
        await asyncio.to_thread(remove_deltas, self._state_dir)  # of a process that was killed
        self._parts.push_async_callback(asyncio.to_thread, remove_deltas, self._state_dir)
        host = settings.advertise_host or reachable_host(settings.host)
        transfer = settings.transfer.for_role(settings.host, host, tcp_port=settings.transfer_port)
        check_address(transfer.listen_host, self._identity)
        transfer = dataclasses.replace(transfer, transports=settings.network_transports)
        self.engine = TransferEngine(transfer, identity=self._identity, admitted=NODES_AND_ADMINS)
        self._parts.push_async_callback(asyncio.to_thread, self.engine.close)
        self._sending = Slots(self.engine, settings.num_slots, is_shown=True)
        self._receiving = Slots(self.engine, settings.num_slots, is_shown=False)
        self._descriptor = self.engine.describe().encode()
        self.links = PeerLinks(self.engine, self._identity)
        self._parts.push_async_callback(self.links.close)
        port = await self._server.start(settings.host, settings.port)
        self.address = with_port(host, port)
        self.peers.name_own(self.address)
        self._is_open = True
        if settings.metadata:
            self._directory = PeerDirectory(
                settings.metadata, settings.metadata_cluster, self._identity, self.peers
            )
            self._publisher = asyncio.create_task(self._directory.publish())

    async def close(self) -> None:
        """Stop serving and loading; files stay as they are. Loads under way raise Unavailable."""
        self._is_open = False
        await asyncio.gather(*(load.close() for _, load in self._loading.values() if load is not None))
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.gather(self._publisher, return_exceptions=True)
        await self._server.close()
        await asyncio.gather(*self._filling, return_exceptions=True)
        self._driver.close()
        if self.address:
            others = self.peers.recent(clock.monotonic(), m.MAX_NAMED_PEERS)
            await asyncio.gather(*(self._leave_peer(one) for one in others))
            VERSIONS.set(0)
        for held in self._held.values():
            held.content.close()
        self._held.clear()
        await asyncio.gather(*self._removing, return_exceptions=True)
        await self._parts.aclose()

    @property
    def _deltas_dir(self) -> Path:
        assert self._state_dir is not None, "it was not started"
        return self._state_dir

    # Versions of this peer

    @property
    def held(self) -> list[HeldVersion]:
        """The versions that this peer serves, without deltas."""
        return [one for one in self._held.values() if one.name]

    def num_copies_sent(self, digest: str) -> int:
        """Whole copies of a version that peers read from this one: from 1 on, they can go on without it."""
        return self._uploads.num_copies(digest)

    async def register(
        self,
        name: str,
        folder: Path,
        *,
        number: int = 0,
        base: str = "",
        allowed: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> VersionInfo:
        """Serve a folder as a version of ``name``. Its files must not change while they are served.

        A folder with the same contents as a version that is served already is that version.

        Args:
            number: the version's number; 0 takes the next one after those that this peer and its peers know.
            base: digest of a version here to make a delta from; "" takes the latest two of the name.
            allowed: folder in which the files must lie, wherever links lead.
            progress: is called in a thread with bytes done and bytes in all, while digests are computed.

        Raises:
            InvalidArgument: the name or the folder can't be used, or the base is not here.
            StorageError: a file can't be read, or changed meanwhile.
            Unavailable: this peer is closed.
        """
        self._check_open()
        check_version_name(name, number)
        if base and (base not in self._held or not self._held[base].is_complete):
            raise InvalidArgument("base", base, "the digest of a whole version that this peer has")

        def scanned() -> tuple[Manifest, FolderContent]:
            items = find_files(folder, allowed)
            states = file_states(folder, items)
            content = FolderContent(folder, items, states, allowed=allowed)
            manifest = make_manifest("folder", items, content, progress)
            if file_states(folder, items) != states:
                raise StorageError(f"{folder} changed while it was read; register it when it is complete")
            return manifest, content

        manifest, content = await asyncio.to_thread(scanned)
        return await self._registered(name, number, base, manifest, content, folder)

    async def register_buffers(
        self, name: str, buffers: Mapping[str, Any], *, number: int = 0
    ) -> VersionInfo:
        """Serve memory of this process: arrays, tensors on the CPU, anything with the buffer protocol.

        It must not change until the version is dropped; a chunk that changed is not sent.

        Raises:
            InvalidArgument: a buffer is not contiguous, or a name can't be used.
            Unavailable: this peer is closed.
        """
        self._check_open()
        check_version_name(name, number)
        content = BufferContent(buffers)
        manifest = await asyncio.to_thread(make_manifest, "buffers", content.items, content)
        return await self._registered(name, number, "", manifest, content, None)

    async def _registered(
        self, name: str, number: int, base: str, manifest: Manifest, content: Content, folder: Path | None
    ) -> VersionInfo:
        deltas: set[HeldVersion] = set()
        try:
            found = self._same(name, manifest)
            if found is not None:
                content.close()
                return found.info()
            is_next = not number
            if is_next:
                known = await self.list(name, is_exact=True)
                number = next_version_number(info.number for info, _ in known)
            have = np.ones(len(manifest.chunks), dtype=np.bool_)
            held = HeldVersion(name, number, manifest, content, have, folder=folder)
            await self._make_deltas(held, base, deltas)
            self._check_open()
            found = self._same(name, manifest)  # registered meanwhile, too
            if found is not None:
                content.close()
                self._discard(deltas)
                return found.info()
        except BaseException:
            content.close()
            self._discard(deltas)
            raise
        if is_next:  # others were registered under this name meanwhile, with the same number
            taken = (one.number for one in self.held if one.name == name)
            held.number = max(number, next_version_number(taken))
        self._hold(held)
        for delta in deltas:
            if delta.manifest.digest in self._held:  # two pairs of versions may have equal deltas
                self._discard([delta])
            else:
                self._hold(delta)
        log.info(
            "p2p_registered", name=name, number=held.number, digest=manifest.digest, bytes=manifest.size_bytes
        )
        return held.info()

    def _same(self, name: str, manifest: Manifest) -> HeldVersion | None:
        """The version here with these contents.

        Raises:
            InvalidArgument: it has another name, or is being loaded.
        """
        found = self._held.get(manifest.digest)
        if found is None:
            return None
        if found.name != name:
            raise InvalidArgument(
                "name", name, f"{found.name}, under which this peer has these contents; drop that one first"
            )
        if not found.is_complete:
            raise InvalidArgument(
                "name", name, "contents that are not being loaded; wait until they are here"
            )
        return found

    def _check_open(self) -> None:
        if not self._is_open:
            raise Unavailable("this peer was not started, or is closed; start another one")

    def restore(self, held: HeldVersion) -> None:
        """Serve a version that was found on disk at a start."""
        self._hold(held)

    async def drop(self, name: str, digest: str = "", *, delete: bool = False) -> list[str]:
        """Stop serving versions of ``name``: the one with ``digest``, or all. Returns their digests.

        Args:
            delete: also delete their folders, if they were loaded from peers.

        Raises:
            InvalidArgument: ``delete`` for a folder that was registered, which is not this store's.
        """
        found = [
            one
            for one in self._held.values()
            if one.name == name and name and digest in ("", one.manifest.digest) and one.is_complete
        ]
        for held in found:
            if delete and not held.is_loaded:
                raise InvalidArgument(
                    "delete", str(held.folder or held.name), "loaded versions; delete others yourself"
                )
        for held in found:
            self._release(held)
        await asyncio.gather(*self._removing)
        for held in found:
            if delete and held.folder is not None:
                await asyncio.to_thread(shutil.rmtree, held.folder, ignore_errors=True)
            log.info("p2p_dropped", name=name, digest=held.manifest.digest, deleted=delete)
        return [held.manifest.digest for held in found]

    def _hold(self, held: HeldVersion) -> None:
        self._held[held.manifest.digest] = held
        self._uploads.add(held.manifest.digest, [chunk.size_bytes for chunk in held.manifest.chunks])
        VERSIONS.set(len(self.held))

    def _release(self, held: HeldVersion) -> None:
        self._withdraw(held)
        held.content.close()
        self._release_deltas()

    def _withdraw(self, held: HeldVersion) -> None:
        """Stop serving a version; what is left of its content can still be read here."""
        if self._held.get(held.manifest.digest) is not held:  # another one with the same contents is
            return
        del self._held[held.manifest.digest]
        for effect in self._uploads.remove(held.manifest.digest):
            self._perform(effect)
        held.touch()
        VERSIONS.set(len(self.held))

    def _release_deltas(self) -> None:
        """Release the deltas that make no version of this peer, and delete them."""
        wanted = {delta.digest for one in self.held for delta in one.deltas}
        unused = [one for digest, one in self._held.items() if not one.name and digest not in wanted]
        for one in unused:
            self._withdraw(one)
        self._discard(unused)

    def _discard(self, deltas: Iterable[HeldVersion]) -> None:
        """Delete deltas. A thread that has begun to read a chunk ends with its bytes, a later one fails."""
        for one in deltas:
            one.content.close()
            assert one.folder is not None
            self._remove(one.folder.parent)

    def _remove(self, folder: Path) -> None:
        """Begin to delete the folder of a delta."""
        task = asyncio.create_task(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    # Versions of peers

    async def list(self, prefix: str = "", *, is_exact: bool = False) -> list[tuple[VersionInfo, str]]:
        """Versions that this peer and its peers have, with the address of who has them.

        Raises:
            AccessDenied: a peer refuses this process's credential.
            Unavailable: this peer is closed.
        """
        self._check_open()
        own = [(one.info(), self.address) for one in self.held if _matches(one.name, prefix, is_exact)]
        asked: set[str] = set()
        found: list[tuple[VersionInfo, str]] = []
        # Peers that peers name are asked, too, in a few rounds.
        for _ in range(3):
            addresses = [one for one in self.peers.usable(clock.monotonic()) if one not in asked]
            if not addresses:
                break
            asked.update(addresses)
            replies = await asyncio.gather(*(self._ask_peer(one, prefix, is_exact) for one in addresses))
            for address, reply in zip(addresses, replies, strict=True):
                if reply is not None:
                    found += [(info, address) for info in valid_versions(reply.versions[: m.MAX_LISTED])]
                    for other in reply.peers[: m.MAX_NAMED_PEERS]:
                        self.peers.add(other, clock.monotonic())
        return own + [one for one in found if _matches(one[0].name, prefix, is_exact)]

    async def _ask_peer(self, address: str, prefix: str, is_exact: bool) -> m.Versions | None:
        try:
            reply = await self.links.to(address).ask(m.AskVersions(prefix, is_exact, self.address), ASK_S)
        except (MooncakeError, OSError, ValueError) as error:
            self.peers.failed(address, clock.monotonic(), str(error))
            log.info("p2p_peer_lost", peer=address, reason=str(error))
            await self.links.drop(address)
            return None
        self.peers.answered(address, clock.monotonic())
        return reply if isinstance(reply, m.Versions) else None

    async def find(self, name: str, digest: str = "", *, number: int = 0) -> VersionInfo | None:
        """The version of ``name`` with the highest number, or with ``digest``, or with ``number``; or None.

        Raises:
            PeerLost: no peer answers.
            InvalidArgument: several versions have that number; the digest has to be given.
        """
        check_version_name(name)
        if self._directory is not None:
            await self._directory.refresh()
        listed = await self.list(name, is_exact=True)
        now = clock.monotonic()
        if not listed and len(self.peers) and not self.peers.recent(now, 1):
            raise PeerLost(f"find {name}: no peer answers; check the addresses and that they are running")
        found: dict[str, VersionInfo] = {}
        holders: dict[str, dict[str, None]] = {}
        for info, address in listed:
            if digest in ("", info.digest) and number in (0, info.number):
                for one in (info.digest, *(delta.digest for delta in info.deltas)):
                    holders.setdefault(one, {})[address] = None
                found[info.digest] = m.merged(found.get(info.digest, info), info)
        self._holders = holders
        if not found:
            return None
        highest = max(info.number for info in found.values())
        best = [info for info in found.values() if info.number == highest]
        if len(best) > 1:
            digests = ", ".join(info.digest for info in best)
            raise InvalidArgument("version", f"{name} {highest}", f"one of the digests {digests}")
        return best[0]

    async def get(
        self,
        name: str,
        folder: Path,
        *,
        digest: str = "",
        number: int = 0,
        progress: Progress | None = None,
    ) -> VersionInfo | None:
        """Load a version into ``folder``, which must not exist, and serve it from then on.

        The folder has its name only when it is whole. A load that was interrupted goes on where it was.
        Returns None when no peer has such a version.

        Args:
            digest, number: which version; by default the one with the highest number.
            progress: is called several times a second.

        Raises:
            PeerLost: no peer answers.
            Unavailable: no chunk came for ``stall_s``: the peers that are left lack some.
            InvalidArgument: the folder exists, or another process loads into it.
            OutOfSpace, StorageError: the disk refuses.
            ProtocolError: every peer sent a wrong manifest.
        """
        info = await self.find(name, digest, number=number)
        if info is None:
            return None
        held = self._held.get(info.digest)
        if held is not None and not held.is_complete:
            raise InvalidArgument("version", info.digest, "one that is not being loaded by this process")
        manifest = await self._manifest(info.digest)
        if manifest.kind != "folder":
            raise InvalidArgument("name", name, "a version of files; this one is of buffers (get_buffers)")
        loaded = await self._load_folder(info, manifest, folder, progress)
        if held is not None:  # it was here before, in another folder, and stays so
            return held.info()
        return loaded.info()

    async def get_buffers(
        self,
        name: str,
        buffers: Mapping[str, Any],
        *,
        digest: str = "",
        number: int = 0,
        progress: Progress | None = None,
    ) -> VersionInfo | None:
        """Load a version of buffers into buffers of the same names and sizes, and serve it from then on.

        Versions that this peer has in the same memory are no longer served, and are what the new one is made
        from as far as possible. A version that is in these buffers already is compared with its digests, and
        only wrong chunks are loaded. One that is in others stays there, and is copied.

        The buffers' content is undefined if this raises. Returns None when no peer has such a version.

        Raises:
            InvalidArgument: names or sizes differ from those of the version, a buffer is read-only, or the
                version, or any other one into this memory, is being loaded.
            PeerLost, Unavailable, ProtocolError: as for ``get``.
        """
        info = await self.find(name, digest, number=number)
        if info is None:
            return None
        manifest = await self._manifest(info.digest)
        content = BufferContent(buffers, is_writable=True)
        wanted = {item.name: item.size_bytes for item in manifest.items}
        given = {item.name: item.size_bytes for item in content.items}
        if manifest.kind != "buffers" or wanted != given:
            raise InvalidArgument("buffers", given, f"buffers with these sizes in bytes: {wanted}")
        held = self._held.get(info.digest)
        if held is not None and held.is_complete and content.is_same_memory(held.content):
            is_there = await asyncio.to_thread(is_whole, manifest, content)
            if is_there and self._held.get(info.digest) is held:
                for chunk in np.flatnonzero(~held.have):  # found to be damaged, and repaired since
                    held.add(int(chunk))
                return held.info()
        return await self._load_buffers(info, manifest, content, progress)

    async def _load_buffers(
        self, info: VersionInfo, manifest: Manifest, content: BufferContent, progress: Progress | None
    ) -> VersionInfo:
        self._check_open()
        current = self._held.get(info.digest)
        if current is not None and not current.is_complete:
            raise InvalidArgument("version", info.digest, "one that this process is not loading already")
        if any(content.overlaps(one.content) for one, _ in self._loading.values()):
            raise InvalidArgument("buffers", info.name, "memory that nothing is being loaded into")
        have = np.zeros(len(manifest.chunks), dtype=np.bool_)
        held = HeldVersion(
            info.name, info.number, manifest, content, have, is_loaded=True, deltas=info.deltas
        )
        held.is_complete = False
        overwritten = [one for one in self._held.values() if content.overlaps(one.content)]
        for one in overwritten:
            self._withdraw(one)
            log.info("p2p_overwritten", name=one.name, digest=one.manifest.digest)
        if current is not None:
            held.revision = current.revision + 1  # for those who watch
        is_first = info.digest not in self._held
        if is_first:
            self._hold(held)
        self._release_deltas()
        key = Path(f"<{info.name} {next(self._request_ids)}>")
        try:
            await self._fill(held, lambda chunk: None, key, progress, overwritten)
        except BaseException:
            self._release(held)
            raise
        finally:
            for one in overwritten:
                one.content.close()
        content.finish()
        held.is_complete = True
        held.touch()
        if not is_first:
            content.close()
        return held.info()

    def progress_of(self, folder: Path) -> LoadProgress | None:
        """How far the load into ``folder`` is; None when there is none under way."""
        found = self._loading.get(folder)
        return None if found is None else _progress(*found)

    # Loads

    async def _load_folder(
        self, info: VersionInfo, manifest: Manifest, folder: Path, progress: Progress | None
    ) -> HeldVersion:
        if folder in self._loading:
            raise InvalidArgument("folder", str(folder), "a folder that nothing is being loaded into")
        opening = asyncio.create_task(asyncio.to_thread(PartialFolder, folder, manifest))
        try:
            partial = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)  # the thread goes on, and takes the lock
            raise
        held = HeldVersion(
            info.name,
            info.number,
            manifest,
            partial.content,
            partial.have,
            folder=folder,
            is_loaded=True,
            deltas=info.deltas,
        )
        held.is_complete = False
        current = self._held.get(manifest.digest)
        if current is not None and not current.is_complete:
            await asyncio.to_thread(partial.close)
            raise InvalidArgument("version", info.digest, "one that is not being loaded by this process")
        is_first = current is None
        if is_first:
            self._hold(held)
        try:
            await self._fill(held, partial.record, folder, progress)
            await asyncio.to_thread(partial.finish)
        except BaseException:
            if is_first:
                self._release(held)
            await asyncio.to_thread(partial.close)
            raise
        held.is_complete = True
        held.touch()
        if not is_first:
            partial.content.close()
            self._release_deltas()
        log.info("p2p_loaded", name=info.name, number=info.number, digest=info.digest, folder=str(folder))
        return held

    async def _fill(
        self,
        held: HeldVersion,
        note: Callable[[int], None],
        folder: Path,
        progress: Progress | None,
        overwritten: Sequence[HeldVersion] = (),
    ) -> None:
        """Bring every missing chunk: from versions here, by a delta, and from peers.

        ``overwritten`` are versions in the memory that is written to. What is read of them is compared with
        digests like everything else.
        """
        self._loading[folder] = held, None
        reporter = asyncio.create_task(self._report(folder, progress)) if progress is not None else None
        loop = asyncio.get_running_loop()
        write = chunk_writer(held.manifest, held.content, note)

        def write_here(chunk: int, content: memoryview) -> None:
            write(chunk, content)
            REUSED.inc(len(content))
            loop.call_soon_threadsafe(held.add, chunk)

        try:
            here = {one.manifest.digest: one for one in overwritten} | self._held
            others = [*overwritten, *(one for one in self.held if one is not held)]
            await asyncio.to_thread(reuse_chunks, held.manifest, ~held.have, others, write_here)
            await asyncio.sleep(0)  # the chunks that were added from the thread
            await self._use_delta(held, here, write_here)
            self._check_open()
            load = SwarmLoad(
                held,
                write,
                own_address=self.address,
                peers=self.peers,
                links=self.links,
                slots=self._receiving,
                limits=self._limits,
                bucket=self._receive_bucket,
            )
            self._loading[folder] = held, load
            await load.run()
            if progress is not None:
                progress(_progress(held, load))
        finally:
            del self._loading[folder]
            if reporter is not None:
                reporter.cancel()

    async def _report(self, folder: Path, progress: Progress) -> None:
        while folder in self._loading:
            progress(_progress(*self._loading[folder]))
            await asyncio.sleep(0.2)

    async def _manifest(self, digest: str) -> Manifest:
        """The manifest that is named ``digest``, from here or from any peer that has it."""
        held = self._held.get(digest)
        if held is not None:
            return held.manifest
        usable = self.peers.usable(clock.monotonic())
        holders = self._holders.get(digest, {})
        addresses = [one for one in usable if one in holders] + [one for one in usable if one not in holders]
        return await fetch_manifest(digest, addresses, self.links, self.peers)

    # Deltas

    async def _make_deltas(self, held: HeldVersion, base: str, made: set[HeldVersion]) -> None:
        """Add deltas from earlier versions of the name to ``made``, where they are smaller than the chunks
        that differ."""
        if base:
            if base not in self._held:
                raise InvalidArgument("base", base, "a version that is not dropped meanwhile")
            bases = [self._held[base]]
        else:
            bases = [one for one in self.held if one.name == held.name and one.is_complete]
            bases = sorted(bases, key=lambda one: one.number)[-MAX_BASES:]
        for one in bases:
            delta = await self._make_delta(one, held)
            if delta is not None:
                made.add(delta)
                size_bytes = delta.manifest.size_bytes
                held.deltas.append(DeltaInfo(one.manifest.digest, delta.manifest.digest, size_bytes))

    async def _make_delta(self, base: HeldVersion, new: HeldVersion) -> HeldVersion | None:
        known = {base.manifest.chunk_digest(i) for i in range(len(base.manifest.chunks))}
        sizes = [chunk.size_bytes for chunk in new.manifest.chunks]
        differ = sum(size for i, size in enumerate(sizes) if new.manifest.chunk_digest(i) not in known)
        if not differ:
            return None
        limit = int(differ * MAX_DELTA_SHARE)
        making = asyncio.create_task(asyncio.to_thread(make_delta, self._deltas_dir, base, new, limit))
        try:
            found = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._discard_made)  # the thread goes on
            raise
        except (StorageError, OSError) as error:
            log.warning("p2p_delta_failed", base=base.manifest.digest, reason=str(error))
            return None
        if found is not None:
            size_bytes = found.manifest.size_bytes
            log.info("p2p_delta_made", base=base.manifest.digest, bytes=size_bytes, instead_of=differ)
        return found

    def _discard_made(self, making: asyncio.Task[HeldVersion | None]) -> None:
        if not making.cancelled() and making.exception() is None and (made := making.result()) is not None:
            self._discard([made])

    async def _use_delta(
        self,
        held: HeldVersion,
        here: Mapping[str, HeldVersion],
        write: Callable[[int, memoryview], None],
    ) -> None:
        """Make missing chunks by a delta, if there is one from a version that is ``here``."""
        sizes = [chunk.size_bytes for chunk in held.manifest.chunks]
        missing = int(np.dot(~held.have, np.asarray(sizes, dtype=np.int64))) if sizes else 0
        usable = [
            one
            for one in held.deltas
            if one.base in here
            and here[one.base].is_complete
            and 0 < one.size_bytes <= missing * MAX_DELTA_SHARE
        ]
        if not usable:
            return
        delta = min(usable, key=lambda one: one.size_bytes)
        base = here[delta.base]
        try:
            source = self._held.get(delta.digest)
            if source is None:
                time_s = min(self._limits.stall_s / 4, DELTA_S + delta.size_bytes / DELTA_BYTES_S)
                async with asyncio.timeout(time_s):
                    source = await self._load_delta(held, delta)
            assembly = ChunkAssembly(held.manifest, ~held.have, write)
            await asyncio.to_thread(
                apply_delta,
                source.content,
                source.manifest.size_bytes,
                base.manifest,
                base.content,
                held.manifest,
                assembly,
            )
        except (MooncakeError, OSError, MemoryError, ValueError, OverflowError) as error:
            log.warning("p2p_delta_unusable", delta=delta.digest, reason=str(error))
            return
        await asyncio.sleep(0)  # the chunks that were added from the thread
        log.info(
            "p2p_delta_applied", delta=delta.digest, bytes=delta.size_bytes, num_wrong=assembly.num_wrong
        )

    async def _load_delta(self, held: HeldVersion, delta: DeltaInfo) -> HeldVersion:
        manifest = await self._manifest(delta.digest)
        is_one_file = [item.name for item in manifest.items] == ["delta"]
        if manifest.kind != "delta" or not is_one_file or manifest.size_bytes != delta.size_bytes:
            raise ProtocolError(f"{delta.digest[:12]} is no delta; the version is loaded without it")
        folder = await asyncio.to_thread(make_delta_folder, self._deltas_dir)
        info = VersionInfo("", held.number, delta.digest, delta.size_bytes, len(manifest.chunks), 0)
        try:
            loaded = await self._load_folder(info, manifest, folder, None)
        except BaseException:
            self._remove(folder.parent)
            raise
        found = self._held.get(delta.digest, loaded)
        if found is not loaded:  # another load has brought it meanwhile
            self._remove(folder.parent)
        return found

    # Handlers

    def _ask_versions(self, message: m.AskVersions, call: Call) -> Message:
        found = [one for one in self.held if _matches(one.name, message.prefix, message.is_exact)]
        peers = self.peers.recent(clock.monotonic(), m.MAX_NAMED_PEERS)
        self._learn(message.address)
        return m.Versions([one.info() for one in found[: m.MAX_LISTED]], peers)

    def _leave(self, message: m.AnnounceEnd, call: Call) -> Message:
        self.peers.left(message.address, clock.monotonic())
        for held in self._held.values():
            held.left_by(message.address)
        return m.Done()

    async def _leave_peer(self, address: str) -> None:
        with contextlib.suppress(MooncakeError):  # it may have ended, too
            await self.links.to(address).ask(m.AnnounceEnd(self.address), LEAVE_S)

    def _learn(self, address: str) -> None:
        self.peers.returned(address, clock.monotonic())
        if address and self.peers.add(address, clock.monotonic()):
            log.info("p2p_peer_found", peer=address)

    def _ask_manifest(self, message: m.AskManifest, call: Call) -> Message:
        held = self._held.get(message.digest)
        return _absent(message.digest) if held is None else m.ManifestBytes(held.manifest.encoded)

    def _ask_segment(self, message: m.AskSegment, call: Call) -> Message:
        return m.PeerSegment(self._descriptor)

    async def _watch_version(self, message: m.WatchVersion, call: Call) -> Message:
        held = self._held.get(message.digest)
        if held is None:
            return _absent(message.digest)
        self._learn(message.address)
        held.watched_by(message.address, clock.monotonic())
        await held.changed_since(message.revision, min(max(0.0, message.wait_s), MAX_WATCH_S))
        held = self._held.get(message.digest)  # dropped, or loaded anew
        return _absent(message.digest) if held is None else held.state(clock.monotonic())

    async def _fetch_chunk(self, message: m.FetchChunk, call: Call) -> Message:
        held = self._held.get(message.digest)
        if held is None:
            return _declined(_absent(message.digest))
        wanted = tuple(dict.fromkeys(message.candidates[: m.MAX_REQUESTED]))
        there = tuple(chunk for chunk in wanted if 0 <= chunk < len(held.have) and held.have[chunk])
        request_id = next(self._request_ids)
        requester = self._requesters.setdefault(call.connection, next(self._request_ids))
        answer: asyncio.Future[u.SendChunk | Refusal] = asyncio.get_running_loop().create_future()
        self._asked[request_id] = answer
        try:
            self._driver.post(u.UploadAsked(request_id, requester, message.digest, there))
            found = await answer
        except asyncio.CancelledError:
            # The connection may have ended in the pass of the loop in which a slot became free for it.
            if answer.done() and not answer.cancelled() and isinstance(given := answer.result(), u.SendChunk):
                self._driver.post(u.SlotReturned(requester, given.lease))
                self._driver.post(u.SlotFilled(given.lease))
            raise
        finally:
            del self._asked[request_id]
        if isinstance(found, Refusal):
            return _declined(m.Declined(found.code, found.reason))
        place = held.manifest.chunks[found.chunk]
        filling = asyncio.create_task(asyncio.to_thread(self._put_into_slot, held, found))
        self._filling.add(filling)
        filling.add_done_callback(functools.partial(self._filled, found.lease))
        if not await asyncio.shield(filling):  # the thread goes on if this call ends
            self._driver.post(u.SlotReturned(requester, found.lease))
            if self._held.get(message.digest) is not held:
                return _declined(_absent(message.digest))
            held.lose(found.chunk)
            log.warning("p2p_chunk_damaged", name=held.name, digest=message.digest, chunk=found.chunk)
            return _declined(m.Declined("damaged", "this chunk was changed on this peer; ask another peer"))
        SENT.inc(place.size_bytes)
        address = self._sending.address_at(found.slot)
        return m.ChunkReady(found.lease, found.chunk, address, place.size_bytes, self._lease_s)

    def _filled(self, lease: int, filling: asyncio.Task[bool]) -> None:
        self._filling.discard(filling)
        self._driver.post(u.SlotFilled(lease))

    def _put_into_slot(self, held: HeldVersion, send: u.SendChunk) -> bool:
        """Read a chunk into its slot; False when it is not what it was. In a thread."""
        place = held.manifest.chunks[send.chunk]
        try:
            content = held.content.read(*place)
        except (StorageError, OSError):
            return False
        if not held.content.is_unchanged(place.item) and not held.manifest.holds(send.chunk, content):
            return False
        self._sending.view(send.slot)[: place.size_bytes] = content
        return True

    def _return_slot(self, message: m.ReturnSlot, call: Call) -> Message:
        requester = self._requesters.get(call.connection, 0)
        self._driver.post(u.SlotReturned(requester, message.lease, message.is_read))
        return m.Done()

    def _connection_lost(self, connection: Connection) -> None:
        requester = self._requesters.pop(connection, None)
        if requester is not None:
            self._driver.post(u.RequesterGone(requester))

    def _perform(self, effect: u.UploadEffect) -> None:
        answer = self._asked.get(effect.request_id)
        if answer is None or answer.done():
            return
        answer.set_result(effect if isinstance(effect, u.SendChunk) else effect.refusal)


def _close_opened(opening: asyncio.Task[PartialFolder]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _progress(held: HeldVersion, load: SwarmLoad | None) -> LoadProgress:
    return held.progress(0, 0) if load is None else held.progress(load.received_bytes, load.num_peers)


def _matches(name: str, prefix: str, is_exact: bool) -> bool:
    return name == prefix if is_exact else name.startswith(prefix)


def _absent(digest: str) -> m.Declined:
    return m.Declined("absent", f"this peer does not have the version {digest[:12]}; ask another peer")


def _declined(answer: m.Declined) -> m.Declined:
    DECLINED.labels(answer.code).inc()
    return answer
