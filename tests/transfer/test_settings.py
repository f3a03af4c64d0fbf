# SPDX-License-Identifier: Apache-2.0
"""The table ``[transfer]``: what a role adds to it, and which transports may be missing."""

from __future__ import annotations

import pytest

from mooncake.errors import Unavailable
from mooncake.transfer import TransferEngine, TransferSettings
from mooncake.transfer.transports import SCHEMES


def test_a_role_fills_in_what_the_table_leaves_open() -> None:
    own = {"name": "node-1", "tcp_port": 7, "metadata_ttl_s": 90.0}
    settings = TransferSettings().for_role("10.0.0.1", "1.2.3.4", **own)
    assert (settings.listen_host, settings.advertise_host) == ("10.0.0.1", "1.2.3.4")
    assert (settings.name, settings.tcp_port, settings.metadata_ttl_s) == ("node-1", 7, 90.0)
    table = TransferSettings(name="other", tcp_port=8, listen_host="10.0.0.1,10.0.1.1", metadata_ttl_s=5)
    settings = table.for_role("127.0.0.1", "1.2.3.4", **own)
    assert settings == table, "an address to publish belongs to the addresses that it is for"
    advertised = TransferSettings(advertise_host="5.6.7.8").for_role("10.0.0.1", "1.2.3.4")
    assert (advertised.listen_host, advertised.advertise_host) == ("10.0.0.1", "5.6.7.8")


def test_a_tool_takes_nothing_that_belongs_to_one_process() -> None:
    table = TransferSettings(name="n", tcp_port=7, handshake_port=8, metadata="P2PHANDSHAKE", num_streams=3)
    assert table.for_tool() == TransferSettings(num_streams=3)


def test_without_addresses_an_engine_is_reached_from_this_host_only() -> None:
    with TransferEngine(TransferSettings(transports=("tcp",))) as engine:
        assert engine.describe().endpoints["tcp"].startswith("127.0.0.1:")


@pytest.fixture
def _without_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "rdma", "tests.transfer.test_settings:NoDevice")


class NoDevice:
    """An rdma transport of a host that has no device."""

    def __init__(self, context: object) -> None:
        raise Unavailable("rdma transport needs an active RDMA device, and none is here")


@pytest.mark.usefixtures("_without_rdma")
@pytest.mark.parametrize("order", [("rdma", "tcp"), ("shm", "rdma", "tcp")])
def test_rdma_before_tcp_is_left_out_of_a_host_without_it_and_the_log_says_so(
    order: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with TransferEngine(TransferSettings(name="n", transports=order)) as engine:
        assert "rdma" not in engine.describe().endpoints and "tcp" in engine.describe().endpoints
    [record] = [record for record in caplog.records if record.message == "rdma_unavailable"]
    fields: dict[str, str] = record.fields  # type: ignore[attr-defined]
    assert fields["segment"] == "n" and "none is here" in fields["reason"]


@pytest.mark.usefixtures("_without_rdma")
@pytest.mark.parametrize(
    "settings",
    [
        TransferSettings(transports=("rdma",)),
        TransferSettings(transports=("shm", "rdma")),
        TransferSettings(transports=("rdma", "tcp"), rdma_devices=("mlx5_0",)),
    ],
)
def test_rdma_that_nothing_replaces_or_whose_devices_are_named_must_be_there(
    settings: TransferSettings,
) -> None:
    with pytest.raises(Unavailable, match="none is here"):
        TransferEngine(settings)
