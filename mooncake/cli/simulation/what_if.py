# SPDX-License-Identifier: Apache-2.0
"""``mooncake what-if``: the effect of a change to a live cluster, as its gateway simulates it.

Knows the answer's form and the terminal; the gateway has the requests, and a process beside it simulates.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from mooncake.cli.explain import ask_gateway, read_answer
from mooncake.cli.output import wide_console
from mooncake.errors import AccessDenied, MooncakeError, PeerLost, ProtocolError

_TIMEOUT_S = 200.0
_NAMES = {
    "ttft_mean_s": "TTFT mean",
    "ttft_p50_s": "TTFT p50",
    "ttft_p90_s": "TTFT p90",
    "tbt_mean_s": "TBT mean",
    "tbt_p50_s": "TBT p50",
    "tbt_p90_s": "TBT p90",
    "e2e_mean_s": "end to end mean",
    "hit_rate": "hit rate",
    "goodput_per_s": "good requests/s",
}


def what_if_command(
    url: Annotated[str, typer.Option("--url", help="Address of the gateway.")] = "http://127.0.0.1:8000",
    memory: Annotated[
        float, typer.Option("--memory", min=0.001, help="Factor of the memory for KV: 2 is twice as much.")
    ] = 1.0,
    prefill: Annotated[int, typer.Option("--prefill", help="Prefill instances more, or (-1) fewer.")] = 0,
    decode: Annotated[int, typer.Option("--decode", help="Decode instances more, or (-1) fewer.")] = 0,
    policy: Annotated[str, typer.Option("--policy", help="Another policy of the conductor.")] = "",
    load: Annotated[
        float, typer.Option("--load", min=0.001, help="Factor by which the same requests come faster.")
    ] = 1.0,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.01, help="Requests of the last minutes, this many, count.")
    ] = 10.0,
    admin_api_key: Annotated[
        str,
        typer.Option(
            "--admin-api-key",
            envvar="ADMIN_API_KEY",
            show_envvar=False,
            help="Key of the operators.",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the gateway's answer.")] = False,
) -> None:
    """Predict what a change to a running cluster would do, from its latest requests. Changes nothing.

    The same requests are simulated with and without the change; that the first of both agrees with what was
    measured is shown beside it.
    """
    change = {"memory": memory, "prefill": prefill, "decode": decode, "policy": policy, "load": load}
    unchanged = {"memory": 1.0, "prefill": 0, "decode": 0, "policy": "", "load": 1.0}
    made = {name: value for name, value in change.items() if value != unchanged[name]}
    answer = _ask(url.rstrip("/"), {"change": made, "minutes": minutes}, admin_api_key)
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    console = wide_console()
    console.print(_table(answer))
    for note in answer["notes"]:
        console.print(f"note: {note}", markup=False)


def _ask(url: str, body: dict[str, Any], admin_api_key: str) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", **({"X-API-Key": admin_api_key} if admin_api_key else {})}
    content = ask_gateway(
        url,
        "/v1/what_if",
        headers,
        lambda status, answer: _refused(status, answer, url),
        _TIMEOUT_S,
        json.dumps(body).encode(),
    )
    found: dict[str, Any] = read_answer(content, url)
    return found


def _refused(status: int, body: bytes, url: str) -> Exception:
    try:
        found = json.loads(body)["error"]
        message = str(found["message"])
    except (ValueError, KeyError, TypeError):
        return ProtocolError(f"{url} answered {status}; is it a Mooncake gateway?")
    if status in (401, 403):
        return AccessDenied(f"{message}; pass --admin-api-key")
    if status == 400:
        return MooncakeError(message)
    return PeerLost(f"{url} answered {status}: {message}")


def _table(answer: dict[str, Any]) -> Table:
    change = ", ".join(f"{name} {value}" for name, value in answer["change"].items()) or "nothing"
    shown = Table(
        title=f"{answer['rows']:,} requests of {answer['minutes']:.1f} minutes; change: {escape(change)}",
        caption=(
            "expected: what was measured, with the simulated effect (90 % interval over slices of time). "
            "error of the model: the cluster as it is, simulated, against what was measured."
        ),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
    )
    for number, heading in enumerate(
        ("", "measured", "expected", "effect", "low-high", "error of the model")
    ):
        shown.add_column(heading, justify="right" if number else "left")
    for name, title in _NAMES.items():
        effect, error = answer["effect"].get(name), answer["model_error"].get(name)
        is_rate = name == "hit_rate"
        known = ["", "", ""]  # nothing to relate it to, which a note says
        if effect is not None:
            known = [
                _value(name, answer["expected"][name]),
                _relative(effect["value"], is_rate),
                f"{_relative(effect['low'], is_rate)} to {_relative(effect['high'], is_rate)}",
            ]
        measured = _value(name, _measured(answer["measured"], name))
        shown.add_row(title, measured, *known, "" if error is None else _relative(error, is_rate))
    return shown


def _measured(figures: dict[str, Any], name: str) -> float:
    if name in figures:
        return float(figures[name])
    field, which, _ = name.split("_")
    return float(figures[f"{field}_s"][which])


def _value(name: str, value: float) -> str:
    if name == "hit_rate":
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "goodput_per_s" else f"{value * 1000:,.1f} ms"


def _relative(value: float, is_rate: bool) -> str:
    return f"{value * 100:+.1f} points" if is_rate else f"{value:+.1%}"
