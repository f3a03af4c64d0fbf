# SPDX-License-Identifier: Apache-2.0
"""What the four arguments of ``initialize`` select: transports, addresses, metadata service.

Only decides; facts about this host, such as its devices, are arguments.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mooncake.compat.transfer.environment import EngineSettings
from mooncake.compat.transfer.error_codes import EngineCode, EngineCodeError
from mooncake.errors import InvalidArgument

P2P = "P2PHANDSHAKE"
LEGACY_PORT = 12001

PROTOCOLS = {
    "tcp": "tcp",
    "shm": "shm",
    "rdma": "rdma",
    "cuda": "cuda",
    "nvlink": "cuda",
    "nvlink_intra": "cuda",
    "rpc_only": "",
}
"""Transport that a protocol requires; others are used as well where they are faster."""

BEST_FIRST = ("shm", "cuda", "rdma", "tcp")
DEVICES = {"rdma": "RDMA device", "cuda": "CUDA device"}

UNSUPPORTED_PROTOCOLS = {
    "ascend",
    "ascend_direct",
    "barex",
    "cxi",
    "cxl",
    "efa",
    "hccl",
    "hip",
    "maca",
    "mpcomm",
    "musa",
    "nccl",
    "nvmeof",
    "sunrise_link",
    "tpu",
    "ub",
    "ubshmem",
    "xgmi",
}
"""Protocols of the existing package for hardware that this package has no transport for."""


@dataclass(frozen=True)
class TransportChoice:
    """Settings of the engine to be made, and a warning for the user."""

    flags: dict[str, Any] = field(default_factory=dict)
    "Fields of ``TransferSettings``."
    port: int = 0
    "Port for handshakes; 0 is any of the configured range."
    warning: str = ""


def choose_transports(
    local_hostname: str,
    metadata_server: str,
    protocol: str,
    device_name: str,
    settings: EngineSettings,
    schemes: Sequence[str],
    rdma_devices: Sequence[str],
    resolves: Callable[[str], bool],
    metadata_type: str = "",
) -> TransportChoice:
    """Choose by the first four arguments, those of ``initialize``; the others limit the choice.

    Args:
        schemes: transports that this process could make.
        rdma_devices: names of the RDMA devices of this host.
        resolves: whether a host name has an address.

    Raises:
        InvalidArgument: an unknown or malformed argument.
        EngineCodeError: a device that this host does not have.
    """
    host, port = split_host(local_hostname)
    metadata = metadata_url(metadata_server, metadata_type, settings)
    wanted, warning = _transports(protocol, settings, schemes)
    if warning and device_name.strip():
        _devices(device_name, settings, rdma_devices)  # a device requested by name must exist
    reached_at = host
    if host in ("0.0.0.0", "::") or (metadata != P2P and not resolves(host)):
        reached_at = ""  # a wildcard, or only a name in the metadata service: the engine finds the address
    flags: dict[str, Any] = {
        "transports": wanted,
        "listen_host": settings.bind_address or _listen_host(host, settings.use_ipv6),
        "advertise_host": reached_at,
        "num_streams": settings.lanes_per_peer,
        "metadata": metadata,
        "metadata_cluster": settings.metadata_cluster,
        "metadata_cache_s": _cache_s(metadata, settings),
    }
    if metadata != P2P:
        flags["name"] = local_hostname
    if "rdma" in wanted:
        flags |= {
            "rdma_devices": _devices(device_name, settings, rdma_devices),
            "rdma_port": settings.ib_port,
            "rdma_gid_index": settings.gid_index,
        }
        if settings.ib_traffic_class >= 0:
            flags["rdma_traffic_class"] = settings.ib_traffic_class
    fixed = (port or LEGACY_PORT) if settings.legacy_rpc_port and metadata != P2P else 0
    return TransportChoice(flags, fixed, warning)


def _cache_s(metadata: str, settings: EngineSettings) -> float:
    """Seconds to cache a descriptor; a day with P2P, where a failed transfer fetches it anew."""
    if settings.disable_metacache:
        return 0.0
    if settings.metadata_refresh_s is not None:
        return settings.metadata_refresh_s
    return 86400.0 if metadata == P2P else 5.0


def _transports(
    protocol: str, settings: EngineSettings, schemes: Sequence[str]
) -> tuple[tuple[str, ...], str]:
    protocol = protocol.lower() or "tcp"
    if protocol in UNSUPPORTED_PROTOCOLS:
        raise InvalidArgument(
            "protocol",
            protocol,
            f"{', '.join(PROTOCOLS)}; this package has no transport for {protocol}: use rdma or tcp",
        )
    if protocol not in PROTOCOLS:
        raise InvalidArgument("protocol", protocol, ", ".join(PROTOCOLS))
    needed = PROTOCOLS[protocol]
    if not needed:
        return (), ""
    if settings.force_tcp and (needed != "cuda" or needed in schemes):  # without a GPU NVLink is an error
        return ("tcp",), ""
    wanted = tuple(
        scheme for scheme in BEST_FIRST if scheme in schemes and (scheme != "rdma" or scheme == needed)
    )
    if needed in schemes:
        return wanted, ""
    device = DEVICES.get(needed, f"{needed} transport")
    if needed != "rdma" or settings.force_hca:
        raise EngineCodeError(
            EngineCode.DEVICE_NOT_FOUND if needed == "rdma" else EngineCode.INVALID_ARGUMENT,
            f"protocol {protocol!r}: this host has no {device}; use 'tcp', or install its drivers",
        )
    return wanted, (
        f"protocol {protocol!r}: this host has no {device}, so {' and '.join(wanted)} will carry bytes; "
        "use 'tcp' to silence this, or set MC_FORCE_HCA=1 to make it an error"
    )


def _devices(device_name: str, settings: EngineSettings, present: Sequence[str]) -> tuple[str, ...]:
    named = tuple(name.strip() for name in device_name.split(",") if name.strip()) or settings.devices
    for name in named:
        if name not in present:
            raise EngineCodeError(
                EngineCode.DEVICE_NOT_FOUND,
                f"device {name!r} does not exist; this host has {', '.join(present) or 'none'}",
            )
    if named or not settings.not_devices:
        return named
    left = tuple(name for name in present if name not in settings.not_devices)
    if not left:
        raise EngineCodeError(EngineCode.DEVICE_NOT_FOUND, "MC_TE_FILTERS_EXCLUDE leaves no device")
    return left


def split_host(name: str) -> tuple[str, int]:
    """Split ``host``, ``host:port``, ``[v6]:port`` or a bare IPv6 address into host and port (0: none)."""
    if not name:
        raise InvalidArgument("local_hostname", name, "the address at which peers reach this host")
    if name.startswith("["):
        host, _, rest = name[1:].partition("]")
        port = rest.removeprefix(":")
    elif name.count(":") == 1:
        host, _, port = name.partition(":")
    else:
        host, port = name, ""
    if not host or (port and not (port.isdecimal() and int(port) < 65536)):
        raise InvalidArgument("local_hostname", name, "host, host:port or [IPv6 address]:port")
    return host, int(port or 0)


def _listen_host(host: str, use_ipv6: bool) -> str:
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "::" if use_ipv6 else "0.0.0.0"
    if address.is_loopback:
        return host
    return "::" if use_ipv6 or address.version == 6 else "0.0.0.0"


def metadata_url(server: str, kind: str, settings: EngineSettings) -> str:
    """URL of a metadata service, from the forms in which ``initialize`` takes it."""
    if not server and kind != "p2p":
        raise InvalidArgument("metadata_server", server, f"{P2P}, http://…, etcd://… or redis://…")
    if server == P2P or kind == "p2p":
        return P2P
    url = server
    if kind and "://" not in server:
        if kind not in ("http", "etcd", "redis"):
            raise InvalidArgument("metadata_type", kind, "http, etcd, redis or p2p")
        url = f"{kind}://{server}"
    if url.startswith("redis://") and "@" not in url and (settings.redis_password or settings.redis_database):
        address, _, database = url.removeprefix("redis://").partition("/")
        password = f":{settings.redis_password}@" if settings.redis_password else ""
        url = f"redis://{password}{address}/{database or settings.redis_database}"
    try:
        urlsplit(url if "://" in url else f"//{url}")
    except ValueError as error:
        raise InvalidArgument("metadata_server", server, f"a URL ({error})") from error
    return url
