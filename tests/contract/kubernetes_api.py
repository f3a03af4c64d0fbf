# SPDX-License-Identifier: Apache-2.0
"""A double of a Kubernetes API server: Leases over HTTPS, with the checks that the real one makes.

What it implements follows the API's conventions: a version per object that only grows, 409 for an update of
another version and for a second creation, 422 for an update without a version and for fields out of range,
401 for an unknown token, 403 for a verb that the account lacks, 404 for what is not there.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mooncake.cli.certs import CertsSettings, make

PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/]+))?")
MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
MAX_ANNOTATION_BYTES = 256 << 10
NAMESPACE = "mooncake"


@dataclass
class Store:
    """What the server keeps, and how it behaves now."""

    token: str = "first token"
    verbs: set[str] = field(default_factory=lambda: {"get", "create", "update"})
    leases: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    version: int = 100
    requests: list[str] = field(default_factory=list)
    fails_with: int = 0
    """Status of every answer; 0: as it should be."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def touch(self, name: str) -> None:
        """Change an object as another program would, without its record."""
        with self.lock:
            self.version += 1
            metadata = self.leases[NAMESPACE, name]["metadata"]
            metadata["labels"] = {"touched": str(self.version)}
            metadata["resourceVersion"] = str(self.version)

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, dict[str, Any]]:
        verb = {"GET": "get", "POST": "create", "PUT": "update"}.get(method, method)
        with self.lock:
            self.requests.append(verb)
            if self.fails_with:
                return self.fails_with, _status(self.fails_with, "injected by the test")
            if token != f"Bearer {self.token}":
                return 401, _status(401, "Unauthorized")
            found = PATH.fullmatch(path)
            if found is None:
                return 404, _status(404, "the server could not find the requested resource")
            if verb not in self.verbs:
                return 403, _status(403, f'leases is forbidden: cannot {verb} resource "leases"')
            namespace, name = found.groups()
            if namespace != NAMESPACE:
                return 404, _status(404, f'namespaces "{namespace}" not found')
            if verb == "get":
                lease = self.leases.get((namespace, name))
                return (200, lease) if lease else (404, _status(404, f'leases "{name}" not found'))
            return self._write(verb, namespace, name, json.loads(body))

    def _write(
        self, verb: str, namespace: str, name: str, lease: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        trouble = _trouble(lease)
        if trouble:
            return 422, _status(422, trouble)
        metadata = lease["metadata"]
        at = namespace, metadata["name"]
        if verb == "create" and at in self.leases:
            return 409, _status(409, f'leases "{at[1]}" already exists')
        if verb == "update":
            if name != at[1]:
                return 400, _status(400, "the name of the object does not match the name on the URL")
            if at not in self.leases:
                return 404, _status(404, f'leases "{name}" not found')
            if not metadata.get("resourceVersion"):
                return 422, _status(422, "metadata.resourceVersion: must be specified for an update")
            if metadata["resourceVersion"] != self.leases[at]["metadata"]["resourceVersion"]:
                return 409, _status(409, "the object has been modified")
        self.version += 1
        stored = {
            **lease,
            "metadata": {**metadata, "namespace": namespace, "resourceVersion": str(self.version)},
        }
        self.leases[at] = json.loads(json.dumps(stored))
        return (201 if verb == "create" else 200), self.leases[at]


class Server(ThreadingHTTPServer):
    request_queue_size = 64


class KubernetesApi:
    """The server, on a free port of 127.0.0.1, with a folder like that of a pod's service account."""

    def __init__(self, folder: Path) -> None:
        self.store = Store()
        self.account = folder / "account"
        self.account.mkdir()
        make(CertsSettings(folder=folder / "certs", name="api", host=("127.0.0.1",)))
        (self.account / "ca.crt").write_bytes((folder / "certs" / "ca.pem").read_bytes())
        self.set_token(self.store.token)
        store = self.store

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                token = self.headers.get("Authorization", "")
                status, answer = store.answer(self.command, self.path, token, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _serve

            def log_message(self, *_: object) -> None: ...

        self._server = Server(("127.0.0.1", 0), Handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(folder / "certs" / "api.pem", folder / "certs" / "api.key")
        # The handshake is made by a connection's own thread, so that none waits for another's.
        self._server.socket = tls.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def url(self, name: str = "") -> str:
        place = f"{NAMESPACE}/{name}" if name else NAMESPACE
        return f"k8s://{place}?server=127.0.0.1:{self.port}&account={self.account}"

    def set_token(self, token: str) -> None:
        """Replace the token as the kubelet does."""
        self.store.token = token
        (self.account / "token").write_text(token)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def _trouble(lease: dict[str, Any]) -> str:
    """What the API server's validation says about a Lease; "" for a valid one."""
    if (lease.get("apiVersion"), lease.get("kind")) != ("coordination.k8s.io/v1", "Lease"):
        return "the API version or kind is not that of a Lease"
    annotations = lease["metadata"].get("annotations") or {}
    if sum(len(name) + len(value) for name, value in annotations.items()) > MAX_ANNOTATION_BYTES:
        return "metadata.annotations: Too long"
    spec = lease.get("spec") or {}
    if "holderIdentity" in spec and not spec["holderIdentity"]:
        return "spec.holderIdentity: must not be empty"
    if spec.get("leaseDurationSeconds", 1) <= 0 or spec.get("leaseTransitions", 0) < 0:
        return "spec: must be greater than 0"
    times = [spec[name] for name in ("acquireTime", "renewTime") if name in spec]
    return "" if all(MICRO_TIME.fullmatch(time) for time in times) else "spec: not a time"
