# SPDX-License-Identifier: Apache-2.0
"""The process ``mooncake p2p serve``: a peer that is commanded by messages, and that finds its versions
again.

It touches folders below its root only, whichever peer asks. Beside them, in ``.mooncake-p2p``, it keeps which
versions it serves and which it was loading, so that a new process goes on where the last one ended. A
registered folder whose files were changed meanwhile is compared with its digests, and dropped if it differs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from mooncake import clock
from mooncake.errors import InvalidArgument, MooncakeError, StorageError
from mooncake.files import LockedDirectory
from mooncake.http.server import serve_metrics
from mooncake.log import get_logger
from mooncake.p2p import messages as m
from mooncake.p2p.content import FolderContent, file_states, find_files, make_manifest
from mooncake.p2p.held_version import HeldVersion
from mooncake.p2p.manifest import Manifest, decode_manifest
from mooncake.p2p.partial_folder import check_target, is_there, remove_partial
from mooncake.p2p.settings import P2pSettings
from mooncake.p2p.store import P2PStore
from mooncake.rpc import Call
from mooncake.rpc.wire import Message
from mooncake.security import Identity, process_identity

log = get_logger(__name__)

STATE = ".mooncake-p2p"
VERSIONS_FILE = "versions"
MAX_REMEMBERED = 1024
"""Loads that ended whose folders are known."""
RETRY_S = 10.0
"""Interval at which a load that was interrupted by a restart is tried again, until a peer is there."""

REMOVE_S = 20.0
"""Time for a cancelled load to release its folder, which is then deleted."""


class SavedVersion(msgspec.Struct, frozen=True):
    """A version whose folder is below the root; ``states`` is empty for one that was being loaded."""

    name: str
    number: int
    digest: str
    folder: str
    is_loaded: bool
    states: list[tuple[int, ...]] = []


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(list[SavedVersion])


class P2pDaemon:
    """A peer with a root folder.

    Args:
        settings: see ``P2pSettings``; ``root`` is required.
        identity: identity to use instead of the process's.

    Raises:
        InvalidArgument: there is no root, or another process uses it.
    """

    def __init__(self, settings: P2pSettings, identity: Identity | None = None) -> None:
        if not settings.root:
            raise InvalidArgument("root", settings.root, "the folder that models and checkpoints are in")
        self.root = Path(settings.root).expanduser().resolve()
        if not self.root.is_dir():
            raise InvalidArgument("root", settings.root, "a folder that exists")
        self._directory = LockedDirectory(self.root / STATE, "root")
        self.store = P2PStore(
            settings,
            state_dir=self.root / STATE / "deltas",
            identity=identity,
            commands={
                m.CommandRegister: self._register,
                m.CommandGet: self._get,
                m.CommandDrop: self._drop,
                m.AskProgress: self._ask_progress,
            },
        )
        self._loads: dict[Path, asyncio.Task[None]] = {}
        self._loading: dict[Path, SavedVersion] = {}
        self._errors: dict[Path, str] = {}
        """Reasons of the loads that have failed, by folder."""
        self._done: dict[Path, int] = {}
        """Bytes of the loads that have ended well, by folder."""
        self._saving = asyncio.Lock()

    async def start(self) -> None:
        """Listen, serve the versions that the last process served, and go on with its loads.

        Raises:
            InvalidArgument, AddressInUse: see ``P2PStore.start``.
            StorageError: the state can't be read.
        """
        try:
            await asyncio.to_thread(self._directory.take)
            saved = await asyncio.to_thread(self._saved)
        except OSError as error:
            raise self._directory.trouble(error) from error
        await self.store.start()
        for one in saved:
            folder = self.root / one.folder
            if not one.states and not folder.is_dir():
                self._begin(one, folder, is_patient=True)
                continue
            held = await asyncio.to_thread(self._found, one, folder)
            if held is not None:
                self.store.restore(held)
        if any(not one.states for one in saved):
            await self._save()

    async def close(self) -> None:
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        await self.store.close()
        self._directory.close()

    # Commands

    async def _register(self, message: m.CommandRegister, call: Call) -> Message:
        folder = self._below_root(message.folder)
        info = await self.store.register(
            message.name, folder, number=message.number, base=message.base, allowed=self.root
        )
        await self._save()
        return m.Registered(info)

    async def _get(self, message: m.CommandGet, call: Call) -> Message:
        folder = self._below_root(message.folder)
        if folder in self._loads:
            raise InvalidArgument("folder", str(folder), "a folder that nothing is being loaded into")
        info = await self.store.find(message.name, message.digest, number=message.number)
        if info is None:
            return m.Declined(
                "absent", f"no peer has such a version of {message.name}; list shows what is there"
            )
        check_target(folder)
        if folder in self._loads:  # begun while the version was sought
            raise InvalidArgument("folder", str(folder), "a folder that nothing is being loaded into")
        relative = str(folder.relative_to(self.root))
        self._begin(SavedVersion(info.name, info.number, info.digest, relative, is_loaded=True), folder)
        await self._save()
        return m.Registered(info)

    async def _drop(self, message: m.CommandDrop, call: Call) -> Message:
        dropped: dict[str, None] = {}
        try:
            for folder, one in list(self._loading.items()):
                if one.name == message.name and message.digest in ("", one.digest):
                    task = self._loads.get(folder)
                    if task is not None:
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                    self._loading.pop(folder, None)
                    dropped[one.digest] = None
                    if message.is_deleted:
                        await self._remove_partial(folder)
            digests = await self.store.drop(message.name, message.digest, delete=message.is_deleted)
        finally:
            await self._save()
        return m.Dropped(list(dropped | dict.fromkeys(digests)))

    def _ask_progress(self, message: m.AskProgress, call: Call) -> Message:
        folder = self._below_root(message.folder)
        found = self.store.progress_of(folder)
        if found is not None:
            return found
        for held in self.store.held:
            if held.folder == folder and held.is_complete:
                size = held.manifest.size_bytes
                return m.LoadProgress(size, size, 0, 0, is_complete=True)
        if folder in self._done and folder.is_dir():  # a second folder of a version that is served already
            size = self._done[folder]
            return m.LoadProgress(size, size, 0, 0, is_complete=True)
        error = self._errors.get(folder, "")
        if folder in self._loads or error:
            return m.LoadProgress(0, 0, 0, 0, is_complete=False, error=error)
        return m.Declined("absent", f"nothing is being loaded into {folder}")

    def _below_root(self, folder: str) -> Path:
        """The folder of a command, which is below the root whatever links there are.

        Raises:
            InvalidArgument: it is not, or no disk can have it.
        """
        is_there(self.root / folder)  # raises where no disk can have it
        found = (self.root / folder).resolve()
        inside = found.relative_to(self.root).parts if found.is_relative_to(self.root) else ()
        if not inside or inside[0] == STATE:
            raise InvalidArgument("folder", folder, f"a folder below {self.root} of this peer")
        return found

    # Loads

    def _begin(self, one: SavedVersion, folder: Path, *, is_patient: bool = False) -> None:
        self._errors.pop(folder, None)
        self._done.pop(folder, None)
        self._loading[folder] = one
        task = asyncio.create_task(self._load(one, folder, is_patient))
        self._loads[folder] = task
        task.add_done_callback(lambda _: self._ended(folder))

    def _ended(self, folder: Path) -> None:
        self._loads.pop(folder, None)

    async def _load(self, one: SavedVersion, folder: Path, is_patient: bool) -> None:
        while True:
            try:
                found = await self.store.get(one.name, folder, digest=one.digest)
                error = "" if found is not None else "no peer has this version any longer"
                if found is not None:
                    _remember(self._done, folder, found.size_bytes)
                is_worth_it = found is None
            except MooncakeError as failure:
                error, is_worth_it = str(failure), not isinstance(failure, InvalidArgument)
            except Exception as failure:
                log.exception("p2p_load_crashed", name=one.name, folder=str(folder))
                error, is_worth_it = f"internal error ({failure!r}); see the log of this peer", False
            if error:
                _remember(self._errors, folder, error)
                log.warning("p2p_load_failed", name=one.name, folder=str(folder), reason=error)
            if not (error and is_patient and is_worth_it):
                break
            await asyncio.sleep(RETRY_S)
        self._loading.pop(folder, None)
        await self._save()

    async def _remove_partial(self, folder: Path) -> None:
        """Remove the files of a load that was cancelled, once the thread that was opening them has ended."""
        until = clock.monotonic() + REMOVE_S
        while True:
            try:
                await asyncio.to_thread(remove_partial, folder)
                return
            except InvalidArgument:  # it still has the lock
                if clock.monotonic() > until:
                    raise
                await asyncio.sleep(0.05)

    # State

    async def _save(self) -> None:
        async with self._saving:
            kept: list[SavedVersion] = list(self._loading.values())
            manifests: dict[str, bytes] = {}
            for held in self.store.held:
                if held.folder is None or not held.is_complete:
                    continue
                assert isinstance(held.content, FolderContent)
                relative = str(held.folder.relative_to(self.root))
                # Of the time of the digests, never of now: a file that was changed since must be compared.
                states = held.content.states
                digest = held.manifest.digest
                kept.append(SavedVersion(held.name, held.number, digest, relative, held.is_loaded, states))
                manifests[digest] = held.manifest.encoded
            await asyncio.to_thread(self._write, kept, manifests)

    def _write(self, kept: list[SavedVersion], manifests: dict[str, bytes]) -> None:
        try:
            names = set(self._directory.directory.names())
            for digest, encoded in manifests.items():
                if f"manifest-{digest}" not in names:
                    self._directory.replace(f"manifest-{digest}", encoded)
            self._directory.replace(VERSIONS_FILE, _encoder.encode(kept))
            for name in names:
                if name.startswith("manifest-") and name.removeprefix("manifest-") not in manifests:
                    self._directory.directory.remove(name)
        except OSError as error:
            raise self._directory.trouble(error) from error

    def _saved(self) -> list[SavedVersion]:
        if not self._directory.has(VERSIONS_FILE):
            return []
        try:
            return _decoder.decode(self._directory.read(VERSIONS_FILE))
        except msgspec.MsgspecError as error:
            path = self.root / STATE / VERSIONS_FILE
            raise StorageError(f"{path} is damaged ({error}); remove it and register again") from error

    def _found(self, one: SavedVersion, folder: Path) -> HeldVersion | None:
        """The version as it is on disk, or None when it is no longer the same. In a thread."""
        try:
            manifest, content = (self._served if one.states else self._loaded)(one, folder)
        except (MooncakeError, OSError) as error:
            log.warning("p2p_version_lost", name=one.name, folder=str(folder), reason=str(error))
            return None
        have = np.ones(len(manifest.chunks), dtype=np.bool_)
        return HeldVersion(
            one.name, one.number, manifest, content, have, folder=folder, is_loaded=one.is_loaded
        )

    def _served(self, one: SavedVersion, folder: Path) -> tuple[Manifest, FolderContent]:
        manifest = decode_manifest(self._directory.read(f"manifest-{one.digest}"), one.digest)
        states = file_states(folder, manifest.items)
        content = FolderContent(folder, manifest.items, states, allowed=self.root)
        if states != [tuple(state) for state in one.states]:
            self._compare(manifest, content)
            if file_states(folder, manifest.items) != states:
                raise StorageError(f"{folder} changed while it was compared; register it again")
        return manifest, content

    def _loaded(self, one: SavedVersion, folder: Path) -> tuple[Manifest, FolderContent]:
        """Those of a load that had ended: its folder has its name before the state is saved."""
        items = find_files(folder, self.root)
        states = file_states(folder, items)
        content = FolderContent(folder, items, states, allowed=self.root)
        manifest = make_manifest("folder", items, content)
        if manifest.digest != one.digest or file_states(folder, items) != states:
            raise StorageError(f"{folder} is not the version that was loaded into it; load it again")
        remove_partial(folder)
        return manifest, content

    def _compare(self, manifest: Manifest, content: FolderContent) -> None:
        found = make_manifest(manifest.kind, manifest.items, content)
        if found.digests != manifest.digests:
            raise StorageError(f"{content.root} has changed since it was registered; register it again")


ValueT = TypeVar("ValueT")


def _remember(known: dict[Path, ValueT], folder: Path, value: ValueT) -> None:
    known.pop(folder, None)  # the most recent ones are kept
    known[folder] = value
    while len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]


async def serve(settings: P2pSettings) -> None:
    """Run a peer until cancelled.

    Raises:
        InvalidArgument, AddressInUse, StorageError: see ``P2pDaemon``.
    """
    identity = process_identity()
    daemon = P2pDaemon(settings)
    tls = identity.server_tls
    # A metrics scraper can't authenticate with the cluster's key.
    metrics_host = settings.host if tls or identity.is_open else "127.0.0.1"
    metrics = serve_metrics(metrics_host, settings.metrics_port, tls)
    try:
        await daemon.start()
        log.info("ready", role="p2p", address=daemon.store.address, metrics=f"{metrics_host}:{metrics.port}")
        await asyncio.Event().wait()
    finally:
        await daemon.close()
        await asyncio.to_thread(metrics.close)
