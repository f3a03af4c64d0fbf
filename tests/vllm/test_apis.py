# SPDX-License-Identifier: Apache-2.0
"""Anthropic's and OpenAI's own clients get the same from a vLLM server directly and through the gateway."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm_server import Gateway, VllmServer, running_gateway

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

NUM_TOKENS = 8
PROMPT = "Name the capital of France in one short sentence."
SYSTEM = "You answer briefly."


@dataclass(frozen=True)
class Servers:
    vllm: VllmServer
    gateway: Gateway

    @property
    def urls(self) -> tuple[str, str]:
        return self.vllm.url, self.gateway.url


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("apis")
    vllm = VllmServer("vllm", model, folder, dtype="float32")
    try:
        flags = ["--scheduling", "cache_aware", "--decode", vllm.address]
        with running_gateway(folder, model, *flags) as gateway:
            vllm.wait_until_ready()
            gateway.wait_until_routable()
            yield Servers(vllm, gateway)
    finally:
        vllm.close()


def without_ids(found: Any) -> Any:
    """The answer without what differs in each: ids, times, and the prompt's cached tokens."""
    varying = ("id", "item_id", "created_at", "usage", "kv_transfer_params", "completed_at")
    if isinstance(found, dict):
        return {name: without_ids(value) for name, value in found.items() if name not in varying}
    return [without_ids(one) for one in found] if isinstance(found, list) else found


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with deltas in a row as one: the engine may send several tokens in one event."""
    found: list[dict[str, Any]] = []
    for event in events:
        one = {name: value for name, value in event.items() if name != "sequence_number"}
        is_next = found and isinstance(one.get("delta"), str) and found[-1]["type"] == one["type"]
        if is_next:
            found[-1]["delta"] += one["delta"]
        else:
            found.append(one)
    return found


def test_messages_are_those_of_the_engine(servers: Servers) -> None:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not in this environment")
    found = []
    for url in servers.urls:
        client = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
        request: dict[str, Any] = {
            "model": "smollm2",
            "max_tokens": NUM_TOKENS,
            "extra_body": {"temperature": 0.0},
            "system": SYSTEM,
            "messages": [{"role": "user", "content": PROMPT}],
        }
        whole = client.messages.create(**request)
        with client.messages.stream(**request) as stream:
            # The client makes events of its own ("text"); several tokens may come in one of the engine's.
            events = [event.model_dump() for event in stream if event.type != "text"]
            final = stream.get_final_message()
        count = client.messages.count_tokens(
            model="smollm2", system=SYSTEM, messages=[{"role": "user", "content": PROMPT}]
        )
        assert whole.content[0].text == final.content[0].text != ""
        assert whole.usage.output_tokens == final.usage.output_tokens > 0
        assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**request, "model": "no-such-model"})
        types = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
        found.append(without_ids([whole.model_dump(), types, final.model_dump(), count.model_dump()]))
    assert found[0] == found[1]


def test_responses_are_those_of_the_engine(servers: Servers) -> None:
    openai = pytest.importorskip("openai", reason="openai is not in this environment")
    found = []
    for url in servers.urls:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        request: dict[str, Any] = {
            "model": "smollm2",
            "max_output_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "instructions": SYSTEM,
            "input": PROMPT,
        }
        whole = client.responses.create(**request)
        events = [event.model_dump() for event in client.responses.create(**request, stream=True)]
        assert whole.output_text and whole.usage.output_tokens > 0
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**{**request, "model": "no-such-model"})
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="smollm2", input=PROMPT)
        found.append(without_ids([whole.model_dump(), *joined(events)]))
    for direct, relayed in zip(*found, strict=True):
        assert direct == relayed


def test_tokens_are_those_of_the_engine(servers: Servers) -> None:
    body = {"model": "smollm2", "prompt": PROMPT}
    direct, relayed = (one.post("/tokenize", body) for one in (servers.vllm, servers.gateway))
    assert (relayed.status, relayed.body) == (200, direct.body)
    back = servers.gateway.post("/detokenize", {"model": "smollm2", "tokens": direct.body["tokens"]})
    assert (back.status, back.body["prompt"]) == (200, PROMPT)


def test_a_message_s_tokens_are_hashed_as_the_engine_makes_them(servers: Servers) -> None:
    """Else the engine's KV events would never match the prompts of coding agents."""
    message = {
        "model": "smollm2",
        "max_tokens": 1,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": SYSTEM},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
    }
    answer = servers.gateway.post("/v1/messages", message)
    assert answer.status == 200, answer.body
    usage = answer.body["usage"]
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
    tokens = servers.vllm.post("/tokenize", {"model": "smollm2", "messages": chat}).body["count"]
    assert usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0) == tokens
