# SPDX-License-Identifier: Apache-2.0
"""The console in a real browser: a running cluster under load; ten thousand blocks and 500 sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Response

from mooncake.console.access import Visitor
from mooncake.console.contents import MAX_CELLS
from mooncake.console.site import GATEWAY_VIEWS, Gate, add_frame
from mooncake.http.server import HttpServer, listen
from tests.cluster import ADMIN_KEY, Cluster, running_cluster, wait_for
from tests.e2e.browser import LOW_CONTRASTS, UNNAMED, chromium, errors_of, requested_urls

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PAGES = ("overview", "cluster", "requests", "store", "sessions")
PROMPT = "You are a helpful assistant of a shop for lamps and chairs. Answer briefly and politely. " * 4


# --- a running cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with requests of five sessions behind it and some in progress."""
    flags = ("--prefill", "1", "--decode", "1", "--pool-size", "256MiB", "--kv-cache-size", "128MiB")
    with running_cluster(*flags) as cluster:
        cluster.wait_until_routable()
        stop = threading.Event()

        def ask() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                body = {"model": "smollm2", "prompt": f"{PROMPT} Question {number % 5}.", "max_tokens": 4}
                headers = {"X-Session-ID": f"shop-{number % 5}", "x-slo-ttft-ms": "60000"}
                cluster.post("/v1/completions", body, headers)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            wait_for(
                lambda: len(of(cluster, "sessions")["sessions"]) >= 5, "requests of five sessions", 120.0
            )
            yield cluster
        finally:
            stop.set()
            asking.join()


def of(cluster: Cluster, page: str) -> Any:
    """The JSON of a page."""
    answer = cluster.get(f"/console/{page}.json")
    assert answer.status == 200, answer.body
    return answer.body


def opened(driver: Any, base: str, path: str) -> None:
    """Open a page and wait for its first data."""
    driver.get(f"{base}/console/{path}")
    script = "return document.getElementById('live').dataset.state"
    wait_for(lambda: driver.execute_script(script) in ("live", "lost"), f"data of {path}", 20.0)
    assert driver.execute_script(script) == "live", driver.execute_script("return document.body.innerText")


@pytest.mark.model
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_of_a_running_cluster(cluster: Cluster, theme: str) -> None:
    """Each page opens without an error, asks only its own server, is readable, fits, and can be named."""
    request = next(row["id"] for row in of(cluster, "requests")["requests"] if row.get("state") == "finished")
    wait_for(lambda: of(cluster, "store")["contents"]["prefixes"], "objects in the pool", 60.0)
    key = of(cluster, "store")["contents"]["prefixes"][0]["key"]
    with chromium(theme, 360 if theme == "dark" else 1280) as driver:
        for path in (*PAGES, f"request?id={request}", f"key?key={urllib.parse.quote(key)}"):
            opened(driver, cluster.url, path)
            assert driver.execute_script("return document.documentElement.dataset.theme") == theme
            assert errors_of(driver) == [], path
            assert driver.execute_script(LOW_CONTRASTS) == [], path
            assert driver.execute_script(UNNAMED) == [], path
            width = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert width[0] <= width[1], f"{path} is wider than the screen"
        urls = requested_urls(driver)
        assert urls and all(url.startswith(cluster.url + "/") for url in urls), urls


@pytest.mark.model
def test_charts_and_tables_hold_the_data_of_the_twins(cluster: Cluster) -> None:
    with chromium() as driver:
        opened(driver, cluster.url, "overview")
        # The page is paused, so that it shows the same data as long as it is read.
        driver.find_element("id", "pause").click()
        shown = driver.execute_async_script(
            """
            const done = arguments[0];
            const { LineChart } = await import("/console/static/charts.js");
            const { OverviewPage } = await import("/console/static/overview.js");
            const found = await (await fetch("/console/overview.json?seconds=300")).json();
            const page = new OverviewPage();
            document.getElementById("main").replaceChildren(page.element);
            page.update(found);
            done([found, page.charts.map((chart) => [chart.at, chart.values, chart.latest,
              chart.series.map((one) => one.name), [...chart.svg.querySelectorAll("path")].length])]);
            """
        )
        found, charts = shown
        for at, values, latest, names, num_lines in charts:
            assert at == found["at"] and num_lines == len(names)
            for name, value in zip(names, latest, strict=True):
                assert values[name] == found["series"][name]
                known = [one for one in found["series"][name] if one is not None]
                assert value == (known[-1] if known else None)
        text = driver.find_element("id", "main").text
        assert f"{round(100 * found['cards']['hit_rate'])} %" in text
        opened(driver, cluster.url, "sessions")
        rows = driver.find_elements("css selector", "tbody tr[data-row]")
        assert {row.get_attribute("data-row") for row in rows} >= {f"shop-{number}" for number in range(5)}


@pytest.mark.model
def test_rows_without_a_value_are_sorted_to_one_end(cluster: Cluster) -> None:
    with chromium() as driver:
        opened(driver, cluster.url, "overview")
        found = driver.execute_async_script(
            """
            const done = arguments[0];
            const { VirtualTable } = await import("/console/static/table.js");
            const table = new VirtualTable("t", [{ name: "n", get: (row) => row.name, key: "name" }]);
            const order = () => table.rows.map((row) => row.name);
            table.set(["b", null, "c", null, "a"].map((name) => ({ name })));
            table.sortBy(0);
            const descending = order();
            table.sortBy(0);
            done([descending, order()]);
            """
        )
    assert found == [["c", "b", "a", None, None], [None, None, "a", "b", "c"]]


@pytest.mark.model
def test_a_page_that_is_paused_stays_so_when_it_is_in_sight_again(cluster: Cluster) -> None:
    with chromium() as driver:
        opened(driver, cluster.url, "requests")
        driver.find_element("id", "pause").click()
        num_fetched = driver.execute_script(
            """
            let num = 0;
            const fetched = window.fetch;
            window.fetch = (...given) => { num += 1; return fetched(...given); };
            document.dispatchEvent(new Event("visibilitychange"));
            const paused = num;
            document.getElementById("pause").click();
            document.dispatchEvent(new Event("visibilitychange"));
            return [paused, num];
            """
        )
    assert num_fetched[0] == 0 and num_fetched[1] > 0


@pytest.mark.model
def test_page_from_request_to_waterfall_and_what_if_by_keyboard(cluster: Cluster) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    with chromium() as driver:
        opened(driver, cluster.url, "requests")
        driver.find_element("id", "pause").click()
        active = driver.find_element("css selector", "input[type=search]")
        active.send_keys("finished")  # one in progress has no bars yet
        for _ in range(60):
            active.send_keys(keys.TAB)
            active = driver.switch_to.active_element
            assert (
                driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", active) != "none"
            )
            if driver.execute_script("return arguments[0].matches('tbody a')", active):
                break
        assert "/console/request?id=" in active.get_attribute("href")
        active.send_keys(keys.ENTER)
        wait_for(lambda: driver.find_elements("css selector", ".fall .bar"), "the waterfall", 20.0)
        assert "/console/request?id=" in driver.current_url
        names = driver.execute_script(
            "return [...document.querySelectorAll('.fall .bar')].map((one) => one.className)"
        )
        assert any("prefill" in name for name in names)
        button = next(
            one for one in driver.find_elements("tag name", "button") if one.text == "twice the memory"
        )
        button.send_keys(keys.ENTER)
        script = "return document.querySelector('[aria-live=polite]').innerText"
        wait_for(
            lambda: driver.execute_script(script) and "simulating" not in driver.execute_script(script),
            "a result",
            60.0,
        )
        driver.back()
        wait_for(lambda: driver.find_elements("css selector", "input[type=search]"), "the list again", 20.0)


@pytest.mark.model
def test_login_shows_what_an_administrator_can_do(cluster: Cluster) -> None:
    with chromium() as driver:
        opened(driver, cluster.url, "cluster")
        assert not driver.find_elements("css selector", "button.danger"), "a reader has nothing to press"
        driver.find_element("id", "login").click()
        driver.find_element("id", "login-key").send_keys("a wrong key")
        driver.find_element("css selector", "#login-form button.primary").click()
        wait_for(lambda: "not known" in driver.find_element("id", "login-error").text, "the refusal", 20.0)
        driver.find_element("id", "login-key").clear()
        driver.find_element("id", "login-key").send_keys(ADMIN_KEY)
        driver.find_element("css selector", "#login-form button.primary").click()
        wait_for(lambda: driver.find_elements("css selector", "button.danger"), "actions", 20.0)
        assert ADMIN_KEY not in driver.page_source
        assert driver.execute_script("return document.cookie") == "", "no script can read the cookie"


# --- ten thousand blocks, five hundred sessions


def many_blocks() -> dict[str, Any]:
    prefixes = [
        {
            "key": f"kv/abc/{number:064x}",
            "tenant": "default",
            "model": "kv/abc",
            "num_uses": 500 - number,
            "num_blocks": 3,
            "longest": 3,
            "size_bytes": 1 << 20,
        }
        for number in range(50)
    ]
    cells = {
        "uses": [MAX_CELLS - number for number in range(MAX_CELLS)],
        "tier": [number % 3 for number in range(MAX_CELLS)],
    }
    contents = {
        "num_objects": 1_000_000,
        "num_read": 20_000,
        "age_s": 1.0,
        "rows": [],
        "prefixes": prefixes,
        "cells": cells,
    }
    return {
        "num_objects": 1_000_000,
        "num_writing": 0,
        "capacity_bytes": 1,
        "allocated_bytes": 1,
        "segments": [],
        "counts": {"lookups": 2, "lookup_hits": 1, "evicted_objects": 0},
        "contents": contents,
        "tenants": [],
    }


def many_sessions() -> dict[str, Any]:
    rows = [
        {
            "session": f"session-{number}",
            "client": "",
            "requests": 3,
            "in_progress": 0,
            "prompt_tokens": 900,
            "cached_tokens": 600,
            "output_tokens": 50,
            "hit_rate": 2 / 3,
            "mean_ttft_s": 0.5,
            "last_start": 1e9,
        }
        for number in range(500)
    ]
    return {"sessions": rows, "num_sessions": 500, "num_requests": 1500}


@contextlib.asynccontextmanager
async def synthetic() -> AsyncIterator[str]:
    """The console's own pages over recorded data."""
    app = FastAPI()
    add_frame(app, Gate(lambda key: Visitor("admin", key=key)), GATEWAY_VIEWS, "store")
    for name, found in (("store", many_blocks()), ("sessions", many_sessions())):
        content = json.dumps(found)

        def answer(content: str = content) -> Response:
            return Response(content, media_type="application/json")

        app.add_api_route(f"/console/{name}.json", answer)
    server = HttpServer(app, listen("127.0.0.1", 0))
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


async def test_ten_thousand_blocks_and_500_sessions_are_few_elements() -> None:
    """The work of the browser is bounded by what is in sight, not by the rows; bench/console.py times it."""

    def look(base: str) -> tuple[Any, ...]:
        with chromium() as driver:
            opened(driver, base, "store")
            blocks = driver.execute_script("return Number(document.querySelector('canvas').dataset.blocks)")
            num_store = driver.execute_script("return document.querySelectorAll('*').length")
            painted = driver.execute_script(
                "const c = document.querySelector('canvas'); const d = c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
                "for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n / (d.length / 4);"
            )
            opened(driver, base, "sessions")
            table = "document.querySelector('.virtual')"
            first = driver.execute_script("return document.querySelectorAll('tbody tr[data-row]').length")
            num_sessions = driver.execute_script("return document.querySelectorAll('*').length")
            driver.execute_script(f"{table}.scrollTop = {table}.scrollHeight")
            last = "return [...document.querySelectorAll('tbody tr[data-row]')].at(-1).dataset.row"
            wait_for(lambda: driver.execute_script(last) == "session-499", "the last row", 20.0)
            rows = driver.execute_script("return document.querySelectorAll('tbody tr[data-row]').length")
            return blocks, num_store, painted, first, num_sessions, rows, errors_of(driver)

    async with synthetic() as base:
        blocks, num_store, painted, first, num_sessions, rows, errors = await asyncio.to_thread(look, base)
    assert errors == []
    assert blocks == MAX_CELLS and painted > 0.5
    assert num_store < 1500 and num_sessions < 1500
    assert 10 < first < 120 and 10 < rows < 120


async def test_a_page_stays_while_its_data_is_away_and_names_of_spans_are_whole() -> None:
    names = ("POST /v1/chat/completions", "compute prompt", "compute chunk", "receive kv")
    spans = [
        {
            "name": name,
            "phase": "prefill",
            "where": "127.0.0.1:21654",
            "depth": at,
            "start_s": 0.0,
            "end_s": 1.0,
        }
        for at, name in enumerate(names)
    ]
    request = {"prompts": [], "waterfall": {"source": "trace", "spans": spans}}
    app, is_away = FastAPI(), threading.Event()
    add_frame(app, Gate(lambda key: Visitor("admin", key=key)), GATEWAY_VIEWS, "store")
    is_away.set()

    def store() -> Response:
        found = {"error": {"message": "no master answers"}} if is_away.is_set() else many_blocks()
        return Response(json.dumps(found), 503 if is_away.is_set() else 200, media_type="application/json")

    def one(id: str) -> Response:
        found = request if id == "known" else {"error": {"message": "there is none"}}
        return Response(json.dumps(found), 200 if id == "known" else 404, media_type="application/json")

    app.add_api_route("/console/store.json", store)
    app.add_api_route("/console/request.json", one)

    def look(base: str) -> None:
        live = "return document.getElementById('live').textContent"
        with chromium(width=360) as driver:
            driver.get(f"{base}/console/store")
            wait_for(lambda: driver.execute_script(live) == "not available", "the answer", 20.0)
            text = driver.find_element("id", "main").text
            assert "no master answers" in text and driver.find_elements("id", "key-field")
            is_away.clear()
            wait_for(lambda: driver.execute_script(live) == "live", "the data", 20.0)
            assert "no master answers" not in driver.find_element("id", "main").text
            assert "10" in driver.find_element("css selector", ".cards").text
            driver.get(f"{base}/console/request?id=none")
            wait_for(lambda: driver.execute_script(live) == "not found", "the answer", 20.0)
            assert "Candidates" not in driver.find_element("id", "main").text
            opened(driver, base, "request?id=known")
            cut = (
                "return [...document.querySelectorAll('.fall .name')]"
                ".filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
            )
            assert driver.execute_script(cut) == []
            shown = driver.find_element("css selector", ".fall").text
            assert all(name in shown for name in names)

    server = HttpServer(app, listen("127.0.0.1", 0))
    await server.start()
    try:
        await asyncio.to_thread(look, f"http://127.0.0.1:{server.port}")
    finally:
        await server.close()
