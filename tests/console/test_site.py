# SPDX-License-Identifier: Apache-2.0
"""The files of the pages and the headers of every answer: small, from here only, closed to other sites."""

from __future__ import annotations

import re

import pytest

from mooncake.console.site import HEADERS, assets
from tests.console.conftest import ConsoleStack

MOST_BYTES = 300_000


def test_pages_are_small() -> None:
    assert sum(len(content) for content, _, _ in assets().values()) <= MOST_BYTES


def test_pages_name_no_other_host() -> None:
    for name, (content, _, _) in assets().items():
        found = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"')]*", content.decode())
        assert [one for one in found if not one.startswith("http://www.w3.org/")] == [], name


def test_pages_have_no_inline_script_or_style() -> None:
    page = assets()["index.html"][0].decode()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:", page)
    for name, (content, kind, _) in assets().items():
        if kind == "text/javascript":
            text = content.decode()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            ), name


def test_every_file_of_the_page_exists() -> None:
    files = assets()
    for content, _, _ in files.values():
        for name in re.findall(r"(?:/console/static/|from \"\./)([\w.]+)", content.decode()):
            assert name in files, name


@pytest.mark.parametrize(
    "path",
    [
        "/console",
        "/console/overview",
        "/console/static/app.js",
        "/console/overview.json",
        "/console/key.json",
    ],
)
async def test_every_answer_has_the_rules(console: ConsoleStack, path: str) -> None:
    for browser in (console.browser(), console.stranger()):
        _, _, headers = await browser.send("GET", path)
        for name, value in HEADERS.items():
            assert headers[name] == value, (path, name)
        assert "Access-Control-Allow-Origin" not in headers
        assert "unsafe" not in headers["Content-Security-Policy"]
        if path.endswith(".json"):
            assert headers["Cache-Control"] == "no-store"


async def test_files_are_sent_once(console: ConsoleStack) -> None:
    status, _, headers = await console.browser().send("GET", "/console/static/app.js")
    assert status == 200 and headers["Content-Type"].startswith("text/javascript")
    status, body, _ = await console.browser(**{"If-None-Match": headers["ETag"]}).send(
        "GET", "/console/static/app.js"
    )
    assert status == 304 and body == b""


@pytest.mark.parametrize("name", ["../site.py", "%2e%2e/site.py", "..%2fsite.py", "unknown.js", ""])
async def test_no_other_file_is_served(console: ConsoleStack, name: str) -> None:
    status, _, _ = await console.browser().send("GET", f"/console/static/{name}")
    assert status == 404
