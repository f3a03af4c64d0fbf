# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import resource

import pytest

from mooncake.file_limit import connection_limit, connections_within


def test_room_is_below_the_limit_of_files() -> None:
    assert [connections_within(files) for files in (0, 64, 256, 1024, 1 << 20, -1)] == [
        8,
        8,
        96,
        480,
        1 << 14,
        1 << 14,
    ]
    assert all(2 * connections_within(files) + 64 <= files for files in range(80, 40_000))


def test_connections_stay_below_the_limit_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (256, 256)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    assert connection_limit() == 96 and connection_limit(10) == 10 and connection_limit(5000) == 96
    limits = (1024, 4096)
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: None)
    assert connection_limit() == (4096 - 64) // 2, "the soft limit is raised first"
