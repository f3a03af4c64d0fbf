# SPDX-License-Identifier: Apache-2.0
"""This host as the operating system describes it: its identity, addresses for peers, and devices in sysfs.

It knows system calls and file paths only; ``topology.py`` decides which devices are near to each other.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from pathlib import Path

from mooncake.errors import InvalidArgument
from mooncake.transfer.topology import Device, Topology

NVIDIA = "0x10de"
DISPLAY_CONTROLLERS = ("0x0300", "0x0302")
"""PCI classes of graphics cards and of those without a screen."""


def host_identity() -> str:
    """Identity of the running kernel and network namespace, the scope of abstract socket names."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"unknown/{secrets.token_hex(8)}"  # equal to no other host: no memory is shared


def reachable_host(listen_host: str) -> str:
    """The address to publish: the one listened on, or that of the default route for a wildcard."""
    if listen_host not in ("0.0.0.0", "::"):
        return listen_host
    family, target = (
        (socket.AF_INET, "192.0.2.1") if listen_host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: the kernel only picks a source address
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1" if family == socket.AF_INET else "::1"


def host_towards(peer: str) -> str:
    """Address of this host on the route to ``peer``; the default route's if the name does not resolve."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel only picks a source address
            return str(probe.getsockname()[0])
    except (OSError, ValueError):  # ValueError: no host can have this name
        return reachable_host("::" if ":" in peer else "0.0.0.0")


def numeric_host(host: str, field: str) -> str:
    """Resolve a host name once: resolving may block, and a name may have several addresses."""
    return numeric_hosts(host, field)[0]


def numeric_hosts(host: str, field: str) -> list[str]:
    """Resolve a host name to all its addresses, of both families; blocks.

    Raises:
        InvalidArgument: names ``field``; the name does not resolve.
    """
    if not host:
        raise InvalidArgument(field, host, "a host name or address")
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: no host can have this name
        raise InvalidArgument(field, host, f"a host name or address that resolves ({error})") from error
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def canonical_host(host: str) -> str:
    """One spelling of an address: no brackets, no scope, IPv4 without the prefix that IPv6 gives it.

    A name becomes lower case.
    """
    name = host.strip("[]")
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name.lower()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def has_ipv6() -> bool:
    """Whether a listener of this host may have IPv6 addresses."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def with_port(host: str, port: int) -> str:
    """``host:port``, or ``[host]:port`` when the host is an IPv6 address."""
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_topology(root: str | Path = "/sys") -> Topology:
    """Read the topology of the host whose sysfs is mounted at ``root``. Unreadable files are left out."""
    sys = Path(root)
    interfaces = {card.name: card for card in map(_interface, _children(sys / "class/net"))}
    devices = [_rdma(path, interfaces) for path in _children(sys / "class/infiniband")]
    devices += [card for card in interfaces.values() if card.name != "lo"]
    devices += [
        Device(path.name, "gpu", _number(path / "numa_node"), _bus(path))
        for path in _children(sys / "bus/pci/devices")
        if _text(path / "vendor") == NVIDIA and _text(path / "class").startswith(DISPLAY_CONTROLLERS)
    ]
    return Topology(_nodes(sys), devices)


def _nodes(sys: Path) -> list[int]:
    names = [path.name for path in _children(sys / "devices/system/node")]
    numbers = [int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit()]
    return sorted(numbers) or [0]


def _interface(path: Path) -> Device:
    speed = _number(path / "speed")  # Mbit/s, -1 when there is no link
    return Device(
        name=path.name,
        kind="net",
        numa=_number(path / "device/numa_node"),
        bus=_bus(path / "device"),
        is_up=_text(path / "operstate") in ("up", "unknown"),
        gbit_per_s=max(0, speed) / 1000,
    )


def _rdma(path: Path, interfaces: dict[str, Device]) -> Device:
    port = next(iter(_children(path / "ports")), path)
    carries = _text(path / "parent") or next(
        (name for name in map(_text, _children(port / "gid_attrs/ndevs")) if name), ""
    )
    card = interfaces.get(carries)
    return Device(
        name=path.name,
        kind="rdma",
        numa=_number(path / "device/numa_node")
        if card is None
        else max(card.numa, _number(path / "device/numa_node")),
        bus=_bus(path / "device") or (card.bus if card is not None else ()),
        is_up=_text(port / "state").endswith("ACTIVE"),
        gbit_per_s=_leading_number(_text(port / "rate")),
        carries=carries,
    )


def _bus(device: Path) -> tuple[str, ...]:
    """PCI addresses from the host bridge down."""
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ()
    begin = next((i for i, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return tuple(part for part in parts[begin:] if ":" in part)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:  # no such file here, or unreadable now (speed of a link that is down)
        return ""


def _number(file: Path) -> int:
    text = _text(file)
    return int(text) if text.lstrip("-").isdigit() else -1


def _leading_number(text: str) -> float:
    """``100 Gb/sec (4X EDR)`` -> 100.0"""
    first = text.split(" ")[0]
    return float(first) if first.replace(".", "", 1).isdigit() else 0.0
