# SPDX-License-Identifier: Apache-2.0
"""The leader record in a Lease object of a Kubernetes API server (``coordination.k8s.io/v1``).

The record is an annotation of the object; an update names the object's ``resourceVersion``, so the API
server refuses one that was made from an older object. Holder, transitions and times of the Lease follow from
the record and are only shown (``kubectl get lease``): nothing is decided by them, because no two clocks are
compared in an election. It needs only HTTPS and the files that every pod with a service account has, and no
client library.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import msgspec

from mooncake import clock
from mooncake.errors import AccessDenied, InvalidArgument, ProtocolError, StorageError, Unavailable
from mooncake.rpc.client import split_address
from mooncake.store.ha.election import LeaderLease, decode_lease
from mooncake.transfer.metadata import HttpConnection

RECORD = "mooncake/leader"
"""Annotation with the leader record."""
SERVER = "kubernetes.default.svc:443"
"""The API server, as pods reach it."""
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Folder with a pod's ``token`` and ``ca.crt``."""
FORM = "k8s://namespace[/name][?server=host:port][&account=/folder]"
TRIES = 3

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


class ServiceAccount:
    """Bearer token of a service account; its file is read for every request, as the kubelet replaces it."""

    def __init__(self, folder: Path) -> None:
        self._token = folder / "token"

    def headers(self, method: str, path: str, body: bytes = b"") -> dict[str, str]:
        try:
            return {"Authorization": f"Bearer {self._token.read_text().strip()}"}
        except OSError as error:
            raise StorageError(
                f"the service account's token can't be read: {error}; "
                "a pod needs automountServiceAccountToken"
            ) from error


class KubernetesLeaseStore:
    """One Lease object; ``url`` is as in ``FORM``, without the name.

    An object that does not exist, or that has neither a record nor a holder, counts as no value: it may be
    created beforehand, so that the service account needs no right to create any.

    Args:
        cluster: name of the object. Where Kubernetes does not allow it as a name, what it does not allow is
            replaced and a digest is appended.
        timeout_s: time limit of each request; a swap may need several.

    Raises:
        InvalidArgument: the URL has another form, or the account's authority can't be read.
    """

    keeps_records = False
    """A Lease can be deleted with a single command, while its holder leads."""

    def __init__(self, url: str, cluster: str, timeout_s: float = 1.0) -> None:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        namespace, server = parts.netloc, options.pop("server", SERVER)
        folder = Path(options.pop("account", ACCOUNT))
        if not re.fullmatch(_LABEL, namespace) or parts.path.strip("/") or options:
            raise InvalidArgument("election", url, FORM)
        try:
            host, port = split_address(server)
        except InvalidArgument as error:
            raise InvalidArgument("election", url, FORM) from error
        try:
            tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            allowed = f"a folder with the ca.crt and token of a service account ({error})"
            raise InvalidArgument("election", str(folder), allowed) from error
        self.namespace, self.name = namespace, lease_name(cluster)
        self._all = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._one = f"{self._all}/{quote(self.name, safe='')}"
        self._connection = HttpConnection(
            f"https://{server}", host, port, timeout_s, tls, ServiceAccount(folder), "Kubernetes API server"
        )
        self._lock = threading.Lock()
        self._seen: dict[str, Any] | None = None
        """The object as last seen, so that a renewal is one request."""

    def __repr__(self) -> str:
        return f"<KubernetesLeaseStore {self.namespace}/{self.name} of {self._connection.url}>"

    def read(self) -> bytes | None:
        """Return the record.

        Raises:
            AccessDenied: the service account may not get the Lease.
            StorageError: its token can't be read.
            ProtocolError: the Lease is another program's.
            PeerLost, DeadlineExceeded, Unavailable: the API server does not answer, or not now.
        """
        with self._lock:
            self._seen = self._get()
            return self._record(self._seen)

    def swap(self, old: bytes | None, new: bytes) -> bool:
        """Replace ``old`` by ``new``; False if the record was different. Raises as ``read``."""
        with self._lock:
            if self._seen is None or self._record(self._seen) != old:
                self._seen = self._get()
            for _ in range(TRIES):
                if self._record(self._seen) != old:
                    return False
                if self._write(self._seen, new):
                    return True
                # Perhaps only a label was changed: the record decides.
                self._seen = self._get()
            raise Unavailable(f"{self!r} is changed by other programs all the time; see its managedFields")

    def close(self) -> None:
        self._connection.close()

    def _get(self) -> dict[str, Any] | None:
        status, lease = self._call("GET", self._one)
        return lease if status == 200 else None

    def _write(self, seen: dict[str, Any] | None, new: bytes) -> bool:
        """Create or replace the object; False when it is no longer the one that was seen."""
        changed = changed_lease(seen or {"metadata": {"name": self.name}}, new, clock.wall())
        self._seen = None
        status, lease = self._call(*(("POST", self._all) if seen is None else ("PUT", self._one)), changed)
        if status not in (200, 201):
            return False
        self._seen = lease
        return True

    def _record(self, lease: dict[str, Any] | None) -> bytes | None:
        if lease is None:
            return None
        record = (lease["metadata"].get("annotations") or {}).get(RECORD)
        holder = (lease.get("spec") or {}).get("holderIdentity")
        if record is None and holder:
            raise ProtocolError(
                f"the Lease {self.namespace}/{self.name} is held by {str(holder)[:100]!r}, "
                "which is no master; choose another name in the URL of the election"
            )
        return None if record is None else str(record).encode()

    def _call(
        self, method: str, path: str, lease: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and object; 404 and 409 come without one."""
        body = None if lease is None else json.dumps(lease).encode()
        try:
            status, answer = self._connection.call(method, path, body)
        except AccessDenied as error:
            raise AccessDenied(
                f"{error}; the service account needs get and update (and create) of leases in the group "
                f"coordination.k8s.io, namespace {self.namespace}"
            ) from error
        if status in (404, 409) and (status == 409 or method != "POST"):
            return status, {}
        if status == 429:
            raise Unavailable(f"{self!r}: the API server limits requests")
        try:
            found = json.loads(answer)
            if status in (200, 201) and isinstance(found["metadata"], dict) and found["kind"] == "Lease":
                return status, found
            reason = str(found["message"])
        except (ValueError, KeyError, TypeError):
            reason = answer[:200].decode(errors="replace")
        raise ProtocolError(f"{self!r} refused {method}: {status} {reason[:300]}")


def changed_lease(lease: dict[str, Any], content: bytes, wall: float) -> dict[str, Any]:
    """Return ``lease`` with the record ``content``, and with the fields that show what it says.

    What others wrote into the object stays. ``wall``: seconds since 1970.
    """
    metadata, spec = dict(lease["metadata"]), dict(lease.get("spec") or {})
    annotations = metadata.get("annotations") or {}
    before, after = _decoded(annotations.get(RECORD, "").encode()), _decoded(content)
    metadata["annotations"] = {**annotations, RECORD: content.decode()}
    if after is not None:
        now = datetime.datetime.fromtimestamp(wall, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if before is None or before.leader != after.leader:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (before is not None)
            spec["acquireTime"] = now
        spec |= {"renewTime": now, "leaseDurationSeconds": max(1, math.ceil(after.lease_s))}
        spec.pop("holderIdentity", None)
        if after.address:  # none after a resignation; an empty holder is not valid
            spec["holderIdentity"] = after.address
    return {
        **lease,
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": spec,
    }


def lease_name(cluster: str) -> str:
    """Return the name of a cluster's Lease; names of different clusters differ."""
    if len(cluster) <= 200 and re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", cluster):
        return cluster
    allowed = re.sub("[^a-z0-9]+", "-", cluster.lower()).strip("-")[:50] or "mooncake"
    return f"{allowed}-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}"


def _decoded(content: bytes) -> LeaderLease | None:
    try:
        return decode_lease(content)
    except msgspec.MsgspecError:
        return None
