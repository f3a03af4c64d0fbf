# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker protocol, played by a gRPC client with Envoy's own messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (extra grpc)")
pytest.importorskip("envoy.service.ext_proc", reason="xds-protos is not installed (extra dev)")

import grpc.aio

from mooncake.gateway import endpoint_picker
from mooncake.gateway.ext_proc_messages import HealthCheckRequest, HealthCheckResponse
from mooncake.metrics import registry
from tests.gateway.doubles import answer_text
from tests.gateway.envoy import Exchange, health_of, proxied
from tests.waiting import until

PROMPT = "w20 w21 w22 w23 w24 w25 w26 w27 w28 w29"
IDS = list(range(20, 30))
BODY = {"prompt": PROMPT, "max_tokens": 5}


def count(name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def ends(how: str) -> float:
    return count("mooncake_gateway_ext_proc_ends_total", how=how)


# --- whole requests


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_served_by_the_engine_that_was_picked(stream: bool) -> None:
    async with proxied() as proxy:
        before = ends("complete")
        found = await proxy.forward({**BODY, "stream": stream})
        assert found.status == 200
        assert found.served == found.endpoints[0]
        text = answer_text(IDS, 5)
        if stream:
            assert found.body.endswith(b"data: [DONE]\n\n")
        else:
            assert text.encode() in found.body
        assert found.headers["x-mooncake-decode"] == found.served
        await proxy.until_idle()
        explained = await proxy.gateway.scheduling.explain(found.headers["x-mooncake-id"])
        assert explained is not None
        assert ends("complete") == before + 1
        rows = await proxy.rows()
        assert rows[found.served].num_placed == 1


async def test_prompts_with_the_same_beginning_meet_at_one_engine() -> None:
    async with proxied(3, scheduling="cache_aware") as proxy:
        served = [(await proxy.forward(BODY)).served for _ in range(4)]
        assert len({*served}) == 1
        cached = [one for one in proxy.engines if one.address == served[0]]
        assert len(cached[0].calls) == 4


async def test_fallbacks_follow_in_order_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_picker, "LIST_AGAIN_S", 0.0)
    async with proxied(4, max_endpoints=4) as proxy:
        busy, other, third = (proxy.exchange() for _ in range(3))
        first = await busy.completed(BODY)
        assert {*first.endpoints} == {one.address for one in proxy.engines}
        second = await other.completed({"prompt": "w1 w2 w3", "max_tokens": 1})
        assert second.endpoints[0] != first.endpoints[0]
        assert second.endpoints[-1] == first.endpoints[0]
        found = await third.completed({"prompt": "w4", "max_tokens": 1})
        assert {*found.endpoints[2:]} == {first.endpoints[0], second.endpoints[0]}
        for one in (busy, other, third):
            await one.end()
    async with proxied(4, max_endpoints=2) as proxy:
        exchange = proxy.exchange()
        assert len((await exchange.completed(BODY)).endpoints) == 2
        await exchange.end()


async def test_a_request_moves_to_the_fallback_that_served_it() -> None:
    async with proxied(3) as proxy:
        exchange = proxy.exchange()
        before = count("mooncake_gateway_served_endpoints_total", endpoint="fallback")
        picked = await exchange.completed(BODY)
        await exchange.response_headers(served=picked.endpoints[1])
        await exchange.receive()
        await exchange.response_body(b"{}", False)
        await exchange.receive()
        rows = await proxy.rows()
        counted = {instance: row.num_requests for instance, row in rows.items() if row.num_requests}
        assert counted == {picked.endpoints[1]: 1}
        story = await proxy.gateway.scheduling.story(picked.endpoints[0])
        assert any("failed" in line and picked.endpoints[1] in line for line in story), story
        assert count("mooncake_gateway_served_endpoints_total", endpoint="fallback") == before + 1
        await exchange.end()


async def test_an_engine_that_is_gone_is_skipped_by_the_proxy() -> None:
    async with proxied(2, probe_interval_s=600.0) as proxy:
        exchange = proxy.exchange()
        picked = await exchange.completed(BODY)
        await exchange.end()
        gone = next(one for one in proxy.engines if one.address == picked.endpoints[0])
        await gone.stop()
        found = await proxy.forward(BODY)
        assert found.status == 200
        assert found.served != gone.address


async def test_an_engine_s_fault_is_reported_to_the_conductor() -> None:
    async with proxied(2) as proxy:
        exchange = proxy.exchange()
        picked = await exchange.completed(BODY)
        await exchange.response_headers(502, served=picked.endpoints[0])
        await exchange.receive()

        async def is_reported() -> bool:
            story = await proxy.gateway.scheduling.story(picked.endpoints[0])
            return any("it answered 502" in line for line in story)

        await until(is_reported)  # it is reported beside the answer
        await exchange.end()


async def test_a_body_in_other_modes() -> None:
    async with proxied() as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers(modes=(2, 0))
        reply = await exchange.receive()
        assert reply.WhichOneof("response") == "request_headers"
        await exchange.request_body(b'{"prompt": "w1", "max_tokens": 1}')
        reply = await exchange.receive()
        common = reply.request_body.response
        assert common.body_mutation.body
        where = reply.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"].split(",")
        assert where[0] in {one.address for one in proxy.engines}
        await exchange.response_headers(served=where[0])
        await exchange.receive()
        assert await proxy.num_placed() == 1
        await exchange.end()
        await proxy.until_idle()
        exchange = proxy.exchange()
        await exchange.request_headers(modes=(1, 1))
        refusal = await exchange.refusal()
        assert (refusal.status, refusal.details) == (500, "proxy_misconfigured")


async def test_without_modes_bodies_are_streamed() -> None:
    async with proxied() as proxy:
        exchange = proxy.exchange()
        picked = await exchange.completed(BODY, modes=None)
        assert picked.request["prompt"] == PROMPT
        await exchange.end()


async def test_a_request_that_generates_nothing_goes_to_any_engine() -> None:
    async with proxied() as proxy:
        for path, method in (("/v1/models", "GET"), ("/v1/models/org/tiny?x=1", "GET")):
            exchange = proxy.exchange()
            await exchange.request_headers(path=path, method=method, is_last=True)
            picked = await exchange.picked()
            assert picked.endpoints[0] in {one.address for one in proxy.engines}
            assert await proxy.num_placed() == 0
            await exchange.end()
        exchange = proxy.exchange()
        await exchange.request_headers(path="/tokenize")
        await exchange.request_body(b'{"prompt": "x"}')
        await exchange.picked()
        assert await exchange.body() == b'{"prompt":"x","model":"org/tiny"}'
        before = ends("complete")
        await exchange.response_headers()
        await exchange.response_body(b"{}")
        await until(lambda: ends("complete") == before + 1)
        await exchange.end()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/sleep"),
        ("GET", "/v1/completions"),
        ("GET", "/v1/models/../metrics"),
        ("GET", "/v1/models/%2e%2e/metrics"),
        ("DELETE", "/v1/models"),
        ("POST", ""),
    ],
)
async def test_other_paths_of_engines_are_not_reached(method: str, path: str) -> None:
    async with proxied(1) as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers(path=path, method=method, is_last=True)
        refusal = await exchange.refusal()
        assert (refusal.status, refusal.details) == (404, "endpoint_not_served")


# --- subsets


async def test_only_endpoints_of_the_subset_are_picked() -> None:
    async with proxied(4) as proxy:
        for one in proxy.engines:
            exchange = proxy.exchange()
            picked = await exchange.completed(BODY, subset=["10.9.9.9:1", one.address])
            assert picked.endpoints == [one.address]
            await exchange.end()


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], ["nonsense", ""]])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
async def test_a_subset_without_an_instance_is_refused(subset: list[str], path: str) -> None:
    async with proxied(2) as proxy:
        exchange = proxy.exchange()
        is_get = path == "/v1/models"
        await exchange.request_headers(
            path=path, subset=subset, is_last=is_get, method="GET" if is_get else "POST"
        )
        if not is_get:
            await exchange.request_body(b'{"prompt": "w1"}')
        refusal = await exchange.refusal()
        assert (refusal.status, refusal.details) == (503, "no_endpoint_in_subset")
        assert refusal.headers["retry-after"] == "1"
        assert await proxy.num_placed() == 0


# --- refusals


async def test_without_a_ready_engine_it_is_503() -> None:
    async with proxied(0) as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers({"x-request-id": "mine"})
        await exchange.request_body(b'{"prompt": "w1"}')
        refusal = await exchange.refusal()
        assert (refusal.status, refusal.details) == (503, "no_instance")
        assert refusal.body["error"]["code"] == "no_instance"
        assert int(refusal.headers["retry-after"]) >= 1
        assert refusal.headers["x-request-id"] == "mine"


async def test_a_full_cluster_is_429_with_the_time_to_retry() -> None:
    async with proxied(1, max_requests_per_instance=1) as proxy:
        first = proxy.exchange()
        await first.completed(BODY)
        second = proxy.exchange()
        before = count("mooncake_gateway_picks_total", outcome="overloaded")
        await second.request_headers()
        await second.request_body(b'{"prompt": "w1"}')
        refusal = await second.refusal()
        assert (refusal.status, refusal.details) == (429, "overloaded")
        assert int(refusal.headers["retry-after"]) >= 1
        assert count("mooncake_gateway_picks_total", outcome="overloaded") == before + 1
        await first.end()


async def test_the_limit_of_answers_is_429() -> None:
    async with proxied(1, max_in_flight=1) as proxy:
        first = proxy.exchange()
        await first.completed(BODY)
        second = proxy.exchange()
        await second.request_headers()
        await second.request_body(b'{"prompt": "w1"}')
        assert (await second.refusal()).status == 429
        await first.end()


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"prompt": 7}', 400, "prompt"),
        (b'{"prompt": "w1", "model": "other"}', 404, "model"),
        (b'{"prompt": "w1", "n": 100000}', 400, "n"),
    ],
)
async def test_a_wrong_body_is_refused_by_field(content: bytes, status: int, param: str | None) -> None:
    async with proxied(1) as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers()
        await exchange.request_body(content)
        refusal = await exchange.refusal()
        assert (refusal.status, refusal.body["error"]["param"]) == (status, param)


async def test_a_huge_body_is_refused_before_it_is_whole() -> None:
    async with proxied(1, max_body_bytes=1 << 16) as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers()
        for _ in range(3):
            await exchange.request_body(b" " * (30 << 10), False)
        assert (await exchange.refusal()).status == 413


async def test_a_half_sent_body_is_refused_in_time() -> None:
    async with proxied(1, body_timeout_s=0.05) as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers()
        await exchange.request_body(b'{"prompt"', False)
        refusal = await exchange.refusal()
        assert (refusal.status, refusal.details) == (408, "body_timeout")


async def test_bodies_of_all_streams_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxied(1) as proxy:
        bodies = proxy.server._bodies
        monkeypatch.setattr(bodies, "most_bytes", 1000)
        first = proxy.exchange()
        await first.request_headers()
        await first.request_body(b" " * 900, False)
        await until(lambda: bodies.num_held == 900)
        second = proxy.exchange()
        await second.request_headers()
        await second.request_body(b" " * 200, False)
        refusal = await second.refusal()
        assert (refusal.status, refusal.details) == (503, "overloaded")
        first.call.cancel()
        await until(lambda: bodies.num_held == 0)


# --- accounts


@pytest.mark.parametrize("how", ["cancel", "half-close", "channel"])
@pytest.mark.parametrize("is_answering", [False, True])
async def test_a_stream_that_ends_without_an_answer_releases_its_request(
    how: str, is_answering: bool
) -> None:
    async with proxied(1) as proxy:
        channel = grpc.aio.insecure_channel(proxy.address)
        exchange = Exchange(channel)
        picked = await exchange.completed(BODY)
        assert await proxy.num_placed() == 1
        assert proxy.gateway.limiter.num_in_flight == 1
        if is_answering:
            await exchange.response_headers(served=picked.endpoints[0])
            await exchange.receive()
        if how == "cancel":
            exchange.call.cancel()
        elif how == "half-close":
            await exchange.end()
        await channel.close(None)
        await proxy.until_idle()


async def test_an_answer_that_takes_too_long_is_released() -> None:
    async with proxied(1, request_timeout_s=0.3) as proxy:
        exchange = proxy.exchange()
        await exchange.completed(BODY)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exchange.receive()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await proxy.until_idle()


async def test_messages_out_of_turn_end_the_stream() -> None:
    async with proxied(1) as proxy:
        before = ends("out_of_turn")
        exchange = proxy.exchange()
        await exchange.completed(BODY)
        await exchange.request_headers()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exchange.receive()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "RequestHeaders while forwarded"
        await until(lambda: ends("out_of_turn") == before + 1)


async def test_bytes_that_are_no_message_end_the_stream() -> None:
    async with proxied(1) as proxy:
        method = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
        call: Any = proxy.channel.stream_stream(method)()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        exchange = proxy.exchange()
        await exchange.completed(BODY)
        await exchange.end()


# --- clients and proxies


async def test_a_client_sets_no_destination_and_no_prefill_host() -> None:
    async with proxied(2) as proxy:
        exchange = proxy.exchange()
        headers = {"x-gateway-destination-endpoint": "10.6.6.6:1", "x-prefiller-host-port": "10.6.6.6:1"}
        body = {**BODY, "kv_transfer_params": {"remote_host": "10.6.6.6"}}
        picked = await exchange.completed(body, headers=headers)
        assert picked.endpoints[0] in {one.address for one in proxy.engines}
        assert picked.removed == ["x-prefiller-host-port"]
        assert "kv_transfer_params" not in picked.request
        await exchange.end()


async def test_a_prefill_instance_is_named_to_the_endpoint() -> None:
    async with proxied(2, 1) as proxy:
        exchange = proxy.exchange()
        picked = await exchange.completed(BODY, headers={"x-prefiller-host-port": "10.6.6.6:1"})
        prefill = proxy.engines[2].address
        assert picked.set_headers["x-prefiller-host-port"] == prefill
        assert prefill not in picked.endpoints
        await exchange.end()


async def test_clients_with_keys(tmp_path: Any) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "acme", "key": "k-0123456789abcdef", "max_in_flight": 1}]}')
    keys.chmod(0o600)
    async with proxied(1, api_keys_file=str(keys)) as proxy:
        exchange = proxy.exchange()
        await exchange.request_headers({"authorization": "Bearer wrong"})
        await exchange.request_body(b'{"prompt": "w1"}')
        assert (await exchange.refusal()).status == 401
        exchange = proxy.exchange()
        headers = {"authorization": "Bearer k-0123456789abcdef", "x-session-id": "s"}
        picked = await exchange.completed({**BODY, "cache_salt": "of another"}, headers=headers)
        assert "authorization" in picked.removed, "a key for the picker reaches no engine"
        assert picked.set_headers["x-session-id"] != "s"
        assert picked.request["cache_salt"] not in ("", "of another")
        second = proxy.exchange()
        await second.request_headers(headers)
        await second.request_body(b'{"prompt": "w1"}')
        refusal = await second.refusal()
        assert (refusal.status, refusal.details) == (429, "quota_in_flight")
        await exchange.end()


async def test_a_proxy_without_the_key_is_denied(caplog: pytest.LogCaptureFixture) -> None:
    async with proxied(1, proxy_key="correct-horse") as proxy:
        before = ends("denied")
        for metadata in ([], [("authorization", "Bearer wrong")], [("authorization", "correct-horse")]):
            exchange = proxy.exchange(metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await exchange.receive()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert ends("denied") == before + 3
        assert caplog.text.count("proxy_denied") == 1, "unauthenticated clients do not fill the log"
        assert "correct-horse" not in caplog.text
        exchange = proxy.exchange([("authorization", "Bearer correct-horse")])
        await exchange.completed(BODY)
        await exchange.end()
        assert await health_of(proxy.channel, "") == 1, "health needs no key"


async def test_a_proxy_s_key_that_is_not_utf_8_denies_all_others() -> None:
    async with proxied(1, proxy_key="\udcff") as proxy:
        exchange = proxy.exchange([("authorization", "Bearer wrong")])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await exchange.receive()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_streams_and_connections_are_bounded() -> None:
    limits = {"max_streams": 1, "max_connections": 2}
    async with proxied(1, limits=limits) as proxy:
        held = [proxy.exchange() for _ in range(17)]  # as many as may watch the health come on top
        for one in held:
            await one.request_headers()
        refused = proxy.exchange()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused.receive()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for one in held:
            one.call.cancel()
        host, port = proxy.address.split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        # Those beyond the bound are closed; the others get the server's settings, and then nothing.
        reading = [asyncio.ensure_future(reader.read()) for reader, _ in opened]
        await until(lambda: sum(one.done() for one in reading) >= 4, "the bound of connections")
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*reading, return_exceptions=True)


# --- health


async def test_health_follows_the_engines() -> None:
    ext_proc = "envoy.service.ext_proc.v3.ExternalProcessor"
    async with proxied(1) as proxy:
        found = [await health_of(proxy.channel, one) for one in ("", "liveness", "readiness", ext_proc)]
        assert found == [1, 1, 1, 1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(proxy.channel, "other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await proxy.engines[0].stop()

        async def is_unready() -> bool:
            return await health_of(proxy.channel, ext_proc) == 2

        await until(is_unready, "readiness lost")
        assert await health_of(proxy.channel, "liveness") == 1


async def test_health_has_a_port_of_its_own_that_picks_nothing() -> None:
    async with proxied(1) as proxy:
        port = await proxy.server.start_health("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await health_of(channel, "readiness") == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Exchange(channel).receive()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_watchers_see_changes_and_are_bounded() -> None:
    async with proxied(1) as proxy:
        watch = proxy.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=HealthCheckResponse.FromString,
        )
        calls = [watch(HealthCheckRequest(service="readiness")) for _ in range(16)]
        assert [(await one.read()).status for one in calls] == [1] * 16
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(HealthCheckRequest()).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await proxy.engines[0].stop()
        assert (await calls[0].read()).status == 2
        for one in calls:
            one.cancel()
