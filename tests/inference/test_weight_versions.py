# SPDX-License-Identifier: Apache-2.0
"""Weights are replaced between two steps: no answer mixes versions, no KV of the old ones is found."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import aiohttp
import pytest
import torch

from mooncake.connectors.memory import CacheIdentity
from mooncake.connectors.store_link import StoreLink
from mooncake.errors import DeadlineExceeded, InvalidArgument, ModelError
from mooncake.http.openai import KvEventSource
from mooncake.http.server import HttpServer, listen
from mooncake.inference.api import Api, create_app
from mooncake.inference.engine import Engine, InferenceSettings
from mooncake.inference.generator import Generator
from mooncake.inference.runner import TorchRunner, new_pool
from mooncake.inference.weight_versions import (
    MAX_BODY_BYTES,
    LoadedWeights,
    WeightVersions,
    add_weight_routes,
)
from mooncake.inference.weights import load_model, weights_digest
from mooncake.kvlayout import KvIdentity
from mooncake.security.http_auth import AdminKey
from mooncake.types import WorkerRole
from tests.inference.conftest import Reference
from tests.inference.test_api import TEXT, Client, greedy, make_tokenizer
from tests.waiting import until

PROMPT = list(range(5, 45))
KEY = {"X-API-Key": "secret"}


@pytest.fixture
def other(llama: Reference, tmp_path: Path) -> Path:
    """The same model with other weights."""
    with torch.no_grad():
        kept = {name: value.clone() for name, value in llama.model.state_dict().items()}
        for parameter in llama.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        llama.model.save_pretrained(tmp_path / "other")
        llama.model.load_state_dict(kept)
    return tmp_path / "other"


def loaded(folder: Path) -> LoadedWeights:
    model, digest = load_model(folder), weights_digest(folder)
    return LoadedWeights(str(folder), digest, model, KvIdentity(digest, "", model.kv_layout(16)))


class RenamedLink:
    """The part of a link that a flip calls; raises ``error`` if there is one."""

    def __init__(self) -> None:
        self.identity: CacheIdentity | None = None
        self.error: Exception | None = None

    def replace_identity(self, identity: CacheIdentity) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.identity = identity


class Worker(Client):
    versions: WeightVersions
    engine: Engine

    async def tokens(self, max_tokens: int = 12) -> list[int]:
        answer = await self.post(TEXT, greedy(max_tokens=max_tokens))
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    async def command(self, what: str, body: object = None, status: int = 200) -> dict[str, object]:
        url = f"{self.url}/weights/{what}"
        async with self.http.post(url, json=body or {}, headers=KEY) as answer:
            found: dict[str, object] = await answer.json()
            assert answer.status == status, found
            return found


@contextlib.asynccontextmanager
async def working(
    folder: Path, tokenizer: Path, link: RenamedLink | None = None, max_running: int = 64
) -> AsyncIterator[Worker]:
    weights = loaded(folder)
    runner = TorchRunner(weights.model, new_pool(weights.model, 16, 1 << 20))
    engine = Engine(InferenceSettings(max_running=max_running), runner, weights=weights.digest)
    generator = Generator(engine, make_tokenizer(tokenizer), asyncio.get_running_loop())
    generator.start()
    versions = WeightVersions(engine, runner, cast("StoreLink | None", link), weights, loaded)
    api = Api(generator, "tiny", WorkerRole.PREFILL, KvEventSource("tcp://127.0.0.1:1"))
    api.add_routes = lambda app: add_weight_routes(app, versions, AdminKey("secret"))
    server = HttpServer(create_app(api), listen("127.0.0.1", 0))
    await server.start()
    async with aiohttp.ClientSession() as http:
        worker = Worker(http, f"http://127.0.0.1:{server.port}", generator)
        worker.versions, worker.engine = versions, engine
        yield worker
    await server.close()
    await asyncio.to_thread(generator.stop)
    engine.check()


async def test_a_flip_changes_answers_at_once_and_a_rollback_changes_them_back(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    async with working(llama.folder, tmp_path) as worker:
        old = await worker.tokens()
        assert old == llama.greedy(PROMPT, 12)
        assert (await worker.command("prepare", {"path": str(other)}))["prepared"] == weights_digest(other)
        assert await worker.tokens() == old  # prepared weights are not used
        await worker.command("flip")
        new = await worker.tokens()
        async with working(other, tmp_path) as fresh:
            assert new == await fresh.tokens() != old
        await worker.command("rollback")
        assert await worker.tokens() == old
        await worker.command("flip")  # what was rolled back is prepared
        assert await worker.tokens() == new
        worker.engine.check()


async def test_answers_of_new_weights_end_with_their_own_tokens(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    """A model tuned for chats has another end-of-sequence token than its base model."""
    async with working(other, tmp_path) as fresh:
        wanted = await fresh.tokens()
    settings = other / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": wanted[2]}))
    async with working(llama.folder, tmp_path) as worker:
        old = await worker.tokens()
        await worker.versions.prepare(other)
        await worker.versions.flip()
        answer = await worker.post(TEXT, greedy(max_tokens=12) | {"ignore_eos": False})
        assert answer["choices"][0]["token_ids"] == wanted[: wanted.index(wanted[2]) + 1]
        await worker.versions.rollback()
        assert await worker.tokens() == old


async def test_kv_of_the_old_weights_is_not_found(llama: Reference, other: Path, tmp_path: Path) -> None:
    async with working(llama.folder, tmp_path) as worker:
        await worker.tokens()
        again = await worker.post(TEXT, greedy())
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        await worker.versions.prepare(other)
        await worker.versions.flip()
        assert worker.engine.stats().num_cached_blocks == 0
        first = await worker.post(TEXT, greedy())
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_no_answer_mixes_versions(mode: str, llama: Reference, other: Path, tmp_path: Path) -> None:
    async with working(llama.folder, tmp_path) as worker, working(other, tmp_path) as fresh:
        wanted = [await worker.tokens(200), await fresh.tokens(200)]
        await worker.versions.prepare(other)

        async def one(delay: int) -> list[int] | None:
            for _ in range(delay):
                await asyncio.sleep(0.002)
            try:
                return await worker.tokens(200)
            except AssertionError as error:
                assert "weights were replaced" in str(error), error
                return None

        answers = [asyncio.create_task(one(delay)) for delay in range(0, 40, 4)]
        await asyncio.sleep(0.03)
        result = await worker.command("flip", {"mode": mode})
        assert result["digest"] == weights_digest(other)
        found = await asyncio.gather(*answers)
        assert all(answer is None or answer in wanted for answer in found)
        assert mode == "abort" or None not in found
        assert await worker.tokens(200) == wanted[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_choices_of_one_answer_are_computed_by_one_version(
    stream: bool, llama: Reference, other: Path, tmp_path: Path
) -> None:
    """The second choice waits for the first, and for the flip, which also waits for the first."""
    async with working(llama.folder, tmp_path, max_running=1) as worker:
        await worker.versions.prepare(other)
        body = {**greedy(max_tokens=300), "n": 2, "stream": stream}

        async def post() -> tuple[int, bytes]:
            async with worker.http.post(worker.url + TEXT, json=body) as answer:
                return answer.status, await answer.read()

        posted = asyncio.create_task(post())
        await until(lambda: worker.engine.stats().num_running)
        await worker.versions.flip("wait")
        status, found = await posted
        assert status == (200 if stream else 409)
        events = [json.loads(event.removeprefix(b"data: ")) for event in found.strip().split(b"\n\n")]
        assert events[-1]["error"]["code"] == "weights_replaced"
        choices = [choice for event in events[:-1] for choice in event["choices"]]
        assert {choice["index"] for choice in choices} == ({0} if stream else set())
        tokens = [token for choice in choices for token in choice["token_ids"]]
        assert tokens == (llama.greedy(PROMPT, 300) if stream else [])
        both = await worker.post(TEXT, {**greedy(), "n": 2})
        assert both["choices"][0]["token_ids"] == both["choices"][1]["token_ids"] != llama.greedy(PROMPT, 12)


async def test_a_flip_has_an_error_of_its_own(llama: Reference, other: Path, tmp_path: Path) -> None:
    """A gateway continues the answer of a worker that failed, which would mix versions here."""
    async with working(llama.folder, tmp_path) as worker:
        await worker.versions.prepare(other)
        whole = asyncio.create_task(worker.post(TEXT, greedy(max_tokens=800), 409))
        body = {**greedy(max_tokens=800), "stream": True}
        async with worker.http.post(worker.url + TEXT, json=body) as streamed:
            await streamed.content.readline()
            await until(lambda: worker.engine.stats().num_running == 2)
            await worker.command("flip")
            events = (await streamed.read()).strip().split(b"\n\n")
        errors = [(await whole)["error"], json.loads(events[-1].removeprefix(b"data: "))["error"]]
    for error in errors:
        assert (error["code"], error["type"]) == ("weights_replaced", "conflict_error")
        assert "send the request again" in error["message"]


def continued(tokens: list[int], digest: object, max_tokens: int = 12) -> dict[str, object]:
    """The request of a gateway whose worker was lost after ``tokens`` of an answer."""
    transfer = {"num_output_tokens": len(tokens), "output_text_offset": 0, "weights": digest}
    return greedy(max_tokens=max_tokens) | {"prompt": PROMPT + tokens, "kv_transfer_params": transfer}


async def test_an_answer_is_continued_only_with_the_weights_of_its_beginning(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    async with working(llama.folder, tmp_path) as worker:
        events = await worker.stream(TEXT, greedy())
        [named, *unnamed] = [event.get("kv_transfer_params") for event in events]
        assert named == {"weights": weights_digest(llama.folder)} and not any(unnamed)
        tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
        begun = continued(tokens[:5], named["weights"])
        await worker.versions.prepare(other)
        assert (await worker.post(TEXT, begun))["choices"][0]["token_ids"] == tokens[5:]
        await worker.versions.flip()
        error = (await worker.post(TEXT, begun, 409))["error"]
        assert (error["code"], error["type"]) == ("weights_replaced", "conflict_error")
        async with worker.http.post(worker.url + TEXT, json={**begun, "stream": True}) as answer:
            assert answer.status == 409
        await worker.versions.rollback()
        assert (await worker.post(TEXT, begun))["choices"][0]["token_ids"] == tokens[5:]
        unknown = await worker.post(TEXT, continued(tokens[:5], ""))  # such as by an older gateway
        assert unknown["choices"][0]["token_ids"] == tokens[5:]
        for wrong in (7, "x" * 1000):
            error = (await worker.post(TEXT, continued(tokens[:5], wrong), 400))["error"]
            assert error["param"] == "kv_transfer_params" and len(error["message"]) < 200


async def test_a_continuation_that_waits_for_a_flip_is_refused_after_it(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    """Its weights were active when it arrived."""
    async with working(llama.folder, tmp_path) as worker:
        tokens = await worker.tokens()
        await worker.versions.prepare(other)
        running = asyncio.create_task(worker.tokens(400))
        await until(lambda: worker.engine.stats().num_running)
        flip = asyncio.create_task(worker.versions.flip("wait"))
        await until(lambda: worker.engine._change is not None)
        begun = continued(tokens[:5], weights_digest(llama.folder))
        error = (await worker.post(TEXT, begun, 409))["error"]
        assert error["code"] == "weights_replaced"
        assert await running == llama.greedy(PROMPT, 400)
        await flip


async def test_requests_that_do_not_end_in_time_keep_the_old_weights(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    async with working(llama.folder, tmp_path) as worker:
        await worker.versions.prepare(other)
        answer = asyncio.create_task(worker.tokens(400))
        await until(lambda: worker.engine.stats().num_running)
        with pytest.raises(DeadlineExceeded, match="old weights stay"):
            await worker.versions.flip("wait", timeout_s=0.001)
        assert await answer == llama.greedy(PROMPT, 400)
        assert worker.versions.prepared is not None
        await worker.versions.flip("wait")
        assert worker.versions.active.digest == weights_digest(other)


async def test_a_change_that_fails_keeps_the_old_weights_and_later_ones_work(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    link = RenamedLink()
    async with working(llama.folder, tmp_path, link) as worker:
        old = await worker.tokens()
        await worker.versions.prepare(other)
        for mode in ("abort", "wait"):
            link.error = RuntimeError("no such name")
            body = {"mode": mode, "timeout_s": 30}
            error = (await worker.command("flip", body, status=500))["error"]
            assert isinstance(error, dict) and error["code"] == "model_error"
            assert "no such name" in error["message"] and "old ones stay active" in error["message"]
            # The model had been replaced when the name of its blocks was not.
            assert await worker.tokens() == old and link.identity == worker.versions.active.identity
            assert worker.versions.active.digest == weights_digest(llama.folder)
        await worker.command("flip")
        assert await worker.tokens() != old
        assert worker.versions.active.digest == weights_digest(other)
        assert link.identity == worker.versions.active.identity
        await worker.command("rollback")
        assert await worker.tokens() == old


async def test_who_may_replace_weights_and_with_what(llama: Reference, tmp_path: Path) -> None:
    async with working(llama.folder, tmp_path) as worker:
        for what in ("prepare", "flip", "rollback"):
            async with worker.http.post(f"{worker.url}/weights/{what}", json={}) as answer:
                assert answer.status in (401, 403), await answer.text()
        await worker.command("prepare", {"path": 1}, status=400)
        await worker.command("flip", {"mode": "later"}, status=400)
        await worker.command("flip", status=400)
        error = (await worker.command("prepare", {"path": "x" * MAX_BODY_BYTES}, status=413))["error"]
        assert isinstance(error, dict) and error["code"] == "body_too_large"
        with pytest.raises(InvalidArgument):
            await worker.versions.rollback()
        await worker.command("prepare", {"path": str(tmp_path / "absent")}, status=400)
        with pytest.raises(ModelError):
            await worker.versions.prepare(tmp_path / "absent")


async def test_a_repeated_flip_keeps_the_version_before(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    """A client whose request timed out sends it again; the second one must not lose the way back."""
    async with working(llama.folder, tmp_path) as worker:
        before = worker.versions.active
        await worker.versions.prepare(other)
        first, second = await asyncio.gather(
            worker.versions.flip(), worker.versions.flip(), return_exceptions=True
        )
        assert not isinstance(first, BaseException) and isinstance(second, InvalidArgument)
        assert worker.versions.previous is before and worker.versions.active is not before
        await worker.versions.rollback()
        assert worker.versions.active is before


async def test_a_flip_behind_a_prepare_takes_what_it_has_prepared(
    llama: Reference, other: Path, tmp_path: Path
) -> None:
    async with working(llama.folder, tmp_path) as worker:
        await worker.versions.prepare(llama.folder)
        prepared, result = await asyncio.gather(worker.versions.prepare(other), worker.versions.flip())
        assert result.digest == prepared.digest == worker.versions.active.digest
