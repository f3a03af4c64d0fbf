"""What the four words of ``initialize`` come to: which transports, which addresses, which metadata.

Decides only; who we are and which devices there are arrive as arguments.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
"""The transport that a protocol cannot do without; others are used, too, where they are quicker."""

BEST_FIRST = ("shm", "cuda", "rdma", "tcp")
DEVICES = {"rdma": "RDMA device", "cuda": "CUDA device"}

UNSUPPORTED_PROTOCOLS = {
    *("ascend", "ascend_direct", "barex", "cxi", "cxl", "efa", "hccl", "hip", "maca", "mpcomm", "musa"),
    *("nccl", "nvmeof", "sunrise_link", "tpu", "ub", "ubshmem", "xgmi"),
}
"""Protocols of the existing package for hardware that this one has no transport for."""


@dataclass(frozen=True)
class TransportChoice:
    """Settings of the engine to be made, and what the user should be told."""

    flags: dict[str, Any] = field(default_factory=dict)
    "Fields of ``TransferSettings``."
    port: int = 0
    "For handshakes; 0 is any of the range."
    warning: str = ""


def choose_transports(
    local_hostname: str,
    metadata_server: str,
    protocol: str,
    device_name: str,
    knobs: EngineSettings,
    schemes: Sequence[str],
    rdma_devices: Sequence[str],
    resolves: Callable[[str], bool],
    metadata_type: str = "",
) -> TransportChoice:
    """Everything but the first four words says what may be chosen from.

    Args:
        schemes: transports that this process could make.
        rdma_devices: names of those that this machine has.
        resolves: whether a host name has an address.

    Raises:
        InvalidArgument: a word that means nothing.
        Refused: a device that is not there.
    """
    host, port = split_host(local_hostname)
    metadata = metadata_url(metadata_server, metadata_type, knobs)
    wanted, warning = _transports(protocol, knobs, schemes)
    if warning and device_name.strip():
        _devices(device_name, knobs, rdma_devices)  # what was asked for by name is missed, not replaced
    reached_at = host
    if host in ("0.0.0.0", "::") or (metadata != P2P and not resolves(host)):
        reached_at = ""  # a wildcard, or a name for the metadata service and no more: the engine says where
    flags: dict[str, Any] = {
        "transports": wanted,
        "listen_host": knobs.bind_address or _listen_host(host, knobs.use_ipv6),
        "advertise_host": reached_at,
        "num_streams": knobs.lanes_per_peer,
        "metadata": metadata,
        "metadata_cluster": knobs.metadata_cluster,
        "metadata_cache_s": _cache_s(metadata, knobs),
    }
    if metadata != P2P:
        flags["name"] = local_hostname
    if "rdma" in wanted:
        flags |= {
            "rdma_devices": _devices(device_name, knobs, rdma_devices),
            "rdma_port": knobs.ib_port,
            "rdma_gid_index": knobs.gid_index,
        }
        if knobs.ib_traffic_class >= 0:
            flags["rdma_traffic_class"] = knobs.ib_traffic_class
    fixed = (port or LEGACY_PORT) if knobs.legacy_rpc_port and metadata != P2P else 0
    return TransportChoice(flags, fixed, warning)


def _cache_s(metadata: str, knobs: EngineSettings) -> float:
    """A peer that is asked itself is asked again when something fails, and need not be disturbed before."""
    if knobs.disable_metacache:
        return 0.0
    if knobs.metadata_refresh_s is not None:
        return knobs.metadata_refresh_s
    return 86400.0 if metadata == P2P else 5.0


def _transports(protocol: str, knobs: EngineSettings, schemes: Sequence[str]) -> tuple[tuple[str, ...], str]:
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
    if knobs.force_tcp:
        return ("tcp",), ""
    wanted = tuple(
        scheme for scheme in BEST_FIRST if scheme in schemes and (scheme != "rdma" or scheme == needed)
    )
    if needed in schemes:
        return wanted, ""
    device = DEVICES.get(needed, f"{needed} transport")
    if needed != "rdma" or knobs.force_hca:
        raise EngineCodeError(
            EngineCode.DEVICE_NOT_FOUND,
            f"protocol {protocol!r}: this machine has no {device}; say 'tcp', or see to its drivers",
        )
    return wanted, (
        f"protocol {protocol!r}: this machine has no {device}, so {' and '.join(wanted)} will carry bytes; "
        "say 'tcp' to silence this, or set MC_FORCE_HCA=1 to make it an error"
    )


def _devices(device_name: str, knobs: EngineSettings, present: Sequence[str]) -> tuple[str, ...]:
    named = tuple(name.strip() for name in device_name.split(",") if name.strip()) or knobs.devices
    for name in named:
        if name not in present:
            raise EngineCodeError(
                EngineCode.DEVICE_NOT_FOUND,
                f"device {name!r} is not here; this machine has {', '.join(present) or 'none'}",
            )
    if named or not knobs.not_devices:
        return named
    left = tuple(name for name in present if name not in knobs.not_devices)
    if not left:
        raise EngineCodeError(EngineCode.DEVICE_NOT_FOUND, "MC_TE_FILTERS_EXCLUDE leaves no device")
    return left


def split_host(name: str) -> tuple[str, int]:
    """``host``, ``host:port``, ``[v6]:port`` or a bare IPv6 address, as host and port (0: none)."""
    if not name:
        raise InvalidArgument("local_hostname", name, "the address at which peers reach this machine")
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


def metadata_url(server: str, kind: str, knobs: EngineSettings) -> str:
    """The URL of a metadata service, from the ways in which it may be written."""
    if not server and kind != "p2p":
        raise InvalidArgument("metadata_server", server, f"{P2P}, http://…, etcd://… or redis://…")
    if server == P2P or kind == "p2p":
        return P2P
    url = server
    if kind:
        if kind not in ("http", "etcd", "redis"):
            raise InvalidArgument("metadata_type", kind, "http, etcd, redis or p2p")
        if "://" not in server:
            url = f"{kind}://{server}"
    if url.startswith("redis://") and "@" not in url and (knobs.redis_password or knobs.redis_database):
        address, _, database = url.removeprefix("redis://").partition("/")
        password = f":{knobs.redis_password}@" if knobs.redis_password else ""
        url = f"redis://{password}{address}/{database or knobs.redis_database}"
    return url
