# SPDX-License-Identifier: Apache-2.0
"""The digest of all bytes of a file, computed once per host.

A model is read once by each host that has it, and again when a file was changed or replaced: the digest is
kept in the user's cache under the file's path, inode, size and times. It decides which KV blocks an engine
accepts as its own, so only entries written by this user count; others, and damaged ones, are computed anew.

It knows files only, not their contents.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mooncake import clock
from mooncake.errors import ModelError
from mooncake.files import file_state
from mooncake.log import get_logger

log = get_logger(__name__)

FORM = "mooncake-file-digest-2"
PART_BYTES = 64 << 20
"""Size of the parts of a file, which are hashed at the same time."""
READ_BYTES = 4 << 20
MAX_THREADS = 8
SETTLED_S = 2.0
"""A file changed more recently may change again within the same timestamp; its digest is not kept."""
LOGGED_BYTES = 1 << 30
"""Size of a file beyond which its hashing time is logged."""


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "mooncake"


def file_digest(path: Path, cache_dir: Path | None = None) -> str:
    """SHA-256 over all bytes of ``path`` (over the digests of its parts), from the cache if it is there.

    Raises:
        ModelError: it changes while it is read.
        OSError: it can't be read.
    """
    with path.open("rb", buffering=0) as file:
        before = _state(path, os.fstat(file.fileno()))
        name = hashlib.sha256(repr((FORM, before)).encode()).hexdigest()
        folder = (cache_dir or default_cache_dir()) / "digests"
        kept = _kept(folder, name)
        if kept is not None:
            return kept
        began = clock.monotonic()
        status = os.fstat(file.fileno())
        digest = _computed(file.fileno(), status.st_size)
        status = os.fstat(file.fileno())
    if _state(path, status) != before:
        raise ModelError(f"{path} changed while it was read; start again when it is complete")
    if status.st_size >= LOGGED_BYTES:
        seconds = clock.monotonic() - began
        log.info("file_hashed", path=str(path), size_bytes=status.st_size, seconds=round(seconds, 1))
    if clock.wall() - max(status.st_mtime, status.st_ctime) > SETTLED_S:
        _keep(folder, name, digest)
    return digest


def _state(path: Path, status: os.stat_result) -> tuple[object, ...]:
    return str(path.resolve()), *file_state(status)


def _computed(descriptor: int, size_bytes: int) -> str:
    starts = range(0, size_bytes, PART_BYTES)
    total = hashlib.sha256(f"{FORM} {size_bytes} {PART_BYTES}\n".encode())
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1, max(1, len(starts)))) as threads:
        for part in threads.map(lambda start: _part(descriptor, start, size_bytes), starts):
            total.update(part)
    return total.hexdigest()


def _part(descriptor: int, start: int, size_bytes: int) -> bytes:
    digest = hashlib.sha256()
    end = min(start + PART_BYTES, size_bytes)
    while start < end:
        piece = os.pread(descriptor, min(READ_BYTES, end - start), start)
        if not piece:
            raise ModelError("a file of the model became shorter while it was read; start again")
        digest.update(piece)
        start += len(piece)
    return digest.digest()


def _line(name: str, digest: str) -> str:
    """The line to keep: the digest, and a hash that shows it was written whole and for this file."""
    seal = hashlib.sha256(f"{FORM} {name} {digest}".encode()).hexdigest()
    return f"{FORM} {name} {digest} {seal}\n"


def _kept(folder: Path, name: str) -> str | None:
    """The digest under ``name``, if this user wrote it and no other user could have."""
    try:
        if not _is_ours(os.lstat(folder), stat.S_ISDIR):
            return None
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not _is_ours(os.fstat(descriptor), stat.S_ISREG):
            return None
        text = file.read(1024).decode("ascii", "replace")
    fields = text.split()
    if len(fields) != 4 or text != _line(name, fields[2]):
        log.warning("digest_ignored", path=str(folder / name), reason="damaged")
        return None
    return fields[2]


def _is_ours(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    return is_kind(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _keep(folder: Path, name: str, digest: str) -> None:
    """Write the digest to the cache. A cache that can't be written costs time at each start, not an error."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077:
            if status.st_mode & 0o022:
                for old in folder.iterdir():  # any user may have written them
                    old.unlink()
            os.chmod(folder, 0o700)
        if not _is_ours(os.lstat(folder), stat.S_ISDIR):
            log.warning("digest_not_kept", folder=str(folder), reason="the folder is another user's")
            return
        descriptor, temporary = tempfile.mkstemp(dir=folder)  # 0600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(_line(name, digest))
            os.replace(temporary, folder / name)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        log.info("digest_not_kept", folder=str(folder), reason=str(error))
