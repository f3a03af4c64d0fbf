# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from mooncake.transfer.host import host_topology
from mooncake.transfer.topology import (
    Device,
    Distance,
    Matrix,
    Places,
    Topology,
    distance,
    is_location,
    ranks,
)
from tests.transfer.recorded_host import build


def card(name: str, *bus: str, numa: int = 0, kind: str = "rdma") -> Device:
    return Device(name, kind, numa, bus)


def test_the_matrix_of_a_server(tmp_path: Path) -> None:
    topology = host_topology(build("two_sockets", tmp_path))
    assert topology.matrix() == {
        "cpu:0": (["mlx5_0", "mlx5_1"], ["mlx5_2"]),
        "cpu:1": (["mlx5_2"], ["mlx5_0", "mlx5_1"]),
        "cuda:0": (["mlx5_0"], ["mlx5_1", "mlx5_2"]),
        "cuda:1": (["mlx5_2"], ["mlx5_0", "mlx5_1"]),
    }
    assert topology.matrix(["mlx5_1", "mlx5_2"])["cuda:0"] == (["mlx5_1"], ["mlx5_2"])
    assert topology.split("*") == (["mlx5_0", "mlx5_1", "mlx5_2"], [])
    assert topology.split("cuda:7") == topology.split("*"), "a GPU that is not there"


def test_without_cards() -> None:
    assert Topology([0], []).matrix() == {"cpu:0": ([], [])}
    assert Topology([0], [card("gpu0", kind="gpu")]).matrix()["cuda:0"] == ([], [])


def test_distances_as_people_know_them() -> None:
    gpu = card("gpu", "pci0", "0:1.0", "1:0.0", "2:0.0", "3:0.0", kind="gpu")
    one_switch = card("a", "pci0", "0:1.0", "1:0.0", "2:1.0", "4:0.0")
    two_switches = card("b", "pci0", "0:1.0", "5:0.0", "6:0.0", "7:0.0", "8:0.0")
    same_bridge = card("c", "pci0", "0:2.0", "9:0.0")
    same_socket = card("d", "pci1", "0:2.0")
    elsewhere = card("e", "pci2", "0:2.0", numa=1)
    cards = (one_switch, two_switches, same_bridge, same_socket, elsewhere)
    assert [distance(gpu, other) for other in cards] == list(Distance)
    assert [distance(other, gpu) for other in cards] == list(Distance)


def test_rails_are_ranked_for_a_pair_of_buffers(tmp_path: Path) -> None:
    here = host_topology(build("two_sockets", tmp_path)).matrix()
    paths = ["rdma@mlx5_0>mlx5_0", "rdma@mlx5_2>mlx5_2", "rdma@mlx5_0>mlx5_2", "tcp"]
    assert list(ranks(paths, here, "cpu:0", here, "cuda:1").values()) == [1, 1, 0, 0]
    assert list(ranks(paths, here, "cuda:1", here, "cuda:1").values()) == [2, 0, 1, 0]
    assert list(ranks(paths, here, "*", {}, "cpu:0").values()) == [0, 0, 0, 0]
    nowhere_near: Matrix = {"cpu:0": ([], ["mlx5_0", "mlx5_2"])}
    assert list(ranks(paths, nowhere_near, "cpu:0", {}, "*").values()) == [0, 0, 0, 0]


def test_where_memory_is() -> None:
    places = Places([(1000, 100, "cpu:1"), (2000, 10, "*"), (3000, 1, "cuda:0")])
    asked = [999, 1000, 1099, 1100, 2000, 3000, 3001]
    assert [places.at(address) for address in asked] == ["*", "cpu:1", "cpu:1", "*", "*", "cuda:0", "*"]
    assert places and not Places([(1, 2, "*")]) and Places().at(1) == "*"
    assert all(map(is_location, ("*", "cpu:0", "cuda:12")))
    assert not any(map(is_location, ("", "cpu", "gpu:0", "cpu:x", "cpu:-1")))
