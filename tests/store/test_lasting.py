"""How long promises of a line of masters last, when they are set to different lengths."""

from __future__ import annotations

import dataclasses

from mooncake.store.lasting import Lasting
from mooncake.store.records import LineBegan, Record
from mooncake.store.settings import MasterSettings

SHORT = MasterSettings(lease_s=2.0, put_s=1.0, grace_s=1.0)
LONG = dataclasses.replace(SHORT, lease_s=6.0)


def test_a_master_says_how_long_its_promises_last_when_it_begins() -> None:
    kept: list[Record] = []
    lasting = Lasting(SHORT, kept.append)
    lasting.begin(7, 10.0)
    assert kept == [LineBegan(7, 2.0, 2.0)] and lasting.deadline() is None


def test_longer_promises_of_a_predecessor_count_until_they_are_over() -> None:
    kept: list[Record] = []
    lasting = Lasting(SHORT, kept.append)
    lasting.heard(LineBegan(7, 6.0, 6.0))
    assert (lasting.lease_s, lasting.rest_s) == (6.0, 6.0)
    lasting.begin(7, 10.0)
    assert kept == [], "the next master has heard it, too"
    assert lasting.record(7) == LineBegan(7, 6.0, 6.0)
    lasting.expire(15.9)
    assert kept == [] and lasting.deadline() == 16.0
    lasting.expire(16.0)
    assert kept == [LineBegan(7, 2.0, 2.0)] and lasting.rest_s == 2.0


def test_a_record_of_an_older_version_says_nothing() -> None:
    lasting = Lasting(LONG, lambda record: None)
    lasting.heard(LineBegan(7))
    assert (lasting.lease_s, lasting.rest_s) == (6.0, 6.0)
