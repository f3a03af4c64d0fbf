# SPDX-License-Identifier: Apache-2.0
"""What a Lease shows, what it costs, and what an API server's refusals become."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.errors import (
    AccessDenied,
    InvalidArgument,
    PeerLost,
    ProtocolError,
    StorageError,
    Unavailable,
)
from mooncake.store.ha.election import LeaderLease
from mooncake.store.ha.kubernetes_lease import RECORD, KubernetesLeaseStore, changed_lease, lease_name
from mooncake.store.ha.lease_store import make_lease_store
from mooncake.store.server import MasterServer
from mooncake.store.settings import MasterSettings
from tests.contract.kubernetes_api import NAMESPACE, KubernetesApi
from tests.waiting import until


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesApi]:
    api = KubernetesApi(tmp_path)
    yield api
    api.stop()


def store_of(api: KubernetesApi, name: str = "blue") -> KubernetesLeaseStore:
    found = make_lease_store(api.url(name))
    assert isinstance(found, KubernetesLeaseStore)
    return found


def record(leader: str, term: int, beat: int = 0) -> bytes:
    address = f"{leader}:50051" if leader else ""
    return LeaderLease(leader, address, term, beat, 2.5).encode()


def test_the_lease_shows_what_the_record_says(api: KubernetesApi) -> None:
    lease_store = store_of(api)
    assert lease_store.swap(None, record("a", 1))
    assert lease_store.swap(record("a", 1), record("a", 1, 1))
    lease = api.store.leases[NAMESPACE, "blue"]
    spec = lease["spec"]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (
        "a:50051",
        3,
        0,
    )
    assert spec["acquireTime"] < spec["renewTime"]
    assert lease["metadata"]["annotations"][RECORD].encode() == record("a", 1, 1)
    assert lease_store.swap(record("a", 1, 1), record("b", 2))
    spec = api.store.leases[NAMESPACE, "blue"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("b:50051", 1)
    assert lease_store.swap(record("b", 2), record("", 2, 1)), "a resignation without a successor"
    assert "holderIdentity" not in api.store.leases[NAMESPACE, "blue"]["spec"]
    assert lease_store.read() == record("", 2, 1)


def test_a_renewal_is_one_request(api: KubernetesApi) -> None:
    lease_store = store_of(api)
    assert lease_store.read() is None
    assert lease_store.swap(None, record("a", 1))
    api.store.requests.clear()
    for beat in range(3):
        assert lease_store.swap(record("a", 1, beat), record("a", 1, beat + 1))
    assert api.store.requests == ["update"] * 3


def test_a_change_of_labels_does_not_end_a_lease(api: KubernetesApi) -> None:
    lease_store = store_of(api)
    assert lease_store.swap(None, record("a", 1))
    api.store.touch("blue")
    assert lease_store.swap(record("a", 1), record("a", 1, 1))
    assert "touched" in api.store.leases[NAMESPACE, "blue"]["metadata"]["labels"], "what others write stays"


def test_a_record_that_was_replaced_is_not_replaced_again(api: KubernetesApi) -> None:
    one, other = store_of(api), store_of(api)
    assert one.swap(None, record("a", 1)) and other.read() == record("a", 1)
    assert other.swap(record("a", 1), record("b", 2))
    assert not one.swap(record("a", 1), record("a", 1, 1)), "its copy of the object is old"
    assert one.read() == record("b", 2)
    del api.store.leases[NAMESPACE, "blue"]
    assert not other.swap(record("b", 2), record("b", 2, 1)), "it was deleted"
    assert other.swap(None, record("b", 2, 1))


def test_a_lease_made_beforehand_needs_no_right_to_create(api: KubernetesApi) -> None:
    api.store.verbs = {"get", "update"}
    with pytest.raises(AccessDenied, match=r"coordination\.k8s\.io"):
        store_of(api).swap(None, record("a", 1))
    metadata = {"name": "blue", "namespace": NAMESPACE, "resourceVersion": "7"}
    empty = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
    api.store.leases[NAMESPACE, "blue"] = empty
    assert store_of(api).swap(None, record("a", 1))


def test_a_lease_of_another_program_is_left_alone(api: KubernetesApi) -> None:
    metadata = {"name": "blue", "namespace": NAMESPACE, "resourceVersion": "7"}
    api.store.leases[NAMESPACE, "blue"] = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {"holderIdentity": "scheduler-1"},
    }
    for call in (lambda: store_of(api).read(), lambda: store_of(api).swap(None, b"{}")):
        with pytest.raises(ProtocolError, match="scheduler-1"):
            call()


def test_a_token_is_read_again(api: KubernetesApi) -> None:
    lease_store = store_of(api)
    assert lease_store.read() is None
    api.store.token = "second token"
    with pytest.raises(AccessDenied, match="Unauthorized"):
        lease_store.read()
    api.set_token("second token")
    assert lease_store.read() is None
    (api.account / "token").unlink()
    with pytest.raises(StorageError, match="automountServiceAccountToken"):
        lease_store.read()


@pytest.mark.parametrize(("status", "error"), [(429, Unavailable), (500, PeerLost), (503, PeerLost)])
def test_a_busy_api_server_is_unavailable(api: KubernetesApi, status: int, error: type[Exception]) -> None:
    lease_store = store_of(api)
    api.store.fails_with = status
    with pytest.raises(error):
        lease_store.swap(None, record("a", 1))
    api.store.fails_with = 0
    assert lease_store.swap(None, record("a", 1)), "the next request asks again"


def test_other_answers_are_named(api: KubernetesApi) -> None:
    other = api.url("blue").replace(NAMESPACE, "elsewhere", 1)
    with pytest.raises(ProtocolError, match='namespaces "elsewhere" not found'):
        make_lease_store(other).swap(None, record("a", 1))
    api.store.fails_with = 418
    with pytest.raises(ProtocolError, match="418 injected"):
        store_of(api).read()


def test_another_authority_is_not_trusted(api: KubernetesApi, tmp_path: Path) -> None:
    from mooncake.cli.certs import CertsSettings, make

    make(CertsSettings(folder=tmp_path / "others"))
    (api.account / "ca.crt").write_bytes((tmp_path / "others" / "ca.pem").read_bytes())
    with pytest.raises(ProtocolError, match="TLS failed"):
        store_of(api).read()
    assert not api.store.requests, "the token was not sent"


@pytest.mark.parametrize(
    "url",
    [
        "k8s://",
        "k8s://Upper/blue",
        "k8s://a/b/c",
        "k8s://ns/blue?server=nowhere",
        "k8s://ns/blue?serve=a:1",
        "k8s://ns/blue?account=/nowhere",
    ],
)
def test_an_invalid_url_is_named(url: str, api: KubernetesApi) -> None:
    with pytest.raises(InvalidArgument, match="election"):
        make_lease_store(
            url if "account=" in url else f"{url}{'&' if '?' in url else '?'}account={api.account}"
        )


def test_names_of_clusters_become_names_of_objects() -> None:
    assert lease_name("blue.green-1") == "blue.green-1"
    mapped = {lease_name(name) for name in ("mooncake_cluster", "mooncake-Cluster", "a" * 300, "-", "_")}
    assert len(mapped) == 5 and "mooncake-cluster" not in mapped
    assert all(lease_name(name) == name for name in mapped), "those are valid"


def test_what_others_wrote_into_the_object_stays() -> None:
    before: dict[str, Any] = {
        "metadata": {"name": "x", "annotations": {"theirs": "1"}, "resourceVersion": "9"},
        "spec": {"preferredHolder": "y"},
    }
    after = changed_lease(before, b"no record", 0.0)
    assert after["metadata"]["annotations"] == {"theirs": "1", RECORD: "no record"}
    assert after["metadata"]["resourceVersion"] == "9" and after["spec"] == {"preferredHolder": "y"}


async def test_masters_elect_through_it(api: KubernetesApi) -> None:
    servers = []
    try:
        for _ in range(2):
            server = MasterServer(MasterSettings(port=0, election=api.url("blue"), election_lease_s=1.0))
            servers.append(server)
            await server.start()
        await until(lambda: any(one.leadership.is_leader for one in servers))
        leader = next(one for one in servers if one.leadership.is_leader)
        other = next(one for one in servers if one is not leader)
        assert api.store.leases[NAMESPACE, "blue"]["spec"]["holderIdentity"] == leader.address
        await until(lambda: leader.num_standbys == 1)
        await leader.close()
        await until(lambda: other.leadership.is_leader)
        spec = api.store.leases[NAMESPACE, "blue"]["spec"]
        assert spec["holderIdentity"] == other.address and spec["leaseTransitions"] >= 1
    finally:
        for server in servers:
            await server.close()
