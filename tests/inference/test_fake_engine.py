# SPDX-License-Identifier: Apache-2.0
"""The fake engine: its answer is a function of weights and prompt alone; its HTTP API."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mooncake.http.server import HttpServer, listen
from mooncake.inference.api import create_app
from mooncake.inference.fake_engine import FakeEngineSettings, running
from tests.program import programs

PROMPT = "the same prompt, a few blocks long, sent to each of all the engines"


@dataclasses.dataclass
class Client:
    http: aiohttp.ClientSession

    async def ask(self, path: str, body: object = None) -> tuple[int, str]:
        method = "GET" if body is None else "POST"
        async with self.http.request(method, path, json=body) as answer:
            return answer.status, await answer.text()

    async def complete(self, prompt: object = PROMPT, **more: Any) -> Any:
        body = {"model": "fake", "prompt": prompt, "max_tokens": 12, **more}
        status, text = await self.ask("/v1/completions", body)
        assert status == 200, text
        return json.loads(text)


@contextlib.asynccontextmanager
async def serving(settings: FakeEngineSettings) -> AsyncIterator[Client]:
    """A client of an engine in this process."""
    async with running(settings) as api:
        server = HttpServer(create_app(api), listen("127.0.0.1", 0))
        await server.start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as http:
            yield Client(http)
        await server.close()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving(FakeEngineSettings()) as found:
        yield found


async def test_the_answer_is_a_function_of_weights_and_prompt() -> None:
    texts = {}
    for name, settings in {
        "first": FakeEngineSettings(),
        "second": FakeEngineSettings(block_tokens=4, num_blocks=64),
        "other weights": FakeEngineSettings(seed=1),
    }.items():
        async with serving(settings) as client:
            texts[name] = (await client.complete())["choices"][0]["text"]
            other = (await client.complete("T" + PROMPT[1:]))["choices"][0]["text"]
            assert other != texts[name]
    assert texts["first"] == texts["second"] != texts["other weights"]


async def test_cached_tokens_are_reported(client: Client) -> None:
    first, second = await client.complete(), await client.complete()
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 16 * 16
    assert second["usage"]["completion_tokens"] == len(second["choices"][0]["text"]) == 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_has_the_same_text(client: Client, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    body = {**prompt, "max_tokens": 12}
    whole = json.loads((await client.ask(path, body))[1])["choices"][0]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await client.ask(path, {**body, **options}))[1].split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    if "chat" in path:
        text = "".join(piece["delta"].get("content", "") for piece in pieces)
        assert text == whole["message"]["content"]
    else:
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert chunks[-1]["usage"]["completion_tokens"] == 12


async def test_an_answer_begun_elsewhere_goes_on(client: Client) -> None:
    whole = await client.complete(return_token_ids=True)
    tokens, text = whole["choices"][0]["token_ids"], whole["choices"][0]["text"]
    params = {"num_output_tokens": 5, "output_text_offset": 3, "transfer_id": "t"}
    rest = await client.complete(list(PROMPT.encode()) + tokens[:5], kv_transfer_params=params)
    assert rest["choices"][0]["text"] == text[3:]
    assert rest["kv_transfer_params"] == params
    assert rest["usage"]["prompt_tokens"] == len(PROMPT)
    assert rest["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": PROMPT, "presence_penalty": 1.0}, 400),
        ({"prompt": [0] * 9000}, 400),
        ({"prompt": [0] * 9000, "stream": True}, 400),
        ({"prompt": PROMPT, "model": "another"}, 404),
        ({"prompt": PROMPT, "kv_transfer_params": {"num_output_tokens": -1}}, 400),
    ],
)
async def test_unsupported_requests_are_refused(client: Client, body: Any, status: int) -> None:
    found, text = await client.ask("/v1/completions", body)
    assert found == status
    assert json.loads(text)["error"]["message"]


async def test_choices_prompts_and_stops_are_a_workers(client: Client) -> None:
    whole = (await client.complete(logprobs=1))["choices"][0]
    text = whole["text"]
    assert whole["logprobs"]["token_logprobs"] == [0.0] * 12
    both = await client.complete([PROMPT, "another"], n=2)
    texts = [choice["text"] for choice in both["choices"]]
    assert texts[:2] == [text, text] and texts[2] == texts[3] != text
    stopped = (await client.complete(stop=[text[4:6]]))["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.find(text[4:6])], "stop")


def test_it_runs_without_torch() -> None:
    program = """
import asyncio, sys
sys.modules["torch"] = sys.modules["transformers"] = None
from mooncake.inference.fake_engine import FakeEngineSettings, running
from mooncake.inference.generator import TokenCounts
from mooncake.inference.request import Request
async def main():
    async with running(FakeEngineSettings()) as api:
        return [piece.text async for piece in api.generator.pieces(Request("r", [1]), TokenCounts())]
print(len("".join(asyncio.run(main()))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60.0)
    assert done.stdout.strip() == "16", done.stderr


async def test_models_and_health(client: Client) -> None:
    (card,) = json.loads((await client.ask("/v1/models"))[1])["data"]
    assert (card["id"], card["max_model_len"]) == ("fake", 8192)
    health = json.loads((await client.ask("/health"))[1])
    assert (health["status"], health["num_running"]) == ("ok", 0)


def test_an_engine_dies_in_the_middle_of_a_load_and_the_next_one_answers(tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "kv_transfer_params": {"do_remote_decode": True}}
    with programs(tmp_path) as program:
        store = program("daemon", "--capacity-dram", "0.064", "--no-huge-pages")
        engine = ["dev", "fake-engine", "--master", store.address]
        truth = program(*engine).post("/v1/completions", body).body
        assert truth["kv_transfer_params"]["num_stored_tokens"] == len(PROMPT)
        mortal = program(*engine, "--die-in-load", "1")
        with pytest.raises(OSError):
            mortal.post("/v1/completions", body)
        assert mortal.process.wait(60.0) == -signal.SIGKILL
        answer = program(*engine, "--fail-load-every", "2").post("/v1/completions", body).body
        assert answer["choices"][0]["text"] == truth["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)
