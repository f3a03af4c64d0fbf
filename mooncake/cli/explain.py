# SPDX-License-Identifier: Apache-2.0
"""``mooncake explain ID`` and ``mooncake misses``: the routing of a request and its reasons, as tables.

Knows the gateway's HTTP answer and the terminal, nothing of the cluster. Standard library and rich, so that
it starts at once.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mooncake.cli.output import check_url, printable
from mooncake.conductor.publisher_registry import DEFAULT_TENANT
from mooncake.errors import AccessDenied, InvalidArgument, PeerLost, ProtocolError
from mooncake.security import tool_identity

_TIMEOUT_S = 10.0
_BAR_WIDTH = 40


def explain(name: str, url: str, admin_api_key: str, as_json: bool, api_key: str = "") -> None:
    """Query the gateway at ``url`` and print. ``api_key``: the client's, where clients have keys.

    Raises:
        InvalidArgument: no record of such a request is kept, or the URL is malformed.
        AccessDenied: the admin key is required.
        PeerLost, ProtocolError: the gateway is unreachable, or the server is no gateway.
    """
    path = f"/v1/requests/{urllib.parse.quote(name, safe='')}/explain"
    answer = _ask(path, "prompts", name, url.rstrip("/"), admin_api_key, api_key)
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    console = Console()
    misses = answer.get("misses") or [None] * len(answer["prompts"])
    for prompt, report in zip(answer["prompts"], misses, strict=True):
        show(console, prompt)
        if report is not None:
            show_misses(console, report)


def misses(url: str, admin_api_key: str, as_json: bool, api_key: str = "") -> None:
    """Print what became of prompts' tokens, by tenant and cause. Raises as ``explain``."""
    answer = _ask("/v1/cache/misses", "tenants", "", url.rstrip("/"), admin_api_key, api_key)
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    console = Console()
    sums = _sums(answer["tenants"])
    is_wide = console.measure(sums, options=console.options.update(width=1000)).minimum <= console.width
    if is_wide:
        console.print(sums)
    else:
        console.print(f"{_SUMS}\n", soft_wrap=True, highlight=False)
        for row in answer["tenants"]:
            names = f"tenant {escape(row['tenant']) or DEFAULT_TENANT}, model {escape(row['model'])}:"
            console.print(names, soft_wrap=True, highlight=False)
            console.print(_sums_of(row))
    if answer["differences"]:
        console.print(_differences(answer["differences"]))


def _ask(path: str, field: str, name: str, url: str, admin_api_key: str, api_key: str) -> Any:
    """The gateway's answer, an object with ``field``."""
    headers = {"X-API-Key": admin_api_key} if admin_api_key else {}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    content = ask_gateway(
        url, path, headers, lambda status, body: _refused(status, body, name, url), _TIMEOUT_S
    )
    found = read_answer(content, url)
    if not isinstance(found, dict) or field not in found:
        raise no_gateway(url, ValueError(f"its answer has no {field}"))
    return found


class RefusedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the admin key is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def gateway_opener() -> urllib.request.OpenerDirector:
    """What opens a gateway's pages: with this process's certificate where it has one, as a gateway with TLS
    requires, and through no proxy: `http_proxy` is often set for a web in which no gateway is, and the proxy
    would read the admin key."""
    tls = urllib.request.HTTPSHandler(context=tool_identity().client_tls)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), RefusedRedirects(), tls)


def ask_gateway(
    url: str,
    path: str,
    headers: Mapping[str, str],
    refused: Callable[[int, bytes], Exception],
    timeout_s: float,
    body: bytes | None = None,
) -> bytes:
    """The content of a gateway's answer; ``refused`` words one that is an error.

    Raises:
        InvalidArgument: the URL is malformed, or this process's certificate or key can't be read.
        PeerLost, ProtocolError: the gateway is unreachable, or the server does not speak HTTP.
    """
    check_url(url)
    asking = urllib.request.Request(url + path, body, dict(headers))
    try:
        with gateway_opener().open(asking, timeout=timeout_s) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise refused(error.code, error.read()) from None
    except OSError as error:
        raise PeerLost(f"no gateway answers at {url}: {error}; start one or name it with --url") from error
    except (http.client.HTTPException, ValueError) as error:
        raise no_gateway(url, error) from error


def read_answer(content: bytes, url: str) -> Any:
    """The JSON of a gateway's answer. Raises ProtocolError."""
    try:
        return json.loads(content)
    except ValueError as error:
        raise no_gateway(url, error) from error


def no_gateway(url: str, error: Exception) -> ProtocolError:
    return ProtocolError(f"{url} did not answer like a Mooncake gateway: {printable(str(error))}")


def _refused(status: int, body: bytes, name: str, url: str) -> Exception:
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ProtocolError(f"{url} answered {status}; is it a Mooncake gateway?")
    if status == 404:
        return InvalidArgument("ID", name, f"the id of a request that is still recorded ({message})")
    if status in (401, 403):
        return AccessDenied(f"{message}; pass --admin-api-key")
    return PeerLost(f"{url} answered {status}: {message}")


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the routing of one prompt."""
    console.print(
        f"[bold]{escape(found['request_id'])}[/bold]  {found['state']}, {found['num_tokens']} tokens, "
        f"placed {found['seconds_ago']:.1f} s ago"
        + (f", {found['num_placements']} times" if found["num_placements"] > 1 else ""),
        highlight=False,
    )
    if found["policy"]:
        console.print(f"policy {found['policy']}: {escape(found['reason'])}", highlight=False)
    _show_admission(console, found["admission"])
    if found["candidates"]:
        console.print(_candidates(found))
    console.print(_times(found))
    if found["actual"]["stages"]:
        console.print(_stages(found["actual"]["stages"]))
    if found["blocks"]:
        console.print(_blocks(found["blocks"]))


def _show_admission(console: Console, verdict: dict[str, Any] | None) -> None:
    if verdict is None:
        return
    if verdict["code"] == "admitted":
        loads = f"load {verdict['prefill_load']:.0%} of TTFT SLO, {verdict['decode_load']:.0%} of TBT SLO"
        console.print(f"admission {verdict['rule']}: admitted, {loads}", highlight=False)
        return
    outcome = "rejected, admitted as an audit" if verdict["is_audited"] else "rejected"
    reason = f"{verdict['code']}: {escape(verdict['reason'])}; Retry-After {verdict['retry_after_s']:.2f} s"
    console.print(f"admission {verdict['rule']}: [bold]{outcome}[/bold]: {reason}", highlight=False)


def _candidates(found: dict[str, Any]) -> Table:
    table = Table(title="weighed")
    table.add_column("candidate", no_wrap=True)
    for name in ("score", "queue", "fetch", "prefill", "cached", ""):
        table.add_column(name)
    chosen = found["prefill"] or found["decode"]
    for one in found["candidates"]:
        instance = escape(one["instance"])  # an IPv6 address has brackets
        if one["why_not"]:
            table.add_row(instance, "", "", "", "", "", escape(one["why_not"]))
            continue
        times = (f"{one[name]:.3f} s" for name in ("score_s", "queue_s", "fetch_s", "prefill_s"))
        mark = "chosen" if one["instance"] == chosen else ""
        table.add_row(instance, *times, str(one["cached_tokens"]), mark)
    return table


def _times(found: dict[str, Any]) -> Table:
    actual, predicted = found["actual"], found["prediction"] or {}
    table = Table("", "predicted", "measured", title="times")
    rows = (
        ("queue", "queue_s", "queue_s"),
        ("load", "fetch_s", "load_s"),
        ("prefill", "prefill_s", "prefill_s"),
        ("TTFT", "ttft_s", "ttft_s"),
        ("TBT", "tbt_s", "tbt_s"),
    )
    for label, before, after in rows:
        table.add_row(label, _seconds(predicted.get(before)), _seconds(actual[after]))
    table.add_row("output tokens", str(predicted.get("output_tokens") or ""), str(actual["output_tokens"]))
    table.add_row("tokens cached + loaded", "", f"{actual['cached_tokens']} + {actual['loaded_tokens']}")
    return table


def _stages(rows: list[dict[str, Any]]) -> Table:
    """A row for each stage of a prefill group; its bar is the time from its first chunk to its last."""
    whole_s = max(one["ended_s"] for one in rows) or 1.0
    num_chunks = rows[0]["num_chunks"]
    chunks = f"{num_chunks} chunk" + ("s" if num_chunks != 1 else "")
    table = Table(title=f"stages of the prefill group: {chunks} in {whole_s:.3f} s")
    for name in ("stage", "layers", "computed", "idle"):
        table.add_column(name, no_wrap=True)
    table.add_column("from the first chunk to the last", no_wrap=True, width=_BAR_WIDTH)
    for number, one in enumerate(rows):
        first, end = (round(_BAR_WIDTH * one[name] / whole_s) for name in ("began_s", "ended_s"))
        layers = f"{one['first_layer']}-{one['end_layer'] - 1}"
        times = (f"{one[name]:.3f} s" for name in ("computed_s", "waited_s"))
        table.add_row(str(number), layers, *times, " " * first + "━" * (end - first))
    return table


def _blocks(rows: list[dict[str, Any]]) -> Table:
    table = Table("blocks", "verdict", "where", "rule", "before the request", title="blocks")
    for one in rows:
        first, last = one["first"], one["first"] + one["num"] - 1
        when = f"{one['seconds_before']:.1f} s" if one["seconds_before"] else ""
        blocks = f"{first}-{last}" if last > first else str(first)
        verdict = one["verdict"].replace("_", " ")
        table.add_row(blocks, verdict, escape(one["where"]), escape(one["rule"]), when)
    return table


_PARTS = {
    "hit": "hit",
    "prompt_changed": "prompt changed",
    "evicted": "evicted",
    "elsewhere": "elsewhere",
    "in_flight": "in flight",
    "block_tail": "block tail",
    "new": "new",
}


def show_misses(console: Console, report: dict[str, Any]) -> None:
    """Print what became of a prompt's tokens, and where it left its nearest sibling."""
    tokens = report["tokens"]
    if tokens is not None:
        parts = ", ".join(f"{tokens[name]} {label}" for name, label in _PARTS.items() if tokens[name])
        whole = max(1, sum(tokens.values()))
        rates = f"hit rate {tokens['hit'] / whole:.1%}, attainable {report['attainable_tokens'] / whole:.1%}"
        console.print(f"tokens: {parts}; {rates}", highlight=False)
    left = report["left_sibling"]
    if left is None:
        return
    where = f"{left['unit'].removesuffix('s')} {left['offset']}"
    session = "of the same session" if left["is_same_session"] else "of this tenant"
    console.print(
        f"left its nearest sibling at {where}: [bold]{left['kind'].replace('_', ' ')}[/bold]. "
        f"{escape(left['detail'])} Lost: {left['lost_tokens']} tokens.",
        highlight=False,
    )
    table = Table(title=f"texts at {where}", show_lines=True)
    table.add_column("", no_wrap=True)
    table.add_column("text", overflow="fold")
    table.add_row("token", escape(repr(left["token"])))
    if left["ours"] is not None:
        table.add_row("this prompt", escape(left["ours"]))
    hidden = "(shown to its tenant's key, or with --admin-api-key)"
    theirs = left["theirs"] if left["theirs"] is not None else hidden
    name = f" {left['sibling']}" if left["sibling"] else ""
    table.add_row(f"sibling {session}\n{left['sibling_age_s']:.1f} s before{escape(name)}", escape(theirs))
    console.print(table)
    if left["rule"]:
        console.print(f"a hygiene rule would avoid it: {escape(left['rule'])}", highlight=False)


_SUMS = "prompt tokens by what became of them"


def _sums(rows: list[dict[str, Any]]) -> Table:
    """A row for each tenant and model, for a terminal with a column for every number."""
    table = Table(title=_SUMS)
    for name in ("tenant", "model"):
        table.add_column(name, overflow="fold", min_width=8)
    for name in ("tokens", *_PARTS.values(), "hit rate", "attainable"):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        shares = _shares(row).values()
        table.add_row(
            escape(row["tenant"]) or DEFAULT_TENANT, escape(row["model"]), str(_num_tokens(row)), *shares
        )
    return table


def _sums_of(row: dict[str, Any]) -> Table:
    """The same of one tenant and model, a row for each number."""
    table = Table()
    table.add_column("tokens", no_wrap=True)
    table.add_column(str(_num_tokens(row)), justify="right", no_wrap=True)
    for name, share in _shares(row).items():
        table.add_row(name, share)
    return table


def _num_tokens(row: dict[str, Any]) -> int:
    tokens: dict[str, int] = row["tokens"]
    return sum(tokens.values())


def _shares(row: dict[str, Any]) -> dict[str, str]:
    whole = max(1, _num_tokens(row))
    shares = {label: row["tokens"][name] / whole for name, label in _PARTS.items()}
    shares |= {"hit rate": row["hit_rate"], "attainable": row["attainable_hit_rate"]}
    return {label: f"{share:.1%}" for label, share in shares.items()}


def _differences(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "difference", "prompts", "tokens lost", "rule that avoids it", title="the latest prompts that changed"
    )
    for row in rows:
        cells = (row["kind"].replace("_", " "), str(row["prompts"]), str(row["lost_tokens"]))
        table.add_row(*cells, escape(row["rule"]))
    return table


def _seconds(value: float | None) -> str:
    return f"{value:.3f} s" if value else ""
