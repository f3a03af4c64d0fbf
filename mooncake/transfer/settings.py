# SPDX-License-Identifier: Apache-2.0
"""Settings of a transfer engine, which every role and connector with an engine includes as ``[transfer]``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from mooncake.config import load, named_file
from mooncake.errors import InvalidArgument


@dataclass(frozen=True)
class TransferSettings:
    """Transfer engine: addresses, paths, limits and metadata of this process."""

    name: str = ""
    "Name of this process's segment; empty takes `<host name>-<process id>-<number>`."

    listen_host: str = ""
    "Address to listen on, or several by commas: each is a rail of its own; empty: the role's, or 127.0.0.1."

    advertise_host: str = ""
    "Address to publish, or as many as listened on; empty: the same, for a wildcard the default route's."

    tcp_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    "Port of the tcp transport; 0 takes a free one."

    handshake_port: Annotated[int, Meta(ge=-1, le=65535)] = -1
    "Port for handshakes (descriptors, notifications, set-up); 0 takes a free one, -1 none unless needed."

    transports: tuple[str, ...] = ("shm", "file", "cuda", "tcp")
    "Paths by preference: `shm`, `file`, `cuda`, `rdma`, `tcp`, `local`. Of `rdma,tcp` tcp alone will do."

    cuda_library: str = "libcuda.so.1"
    "File of the CUDA driver's library, opened when device memory is first used."

    file_depth: Annotated[int, Meta(ge=1, le=1024)] = 32
    "Reads and writes of one file that are under way at once, per transfer, and for all peers together."

    file_ring: bool = True
    "Read and write files through io_uring where the kernel allows it; otherwise threads do it."

    num_streams: Annotated[int, Meta(ge=0, le=64)] = 0
    "Connections per rail for a big transfer, and threads that serve; 0: half the cores (1-4)."

    spray_bytes: Annotated[int, Meta(ge=0)] = 4 << 20
    "Bytes from which on a batch is split into pieces over all rails of a peer that has several; 0: never."

    rail_patience_s: Annotated[float, Meta(gt=0)] = 2.0
    "Minimum seconds for a part of a batch before it is tried on another rail instead."

    tls: Literal["", "handshake", "all"] = ""
    "TLS with peers: empty none, `handshake` for handshakes and metadata, `all` for tcp data, too."

    tls_cert: str = ""
    "PEM file with this process's certificate and chain up to the authority; `mooncake certs` makes one."

    tls_key: str = ""
    "PEM file with the certificate's private key, without a password."

    tls_ca: str = ""
    "PEM file with the authority, which must have signed the certificates of peers and of this process."

    tls_check_host: bool = False
    "Require that a peer's certificate also names the address it is reached at."

    greeting_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    "Seconds in which a connecting peer must have completed its greeting."

    stall_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 30.0
    "Seconds (and one per MiB) after which a peer that has sent or taken half a frame is disconnected."

    max_connections: Annotated[int, Meta(ge=0)] = 0
    "Connections that peers may have here at once; 0: half of this process's file limit, at most 16384."

    rdma_devices: tuple[str, ...] = ()
    "RDMA devices that the rdma transport uses, each a rail of its own; none takes all that are active."

    rdma_port: Annotated[int, Meta(ge=1, le=255)] = 1
    "Port of the RDMA devices."

    rdma_gid_index: Annotated[int, Meta(ge=-1, le=255)] = -1
    "Address among those of the port; -1 takes a routable one of RoCE version 2 if there is one."

    rdma_traffic_class: Annotated[int, Meta(ge=0, le=255)] = 0
    "Traffic class of RDMA packets, by which switches choose queues."

    submit_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    "Seconds after which a submitted transfer fails with TIMED_OUT."

    metadata: str = ""
    "Metadata for names: `P2PHANDSHAKE`, or a service's URL (`http://`, `etcd://`, `redis://`); empty: none."

    metadata_cluster: str = ""
    "Name that separates the entries of several systems in one metadata service."

    metadata_ttl_s: Annotated[float, Meta(gt=0)] = 30.0
    "Time to live of a published descriptor in seconds; it is put again three times as often."

    metadata_cache_s: Annotated[float, Meta(ge=0)] = 5.0
    "Seconds that a name's descriptor is cached; after a failure it is looked up again at once."

    metadata_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    "Seconds that a metadata service, or a peer queried for its descriptor, may take to answer."

    def __post_init__(self) -> None:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_ca": self.tls_ca}
        for field, path in files.items():
            if self.tls and not path:
                raise InvalidArgument(field, path, f"the path of a PEM file when tls is {self.tls!r}")

    def for_role(self, host: str, advertise_host: str = "", **own: Any) -> TransferSettings:
        """These settings for a role's engine; fields that have their default get the role's ``own`` values.

        The role's ``host`` and ``advertise_host`` belong together: an address to publish is not taken for
        addresses to listen on that are set here.
        """
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        unset = {name: value for name, value in own.items() if getattr(self, name) == fields[name]}
        if not self.advertise_host and not self.listen_host:
            unset["advertise_host"] = advertise_host
        return dataclasses.replace(self, listen_host=self.listen_host or host, **unset)

    def for_tool(self) -> TransferSettings:
        """These settings for a process that others do not look for: without name, ports and metadata."""
        return dataclasses.replace(self, name="", tcp_port=0, handshake_port=-1, metadata="")

    def may_lack(self, scheme: str) -> bool:
        """Whether an engine is made without ``scheme`` where this host lacks what that needs."""
        if self.transports == TransferSettings.transports:
            return scheme != "tcp"  # every host has it, and every peer
        return scheme == "rdma" and "tcp" in self.transports and not self.rdma_devices


def transfer_from_environment(given: Mapping[str, Any] | None = None) -> TransferSettings:
    """Read ``[transfer]`` from ``MOONCAKE_TRANSFER_*`` and the file named by ``MOONCAKE_CONFIG``.

    ``given`` has fields that take precedence; None stands for one that is not given.

    Raises:
        InvalidArgument: a value is invalid.
    """
    settings, _ = load(TransferSettings, given or {}, os.environ, named_file(os.environ))
    return settings


DEFAULT_TRANSFER = TransferSettings()
