# SPDX-License-Identifier: Apache-2.0
"""Lease stores behave the same on etcd, Redis, a double of a Kubernetes API server, and a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from mooncake.errors import InvalidArgument, MooncakeError, StorageError, Unavailable
from mooncake.store.ha.lease_store import FileLeaseStore, LeaseStore, make_lease_store, split_cluster
from tests.contract.kubernetes_api import KubernetesApi
from tests.contract.metadata_servers import MetadataServer

KINDS = ("file", "etcd", "redis", "k8s")


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path_factory.mktemp('leases')}"
        return
    if request.param == "k8s":
        api = KubernetesApi(tmp_path_factory.mktemp("kubernetes"))
        yield api.url()
        api.stop()
        return
    server = MetadataServer(request.param)
    yield server.url
    server.stop()


def store_at(url: str, cluster: str) -> LeaseStore:
    return make_lease_store(url, cluster, timeout_s=30.0)


def test_a_swap_replaces_only_the_expected_value(url: str) -> None:
    one, other = store_at(url, "swap"), store_at(url, "swap")
    assert one.read() is None
    assert not one.swap(b"something", b"new")
    assert one.swap(None, b'{"a": "long one"}')
    assert not other.swap(None, b"second")
    assert other.read() == b'{"a": "long one"}'
    assert other.swap(b'{"a": "long one"}', b"short")
    assert not one.swap(b'{"a": "long one"}', b"late")
    assert one.read() == b"short"
    assert store_at(url, "another").read() is None, "clusters don't share it"


def test_one_of_many_concurrent_swaps_wins(url: str) -> None:
    won: list[int] = []

    def try_it(number: int) -> None:
        if store_at(url, "race").swap(None, b"%d" % number):
            won.append(number)

    threads = [Thread(target=try_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b"%d" % number for number in won] == [store_at(url, "race").read()]


@pytest.mark.parametrize("kind", ["etcd", "redis"])
def test_a_service_that_is_not_there_is_unavailable_at_once(kind: str) -> None:
    lease_store = make_lease_store(f"{kind}://127.0.0.1:1", timeout_s=0.5)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        lease_store.read()
    with pytest.raises(Unavailable):
        lease_store.swap(None, b"x")


def test_clusters_may_be_in_the_url() -> None:
    assert split_cluster("etcd://a:1;b:2/blue") == ("etcd://a:1;b:2", "blue")
    assert split_cluster("etcd://a:1;b:2/") == ("etcd://a:1;b:2", "mooncake_cluster")
    assert split_cluster("redis://:pw@a:1/3", "red") == ("redis://:pw@a:1/3", "red")
    assert split_cluster("redis://a:1/3/blue") == ("redis://a:1/3", "blue")
    assert split_cluster("redis://a:1/blue") == ("redis://a:1", "blue")
    assert split_cluster("file:///x/y", "red") == ("file:///x/y", "red")
    assert split_cluster("k8s://ns", "red") == ("k8s://ns", "red")
    assert split_cluster("k8s://ns/blue") == ("k8s://ns", "blue")
    assert split_cluster("k8s://ns/blue?account=/a/b") == ("k8s://ns?account=/a/b", "blue")


def test_an_invalid_lease_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="election"):
        make_lease_store("http://a:1")
    with pytest.raises(InvalidArgument, match="folder"):
        make_lease_store(f"file://{tmp_path}/missing")


def test_a_file_that_goes_away_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    lease_store = FileLeaseStore(folder / "x")
    (folder / "x").unlink()
    folder.rmdir()
    with pytest.raises(MooncakeError, match="opened"):
        lease_store.read()


def test_a_record_in_a_file_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a loss of power could take an election back that others know of."""
    synced: list[bytes] = []
    fdatasync = os.fdatasync

    def noted(file: int) -> None:
        fdatasync(file)
        synced.append(os.pread(file, 100, 0).rstrip())

    def failing(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lease_store = FileLeaseStore(tmp_path / "x")
    monkeypatch.setattr(os, "fdatasync", noted)
    assert lease_store.swap(None, b"first") and lease_store.swap(b"first", b"2nd")
    assert not lease_store.swap(b"first", b"other") and synced == [b"first", b"2nd"]
    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(StorageError, match="written"):
        lease_store.swap(b"2nd", b"third")
