# SPDX-License-Identifier: Apache-2.0
"""Stores of the leader record: etcd, Redis, a Lease of Kubernetes, or a file for two masters on one host.

An election needs only two operations of a service: read one value, and replace it if it is unchanged.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Protocol

from mooncake.errors import InvalidArgument, StorageError
from mooncake.store.ha.kubernetes_lease import KubernetesLeaseStore
from mooncake.store.settings import ELECTIONS
from mooncake.transfer.metadata import EtcdBackend, RedisBackend

DEFAULT_CLUSTER = "mooncake_cluster"


class LeaseStore(Protocol):
    """The service that stores the leader record. Thread-safe. Calls may raise PeerLost or
    DeadlineExceeded."""

    keeps_records: bool
    """What was written once stays, whatever happens to the service."""

    def read(self) -> bytes | None: ...

    def swap(self, old: bytes | None, new: bytes) -> bool:
        """Replace ``old`` (None: no value) by ``new``; False if the value was different.

        When it raises, the replacement may have taken effect all the same, or may do so later.
        """
        ...

    def close(self) -> None: ...


def make_lease_store(url: str, cluster: str = DEFAULT_CLUSTER, timeout_s: float = 1.0) -> LeaseStore:
    """Return the lease store at ``etcd://host:port[;host:port]``, ``redis://host:port``,
    ``k8s://namespace`` or ``file:///path``.

    ``/name`` at the end of the first three names the cluster, and wins over ``cluster``.

    Raises:
        InvalidArgument: the URL has none of these forms.
    """
    url, cluster = split_cluster(url, cluster)
    scheme = url.partition("://")[0]
    if scheme == "file":
        return FileLeaseStore(Path(url.removeprefix("file://")) / f"{cluster}.leader")
    if scheme == "k8s":
        return KubernetesLeaseStore(url, cluster, timeout_s)
    key = f"mooncake/{cluster}/master"
    if scheme == "etcd":
        return ServiceLeaseStore(EtcdBackend(url, timeout_s), key, keeps_records=True)
    if scheme == "redis":
        return ServiceLeaseStore(RedisBackend(url, timeout_s), key, keeps_records=False)
    raise InvalidArgument("election", url, ", ".join(f"{scheme}://" for scheme in ELECTIONS))


def split_cluster(url: str, cluster: str = DEFAULT_CLUSTER) -> tuple[str, str]:
    """Return the URL without the cluster's name, and the name. A number ending a Redis URL is a database."""
    scheme, _, rest = url.partition("://")
    rest, mark, options = rest.partition("?") if scheme == "k8s" else (rest, "", "")
    place, slash, name = rest.rstrip("/").rpartition("/")
    if scheme == "file" or not slash or (scheme == "redis" and name.isdecimal()):
        return f"{scheme}://{rest.rstrip('/')}{mark}{options}", cluster
    return f"{scheme}://{place}{mark}{options}", name


class _Served(Protocol):
    def get(self, key: str) -> bytes | None: ...
    def swap(self, key: str, old: bytes | None, new: bytes) -> bool: ...
    def close(self) -> None: ...


class ServiceLeaseStore:
    """One key of a service with compare-and-set."""

    def __init__(self, service: _Served, key: str, *, keeps_records: bool) -> None:
        self._service = service
        self._key = key
        self.keeps_records = keeps_records

    def read(self) -> bytes | None:
        return self._service.get(self._key)

    def swap(self, old: bytes | None, new: bytes) -> bool:
        return self._service.swap(self._key, old, new)

    def close(self) -> None:
        self._service.close()

    def __repr__(self) -> str:
        return f"<ServiceLeaseStore {self._key} of {self._service!r}>"


class FileLeaseStore:
    """A file that is only read and replaced under its lock, by processes of one host.

    Raises:
        InvalidArgument: the folder does not exist, or the file can't be written.
    """

    keeps_records = True

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)  # makes the file's name durable
            finally:
                os.close(folder)
        except OSError as error:
            allowed = f"file:///folder, one that can be written to ({error})"
            raise InvalidArgument("election", f"file://{path.parent}", allowed) from error

    def read(self) -> bytes | None:
        file = self._locked()
        try:
            return _content(file)
        except OSError as error:
            raise StorageError(f"{self._path} can't be read: {error}") from error
        finally:
            os.close(file)

    def swap(self, old: bytes | None, new: bytes) -> bool:
        file = self._locked()
        try:
            if _content(file) != old:
                return False
            # In one write, so that a killed process can't leave half of it.
            os.pwrite(file, new + b"\n" + b" " * max(0, os.fstat(file).st_size - len(new) - 1), 0)
            os.fdatasync(file)  # an election that a loss of power takes back could have two winners
            return True
        except OSError as error:
            raise StorageError(f"{self._path} can't be written: {error}") from error
        finally:
            os.close(file)

    def close(self) -> None:
        pass

    def _locked(self) -> int:
        try:
            file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise StorageError(f"{self._path} can't be opened: {error}") from error
        return file

    def __repr__(self) -> str:
        return f"<FileLeaseStore {self._path}>"


def _content(file: int) -> bytes | None:
    content = os.pread(file, 1 << 20, 0).partition(b"\n")[0]
    return content or None
