"""The REST service: its answers with a store that is a double, and once with everything real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.security import Identity
from mooncake.security.admin_key import AdminKey
from mooncake.security.keys import KeyRing

CONFIG = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:9",
}


class Double:
    """A store whose codes the test sets."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.mounted: list[tuple[Any, ...]] = []
        self.unmounted: list[tuple[str, int]] = []
        self.code = 0
        self.stuck: list[str] = []

    def setup(self, *_: Any) -> int:
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

    def mount_segment(self, *words: Any) -> dict[str, Any]:
        self.mounted.append(words)
        return {"ret": self.code, "segment_ids": [] if self.code else [f"id-{len(self.mounted)}"]}

    def allocate_and_mount_segment(self, size: int, *words: Any) -> dict[str, Any]:
        return {**self.mount_segment(size, *words), "allocated_size": size}

    def unmount_segment(self, ids: list[str], grace_s: int) -> int:
        self.unmounted += [(one, grace_s) for one in ids]
        return -1 if self.stuck and set(ids) & set(self.stuck) else 0

    unmount_and_free_segment = unmount_segment

    def unmount_local_disk_segment(self, grace_s: int) -> int:
        return self.code


class House:
    def __init__(self, service: MooncakeStoreService, store: Double, http: aiohttp.ClientSession) -> None:
        self.service, self.store, self.http = service, store, http

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, str | bytes) or body is None else json.dumps(body)
        async with self.http.request(
            method, f"http://127.0.0.1:{self.service.port}{path}", data=data, headers=headers
        ) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.read()


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    store = Double()
    monkeypatch.setattr(rest_service, "MooncakeDistributedStore", lambda: store)
    service = MooncakeStoreService(None, CONFIG)
    assert await service.start_store_service(1.0)
    await service.start_http_service(0, "127.0.0.1")
    async with aiohttp.ClientSession() as http:
        yield House(service, store, http)
    await service.stop()
    await service.stop()


async def test_values_go_in_as_text_and_come_out_as_bytes(house: House) -> None:
    assert await house.ask("PUT", "/api/put", {"key": "a/b", "value": "ü"}) == (200, {"status": "success"})
    assert await house.ask("GET", "/api/get/a/b") == (200, "ü".encode())
    assert await house.ask("GET", "/api/exist/a/b") == (200, {"exists": True})
    assert await house.ask("DELETE", "/api/remove/a/b") == (200, {"status": "success"})
    assert await house.ask("GET", "/api/exist/a/b") == (200, {"exists": False})
    assert await house.ask("GET", "/api/get/a/b") == (404, {"error": "Key not found"})
    assert (await house.ask("DELETE", "/api/remove/a/b"))[0] == 404
    for key in "xyz":
        await house.ask("PUT", "/api/put", {"key": key, "value": "1"})
    assert await house.ask("DELETE", "/api/remove_all") == (200, {"status": "success removed 3 keys"})
    assert (await house.ask("GET", "/health"))[1] == {"status": "ok", "health": 0}


@pytest.mark.parametrize(
    "body", [{}, {"key": "k"}, {"value": "v"}, {"key": "", "value": "v"}, {"key": "k", "value": ""}]
)
async def test_what_is_missing(house: House, body: dict[str, str]) -> None:
    assert await house.ask("PUT", "/api/put", body) == (400, {"error": "Missing key or value"})


@pytest.mark.parametrize(
    ("method", "path", "body", "why"),
    [
        ("PUT", "/api/put", "{", "JSON"),
        ("PUT", "/api/put", [1], "object"),
        ("PUT", "/api/put", {"key": 1, "value": "v"}, "key"),
        ("PUT", "/api/put", {"key": "k", "value": 7}, "value"),
        ("POST", "/api/mount", {}, "Missing size"),
        ("POST", "/api/mount", {"size": "lots"}, "size"),
        ("POST", "/api/mount", {"size": -1}, "size"),
        ("POST", "/api/mount", {"size": 4096, "protocol": 1}, "protocol"),
        ("POST", "/api/mount_shm", {"size": 4096}, "Missing name"),
        ("POST", "/api/mount_shm", {"name": "x"}, "Missing size"),
        ("POST", "/api/mount_shm", {"name": "x", "size": 4096, "offset": -1}, "offset"),
        ("POST", "/api/unmount", {}, "Missing segment_ids"),
        ("POST", "/api/unmount", {"segment_ids": [1]}, "segment_ids"),
        ("POST", "/api/unmount_shm", {"segment_ids": "x", "grace_period_seconds": 3601}, "3600"),
        ("POST", "/api/unmount_local_disk", {"grace_period_seconds": True}, "grace_period_seconds"),
        ("POST", "/api/reconfigure", {"mode": "both"}, "decode, prefill"),
        ("POST", "/api/reconfigure", {"mode": "decode"}, "Missing path"),
    ],
)
async def test_bad_input_is_named(house: House, method: str, path: str, body: Any, why: str) -> None:
    status, answer = await house.ask(method, path, body)
    assert status == 400 and why in answer["error"]
    assert not house.store.mounted and not house.store.unmounted


async def test_unknown_paths_and_methods_are_told_in_json(house: House) -> None:
    assert (await house.ask("GET", "/nothing"))[0] == 404
    status, answer = await house.ask("GET", "/api/put")
    assert status == 405 and "GET /api/put" in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/api/put", {"key": "k", "value": "v"}),
        ("GET", "/api/exist/k", None),
        ("DELETE", "/api/remove/k", None),
        ("DELETE", "/api/remove_all", None),
        ("POST", "/api/mount", {"size": 4096}),
        ("POST", "/api/mount_shm", {"size": 4096, "name": "n"}),
        ("POST", "/api/unmount_local_disk", {}),
        ("POST", "/api/reconfigure", {"mode": "decode", "path": "/p", "size": 4096}),
    ],
)
async def test_a_store_that_refuses_is_a_500(house: House, method: str, path: str, body: Any) -> None:
    house.store.code = -1
    status, answer = await house.ask(method, path, body)
    assert status == 500 and answer["error"]


async def test_memory_is_lent_and_taken_back(house: House) -> None:
    status, answer = await house.ask("POST", "/api/mount", {"size": "1MB"})
    assert (status, answer["status"], answer["segment_ids"]) == (200, "success", ["id-1"])
    assert answer["allocated_size"] == house.store.mounted[0][0] > 0
    status, answer = await house.ask("POST", "/api/mount_shm", {"name": "seg", "size": 4096, "offset": 8})
    assert (status, answer["segment_ids"]) == (200, ["id-2"])
    assert house.store.mounted[1] == ("/dev/shm/seg", 4096, 8, "tcp", "")
    assert (await house.ask("POST", "/api/unmount", {"segment_ids": "id-1"}))[0] == 200
    house.store.stuck = ["id-9"]
    body = {"segment_ids": ["id-2", "id-9"], "grace_period_seconds": 5}
    status, answer = await house.ask("POST", "/api/unmount_shm", body)
    assert (status, answer["failed_segment_ids"]) == (500, ["id-9"])
    assert house.store.unmounted == [("id-1", 0), ("id-2", 5), ("id-9", 5)]
    assert (await house.ask("POST", "/api/unmount_local_disk", {"grace_period_seconds": 3600}))[0] == 200


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
async def test_only_names_of_shared_memory_are_lent(house: House, name: str) -> None:
    for path, field in (("/api/mount_shm", "name"), ("/api/reconfigure", "path")):
        body = {field: name, "size": 4096, "mode": "decode"}
        status, answer = await house.ask("POST", path, body)
        assert status == 400 and field in answer["error"], answer
    assert not house.store.mounted


async def test_a_name_may_be_written_as_programs_write_it(house: House) -> None:
    for name in ("kv", "/kv", "/dev/shm/kv"):
        assert (await house.ask("POST", "/api/mount_shm", {"name": name, "size": 4096}))[0] == 200
    assert {words[0] for words in house.store.mounted} == {"/dev/shm/kv"}


LENDING = [
    ("POST", "/api/mount_shm", {"name": "seg", "size": 4096}),
    ("POST", "/api/mount", {"size": 4096}),
    ("POST", "/api/reconfigure", {"mode": "prefill"}),
    ("POST", "/api/unmount", {"segment_ids": "x"}),
    ("DELETE", "/api/remove_all", None),
]


@pytest.mark.parametrize(("method", "path", "body"), LENDING)
async def test_memory_is_lent_to_callers_of_this_host_only(
    house: House, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    monkeypatch.setattr(rest_service, "_is_from_this_host", lambda request: False)
    house.store.values["k"] = b"v"
    status, answer = await house.ask(method, path, body)
    assert status == 403 and "ADMIN_API_KEY" in answer["error"]
    assert not house.store.mounted and not house.store.unmounted and house.store.values
    assert (await house.ask("GET", "/api/get/k"))[0] == 200, "objects are there as before"
    house.service._lends_to_anybody = True
    assert (await house.ask(method, path, body))[0] == 200


@pytest.mark.parametrize("is_certified", [False, True])
async def test_in_a_cluster_with_a_credential_strangers_get_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch, is_certified: bool
) -> None:
    """The service acts as a member of the cluster: whoever it answers has that member's rights."""
    member = Identity()
    member.has_tls = is_certified
    member.keys = KeyRing((b"k" * 32,))
    monkeypatch.setattr(rest_service, "process_identity", lambda: member)
    monkeypatch.setattr(rest_service, "_is_from_this_host", lambda request: False)
    house.store.values["k"] = b"v"
    for method, path in (("GET", "/api/get/k"), ("GET", "/api/exist/k"), ("DELETE", "/api/remove/k")):
        status, answer = await house.ask(method, path)
        assert status == 403 and "who are you" in answer["error"]
    assert house.store.values and (await house.ask("GET", "/health"))[0] == 200
    monkeypatch.setattr(rest_service, "_is_from_this_host", lambda request: True)
    assert (await house.ask("GET", "/api/get/k"))[0] == (403 if is_certified else 200)
    house.service._lends_to_anybody = True
    assert (await house.ask("GET", "/api/get/k"))[0] == 200


@pytest.mark.parametrize(
    ("name", "is_member"),
    [("mooncake://node", True), ("mooncake://client/acme", False), ("elsewhere://x", True)],
)
def test_a_certificate_of_a_tenant_gets_no_more_than_its_tenant(
    monkeypatch: pytest.MonkeyPatch, name: str, is_member: bool
) -> None:
    member = Identity()
    member.has_tls = True
    monkeypatch.setattr(rest_service, "process_identity", lambda: member)

    class Asked:
        def get_extra_info(self, what: str) -> object:
            return {"subjectAltName": (("URI", name),)} if what == "peercert" else None

    assert rest_service._is_member(cast(web.Request, Asked())) is is_member


@pytest.mark.parametrize(("method", "path", "body"), [*LENDING, ("GET", "/api/get/k", None)])
async def test_with_a_key_set_everything_takes_it(house: House, method: str, path: str, body: Any) -> None:
    house.service._key = AdminKey("a key of this test")
    house.store.values["k"] = b"v"
    for headers in ({}, {"X-API-Key": "wrong"}):
        status, answer = await house.ask(method, path, body, **headers)
        assert status == 401 and "X-API-Key" in answer["error"]
    assert not house.store.mounted and not house.store.unmounted and house.store.values
    assert (await house.ask(method, path, body, **{"X-API-Key": "a key of this test"}))[0] == 200
    assert (await house.ask("GET", "/health"))[0] == 200


async def test_reconfigure_makes_before_it_breaks(house: House) -> None:
    decode = {"mode": "decode", "path": "/dev/shm/kv", "size": 4096}
    assert (await house.ask("POST", "/api/reconfigure", decode))[1]["segment_ids"] == ["id-1"]
    assert not house.store.unmounted
    assert (await house.ask("POST", "/api/reconfigure", decode))[1]["segment_ids"] == ["id-2"]
    assert house.store.unmounted == [("id-1", 0)]
    house.store.code = -1
    assert (await house.ask("POST", "/api/reconfigure", decode))[0] == 500
    assert house.store.unmounted == [("id-1", 0)]
    house.store.code = 0
    status, answer = await house.ask("POST", "/api/reconfigure", {"mode": "prefill"})
    assert (status, answer["segment_ids"]) == (200, [])
    assert house.store.unmounted == [("id-1", 0), ("id-2", 0)]


async def test_a_taken_port_and_a_master_that_does_not_answer(house: House) -> None:
    other = MooncakeStoreService(None, CONFIG)
    with pytest.raises(AddressInUse, match=str(house.service.port)):
        await other.start_http_service(house.service.port, "127.0.0.1")
    house.store.code = -1
    assert not await other.start_store_service(0.0)


@pytest.mark.parametrize(
    ("path", "given", "why"),
    [
        (None, {"nonsense": "1"}, "nonsense"),
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


@pytest.mark.processes
def test_with_a_real_store(tmp_path: Path) -> None:
    from tests.store.test_daemon import daemon

    with daemon("--capacity-dram", "0.032") as (address, _, _):
        (tmp_path / "mooncake.json").write_text(json.dumps({**CONFIG, "master_server_address": address}))
        words = ["--config", str(tmp_path / "mooncake.json"), "-D", "global_segment_size=0", "--port", "0"]
        words += ["-D", "local_buffer_size=16MB", "--host", "127.0.0.1"]
        command = [sys.executable, "-m", "mooncake.mooncake_store_service", *words]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            url = next(
                line.split("address=")[1].strip() for line in process.stderr if "ready role=rest" in line
            )
            put = urllib.request.Request(f"{url}/api/put", b'{"key": "k", "value": "v"}', method="PUT")
            assert urllib.request.urlopen(put, timeout=20).status == 200
            assert urllib.request.urlopen(f"{url}/api/get/k", timeout=20).read() == b"v"
            mount = urllib.request.Request(f"{url}/api/mount", b'{"size": "4MB"}', method="POST")
            lent = json.load(urllib.request.urlopen(mount, timeout=20))
            body = json.dumps({"segment_ids": lent["segment_ids"]}).encode()
            unmount = urllib.request.Request(f"{url}/api/unmount", body, method="POST")
            assert urllib.request.urlopen(unmount, timeout=20).status == 200
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{url}/api/get/other", timeout=20)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait(10)
