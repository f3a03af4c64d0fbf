# SPDX-License-Identifier: Apache-2.0
"""Settings of ``mooncake doctor``: what to examine, with which credentials, and what is expected of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from mooncake.conductor.event_subscriptions import read_sources
from mooncake.config import AlsoFrom, Port, Secret
from mooncake.doctor.facts import Expectations
from mooncake.errors import InvalidArgument

_HOST = r"([^/:\s@]+|\[[0-9a-fA-F:]+\])"
_ADDRESS = rf"{_HOST}:\d{{1,5}}|https?://{_HOST}(:\d{{1,5}})?(/\S*)?"


@dataclass(frozen=True)
class DoctorSettings:
    """Find the broken link of a live KV cache deployment: gateway, engines, events, store, host."""

    url: str = ""
    "Address of the gateway, ours or another router's; http://127.0.0.1:8000 where nothing else is named."

    engine: tuple[str, ...] = ()
    "Engines (`http://host:port` or `host:port`) beside those that the gateway lists."

    master: Annotated[str, AlsoFrom("MOONCAKE_MASTER")] = ""
    "The store's master, if the engines share a store: `host:port`, several with commas, or `etcd://…`."

    events: tuple[str, ...] = ()
    "`host:port=endpoint[=replay endpoint]`: where engines publish KV events that do not say so themselves."

    events_topic: str = ""
    "Topic to which your router subscribes; empty: any."

    model: str = ""
    "Model to send canaries to; empty takes the first one that a server lists."

    api_key: Annotated[str, Secret] = ""
    "A client's key for the gateway, sent as the bearer token."

    admin_api_key: Annotated[str, Secret, AlsoFrom("ADMIN_API_KEY")] = ""
    "The gateway's key for operators, with which it shows its instances."

    engine_api_key: Annotated[str, Secret] = ""
    "Key for engines that need one."

    canaries: bool = True
    "Whether to send prompts, of a few hundred tokens; without them only configurations are read."

    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    "Length of your typical prompts, to compare with the size of a block; 0: not compared."

    min_files: Annotated[int, Meta(ge=0)] = 4096
    "A process that may open fewer files is a finding."

    max_skew_s: Annotated[float, Meta(ge=0)] = 5.0
    "A clock that differs by more is a finding; answers show whole seconds."

    disk: str = ""
    "A folder on the disk of an SSD tier on this host, to measure how fast it writes; empty: not measured."

    disk_write_mb_s: Annotated[float, Meta(ge=0)] = 0.0
    "Speed that the disk is promised to write with, in MB/s."

    canary_file: str = ""
    "File that keeps the last prompt, so that the next run can check whether it is still cached; empty: none."

    timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    "How long to wait for one answer."

    canary_timeout_s: Annotated[float, Meta(gt=0)] = 20.0
    "How long to wait for the answer to a canary; the first one of an idle engine takes longest."

    budget_s: Annotated[float, Meta(gt=0)] = 55.0
    "Time for a whole examination; what is not done by then is reported as not examined."

    json: bool = False
    "Print the findings as one JSON object, for programs."

    fail_on: Literal["broken", "wasteful", "notice"] = "wasteful"
    "The least severity of a finding with which the exit status is 1."

    watch_s: Annotated[float, Meta(ge=0)] = 0.0
    "Repeat the examination after this many seconds, and serve metrics; 0 examines once."

    metrics_host: str = "127.0.0.1"
    "Address of the metrics of `watch_s`."

    metrics_port: Port = 0
    "Port of the metrics of `watch_s`; 0 takes a free one."

    def __post_init__(self) -> None:
        for name, value in (("url", self.url), *(("engine", one) for one in self.engine)):
            if value and not is_address(value):
                raise InvalidArgument(name, value, "an address such as http://127.0.0.1:8000")
        for one in self.events:
            if not re.fullmatch(r"[^=\s]+:\d{1,5}=(tcp|ipc)://[^=\s]+(=(tcp|ipc)://[^=\s]+)?", one):
                raise InvalidArgument("events", one, "host:port=endpoint[=replay endpoint]")
        read_sources(self.events)

    @property
    def gateway_url(self) -> str:
        """The gateway to examine; "" for engines, a store or a disk alone."""
        if self.url or self.engine or self.master or self.disk:
            return self.url
        return "http://127.0.0.1:8000"

    @property
    def expectations(self) -> Expectations:
        return Expectations(
            prompt_tokens=self.prompt_tokens,
            events_topic=self.events_topic,
            disk_bytes_per_s=self.disk_write_mb_s * 1e6,
            min_files=self.min_files,
            max_skew_s=self.max_skew_s,
            shares_store=bool(self.master),
        )


def is_address(text: str) -> bool:
    """Whether it is ``host:port`` or a URL, with a port and a host that a resolver can be asked for."""
    if not re.fullmatch(_ADDRESS, text):
        return False
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        return parts.port != 0 and bool((parts.hostname or "").encode("idna"))
    except ValueError:  # also for names for which a resolver raises no OSError
        return False
