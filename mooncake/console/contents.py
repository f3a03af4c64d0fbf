# SPDX-License-Identifier: Apache-2.0
"""What the pool holds: objects by tier, by tenant, by model and by prefix, and the hottest prefixes.

Owns a sum over one pass through the keys, which its shell fetches in batches; it is bounded by the number of
keys that are read, and says how many of all they were. A prefix is a chain of blocks, each of which names the
block before it; its first block stands for all prompts that begin with it. The content of a block is never
read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mooncake.store import messages as m
from mooncake.types import Tier

MAX_KEYS_READ = 20_000
MAX_ROWS = 50
MAX_CELLS = 10_000
_NO_MODEL = "other objects"


class PrefixRow(msgspec.Struct):
    """A chain of blocks, by its first block."""

    key: str
    tenant: str
    model: str
    num_blocks: int = 0
    size_bytes: int = 0
    num_uses: int = 0
    "Uses of all its blocks."
    longest: int = 0
    "Blocks of its longest prompt."


class _Sum(msgspec.Struct):
    num_objects: int = 0
    size_bytes: int = 0
    num_uses: int = 0


class PoolContents:
    """The sum over one pass."""

    def __init__(self) -> None:
        self.num_read = 0
        self._objects: dict[tuple[str, str], m.ObjectStatus] = {}
        self._by: dict[tuple[str, str, str], _Sum] = {}
        """By tenant, model and tier."""

    @property
    def has_room(self) -> bool:
        return self.num_read < MAX_KEYS_READ

    def add(self, tenant: str, found: Iterable[tuple[str, m.ObjectStatus | None]]) -> None:
        for key, one in found:
            if one is None or not self.has_room:
                continue
            self.num_read += 1
            self._objects[tenant, key] = one
            for tier in {str(replica.tier) for replica in one.replicas if replica.is_complete}:
                row = self._by.setdefault((tenant, model_of(key), tier), _Sum())
                row.num_objects += 1
                row.size_bytes += one.size_bytes
                row.num_uses += one.num_uses

    def rows(self) -> list[dict[str, Any]]:
        """Objects and bytes by tenant, model and tier, the largest first."""
        rows = [
            {"tenant": tenant, "model": model, "tier": tier, **msgspec.structs.asdict(one)}
            for (tenant, model, tier), one in self._by.items()
        ]
        return sorted(rows, key=lambda row: -row["size_bytes"])[:MAX_ROWS]

    def prefixes(self) -> list[PrefixRow]:
        """The chains whose blocks were used most."""
        roots: dict[tuple[str, str], tuple[tuple[str, str], int]] = {}
        """By block: the first block of its chain, and its place in it."""
        found: dict[tuple[str, str], PrefixRow] = {}
        for start in self._objects:
            path: dict[tuple[str, str], None] = {}
            at = start
            # Parents are what clients claim, so they may form a cycle.
            while at in self._objects and at not in roots and at not in path:
                path[at] = None
                at = (at[0], self._objects[at].parent)
            for block in reversed(path):
                root, place = roots.get((block[0], self._objects[block].parent), (block, 0))
                roots[block] = (root, place + 1)
        for block, (root, place) in roots.items():
            one = self._objects[block]
            row = found.setdefault(root, PrefixRow(root[1], root[0], model_of(root[1])))
            row.num_blocks += 1
            row.size_bytes += one.size_bytes
            row.num_uses += one.num_uses
            row.longest = max(row.longest, place)
        return sorted(found.values(), key=lambda row: (-row.num_uses, -row.num_blocks, row.key))[:MAX_ROWS]

    def cells(self) -> dict[str, list[int]]:
        """The blocks that were used most, as columns for a picture: uses, and the fastest tier's number."""
        hottest = sorted(self._objects.values(), key=lambda one: -one.num_uses)[:MAX_CELLS]
        numbers = {tier: number for number, tier in enumerate(Tier)}
        return {
            "uses": [one.num_uses for one in hottest],
            "tier": [
                min((numbers[replica.tier] for replica in one.replicas), default=len(numbers))
                for one in hottest
            ],
        }

    def summary(self, num_objects: int, age_s: float) -> dict[str, Any]:
        """The page's part about contents. ``num_objects``: as many as the master has."""
        return {
            "num_objects": num_objects,
            "num_read": self.num_read,
            "is_sample": self.num_read < num_objects,
            "age_s": round(age_s, 1),
            "rows": self.rows(),
            "prefixes": [msgspec.structs.asdict(row) for row in self.prefixes()],
            "cells": self.cells(),
        }


def model_of(key: str) -> str:
    """The digest of model, weights and layout in a block's key."""
    parts = key.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 and parts[0] in ("kv", "encoder") else _NO_MODEL


def tenants_of(quotas: Iterable[m.QuotaStatus]) -> list[dict[str, Any]]:
    """Tenants with their use, the largest first."""
    rows = [{**msgspec.structs.asdict(one), "tenant": one.tenant or "default"} for one in quotas]
    return sorted(rows, key=lambda row: -row["used_bytes"])[:MAX_ROWS]


def master_view(status: m.MasterStatus) -> dict[str, Any]:
    """The master's own numbers."""
    return {
        "num_objects": status.num_objects,
        "num_writing": status.num_writing,
        "capacity_bytes": status.capacity_bytes,
        "allocated_bytes": status.allocated_bytes,
        "counts": dict(status.counts),
        "segments": [msgspec.to_builtins(one) for one in status.segments],
    }


def key_story(key: str, tenant: str, one: m.ObjectStatus | None, lines: list[str]) -> Mapping[str, Any]:
    """One object: where it lies, what protects it, what happened to it."""
    return {
        "key": key,
        "tenant": tenant or "default",
        "object": None if one is None else msgspec.to_builtins(one),
        "story": lines[-200:],
    }
