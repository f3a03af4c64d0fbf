# SPDX-License-Identifier: Apache-2.0
"""``mooncake chat``: a terminal chat with any server of the OpenAI API.

Knows HTTP and the terminal only, nothing of the cluster behind the URL. Standard library and rich, so that it
starts at once. After each answer it shows how much of the prompt was cached and how long the first token
took.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TextIO

import msgspec
from msgspec import Meta

from mooncake.cli.output import check_url, harmless, reason_in, reason_of
from mooncake.cli.role_command import Invocation
from mooncake.config import Secret
from mooncake.errors import DeadlineExceeded, PeerLost, ProtocolError
from mooncake.security import process_identity

COMMANDS = "/reset clears the conversation, /quit exits"


@dataclass(frozen=True)
class ChatSettings:
    """Chat with a cluster in the terminal."""

    url: str = "http://127.0.0.1:8000"
    "Address of the gateway."

    model: str = ""
    "Model to use; without it, the first one that the gateway lists."

    system: str = ""
    "System prompt, placed before the conversation."

    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    "Maximum length of an answer, in tokens."

    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    "0 takes the likeliest token each time; higher is more varied."

    timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    "How long to wait for the next token."

    api_key: Annotated[str, Secret] = ""
    "Sent as the bearer token, for servers that require one."

    def __post_init__(self) -> None:
        check_url(self.url, "url")


@dataclass
class ChatAnswer:
    """One answer, updated as it arrives."""

    text: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    def footer(self) -> str:
        """``cached 128 of 140 prompt tokens, first token after 0.05 s, 31 tokens at 25.1/s``"""
        parts = []
        if self.usage:
            details = self.usage.get("prompt_tokens_details")
            cached = (details.get("cached_tokens") if isinstance(details, dict) else None) or 0
            parts.append(f"cached {cached} of {self.usage.get('prompt_tokens', 0)} prompt tokens")
        if self.ttft_s is not None:
            parts.append(f"first token after {self.ttft_s:.2f} s")
            num_tokens = self.usage.get("completion_tokens")
            if isinstance(num_tokens, int) and num_tokens > 1 and self.total_s > self.ttft_s:
                parts.append(
                    f"{num_tokens} tokens at {(num_tokens - 1) / (self.total_s - self.ttft_s):.1f}/s"
                )
        if self.finish_reason == "length":
            parts.append("stopped at the length limit")
        return ", ".join(parts)


class ChatServer:
    """The HTTP client: a model list and streamed answers."""

    def __init__(
        self,
        settings: ChatSettings,
        now: Callable[[], float] = time.monotonic,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls``: for an https address; without it the authorities of this system are trusted."""
        self._settings = settings
        self._tls = tls
        self._url = urllib.parse.urlsplit(settings.url)
        self._now = now

    def first_model(self) -> str:
        """Name of the first model that the server lists."""
        with self._request("GET", "/v1/models", None) as response:
            try:
                content = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise _lost(self._settings.url, error) from error
        try:
            models = json.loads(content).get("data") or []
            if not models:
                raise ProtocolError(f"{self._settings.url} lists no model; is a worker attached?")
            return str(models[0]["id"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = harmless(f"{type(error).__name__}: {error}")
            raise ProtocolError(f"{self._settings.url} did not list models ({reason})") from error

    def ask(self, model: str, messages: list[dict[str, str]], answer: ChatAnswer) -> Iterator[str]:
        """Stream one answer; ``answer`` is filled as it arrives."""
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._settings.max_tokens,
            "temperature": self._settings.temperature,
        }
        started = self._now()
        with self._request("POST", "/v1/chat/completions", body) as response:
            for event in _events(response, self._settings.url):
                answer.usage = event.usage or answer.usage
                for choice in event.choices or []:
                    answer.finish_reason = choice.finish_reason or answer.finish_reason
                    piece = choice.delta.content if choice.delta is not None else None
                    if piece:
                        if answer.ttft_s is None:
                            answer.ttft_s = self._now() - started
                        answer.text += piece
                        yield piece
        answer.total_s = self._now() - started

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        assert self._url.hostname is not None
        host, port, timeout_s = self._url.hostname, self._url.port, self._settings.timeout_s
        connection = (
            http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
            if self._url.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=timeout_s)
        )
        headers = {"Content-Type": "application/json"}
        if self._settings.api_key:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        content = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._url.path.rstrip("/") + path, content, headers)
            response = connection.getresponse()
        except TimeoutError as error:
            waited = f"{self._settings.timeout_s:g} s"
            raise DeadlineExceeded(f"{self._settings.url} did not answer within {waited}") from error
        except ssl.SSLError as error:
            raise ProtocolError(
                f"no TLS with {self._settings.url} ({error}); a gateway of a cluster with TLS "
                "requires a certificate: --tls-cert, --tls-key and --tls-ca"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise PeerLost(
                f"nothing answers at {self._settings.url} ({harmless(str(error))}); start a cluster with "
                "`mooncake up`, or name another address with --url"
            ) from error
        if response.status != 200:
            raise ProtocolError(_refusal(response, self._settings.url))
        return response


def _refusal(response: http.client.HTTPResponse, url: str) -> str:
    """The message of an OpenAI error object, or at least the status."""
    try:
        content = response.read()
    except http.client.IncompleteRead as error:
        content = error.partial
    except (OSError, http.client.HTTPException):
        content = b""
    return harmless(f"{url} answered {response.status} {response.reason}: {reason_in(content)}")


class _ChatDelta(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    delta: _ChatDelta | None = None
    finish_reason: str | None = None


class _ChatChunk(msgspec.Struct):
    """The part of an event that is read."""

    error: Any = None
    choices: list[_ChatChoice] | None = None
    usage: dict[str, Any] | None = None


def _events(response: http.client.HTTPResponse, url: str) -> Iterator[_ChatChunk]:
    """The server-sent events of a stream, until ``[DONE]``."""
    try:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = msgspec.convert(json.loads(data), _ChatChunk)
            if event.error:
                raise ProtocolError(harmless(f"{url} aborted: {reason_of(event.error)}"))
            yield event
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{url} sent an event that is none of a chat: {error}") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"{url} stopped in the middle of an answer") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _lost(url, error) from error
    raise PeerLost(f"{url} ended the stream before the end of the answer")


def _lost(url: str, error: Exception) -> PeerLost:
    reason = harmless(str(error))
    return PeerLost(f"{url} lost the connection in the middle of an answer ({reason})")


class Conversation:
    """The loop of questions and answers. A failed question is not kept in the conversation, so it can be
    repeated."""

    def __init__(
        self,
        settings: ChatSettings,
        server: ChatServer,
        model: str,
        out: TextIO,
        errors: TextIO | None = None,
    ) -> None:
        """``errors``: where failed questions are reported, and interrupts raised: a program reads ``out``.
        Without it a person does, who sees all of it there."""
        self._server = server
        self._model = model
        self._out = out
        self._errors = errors
        self.has_failed = False
        """Whether a question got no whole answer."""
        self._opening = [{"role": "system", "content": settings.system}] if settings.system else []
        self.messages = list(self._opening)

    def say(self, line: str) -> bool:
        """Handle one line of input; returns False to quit."""
        line = line.strip()
        if line in ("/quit", "/exit", "/q"):
            return False
        if line == "/reset":
            self.messages = list(self._opening)
            self._print("(conversation cleared)\n")
        elif line.startswith("/"):
            self._print(f"({line} is no command; {COMMANDS})\n")
        elif line:
            self._ask(line)
        return True

    def _ask(self, line: str) -> None:
        messages = [*self.messages, {"role": "user", "content": line}]
        answer = ChatAnswer()
        try:
            for piece in self._server.ask(self._model, messages, answer):
                self._print(harmless(piece))
        except KeyboardInterrupt:
            if self._errors is not None:
                raise
            self._print("\n(interrupted; ask again or /quit)\n")
            return
        except (PeerLost, DeadlineExceeded, ProtocolError) as error:
            self.has_failed = True
            if self._errors is None:
                self._print(f"\nerror: {error}\n")
                return
            if answer.text:
                self._print("\n")
            print(f"error: {error}", file=self._errors, flush=True)
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._print(f"\n{self._dim(f'[{harmless(answer.footer())}]')}\n")

    def _print(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._out.isatty() else text


def chat(given: Invocation) -> None:
    """Chat until /quit, end of input or Ctrl-C at the prompt.

    Raises:
        SystemExit: with status 1 where standard input is no terminal and a question failed.
    """
    settings = given.settings
    assert isinstance(settings, ChatSettings)
    identity = process_identity()
    # As in curl: the gateway is named by its address, and any cluster member has a certificate.
    tls = identity.https_tls()
    server = ChatServer(settings, tls=tls)
    model = settings.model or server.first_model()
    is_person = sys.stdin.isatty()
    if is_person:
        import readline  # noqa: F401  (gives input() line editing and history)

        print(f"{harmless(model)} at {settings.url}; {COMMANDS}")
    errors = None if is_person else sys.stderr
    conversation = Conversation(settings, server, model, sys.stdout, errors)
    while True:
        try:
            line = input("> " if is_person else "")
        except EOFError:
            print()
            break
        except KeyboardInterrupt:
            if not is_person:
                raise
            print()
            break
        if not conversation.say(line):
            break
    if conversation.has_failed and not is_person:
        raise SystemExit(1)
