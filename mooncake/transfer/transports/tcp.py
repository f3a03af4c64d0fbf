"""TCP to anywhere: one-sided reads and writes served by native threads, several streams per peer.

Thin: ``native/tcp.h`` moves the bytes, ``native/wire.h`` draws the conversation. Connections are made
when the first slices need them, so ``connect`` never blocks and never fails for a dead peer: the first
completion says so.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from mooncake import _native
from mooncake.errors import AddressInUse, InvalidArgument, PeerLost, Unavailable
from mooncake.transfer.host import numeric_host, with_port
from mooncake.transfer.segment import RegionInfo
from mooncake.transfer.transports import Carrier, Site


class TcpCarrier:
    is_lost = False  # a refused connection today may be accepted tomorrow

    def __init__(self, peer: _native.TcpPeer) -> None:
        self._peer = peer
        self.run = peer.run
        self.submit = peer.submit
        self.cancel = peer.cancel
        self.close = peer.close

    def view(self, address: int, size_bytes: int, timeout_s: float) -> None:
        return None

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        self._peer.set_remote([(region.address, region.size_bytes, region.key) for region in regions])


class TcpTransport:
    def __init__(self, site: Site) -> None:
        self._regions = site.regions
        self._num_streams = site.num_streams
        listen_at = numeric_host(site.listen_host, "listen_host")
        try:
            self._server = _native.TcpServer(
                site.regions, site.epoch, listen_at, site.tcp_port, site.num_streams
            )
        except OSError as error:
            where = f"{site.listen_host}:{site.tcp_port}"
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"tcp transport: {where} is in use; choose another tcp_port or 0"
                ) from error
            raise InvalidArgument(
                "listen_host", site.listen_host, f"an address of this host ({error})"
            ) from error
        host = numeric_host(site.advertise_host, "advertise_host")
        self.endpoint = with_port(host, self._server.port)

    def connect(self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float) -> Carrier:
        host, _, port = endpoint.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise PeerLost(f"tcp peer {endpoint!r} is no host:port; its descriptor is damaged")
        try:
            address = numeric_host(host.strip("[]"), "endpoint")
        except InvalidArgument as error:  # perhaps it resolves again in a moment
            raise Unavailable(f"tcp peer {endpoint}: {error}") from error
        remote = [(region.address, region.size_bytes, region.key) for region in regions]
        return TcpCarrier(
            _native.TcpPeer(self._regions, remote, address, int(port), epoch, self._num_streams)
        )

    def close(self) -> None:
        self._server.close()
