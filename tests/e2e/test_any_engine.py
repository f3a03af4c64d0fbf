# SPDX-License-Identifier: Apache-2.0
"""Our workers behind the gateway as if they were third-party engines, used by their OpenAI API alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import ADMIN_KEY, Cluster, wait_for
from tests.contract.metadata_servers import free_port

pytestmark = [pytest.mark.processes, pytest.mark.model, pytest.mark.timeout(600)]

PROMPT = "The conductor of a train walks through the cars and " * 12
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def front(cluster: Cluster) -> Iterator[str]:
    """The address of a second gateway, which proxies requests to the cluster's workers."""
    workers = {
        side: [entry["address"] for name, entry in cluster.status["roles"].items() if name.startswith(side)]
        for side in ("prefill", "decode")
    }
    port = free_port()
    command = [sys.executable, "-m", "mooncake", "gateway", "--port", str(port), "--protocol", "sequential"]
    command += ["--prefill", *workers["prefill"], "--decode", *workers["decode"]]
    command += ["--scheduling", "cache_aware"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "ADMIN_API_KEY": ADMIN_KEY}
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:

        def is_ready() -> bool:
            asking = urllib.request.Request(f"{url}/status", headers={"X-API-Key": ADMIN_KEY})
            with urllib.request.urlopen(asking, timeout=10) as answer:
                rows = json.loads(answer.read())["instances"]
                return all(row["health"] == "ready" for row in rows)

        wait_for(is_ready, "the second gateway", 120.0)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=300) as answer:
        content = answer.read()
    if not body.get("stream"):
        return json.loads(content)
    events = content.decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_answers_are_those_of_the_workers_own_gateway(cluster: Cluster, front: str) -> None:
    own = cluster.complete(PROMPT, 12).body["choices"][0]["text"]
    request: dict[str, Any] = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = post(front, "/v1/completions", **request)
    assert whole["choices"][0]["text"] == own
    chunks = post(front, "/v1/completions", **request, stream=True, stream_options={"include_usage": True})
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == own
    usage = chunks[-1]["usage"]
    # The prefill worker has computed this prompt before.
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    chat = post(front, "/v1/chat/completions", messages=CHAT, max_tokens=16, temperature=0)
    assert "Paris" in chat["choices"][0]["message"]["content"]
