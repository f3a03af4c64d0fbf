# SPDX-License-Identifier: Apache-2.0
"""Messages between peers, and those by which a tool commands a peer; with who may send each of them.

Every peer may send the first group to every other. The second group reads and writes folders of the peer's
host, so only an administrator's credential may send it, and only folders below the peer's root are touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.errors import ProtocolError
from mooncake.p2p.manifest import MAX_CHUNKS, is_digest, is_version_name
from mooncake.security import ADMINS, NODES_AND_ADMINS, Access

MAX_LISTED = 4096
"""Versions in one answer."""
MAX_NAMED_PEERS = 64
"""Addresses in one answer."""
MAX_LEASE_S = 3600.0
"""Time that a reader may have for a chunk; at least 1."""
MAX_REQUESTED = 64
"""Candidates in one request for a chunk."""
MAX_DELTAS = 16
"""Deltas of one version that are believed to exist."""


class DeltaInfo(msgspec.Struct, frozen=True, array_like=True):
    """An object by which a version is made from the version ``base``; ``digest`` names its own manifest."""

    base: str
    digest: str
    size_bytes: int


class VersionInfo(msgspec.Struct, frozen=True, array_like=True):
    """A version as one peer has it. ``number`` counts versions of the name, as its registrar chose it."""

    name: str
    number: int
    digest: str
    size_bytes: int
    num_chunks: int
    num_have: int
    deltas: list[DeltaInfo] = []


class AskVersions(msgspec.Struct, frozen=True, array_like=True, tag="p2p_ask_versions"):
    """Which versions with this prefix of their name does the peer have? Or, exactly this name.

    ``address`` is where the sender serves others; empty when it does not.
    """

    prefix: str
    is_exact: bool
    address: str


class Versions(msgspec.Struct, frozen=True, array_like=True, tag="p2p_versions"):
    versions: list[VersionInfo]
    peers: list[str]


class AskManifest(msgspec.Struct, frozen=True, array_like=True, tag="p2p_ask_manifest"):
    digest: str


class ManifestBytes(msgspec.Struct, frozen=True, array_like=True, tag="p2p_manifest"):
    encoded: bytes


class AskSegment(msgspec.Struct, frozen=True, array_like=True, tag="p2p_ask_segment"):
    """How is the memory reached that the peer sends chunks from?"""


class PeerSegment(msgspec.Struct, frozen=True, array_like=True, tag="p2p_segment"):
    descriptor: bytes


class WatchVersion(msgspec.Struct, frozen=True, array_like=True, tag="p2p_watch"):
    """Answer when the peer has other chunks than at ``revision``, or after ``wait_s`` at the latest.

    ``address`` is where the sender serves the same version; empty when it serves none.
    """

    digest: str
    revision: int
    wait_s: float
    address: str


class VersionState(msgspec.Struct, frozen=True, array_like=True, tag="p2p_state"):
    """Chunks that a peer has, as bits (the first chunk is the lowest bit of the first byte)."""

    revision: int
    bits: bytes
    peers: list[str]


class FetchChunk(msgspec.Struct, frozen=True, array_like=True, tag="p2p_fetch"):
    """Send any one of these chunks."""

    digest: str
    candidates: list[int]


class ChunkReady(msgspec.Struct, frozen=True, array_like=True, tag="p2p_ready"):
    """The chunk lies at ``address`` of the peer's segment until the lease ends, in ``lease_s``."""

    lease: int
    chunk: int
    address: int
    size_bytes: int
    lease_s: float


class ReturnSlot(msgspec.Struct, frozen=True, array_like=True, tag="p2p_return"):
    """The slot is not needed any longer. ``is_read``: the chunk came, with the right digest."""

    lease: int
    is_read: bool = False


class AnnounceEnd(msgspec.Struct, frozen=True, array_like=True, tag="p2p_announce_end"):
    """The peer at ``address`` has ended: do not name it to others until it is there again."""

    address: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag="p2p_done"):
    pass


class Declined(msgspec.Struct, frozen=True, array_like=True, tag="p2p_declined"):
    """A refusal: ``code`` for programs, ``reason`` for people."""

    code: str
    reason: str


class CommandRegister(msgspec.Struct, frozen=True, array_like=True, tag="p2p_command_register"):
    """Serve ``folder`` as a version of ``name``. ``number`` 0 takes the next one; ``base`` "" seeks one."""

    name: str
    folder: str
    number: int
    base: str


class CommandGet(msgspec.Struct, frozen=True, array_like=True, tag="p2p_command_get"):
    """Begin to load a version into ``folder``: ``digest`` "" and ``number`` 0 take the highest number."""

    name: str
    folder: str
    digest: str
    number: int


class CommandDrop(msgspec.Struct, frozen=True, array_like=True, tag="p2p_command_drop"):
    """Stop serving versions of ``name``: the one with ``digest``, or all."""

    name: str
    digest: str
    is_deleted: bool


class Registered(msgspec.Struct, frozen=True, array_like=True, tag="p2p_registered"):
    version: VersionInfo


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="p2p_dropped"):
    digests: list[str]


class AskProgress(msgspec.Struct, frozen=True, array_like=True, tag="p2p_ask_progress"):
    """How far is the load into ``folder``?"""

    folder: str


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="p2p_progress"):
    """Bytes that are there, of all, and that came over the network. ``error`` when the load has failed."""

    have_bytes: int
    size_bytes: int
    received_bytes: int
    num_peers: int
    is_complete: bool
    error: str = ""


PEER_REQUESTS = (AskVersions, AskManifest, AskSegment, WatchVersion, FetchChunk, ReturnSlot, AnnounceEnd)
COMMANDS = (CommandRegister, CommandGet, CommandDrop, AskProgress)
REPLIES = (
    Versions,
    ManifestBytes,
    PeerSegment,
    VersionState,
    ChunkReady,
    Done,
    Declined,
    Registered,
    Dropped,
    LoadProgress,
)

_TABLE: dict[type, frozenset[str]] = {
    **dict.fromkeys(PEER_REQUESTS, NODES_AND_ADMINS),
    **dict.fromkeys(COMMANDS, ADMINS),
}
ACCESS = Access(_TABLE)


def valid_versions(versions: Iterable[VersionInfo]) -> Iterator[VersionInfo]:
    """Those of a peer's versions, and of their deltas, that may be used, shown and announced to others."""
    for info in filter(_is_valid, versions):
        deltas = [
            delta
            for delta in info.deltas
            if is_digest(delta.base) and is_digest(delta.digest) and 0 <= delta.size_bytes < 1 << 62
        ]
        yield msgspec.structs.replace(info, deltas=deltas[:MAX_DELTAS])


def merged(one: VersionInfo, other: VersionInfo) -> VersionInfo:
    """A version as two peers together have it."""
    deltas = {delta.digest: delta for delta in (*one.deltas, *other.deltas)}
    return msgspec.structs.replace(
        other,
        number=max(one.number, other.number),
        num_have=max(one.num_have, other.num_have),
        deltas=list(deltas.values())[:MAX_DELTAS],
    )


def _is_valid(info: VersionInfo) -> bool:
    is_counted = 0 <= info.num_have <= info.num_chunks <= MAX_CHUNKS and 0 < info.number < 1 << 62
    return is_version_name(info.name) and is_digest(info.digest) and info.size_bytes >= 0 and is_counted


def pack_bits(bits: NDArray[np.bool_]) -> bytes:
    """Bits as they are sent, eight to a byte."""
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bits(packed: bytes, number: int) -> NDArray[np.bool_]:
    """The first ``number`` bits of ``packed``.

    Raises:
        ProtocolError: it has another length.
    """
    if number > MAX_CHUNKS or len(packed) != (number + 7) // 8:
        raise ProtocolError(f"{len(packed)} bytes of bits for {number} chunks; ask another peer")
    bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=number, bitorder="little")
    return bits.astype(np.bool_)
