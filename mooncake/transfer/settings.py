"""The knobs of a transfer engine. Knows nothing but their meaning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


@dataclass(frozen=True)
class TransferSettings:
    """How this process reaches others and is reached."""

    name: str = ""
    "Name of this process's segment; empty takes `<host name>-<process id>-<number>`."

    listen_host: str = "127.0.0.1"
    "Address that the tcp transport listens on, or several by commas: each is a rail of its own."

    advertise_host: str = ""
    "Address peers are told, or as many as listened on; empty: the same, for a wildcard the default route's."

    tcp_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    "Port of the tcp transport; 0 takes a free one."

    handshake_port: Annotated[int, Meta(ge=-1, le=65535)] = -1
    "Port for handshakes: peers ask, notify, set connections up; 0 takes a free one, -1 none unless needed."

    transports: tuple[str, ...] = ("shm", "tcp")
    "Paths to offer and to use, best first: `shm`, `tcp`, `local`."

    num_streams: Annotated[int, Meta(ge=0, le=64)] = 0
    "Connections per rail that a big transfer is spread over, threads that serve; 0: half the cores (1-4)."

    spray_bytes: Annotated[int, Meta(ge=0)] = 4 << 20
    "Bytes from which on a batch is dealt in pieces to all rails of a peer that has several; 0: never."

    rail_patience_s: Annotated[float, Meta(gt=0)] = 2.0
    "Seconds that a part of a batch is given at least before it is tried on another rail instead."

    submit_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    "Seconds after which a submitted transfer fails with TIMED_OUT."

    metadata: str = ""
    "How names are found: `P2PHANDSHAKE`, or a service's URL (`http://`, `etcd://`, `redis://`); empty: not."

    metadata_cluster: str = ""
    "Name that keeps the entries of several systems in one metadata service apart."

    metadata_ttl_s: Annotated[float, Meta(gt=0)] = 30.0
    "Seconds that a published descriptor lives unless it is put again, which happens three times as often."

    metadata_cache_s: Annotated[float, Meta(ge=0)] = 5.0
    "Seconds that a name's descriptor is used without asking again; one that fails is asked for at once."

    metadata_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    "Seconds that a metadata service, or a peer that is asked for its descriptor, may take to answer."
