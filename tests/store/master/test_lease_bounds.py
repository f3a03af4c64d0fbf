# SPDX-License-Identifier: Apache-2.0
"""Upper bounds of promises in a line of masters with different settings."""

from __future__ import annotations

import dataclasses

from mooncake.store.master.lease_bounds import LeaseBounds
from mooncake.store.master.log_records import LineBegan, Record
from mooncake.store.settings import MasterSettings

SHORT = MasterSettings(lease_s=2.0, put_s=1.0, grace_s=1.0)
LONG = dataclasses.replace(SHORT, lease_s=6.0)


def test_a_master_records_how_long_its_promises_last_when_it_begins() -> None:
    kept: list[Record] = []
    lease_bounds = LeaseBounds(SHORT, kept.append)
    lease_bounds.begin(7, 10.0)
    assert kept == [LineBegan(7, 2.0, 2.0)] and lease_bounds.deadline() is None


def test_longer_promises_of_a_predecessor_count_until_they_are_over() -> None:
    kept: list[Record] = []
    lease_bounds = LeaseBounds(SHORT, kept.append)
    lease_bounds.applied(LineBegan(7, 6.0, 6.0))
    assert (lease_bounds.lease_s, lease_bounds.rest_s) == (6.0, 6.0)
    lease_bounds.begin(7, 10.0)
    assert kept == [], "the next master has the record, too"
    assert lease_bounds.record(7) == LineBegan(7, 6.0, 6.0)
    lease_bounds.expire(15.9)
    assert kept == [] and lease_bounds.deadline() == 16.0
    lease_bounds.expire(16.0)
    assert kept == [LineBegan(7, 2.0, 2.0)] and lease_bounds.rest_s == 2.0


def test_a_record_of_an_older_version_sets_no_bounds() -> None:
    lease_bounds = LeaseBounds(LONG, lambda record: None)
    lease_bounds.applied(LineBegan(7))
    assert (lease_bounds.lease_s, lease_bounds.rest_s) == (6.0, 6.0)
