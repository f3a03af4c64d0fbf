# SPDX-License-Identifier: Apache-2.0
"""Answers of a whole cluster, and the cache that survives when every worker is killed."""

from __future__ import annotations

import pytest

from mooncake.transfer import TransferEngine
from mooncake.transfer.metadata import HttpBackend
from mooncake.transfer.name_service import metadata_key
from tests.cluster import Cluster, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def chat(cluster: Cluster, messages: list[dict[str, str]], **more: object) -> dict[str, object]:
    body = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 24, **more}
    answer = cluster.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    found: dict[str, object] = {**answer.body, "headers": answer.headers}
    return found


def text_of(answer: dict[str, object]) -> str:
    text: str = answer["choices"][0]["message"]["content"]  # type: ignore[index]
    return text


def cached_tokens(answer: dict[str, object]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index]
    return count


def test_paris_by_two_processes(cluster: Cluster) -> None:
    answer = chat(cluster, QUESTION)
    assert "Paris" in text_of(answer)
    headers = answer["headers"]
    assert isinstance(headers, dict)
    roles = cluster.status["roles"]
    prefill = {roles[name]["address"] for name in roles if name.startswith("prefill")}
    decode = {roles[name]["address"] for name in roles if name.startswith("decode")}
    assert headers["x-mooncake-prefill"] in prefill
    assert headers["x-mooncake-decode"] in decode
    # The decode worker has the prompt's KV from the daemon, or from prefill, and prefilled one token.
    role = next(name for name in roles if roles[name]["address"] == headers["x-mooncake-decode"])
    metrics = cluster.get("/metrics", role).body
    counters = {
        "pool": "mooncake_inference_kv_loaded_bytes_total ",
        "push": 'mooncake_inference_push_bytes_total{outcome="received"} ',
    }
    arrived = counters[headers["x-mooncake-kv"]]
    [num_bytes] = [line.removeprefix(arrived) for line in metrics.splitlines() if line.startswith(arrived)]
    assert float(num_bytes) > 0


def test_the_pool_survives_every_worker(cluster: Cluster) -> None:
    story = "Tell me about the history of the city of Paris, its rivers, towers and kings. " * 12
    first = [{"role": "user", "content": story}]
    answer = chat(cluster, first)
    extended = [
        *first,
        {"role": "assistant", "content": text_of(answer)},
        {"role": "user", "content": "Go on."},
    ]
    warm = chat(cluster, extended)
    assert cached_tokens(warm) >= 192
    workers = [name for name in cluster.status["roles"] if name.startswith(("prefill", "decode"))]
    killed = {name: cluster.kill(name) for name in workers}
    for name, pid in killed.items():
        cluster.wait_until_restarted(name, pid)
    cluster.wait_until_routable()
    again = chat(cluster, extended)
    assert cached_tokens(again) >= 192
    assert text_of(again) == text_of(warm)


def test_streaming_with_usage(cluster: Cluster) -> None:
    streamed = cluster.stream("The capital of France is", 8)
    whole = cluster.complete("The capital of France is", 8)
    assert streamed.error is None
    assert streamed.text == whole.body["choices"][0]["text"]
    assert streamed.token_ids == whole.body["choices"][0]["token_ids"]
    assert streamed.usage["completion_tokens"] == len(streamed.token_ids)


def test_the_pool_is_found_by_name_in_the_metadata_service(cluster: Cluster) -> None:
    backend = HttpBackend(f"http://{cluster.address('metadata')}/metadata")
    (key,) = wait_for(lambda: backend.list(metadata_key("")), "the node to be published", 30.0)
    engine = TransferEngine(backend=backend)
    try:
        segment = engine.open_name(key.removeprefix(metadata_key("")))
        assert segment is not None
        assert "shm" in segment.paths
    finally:
        engine.close()
        backend.close()
