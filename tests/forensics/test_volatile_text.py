# SPDX-License-Identifier: Apache-2.0
"""Values that change from request to request, in lines that were written without looking at the patterns."""

from __future__ import annotations

import pytest

from mooncake.forensics.differences import Passages, difference
from mooncake.forensics.volatile_text import LinePair, is_value, kind_of

BEHIND = """
You are a careful coding agent. Read the files that the user names, and explain each change in a sentence.
Never delete files without asking.
"""

LINES = {
    "nonce": [
        ("[req 8f3a]", "[req 01bc]"),
        ("id: brave-otter-1842", "id: calm-heron-9031"),
        ("x-cache-buster: 0.8273645", "x-cache-buster: 0.1920384"),
        ("Session token: eyJhbGciOi.J9eyJ1c2Vy", "Session token: eyJhbGciOi.ZmFzZGZhc2R"),
        (
            "<request-id>01HZX3T7Q9ABCDEF12345678</request-id>",
            "<request-id>01HZX3T8R2ZYXWVU98765432</request-id>",
        ),
        ("random: kqzvbxwm", "random: tplrghdn"),
        ("commit 3f2a9bc", "commit 9de01f7"),
        ("boundary=----WebKitFormBoundary7MA4YWxkTrZu0gW", "boundary=----WebKitFormBoundaryQx93kLmNoP12abZ"),
        ("PID 48213 host ip-10-2-3-4", "PID 51734 host ip-10-2-3-4"),
        ("Your session is 4821-9932.", "Your session is 1177-0348."),
        ("user_8c1b2d3e4f", "user_77aa90bc12"),
        ("sha256:9b74c9897bac770ffc029102a200c5de", "sha256:1f3870be274f6c49b3e31a0c6728957f"),
    ],
    "clock": [
        ("The time is 3:45 PM.", "The time is 3:52 PM."),
        ("Current datetime: 2026-11-23 10:15:22.123456", "Current datetime: 2026-11-23 10:17:01.998877"),
        ("Today is 23 November 2026 (Monday)", "Today is 24 November 2026 (Tuesday)"),
        ("It's Monday.", "It's Friday."),
        ("date=20261123", "date=20261201"),
        ("Uptime: 3 hours 12 minutes", "Uptime: 4 hours 1 minutes"),
        ("Elapsed: 12.3s", "Elapsed: 45.9s"),
        ("Last message 5 minutes ago", "Last message 9 minutes ago"),
        ("[10:15:22] started", "[10:15:58] started"),
        ("Time (UTC): Mon, 23 Nov 2026 10:15:22 GMT", "Time (UTC): Mon, 23 Nov 2026 10:16:00 GMT"),
        ("epoch 1763893422123", "epoch 1763893499456"),
        ("Good morning! It is early.", "Good evening! It is early."),
        ("unix time 1763893422.551", "unix time 1763893455.001"),
        ("Nov 23, 10:15", "Nov 23, 10:20"),
        ("Heute ist der 23.11.2026", "Heute ist der 24.11.2026"),
        ("Current year: 2025", "Current year: 2026"),
        ("2026/11/23 10:15", "2026/11/24 08:02"),
        ("Date: 23-Nov-2026", "Date: 24-Nov-2026"),
        ("The current date is November 23rd, 2026.", "The current date is December 1st, 2026."),
        ('"timestamp": "2026-11-23T10:15:22.123Z"', '"timestamp": "2026-11-23T10:16:22.123Z"'),
    ],
    "counter": [
        ("Message 12", "Message 13"),
        ("Context used: 12,345 tokens", "Context used: 98,765 tokens"),
        ("3 of 10 attempts left", "2 of 10 attempts left"),
        ("Conversation turn: 9", "Conversation turn: 10"),
        ("seq=000123", "seq=000124"),
        ("You have used 34% of your budget", "You have used 41% of your budget"),
        ("cost so far: $1.23", "cost so far: $4.56"),
        ("run #17", "run #18"),
        ("retry=1", "retry=2"),
        ("v1.2.3-build.456", "v1.2.3-build.457"),
        ("The user has sent 3 messages and received 2.", "The user has sent 4 messages and received 3."),
    ],
    "tool_order": [
        ("Tools available: bash, edit, grep, view", "Tools available: grep, view, bash, edit"),
        (
            '<tools>\n<tool name="a">does a</tool>\n<tool name="b">does b</tool>\n</tools>',
            '<tools>\n<tool name="b">does b</tool>\n<tool name="a">does a</tool>\n</tools>',
        ),
        (
            "functions = [search(query: str), fetch(url: str), save(path: str)]",
            "functions = [fetch(url: str), save(path: str), search(query: str)]",
        ),
        (
            "### Tools\n\n#### alpha\nDoes alpha.\n\n#### beta\nDoes beta.\n",
            "### Tools\n\n#### beta\nDoes beta.\n\n#### alpha\nDoes alpha.\n",
        ),
        (
            '{"tools": [{"name": "x", "description": "1"}, {"name": "y", "description": "2"}]}',
            '{"tools": [{"name": "y", "description": "2"}, {"name": "x", "description": "1"}]}',
        ),
    ],
    "json_key_order": [
        (
            '{"user": {"name": "x", "id": 4}, "flags": [1,2]}',
            '{"flags": [1,2], "user": {"id": 4, "name": "x"}}',
        ),
        ("config = {'a': 1, 'b': True, 'c': None}", "config = {'c': None, 'a': 1, 'b': True}"),
    ],
    "other": [
        ("Language: English", "Language: Deutsch"),
        ("cwd: /srv/app/one", "cwd: /srv/app/two"),
        ("Model: gpt-4o", "Model: gpt-4.1"),
        ("Mode: plan", "Mode: act"),
        ("User name: Alice", "User name: Robert"),
        ("Be concise.", "Be thorough and explain."),
        ("Docs: a.md, b.md, c.md", "Docs: c.md, a.md, b.md"),
        ("Python 3.11.4 on linux", "Node 20.1 on linux"),
    ],
}


@pytest.mark.parametrize("head", ["", "<|im_start|>system\n", "Be helpful.\n\n"])
@pytest.mark.parametrize(
    ("kind", "first", "second"), [(kind, *pair) for kind, pairs in LINES.items() for pair in pairs]
)
def test_the_class_of_a_line(kind: str, first: str, second: str, head: str) -> None:
    texts = [head + one + BEHIND * 2 for one in (first, second)]
    at = next(at for at, (one, other) in enumerate(zip(*texts, strict=False)) if one != other)
    passages = Passages(
        texts[0][:at],
        texts[1][at:],
        texts[0][at:],
        num_ours=len(texts[1]) - at,
        num_theirs=len(texts[0]) - at,
    )
    assert difference(passages).kind == kind


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("the quick brown fox", "the slow brown fox"),
        ("getUserName(id)", "getUserMail(id)"),
        ("import numpy as np", "import pandas as pd"),
        ("src/gateway/app.py", "src/gateway/admin.py"),
        ("Answer in at most five sentences.", "Answer in one word."),
        ("Temperature is high", "Temperature is low"),
        ("a b c d e", "a b c d e f"),
    ],
)
def test_other_words_have_no_kind(ours: str, theirs: str) -> None:
    at = next(
        at for at, (one, other) in enumerate(zip(ours + "\0", theirs + "\1", strict=False)) if one != other
    )
    assert kind_of(LinePair(ours, theirs, at)) is None


def test_a_value_is_one_word() -> None:
    assert is_value("req-1/abc==") and not is_value("two words") and not is_value("")
