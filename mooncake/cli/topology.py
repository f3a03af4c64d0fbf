# SPDX-License-Identifier: Apache-2.0
"""Which network card is near which memory, as a table or (for programs) as JSON.

``transfer_engine_topology_dump`` is the older name, with the flags that programs pass to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from rich.console import Console
from rich.table import Table

from mooncake.errors import InvalidArgument, MooncakeError
from mooncake.transfer.host import host_topology
from mooncake.transfer.topology import Device, Matrix, Topology, distance


def show_topology(root: str, as_json: bool, device_names: Sequence[str] = ()) -> None:
    """Print this host's topology.

    Raises:
        InvalidArgument: no RDMA device here has that name.
    """
    topology = host_topology(root)
    matrix = _matrix(topology, device_names)
    if as_json:
        print(json.dumps(matrix))
        return
    console = Console()
    console.print(_locations(topology, matrix))
    console.print(_devices(topology))
    if topology.of_kind("gpu"):
        console.print(_distances(topology))
    if not topology.of_kind("rdma"):
        console.print("no RDMA device here: transfers go over shm on this host and over tcp between hosts")


def dump_main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script ``transfer_engine_topology_dump``."""
    parser = argparse.ArgumentParser(
        prog="transfer_engine_topology_dump", description="Print which NICs are near which memory, as JSON."
    )
    _add(parser, "device-name", default="", help="only these devices, separated by commas")
    _add(
        parser, "backend", default="auto", choices=("auto", "te", "tent"), help="ignored: there is one engine"
    )
    _add(
        parser,
        "use-custom-topo",
        nargs="?",
        const="true",
        default="false",
        help="print a topology file instead",
    )
    _add(parser, "custom-topo-json", default="", help="that file")
    parser.add_argument("--root", default="/sys", help="where sysfs is mounted")
    given = parser.parse_args(arguments)
    try:
        names = [name for name in given.device_name.split(",") if name]
        if given.use_custom_topo.lower() in ("true", "1", "yes", "y", "t"):
            matrix = _custom(given.custom_topo_json)
        else:
            matrix = _matrix(host_topology(given.root), names)
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(matrix, indent=2))
    sys.exit(0)


def _add(parser: argparse.ArgumentParser, name: str, **options: object) -> None:
    """Add a flag with hyphens or underscores, one dash or two: all are in use."""
    spelled = dict.fromkeys((name, name.replace("-", "_")))
    flags = [dashes + word for word in spelled for dashes in ("--", "-")]
    parser.add_argument(*flags, dest=name.replace("-", "_"), **options)  # type: ignore[arg-type]


def _matrix(topology: Topology, device_names: Sequence[str]) -> Matrix:
    known = [device.name for device in topology.of_kind("rdma")]
    for name in device_names:
        if name not in known:
            raise InvalidArgument("device-name", name, ", ".join(known) or "nothing: no RDMA device is here")
    return topology.matrix(device_names)


def _custom(file: str) -> Matrix:
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=Matrix)
    except OSError as error:
        raise InvalidArgument("custom-topo-json", file, f"a readable file ({error.strerror})") from error
    except msgspec.MsgspecError as error:
        raise InvalidArgument(
            "custom-topo-json", file, f'a file like {{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}} ({error})'
        ) from error


def _locations(topology: Topology, matrix: Matrix) -> Table:
    table = Table("memory at", "GPU", "preferred NICs", "other NICs", title="Locations")
    gpus = topology.of_kind("gpu")
    for location, (preferred, others) in matrix.items():
        kind, _, number = location.partition(":")
        gpu = gpus[int(number)].name if kind == "cuda" else ""
        table.add_row(location, gpu, ", ".join(preferred) or "-", ", ".join(others) or "-")
    return table


def _devices(topology: Topology) -> Table:
    table = Table("device", "kind", "NUMA node", "state", "Gbit/s", "interface", "PCI", title="Cards")
    for card in topology.devices:
        table.add_row(
            card.name,
            card.kind,
            str(card.numa) if card.numa >= 0 else "-",
            "" if card.kind == "gpu" else "up" if card.is_up else "down",
            f"{card.gbit_per_s:g}" if card.gbit_per_s else "-",
            card.carries,
            card.bus[-1] if card.bus else "virtual",
        )
    return table


def _distances(topology: Topology) -> Table:
    cards: list[Device] = topology.of_kind("rdma") or topology.of_kind("net")
    table = Table("", *(card.name for card in cards), title="Distances")
    for i, gpu in enumerate(topology.of_kind("gpu")):
        table.add_row(f"cuda:{i}", *(distance(gpu, card).name for card in cards))
    return table
