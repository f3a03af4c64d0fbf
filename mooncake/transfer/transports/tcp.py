# SPDX-License-Identifier: Apache-2.0
"""The tcp transport: one-sided reads and writes served by native threads, several streams per peer.

A thin layer: ``native/tcp.h`` moves the bytes, ``native/wire.h`` describes the protocol. Connections are made
when the first slices need them, so ``connect`` never blocks and never fails for a dead peer: the first
completion reports it.

Several addresses are several rails: the first local address is paired with the peer's first, and so on. One
server listens on all of them, and a rail's connections begin at its own local address.
"""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Sequence

from mooncake import _native
from mooncake.errors import AddressInUse, InvalidArgument, PeerLost, Unavailable
from mooncake.file_limit import default_max_connections
from mooncake.security import is_loopback
from mooncake.security.tls_contexts import check_files, wrong_file
from mooncake.transfer.descriptor import RegionInfo
from mooncake.transfer.host import numeric_host, with_port
from mooncake.transfer.settings import TransferSettings
from mooncake.transfer.transports import PeerConnection, TransportContext, region_rows

WILDCARDS = ("0.0.0.0", "::")

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EAGAIN})
"""Errors by which the system says that it has no descriptor, memory or thread left for this process."""


class TcpConnection:
    is_lost = False  # a connection refused now may be accepted later

    def __init__(self, peer: _native.TcpPeer) -> None:
        self._peer = peer
        self.run = peer.run
        self.run_slice = peer.run_slice
        self.submit = peer.submit
        self.cancel = peer.cancel
        self.close = peer.close

    def view(self, address: int, size_bytes: int, timeout_s: float) -> None:
        return None

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        self._peer.set_remote(region_rows(regions))


class TcpTransport:
    def __init__(self, site: TransportContext) -> None:
        self._regions = site.regions
        self._num_streams = site.num_streams
        settings = site.settings
        self._tls = native_tls(settings) if settings.tls == "all" else None
        self._hosts = [numeric_host(host, "listen_host") for host in site.listen_host.split(",")]
        advertised = [published_host(host) for host in site.advertise_host.split(",")]
        if len(advertised) != len(self._hosts):
            raise InvalidArgument(
                "advertise_host", site.advertise_host, f"one address for each of {site.listen_host}"
            )
        try:
            self._server = _native.TcpServer(
                site.regions,
                site.epoch,
                self._hosts,
                site.tcp_port,
                site.num_streams,
                self._tls,
                settings.greeting_timeout_s,
                settings.stall_timeout_s,
                settings.max_connections or default_max_connections(),
            )
        except OSError as error:
            where = f"{site.listen_host}:{site.tcp_port}"
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"tcp transport: {where} is in use; choose another tcp_port or 0"
                ) from error
            if error.errno in EXHAUSTED:
                raise Unavailable(
                    f"tcp transport: {error}; raise this process's limits of open files and threads "
                    "(ulimit -n, ulimit -u), or close what it does not need"
                ) from error
            raise InvalidArgument(
                "listen_host", site.listen_host, f"an address of this host ({error})"
            ) from error
        self.endpoint = ",".join(
            with_port(host, port) for host, port in zip(advertised, self._server.ports, strict=True)
        )

    def rails(self, endpoint: str) -> list[str]:
        ours = ["*" if host in WILDCARDS else host for host in self._hosts]
        theirs = [place.rpartition(":")[0].strip("[]") for place in endpoint.split(",")]
        num_rails = max(len(ours), len(theirs))
        if num_rails == 1:
            return []
        pairs = [(ours[i % len(ours)], theirs[i % len(theirs)]) for i in range(num_rails)]
        # From a loopback address no other host can be reached: the kernel chooses the source there.
        return [
            f"{'*' if _is_loopback_number(source) and not _is_loopback_number(target) else source}>{target}"
            for source, target in pairs
        ]

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float, *, rail: str = ""
    ) -> PeerConnection:
        source, _, target = rail.partition(">")
        places = [place.rpartition(":") for place in endpoint.split(",")]
        host, port = next(
            ((host.strip("[]"), port) for host, _, port in places if host.strip("[]") == target),
            (places[0][0].strip("[]"), places[0][2]),
        )
        if not port.isdecimal() or int(port) > 65535:
            raise PeerLost(f"tcp peer {endpoint!r} is no host:port; its descriptor is damaged")
        try:
            address = numeric_host(host, "endpoint")
        except InvalidArgument as error:  # the name may resolve later
            raise Unavailable(f"tcp peer {endpoint}: {error}") from error
        starts_at = "" if source == "*" or (":" in source) != (":" in address) else source
        return TcpConnection(
            _native.TcpPeer(
                self._regions,
                region_rows(regions),
                address,
                int(port),
                epoch,
                self._num_streams,
                starts_at,
                self._tls,
            )
        )

    def close(self) -> None:
        self._server.close()


def _is_loopback_number(host: str) -> bool:
    """Whether it is a numeric loopback address. Names are not looked up, which may take seconds."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def published_host(host: str) -> str:
    """The address that peers are to connect to: numeric, except for a name that only here leads to loopback.

    Debian's table of hosts, for instance, has the host's own name with 127.0.1.1; elsewhere it leads here.
    """
    address = numeric_host(host, "advertise_host")
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        name = host.lower().rstrip(".")
        is_of_any_host = name.startswith(("localhost.", "ip6-")) or name.endswith("localhost")
        return host if not is_of_any_host and is_loopback(address) else address
    return address


def native_tls(settings: TransferSettings) -> _native.TlsContext:
    """Make the TLS context for tcp data.

    Raises:
        InvalidArgument: names the setting whose file is missing or wrong, or reports that OpenSSL is.
    """
    check_files(settings)
    try:
        return _native.TlsContext(
            settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_check_host
        )
    except ValueError as error:
        field, reason = error.args
        raise wrong_file(settings, field, reason) from error
