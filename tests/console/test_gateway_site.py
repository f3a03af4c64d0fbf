# SPDX-License-Identifier: Apache-2.0
"""The console over HTTP: its numbers are those of ``/metrics``, and each visitor sees only what it may."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake.console.access import COOKIE, MAX_FAILURES
from mooncake.console.overview import sample_name
from tests.console.conftest import CLIENT_KEYS, ConsoleStack
from tests.gateway.conftest import ADMIN_KEY

DATA = ("overview", "cluster", "requests", "sessions")
PROMPT = "one two three four five six seven eight nine ten eleven twelve"


async def metrics_of(stack: ConsoleStack) -> dict[str, float]:
    status, text, _ = await stack.browser().send("GET", "/metrics", headers={"X-API-Key": ADMIN_KEY})
    assert status == 200
    return {
        sample_name(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_a_time_that_is_none_is_refused(console: ConsoleStack) -> None:
    status, found = await console.browser().get("/console/overview.json?seconds=abc")
    assert status == 400 and found["error"]["message"] == "'abc' is not a number"
    assert (await console.browser().get("/console/overview.json?seconds=60"))[0] == 200


async def test_every_number_equals_the_metrics_page(console: ConsoleStack) -> None:
    for _ in range(3):
        await console.complete(PROMPT)
    status, found = await console.browser().get("/console/overview.json")
    assert status == 200
    wanted = await metrics_of(console)
    assert len(found["totals"]) > 20
    for name, value in found["totals"].items():
        assert wanted[name] == value, name
    cards = found["cards"]
    assert cards["prompt_tokens"] == wanted['mooncake_gateway_tokens_total{kind="prompt"}'] > 0
    assert cards["saved_tokens"] == wanted['mooncake_gateway_tokens_total{kind="cached"}']
    assert cards["in_flight"] == wanted["mooncake_gateway_requests_in_flight"]


async def test_pages_have_their_twins(console: ConsoleStack) -> None:
    answer = await console.complete(PROMPT, headers={})
    browser = console.browser()
    for name in DATA:
        status, page = await browser.get(f"/console/{name}")
        assert status == 200 and page.startswith(b"<!doctype html>")
        status, found = await browser.get(f"/console/{name}.json")
        assert status == 200 and isinstance(found, dict), name
    status, found = await browser.get("/console/cluster.json")
    names = [one["instance"] for host in found["hosts"] for one in host["instances"]]
    assert sorted(names) == sorted([console.prefill[0].address, console.decode[0].address])
    assert "--master" in found["store_trouble"]
    status, found = await browser.get("/console/requests.json")
    assert [row["id"] for row in found["requests"]] == [answer["id"]]
    status, found = await browser.get(f"/console/request.json?id={answer['id']}")
    assert status == 200 and found["prompts"][0]["num_tokens"] == len(PROMPT.split())
    assert found["waterfall"]["source"] in ("trace", "explanation")


async def test_root_sends_browsers_to_the_console_and_programs_nowhere(console: ConsoleStack) -> None:
    status, _, headers = await console.browser(Accept="text/html,*/*").send("GET", "/")
    assert status == 307 and headers["Location"] == "/console"
    status, found = await console.browser(Accept="application/json").get("/")
    assert status == 404 and found["error"]["message"]


async def test_a_session_groups_its_requests(console: ConsoleStack) -> None:
    for name in ("s1", "s1", "s2"):
        status, _, _ = await console.post(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, {"X-Session-ID": name}
        )
        assert status == 200
    _, found = await console.browser().get("/console/sessions.json")
    assert {row["session"]: row["requests"] for row in found["sessions"]} == {"s1": 2, "s2": 1}


async def test_no_prompt_text_is_in_any_answer(console: ConsoleStack) -> None:
    answer = await console.complete("a confidential sentence about xylophones", max_tokens=4)
    browser = console.browser()
    for path in (*(f"/console/{name}.json" for name in DATA), f"/console/request.json?id={answer['id']}"):
        _, found = await browser.get(path)
        assert "xylophones" not in json.dumps(found) and "confidential" not in json.dumps(found), path


@pytest.mark.parametrize("name", [*DATA, "store", "key", "request"])
async def test_a_stranger_without_a_key_sees_nothing(console: ConsoleStack, name: str) -> None:
    for headers in ({"Host": "console.example"}, {"X-Forwarded-For": "10.1.2.3"}, {"Via": "1.1 proxy"}):
        status, found = await console.browser(**headers).get(f"/console/{name}.json?id=x&key=x")
        assert status == 401 and found["error"]["code"] == "login_required"


async def test_reader_of_this_host_sees_all_and_changes_nothing(console: ConsoleStack) -> None:
    browser = console.browser()
    _, found = await browser.get("/console/session.json")
    assert found["visitor"] == "reader" and not found["may_act"]
    body = {"type": "decode", "instance": console.decode[0].address}
    status, _, _ = await browser.send("POST", "/console/actions/drain", body)
    assert status == 403
    status, answer, _ = await browser.send(
        "POST", "/console/actions/drain", body, {"X-CSRF-Token": found["csrf"]}
    )
    assert status == 403 and answer["error"]["code"] == "not_admin"
    assert set((await console.health()).values()) == {"ready"}


async def test_admin_acts_after_login_and_only_from_its_own_page(console: ConsoleStack) -> None:
    browser = console.stranger()
    assert (await browser.login("wrong"))[0] == 401
    status, csrf = await browser.login(ADMIN_KEY)
    assert status == 200
    assert (await browser.get("/console/cluster.json"))[0] == 200
    body = {"type": "decode", "instance": console.decode[0].address}
    for headers in (
        {},
        {"X-CSRF-Token": "wrong"},
        {"X-CSRF-Token": csrf, "Origin": "http://evil.example"},
        {"X-CSRF-Token": csrf, "Sec-Fetch-Site": "cross-site"},
    ):
        status, _, _ = await browser.send("POST", "/console/actions/drain", body, headers)
        assert status == 403, headers
    assert (await console.health())[console.decode[0].address] == "ready"
    status, answer, _ = await browser.send("POST", "/console/actions/drain", body, {"X-CSRF-Token": csrf})
    assert status == 200 and "draining" in answer["message"]
    await console.until(lambda health: health.get(console.decode[0].address) != "ready")
    status, answer, _ = await browser.send(
        "POST", "/console/actions/drain", {"type": "decode", "instance": "nowhere:1"}, {"X-CSRF-Token": csrf}
    )
    assert status == 404 and "nowhere:1" in answer["error"]["message"]
    status, _, _ = await browser.send("POST", "/console/actions/format", {}, {"X-CSRF-Token": csrf})
    assert status == 404


async def test_cookie_is_out_of_reach_of_scripts_and_other_sites(console: ConsoleStack) -> None:
    _, _, headers = await console.browser().send("POST", "/console/session", {"key": ADMIN_KEY})
    cookie = headers["Set-Cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/console" in cookie
    assert ADMIN_KEY not in cookie


async def test_logout_ends_the_session_at_the_server(console: ConsoleStack) -> None:
    browser = console.stranger()
    await browser.login(ADMIN_KEY)
    assert (await browser.get("/console/overview.json"))[0] == 200
    await browser.send("DELETE", "/console/session")
    assert (await browser.get("/console/overview.json"))[0] == 401


async def test_wrong_keys_are_soon_refused_unseen(console: ConsoleStack) -> None:
    browser = console.stranger()
    found = [(await browser.login(f"guess-{number}"))[0] for number in range(MAX_FAILURES)]
    assert found == [401] * MAX_FAILURES
    status, _, headers = await browser.send("POST", "/console/session", {"key": ADMIN_KEY})
    assert status == 429 and int(headers["Retry-After"]) >= 1
    assert (await browser.get("/console/overview.json", X_API_Key="another-guess"))[0] == 429


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[1]", {}, 400),
        (b"[" * 4000, {}, 400),
        (b'{"key": 5}', {}, 401),
        (b"{}", {}, 401),
        (rb'{"key": "\ud800"}', {}, 401),
        (b'{"key": "x"}', {"Content-Type": "text/plain"}, 415),
        (b'{"key": "' + b"x" * (1 << 15) + b'"}', {}, 413),
        (b'{"key": "x"}', {"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_bad_logins_are_refused(
    console: ConsoleStack, body: bytes, headers: dict[str, str], status: int
) -> None:
    found, answer, _ = await console.stranger().send("POST", "/console/session", body, headers)
    assert found == status and answer["error"]["message"]


@pytest.mark.parametrize("path", ["request.json", "request.json?id=" + "x" * 2000, "request.json?id=%00"])
async def test_bad_names_are_refused(console: ConsoleStack, path: str) -> None:
    status, found = await console.browser().get(f"/console/{path}")
    assert status == 400 and found["error"]["code"] == "invalid_value"


async def test_unknown_request_and_missing_store_are_said_so(console: ConsoleStack) -> None:
    status, found = await console.browser().get("/console/request.json?id=cmpl-unknown")
    assert status == 404 and found["error"]["code"] == "request_not_found"
    status, found = await console.browser().get("/console/store.json")
    assert status == 404 and found["error"]["code"] == "no_master"


async def test_what_if_says_when_it_is_not_available(console: ConsoleStack) -> None:
    browser = console.browser()
    _, session = await browser.get("/console/session.json")
    status, _, _ = await browser.send("POST", "/console/what_if.json", {"memory": 2})
    assert status == 403, "a foreign page could make this host compute"
    status, found, _ = await browser.send(
        "POST", "/console/what_if.json", {"memory": 2}, {"X-CSRF-Token": session["csrf"]}
    )
    assert status == 200 or found["error"]["message"]
    assert status != 200 or found["is_available"] in (True, False)


# --- clients with keys


@pytest.mark.parametrize("name", [*DATA, "store", "key", "request", "session"])
async def test_a_process_of_this_host_needs_a_key_where_clients_have_keys(
    shared: ConsoleStack, name: str
) -> None:
    """nginx on this host, as it is by default, sends exactly this for a client from anywhere."""
    status, found = await shared.browser().get(f"/console/{name}.json?id=x&key=x")
    assert status == 401 and found["error"]["code"] == "login_required"
    assert (await shared.browser().get(f"/console/{name}.json?id=x&key=x", X_API_Key=ADMIN_KEY))[0] != 401


async def test_login_through_a_proxy_that_replaces_host(shared: ConsoleStack) -> None:
    fields = {"X-Forwarded-Host": "console.example", "Origin": "https://console.example"}
    proxied = shared.browser(Host="127.0.0.1:8000", **fields, **{"Sec-Fetch-Site": "same-origin"})
    assert (await proxied.login(CLIENT_KEYS["alice"]))[0] == 200


async def test_wrong_keys_that_are_not_valid_unicode_are_counted(shared: ConsoleStack) -> None:
    browser = shared.stranger()
    sent = [
        await browser.send("POST", "/console/session", {"key": "\ud800"}) for _ in range(MAX_FAILURES + 1)
    ]
    assert [status for status, _, _ in sent] == [401] * MAX_FAILURES + [429]


async def complete_as(stack: ConsoleStack, name: str) -> str:
    headers = {"Authorization": f"Bearer {CLIENT_KEYS[name]}"}
    status, answer, _ = await stack.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, headers)
    assert status == 200, answer
    return str(answer["id"])


async def test_client_sees_its_own_requests_and_numbers(shared: ConsoleStack) -> None:
    own, foreign = await complete_as(shared, "alice"), await complete_as(shared, "bob")
    browser = shared.stranger()
    status, _ = await browser.login(CLIENT_KEYS["alice"])
    assert status == 200
    _, session = await browser.get("/console/session.json")
    assert session["visitor"] == "client" and session["name"] == "alice" and not session["may_act"]
    assert "cluster" not in session["views"] and "store" not in session["views"]
    _, found = await browser.get("/console/requests.json")
    assert [row["id"] for row in found["requests"]] == [own]
    assert (await browser.get(f"/console/request.json?id={own}"))[0] == 200
    assert (await browser.get(f"/console/request.json?id={foreign}"))[0] == 404
    _, found = await browser.get("/console/overview.json")
    assert found["client"] == "alice"
    wanted = await metrics_of(shared)
    assert found["totals"] and all(wanted[name] == value for name, value in found["totals"].items())
    assert all('client="alice"' in name for name in found["totals"])
    for path in ("overview", "requests", "sessions"):
        _, found = await browser.get(f"/console/{path}.json")
        assert foreign not in json.dumps(found) and '"bob"' not in json.dumps(found)


@pytest.mark.parametrize("name", ["cluster", "store", "key"])
async def test_client_sees_no_page_about_all(shared: ConsoleStack, name: str) -> None:
    browser = shared.stranger()
    await browser.login(CLIENT_KEYS["alice"])
    status, found = await browser.get(f"/console/{name}.json?key=x")
    assert status == 403 and found["error"]["code"] == "not_admin"


async def test_client_can_not_act(shared: ConsoleStack) -> None:
    browser = shared.stranger()
    _, csrf = await browser.login(CLIENT_KEYS["alice"])
    body = {"type": "decode", "instance": shared.decode[0].address}
    status, found, _ = await browser.send("POST", "/console/actions/remove", body, {"X-CSRF-Token": csrf})
    assert status == 403 and found["error"]["code"] == "not_admin"


async def test_programs_send_their_key_with_each_request(shared: ConsoleStack) -> None:
    await complete_as(shared, "bob")
    browser = shared.stranger()
    key = f"Bearer {CLIENT_KEYS['bob']}"
    status, found = await browser.get("/console/requests.json", Authorization=key)
    assert status == 200 and {row["client"] for row in found["requests"]} == {"bob"}
    assert (await browser.get("/console/cluster.json", X_API_Key=ADMIN_KEY))[0] == 200


async def test_key_that_is_withdrawn_ends_its_sessions(shared: ConsoleStack) -> None:
    browser = shared.stranger()
    await browser.login(CLIENT_KEYS["alice"])
    assert (await browser.get("/console/overview.json"))[0] == 200
    assert shared.gateway.clients is not None
    kept: list[Any] = [
        client.entry for client in shared.gateway.clients._by_digest.values() if client.name == "bob"
    ]
    shared.gateway.clients.replace(kept, 0.0)
    assert (await browser.get("/console/overview.json"))[0] == 401
