# SPDX-License-Identifier: Apache-2.0
"""An OpenAI endpoint that answers at once, counts requests, and misbehaves as configured."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Served:
    """What a test configures, and what it reads afterwards."""

    failing_models: int = 0
    "The status with which the list of models is refused."
    events: tuple[bytes, ...] | None = None
    "Data of the events of every completion, instead of its tokens."
    failure: tuple[int, bytes] | None = None
    "Status and body of every completion."

    reject_every: int = 0
    "Every n-th completion gets a 429."
    retry_after: str | None = "7"
    break_prompt_of: int = 0
    "An answer to a prompt of that length is cut off halfway."
    models: tuple[str, ...] = ("double",)
    answer_headers: dict[str, str] = field(default_factory=dict)
    "Headers of each complete answer."
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    seen: set[tuple[int, ...]] = field(default_factory=set)


@contextmanager
def serving(served: Served, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run the double, over TLS with a context; yield its address."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if served.failing_models:
                return self._json(served.failing_models, {"error": {"message": "this key is not known"}})
            return self._json(200, {"data": [{"id": name} for name in served.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = tuple(body["prompt"])
            with lock:
                served.bodies.append(body)
                served.headers.append({name.lower(): value for name, value in self.headers.items()})
                number, is_known = len(served.bodies), prompt in served.seen
                served.seen.add(prompt)
            if served.reject_every and number % served.reject_every == 0:
                headers = {} if served.retry_after is None else {"Retry-After": served.retry_after}
                return self._json(429, {"error": {"message": "too much to do"}}, headers)
            if served.failure is not None:
                return self._send(*served.failure)
            if served.events is not None:
                return self._send(200, b"".join(b"data: " + event + b"\n\n" for event in served.events))
            if not body["max_tokens"]:
                return self._json(400, {"error": {"message": "max_tokens must be 1 or more"}})
            self.send_response(200)
            for name, value in served.answer_headers.items():
                self.send_header(name, value)
            self.end_headers()
            for token in range(body["max_tokens"]):
                if served.break_prompt_of == len(prompt) and token == 1:
                    return None
                self._event({"choices": [{"text": "", "token_ids": [token]}]})
            cached = len(prompt) - 1 if is_known else 0
            self._event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": cached}}})
            self.wfile.write(b"data: [DONE]\n\n")
            return None

        def _event(self, document: Any) -> None:
            self.wfile.write(b"data: " + json.dumps(document).encode() + b"\n\n")

        def _json(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
            self._send(status, json.dumps(document).encode(), headers)

        def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
