# SPDX-License-Identifier: Apache-2.0
"""The metadata backend that speaks to etcd (3.4 or newer), over the JSON gateway of its v3 API.

The gateway needs only HTTP, so no gRPC library has to fit the rest of an installation. Keys and
values are base64 there. An entry that expires is attached to a lease; every put takes a new lease, and the
old one expires with no entry attached.
"""

from __future__ import annotations

import json
import math
import threading
from base64 import b64decode, b64encode
from typing import Any
from urllib.parse import urlsplit

from mooncake.errors import InvalidArgument, PeerLost, ProtocolError, Unavailable
from mooncake.transfer.metadata.http import HttpConnection


class EtcdBackend:
    """Client of ``url``: ``etcd://host:port``, or several members with ``;`` between them.

    Args:
        timeout_s: time limit of each call to one member; when one does not answer, the next is tried.

    Raises:
        InvalidArgument: not an etcd URL.
    """

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        self.url = url
        self._members = [
            HttpConnection(f"etcd://{host}:{port}", host, port, timeout_s) for host, port in members_of(url)
        ]
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<EtcdBackend {self.url}>"

    def get(self, key: str) -> bytes | None:
        found = self._call("kv/range", {"key": _text(key.encode())}).get("kvs", [])
        return b64decode(found[0].get("value", "")) if found else None

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        entry: dict[str, Any] = {"key": _text(key.encode()), "value": _text(value)}
        if ttl_s is not None:
            entry["lease"] = self._call("lease/grant", {"TTL": math.ceil(ttl_s)})["ID"]
        self._call("kv/put", entry)

    def remove(self, key: str) -> bool:
        return int(self._call("kv/deleterange", {"key": _text(key.encode())}).get("deleted", 0)) > 0

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set ``new`` if the value is ``old`` (None for no value). After an error the outcome is unknown."""
        at = _text(key.encode())
        what = (
            {"target": "VERSION", "version": "0"} if old is None else {"target": "VALUE", "value": _text(old)}
        )
        compare = [{"key": at, "result": "EQUAL", **what}]
        answer = self._call(
            "kv/txn", {"compare": compare, "success": [{"requestPut": {"key": at, "value": _text(new)}}]}
        )
        return bool(answer.get("succeeded"))

    def list(self, prefix: str) -> list[str]:
        first = prefix.encode() or b"\0"
        query = {"key": _text(first), "range_end": _text(_end_of(prefix.encode())), "keys_only": True}
        found = self._call("kv/range", query).get("kvs", [])
        return sorted(b64decode(entry["key"]).decode(errors="replace") for entry in found)

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _call(self, what: str, message: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first member that answers."""
        body = json.dumps(message).encode()
        with self._lock:
            members = list(self._members)
        for member in members:
            try:
                status, answer = member.call("POST", f"/v3/{what}", body)
            except Unavailable:
                if member is members[-1]:
                    raise
                continue
            if member is not members[0]:  # the next call begins with it
                with self._lock:
                    self._members.sort(key=lambda other: other is not member)
            return self._checked(member.url, what, status, answer)
        raise PeerLost(f"{self.url} has no members")  # not reached: there is at least one

    def _checked(self, url: str, what: str, status: int, answer: bytes) -> dict[str, Any]:
        try:
            decoded = json.loads(answer)
        except ValueError:
            decoded = None
        if status == 200 and isinstance(decoded, dict):
            return decoded
        reason = decoded.get("error") if isinstance(decoded, dict) else answer[:100].decode(errors="replace")
        raise ProtocolError(
            f"metadata service {url} refused {what}: {status} {reason}; is it etcd 3.4 or newer?"
        )


def members_of(url: str) -> list[tuple[str, int]]:
    """The addresses in ``etcd://host:port[;host:port]``; raises InvalidArgument."""
    found: list[tuple[str, int]] = []
    for member in url.removeprefix("etcd://").rstrip("/").replace(",", ";").split(";"):
        parts = urlsplit(f"//{member}")
        try:
            port = parts.port or 2379
        except ValueError:
            port = 0
        if not parts.hostname or not port or parts.path or parts.username:
            raise InvalidArgument("url", url, "etcd://host:port[;host:port]")
        found.append((parts.hostname, port))
    return found


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _end_of(prefix: bytes) -> bytes:
    """The first key after all that start with ``prefix``; a zero byte means the end of all keys."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"
