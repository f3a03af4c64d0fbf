# SPDX-License-Identifier: Apache-2.0
"""What engines say of themselves: our workers, vLLM, SGLang, and other servers of the OpenAI API.

It owns which page of which engine has which fact. vLLM shows its cache's configuration as labels of a metric,
and all of its configuration only in its development mode; SGLang has one page of all its arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from mooncake.conductor.event_subscriptions import EventSource
from mooncake.doctor.facts import EngineFacts, EngineKind, PublisherFacts, Reach, Trouble
from mooncake.doctor.http_probe import HttpProbe, HttpReply, HttpServerAt, Unanswered

MAX_METRICS_CHARS = 4 << 20

HITS = ("vllm:prefix_cache_hits",)
EXTERNAL_HITS = ("vllm:external_prefix_cache_hits",)
QUERIES = ("vllm:prefix_cache_queries",)
EXTERNAL_QUERIES = ("vllm:external_prefix_cache_queries",)


@dataclass
class MetricsPage:
    """The samples of a Prometheus page, added up by name, and the labels of information metrics."""

    sums: dict[str, float] = field(default_factory=dict)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MetricsPage:
        """Read a page; lines that are not in the format end it."""
        page = cls()
        try:
            for family in text_string_to_metric_families(text[:MAX_METRICS_CHARS]):
                for sample in family.samples:
                    name = sample.name.removesuffix("_total")
                    page.sums[name] = page.sums.get(name, 0.0) + sample.value
                    if name.endswith("_info"):
                        page.labels.setdefault(name, dict(sample.labels))
        except ValueError:
            pass
        return page

    def get(self, names: Iterable[str]) -> float | None:
        """The first of these metrics that is there."""
        return next((self.sums[name] for name in names if name in self.sums), None)


async def read_metrics(http: HttpProbe, server: HttpServerAt) -> MetricsPage | None:
    """The server's metrics; None where it shows none."""
    try:
        reply = await http.get(server, "/metrics")
    except Unanswered:
        return None
    if reply.status != 200:
        return None
    return MetricsPage.parse(reply.body.decode(errors="replace"))


async def read_engine(
    http: HttpProbe, server: HttpServerAt, role: str, given: Mapping[str, Sequence[EventSource]]
) -> tuple[EngineFacts, MetricsPage | None]:
    """The facts of one engine, without any prompt. ``given``: publishers that the operator named."""
    facts = EngineFacts(server.address, role=role)
    try:
        models = await http.get(server, "/v1/models")
    except Unanswered as error:
        facts.reach = error.reach
        return facts, None
    facts.clock_skew_s = models.skew_s
    facts.reach = reach_of_models(models)
    if not facts.reach.is_fine:
        return facts, None
    try:
        return facts, await _read_pages(http, server, facts, models.json(), given)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, KeyError) as error:
        # Anything may listen at an address: pages of another form are a finding, not a failure.
        facts.reach = Reach(Trouble.OTHER, f"its pages can't be read: {error!r}"[:300])
        return facts, None


def reach_of_models(reply: HttpReply) -> Reach:
    """Whether the answer to ``GET /v1/models`` is that of a server of the OpenAI API."""
    seen = f"GET /v1/models was answered with {reply.status}: {reply.message}"
    if reply.status in (401, 403):
        return Reach(Trouble.DENIED, seen)
    found = reply.json()
    if reply.status != 200 or not isinstance(found, dict) or not isinstance(found.get("data"), list):
        return Reach(Trouble.OTHER, seen)
    return Reach()


async def _read_pages(
    http: HttpProbe,
    server: HttpServerAt,
    facts: EngineFacts,
    models: Mapping[str, Any],
    given: Mapping[str, Sequence[EventSource]],
) -> MetricsPage | None:
    _read_models(facts, models)
    page, version, sources, info = await asyncio.gather(
        read_metrics(http, server),
        _found(http, server, "/version"),
        _found(http, server, "/kv_event_sources"),
        _found(
            http,
            server,
            "/server_info?config_format=json" if facts.kind is not EngineKind.SGLANG else "/get_server_info",
        ),
    )
    if isinstance(version, dict):
        facts.version = str(version.get("version", ""))
    _read_sources(facts, sources, given)
    if page is not None:
        _read_page(facts, page)
    if isinstance(info, dict):
        if facts.kind is EngineKind.SGLANG:
            _read_sglang(facts, info)
        elif isinstance(info.get("vllm_config"), dict):
            _read_vllm(facts, info)
    return page


async def _found(http: HttpProbe, server: HttpServerAt, path: str) -> Any:
    """A page's decoded JSON, or None where there is none."""
    try:
        reply: HttpReply = await http.get(server, path)
    except Unanswered:
        return None
    return reply.json() if reply.status == 200 else None


def _read_models(facts: EngineFacts, found: Mapping[str, Any]) -> None:
    cards = [one for one in found["data"] if isinstance(one, dict)]
    # Adapters are models of their own in the list, and name the model that they belong to.
    facts.models = tuple(str(one.get("id", "")) for one in cards if not one.get("parent"))
    for card in cards[:1]:
        owner = str(card.get("owned_by", ""))
        facts.kind = EngineKind(owner) if owner in [*EngineKind] else EngineKind.OTHER
        length = card.get("max_model_len")
        facts.max_model_len = length if isinstance(length, int) else None


def _read_sources(facts: EngineFacts, found: Any, given: Mapping[str, Sequence[EventSource]]) -> None:
    """Publishers in the forms of our workers and of vLLM, as ``event_subscriptions.py`` reads them."""
    if facts.address in given:
        facts.publishers = [_publisher(facts.address, source) for source in given[facts.address]]
        return
    if not isinstance(found, dict):
        return
    if "sources" in found:
        facts.kind = EngineKind.OWN
        facts.block_tokens = found.get("block_size") or None
        facts.kv_identity = str(found.get("kv_identity") or "")
        ours = msgspec.convert(found["sources"], list[EventSource])
        facts.publishers = [_publisher(facts.address, one) for one in ours]
        return
    facts.publishers = []
    for rank in found.values():
        if (
            not isinstance(rank, dict)
            or not rank.get("enable_kv_cache_events")
            or rank.get("publisher") != "zmq"
        ):
            continue
        endpoint = str(rank.get("endpoint", ""))
        may_connect = endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint
        source = EventSource(
            endpoint, rank.get("replay_endpoint") or None, str(rank.get("topic") or ""), may_connect
        )
        facts.publishers.append(_publisher(facts.address, source))


def _publisher(address: str, source: EventSource) -> PublisherFacts:
    source = source.with_host_of(address)
    return PublisherFacts(source.endpoint, source.replay_endpoint or "", source.topic, source.may_connect)


def _read_page(facts: EngineFacts, page: MetricsPage) -> None:
    cache = page.labels.get("vllm:cache_config_info", {})
    facts.block_tokens = facts.block_tokens or _number(cache.get("block_size"))
    if "enable_prefix_caching" in cache:
        facts.has_prefix_cache = cache["enable_prefix_caching"] == "True"
    facts.hash_algorithm = cache.get("prefix_caching_hash_algo", "")
    facts.cache_dtype = cache.get("cache_dtype", "")
    total, count = (
        page.get(["vllm:request_prompt_tokens_sum"]),
        page.get(["vllm:request_prompt_tokens_count"]),
    )
    if total is not None and count:
        facts.mean_prompt_tokens, facts.num_prompts = total / count, int(count)
    facts.num_waiting = int(page.get(["vllm:num_requests_waiting", "sglang:num_queue_reqs"]) or 0)
    facts.usage = page.get(["vllm:kv_cache_usage_perc", "sglang:token_usage"])
    files = page.get(["process_max_fds"])
    facts.max_files = int(files) if files is not None else None
    facts.started_at = page.get(["process_start_time_seconds"])


def _read_vllm(facts: EngineFacts, info: Mapping[str, Any]) -> None:
    """vLLM's whole configuration, which it shows in its development mode."""
    transfer = info["vllm_config"].get("kv_transfer_config")
    facts.connectors = ()
    if isinstance(transfer, dict) and transfer.get("kv_connector"):
        inner = (transfer.get("kv_connector_extra_config") or {}).get("connectors") or []
        names = [str(one.get("kv_connector")) for one in inner if isinstance(one, dict)]
        facts.connectors = (str(transfer["kv_connector"]), *names)
        facts.connector_role = str(transfer.get("kv_role") or "")
    model = info["vllm_config"].get("model_config")
    dtype = str(model.get("dtype", "")) if isinstance(model, dict) else ""
    if facts.cache_dtype == "auto" and dtype:
        facts.cache_dtype = dtype.removeprefix("torch.")


def _read_sglang(facts: EngineFacts, info: Mapping[str, Any]) -> None:
    """SGLang's arguments."""
    facts.version = str(info.get("version") or facts.version)
    facts.block_tokens = _number(info.get("page_size")) or facts.block_tokens
    if "disable_radix_cache" in info:
        facts.has_prefix_cache = not info["disable_radix_cache"]
    facts.cache_dtype = f"{info.get('kv_cache_dtype', '')}/{info.get('dtype', '')}"
    backend = info.get("hicache_storage_backend")
    facts.connectors = (str(backend),) if backend else ()
    if facts.publishers is None and "kv_events_config" in info:
        facts.publishers = _sglang_publishers(facts.address, info["kv_events_config"])


def _sglang_publishers(address: str, config: Any) -> list[PublisherFacts]:
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except msgspec.DecodeError:
            return []
    if not isinstance(config, dict) or config.get("publisher") != "zmq":
        return []
    endpoint = str(config.get("endpoint", "tcp://*:5557"))
    source = EventSource(endpoint, config.get("replay_endpoint") or None, str(config.get("topic") or ""))
    return [_publisher(address, source)]


def _number(value: Any) -> int | None:
    try:
        return int(value) or None
    except (TypeError, ValueError):
        return None
