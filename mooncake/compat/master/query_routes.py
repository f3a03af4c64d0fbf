# SPDX-License-Identifier: Apache-2.0
"""Queries by HTTP: keys, their locations, segments. They grant no lease and do not count as uses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from mooncake.compat.master.responses import HttpRefusal, json, unwrap_reply
from mooncake.errors import ProtocolError
from mooncake.store import messages as m
from mooncake.store.master.context import MasterContext
from mooncake.transfer.descriptor import decode_descriptor
from mooncake.types import Tier

KEYS_PER_CHUNK = 4096
_KINDS = ("values", "disk_values", "local_disk_values", "nof_values")
_STATES = ("UNDEFINED", "OK", "DRAINING", "DRAINED")
"""States of a segment, in the order of the existing package's numbers."""
_VALUES = {Tier.MEMORY: "values", Tier.DEVICE: "values", Tier.SSD: "local_disk_values"}


class StoreQueries:
    """Queries of one master, with results in the existing package's shapes."""

    def __init__(self, context: MasterContext) -> None:
        self._master_context = context
        self._reached: dict[tuple[str, int], tuple[str, str]] = {}

    async def status(self) -> m.MasterStatus:
        status: m.MasterStatus = unwrap_reply(await self._master_context.ask(m.GetMasterStatus()))
        return status

    async def segment(self, name: str) -> m.SegmentStatus:
        for one in (await self.status()).segments:
            if one.segment == name:
                return one
        raise HttpRefusal("unknown_segment", f"no segment {name!r} is mounted")

    async def inspect(self, keys: list[str], tenant: str) -> list[m.ObjectStatus | None]:
        found: list[m.ObjectStatus | None] = []
        for start in range(0, len(keys), m.MAX_KEYS):
            found += unwrap_reply(
                await self._master_context.ask(m.Inspect(keys[start : start + m.MAX_KEYS], tenant))
            ).objects
        return found

    def reach(self, name: str) -> tuple[str, str]:
        """Protocol and address of a segment's bytes."""
        segment = self._master_context.master.segments.mounted.get(name)
        if segment is None:
            return "", name
        found = self._reached.get((name, segment.epoch))
        if found is None:
            try:
                endpoints = decode_descriptor(segment.descriptor).endpoints
            except ProtocolError:  # of a test or of another release: descriptors are opaque to the master
                endpoints = {}
            protocol = next((scheme for scheme in ("rdma", "tcp") if scheme in endpoints), "tcp")
            found = protocol, endpoints.get("tcp", name).partition(",")[0]
            self._reached[name, segment.epoch] = found
        return found

    def place(self, replica: m.ReplicaDetail, size_bytes: int) -> dict[str, Any]:
        protocol, endpoint = self.reach(replica.segment)
        return {
            "size_": size_bytes,
            "buffer_address_": replica.address,
            "protocol_": protocol,
            "transport_endpoint_": endpoint,
        }

    def places(self, found: m.ObjectStatus) -> dict[str, list[dict[str, Any]]]:
        by_kind: dict[str, list[dict[str, Any]]] = {"values": []}
        for replica in found.replicas:
            if replica.is_complete and replica.is_alive:
                place = self.place(replica, found.size_bytes)
                by_kind.setdefault(_VALUES[replica.tier], []).append(place)
        return by_kind

    def detail(self, one: m.SegmentStatus) -> dict[str, Any]:
        protocol, endpoint = self.reach(one.segment)
        return {
            "segment_name": one.segment,
            "segment_id": str(uuid.UUID(int=one.epoch % (1 << 128))),
            "client_id": one.node or one.segment,
            "base_address": hex(one.address),
            "size_bytes": one.size_bytes,
            "size_human": f"{one.size_bytes / (1 << 30):g} GiB",
            "te_endpoint": endpoint,
            "protocol": protocol,
            "tier": one.tier,
            "status": state_of(one),
            "num_objects": one.num_objects,
            "allocator_used_bytes": one.allocated_bytes,
            "allocator_capacity_bytes": one.size_bytes,
            "allocator_usage_percent": round(100 * one.allocated_bytes / max(1, one.size_bytes), 2),
        }


def state_of(one: m.SegmentStatus) -> str:
    if one.is_draining:
        return "DRAINING" if one.allocated_bytes else "DRAINED"
    return "OK" if one.state == "alive" else "UNDEFINED"


def router(context: MasterContext) -> APIRouter:
    routes = APIRouter()
    queries = StoreQueries(context)

    @routes.get("/get_all_keys")
    async def get_all_keys(tenant_id: str = "") -> Response:
        """List the readable keys of a tenant, one per line."""
        return StreamingResponse(_lines(context.master.objects.readable, tenant_id), media_type="text/plain")

    @routes.get("/get_all_segments")
    async def get_all_segments() -> Response:
        """List the segments that serve, one per line."""
        names = [one.segment for one in (await queries.status()).segments if one.state == "alive"]
        return PlainTextResponse("".join(f"{name}\n" for name in names))

    @routes.get("/query_key")
    async def query_key(key: Annotated[str, Query(min_length=1)], tenant_id: str = "") -> Response:
        """Where the replicas of an object are."""
        found = (await queries.inspect([key], tenant_id))[0]
        if found is None or found.is_writing:
            raise HttpRefusal("not_found")
        places = queries.places(found)
        more = {kind: values for kind, values in places.items() if kind != "values"}
        return json({"success": True, "data": places["values"], **more})

    @routes.get("/batch_query_keys")
    async def batch_query_keys(keys: Annotated[str, Query(min_length=1)], tenant_id: str = "") -> Response:
        """Where the replicas of several objects are; the keys are separated by commas."""
        names = [key for key in keys.split(",") if key]
        answers: dict[str, dict[str, Any]] = {}
        for name, found in zip(names, await queries.inspect(names, tenant_id), strict=True):
            if found is None or found.is_writing:
                answers[name] = {"ok": False, "error": "OBJECT_NOT_FOUND", **dict.fromkeys(_KINDS)}
            else:
                answers[name] = {"ok": True, "error": None, **dict.fromkeys(_KINDS), **queries.places(found)}
        return json({"success": True, "data": answers})

    @routes.get("/query_segment")
    async def query_segment(segment: Annotated[str, Query(min_length=1)]) -> Response:
        """Used bytes and size of a segment, as text."""
        try:
            one = await queries.segment(segment)
        except HttpRefusal as error:
            return PlainTextResponse(f"Failed to query segment: {error.reason}", 500)
        text = f"{one.segment}\nUsed(bytes): {one.allocated_bytes}\nCapacity(bytes) : {one.size_bytes}\n"
        return PlainTextResponse(text)

    @routes.get("/get_segments_detail")
    async def get_segments_detail() -> Response:
        """Every segment with its address, tier, state and use."""
        segments = [queries.detail(one) for one in (await queries.status()).segments]
        return json({"total_segments": len(segments), "segments": segments})

    @routes.get("/api/v1/segments/status")
    async def segment_status(segment: Annotated[str, Query(min_length=1)]) -> Response:
        """State of one segment: OK, DRAINING, DRAINED or UNDEFINED."""
        one = await queries.segment(segment)
        state = state_of(one)
        return json(
            {"success": True, "segment": segment, "status": _STATES.index(state), "status_name": state}
            | {"error_code": 0, "error_message": ""}
        )

    return routes


async def _lines(readable: Iterable[str], tenant: str) -> AsyncIterator[str]:
    """Keys that can be read now, in chunks; between two chunks the master serves other requests.

    Copying the references of a million keys takes 10 ms; all the rest is done chunk by chunk.
    """
    keys = list(readable)
    scope = "" if tenant in ("", "default") else f"{tenant}\0"
    for start in range(0, len(keys), KEYS_PER_CHUNK):
        chunk = keys[start : start + KEYS_PER_CHUNK]
        if scope:
            chunk = [key[len(scope) :] for key in chunk if key.startswith(scope)]
        else:
            chunk = [key for key in chunk if "\0" not in key]
        yield "".join(f"{key}\n" for key in chunk)
        await asyncio.sleep(0)
