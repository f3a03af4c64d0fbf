# SPDX-License-Identifier: Apache-2.0
"""The REST service: its responses with a fake store, and once with a real one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from mooncake.compat import rest_service
from mooncake.compat.rest_service import MooncakeStoreService
from mooncake.compat.store.setup_arguments import SetupArguments
from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.security import Identity
from mooncake.security.http_auth import AdminKey
from mooncake.security.keys import KeyRing

CONFIG = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:9",
}


class FakeStore:
    """A store whose codes the test sets."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.mounted: list[tuple[Any, ...]] = []
        self.unmounted: list[tuple[str, int]] = []
        self.code = 0
        self.stuck: list[str] = []
        self.gone: list[str] = []

    def setup(self, *arguments: Any, **more: Any) -> int:
        self.arguments = SetupArguments(*arguments, **more)
        return self.code

    def close(self) -> int:
        return 0

    def health_check(self) -> int:
        return 0

    def put(self, key: str, value: bytes) -> int:
        if self.code == 0:
            self.values[key] = value
        return self.code

    def get(self, key: str) -> bytes:
        return self.values.get(key, b"")

    def is_exist(self, key: str) -> int:
        return self.code or int(key in self.values)

    def remove(self, key: str) -> int:
        return self.code or (0 if self.values.pop(key, None) is not None else -704)

    def remove_all(self) -> int:
        number = len(self.values)
        self.values.clear()
        return self.code or number

    def mount_segment(self, *arguments: Any) -> dict[str, Any]:
        self.mounted.append(arguments)
        return {"ret": self.code, "segment_ids": [] if self.code else [f"id-{len(self.mounted)}"]}

    def allocate_and_mount_segment(self, size: int, *arguments: Any) -> dict[str, Any]:
        return {**self.mount_segment(size, *arguments), "allocated_size": size}

    def unmount_segment(self, ids: list[str], grace_s: int) -> int:
        self.unmounted += [(one, grace_s) for one in ids]
        return -1 if self.stuck and set(ids) & set(self.stuck) else 0

    unmount_and_free_segment = unmount_segment

    def _has_segment(self, segment_id: str) -> bool:
        return segment_id not in self.gone

    def unmount_local_disk_segment(self, grace_s: int) -> int:
        return self.code


class RunningService:
    def __init__(self, service: MooncakeStoreService, store: FakeStore, http: aiohttp.ClientSession) -> None:
        self.service, self.store, self.http = service, store, http

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, str | bytes) or body is None else json.dumps(body)
        async with self.http.request(
            method, f"http://127.0.0.1:{self.service.port}{path}", data=data, headers=headers
        ) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.read()


@pytest.fixture
async def rest(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningService]:
    store = FakeStore()
    monkeypatch.setattr(rest_service, "MooncakeDistributedStore", lambda: store)
    service = MooncakeStoreService(None, CONFIG)
    assert await service.start_store_service(1.0)
    await service.start_http_service(0, "127.0.0.1")
    async with aiohttp.ClientSession() as http:
        yield RunningService(service, store, http)
    await service.stop()
    await service.stop()


async def test_values_go_in_as_text_and_come_out_as_bytes(rest: RunningService) -> None:
    assert await rest.ask("PUT", "/api/put", {"key": "a/b", "value": "ü"}) == (200, {"status": "success"})
    assert await rest.ask("GET", "/api/get/a/b") == (200, "ü".encode())
    assert await rest.ask("GET", "/api/exist/a/b") == (200, {"exists": True})
    assert await rest.ask("DELETE", "/api/remove/a/b") == (200, {"status": "success"})
    assert await rest.ask("GET", "/api/exist/a/b") == (200, {"exists": False})
    assert await rest.ask("GET", "/api/get/a/b") == (404, {"error": "Key not found"})
    assert (await rest.ask("DELETE", "/api/remove/a/b"))[0] == 404
    for key in "xyz":
        await rest.ask("PUT", "/api/put", {"key": key, "value": "1"})
    assert await rest.ask("DELETE", "/api/remove_all") == (200, {"status": "success removed 3 keys"})
    assert (await rest.ask("GET", "/health"))[1] == {"status": "ok", "health": 0}


@pytest.mark.parametrize(
    "body", [{}, {"key": "k"}, {"value": "v"}, {"key": "", "value": "v"}, {"key": "k", "value": ""}]
)
async def test_missing_fields(rest: RunningService, body: dict[str, str]) -> None:
    assert await rest.ask("PUT", "/api/put", body) == (400, {"error": "Missing key or value"})


@pytest.mark.parametrize(
    ("method", "path", "body", "why"),
    [
        ("PUT", "/api/put", "{", "JSON"),
        ("PUT", "/api/put", [1], "object"),
        ("PUT", "/api/put", {"key": 1, "value": "v"}, "key"),
        ("PUT", "/api/put", {"key": "k", "value": 7}, "value"),
        pytest.param("PUT", "/api/put", "[" * 200_000, "JSON", id="nested"),
        ("PUT", "/api/put", {"key": "k", "value": "\ud800"}, "value"),
        ("PUT", "/api/put", {"key": "\ud800", "value": "v"}, "key"),
        ("PUT", "/api/put", {"key": "a\0b", "value": "v"}, "key"),
        pytest.param("PUT", "/api/put", {"key": "k" * 1025, "value": "v"}, "1024", id="long key"),
        ("GET", "/api/get/a%00b", None, "key"),
        ("GET", "/api/exist/a%00b", None, "key"),
        ("DELETE", "/api/remove/a%00b", None, "key"),
        ("POST", "/api/mount", {}, "Invalid size"),
        ("POST", "/api/mount", {"size": "1MB"}, "Invalid size"),
        ("POST", "/api/mount", {"size": 1.5}, "Invalid size"),
        ("POST", "/api/mount", {"size": True}, "Invalid size"),
        ("POST", "/api/mount", {"size": -1}, "size"),
        ("POST", "/api/mount", {"size": 4096, "protocol": 1}, "protocol"),
        ("POST", "/api/mount", {"size": 4096, "location": "\ud800"}, "location"),
        ("POST", "/api/mount_shm", {"size": 4096}, "Missing name"),
        ("POST", "/api/mount_shm", {"name": "x"}, "Missing name or size"),
        ("POST", "/api/mount_shm", {"name": "\ud800", "size": 4096}, "name"),
        ("POST", "/api/mount_shm", {"name": "x", "size": 4096, "offset": -1}, "offset"),
        ("POST", "/api/unmount", {}, "Missing segment_ids"),
        ("POST", "/api/unmount", {"segment_ids": [1]}, "segment_ids"),
        ("POST", "/api/unmount", {"segment_ids": ["\ud800"]}, "segment_ids"),
        ("POST", "/api/unmount_shm", {"segment_ids": "x", "grace_period_seconds": 3601}, "3600"),
        ("POST", "/api/unmount_local_disk", {"grace_period_seconds": True}, "grace_period_seconds"),
        ("POST", "/api/reconfigure", {"mode": "both"}, "decode, prefill"),
        ("POST", "/api/reconfigure", {"mode": "decode"}, "Missing path or size"),
    ],
)
async def test_bad_input_is_named(
    rest: RunningService, caplog: pytest.LogCaptureFixture, method: str, path: str, body: Any, why: str
) -> None:
    status, answer = await rest.ask(method, path, body)
    assert status == 400 and why in answer["error"]
    assert not rest.store.mounted and not rest.store.unmounted and not rest.store.values
    assert "request_failed" not in caplog.text


@pytest.mark.parametrize("charset", ["nosuch", "hex", "punycode", "utf-16"])
async def test_a_body_in_another_encoding_is_bad_input(
    rest: RunningService, caplog: pytest.LogCaptureFixture, charset: str
) -> None:
    kind = {"Content-Type": f"application/json; charset={charset}"}
    status, answer = await rest.ask("PUT", "/api/put", {"key": "k", "value": "v"}, **kind)
    assert status == 400 and charset in answer["error"]
    assert "request_failed" not in caplog.text and not rest.store.values
    for charset in ("UTF-8", "utf8", "us-ascii", "ISO-8859-1"):
        kind = {"Content-Type": f"application/json; charset={charset}"}
        assert (await rest.ask("PUT", "/api/put", {"key": charset, "value": "v"}, **kind))[0] == 200


@pytest.mark.parametrize("is_announced", [True, False])
async def test_bodies_share_a_bounded_memory_and_give_it_back(
    rest: RunningService, monkeypatch: pytest.MonkeyPatch, is_announced: bool
) -> None:
    """Those of all requests whose answers have not ended."""
    body = json.dumps({"key": "k", "value": "v" * 100_000}).encode()
    url = f"http://127.0.0.1:{rest.service.port}/api/put"
    rest.service._bodies.most_bytes = len(body) + 1000
    begun, may_end = threading.Event(), threading.Event()

    def put(key: str, value: bytes) -> int:
        begun.set()
        assert may_end.wait(60)
        return 0

    async def parts() -> AsyncIterator[bytes]:
        yield body[:50_000]
        yield body[50_000:]

    monkeypatch.setattr(rest.store, "put", put)
    first = asyncio.create_task(rest.ask("PUT", "/api/put", body))
    assert await asyncio.to_thread(begun.wait, 60)
    async with rest.http.put(url, data=body if is_announced else parts()) as refused:
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert "try again" in (await refused.json())["error"]
    assert (await rest.ask("GET", "/api/exist/k"))[0] == 200, "it has no body"
    may_end.set()
    assert (await first)[0] == 200
    assert (await rest.ask("PUT", "/api/put", body))[0] == 200
    assert rest.service._bodies.num_held == 0


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_that_is_too_large_is_refused(
    rest: RunningService, monkeypatch: pytest.MonkeyPatch, is_announced: bool
) -> None:
    monkeypatch.setattr(rest_service, "MAX_BODY_BYTES", 1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b"x" * 200

    url = f"http://127.0.0.1:{rest.service.port}/api/put"
    async with rest.http.put(url, data=b"x" * 1600 if is_announced else parts()) as refused:
        assert refused.status == 413 and "error" in await refused.json()
    assert rest.service._bodies.num_held == 0


async def test_unknown_paths_and_methods_are_refused_in_json(rest: RunningService) -> None:
    assert (await rest.ask("GET", "/nothing"))[0] == 404
    status, answer = await rest.ask("GET", "/api/put")
    assert status == 405 and "GET /api/put" in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/api/put", {"key": "k", "value": "v"}),
        ("GET", "/api/get/k", None),
        ("GET", "/api/exist/k", None),
        ("DELETE", "/api/remove/k", None),
        ("DELETE", "/api/remove_all", None),
        ("POST", "/api/mount", {"size": 4096}),
        ("POST", "/api/mount_shm", {"size": 4096, "name": "n"}),
        ("POST", "/api/unmount_local_disk", {}),
        ("POST", "/api/reconfigure", {"mode": "decode", "path": "/p", "size": 4096}),
    ],
)
async def test_a_failed_store_call_is_a_500(rest: RunningService, method: str, path: str, body: Any) -> None:
    rest.store.code = -1
    status, answer = await rest.ask(method, path, body)
    assert status == 500 and answer["error"]


async def test_segments_are_mounted_and_unmounted(rest: RunningService) -> None:
    status, answer = await rest.ask("POST", "/api/mount", {"size": 1 << 20})
    assert (status, answer["status"], answer["segment_ids"]) == (200, "success", ["id-1"])
    assert answer["allocated_size"] == rest.store.mounted[0][0] > 0
    status, answer = await rest.ask("POST", "/api/mount_shm", {"name": "seg", "size": 4096, "offset": 8})
    assert (status, answer["segment_ids"]) == (200, ["id-2"])
    assert rest.store.mounted[1] == ("/dev/shm/seg", 4096, 8, "tcp", "")
    assert (await rest.ask("POST", "/api/unmount", {"segment_ids": "id-1"}))[0] == 200
    rest.store.stuck = ["id-9"]
    body = {"segment_ids": ["id-2", "id-9"], "grace_period_seconds": 5}
    status, answer = await rest.ask("POST", "/api/unmount_shm", body)
    assert (status, answer["failed_segment_ids"]) == (500, ["id-9"])
    assert rest.store.unmounted == [("id-1", 0), ("id-2", 5), ("id-9", 5)]
    assert (await rest.ask("POST", "/api/unmount_local_disk", {"grace_period_seconds": 3600}))[0] == 200


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../etc/passwd",
        "..",
        "/..",
        ".",
        "a/b",
        "/dev/shm/../../etc/passwd",
        "/dev/shm/a/../../x",
        "//etc",
        "/",
        "nul\0",
        "x" * 300,
    ],
)
async def test_only_names_of_shared_memory_are_mounted(rest: RunningService, name: str) -> None:
    for path, field in (("/api/mount_shm", "name"), ("/api/reconfigure", "path")):
        body = {field: name, "size": 4096, "mode": "decode"}
        status, answer = await rest.ask("POST", path, body)
        assert status == 400 and field in answer["error"], answer
    assert not rest.store.mounted


async def test_forms_of_a_shared_memory_name(rest: RunningService) -> None:
    for name in ("kv", "/kv", "/dev/shm/kv"):
        assert (await rest.ask("POST", "/api/mount_shm", {"name": name, "size": 4096}))[0] == 200
    assert {arguments[0] for arguments in rest.store.mounted} == {"/dev/shm/kv"}


RESTRICTED = [
    ("POST", "/api/mount_shm", {"name": "seg", "size": 4096}),
    ("POST", "/api/mount", {"size": 4096}),
    ("POST", "/api/reconfigure", {"mode": "prefill"}),
    ("POST", "/api/unmount", {"segment_ids": "x"}),
    ("DELETE", "/api/remove_all", None),
]


@pytest.mark.parametrize(("method", "path", "body"), RESTRICTED)
async def test_restricted_calls_are_for_callers_of_this_host(
    rest: RunningService, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    monkeypatch.setattr(rest_service, "_is_from_this_host", lambda request: False)
    rest.store.values["k"] = b"v"
    status, answer = await rest.ask(method, path, body)
    assert status == 403 and "ADMIN_API_KEY" in answer["error"]
    assert not rest.store.mounted and not rest.store.unmounted and rest.store.values
    assert (await rest.ask("GET", "/api/get/k"))[0] == 200, "objects stay readable"
    rest.service._is_insecure = True
    assert (await rest.ask(method, path, body))[0] == 200


@pytest.mark.parametrize("is_certified", [False, True])
async def test_in_a_cluster_with_a_credential_other_callers_are_refused(
    rest: RunningService, monkeypatch: pytest.MonkeyPatch, is_certified: bool
) -> None:
    """The service acts as a member of the cluster: a caller that it serves has that member's rights."""
    member = Identity()
    member.has_tls = is_certified
    member.keys = KeyRing((b"k" * 32,))
    monkeypatch.setattr(rest_service, "process_identity", lambda: member)
    monkeypatch.setattr(rest_service, "_is_from_this_host", lambda request: False)
    rest.store.values["k"] = b"v"
    for method, path in (("GET", "/api/get/k"), ("GET", "/api/exist/k"), ("DELETE", "/api/remove/k")):
        status, answer = await rest.ask(method, path)
        assert status == 403 and "not authenticated" in answer["error"]
    assert rest.store.values and (await rest.ask("GET", "/health"))[0] == 200
    monkeypatch.setattr(rest_service, "_is_from_this_host", lambda request: True)
    assert (await rest.ask("GET", "/api/get/k"))[0] == (403 if is_certified else 200)
    rest.service._is_insecure = True
    assert (await rest.ask("GET", "/api/get/k"))[0] == 200


@pytest.mark.parametrize(
    ("name", "is_member"),
    [("mooncake://node", True), ("mooncake://client/acme", False), ("elsewhere://x", True)],
)
def test_a_certificate_of_a_tenant_is_not_a_member(
    monkeypatch: pytest.MonkeyPatch, name: str, is_member: bool
) -> None:
    member = Identity()
    member.has_tls = True
    monkeypatch.setattr(rest_service, "process_identity", lambda: member)

    class FakeRequest:
        def get_extra_info(self, what: str) -> object:
            return {"subjectAltName": (("URI", name),)} if what == "peercert" else None

    assert rest_service._is_member(cast(web.Request, FakeRequest())) is is_member


@pytest.mark.parametrize(("method", "path", "body"), [*RESTRICTED, ("GET", "/api/get/k", None)])
async def test_with_a_key_set_every_call_needs_it(
    rest: RunningService, method: str, path: str, body: Any
) -> None:
    rest.service._key = AdminKey("a key of this test")
    rest.store.values["k"] = b"v"
    for headers in ({}, {"X-API-Key": "wrong"}):
        status, answer = await rest.ask(method, path, body, **headers)
        assert status == 401 and "X-API-Key" in answer["error"]
    assert not rest.store.mounted and not rest.store.unmounted and rest.store.values
    assert (await rest.ask(method, path, body, **{"X-API-Key": "a key of this test"}))[0] == 200
    assert (await rest.ask("GET", "/health"))[0] == 200


@pytest.mark.parametrize("header", [b"X-API-Key: \xff\xfe", b"Authorization: Bearer \xff"])
async def test_a_key_that_is_no_text_is_a_wrong_one(
    rest: RunningService, caplog: pytest.LogCaptureFixture, header: bytes
) -> None:
    rest.service._key = AdminKey("a key of this test")
    reader, writer = await asyncio.open_connection("127.0.0.1", rest.service.port)
    writer.write(b"GET /api/exist/k HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n")
    async with asyncio.timeout(20):
        assert b" 401 " in await reader.readline()
    writer.close()
    assert "request_failed" not in caplog.text


async def test_reconfigure_mounts_the_new_segment_first(rest: RunningService) -> None:
    decode = {"mode": "decode", "path": "/dev/shm/kv", "size": 4096}
    assert (await rest.ask("POST", "/api/reconfigure", decode))[1]["segment_ids"] == ["id-1"]
    assert not rest.store.unmounted
    again = await rest.ask("POST", "/api/reconfigure", {**decode, "mode": "Decode", "path": "other"})
    assert again[1]["segment_ids"] == ["id-2"]
    assert rest.store.unmounted == [("id-1", 0)]
    rest.store.code = -1
    status, answer = await rest.ask("POST", "/api/reconfigure", decode)
    assert (status, answer["mode"]) == (500, "decode") and "keeping previous" in answer["error"]
    assert rest.store.unmounted == [("id-1", 0)] and rest.service.mounted_segment_ids == ["id-2"]
    rest.store.code = 0
    assert (rest.service.current_mode, rest.service.last_mount_info["path"]) == ("decode", "/dev/shm/other")
    (mounted,) = rest.service.mounted_segment_ids
    rest.store.stuck = [mounted]
    status, answer = await rest.ask("POST", "/api/reconfigure", {"mode": "prefill"})
    assert (status, answer["failed_segment_ids"]) == (500, [mounted])
    assert rest.service.current_mode == "decode"
    rest.store.stuck = []
    status, answer = await rest.ask("POST", "/api/reconfigure", {"mode": "prefill"})
    assert (status, answer["segment_ids"]) == (200, [])
    assert (rest.service.current_mode, rest.service.last_mount_info) == ("prefill", {})
    assert rest.service.mounted_segment_ids == []


async def test_reconfigure_with_the_segment_that_is_mounted_changes_nothing(rest: RunningService) -> None:
    """Mounted a second time, it would write over its own objects."""
    decode = {"mode": "decode", "path": "/dev/shm/kv", "size": 4096}
    for body in (decode, {**decode, "path": "kv", "grace_period_seconds": 6}):
        status, answer = await rest.ask("POST", "/api/reconfigure", body)
        assert (status, answer["segment_ids"]) == (200, ["id-1"])
    assert len(rest.store.mounted) == 1 and not rest.store.unmounted
    rest.store.stuck = ["id-1"]
    status, answer = await rest.ask("POST", "/api/reconfigure", {**decode, "size": 8192})
    assert (status, answer["segment_ids"]) == (200, ["id-2", "id-1"])
    rest.store.stuck = []
    status, answer = await rest.ask("POST", "/api/reconfigure", {**decode, "size": 8192})
    assert (status, answer["segment_ids"]) == (200, ["id-2"]), "the earlier one is unmounted this time"


async def test_reconfigure_after_its_segment_was_unmounted(rest: RunningService) -> None:
    decode = {"mode": "decode", "path": "/dev/shm/kv", "size": 4096}
    assert (await rest.ask("POST", "/api/reconfigure", decode))[1]["segment_ids"] == ["id-1"]
    assert (await rest.ask("POST", "/api/unmount", {"segment_ids": ["id-1"]}))[0] == 200
    assert (rest.service.current_mode, rest.service.mounted_segment_ids) == ("prefill", [])
    assert (await rest.ask("POST", "/api/reconfigure", decode))[1]["segment_ids"] == ["id-2"]
    rest.store.stuck, rest.store.gone = ["id-2"], ["id-2"]
    status, answer = await rest.ask("POST", "/api/reconfigure", decode)
    assert (status, answer["segment_ids"]) == (200, ["id-3"]), "what is gone needs no unmount"
    rest.store.stuck, rest.store.gone = ["id-3"], []
    decode["path"] = "other"
    status, answer = await rest.ask("POST", "/api/reconfigure", decode)
    assert (status, answer["segment_ids"]) == (200, ["id-4", "id-3"]), "the new one is mounted"
    assert rest.service.mounted_segment_ids == ["id-4", "id-3"]
    assert (await rest.ask("POST", "/api/unmount", {"segment_ids": ["id-4"]}))[0] == 200
    status, answer = await rest.ask("POST", "/api/reconfigure", decode)
    assert (status, answer["segment_ids"]) == (200, ["id-5", "id-3"]), "the last one was unmounted"
    rest.store.stuck = []
    assert (await rest.ask("POST", "/api/reconfigure", {"mode": "prefill"}))[0] == 200
    assert rest.service.mounted_segment_ids == []


class BareStore:
    """A program's own store, with nothing but the calls that the service documents."""

    def mount_segment(
        self, path: str, size: int, offset: int, protocol: str, location: str
    ) -> dict[str, Any]:
        return {"ret": -1 if "bad" in path else 0, "segment_ids": [path]}

    def unmount_segment(self, ids: list[str], grace_s: int = 0) -> int:
        return -1 if "stuck" in ids[0] else 0


class ParsedRequest:
    """A request of a program that calls a handler itself."""

    def __init__(self, body: Any) -> None:
        self._body = body

    async def json(self) -> Any:
        return self._body


async def test_a_program_may_call_the_handlers_with_a_store_of_its_own() -> None:
    service = MooncakeStoreService(None, CONFIG)
    service.store = BareStore()

    async def reconfigure(**body: Any) -> tuple[int, Any]:
        answer = await service.handle_reconfigure(cast(web.Request, ParsedRequest(body)))
        return answer.status, json.loads(answer.text or "")

    status, answer = await reconfigure(mode="decode", path="bad", size=4096)
    assert status == 500 and "rolled back to prefill" in answer["error"]
    for path, left in (("stuck", ["stuck"]), ("stuck", ["stuck"]), ("next", ["next", "stuck"])):
        status, answer = await reconfigure(mode="decode", path=path, size=4096)
        assert (status, answer["segment_ids"]) == (200, [f"/dev/shm/{one}" for one in left])
    assert (await reconfigure(mode="prefill"))[1]["failed_segment_ids"] == ["/dev/shm/stuck"]


async def test_an_exception_of_the_store_is_a_500(
    rest: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(key: str) -> bytes:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(rest.store, "get", raise_error)
    status, answer = await rest.ask("GET", "/api/get/k")
    assert status == 500 and "the store is gone" in answer["error"]


async def test_a_taken_port_and_a_master_that_does_not_answer(rest: RunningService) -> None:
    other = MooncakeStoreService(None, CONFIG)
    with pytest.raises(AddressInUse, match=str(rest.service.port)):
        await other.start_http_service(rest.service.port, "127.0.0.1")
    rest.store.code = -1
    assert not await other.start_store_service(0.0)
    shutdown = asyncio.Event()
    starting = asyncio.create_task(other.start_store_service(3600.0, shutdown_event=shutdown))
    await asyncio.sleep(0)
    shutdown.set()
    assert not await starting and other.store is None
    rest.store.code = 0
    assert not await other.start_store_service(shutdown_event=shutdown) and other.store is None


@pytest.mark.parametrize(
    ("path", "given", "why"),
    [
        (None, {"protocol": "tcp"}, "master_server_address"),
        (None, {**CONFIG, "global_segment_size": "lots"}, "global_segment_size"),
        ("/nowhere/at/all", {}, "/nowhere/at/all"),
    ],
)
def test_bad_configurations(
    path: str | None, given: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("MOONCAKE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(InvalidArgument, match=why):
        MooncakeStoreService(path, given)


async def test_all_fields_reach_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    monkeypatch.setattr(rest_service, "MooncakeDistributedStore", lambda: store)
    more = {
        "enable_client_http_server": "true",
        "client_http_port": 9411,
        "tenant_id": "t",
        "cluster_id": "c",
    }
    assert await MooncakeStoreService(None, {**CONFIG, **more}).start_store_service(1.0)
    found = store.arguments
    assert (found.enable_client_http_server, found.client_http_port) == (True, 9411)
    assert (found.tenant_id, found.cluster_id) == ("t", "c")


def test_unknown_and_malformed_definitions_are_ignored(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The existing package ignores them, too."""
    service = MooncakeStoreService(None, {**CONFIG, "nonsense": "1"})
    assert service.config.local_hostname == "localhost"
    assert [one.__dict__["fields"]["field"] for one in caplog.records] == ["nonsense"]
    served: list[dict[str, str]] = []

    async def serve(_: object, given: dict[str, str]) -> None:
        served.append(given)

    monkeypatch.setattr(rest_service, "_serve", serve)
    monkeypatch.setattr(rest_service, "setup_logging", lambda role: None)
    rest_service.main(["-D", "no value", "-D", "protocol=tcp"])
    assert served == [{"protocol": "tcp"}]
    assert caplog.records[-1].__dict__["fields"]["text"] == "no value"


@pytest.mark.processes
def test_with_a_real_store(tmp_path: Path) -> None:
    from tests.store.test_daemon import daemon

    with daemon("--capacity-dram", "0.032") as (address, _, _):
        (tmp_path / "mooncake.json").write_text(json.dumps({**CONFIG, "master_server_address": address}))
        arguments = [
            "--config",
            str(tmp_path / "mooncake.json"),
            "-D",
            "global_segment_size=0",
            "--port",
            "0",
        ]
        arguments += ["-D", "local_buffer_size=16MB", "--host", "127.0.0.1"]
        command = [sys.executable, "-m", "mooncake.mooncake_store_service", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            url = next(
                line.split("address=")[1].strip() for line in process.stderr if "ready role=rest" in line
            )
            put = urllib.request.Request(f"{url}/api/put", b'{"key": "k", "value": "v"}', method="PUT")
            assert urllib.request.urlopen(put, timeout=20).status == 200
            assert urllib.request.urlopen(f"{url}/api/get/k", timeout=20).read() == b"v"
            mount = urllib.request.Request(f"{url}/api/mount", b'{"size": 4194304}', method="POST")
            mounted = json.load(urllib.request.urlopen(mount, timeout=20))
            body = json.dumps({"segment_ids": mounted["segment_ids"]}).encode()
            unmount = urllib.request.Request(f"{url}/api/unmount", body, method="POST")
            assert urllib.request.urlopen(unmount, timeout=20).status == 200
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{url}/api/get/other", timeout=20)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait(10)
