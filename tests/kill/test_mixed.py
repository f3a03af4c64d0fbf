# SPDX-License-Identifier: Apache-2.0
"""The check of disturbed answers detects violations, and the requests are mixed."""

from __future__ import annotations

import pytest

from tests.kill.mixed import Seen, requests, verdict

RIGHT = Seen(200, "one two three", [1, 2, 3], "length")


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (Seen(200, "one two three", [1, 2, 3], "length"), "equal"),
        (Seen(503, error="no worker is ready"), "error"),
        (Seen(200, "one two", [1, 2], None, error="the worker was lost"), "error"),
        (Seen(200, "", [], None, error="the worker was lost"), "error"),
        (Seen(200, "one two", [1, 2], "stop"), "wrong: "),
        (Seen(200, "one two four", [1, 2, 4], "length"), "wrong: "),
        (Seen(200, "one two three", [1, 2, 3], None), "wrong: "),
        (Seen(200, "one four", [1, 4], None, error="the worker was lost"), "wrong before its error"),
        (Seen(200, "one", [1], cut="the stream ended without [DONE]"), "cut off"),
        (Seen(503), "no proper error"),
        (Seen(418, error="a teapot"), "no proper error"),
    ],
)
def test_verdict(seen: Seen, said: str) -> None:
    assert verdict(seen, RIGHT).startswith(said)


def test_requests_are_mixed_and_reproducible() -> None:
    found = requests(100, 3, "m")
    assert found == requests(100, 3, "m") != requests(100, 4, "m")
    chats = [one for one in found if "messages" in one.body]
    prompts = [one.body["prompt"] for one in found if "prompt" in one.body]
    assert 20 < len(chats) < 50 and 30 < sum(one.is_streamed for one in found) < 70
    beginnings = [tuple(prompt[:200]) for prompt in prompts]
    assert len(set(beginnings)) < len(beginnings) - 10, "some begin alike"
    assert max(map(len, prompts)) <= 400
