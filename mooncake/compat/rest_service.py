# SPDX-License-Identifier: Apache-2.0
"""The existing package's ``mooncake.mooncake_store_service``: a store client behind a small REST API.

``mc_store_rest_server``, or ``python -m mooncake.mooncake_store_service``: values are put as text and read as
bytes; memory of this process or of this host can be mounted in the store and unmounted. Store calls block,
so each runs on a thread of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from mooncake import clock
from mooncake.compat.config_file import MooncakeConfig, _config_from
from mooncake.compat.store.arguments import is_good_key
from mooncake.errors import AccessDenied, AddressInUse, InvalidArgument, MooncakeError, Unavailable
from mooncake.http.connections import Deadlines
from mooncake.http.server import (
    BodyBudget,
    BodyBudgetExceeded,
    ConnectionAcceptor,
    CountingTransport,
    TrackedProtocol,
    listen,
)
from mooncake.log import get_logger, setup_logging
from mooncake.security import TRUSTED, process_identity, warn_if_open
from mooncake.security.http_auth import AdminKey, challenge
from mooncake.security.principal import principal_of
from mooncake.store import MooncakeDistributedStore
from mooncake.store.messages import MAX_KEY_BYTES

log = get_logger(__name__)

MAX_BODY_BYTES = 100 << 20
MAX_BODIES_BYTES = 2 * MAX_BODY_BYTES
"""Most bytes of the bodies of all requests whose answers have not ended."""
CHARSETS = ("utf-8", "utf8", "us-ascii", "iso-8859-1")
"""Encodings of a body: that of JSON, and others that clients name. Some that are missing take minutes."""
MAX_GRACE_S = 3600
RETRY_S = 1.0
BODY_S = 60.0
NOT_FOUND = -704
FOR_THIS_HOST = (
    "/api/mount_shm",
    "/api/unmount_shm",
    "/api/mount",
    "/api/unmount",
    "/api/unmount_local_disk",
    "/api/reconfigure",
    "/api/remove_all",
)
"""Calls that mount or unmount memory or remove all objects: without a key, callers must be on this host."""

SHARED_MEMORY = Path("/dev/shm")

_content: ContextVar[bytes | None] = ContextVar("_content", default=None)
"""Body of the request that is handled; None in an application that reads it itself."""

ResultT = TypeVar("ResultT")


class _BadRequest(Exception):
    """Error of a request, with a message for its sender."""


def _answered(
    handle: Callable[[Any, web.Request], Coroutine[Any, Any, web.Response]],
) -> Callable[[Any, web.Request], Coroutine[Any, Any, web.Response]]:
    """Make errors of a handler its response: 400 for the request's, 500 for the store's."""

    @functools.wraps(handle)
    async def answered(self: Any, request: web.Request) -> web.Response:
        try:
            return await handle(self, request)
        except _BadRequest as error:
            return _error(str(error), 400)
        except web.HTTPException:
            raise
        except Exception as error:
            log.exception("request_failed", path=handle.__name__)
            return _error(f"{type(error).__name__}: {error}", 500)

    return answered


class MooncakeStoreService:
    """One store client and its REST API.

    Args:
        config_path: a ``mooncake.json``; without it the environment is read (see ``MooncakeConfig``).
        cli_config: fields of ``MooncakeConfig`` that override those of the file.
        api_key: key that every call but ``/health`` must send as ``X-API-Key``. Without one, every caller
            that reaches the port may use objects, as with the existing package, unless the cluster has a
            credential: then members with a certificate, or callers on this host. Memory is mounted
            and unmounted, and all objects are removed, only for callers on this host.
        is_insecure: without a key, allow all of this for callers on other hosts, too.
    """

    _last_id = ""
    """Id of the segment that ``reconfigure`` has mounted last; others may be left mounted before it."""

    def __init__(
        self,
        config_path: str | None = None,
        cli_config: Mapping[str, Any] | None = None,
        api_key: str = "",
        is_insecure: bool = False,
    ) -> None:
        self.config = _config(config_path, dict(cli_config or {}))
        self._key = AdminKey(api_key) if api_key else None
        self._is_insecure = is_insecure
        self.store: Any = None
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._acceptor: ConnectionAcceptor | None = None
        self._listening: socket.socket | None = None
        self._bodies = BodyBudget(MAX_BODIES_BYTES)
        self.current_mode = "prefill"
        self.mounted_segment_ids: list[str] = []
        """Ids of the segments that ``reconfigure`` has mounted."""
        self.last_mount_info: dict[str, Any] = {}
        """Path, size, offset, protocol and location of the last one."""
        self._state_lock = asyncio.Lock()

    # Start and stop

    async def start_store_service(
        self, max_wait_time: float = 60.0, shutdown_event: asyncio.Event | None = None
    ) -> bool:
        """Connect to the master; retries every second for ``max_wait_time`` seconds.

        False when it does not answer in time, or when ``shutdown_event`` is set before it does.
        """
        config, deadline = self.config, clock.monotonic() + max_wait_time
        shutdown = asyncio.Event() if shutdown_event is None else shutdown_event
        while not shutdown.is_set():
            store = MooncakeDistributedStore()
            code = await asyncio.to_thread(
                store.setup,
                config.local_hostname,
                config.metadata_server,
                config.global_segment_size,
                config.local_buffer_size,
                config.protocol,
                config.device_name,
                config.master_server_address,
                None,
                config.enable_ssd_offload,
                config.ssd_offload_path,
                config.tenant_id,
                config.enable_client_http_server,
                config.client_http_port,
                root_fs_dir=config.root_fs_dir,
                cluster_id=config.cluster_id,
            )
            if code == 0 and not shutdown.is_set():
                self.store = store
                log.info("store_ready", master=config.master_server_address)
                return True
            await asyncio.to_thread(store.close)
            if shutdown.is_set():
                break
            if clock.monotonic() + RETRY_S > deadline:
                log.error("store_failed", master=config.master_server_address, code=code)
                return False
            log.warning("store_not_ready", master=config.master_server_address, code=code)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(shutdown.wait(), RETRY_S)
        return False

    async def start_http_service(self, port: int = 8080, host: str = "0.0.0.0") -> bool:
        """Listen and set ``self.port``.

        Raises:
            AddressInUse: the port is in use.
        """
        self._runner = runner = web.AppRunner(self.make_app(), access_log=None)
        await runner.setup()
        try:
            self._listening = listen(host, port)
        except (OSError, AddressInUse) as error:
            await runner.cleanup()
            raise AddressInUse(f"cannot listen on {host}:{port} ({error}); choose another --port") from error
        self._acceptor = acceptor = ConnectionAcceptor(
            self._listening, Deadlines(body_s=BODY_S), tls=process_identity().server_tls
        )
        make = runner.server
        assert make is not None
        acceptor.open(lambda one: TrackedProtocol(acceptor, one, make()))
        self.port = self._listening.getsockname()[1]
        log.info("ready", role="rest", address=f"http://{host}:{self.port}")
        return True

    async def stop(self) -> None:
        """Stop serving and close the store. Idempotent."""
        runner, self._runner = self._runner, None
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.close()
        if runner is not None:
            await runner.cleanup()
        if acceptor is not None:
            await acceptor.end()
        if self._listening is not None:
            self._listening.close()
        store, self.store = self.store, None
        if store is not None:
            await asyncio.to_thread(store.close)

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_in_json, self._check])
        app.add_routes(
            [
                web.put("/api/put", self.handle_put),
                web.get("/api/get/{key:.+}", self.handle_get),
                web.get("/api/exist/{key:.+}", self.handle_exist),
                web.delete("/api/remove/{key:.+}", self.handle_remove),
                web.delete("/api/remove_all", self.handle_remove_all),
                web.post("/api/mount_shm", self.handle_mount_shm),
                web.post("/api/unmount_shm", self.handle_unmount_shm),
                web.post("/api/mount", self.handle_mount),
                web.post("/api/unmount", self.handle_unmount),
                web.post("/api/unmount_local_disk", self.handle_unmount_local_disk),
                web.post("/api/reconfigure", self.handle_reconfigure),
                web.get("/health", self.handle_health),
            ]
        )
        return app

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Authorize a request before its body is read; then read the body within its deadline."""
        watched: Any = request.transport
        acceptor = self._acceptor
        if acceptor is None or not isinstance(watched, CountingTransport):
            return await self._checked(request, handler)  # not from this service's own port
        connections, one = acceptor.connections, watched.one
        connections.header_received(one, clock.monotonic())
        try:
            return await self._checked(request, handler)
        finally:
            connections.body_received(one, clock.monotonic())
            connections.response_sent(one, clock.monotonic())

    async def _checked(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._key is not None and request.path != "/health":
            refusal = self._key.refusal(request.headers)
            if refusal is not None:
                refused = _error(refusal.message, refusal.status)
                refused.headers.update(challenge(refusal.status))
                return refused
        elif request.path != "/health" and not self._is_insecure and not _is_member(request):
            message = (
                "the request is not authenticated, and this service acts for a member of a cluster with a "
                "credential: start it with ADMIN_API_KEY set and send that as X-API-Key, or with --insecure"
            )
            return _error(message, 403)
        elif request.path in FOR_THIS_HOST and not self._is_insecure and not _is_from_this_host(request):
            message = (
                f"{request.path} from another host needs a key: start the service with ADMIN_API_KEY set and "
                "send it as X-API-Key, or start it with --insecure"
            )
            return _error(message, 403)
        try:
            async with self._read_body(request):
                response: web.StreamResponse = await handler(request)
                return response
        except BodyBudgetExceeded as error:
            refused = _error(str(error), 503)
            refused.headers["Retry-After"] = "1"
            return refused

    @contextlib.asynccontextmanager
    async def _read_body(self, request: web.Request) -> AsyncIterator[None]:
        """Read the body for the handler; it counts among those of all requests until the answer has ended.

        Raises:
            BodyBudgetExceeded: the others take the memory.
            HTTPRequestEntityTooLarge: it is larger than ``MAX_BODY_BYTES``; that much is not read.
        """
        parts: list[bytes] = []
        num_held = 0
        announced = request.content_length or 0
        try:
            if announced > MAX_BODY_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, announced)
            while part := await request.content.readany():
                self._bodies.take(len(part))
                num_held += len(part)
                if num_held > MAX_BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, num_held)
                parts.append(part)
            _content.set(b"".join(parts))
            parts.clear()  # the handler's copy is the only one
            yield
        finally:
            _content.set(None)
            self._bodies.give_back(num_held)

    # Objects

    @_answered
    async def handle_put(self, request: web.Request) -> web.Response:
        """Put a value, given as text in JSON."""
        body = await _body(request)
        key, value = body.get("key"), body.get("value")
        if not key or not value:
            return _error("Missing key or value", 400)
        name, content = _key(_text("key", key)), _text("value", value).encode()
        code = await self._run(lambda: self.store.put(name, content))
        return _done() if code == 0 else _error(f"PUT operation failed ({code})", 500)

    @_answered
    async def handle_get(self, request: web.Request) -> web.Response:
        """Get a value as bytes."""
        key = _key(request.match_info["key"])
        content = await self._run(lambda: self.store.get(key))
        if not content:
            code = await self._run(lambda: self.store.is_exist(key))  # an empty value also means a failure
            return _error("Key not found", 404) if code >= 0 else _error(f"Exist check failed ({code})", 500)
        return web.Response(body=bytes(content), content_type="application/octet-stream")

    @_answered
    async def handle_exist(self, request: web.Request) -> web.Response:
        """Whether there is an object."""
        key = _key(request.match_info["key"])
        code = await self._run(lambda: self.store.is_exist(key))
        if code < 0:
            return _error(f"Exist check failed ({code})", 500)
        return web.json_response({"exists": code == 1})

    @_answered
    async def handle_remove(self, request: web.Request) -> web.Response:
        """Remove an object."""
        key = _key(request.match_info["key"])
        code = await self._run(lambda: self.store.remove(key))
        if code == NOT_FOUND:
            return _error("Key not found", 404)
        return _done() if code == 0 else _error(f"Remove operation failed ({code})", 500)

    @_answered
    async def handle_remove_all(self, request: web.Request) -> web.Response:
        """Remove all objects that no lease protects."""
        count = await self._run(lambda: self.store.remove_all())
        if count < 0:
            return _error(f"RemoveAll operation failed ({count})", 500)
        return web.json_response({"status": f"success removed {count} keys"})

    @_answered
    async def handle_health(self, request: web.Request) -> web.Response:
        """Whether the store is connected, and its health code."""
        code = 0 if self.store is None else await self._run(lambda: self.store.health_check())
        return web.json_response({"status": "ok" if self.store is not None else "no store", "health": code})

    # Segments

    @_answered
    async def handle_mount_shm(self, request: web.Request) -> web.Response:
        """Mount shared memory of this host."""
        segment = _shared_segment(await _body(request), "name", self.config.protocol)
        return _mounted(await self._mount_shared(segment))

    @_answered
    async def handle_mount(self, request: web.Request) -> web.Response:
        """Mount new memory of this process."""
        body = await _body(request)
        size = _size(body)
        if size is None:
            raise _BadRequest(f"Invalid size {body.get('size')!r}; allowed: a whole number of bytes above 0")
        protocol = _text_field(body, "protocol", self.config.protocol)
        location = _text_field(body, "location", "")
        outcome = await self._run(lambda: self.store.allocate_and_mount_segment(size, protocol, location))
        return _mounted(outcome, allocated_size=outcome.get("allocated_size", 0))

    @_answered
    async def handle_unmount_shm(self, request: web.Request) -> web.Response:
        """Unmount shared memory of this host."""
        body = await _body(request)
        ids, grace_s = _ids(body), _grace(body)
        async with self._state_lock:
            return _unmounted(await self._unmount(self.store.unmount_segment, ids, grace_s))

    @_answered
    async def handle_unmount(self, request: web.Request) -> web.Response:
        """Unmount segments and free their memory."""
        body = await _body(request)
        ids, grace_s = _ids(body), _grace(body)
        async with self._state_lock:
            return _unmounted(await self._unmount(self.store.unmount_and_free_segment, ids, grace_s))

    @_answered
    async def handle_unmount_local_disk(self, request: web.Request) -> web.Response:
        """Unmount the segment on the local SSD."""
        grace_s = _grace(await _body(request))
        code = await self._run(lambda: self.store.unmount_local_disk_segment(grace_s))
        return _done() if code == 0 else _error(f"Unmount failed for the local disk ({code})", 500)

    @_answered
    async def handle_reconfigure(self, request: web.Request) -> web.Response:
        """Mount a shared segment for ``decode``, before the last one is unmounted; none for ``prefill``.

        The same segment again stays mounted: its objects would be lost, and no memory is mounted twice.
        """
        body = await _body(request)
        mode = _text("mode", body.get("mode", "")).lower()
        if mode not in ("decode", "prefill"):
            raise _BadRequest(f"Invalid mode {mode!r}; allowed: decode, prefill")
        grace_s = _grace(body)
        segment = _shared_segment(body, "path", self.config.protocol) if mode == "decode" else None
        async with self._state_lock:
            before, fresh = list(self.mounted_segment_ids), list[str]()
            is_mounted = self._last_id in before and self._may_be_mounted(self._last_id)
            if segment is not None and is_mounted and segment == self.last_mount_info:
                before.remove(self._last_id)
                fresh = [self._last_id]
            elif segment is not None:
                outcome = await self._mount_shared(segment)
                if outcome["ret"] != 0:
                    kept = "keeping previous decode segments" if before else "rolled back to prefill"
                    return _error(f"Mount failed ({outcome['ret']}); {kept}", 500, mode=self.current_mode)
                fresh = list(outcome["segment_ids"])
            self.mounted_segment_ids = fresh + before
            failed = await self._unmount(self.store.unmount_segment, before, grace_s)
            gone = [one for one in failed if not self._may_be_mounted(one)]
            self._forget(gone)  # they are unmounted already, in another way or with their store
            if fresh:
                self.current_mode, self.last_mount_info = "decode", dict(segment or {})
                self._last_id = fresh[0]
            left = list(self.mounted_segment_ids)
        if left and not fresh:
            return _error("Unmount failed", 500, failed_segment_ids=left, segment_ids=[])
        # The next call tries again to unmount the earlier ones that are left.
        return web.json_response({"status": "success", "mode": mode, "segment_ids": left})

    async def _mount_shared(self, segment: dict[str, Any]) -> dict[str, Any]:
        outcome: dict[str, Any] = await self._run(lambda: self.store.mount_segment(*segment.values()))
        return outcome

    async def _unmount(
        self, unmount: Callable[[list[str], int], int], ids: Sequence[str], grace_s: int
    ) -> list[str]:
        """Unmount segments, and note what ``reconfigure`` has left; the ids that failed."""
        failed = await self._run(lambda: [one for one in ids if unmount([one], grace_s) != 0])
        self._forget([one for one in ids if one not in failed])
        return failed

    def _may_be_mounted(self, segment_id: str) -> bool:
        """Whether an attempt to unmount it may succeed; a program's own store is not expected to know."""
        known: Callable[[str], bool] | None = getattr(self.store, "_has_segment", None)
        return known is None or known(segment_id)

    def _forget(self, ids: Sequence[str]) -> None:
        """Note that these segments are no longer mounted."""
        self.mounted_segment_ids = [one for one in self.mounted_segment_ids if one not in ids]
        if not self.mounted_segment_ids:
            self.current_mode, self.last_mount_info = "prefill", {}

    async def _run(self, call: Callable[[], ResultT]) -> ResultT:
        return await asyncio.to_thread(call)


# Parts of a request -----------------------------------------------------------------------------------


async def _body(request: web.Request) -> dict[str, Any]:
    content = _content.get()
    try:
        body = await request.json() if content is None else _decoded(content, request.charset or "utf-8")
    except (ValueError, LookupError, RecursionError) as error:  # not JSON; nested too deeply
        raise _BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _BadRequest("the body must be a JSON object")
    return body


def _decoded(content: bytes, charset: str) -> Any:
    if charset.lower() not in CHARSETS:
        raise _BadRequest(f"the body is in {charset[:100]!r}; allowed: {', '.join(CHARSETS)}")
    return json.loads(content.decode(charset))


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _BadRequest(f"{field} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _BadRequest(f"{field} has half of a surrogate pair, which is not a character") from error
    return value


def _key(key: str) -> str:
    if not is_good_key(key):
        raise _BadRequest(f"a key is 1 to {MAX_KEY_BYTES} bytes of UTF-8 without NUL")
    return key


def _shm_name_to_path(name: str | None) -> str | None:
    """Path of shared memory named as ``shm_open`` takes it, or with the folder before it; else None."""
    if name is None:
        return None
    name = name.removeprefix(f"{SHARED_MEMORY}/").removeprefix("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 255:
        return None
    return str(SHARED_MEMORY / name)


def _shared_segment(body: dict[str, Any], field: str, protocol: str) -> dict[str, Any]:
    """Arguments of ``mount_segment``, in their order."""
    name = body.get(field)
    path, size = _shm_name_to_path(_text(field, name) if name else None), _size(body)
    if path is None or size is None:
        given = f"{field} {str(body.get(field))[:100]!r}, size {str(body.get('size'))[:100]!r}"
        allowed = f"the name of shared memory under {SHARED_MEMORY} and a whole number of bytes above 0"
        raise _BadRequest(f"Missing {field} or size, or invalid: {given}; allowed: {allowed}")
    return {
        "path": path,
        "size": size,
        "offset": _whole(body, "offset", 0, 1 << 62),
        "protocol": _text_field(body, "protocol", protocol),
        "location": _text_field(body, "location", ""),
    }


def _text_field(body: dict[str, Any], field: str, default: str) -> str:
    return _text(field, body.get(field, default))


def _whole(body: dict[str, Any], field: str, default: int, most: int) -> int:
    value = body.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise _BadRequest(f"{field} is {value!r}; allowed: a whole number from 0 to {most}")
    return value


def _grace(body: dict[str, Any]) -> int:
    return _whole(body, "grace_period_seconds", 0, MAX_GRACE_S)


def _size(body: dict[str, Any]) -> int | None:
    """Bytes above 0; None when the field is missing or something else."""
    size = body.get("size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _ids(body: dict[str, Any]) -> list[str]:
    given = body.get("segment_ids")
    ids = [given] if isinstance(given, str) else given
    if not ids:
        raise _BadRequest("Missing segment_ids")
    if not isinstance(ids, list) or not all(isinstance(one, str) and one for one in ids):
        raise _BadRequest("segment_ids must be text or a list of texts")
    return [_text("segment_ids", one) for one in ids]


def _is_member(request: web.Request) -> bool:
    """Whether the caller has the rights of this process, where the cluster has a credential: it is a member
    by its certificate and not of a tenant or, where there is only a cluster key, on this host."""
    identity = process_identity()
    if not identity.has_tls:
        return identity.is_open or _is_from_this_host(request)
    try:
        return principal_of(request.get_extra_info("peercert")).level in TRUSTED
    except AccessDenied:
        return False


def _is_from_this_host(request: web.Request) -> bool:
    """Whether the caller, or the proxy that forwards the request, is on this host."""
    try:
        return ipaddress.ip_address((request.remote or "").partition("%")[0]).is_loopback
    except ValueError:
        return False


def _done() -> web.Response:
    return web.json_response({"status": "success"})


def _unmounted(failed: list[str]) -> web.Response:
    return _error("Unmount failed", 500, failed_segment_ids=failed) if failed else _done()


def _mounted(outcome: dict[str, Any], **more: Any) -> web.Response:
    if outcome["ret"] != 0:
        return _error(f"Mount failed ({outcome['ret']})", 500)
    return web.json_response({"status": "success", "segment_ids": outcome["segment_ids"], **more})


def _error(text: str, status: int, **more: Any) -> web.Response:
    return web.json_response({"error": text, **more}, status=status)


@web.middleware
async def _in_json(request: web.Request, handler: Any) -> web.StreamResponse:
    """Send errors as JSON, also those of aiohttp and unexpected ones."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        return _error(f"{request.method} {request.path}: {error.reason}", error.status)
    except Exception as error:
        log.exception("request_failed", path=request.path)
        return _error(f"{type(error).__name__}: {error}", 500)


# The program -------------------------------------------------------------------------------------------


def _config(path: str | None, given: dict[str, Any]) -> MooncakeConfig:
    """Read the file or the environment, overridden by ``given``. Raises InvalidArgument, naming the field.

    An unknown field is ignored with a warning, as the existing package ignores it.
    """
    known = MooncakeConfig.__dataclass_fields__
    for name in given.keys() - known:
        log.warning("unknown_field_ignored", field=name, known=", ".join(known))
    given = {name: value for name, value in given.items() if name in known}
    try:
        if not path and not given:
            return MooncakeConfig.load_from_env()
        content = json.loads(Path(path).read_text()) if path else _from_environment()
        if not isinstance(content, dict):
            raise ValueError(f"{path}: a JSON object is expected")
        return _config_from({**content, **given})
    except (OSError, ValueError) as error:
        raise InvalidArgument("--config", path or "the environment", str(error)) from error


def _from_environment() -> dict[str, Any]:
    """Configuration of the environment when it is complete, else defaults that the command line completes."""
    try:
        found = MooncakeConfig.load_from_env()
    except ValueError:
        return {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    return {name: getattr(found, name) for name in MooncakeConfig.__dataclass_fields__}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mc_store_rest_server",
        description="A client of the store behind a REST API.",
        epilog="Example: mc_store_rest_server --config mooncake.json -D protocol=tcp --port 8080",
    )
    parser.add_argument("--config", help="mooncake.json; without it MOONCAKE_CONFIG_PATH or MOONCAKE_MASTER")
    parser.add_argument(
        "-D",
        "--define",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides a field of the file",
    )
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument(
        "--insecure", action="store_true", help="serve other hosts, and mount memory for them, without a key"
    )
    parser.add_argument("--max-wait-time", type=float, default=60.0, help="seconds to wait for the master")
    return parser


async def _serve(arguments: argparse.Namespace, given: dict[str, str]) -> None:
    key = os.environ.get("ADMIN_API_KEY", "")
    service = MooncakeStoreService(arguments.config, given, key, arguments.insecure)
    if not key:
        warn_if_open("mc_store_rest_server", arguments.host)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    starting = asyncio.create_task(service.start_store_service(arguments.max_wait_time))
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return
        if not starting.result():
            raise Unavailable(f"the master {service.config.master_server_address} did not answer in time")
        await service.start_http_service(arguments.port, arguments.host)
        await stop.wait()
    finally:
        starting.cancel()
        waiting.cancel()
        await service.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script ``mc_store_rest_server``."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    setup_logging(role="rest")
    given: dict[str, str] = {}
    for text in parsed.define:
        name, has_value, value = text.partition("=")
        if has_value:
            given[name] = value
        else:
            log.warning("definition_ignored", text=text, expected="KEY=VALUE")
    if not 0 <= parsed.port < 65536:
        parser.error(f"--port {parsed.port}: 0 to 65535 is expected")
    try:
        asyncio.run(_serve(parsed, given))
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1 if isinstance(error, Unavailable) else 2)
