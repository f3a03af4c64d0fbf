# SPDX-License-Identifier: Apache-2.0
"""What ``mooncake doctor`` prints, and its exit status."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from mooncake.cli.doctor import as_json, examined, exit_status, show
from mooncake.doctor.facts import (
    EngineFacts,
    EngineKind,
    Facts,
    GatewayFacts,
    Reach,
    Shot,
    StoreFacts,
    Trouble,
)
from mooncake.doctor.findings import DoctorFinding, Severity, finding

FINDINGS = [
    finding("no_instance", "g:80", "0"),
    finding("events_off", "[red]e:1", "none"),
    finding("events_unknown", "e:2", ""),
]


@pytest.mark.parametrize(
    ("findings", "broken", "wasteful", "notice"),
    [([], 0, 0, 0), (FINDINGS[2:], 0, 0, 1), (FINDINGS[1:], 0, 1, 1), (FINDINGS, 1, 1, 1)],
)
def test_exit_status(findings: list[DoctorFinding], broken: int, wasteful: int, notice: int) -> None:
    found = [exit_status(findings, severity) for severity in Severity]
    assert found == [broken, wasteful, notice]


def some_facts() -> Facts:
    shots = [Shot(200, prompt_tokens=40, cached_tokens=cached) for cached in (0, 32)]
    engine = EngineFacts("e:1", kind=EngineKind.VLLM, version="0.32.0", role="decode", block_tokens=16)
    engine.publishers, (engine.first, engine.second) = [], shots
    lost = EngineFacts("e:2", Reach(Trouble.SILENT, "no answer"))
    gateway = GatewayFacts("g:80", is_ours=True, version="1", conductor="inside this gateway")
    return Facts([engine, lost], gateway, StoreFacts("m:50051", capacity_bytes=1 << 30, num_segments=2))


def test_people_get_lines_of_what_was_examined() -> None:
    gateway, engine, lost, store = examined(some_facts())
    assert gateway == "gateway  g:80  mooncake 1, conductor inside this gateway"
    assert (
        "vllm 0.32.0, decode, blocks of 16 tokens, no events; canary of 40 tokens: 0 then 32 cached" in engine
    )
    assert lost == "engine   e:2  silent"
    assert store.endswith("2 segments, 0 of 1024 MiB used")


def test_people_get_what_where_why_and_the_remedy() -> None:
    output = io.StringIO()
    show(Console(file=output, width=200), some_facts(), FINDINGS, 1.5)
    text = output.getvalue()
    assert "[red]e:1" in text, "what a server sends is no markup"
    for one in FINDINGS:
        assert all(part in text for part in (one.code, one.where, one.seen, one.why, one.remedy))
    assert "1 broken, 1 wasteful, 1 notice; examined in 1.5 s" in text


def test_programs_get_findings_and_facts() -> None:
    found = msgspec.json.decode(msgspec.json.encode(as_json(some_facts(), FINDINGS, 1.5)))
    assert found["counts"] == {"broken": 1, "wasteful": 1, "notice": 1} and found["seconds"] == 1.5
    assert found["findings"][0].keys() == {"code", "severity", "link", "where", "seen", "why", "remedy"}
    assert found["facts"]["engines"][0]["second"]["cached_tokens"] == 32
