# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from bench.forked_clients import ForkedClients, Operations, processor_s


def test_each_process_does_what_is_asked() -> None:
    def connect(index: int) -> Operations:
        return {"look": lambda: None, "read": lambda: os.close(os.open("/dev/null", os.O_RDONLY))}

    clients = ForkedClients(3, connect)
    try:
        assert len({os.getpid(), *clients.processes}) == 4
        for what in ("look", "read"):
            found = clients.measure(what, 0.02)
            assert len(found["counts"]) == 3 and all(found["counts"])
            assert found["per_s"] == sum(found["counts"]) / 0.02
            assert found["p50_s"] > 0 and (found["p99_s"] is None) == (sum(found["counts"]) < 100)
        assert processor_s(clients.processes[0]) > 0
    finally:
        clients.close()


def test_a_client_that_fails_is_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    def connect(index: int) -> Operations:
        def fails_later() -> None:
            calls.append(index)
            if len(calls) > 1:
                raise ValueError("a wrong reply")

        calls: list[int] = []
        return {"fail": fails_later}

    clients = ForkedClients(2, connect)
    with pytest.raises(RuntimeError, match="a client ended"):
        clients.measure("fail", 0.02)
    clients.close()
    assert "ValueError: a wrong reply" in capfd.readouterr().err
