# SPDX-License-Identifier: Apache-2.0
"""The examination as a daemon: it is repeated, logged when something changes, and exported as metrics.

It owns the series: one gauge for each link and address, and one for each finding. Series of addresses that
are no longer part of the deployment end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import Gauge

from mooncake import clock, metrics
from mooncake.doctor.checks import examine
from mooncake.doctor.examination import Examination
from mooncake.doctor.facts import Facts
from mooncake.doctor.findings import DoctorFinding, Link, Severity
from mooncake.doctor.settings import DoctorSettings
from mooncake.http.server import serve_metrics
from mooncake.log import get_logger
from mooncake.security import check_address, process_identity

log = get_logger(__name__)

_link_ok = Gauge(
    "mooncake_doctor_link_ok",
    "1 where the last examination found nothing broken or wasteful on this link at this address.",
    ["link", "where"],
    registry=metrics.registry,
)
_findings = Gauge(
    "mooncake_doctor_findings",
    "Findings of the last examination, by code and severity.",
    ["code", "severity"],
    registry=metrics.registry,
)
_seconds = Gauge(
    "mooncake_doctor_examination_seconds",
    "Duration of the last examination.",
    registry=metrics.registry,
)
_ended_at = Gauge(
    "mooncake_doctor_examination_timestamp_seconds",
    "When the last examination ended, in seconds since 1970.",
    registry=metrics.registry,
)


async def watch(settings: DoctorSettings) -> None:
    """Examine until cancelled, and serve metrics.

    Raises:
        AddressInUse: the port is taken.
        InvalidArgument: it would listen beyond loopback without a credential.
    """
    check_address(settings.metrics_host)
    server = serve_metrics(settings.metrics_host, settings.metrics_port, process_identity().server_tls)
    log.info("ready", role="doctor", address=f"{settings.metrics_host}:{server.port}")
    examination, board = Examination(settings), LinkBoard()
    try:
        while True:
            began = clock.monotonic()
            facts = await examination.run()
            findings = examine(facts, settings.expectations)
            seconds = clock.monotonic() - began
            board.update(facts, findings)
            _seconds.set(seconds)
            _ended_at.set(clock.wall())
            log.info("examined", findings=len(findings), seconds=round(seconds, 2))
            await asyncio.sleep(max(0.0, settings.watch_s - seconds))
    finally:
        server.close()


class LinkBoard:
    """The last examination as series; logs the findings that are new or gone."""

    def __init__(self) -> None:
        self._places: set[tuple[str, str]] = set()
        self._found: dict[tuple[str, str], DoctorFinding] = {}
        self._codes: set[tuple[str, str]] = set()

    def update(self, facts: Facts, findings: Sequence[DoctorFinding]) -> None:
        """Set all series to this examination."""
        alarms = [one for one in findings if one.severity is not Severity.NOTICE]
        bad = {(one.link.value, address_of(one)) for one in alarms}
        places = {*examined_links(facts), *bad}
        for place in self._places - places:
            _link_ok.remove(*place)
        for place in sorted(places):
            _link_ok.labels(*place).set(place not in bad)
        self._places = places
        codes = {(one.code, one.severity.value) for one in findings}
        for labels in self._codes - codes:
            _findings.remove(*labels)
        for code, severity in sorted(codes):
            _findings.labels(code, severity).set(sum(one.code == code for one in findings))
        self._codes = codes
        self._log({(one.code, one.where): one for one in findings})

    def _log(self, found: dict[tuple[str, str], DoctorFinding]) -> None:
        for key, one in found.items():
            if key in self._found:
                continue
            write = log.info if one.severity is Severity.NOTICE else log.warning
            write("link_finding", code=one.code, severity=one.severity, where=one.where, seen=one.seen)
        for key, one in self._found.items():
            if key not in found:
                log.info("link_finding_gone", code=one.code, where=one.where)
        self._found = found


def address_of(found: DoctorFinding) -> str:
    """The address in a finding's place, without what is added in parentheses."""
    return found.where.partition(" (")[0]


def examined_links(facts: Facts) -> Iterable[tuple[str, str]]:
    """Links and addresses that were examined."""
    if facts.gateway is not None:
        yield Link.GATEWAY.value, facts.gateway.address
        if facts.gateway.instances is not None:
            absent = facts.gateway.absent
            rows = [row.address for row in facts.gateway.instances if row not in absent]
            yield from ((Link.CONDUCTOR.value, one) for one in (*rows, *facts.gateway.conductors))
    for engine in facts.engines:
        yield Link.ENGINE.value, engine.address
        yield Link.HOST.value, engine.address
        if engine.publishers:
            yield Link.EVENTS.value, engine.address
        if engine.crossed_tokens is not None or engine.store_growth is not None:
            yield Link.CONNECTOR.value, engine.address
    if facts.store is not None:
        yield Link.STORE.value, facts.store.address
