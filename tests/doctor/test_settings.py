# SPDX-License-Identifier: Apache-2.0
"""What may be examined, and which gateway is meant where none is named."""

from __future__ import annotations

import pytest

from mooncake.doctor.settings import DoctorSettings
from mooncake.errors import InvalidArgument


def test_the_gateway_of_this_host_where_nothing_is_named() -> None:
    assert DoctorSettings().gateway_url == "http://127.0.0.1:8000"
    assert DoctorSettings(engine=("a:8000",)).gateway_url == ""
    assert DoctorSettings(master="a:50051").gateway_url == ""
    assert DoctorSettings(disk="/mnt/nvme").gateway_url == ""
    assert DoctorSettings(url="http://b:80", engine=("a:8000",)).gateway_url == "http://b:80"


@pytest.mark.parametrize(
    "url", ["ftp://a:1", "http://a b:1", "http://user@a:1", "http://", "http://a..b", "a:0", "a:99999"]
)
def test_addresses(url: str) -> None:
    with pytest.raises(InvalidArgument, match="an address such as"):
        DoctorSettings(url=url)
    with pytest.raises(InvalidArgument, match="an address such as"):
        DoctorSettings(engine=("a:8000", url))


def test_event_endpoints() -> None:
    DoctorSettings(events=("a:8000=tcp://a:5557", "b:8000=tcp://b:5557=tcp://b:5558"))
    for one in ("a:8000", "a=tcp://a:5557", "a:8000=http://a:1"):
        with pytest.raises(InvalidArgument, match="replay endpoint"):
            DoctorSettings(events=(one,))


def test_a_named_master_means_a_shared_store() -> None:
    assert DoctorSettings(master="a:50051").expectations.shares_store
    assert not DoctorSettings().expectations.shares_store
    assert DoctorSettings(disk_write_mb_s=500.0).expectations.disk_bytes_per_s == 5e8
