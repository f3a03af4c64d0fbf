# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake import config
from mooncake.cli import main
from mooncake.cli.certs import CertsSettings, make
from mooncake.cli.chat import ChatAnswer, ChatServer, ChatSettings, Conversation
from mooncake.errors import InvalidArgument, ProtocolError
from mooncake.security import Identity, SecuritySettings


class OpenAi(http.server.ThreadingHTTPServer):
    """A server of the OpenAI API whose answers are canned and whose requests are recorded."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.models = ["smollm2", "other"]
        self.failure: str | None = None
        self.text = ["Par", "is."]
        self.reason = "the worker died"
        self.event: Any = None
        self.usage: dict[str, Any] = {
            "prompt_tokens": 40,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 32},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: OpenAi

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.failure == "a page":
            self._reply(200, "<html>")
            return
        if self.server.failure == "half a list":
            self._reply(200, '{"data": [', length=1000)
            return
        self._reply(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.failure == "refused":
            self._reply(429, json.dumps({"error": {"message": "too many requests"}}))
            return
        if self.server.failure == "refused with commands":
            self._reply(400, json.dumps({"error": {"message": self.server.reason}}))
            return
        if self.server.failure == "half a refusal":
            self._reply(500, '{"error": {"mess', length=1000)
            return
        if self.server.failure == "a refusal of many levels":
            self._reply(500, "[" * 100_000)
            return
        events: list[Any] = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": self.server.text[0]}}]},
            {"choices": [{"delta": {"content": self.server.text[1]}, "finish_reason": "stop"}]},
            {"choices": [], "usage": self.server.usage},
        ]
        if self.server.failure == "error event":
            events[2:] = [{"error": {"message": self.server.reason}}]
        events[2:] = events[2:] if self.server.event is None else [self.server.event, *events[2:]]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        if self.server.failure != "cut off":
            lines.append("data: [DONE]\n\n")
        self._reply(200, "".join(lines))

    def _reply(self, status: int, body: str, length: int | None = None) -> None:
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def openai() -> Iterator[OpenAi]:
    with OpenAi() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def talk(server: OpenAi, *lines: str, **more: Any) -> tuple[Conversation, str]:
    settings = ChatSettings(url=server.url, **more)
    out = io.StringIO()
    conversation = Conversation(settings, ChatServer(settings, now=iter(range(100)).__next__), "smollm2", out)
    for line in lines:
        assert conversation.say(line)
    return conversation, out.getvalue()


def test_an_answer_streams_and_shows_what_was_cached(openai: OpenAi) -> None:
    _, text = talk(openai, "capital?", max_tokens=7)
    assert text == ("Paris.\n[cached 32 of 40 prompt tokens, first token after 1.00 s, 3 tokens at 2.0/s]\n")
    [request] = openai.requests
    assert (request["model"], request["max_tokens"], request["stream"]) == ("smollm2", 7, True)
    assert request["stream_options"] == {"include_usage": True}


def test_the_conversation_is_kept_until_reset(openai: OpenAi) -> None:
    conversation, text = talk(openai, "one", "two", "/reset", "three", system="be brief")
    system = {"role": "system", "content": "be brief"}
    answer = {"role": "assistant", "content": "Paris."}
    assert openai.requests[1]["messages"] == [
        system,
        {"role": "user", "content": "one"},
        answer,
        {"role": "user", "content": "two"},
    ]
    assert openai.requests[2]["messages"] == [system, {"role": "user", "content": "three"}]
    assert conversation.messages == [system, {"role": "user", "content": "three"}, answer]
    assert "(conversation cleared)" in text


def test_quitting_and_unknown_commands(openai: OpenAi) -> None:
    conversation, text = talk(openai, "/help", "   ")
    assert text == "(/help is no command; /reset clears the conversation, /quit exits)\n"
    assert not conversation.say("/quit")
    assert openai.requests == []


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("refused", "answered 429 Too Many Requests: too many requests"),
        ("error event", "aborted: the worker died"),
        ("cut off", "ended the stream before the end of the answer"),
    ],
)
def test_a_failed_question_is_reported_and_dropped(openai: OpenAi, failure: str, message: str) -> None:
    openai.failure = failure
    conversation, text = talk(openai, "capital?")
    assert f"error: {openai.url} {message}\n" in text
    assert conversation.messages == []
    openai.failure = None
    assert conversation.say("capital?")
    assert len(openai.requests[-1]["messages"]) == 1


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": "overloaded", "error_type": "x"}, "aborted: overloaded"),
        (5, "sent an event that is none of a chat: Expected `object`, got `int`"),
        ({"choices": [5]}, "sent an event that is none of a chat: Expected `object`, got `int`"),
        ({"choices": [{"delta": "a"}]}, "sent an event that is none of a chat: Expected `object | null`"),
    ],
)
def test_an_odd_event_is_a_failed_question(openai: OpenAi, event: object, message: str) -> None:
    openai.event = event
    conversation, text = talk(openai, "capital?")
    assert f"error: {openai.url} {message}" in text
    assert conversation.messages == []


def test_an_event_without_an_error_may_say_so(openai: OpenAi) -> None:
    openai.event = {"error": None, "choices": [{"delta": None}], "usage": None}
    openai.usage = {"completion_tokens": "3", "prompt_tokens_details": "none"}
    _, text = talk(openai, "capital?")
    assert text == "Paris.\n[cached 0 of 0 prompt tokens, first token after 1.00 s]\n"


def test_half_an_answer_is_no_traceback(openai: OpenAi, capsys: pytest.CaptureFixture[str]) -> None:
    openai.failure = "half a refusal"
    _, text = talk(openai, "capital?")
    assert f"error: {openai.url} answered 500 Internal Server Error: " + '{"error": {"mess\n' in text
    openai.failure = "a refusal of many levels"
    _, text = talk(openai, "capital?")
    assert text.endswith(f"error: {openai.url} answered 500 Internal Server Error: {'[' * 200}\n")
    openai.failure = "half a list"
    with pytest.raises(SystemExit) as exit:
        main(["chat", "--url", openai.url])
    assert exit.value.code == 1
    error = f"error: {openai.url} lost the connection in the middle of an answer"
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize(
    ("failure", "message"), [("refused", "answered 429"), ("cut off", "ended the stream before the end")]
)
def test_a_program_that_pipes_questions_sees_failures_beside_the_answers(
    openai: OpenAi,
    failure: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("capital?\n"))
    openai.failure = failure
    with pytest.raises(SystemExit) as exit:
        main(["chat", "--url", openai.url])
    captured = capsys.readouterr()
    assert exit.value.code == 1
    assert captured.err.startswith(f"error: {openai.url} {message}")
    assert "error" not in captured.out
    assert captured.out.startswith("Paris.\n") == (failure == "cut off"), "what came of the answer"


CONTROLS = "\x1b]0;title\x07\x1b[2J\r\x08\x7f\x9b1m\x00"
ESCAPED = r"\x1b]0;title\x07\x1b[2J\x0d\x08\x7f\x9b1m\x00"


def test_control_characters_of_an_answer_are_shown_and_not_obeyed(openai: OpenAi) -> None:
    openai.text = [f"a\n\tb{CONTROLS}", "é 漢字 👩‍👩‍👧 \u00a0\ud800"]
    openai.usage["prompt_tokens"] = "\x1b[1m"
    conversation, text = talk(openai, "capital?")
    answer, _, footer = text.partition("[cached")
    assert answer == f"a\n\tb{ESCAPED}é 漢字 👩‍👩‍👧 \u00a0\\xd800\n"
    assert "\x1b" not in footer
    assert conversation.messages[-1]["content"] == "".join(openai.text), "the server gets its own text back"


@pytest.mark.parametrize("failure", ["error event", "refused with commands"])
def test_control_characters_of_an_error_are_shown_and_not_obeyed(openai: OpenAi, failure: str) -> None:
    openai.failure, openai.reason = failure, f"lost{CONTROLS}"
    _, text = talk(openai, "capital?")
    assert f": lost{ESCAPED}\n" in text and "\x1b" not in text


def test_control_characters_of_a_model_s_name_are_shown_and_not_obeyed(
    openai: OpenAi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.models = [f"m{CONTROLS}"]
    lines = io.StringIO("/quit\n")
    monkeypatch.setattr(lines, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", lines)
    with pytest.raises(SystemExit):
        main(["chat", "--url", openai.url])
    assert f"m{ESCAPED} at {openai.url}" in capsys.readouterr().out


def test_the_first_model_is_used_without_a_name(
    openai: OpenAi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("capital?\n/quit\n"))
    with pytest.raises(SystemExit) as exit:
        main(["chat", "--url", openai.url])
    assert exit.value.code == 0
    assert openai.requests[0]["model"] == "smollm2"
    assert capsys.readouterr().out.startswith("Paris.\n[cached 32")


def test_a_server_without_models(openai: OpenAi, capsys: pytest.CaptureFixture[str]) -> None:
    openai.models = []
    with pytest.raises(SystemExit):
        main(["chat", "--url", openai.url])
    assert "lists no model" in capsys.readouterr().err


def test_a_server_of_pages_is_named(openai: OpenAi, capsys: pytest.CaptureFixture[str]) -> None:
    openai.failure = "a page"
    with pytest.raises(SystemExit) as exit:
        main(["chat", "--url", openai.url])
    assert exit.value.code == 2
    assert f"{openai.url} did not list models" in capsys.readouterr().err


def test_nothing_listens(openai: OpenAi, capsys: pytest.CaptureFixture[str]) -> None:
    url = openai.url
    openai.server_close()
    with pytest.raises(SystemExit) as exit:
        main(["chat", "--url", url])
    assert exit.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: nothing answers at {url} (")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_an_invalid_url(url: str) -> None:
    with pytest.raises(InvalidArgument, match="url"):
        config.load(ChatSettings, {"url": url}, {})


def test_the_footer_of_an_answer_without_usage() -> None:
    assert ChatAnswer(ttft_s=0.5, finish_reason="length").footer() == (
        "first token after 0.50 s, stopped at the length limit"
    )


def test_a_gateway_that_requires_certificates_gets_ours(openai: OpenAi, tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    identity = Identity(
        SecuritySettings(str(tmp_path / "node.pem"), str(tmp_path / "node.key"), str(tmp_path / "ca.pem"))
    )
    assert identity.server_tls is not None
    openai.socket = identity.server_tls.wrap_socket(
        openai.socket, server_side=True, do_handshake_on_connect=False
    )
    settings = ChatSettings(url=openai.url.replace("http:", "https:"))
    assert ChatServer(settings, tls=identity.client_tls).first_model() == "smollm2"
    with pytest.raises(ProtocolError, match="requires a certificate: --tls-cert, --tls-key and --tls-ca"):
        ChatServer(settings).first_model()
