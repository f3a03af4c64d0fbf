# SPDX-License-Identifier: Apache-2.0
"""Settings of a peer of the P2P store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mooncake.errors import InvalidArgument
from mooncake.setting_types import Port, Size
from mooncake.transfer import DEFAULT_TRANSFER, TransferSettings


@dataclass(frozen=True)
class P2pSettings:
    """Serve checkpoints and weights to peers, and load them from peers, without a master."""

    host: str = "127.0.0.1"
    "Address to listen on; other hosts need one they can reach, and then a credential is required."

    port: Port = 7300
    "Port for peers and for `mooncake p2p`; 0 takes a free one."

    transfer_port: Port = 0
    "TCP port that chunks are read from; 0 takes a free one."

    advertise_host: str = ""
    "Address given to other peers; empty takes `host`, or the default route's if that is a wildcard."

    peers: tuple[str, ...] = ()
    "Peers (`host:port`) to begin with; each names the others that it knows."

    metadata: str = ""
    "URL of a metadata service (`http://`, `etcd://`, `redis://`) where peers find each other; empty: none."

    metadata_cluster: str = ""
    "Name that separates the entries of several systems in one metadata service."

    root: str = ""
    "Folder below which `mooncake p2p register` and `get` may name folders, and which has this peer's state."

    limit_rate_bytes: Annotated[int, Size, Meta(ge=0)] = 0
    "Bytes per second that this peer sends, to all peers together; 0: no limit."

    limit_receive_rate_bytes: Annotated[int, Size, Meta(ge=0)] = 0
    "Bytes per second that this peer receives, from all peers together; 0: no limit."

    num_slots: Annotated[int, Meta(ge=2, le=256)] = 16
    "Chunks that are sent, and chunks that are received, at the same time; each takes up to 4 MiB of memory."

    chunk_s: Annotated[float, Meta(gt=0)] = 30.0
    "Seconds that one chunk may take; after them it is requested from another peer."

    stall_s: Annotated[float, Meta(gt=0)] = 120.0
    "Seconds without any chunk after which a load fails; it resumes where it was when it is begun again."

    metrics_port: Port = 0
    "Port of `/metrics`; 0 takes a free one."

    transfer: TransferSettings = DEFAULT_TRANSFER

    def __post_init__(self) -> None:
        if not self.network_transports:
            shown = ",".join(self.transfer.transports)
            raise InvalidArgument("transfer.transports", shown, "tcp, rdma or both: peers are on other hosts")

    @property
    def network_transports(self) -> tuple[str, ...]:
        """The transports that chunks may pass over, by preference."""
        return tuple(scheme for scheme in self.transfer.transports if scheme in ("tcp", "rdma"))
