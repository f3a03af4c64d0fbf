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

    submit_timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    "Seconds after which a submitted transfer fails with TIMED_OUT."
