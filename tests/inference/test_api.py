# SPDX-License-Identifier: Apache-2.0
"""The worker's HTTP API over a real engine with a tiny random model, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mooncake import clock
from mooncake.connectors.kv_link import PushSource
from mooncake.errors import Refusal
from mooncake.http import answers
from mooncake.http.answers import AnswerPiece
from mooncake.http.latency import e2e_seconds, ttft_seconds
from mooncake.http.openai import ApiError, CompletionRequest, KvEventSource, parse_request
from mooncake.http.server import HttpServer, listen
from mooncake.inference.api import Api, _push_of, create_app, external_queries, requests_total
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.generator import Generator
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.tokenizer import REPLACEMENT, Detokenizer, Tokenizer
from mooncake.inference.weights import load_model
from mooncake.types import WorkerRole
from tests.inference.conftest import VOCABULARY, Reference
from tests.inference.dictionary_link import DictionaryLink
from tests.waiting import until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"


def make_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer of bytes, limited to those in the tiny vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 3]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{text: 3 + n for n, text in enumerate(alphabet)}}
    raw = RawTokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    wrapped = make(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    wrapped.save_pretrained(folder)
    return Tokenizer(folder)


class Client:
    def __init__(self, http: aiohttp.ClientSession, url: str, generator: Generator) -> None:
        self.http = http
        self.url = url
        self.generator = generator

    async def get(self, path: str) -> Any:
        async with self.http.get(self.url + path) as answer:
            return await answer.json()

    async def post(self, path: str, body: object, status: int = 200) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data) as answer:
            found = await answer.json()
            assert answer.status == status, found
            return found

    async def stream(self, path: str, body: dict[str, object]) -> list[Any]:
        events = []
        async with self.http.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.content:
                if line.startswith(b"data: "):
                    events.append(line[6:].strip())
        assert events.pop() == b"[DONE]"
        return [json.loads(event) for event in events]


@contextlib.asynccontextmanager
async def serving(folder: Path, tmp_path: Path, link: DictionaryLink | None = None) -> AsyncIterator[Client]:
    model = load_model(folder)
    settings = InferenceSettings(max_running=4, max_waiting=8)
    pool = new_pool(model, 16, 1 << 20)
    if link is not None:
        link.pool = pool
    engine = Engine(settings, TorchRunner(model, pool, link), link)
    generator = Generator(engine, make_tokenizer(tmp_path), asyncio.get_running_loop())
    generator.start()
    api = Api(generator, "tiny", WorkerRole.PREFILL, KvEventSource("tcp://127.0.0.1:1"))
    server = HttpServer(create_app(api), listen("127.0.0.1", 0))
    await server.start()
    async with aiohttp.ClientSession() as http:
        yield Client(http, f"http://127.0.0.1:{server.port}", generator)
    await server.close()
    await asyncio.to_thread(generator.stop)
    engine.check()


@pytest.fixture
async def client(llama: Reference, tmp_path: Path) -> AsyncIterator[Client]:
    async with serving(llama.folder, tmp_path) as client:
        yield client


PROMPT = list(range(5, 45))


def greedy(**more: object) -> dict[str, object]:
    return {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


async def test_the_answer_is_transformers(client: Client, llama: Reference) -> None:
    answer = await client.post(TEXT, greedy())
    choice = answer["choices"][0]
    assert choice["token_ids"] == llama.greedy(PROMPT, 12)
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 12,
        "total_tokens": 52,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    again = await client.post(TEXT, greedy())
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_a_stream_joins_to_the_whole(client: Client) -> None:
    whole = (await client.post(TEXT, greedy()))["choices"][0]
    events = await client.stream(TEXT, greedy(stream_options={"include_usage": True}))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["text"]
    tokens = [token for event in events[:-1] for token in event["choices"][0]["token_ids"]]
    assert tokens == whole["token_ids"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 12


async def test_a_chat_streams_role_then_text(client: Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "ab"}],
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
    }
    whole = await client.post(CHAT, body)
    events = await client.stream(CHAT, body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


CALL_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name + call.function.arguments.a }}{% endfor %}"
    "{{ m.tool_call_id or '' }}{% endfor %}"
)


async def test_a_chat_with_tool_calls_is_rendered_whole(client: Client) -> None:
    tokenizer = client.generator.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    tokenizer._tokenizer.chat_template = CALL_TEMPLATE
    function = {"name": "F", "arguments": '{"a": "X"}'}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "7", "function": function}]},
        {"role": "tool", "content": "r", "tool_call_id": "7"},
    ]
    answer = await client.post(CHAT, {"messages": messages, "max_tokens": 1, "echo": None})
    assert answer["usage"]["prompt_tokens"] == len("uq" + "a" + "FX" + "tr7")


async def test_a_worker_continues_the_final_message(client: Client) -> None:
    body = {"messages": [{"role": "assistant", "content": "ab"}], "max_tokens": 1}
    tokenizer = client.generator.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    tokenizer._tokenizer.chat_template = TEMPLATE.replace("{% endfor %}", "</s>{% endfor %}")
    whole = await client.post(CHAT, body)
    continued = await client.post(
        CHAT, {**body, "continue_final_message": True, "add_generation_prompt": False}
    )
    assert whole["usage"]["prompt_tokens"] == 4
    assert continued["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("num_prior", [1, 5, 11])
async def test_an_answer_continues_where_another_worker_left_it(client: Client, num_prior: int) -> None:
    sampled = greedy(temperature=0.9, seed=3, stop=["~~"])
    whole = (await client.post(TEXT, sampled))["choices"][0]
    begun = [event["choices"][0] for event in await client.stream(TEXT, sampled)]
    tokens = whole["token_ids"][:num_prior]
    sent = ""
    for choice in begun:
        if not tokens[: len(choice["token_ids"])]:
            break
        tokens = tokens[len(choice["token_ids"]) :]
        sent += choice["text"]
    resumed = await client.post(
        TEXT,
        {
            **sampled,
            "prompt": PROMPT + whole["token_ids"][:num_prior],
            "kv_transfer_params": {"num_output_tokens": num_prior, "output_text_offset": len(sent)},
        },
    )
    choice = resumed["choices"][0]
    assert whole["token_ids"][:num_prior] + choice["token_ids"] == whole["token_ids"]
    assert sent + choice["text"] == whole["text"]
    assert resumed["usage"]["prompt_tokens"] == 40
    assert resumed["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("num_before", [1, 4])
async def test_a_stream_that_leaves_is_continued_without_a_gap(client: Client, num_before: int) -> None:
    sampled = greedy(temperature=0.9, seed=3, stop=["~~"], max_tokens=400)
    whole = (await client.post(TEXT, sampled))["choices"][0]
    tokens: list[int] = []
    text, finish = "", None
    body = {**sampled, "stream": True, "kv_transfer_params": {"move_id": "m"}}
    async with client.http.post(client.url + TEXT, json=body) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            tokens += choice["token_ids"]
            text, finish = text + choice["text"], choice["finish_reason"]
            if len(tokens) == num_before and finish is None:
                move = {"move_id": "m", "transfer_id": "t"}
                moving = await client.post("/v1/kv/hand_over", move)
                assert moving == {"status": "leaving", "push_port": 0}
                again = await client.post("/v1/kv/hand_over", move, status=404)
                assert again["error"]["code"] == "request_not_found"
    assert finish == "moved" and num_before <= len(tokens) < 400
    params = {"num_output_tokens": len(tokens), "output_text_offset": len(text)}
    events = await client.stream(
        TEXT, {**sampled, "prompt": PROMPT + tokens, "kv_transfer_params": {**params, "move_id": "m"}}
    )
    choices = [event["choices"][0] for event in events]
    assert tokens + [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert text + "".join(choice["text"] for choice in choices) == whole["text"]
    found = events[0]["kv_transfer_params"]["resumed"]
    num_local = found["num_local_tokens"]
    assert num_local >= 32 and not found["is_pushed"] and not found["num_loaded_tokens"]
    assert found["num_computed_tokens"] == len(PROMPT) + len(tokens) - num_local
    await client.post("/v1/kv/hand_over", {"move_id": "m", "transfer_id": "t"}, status=404)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        ({"move_id": "m"}, 400),
        ({"move_id": "m", "transfer_id": ""}, 400),
        ({"move_id": 7, "transfer_id": "t"}, 400),
        (b'{"move_id": "\xff", "transfer_id": "t"}', 400),
        (b'{"move_id": ' + b"[" * 2000, 400),
        ({"move_id": "m", "transfer_id": "t" * 201}, 400),
        ({"move_id": "m", "transfer_id": "t" * 5000}, 413),
        ({"move_id": "m", "transfer_id": "t"}, 404),
    ],
)
async def test_a_hand_over_that_is_none_is_refused(client: Client, body: Any, status: int) -> None:
    await client.post("/v1/kv/hand_over", body, status=status)


@pytest.mark.parametrize("is_shown", [False, True])
async def test_stop_strings_end_the_answer_and_are_shown_on_request(client: Client, is_shown: bool) -> None:
    whole = (await client.post(TEXT, greedy()))["choices"][0]["text"]
    stop = whole[3:5]
    choice = (await client.post(TEXT, greedy(stop=[stop], include_stop_str_in_output=is_shown)))["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)] + stop * is_shown
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("is_shown", [False, True])
async def test_a_stop_token_is_shown_on_request(client: Client, is_shown: bool) -> None:
    whole = (await client.post(TEXT, greedy(temperature=0.9, seed=3)))["choices"][0]["token_ids"]
    tokenizer = client.generator.tokenizer
    at, stop = next((at, one) for at, one in enumerate(whole) if at and tokenizer.decode([one]).isascii())
    at = whole.index(stop)
    sampled = greedy(temperature=0.9, seed=3, stop_token_ids=[stop], include_stop_str_in_output=is_shown)
    choice = (await client.post(TEXT, sampled))["choices"][0]
    assert choice["token_ids"] == whole[: at + 1]
    assert choice["text"] == tokenizer.decode(whole[: at + is_shown])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("skipped", [False, True])
async def test_special_tokens_are_text_on_request(client: Client, skipped: bool) -> None:
    prior = [2, 8, 2]
    params = {"num_output_tokens": 3}
    body = greedy(prompt=[*PROMPT, *prior], max_tokens=4, skip_special_tokens=skipped)
    text = (await client.post(TEXT, {**body, "kv_transfer_params": params}))["choices"][0]["text"]
    assert ("</s>" in text) != skipped


@pytest.mark.parametrize("num_prior", [0, 2, 7])
async def test_a_stop_string_is_not_looked_for_in_the_first_min_tokens(
    client: Client, num_prior: int
) -> None:
    begun = greedy(temperature=0.9, seed=8, max_tokens=30)
    whole = (await client.post(TEXT, begun))["choices"][0]
    detokenizer = Detokenizer(client.generator.tokenizer.decode)
    ends = [len(detokenizer.feed(token)) for token in whole["token_ids"]]
    # The last character that the first five tokens complete, wherever it is again.
    min_tokens = max(number for number in range(1, 7) if ends[number - 1])
    first = sum(ends[:min_tokens])
    stop = whole["text"][first - 1]
    again = whole["text"].find(stop, first)
    prior = whole["token_ids"][:num_prior]
    params = {"num_output_tokens": num_prior} if num_prior else {}
    fields = {"prompt": PROMPT + prior, "stop": [stop], "kv_transfer_params": params}
    at_once = (await client.post(TEXT, {**begun, **fields, "max_tokens": 30}))["choices"][0]
    later = (await client.post(TEXT, {**begun, **fields, "min_tokens": min_tokens}))["choices"][0]
    assert at_once["text"] == whole["text"][: whole["text"].index(stop)]
    assert later["text"] == (whole["text"] if again < 0 else whole["text"][:again])


async def test_many_prompts_and_choices_are_numbered(client: Client) -> None:
    answer = await client.post(TEXT, greedy(prompt=[PROMPT, PROMPT[:7]], n=2, temperature=0.5, seed=1))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 47
    assert answer["usage"]["completion_tokens"] == 48


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_that_is_larger_than_the_queue_is_served_in_portions(
    client: Client, stream: bool
) -> None:
    settings = client.generator.engine.scheduler.settings
    num_prompts = settings.max_waiting + 2 * settings.max_running
    body = {"prompt": [[5, 6]] * num_prompts, "max_tokens": 1}
    if stream:
        chunks = await client.stream(TEXT, body)
        found = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    else:
        found = (await client.post(TEXT, body))["choices"]
    assert sorted(choice["index"] for choice in found) == list(range(num_prompts))


async def test_logprobs_have_a_column_per_token(client: Client) -> None:
    logprobs = (await client.post(TEXT, greedy(logprobs=3, max_tokens=4)))["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == 4
    assert all(len(top) <= 4 for top in logprobs["top_logprobs"])
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    chat = {
        "messages": [{"role": "user", "content": "a"}],
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 2,
    }
    rows = (await client.post(CHAT, chat))["choices"][0]["logprobs"]["content"]
    assert 1 <= len(rows) <= 2
    assert len(rows[0]["top_logprobs"]) == 2


async def test_a_chat_without_a_limit_ends_where_its_log_probabilities_do(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_WHOLE_LOGPROBS", 5 * 3)
    chat = {"messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 2}
    choice = (await client.post(CHAT, {**chat, "ignore_eos": True}))["choices"][0]
    assert (choice["finish_reason"], len(choice["logprobs"]["content"])) == ("length", 5)
    await client.post(CHAT, {**chat, "max_tokens": 6}, status=400)


async def test_logprobs_lose_no_alternative_and_have_the_bytes_of_tokens(client: Client) -> None:
    sampled = greedy(logprobs=20, max_tokens=8, temperature=1.5, seed=5)
    logprobs = (await client.post(TEXT, sampled))["choices"][0]["logprobs"]
    rows = logprobs["content"]
    assert len(rows) == 8
    columns = zip(rows, logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    num_fragments = 0
    for row, name, value, top in columns:
        assert (row["token"], row["logprob"], top[name]) == (name, value, value)
        alternatives = {bytes(one["bytes"]): one["logprob"] for one in row["top_logprobs"]}
        assert len(row["top_logprobs"]) == len(alternatives) == 20, "the tokens are single bytes"
        num_fragments += sum(one["token"] == REPLACEMENT for one in row["top_logprobs"])
        assert sorted(top.values()) == sorted({**alternatives, bytes(row["bytes"]): value}.values())
    assert num_fragments > 8 and b"\xef\xbf\xbd" not in alternatives
    without = (await client.post(TEXT, {**sampled, "return_token_ids": False}))["choices"][0]["logprobs"]
    assert without == {key: value for key, value in logprobs.items() if key != "content"}


async def test_prefill_reports_what_it_stored(client: Client) -> None:
    answer = await client.post(TEXT, greedy(max_tokens=1, kv_transfer_params={"do_remote_decode": True}))
    handed_over = answer["kv_transfer_params"]
    measured = handed_over.pop("measured")
    assert handed_over == {"do_remote_prefill": True, "num_stored_tokens": 0}
    assert measured["computed_s"] > 0 and measured["queued_s"] >= 0
    assert measured["num_computed_tokens"] == answer["usage"]["prompt_tokens"] - measured["num_local_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (TEXT, b"{", 400, None),
        (TEXT, {"prompt": [1, 10**6]}, 400, "prompt"),
        (TEXT, {"prompt": [5] * 600}, 400, "prompt"),
        (TEXT, {"prompt": [[5]] * 33, "n": 128}, 400, "prompt"),
        (TEXT, {"prompt": [5], "stop_token_ids": [10**6], "min_tokens": 2}, 400, "stop_token_ids"),
        (TEXT, {"prompt": [5], "stop_token_ids": [5, -1]}, 400, "stop_token_ids"),
        (TEXT, {"prompt": "ab", "model": "other"}, 404, "model"),
        (TEXT, {"prompt": "ab", "presence_penalty": 1.0}, 400, "presence_penalty"),
        (TEXT, {"prompt": [5], "max_tokens": 2, "kv_transfer_params": {"num_output_tokens": 9}}, 400, None),
        (TEXT, {"prompt": [5], "kv_transfer_params": {"num_output_tokens": "x"}}, 400, "kv_transfer_params"),
        (CHAT, {"messages": "hello"}, 400, "messages"),
    ],
)
async def test_bad_requests_are_named(
    client: Client, path: str, body: object, status: int, param: str | None
) -> None:
    error = (await client.post(path, body, status))["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert (await client.post(TEXT, greedy(max_tokens=1)))["choices"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_prompt_that_cannot_fit_is_never_tokenized(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    tokenizer = client.generator.tokenizer
    text = "a" * (client.generator.engine.scheduler.max_total_tokens * tokenizer.longest_token_chars)

    def encode(*arguments: Any, **more: Any) -> list[int]:
        raise AssertionError("it was tokenized")

    for name in ("encode", "chat"):
        monkeypatch.setattr(tokenizer, name, encode)
    body = {"prompt": text} if path == TEXT else {"messages": [{"role": "user", "content": text}]}
    error = (await client.post(path, body, 400))["error"]
    assert error["code"] == "context_length_exceeded" and "at least" in error["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"model": "x" * 300_000},
        {"kv_transfer_params": {"turn": "x" * 300_000}},
        {"kv_transfer_params": {"turn": ["x"] * 300_000}},
    ],
    ids=["model", "text", "list"],
)
async def test_an_error_repeats_a_part_of_a_long_value(client: Client, more: dict[str, Any]) -> None:
    async with client.http.post(client.url + TEXT, json=greedy(**more)) as answer:
        assert answer.status in (400, 404) and len(await answer.read()) < 400


async def test_log_probabilities_of_a_whole_answer_are_bounded(client: Client) -> None:
    """All are in memory until it ends."""
    body = {"prompt": [[5]] * 32, "n": 128, "max_tokens": 100, "logprobs": 20}
    error = (await client.post(TEXT, body, 400))["error"]
    assert error["param"] == "logprobs" and "may have 8601600 log probabilities" in error["message"]


def slowed(client: Client, monkeypatch: pytest.MonkeyPatch, encode_s: float) -> SimpleNamespace:
    """A clock of the API that stands still, but for ``encode_s`` while a prompt is tokenized."""
    fake_clock = SimpleNamespace(now=0.0, wall=clock.wall)
    fake_clock.monotonic = lambda: fake_clock.now
    tokenizer = client.generator.tokenizer
    encode = tokenizer.encode

    def slow(text: str) -> list[int]:
        fake_clock.now += encode_s
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", slow)
    monkeypatch.setattr("mooncake.inference.api.clock", fake_clock)
    return fake_clock


async def test_the_time_to_the_first_token_includes_the_work_before_the_engine(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(client, monkeypatch, 3.0)
    before = [one._sum.get() for one in (ttft_seconds, e2e_seconds)]
    await client.post(TEXT, {"prompt": "ab", "max_tokens": 1})
    after = [one._sum.get() for one in (ttft_seconds, e2e_seconds)]
    assert [round(now - then, 6) for now, then in zip(after, before, strict=True)] == [3.0, 3.0]


async def test_a_place_in_the_queue_is_not_waited_for_longer_because_of_an_upload(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_clock = slowed(client, monkeypatch, 1000.0)

    async def pieces(self: Generator, *arguments: Any, **more: Any) -> AsyncIterator[AnswerPiece]:
        fake_clock.now += 21.0
        yield AnswerPiece(finish_reason="length")

    def full(self: object, request: object) -> Refusal:
        return Refusal("queue_full", "the queue is full")

    with monkeypatch.context() as once:
        once.setattr(Generator, "pieces", pieces)
        await client.post(TEXT, {"prompt": "ab", "max_tokens": 1})
    monkeypatch.setattr(Engine, "add", full)
    async with client.http.post(client.url + TEXT, json=greedy()) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "3"), "a tenth of 21 and nine of 1"


async def test_what_is_not_served_has_an_openai_error(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(method: str, path: str, status: int) -> tuple[Any, Any]:
        async with client.http.request(method, client.url + path) as answer:
            assert answer.status == status
            return (await answer.json())["error"], answer.headers

    error, _ = await refused("GET", "/v1/nothing", 404)
    assert (error["type"], error["message"]) == ("not_found_error", "GET /v1/nothing: Not Found")
    error, headers = await refused("GET", TEXT, 405)
    assert error["type"] == "invalid_request_error" and headers["Allow"] == "POST"

    def broken() -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(client.generator.engine, "stats", broken)
    error, _ = await refused("GET", "/health", 500)
    assert error["code"] == "internal_error" and "purpose" not in error["message"]


async def test_a_client_that_disconnects_aborts_its_request(client: Client) -> None:
    async def running() -> int:
        return int((await client.get("/health"))["num_running"])

    for stream in (True, False):
        posted = asyncio.create_task(client.post(TEXT, greedy(max_tokens=450, stream=stream)))
        while not await running():
            assert not posted.done()
        posted.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await posted
        async with asyncio.timeout(10):
            while await running():
                pass


ENDS = ("finished", "refused", "failed", "aborted")


def counted() -> dict[str, float]:
    return {end: requests_total.labels(end)._value.get() for end in ENDS}


def added(before: dict[str, float]) -> dict[str, float]:
    """What was counted since then."""
    return {end: now - before[end] for end, now in counted().items() if now != before[end]}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_end_of_an_answer_counts_its_sequences(
    client: Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    body = greedy(prompt=[PROMPT, PROMPT[:7]], n=3, temperature=1.0, max_tokens=2, stream=stream)

    async def post(**more: object) -> int:
        async with client.http.post(client.url + TEXT, json={**body, **more}) as answer:
            await answer.read()
            return answer.status

    before = counted()
    assert await post() == 200 and added(before) == {"finished": 6}
    before = counted()
    assert await post(prompt=[5, 10**6]) == 400 and added(before) == {"refused": 3}

    before = counted()
    posted = asyncio.create_task(post(max_tokens=450))
    await until(lambda: client.generator.engine.stats().num_running)
    posted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await posted
    await until(lambda: added(before))
    assert added(before) == {"aborted": 6}

    def broken(*arguments: object) -> None:
        raise RuntimeError("broken on purpose")

    before = counted()
    monkeypatch.setattr(client.generator.engine.runner, "run", broken)
    assert await post() == 500 and added(before) == {"failed": 6}


@pytest.mark.parametrize("has_pool", [False, True])
async def test_only_a_worker_with_a_pool_counts_tokens_looked_up_there(
    llama: Reference, tmp_path: Path, has_pool: bool
) -> None:
    async with serving(llama.folder, tmp_path, DictionaryLink() if has_pool else None) as client:
        before = external_queries._value.get()
        await client.post(TEXT, greedy())
        assert external_queries._value.get() - before == len(PROMPT) * has_pool


@pytest.mark.parametrize("path", [TEXT, CHAT, "/v1/kv/hand_over"])
async def test_a_body_that_a_form_of_another_site_could_send_is_refused(client: Client, path: str) -> None:
    headers = {"Content-Type": "text/plain", "Origin": "https://another.example"}
    async with client.http.post(client.url + path, data=json.dumps(greedy()), headers=headers) as answer:
        assert answer.status == 415
        assert (await answer.json())["error"]["param"] == "Content-Type"


async def test_the_other_pages(client: Client) -> None:
    models = await client.get("/v1/models")
    assert models["data"][0]["id"] == "tiny"
    assert models["data"][0]["max_model_len"] > 100
    assert (await client.get("/kv_event_sources"))["block_size"] == 16
    ready = await client.get("/ready")
    assert ready["status"] == "ok"
    total_tokens = ready["num_blocks"] * 16
    idle = {"used_tokens": 0, "num_requests": 0, "context_tokens": 0}
    assert ready["kv_memory"] == {"total_tokens": total_tokens, **idle}
    await client.post(TEXT, greedy(max_tokens=1))
    async with client.http.get(client.url + "/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        page = await answer.text()
    for path, status in (("/health", 200), ("/ready", 200), ("/docs", 404), ("/redoc", 404)):
        async with client.http.request("HEAD" if status == 200 else "GET", client.url + path) as answer:
            assert answer.status == status
    for name in (
        "vllm:time_to_first_token_seconds_count",
        "vllm:prefix_cache_queries_total",
        "vllm:num_requests_running",
    ):
        assert name in page


@pytest.mark.parametrize(
    ("push_port", "params", "more", "found"),
    [
        (1, {"do_remote_decode": True, "transfer_id": "t"}, {}, (None, "t")),
        (1, {"transfer_id": "t", "push_from": "h:7"}, {}, (PushSource("t", "h:7"), "")),
        (1, {"transfer_id": "t"}, {}, (None, "")),
        (1, {"push_from": "h:7"}, {}, (None, "")),
        (0, {"transfer_id": "t", "push_from": "h:7"}, {}, (None, "")),
        (1, {"transfer_id": "t", "push_from": "h:7"}, {"n": 2}, (None, "")),
        (1, {"transfer_id": "t", "push_from": "h:7"}, {"prompt": [[5], [6]]}, (None, "")),
    ],
)
def test_a_request_names_its_push(
    push_port: int, params: dict[str, Any], more: dict[str, Any], found: tuple[PushSource | None, str]
) -> None:
    api = cast(Api, SimpleNamespace(push_port=push_port))
    body = json.dumps({"prompt": [5], "kv_transfer_params": params, **more}).encode()
    assert _push_of(api, parse_request(CompletionRequest, body)) == found


@pytest.mark.parametrize(
    "params",
    [
        {"transfer_id": ["t"], "push_from": "h:7"},
        {"transfer_id": "t" * 201, "push_from": "h:7"},
        {"transfer_id": "t", "push_from": "nowhere"},
        {"transfer_id": "t", "push_from": {"h": 7}},
    ],
)
def test_a_push_that_is_not_one_is_refused(params: dict[str, Any]) -> None:
    api = cast(Api, SimpleNamespace(push_port=1))
    body = json.dumps({"prompt": [5], "kv_transfer_params": params}).encode()
    with pytest.raises(ApiError) as refused:
        _push_of(api, parse_request(CompletionRequest, body))
    assert refused.value.status == 400
