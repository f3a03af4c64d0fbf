# SPDX-License-Identifier: Apache-2.0
"""Catalog of rows: which fields of a key are stored, in which DataProto and in which row of it.

A *fragment* is one stored DataProto, known by its handle and named by the key of its manifest; its rows
belong to the keys with which it was published. A fragment is used as long as a field of a key lies in it or a
reader has pinned it. One that was published (not merely recorded by ``update``) is then retired: its handle
is returned with every answer until ``ack_retired`` says that its objects were removed. Calls of one catalog
come one after the other, from a single host; nothing here reads the store.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mooncake.compat.objects.dataproto import (
    MooncakeDataProtoRef,
    export_dataproto_ref,
    import_dataproto_ref,
)

Answer: TypeAlias = dict[str, Any]
Place: TypeAlias = tuple[str, int]
"""Name of a fragment and a row of it."""
REJECTED = "append_rejected"
DRAINED = "DataProto catalog is drained"


@dataclass
class CatalogedKey:
    tag: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)


@dataclass
class CatalogedFragment:
    handle: dict[str, Any]
    is_managed: bool
    num_places: int = 0
    num_readers: int = 0


class DataProtoCatalog:
    """Catalog of the rows of a job, by partition and key."""

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, CatalogedKey]] = {}
        self._fragments: dict[str, CatalogedFragment] = {}
        self._retired: dict[str, dict[str, Any]] = {}
        self._answers: dict[str, Answer] = {}
        """Answers to publications that were not acknowledged, by operation."""
        self._pins: dict[int, tuple[str, ...]] = {}
        self._last_token = 0
        self._is_drained = False

    # Writers ----------------------------------------------------------------------------------------------

    def update(
        self,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Merge tags of keys, and record that a fragment has their rows. Its objects stay the caller's.

        Raises:
            RuntimeError: the catalog was drained.
            TypeError, ValueError: arguments that are invalid, or contradict what is recorded.
        """
        return self._record(partition, keys, tags, handle, is_managed=False)

    def publish(
        self,
        operation_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        handle: Mapping[str, Any] | None = None,
    ) -> Answer:
        """As ``update``, for a fragment whose objects the catalog retires; idempotent by ``operation_id``."""
        known = self._answers.get(name_of(operation_id, "operation_id"))
        if known is None:
            known = self._record(partition, keys, tags, handle, is_managed=handle is not None)
            self._answers[operation_id] = copy.deepcopy(known)
        return copy.deepcopy(known)

    def ack_publication(self, operation_id: str) -> None:
        """Forget the answer to a publication that was received."""
        self._answers.pop(name_of(operation_id, "operation_id"), None)

    def publication(self, operation_id: str) -> Answer | None:
        """Answer to a publication that was not acknowledged; None when nothing was recorded of it.

        A drained catalog records nothing, and has a reason for every one: ``append_rejected``.
        """
        if self._is_drained:
            return {REJECTED: DRAINED}
        return copy.deepcopy(self._answers.get(name_of(operation_id, "operation_id")))

    def publish_append(
        self,
        operation_id: str,
        fragment_id: str,
        partition: str,
        keys: Sequence[str],
        *,
        previous_handle: Mapping[str, Any],
        handle: Mapping[str, Any],
    ) -> Answer:
        """Record that fields were appended to a published fragment; idempotent by ``operation_id``.

        The answer to an append that lost against another change has only a reason, ``append_rejected``.
        """
        known = self._answers.get(name_of(operation_id, "operation_id"))
        if known is None:
            wanted = names_of(keys, "keys")
            reason = self._why_not(fragment_id, partition, wanted, previous_handle, handle)
            if reason is None:
                self._append(fragment_id, partition, wanted, import_dataproto_ref(handle))
                known = self._answer(partition, wanted)
            else:
                known = {REJECTED: reason}
            self._answers[operation_id] = copy.deepcopy(known)
        return copy.deepcopy(known)

    def remove(self, partition: str, keys: Sequence[str]) -> Answer:
        """Forget keys. Unknown ones are no error."""
        entries = self._partitions.get(name_of(partition, "partition"), {})
        for key in names_of(keys, "keys"):
            entry = entries.pop(key, None)
            for place in entry.places.values() if entry is not None else ():
                self._leave(place)
        if not entries:
            self._partitions.pop(partition, None)
        return self._retired_handles()

    # Readers ----------------------------------------------------------------------------------------------

    def resolve(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None, *, pin: bool = False
    ) -> Answer:
        """Places of fields of keys, in the order of the keys; fields with the same places are one group.

        With ``pin`` the fragments are kept until ``release_read`` of the answer's ``read_token``.

        Raises:
            ValueError: a key or a field of a key is not recorded.
        """
        entries = self._partitions.get(name_of(partition, "partition"), {})
        wanted = names_of(keys, "keys")
        missing = [key for key in wanted if key not in entries]
        if missing:
            raise ValueError(f"keys were not found in partition {partition!r}: {missing}")
        chosen = [entries[key] for key in wanted]
        selected = _fields(chosen) if fields is None else names_of(fields, "field names")
        if not selected:
            raise ValueError("requested keys do not contain any fields")
        for key, entry in zip(wanted, chosen, strict=True):
            absent = [name for name in selected if name not in entry.places]
            if absent:
                raise ValueError(f"fields are not ready for key {key!r}: {absent}")
        groups: dict[tuple[Place, ...], list[str]] = {}
        for name in selected:
            groups.setdefault(tuple(entry.places[name] for entry in chosen), []).append(name)
        used = tuple(dict.fromkeys(fragment for places in groups for fragment, _ in places))
        answer = {
            "keys": wanted,
            "tags": [copy.deepcopy(entry.tag) for entry in chosen],
            "fields": selected,
            "field_groups": [
                {"fields": names, "locations": list(places)} for places, names in groups.items()
            ],
            "handles": {name: copy.deepcopy(self._fragments[name].handle) for name in used},
            "meta_info": self._meta_info(used),
        }
        if pin:
            self._last_token += 1
            self._pins[self._last_token] = used
            for name in used:
                self._fragments[name].num_readers += 1
            answer["read_token"] = self._last_token
        return answer

    def release_read(self, token: int) -> Answer:
        """Release the fragments of a pinned answer. Idempotent."""
        for name in self._pins.pop(token, ()):
            self._fragments[name].num_readers -= 1
            self._retire_unused(name)
        return self._retired_handles()

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Tags of all keys, by partition."""
        wanted = self._partitions if partition is None else {name_of(partition, "partition")}
        return {
            name: {key: copy.deepcopy(entry.tag) for key, entry in entries.items()}
            for name, entries in self._partitions.items()
            if name in wanted
        }

    # End --------------------------------------------------------------------------------------------------

    def drain(self) -> Answer:
        """Forget everything and retire all published fragments. Nothing can be recorded afterwards.

        Raises:
            RuntimeError: a reader has pinned a fragment.
        """
        if self._pins:
            raise RuntimeError(f"cannot drain DataProto catalog with {len(self._pins)} active read(s)")
        self._retired |= {name: found.handle for name, found in self._fragments.items() if found.is_managed}
        self._partitions.clear()
        self._fragments.clear()
        self._answers.clear()
        self._is_drained = True
        return self._retired_handles()

    def ack_retired(self, handles: Sequence[Mapping[str, Any]]) -> Answer:
        """Forget retired fragments whose objects were removed.

        Raises:
            ValueError: a handle is not the one that was retired.
        """
        for handle in handles:
            name, found = _fragment(import_dataproto_ref(handle), any_stages=True)
            name = next((known for known, value in self._retired.items() if value == found), name)
            if name in self._retired and self._retired[name] != found:
                raise ValueError(f"retired DataProto fragment mismatch: {name!r}")
            self._retired.pop(name, None)
        return self._retired_handles()

    # Inside -----------------------------------------------------------------------------------------------

    def _record(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None,
        handle: Mapping[str, Any] | None,
        is_managed: bool,
    ) -> Answer:
        """Check everything, then change."""
        if self._is_drained:
            raise RuntimeError(DRAINED)
        name_of(partition, "partition")
        wanted = names_of(keys, "keys")
        changed = tags_of(tags, len(wanted))
        if changed is None and handle is None:
            raise ValueError("catalog update requires tags or a DataProto handle")
        fragment: str | None = None
        fields: list[str] = []
        if handle is not None:
            ref = import_dataproto_ref(handle)
            fragment, exported = _fragment(ref)
            fields = names_of(list(ref.field_index), "field names")
            if ref.batch_size != len(wanted):
                raise ValueError(
                    f"DataProto batch size {ref.batch_size} does not match {len(wanted)} logical keys"
                )
            self._check_fragment(fragment, exported, is_managed)
            self._fragments.setdefault(fragment, CatalogedFragment(exported, is_managed))
        entries = self._partitions.setdefault(partition, {})
        for row, key in enumerate(wanted):
            entry = entries.setdefault(key, CatalogedKey())
            if changed is not None:
                entry.tag |= changed[row]
            for name in fields:
                assert fragment is not None, "only a fragment has fields"
                self._place(entry, name, (fragment, row))
        return self._answer(partition, wanted)

    def _check_fragment(self, name: str, handle: Mapping[str, Any], is_managed: bool) -> None:
        if name in self._retired:
            raise ValueError(f"DataProto fragment id is pending retirement: {name!r}")
        known = self._fragments.get(name)
        if known is not None and known.handle != handle:
            raise ValueError(f"DataProto fragment id collision: {name!r}")
        if known is not None and known.is_managed != is_managed:
            raise ValueError(f"DataProto fragment management mismatch: {name!r}")

    def _why_not(
        self,
        fragment: str,
        partition: str,
        keys: Sequence[str],
        previous: Mapping[str, Any],
        handle: Mapping[str, Any],
    ) -> str | None:
        """Reason to reject an append."""
        if self._is_drained:
            return DRAINED
        known = self._fragments.get(fragment)
        before, after = import_dataproto_ref(previous), import_dataproto_ref(handle)
        entries = self._partitions.get(partition, {})
        if known is None or not known.is_managed or known.handle != export_dataproto_ref(before):
            return f"stale DataProto append handle: {fragment!r}"
        same = ("batch_size", "partition", "_storage_group_id")
        if any(getattr(before, name) != getattr(after, name) for name in same) or (
            (after.batch_size, after.partition) != (len(keys), partition)
        ):
            return "appended DataProto handle changed fragment identity"
        if not before.field_index.keys() < after.field_index.keys():
            return "appended DataProto handle lost fields or has no new ones"
        for row, key in enumerate(keys):
            entry = entries.get(key)
            if entry is None or (fragment, row) not in entry.places.values():
                return f"key {key!r} is no longer row {row} of DataProto fragment {fragment!r}"
        return None

    def _append(self, fragment: str, partition: str, keys: Sequence[str], ref: MooncakeDataProtoRef) -> None:
        known = self._fragments[fragment]
        new = [name for name in ref.field_index if name not in known.handle["field_index"]]
        known.handle = export_dataproto_ref(ref)
        for row, key in enumerate(keys):
            for name in new:
                self._place(self._partitions[partition][key], name, (fragment, row))

    def _place(self, entry: CatalogedKey, name: str, place: Place) -> None:
        old = entry.places.get(name)
        self._fragments[place[0]].num_places += 1
        entry.places[name] = place
        if old is not None:
            self._leave(old)

    def _leave(self, place: Place) -> None:
        self._fragments[place[0]].num_places -= 1
        self._retire_unused(place[0])

    def _retire_unused(self, name: str) -> None:
        found = self._fragments[name]
        if not found.num_places and not found.num_readers:
            del self._fragments[name]
            if found.is_managed:
                self._retired[name] = found.handle

    def _meta_info(self, fragments: Iterable[str]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for fragment in fragments:
            for name, value in self._fragments[fragment].handle["meta_info"].items():
                if merged.setdefault(name, copy.deepcopy(value)) != value:
                    raise ValueError(f"conflicting DataProto meta_info value for {name!r}")
        return merged

    def _answer(self, partition: str, keys: Sequence[str]) -> Answer:
        entries = [self._partitions[partition][key] for key in keys]
        tags = [copy.deepcopy(entry.tag) for entry in entries]
        return {"keys": list(keys), "tags": tags, "fields": _fields(entries), **self._retired_handles()}

    def _retired_handles(self) -> Answer:
        return {"retired_handles": [copy.deepcopy(handle) for handle in self._retired.values()]}


def name_of(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a non-empty string")
    return value


def names_of(values: Any, what: str) -> list[str]:
    """List of names.

    Raises:
        ValueError: not a sequence of different names, or an empty one.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"{what} must be a sequence of strings")
    found = list(values)
    if not found or not all(isinstance(value, str) and value for value in found):
        raise ValueError(f"{what} must be non-empty strings")
    if len(set(found)) != len(found):
        raise ValueError(f"{what} must be unique")
    return found


def tags_of(tags: Any, num_keys: int) -> list[dict[str, Any]] | None:
    if tags is None:
        return None
    found = list(tags)
    if len(found) != num_keys:
        raise ValueError(f"tags and keys must have the same length: {len(found)} and {num_keys}")
    if not all(isinstance(tag, Mapping) for tag in found):
        raise TypeError("tags must be mappings")
    return [copy.deepcopy(dict(tag)) for tag in found]


def _fields(entries: Iterable[CatalogedKey]) -> list[str]:
    return list(dict.fromkeys(name for entry in entries for name in entry.places))


def _fragment(ref: MooncakeDataProtoRef, any_stages: bool = False) -> tuple[str, dict[str, Any]]:
    """Name of a fragment, and its handle in full."""
    if len(ref.stage_refs) != 1 and not any_stages:
        raise ValueError(f"a DataProto fragment has exactly one stage, not {len(ref.stage_refs)}")
    first = next(iter(ref.stage_refs.values()), None)
    return "" if first is None else first.manifest_key, export_dataproto_ref(ref)
