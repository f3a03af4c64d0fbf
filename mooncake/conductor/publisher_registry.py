# SPDX-License-Identifier: Apache-2.0
"""The index that other routers query: the registered publishers, their blocks, and how much of a prompt they
hold.

It owns the registrations of ``POST /register`` and the answers to ``POST /query``; sockets and HTTP are
``query_server.py``'s. It is an index beside the one that places our own requests, because its blocks have
other names (``sequence_hashes``) and its instances do not serve our requests.

An instance is registered once for each data-parallel rank (and adapter, and salt); each registration is an
instance to the index, and the answers put ranks together again.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mooncake.conductor.key_translation import Fact, KeyScope, SequenceKeys, sequence_hashes
from mooncake.conductor.messages import BlocksCleared, BlocksRemoved, BlocksStored, PrefixWindows
from mooncake.conductor.prefix_index import PrefixIndex, PrefixMatch
from mooncake.prefix import BlockKey
from mooncake.types import InstanceId

DEFAULT_TENANT = "default"
MAX_QUERY_BLOCKS = 1 << 16
"""Blocks of one query's prompt: a million tokens in blocks of 16."""

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
OptionalName = Annotated[str, Meta(max_length=1024)] | None
BlockTokens = Annotated[int, Meta(gt=0, le=1 << 20)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
Kind = Literal["vLLM", "SGLang", "Mooncake"]


class Register(msgspec.Struct, frozen=True):
    """The body of ``POST /register``: one publisher of KV events."""

    endpoint: Name
    type: Kind
    modelname: Name
    instance_id: Name
    block_size: BlockTokens
    dp_rank: Rank = 0
    replay_endpoint: OptionalName = None
    lora_name: OptionalName = None
    tenant_id: OptionalName = None
    additionalsalt: OptionalName = None
    topic: str = ""

    @property
    def scope(self) -> KeyScope:
        return _scope(self.tenant_id, self.modelname, self.lora_name, self.block_size, self.additionalsalt)

    @property
    def holder(self) -> InstanceId:
        """The instance's name in the index."""
        return f"{self.instance_id}|{self.dp_rank}|{self.scope.name}"

    def __post_init__(self) -> None:
        for field, endpoint in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            tcp = re.fullmatch(r"tcp://[^*\s]+:(\d{1,5})", endpoint or "tcp://any:1")
            is_possible = (
                0 < int(tcp[1]) < 1 << 16 if tcp else re.fullmatch(r"(ipc|inproc)://\S+", endpoint or "")
            )
            if not is_possible:
                raise ValueError(
                    f"`{field}` must be one to connect to, such as tcp://10.0.0.1:5557; not {endpoint!r}"
                )


class Unregister(msgspec.Struct, frozen=True):
    """The body of ``POST /unregister``: what was registered with these, whatever its salt."""

    type: Kind
    modelname: Name
    instance_id: Name
    block_size: BlockTokens
    dp_rank: Rank = 0
    lora_name: OptionalName = None
    tenant_id: OptionalName = None


class QueryBase(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both kinds of query share: the model, and the scope of its blocks."""

    model: Name
    block_size: BlockTokens
    lora_name: OptionalName = None
    tenant_id: OptionalName = None
    instance_id: OptionalName = None
    cache_salt: OptionalName = None

    @property
    def scope(self) -> KeyScope:
        return _scope(self.tenant_id, self.model, self.lora_name, self.block_size, self.cache_salt)


class Query(QueryBase, frozen=True, kw_only=True):
    token_ids: list[Annotated[int, Meta(ge=0, lt=1 << 32)]]

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prompt."""
        return len(self.token_ids) // self.block_size

    def __post_init__(self) -> None:
        _check_size("token_ids", self.num_blocks)


class QueryByHash(QueryBase, frozen=True, kw_only=True):
    seq_hashes: list[int]

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prompt."""
        return len(self.seq_hashes)

    def __post_init__(self) -> None:
        _check_size("seq_hashes", self.num_blocks)
        for at, name in enumerate(self.seq_hashes):
            if not 0 <= name < 1 << 64:
                raise ValueError(f"`seq_hashes[{at}]` is {name}; a hash is from 0 to 2**64 - 1")


def _check_size(field: str, num_blocks: int) -> None:
    if num_blocks > MAX_QUERY_BLOCKS:
        raise ValueError(f"`{field}` has {num_blocks} blocks; allowed: at most {MAX_QUERY_BLOCKS}")


class PublisherRegistry:
    """Registrations and their blocks."""

    def __init__(self, seed: int) -> None:
        self.index = PrefixIndex()
        self.registered: dict[InstanceId, Register] = {}
        self._seed = seed

    def register(self, request: Register) -> SequenceKeys:
        """Enter a registration, or replace it. Returns the translation of its events."""
        self.index.clear(request.holder)
        self.registered[request.holder] = request
        return SequenceKeys(request.scope, self._seed, is_store=request.type == "Mooncake")

    def unregister(self, request: Unregister) -> list[Register]:
        """Remove registrations with their blocks. Returns those removed."""
        scope = _scope(request.tenant_id, request.modelname, request.lora_name, request.block_size, None)
        gone = [
            one
            for one in self.registered.values()
            if (one.type, one.instance_id, one.dp_rank)
            == (request.type, request.instance_id, request.dp_rank)
            and msgspec.structs.replace(one.scope, salt="") == scope
        ]
        for one in gone:
            del self.registered[one.holder]
            self.index.forget(one.holder)
        return gone

    def take(self, fact: Fact) -> None:
        """Apply a publisher's event to the index."""
        if fact.instance not in self.registered:
            return
        if isinstance(fact, BlocksCleared):
            self.index.clear(fact.instance)
        elif isinstance(fact, BlocksStored):
            self.index.store(fact.instance, fact.keys, fact.tier, fact.scope)
        elif isinstance(fact, PrefixWindows):
            self.index.set_windows(fact.instance, fact.windows)
        elif isinstance(fact, BlocksRemoved):
            self.index.remove(fact.instance, fact.keys, fact.tier, fact.scope)

    def keys_of(self, request: Query | QueryByHash) -> list[BlockKey]:
        """The names of the blocks that a query asks for. It depends on nothing that changes, so another
        thread may call it."""
        if isinstance(request, Query):
            return sequence_hashes(request.token_ids, request.block_size, self._seed)
        return request.seq_hashes

    def answer(
        self, request: Query | QueryByHash, keys: list[BlockKey] | None = None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """The number of leading tokens of the prompt by tenant and instance; ``keys``: as of ``keys_of``.

        ``longest_matched`` is that of its best rank; ``GPU``, ``CPU`` and ``DISK`` split it by medium, each
        block at its fastest; ``DP`` is the number of each rank. Instances without any are absent.
        """
        scope = request.scope
        match = self.index.match(self.keys_of(request) if keys is None else keys, scope.name)
        found: dict[str, dict[str, Any]] = {}
        for slot in match.leading.nonzero()[0].tolist():
            one = self.registered[self.index.instance_at(slot)]
            if request.instance_id not in (None, "", one.instance_id):
                continue
            num_blocks = int(match.leading[slot])
            row = found.setdefault(one.instance_id, {"longest_matched": 0, "DP": {}})
            rank = str(one.dp_rank)
            row["DP"][rank] = max(num_blocks * request.block_size, row["DP"].get(rank, 0))
            if num_blocks * request.block_size > row["longest_matched"]:
                row |= {"longest_matched": num_blocks * request.block_size}
                row |= _by_medium(match, slot, num_blocks, request.block_size)
        return {scope.tenant: found}


def _by_medium(match: PrefixMatch, slot: int, num_blocks: int, block_tokens: int) -> dict[str, int]:
    counts = {"GPU": 0, "CPU": 0, "DISK": 0}
    for tiers in match.tiers_of(slot)[:num_blocks]:
        counts["GPU" if tiers & 1 else "CPU" if tiers & 2 else "DISK"] += block_tokens
    return counts


def _scope(tenant: str | None, model: str, lora: str | None, block_tokens: int, salt: str | None) -> KeyScope:
    return KeyScope(tenant or DEFAULT_TENANT, model, lora or "", block_tokens, salt or "")
