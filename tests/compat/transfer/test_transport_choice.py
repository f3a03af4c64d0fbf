# SPDX-License-Identifier: Apache-2.0
"""What the arguments of ``initialize`` select."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.compat.transfer.environment import EngineSettings
from mooncake.compat.transfer.error_codes import EngineCode, EngineCodeError
from mooncake.compat.transfer.transport_choice import (
    P2P,
    PROTOCOLS,
    UNSUPPORTED_PROTOCOLS,
    TransportChoice,
    choose_transports,
    metadata_url,
    split_host,
)
from mooncake.config import options
from mooncake.errors import InvalidArgument
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.transports import SCHEMES

ALL = ("local", "tcp", "rdma", "cuda", "shm")


def choice(
    host: str = "10.0.0.1",
    metadata: str = P2P,
    protocol: str = "tcp",
    device: str = "",
    schemes: tuple[str, ...] = ALL,
    cards: tuple[str, ...] = ("mlx5_0", "mlx5_1"),
    kind: str = "",
    **fields: Any,
) -> TransportChoice:
    def resolves(host: str) -> bool:
        return host != "a-name"

    return choose_transports(
        host, metadata, protocol, device, EngineSettings(**fields), schemes, cards, resolves, kind
    )


def test_protocols_and_their_transports() -> None:
    assert choice().flags["transports"] == ("shm", "cuda", "tcp")
    assert choice(schemes=("tcp", "shm")).flags["transports"] == ("shm", "tcp")
    assert choice(protocol="rdma").flags["transports"] == ("shm", "cuda", "rdma", "tcp")
    assert choice(protocol="nvlink").flags["transports"] == ("shm", "cuda", "tcp")
    assert choice(protocol="rpc_only").flags["transports"] == ()
    assert choice(protocol="rdma", force_tcp=True).flags["transports"] == ("tcp",)
    assert not set(PROTOCOLS) & set(UNSUPPORTED_PROTOCOLS)


def test_without_the_device() -> None:
    few = ("local", "shm", "tcp")
    fallen = choice(protocol="rdma", schemes=few, cards=())
    assert fallen.flags["transports"] == ("shm", "tcp") and "no RDMA device" in fallen.warning
    with pytest.raises(EngineCodeError, match="'mlx5_7' does not exist; this host has none"):
        choice(protocol="rdma", schemes=few, cards=(), device="mlx5_7")
    with pytest.raises(EngineCodeError, match="no RDMA device") as refused:
        choice(protocol="rdma", schemes=few, cards=(), force_hca=True)
    assert refused.value.number == EngineCode.DEVICE_NOT_FOUND
    with pytest.raises(EngineCodeError, match="no CUDA device"):
        choice(protocol="nvlink", schemes=few)
    with pytest.raises(EngineCodeError, match="no CUDA device"):
        choice(protocol="nvlink", schemes=few, force_tcp=True)
    assert choice(protocol="nvlink", force_tcp=True).flags["transports"] == ("tcp",)
    for protocol in ("", "TCP"):
        assert choice(protocol=protocol) == choice(protocol="tcp")
    for protocol in ("xgmi", "efa", "anything"):
        with pytest.raises(InvalidArgument, match="allowed: tcp"):
            choice(protocol=protocol)


def test_rdma_devices() -> None:
    assert choice(protocol="rdma").flags["rdma_devices"] == ()
    assert choice(protocol="rdma", device="mlx5_1, mlx5_0").flags["rdma_devices"] == ("mlx5_1", "mlx5_0")
    assert choice(protocol="rdma", devices=("mlx5_1",)).flags["rdma_devices"] == ("mlx5_1",)
    assert choice(protocol="rdma", not_devices=("mlx5_1",)).flags["rdma_devices"] == ("mlx5_0",)
    assert "rdma_devices" not in choice(device="eth0").flags
    with pytest.raises(EngineCodeError, match="this host has mlx5_0, mlx5_1"):
        choice(protocol="rdma", device="mlx5_7")
    with pytest.raises(EngineCodeError, match="leaves no device"):
        choice(protocol="rdma", not_devices=("mlx5_0", "mlx5_1"))


@pytest.mark.parametrize(
    ("host", "listen", "advertise"),
    [
        ("10.0.0.1", "0.0.0.0", "10.0.0.1"),
        ("10.0.0.1:77", "0.0.0.0", "10.0.0.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("localhost:5", "127.0.0.1", "localhost"),
        ("worker-3", "0.0.0.0", "worker-3"),
        ("fd00::5", "::", "fd00::5"),
        ("[::1]:80", "::1", "::1"),
        ("0.0.0.0", "0.0.0.0", ""),
        ("::", "::", ""),
    ],
)
def test_addresses_are_those_of_the_user(host: str, listen: str, advertise: str) -> None:
    flags = choice(host).flags
    assert (flags["listen_host"], flags["advertise_host"]) == (listen, advertise)
    assert choice(host, bind_address="10.9.9.9").flags["listen_host"] == "10.9.9.9"
    assert choice("worker-3", use_ipv6=True).flags["listen_host"] == "::"


@pytest.mark.parametrize("host", ["", "host:port", "host:70000", "[::1", ":5"])
def test_invalid_hosts(host: str) -> None:
    if host == "[::1":
        assert split_host(host) == ("::1", 0)
        return
    with pytest.raises(InvalidArgument, match="local_hostname"):
        split_host(host)


def test_names_and_ports_with_a_metadata_service() -> None:
    served = choice("a-name:55", "http://m:8080/metadata")
    assert served.flags["name"] == "a-name:55" and served.port == 0
    assert served.flags["advertise_host"] == "", "only a name: the engine finds its address"
    assert choice("a-name:55", "etcd://m:2379", legacy_rpc_port=True).port == 55
    assert choice("10.0.0.1", "etcd://m:2379", legacy_rpc_port=True).port == 12001
    assert choice("10.0.0.1:55", legacy_rpc_port=True).port == 0 and "name" not in choice().flags


@pytest.mark.parametrize(
    ("server", "kind", "url"),
    [
        (P2P, "", P2P),
        ("", "p2p", P2P),
        ("http://h:1/metadata", "", "http://h:1/metadata"),
        ("http://h:1/metadata", "zookeeper", "http://h:1/metadata"),
        ("h:2379", "", "h:2379"),
        ("h:2379", "etcd", "etcd://h:2379"),
        ("redis://h:1", "redis", "redis://:secret@h:1/3"),
        ("redis://h:1/9", "", "redis://:secret@h:1/9"),
        ("redis://:other@h:1", "", "redis://:other@h:1"),
    ],
)
def test_forms_of_a_metadata_service(server: str, kind: str, url: str) -> None:
    assert metadata_url(server, kind, EngineSettings(redis_password="secret", redis_database=3)) == url


def test_invalid_metadata_services() -> None:
    with pytest.raises(InvalidArgument, match="metadata_server"):
        metadata_url("", "", EngineSettings())
    with pytest.raises(InvalidArgument, match="metadata_type"):
        metadata_url("h:1", "zookeeper", EngineSettings())


def test_descriptors_are_cached_for_the_configured_time() -> None:
    assert choice().flags["metadata_cache_s"] > 3600, "a failed transfer fetches the descriptor again"
    assert choice(metadata="h:2379").flags["metadata_cache_s"] == 5
    assert choice(metadata_refresh_s=2).flags["metadata_cache_s"] == 2
    assert choice(disable_metacache=True).flags["metadata_cache_s"] == 0


def test_every_flag_is_a_setting() -> None:
    flags = choice(protocol="rdma", metadata="h:1", ib_traffic_class=3).flags
    known = {option.field for option in options(TransferSettings)}
    assert {flag for flag in flags if "rdma" in SCHEMES or not flag.startswith("rdma_")} <= known
