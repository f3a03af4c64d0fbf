# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker's settings, and its process with each kind of credential."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from mooncake.cli.certs import CertsSettings, make
from mooncake.cli.ports import free_ports
from mooncake.errors import InvalidArgument
from mooncake.gateway.epp import EppSettings, check_exposure, serve
from mooncake.gateway.gateway import GatewaySettings
from mooncake.security import Identity, SecuritySettings
from tests.waiting import until


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoints", ("engine-1:8000",)),
        ("endpoints", ("10.0.0.1",)),
        ("prefill", ("http://10.0.0.1:80",)),
        ("prefill_header", "a b"),
        ("session_header", "é"),
        ("conductor", "foo"),
        ("server_key", "key.pem"),
        ("server_cert", "cert.pem"),
        ("health_address", "9003"),
    ],
)
def test_wrong_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument):
        EppSettings(**{field: value})


def test_a_gateway_s_parts_have_the_picker_s_settings() -> None:
    given = EppSettings(
        model="/m", endpoints=("10.0.0.1:80",), prefill=("10.0.0.2:80",), host="0.0.0.0", max_in_flight=7
    )
    found = given.as_gateway()
    assert isinstance(found, GatewaySettings)
    assert (found.model, found.decode, found.prefill) == ("/m", ("10.0.0.1:80",), ("10.0.0.2:80",))
    assert (found.max_in_flight, found.host) == (7, GatewaySettings().host)


CERTS = {"server_cert": "c", "server_key": "k"}


@pytest.mark.parametrize(
    ("fields", "insecure", "is_allowed"),
    [
        ({}, False, True),
        ({"host": "0.0.0.0"}, False, False),
        ({"host": "0.0.0.0"}, True, True),
        ({"host": "0.0.0.0", "proxy_key": "k"}, False, False),
        ({"host": "0.0.0.0", **CERTS}, False, False),
        ({"host": "0.0.0.0", "proxy_key": "k", **CERTS}, False, True),
        ({"metrics_host": "0.0.0.0"}, True, False),
        ({"metrics_host": "0.0.0.0", "admin_api_key": "k"}, False, True),
    ],
)
def test_proxies_beyond_loopback_are_authenticated(
    fields: dict[str, Any], insecure: bool, is_allowed: bool
) -> None:
    identity = Identity(SecuritySettings(insecure=insecure))
    with contextlib.nullcontext() if is_allowed else pytest.raises(InvalidArgument):
        check_exposure(EppSettings(**fields), identity)


# --- the process


class Process:
    def __init__(self, output: str, port: int, health_port: int) -> None:
        self.output, self.port, self.health_port = output, port, health_port


@contextlib.asynccontextmanager
async def process(*words: str) -> AsyncIterator[Process]:
    """``mooncake epp`` until it was ready."""
    import sys

    port, health_port = free_ports("127.0.0.1", 2, Random())
    command = [sys.executable, "-m", "mooncake", "epp", "--port", str(port), "--model", "/nowhere", *words]
    command += ["--health-address", f"127.0.0.1:{health_port}"]
    started = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert started.stdout is not None
    seen = ""
    try:
        async with asyncio.timeout(60):
            while " ready " not in seen:
                line = (await started.stdout.readline()).decode()
                assert line, seen
                seen += line
        yield Process(seen, port, health_port)
        started.terminate()
        async with asyncio.timeout(20):
            assert await started.wait() == 0, "SIGTERM is a clean stop"
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


@pytest.mark.processes
@pytest.mark.parametrize("way", ["plain", "key", "cluster", "server"])
async def test_a_process_serves_proxies_with_its_credential(way: str, tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed (extra grpc)")
    pytest.importorskip("envoy.service.ext_proc", reason="xds-protos is not installed (extra dev)")
    aio = pytest.importorskip("grpc.aio")

    from tests.gateway.engines import Engine, Wire
    from tests.gateway.envoy import Exchange, health_of

    for name in ("node-1", "proxy"):
        make(CertsSettings(folder=tmp_path, name=name, role="node"))
    words: list[str] = []
    if way == "key":
        words = ["--proxy-key", "correct-horse"]
    elif way == "cluster":
        for one, two in (("cert", "node-1.pem"), ("key", "node-1.key"), ("ca", "ca.pem")):
            words += [f"--tls-{one}", str(tmp_path / two)]
    elif way == "server":
        words = ["--server-cert", str(tmp_path / "node-1.pem"), "--server-key", str(tmp_path / "node-1.key")]
    engine = Engine(Wire())
    await engine.start()

    def channel(has_certificate: bool) -> Any:
        target = f"127.0.0.1:{found.port}"
        if way in ("plain", "key"):
            return aio.insecure_channel(target)
        files = [(tmp_path / name).read_bytes() for name in ("ca.pem", "proxy.key", "proxy.pem")]
        credentials = grpc.ssl_channel_credentials(*(files if has_certificate else files[:1]))
        return aio.secure_channel(target, credentials, [("grpc.ssl_target_name_override", "localhost")])

    try:
        # Engines have no certificate of the cluster.
        async with process("--endpoints", engine.address, "--plain-engines", *words) as found:
            async with aio.insecure_channel(f"127.0.0.1:{found.health_port}") as plain:

                async def is_ready() -> bool:
                    return await health_of(plain, "readiness") == 1

                await until(is_ready)
            metadata = [("authorization", "Bearer correct-horse")] if way == "key" else []
            async with channel(True) as good:
                exchange = Exchange(good, metadata)
                picked = await exchange.completed({"prompt": "w1 w2", "max_tokens": 1})
                assert picked.endpoints == [engine.address]
                await exchange.response_headers(served=engine.address)
                await exchange.receive()
                await exchange.response_body(b'{"usage":{"completion_tokens":1}}')
                await exchange.receive()
            if way in ("key", "cluster"):
                async with channel(False) as bad:
                    with pytest.raises(aio.AioRpcError) as caught:
                        await Exchange(bad).receive()
                    codes = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE)
                    assert caught.value.code() in codes
            [url] = re.findall(r"metrics=(\S+)", found.output)
            async with aiohttp.ClientSession() as session:

                async def is_counted() -> bool:
                    async with session.get(f"{url}/metrics") as response:
                        page = await response.text()
                    assert 'mooncake_gateway_picks_total{outcome="picked"} 1.0' in page
                    return 'mooncake_gateway_ext_proc_ends_total{how="complete"} 1.0' in page

                await until(is_counted, "the end of the stream")
    finally:
        await engine.stop()


# --- stop

BODY = {"prompt": "w1 w2", "max_tokens": 1}


@contextlib.asynccontextmanager
async def serving(drain_s: float) -> AsyncIterator[tuple[Any, str, asyncio.Task[None]]]:
    """A channel to a picker as its process runs it, the address of its engine, and its task."""
    aio = pytest.importorskip("grpc.aio", reason="grpcio is not installed (extra grpc)")
    pytest.importorskip("envoy.service.ext_proc", reason="xds-protos is not installed (extra dev)")

    from tests.gateway.engines import Engine, Wire
    from tests.gateway.envoy import health_of

    engine = Engine(Wire())
    await engine.start()
    [port] = free_ports("127.0.0.1", 1, Random())
    settings = EppSettings(
        model="/nowhere", port=port, endpoints=(engine.address,), probe_interval_s=0.05, drain_s=drain_s
    )
    task = asyncio.create_task(serve(settings))
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            async def is_ready() -> bool:
                with contextlib.suppress(aio.AioRpcError):
                    return await health_of(channel, "readiness") == 1
                return False

            await until(is_ready)
            yield channel, engine.address, task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await engine.stop()


async def test_a_stopping_picker_ends_its_streams_and_takes_no_more() -> None:
    async with serving(drain_s=60.0) as (channel, engine, task):
        from tests.gateway.envoy import Exchange, health_of

        exchange = Exchange(channel)
        await exchange.completed(BODY)
        await exchange.response_headers(served=engine)
        await exchange.receive()
        task.cancel()

        async def is_unready() -> bool:
            return await health_of(channel, "readiness") == 2

        await until(is_unready)
        assert await health_of(channel, "liveness") == 1
        late = Exchange(channel)
        await late.request_headers()
        await late.request_body(b'{"prompt": "w1", "max_tokens": 1}')
        refused = await late.refusal()
        assert (refused.status, refused.body["error"]["code"]) == (503, "gateway_stopping")
        assert not task.done()
        await exchange.response_body(b'{"usage":{"completion_tokens":1}}')
        await exchange.receive()
        await exchange.end()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.mark.parametrize("how", ["after its time", "at once"])
async def test_streams_that_do_not_end_are_cut(how: str) -> None:
    async with serving(drain_s=0.05 if how == "after its time" else 1e6) as (channel, engine, task):
        import grpc

        from tests.gateway.envoy import Exchange

        exchange = Exchange(channel)
        await exchange.completed(BODY)
        await exchange.response_headers(served=engine)
        await exchange.receive()
        task.cancel()
        if how == "at once":
            await asyncio.sleep(0)
            assert not task.done()
            task.cancel()
        await asyncio.wait([task])
        with pytest.raises(grpc.aio.AioRpcError):
            await exchange.receive()
