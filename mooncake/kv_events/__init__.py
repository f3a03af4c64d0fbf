# SPDX-License-Identifier: Apache-2.0
"""KV events, and the dialects in which engines and stores send them: blocks stored, removed, or all removed.

It owns types and dialects and does not interpret block hashes. There are four: vLLM's batches are arrays
whose events are maps with a ``type``; newer ones are maps as a whole; SGLang's events are arrays that begin
with the type; the existing Mooncake store's are maps with an ``event_type``. Our own workers send vLLM's
(``encode_batch``), our own store its predecessor's, and both add a ``reason`` to removals. Fields beside
those below are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

ForeignHash = bytes | int

MEDIUM_DEVICE = "GPU"
"""vLLM's name of an engine's own pool, whatever device it is on."""


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=str):
    pass


class BlockStored(_Event, frozen=True):
    """Consecutive blocks, after ``parent_block_hash`` (None: they begin a prompt)."""

    block_hashes: list[ForeignHash] = []
    parent_block_hash: ForeignHash | None = None
    token_ids: list[int] | None = None
    "The tokens of all these blocks, in order."
    block_size: int | None = None
    "Tokens per block."
    medium: str | None = None
    lora_id: Any = None
    "Number of the adapter in the engine; earlier releases of vLLM send no name."
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    "Inputs of each block's hash beside its tokens."
    object_key: str | None = None
    "Name of the object that is the block, in a store's events."
    seq_hashes: list[int] | None = None
    "The blocks' ``sequence_hash.py`` hashes, in a store's events."
    tenant_id: str | None = None
    model_name: str | None = None
    additional_salt: str | None = None
    group_idx: int | None = None
    "The engine's KV cache group that has the blocks: some of the layers. None: the blocks are whole."
    kv_cache_spec_kind: str | None = None
    "The kind of attention of the group's layers."
    kv_cache_spec_sliding_window: int | None = None
    "Tokens that a layer with a sliding window attends to, the current one included."
    locality: str | None = None
    "``REMOTE``: not in the publisher's own memory or disk."


class BlockRemoved(_Event, frozen=True):
    block_hashes: list[ForeignHash] = []
    medium: str | None = None
    object_key: str | None = None
    seq_hashes: list[int] | None = None
    lora_name: str | None = None
    tenant_id: str | None = None
    model_name: str | None = None
    additional_salt: str | None = None
    reason: str | None = None
    "Reason as text; vLLM has no such field."
    group_idx: int | None = None
    "None: from all groups."
    locality: str | None = None


class AllBlocksCleared(_Event, frozen=True):
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events published together at ``ts``, in wall-clock seconds (an existing store's: milliseconds)."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)

# For events that are arrays: the fields after the type.
_ARRAY_FIELDS = {
    "BlockStored": [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx", "locality"],
    "AllBlocksCleared": [],
}
# SGLang's removals have all fields of stores from the medium on.
_LONG_REMOVED = ["block_hashes", "medium", *_ARRAY_FIELDS["BlockStored"][-4:], "ownership"]
# The fields that vLLM's subscribers expect even when they are None.
_ALWAYS_SENT = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"}
_TYPES = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}


def read_batch(payload: bytes) -> EventBatch:
    """One batch in any dialect.

    Raises:
        msgspec.MsgspecError: the payload is not a batch.
    """
    try:
        return _read_batch(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise msgspec.ValidationError(f"a value in the batch can't be used: {error}") from error


def _read_batch(payload: bytes) -> EventBatch:
    try:
        return _decoder.decode(payload)
    except msgspec.ValidationError:
        batch = msgspec.msgpack.decode(payload)
    if isinstance(batch, dict):
        batch = [batch.get("ts"), batch.get("events"), batch.get("data_parallel_rank")]
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise msgspec.ValidationError("a batch is [timestamp, events, data-parallel rank]")
    return msgspec.convert([batch[0], [_as_map(event) for event in batch[1]], *batch[2:3]], EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """``batch`` in vLLM's dialect; fields that vLLM lacks are left out where they are None."""
    events = [_as_sent(event) for event in batch.events]
    return _encoder.encode([batch.ts, events, batch.data_parallel_rank])


def _as_sent(event: KvEvent) -> dict[str, Any]:
    fields = msgspec.structs.asdict(event).items()
    sent = {name: value for name, value in fields if value is not None or name in _ALWAYS_SENT}
    return {"type": type(event).__name__, **sent}


def _as_map(event: Any) -> Any:
    if isinstance(event, list) and event and event[0] in _ARRAY_FIELDS:
        kind, *values = event
        is_long = kind == "BlockRemoved" and len(values) == len(_LONG_REMOVED)
        fields = dict(zip(_LONG_REMOVED if is_long else _ARRAY_FIELDS[kind], values, strict=False))
        # Some releases of SGLang have a map with the salt in place of the adapter's name.
        if isinstance(metadata := fields.get("lora_name"), dict):
            salt = metadata.get("cache_salt")
            fields |= {"lora_name": None, "extra_keys": [[salt]] if salt else None}
        return {"type": kind, **fields}
    if isinstance(event, dict) and "type" not in event:
        return {**event, "type": _TYPES.get(event.get("event_type", ""), "unknown")}
    return event
