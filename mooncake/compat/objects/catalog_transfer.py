# SPDX-License-Identifier: Apache-2.0
"""A worker's way to a catalog: stores DataProto and publishes them, and removes what the catalog retires.

The catalog is on another host, behind ``catalog_call(name, *args, **kwargs)``, which may fail after it had
its effect. So each publication has a name and is repeated with it, and what could not be done (a
publication, an acknowledgement, a removal, the release of a result) is kept and tried again with a later
call. A publication that the catalog refuses is not repeated: its objects are removed. An error alone does
not say which it was, so the catalog is asked before anything is removed.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake.compat.objects.catalog import REJECTED, DataProtoCatalog, name_of, names_of, tags_of
from mooncake.compat.objects.dataproto import export_dataproto_ref, import_dataproto_ref
from mooncake.log import get_logger

log = get_logger("mooncake.store")

RESULTS = "_mooncake_catalog_results"
"""Attribute of an output: the results that it was made of."""
ATTEMPTS = 2

__all__ = ["DataProtoCatalog", "DataProtoCatalogTransfer"]


class DataProtoCatalogTransfer:
    """Puts, reads and removal of DataProto whose rows a catalog knows.

    Args:
        transfer: a ``MooncakeBundleTransfer``.
        catalog_call: calls the method of that name of a ``DataProtoCatalog``.
    """

    def __init__(self, transfer: Any, catalog_call: Callable[..., Any]) -> None:
        self.transfer = transfer
        self._call = catalog_call
        self._lock = threading.RLock()
        self._unpublished: list[dict[str, Any]] = []
        self._unacknowledged: list[str] = []
        self._unremoved: list[dict[str, Any]] = []
        """Publications that were refused, and whose objects are still there."""
        self._unreleased: list[Any] = []

    def put(
        self,
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None = None,
        **put_kwargs: Any,
    ) -> dict[str, Any]:
        """Store ``data``, with a row for each key, and publish it; without data, publish tags only.

        Raises:
            RuntimeError: an earlier publication still fails.
            Exception: whatever ``catalog_call`` raised; the publication is repeated before the next one,
                unless the catalog refused it: then its objects are removed.
        """
        self._catch_up()
        name_of(partition, "partition")
        names = names_of(keys, "keys")
        found = tags_of(tags, len(names))
        if data is None and found is None:
            raise ValueError("catalog update requires tags or DataProto data")
        handle = None
        if data is not None:
            _check_rows(data, names)
            ref = self.transfer.put(data, type="dataproto", partition=partition, **put_kwargs)
            try:
                handle = export_dataproto_ref(ref)
            except BaseException:
                self._attempt(self.transfer.cleanup_dataproto, ref)
                raise
        return self._publish("publish", (partition, names), {"tags": found, "handle": handle})

    def append(
        self,
        fragment_id: str,
        handle: Mapping[str, Any],
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        stage: str,
        **append_kwargs: Any,
    ) -> dict[str, Any]:
        """Append fields to a published fragment.

        Raises:
            ValueError: the fragment was changed since ``handle``; nothing of the append is left. Or
                ``overwrite`` was asked for: it would remove objects that readers of the fragment use.
        """
        if append_kwargs.get("overwrite"):
            raise ValueError("append cannot overwrite a published stage; put the fields again, by their keys")
        self._catch_up()
        names = names_of(keys, "keys")
        _check_rows(data, names)
        previous = import_dataproto_ref(handle)
        if previous.partition != name_of(partition, "partition"):
            raise ValueError("DataProto handle partition does not match Catalog partition")
        appended = self.transfer.append_dataproto_fields(previous, data, stage=stage, **append_kwargs)
        try:
            handles = {
                "previous_handle": export_dataproto_ref(previous),
                "handle": export_dataproto_ref(appended),
            }
        except BaseException:
            self._attempt(self.transfer.cleanup_dataproto_append, previous, appended)
            raise
        return self._publish("publish_append", (fragment_id, partition, names), handles)

    def resolve(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Places of fields; what they lie in is kept until ``release_read`` of the ``read_token``."""
        answer: dict[str, Any] = self._call("resolve", partition, keys, fields, pin=True)
        return answer

    def release_read(self, token: int) -> None:
        self._remove_retired(self._call("release_read", token))

    def attach_results(self, output: Any, results: Sequence[Any]) -> None:
        """Note of which results ``output`` was made."""
        setattr(output, RESULTS, list(results))

    def release_result(self, output: Any) -> None:
        """Release the results that were attached to ``output``."""
        results = getattr(output, RESULTS, None) or []
        setattr(output, RESULTS, [])
        self.discard_results(results)

    def discard_results(self, results: Sequence[Any], *, strict: bool = False) -> None:
        """Release results; those that fail are tried again with the next ones.

        Raises:
            RuntimeError: with ``strict``, some failed.
        """
        with self._lock:
            waiting, self._unreleased = [*self._unreleased, *results], []
            for result in waiting:
                if not self._attempt(self.transfer.release_result, result):
                    self._unreleased.append(result)
            if strict and self._unreleased:
                raise RuntimeError(f"failed to release {len(self._unreleased)} result(s)")

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self._call("list", partition)
        return found

    def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Forget keys, and remove the objects that only they had."""
        self._remove_retired(self._call("remove", partition, keys))

    def drain(self) -> None:
        """Publish and release what is left, then retire all fragments and remove their objects.

        Raises:
            RuntimeError: some objects could not be removed; call it again.
        """
        self._catch_up()
        self.discard_results((), strict=True)
        left = self._remove_retired(self._call("drain")) + len(self._unremoved)
        if left:
            raise RuntimeError(f"failed to clean up {left} retired DataProto fragment(s)")

    def close(self) -> None:
        """Release what is left of results.

        Raises:
            RuntimeError: some failed.
        """
        self.discard_results((), strict=True)

    def _publish(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        publication = {"id": uuid.uuid4().hex, "method": method, "args": args, "kwargs": kwargs}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._send(publication)
            except Exception as error:  # of the caller's own way to the catalog
                if attempt < ATTEMPTS:
                    log.warning("catalog_publication_repeated", operation=publication["id"], error=str(error))
                    continue
                with self._lock:
                    if self._is_refused(publication, error):
                        self._undo(publication)
                    else:
                        self._unpublished.append(publication)
                raise
            if REJECTED in answer:
                self._undo(publication)
                raise ValueError(answer[REJECTED])
            return answer
        raise AssertionError("a publication is answered or raises")

    def _send(self, publication: Mapping[str, Any]) -> dict[str, Any]:
        operation = publication["id"]
        answer: dict[str, Any] = self._call(
            publication["method"], operation, *publication["args"], **publication["kwargs"]
        )
        if not self._attempt(self._call, "ack_publication", operation):
            with self._lock:
                self._unacknowledged.append(operation)
        self._remove_retired(answer)
        return answer

    def _catch_up(self) -> None:
        """Do what earlier calls could not."""
        with self._lock:
            operations, self._unacknowledged = self._unacknowledged, []
            for operation in operations:
                if not self._attempt(self._call, "ack_publication", operation):
                    self._unacknowledged.append(operation)
            undone, self._unremoved = self._unremoved, []
            for publication in undone:
                self._undo(publication)
            while self._unpublished:
                publication = self._unpublished[0]
                try:
                    answer = self._send(publication)
                except Exception as error:  # of the caller's own way to the catalog
                    if not self._is_refused(publication, error):
                        count = len(self._unpublished)
                        raise RuntimeError(
                            f"failed to publish pending DataProto fragment for {count} item(s): {error}"
                        ) from error
                    answer = {REJECTED: str(error)}
                self._unpublished.pop(0)
                if REJECTED in answer:
                    log.warning(
                        "catalog_publication_refused", operation=publication["id"], reason=answer[REJECTED]
                    )
                    self._undo(publication)

    def _is_refused(self, publication: Mapping[str, Any], error: Exception) -> bool:
        """Whether the catalog has not recorded a publication and never will, now that its call failed."""
        try:
            known = self._call("publication", publication["id"])
        except Exception as unknown:  # of the caller's own way to the catalog
            log.warning("catalog_call_failed", call="publication", error=str(unknown))
            return False
        # Other errors are those of a connection: the call may still be under way.
        return isinstance(error, TypeError | ValueError) if known is None else REJECTED in known

    def _undo(self, publication: dict[str, Any]) -> None:
        """Remove the objects of a publication that was refused."""
        handle, previous = (publication["kwargs"].get(name) for name in ("handle", "previous_handle"))
        if handle is None:
            return
        if previous is None:
            is_removed = self._attempt(self.transfer.cleanup_dataproto, handle)
        else:
            is_removed = self._attempt(self.transfer.cleanup_dataproto_append, previous, handle)
        if not is_removed:
            with self._lock:
                self._unremoved.append(publication)

    def _remove_retired(self, answer: Mapping[str, Any]) -> int:
        """Remove the objects of retired fragments; number of those that failed."""
        handles = answer.get("retired_handles", ())
        with self._lock:
            removed = [handle for handle in handles if self._attempt(self.transfer.cleanup_dataproto, handle)]
            if removed:
                self._attempt(self._call, "ack_retired", removed)
        return len(handles) - len(removed)

    def _attempt(self, call: Callable[..., Any], *args: Any) -> bool:
        """Call something that may fail now and is tried again later."""
        try:
            call(*args)
        except Exception as error:  # of the store, or of the caller's own way to the catalog
            log.warning("catalog_call_failed", call=getattr(call, "__name__", str(call)), error=str(error))
            return False
        return True


def _check_rows(data: Any, keys: Sequence[str]) -> None:
    if len(data) != len(keys):
        raise ValueError(f"DataProto batch size {len(data)} does not match {len(keys)} logical keys")
