# SPDX-License-Identifier: Apache-2.0
"""Devices of hosts, from recordings of their sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.errors import InvalidArgument
from mooncake.transfer.host import host_topology, host_towards, numeric_hosts, reachable_host
from mooncake.transfer.topology import Device, Distance, Topology, distance
from tests.transfer.recorded_host import build


def test_a_server_with_gpus(tmp_path: Path) -> None:
    topology = host_topology(build("two_sockets", tmp_path))
    assert topology.nodes == [0, 1]
    assert [card.name for card in topology.of_kind("gpu")] == ["0000:18:00.0", "0000:9d:00.0"]
    first, second, third = topology.of_kind("rdma")
    assert (first.name, first.numa, first.is_up, first.gbit_per_s) == ("mlx5_0", 0, True, 400.0)
    assert first.carries == "eth2" and first.bus[0] == "pci0000:15" and first.bus[-1] == "0000:1a:00.0"
    assert not second.is_up and third.numa == 1
    (eth2,) = topology.of_kind("net")
    assert (eth2.name, eth2.is_up, eth2.gbit_per_s, eth2.bus) == ("eth2", True, 400.0, first.bus)
    near, far = topology.of_kind("gpu")
    assert [distance(near, card) for card in (first, second, third)] == [
        Distance.PIX,
        Distance.NODE,
        Distance.SYS,
    ]
    assert distance(far, third) == Distance.PIX


def test_devices_in_software(tmp_path: Path) -> None:
    topology = host_topology(build("soft_roce", tmp_path))
    first, second = topology.of_kind("rdma")
    assert (first.carries, first.bus, first.numa) == ("eth0", ("pci0000:00", "0000:00:03.0"), -1)
    assert (second.carries, second.bus, second.is_up) == ("", (), True)
    assert topology.matrix() == {"cpu:0": (["rxe0", "rxe1"], [])}


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    assert host_topology(tmp_path / "nothing") == Topology([0], [])


def test_this_host() -> None:
    topology = host_topology()
    assert topology.nodes and all(isinstance(card, Device) for card in topology.devices)
    assert "cpu:0" in topology.matrix()


@pytest.mark.parametrize("name", ["x" * 64, "a..b", ".a", "é" * 70, "a\0b", "\udc80"])
def test_names_that_no_host_can_have(name: str) -> None:
    with pytest.raises(InvalidArgument, match="resolves"):
        numeric_hosts(name, "host")
    assert host_towards(name) == reachable_host("0.0.0.0")
