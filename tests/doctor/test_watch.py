# SPDX-License-Identifier: Apache-2.0
"""The daemon's series follow the last examination, and its log has what changed."""

from __future__ import annotations

import logging
import re

import pytest

from mooncake import metrics
from mooncake.doctor.facts import EngineFacts, Facts, GatewayFacts, InstanceFacts, PublisherFacts, StoreFacts
from mooncake.doctor.findings import finding
from mooncake.doctor.watch import LinkBoard

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def series(name: str) -> dict[str, float]:
    text = metrics.page().decode()
    return {labels: float(value) for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.M)}


def some_facts(*engines: str) -> Facts:
    publishers = [PublisherFacts("tcp://10.0.0.1:5557")]
    facts = Facts([EngineFacts(one, publishers=publishers, crossed_tokens=0) for one in engines])
    facts.gateway = GatewayFacts("10.0.0.9:80", instances=[InstanceFacts(A, "decode", "ready")])
    facts.store = StoreFacts("10.0.0.8:50051")
    return facts


def test_absent_instances_have_no_gauge_and_conductors_have_one() -> None:
    facts = some_facts(A)
    assert facts.gateway is not None and facts.gateway.instances is not None
    facts.gateway.instances.append(InstanceFacts(B, "decode", "starting", has_answered=False))
    facts.gateway.conductors = {"h:1": True, "h:2": False}
    board = LinkBoard()
    board.update(facts, [finding("conductor_lost", "h:2", "1 of 2")])
    links = series("mooncake_doctor_link_ok")
    conductors = {labels: ok for labels, ok in links.items() if 'link="conductor"' in labels}
    assert conductors == {
        f'link="conductor",where="{A}"': 1,
        'link="conductor",where="h:1"': 1,
        'link="conductor",where="h:2"': 0,
    }
    board.update(Facts(), [])


def test_one_gauge_for_each_link(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    board = LinkBoard()
    off = finding("events_off", B, "it names no publisher")
    wrong = finding("events_wrong_topic", f"{A} (tcp://10.0.0.1:5557)", "topic 'b'")
    notice = finding("events_unknown", A, "none")
    board.update(some_facts(A, B), [wrong, off, notice])
    links = series("mooncake_doctor_link_ok")
    assert links[f'link="events",where="{A}"'] == links[f'link="events",where="{B}"'] == 0
    assert links[f'link="engine",where="{A}"'] == links['link="gateway",where="10.0.0.9:80"'] == 1
    assert links['link="store",where="10.0.0.8:50051"'] == links[f'link="connector",where="{B}"'] == 1
    assert links[f'link="conductor",where="{A}"'] == 1
    found = series("mooncake_doctor_findings")
    assert found['code="events_off",severity="wasteful"'] == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]

    caplog.clear()
    board.update(some_facts(A), [wrong])
    links = series("mooncake_doctor_link_ok")
    assert not [labels for labels in links if B in labels], "it left"
    assert 'code="events_off",severity="wasteful"' not in series("mooncake_doctor_findings")
    assert {record.getMessage().split()[0] for record in caplog.records} == {"link_finding_gone"}

    caplog.clear()
    board.update(some_facts(A), [wrong])
    assert not caplog.records, "nothing has changed"
