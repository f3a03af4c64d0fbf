# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import socket
from random import Random

import pytest

from mooncake.cli.ports import check_free, free_ports
from mooncake.errors import AddressInUse, InvalidArgument


def test_a_taken_port_is_named_with_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(AddressInUse, match=f"port {port} on 127.0.0.1 is in use; .*--port"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)


def test_any_free_port_is_fine() -> None:
    check_free("127.0.0.1", 0)


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="an address of this machine"):
        check_free("192.0.2.1", 8000)
    for name in ("a..b", "x" * 64):
        with pytest.raises(InvalidArgument, match="no host can have this name"):
            check_free(name, 8000)


def test_free_ports_are_distinct_and_below_the_outgoing_range() -> None:
    ports = free_ports("127.0.0.1", 20, Random(1))
    assert len(set(ports)) == 20
    assert all(20_000 <= port < 32_768 for port in ports)


def test_a_port_in_use_is_not_offered() -> None:
    [taken] = free_ports("127.0.0.1", 1, Random(2))
    with socket.create_server(("127.0.0.1", taken)):
        assert taken not in free_ports("127.0.0.1", 1, Random(2))
    assert free_ports("127.0.0.1", 1, Random(2)) == [taken]
    assert taken not in free_ports("127.0.0.1", 1, Random(2), besides=[taken])
