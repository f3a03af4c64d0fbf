"""Where a connector finds the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.connectors.session import PoolSettings
from mooncake.errors import InvalidArgument


def test_the_extra_configuration_says_where_the_store_is() -> None:
    settings = PoolSettings.read({"mooncake_store_addr": "host:50051"}, {"MOONCAKE_CONFIG_PATH": "/nowhere"})
    assert (settings.master, settings.lent_bytes, settings.transports) == ("host:50051", 0, ())


def test_a_protocol_that_is_named_is_the_only_one() -> None:
    settings = PoolSettings.read({"mooncake_store_addr": "host:1", "protocol": "tcp"}, {})
    assert settings.transports == ("tcp",)


@pytest.mark.parametrize(("mode", "lent"), [("embedded", 16 << 20), ("standalone-store", 0)])
def test_the_existing_file_says_it_and_what_is_lent(tmp_path: Path, mode: str, lent: int) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(
        json.dumps({
            "metadata_server": "P2PHANDSHAKE", "master_server_address": "host:50051", "protocol": "tcp",
            "device_name": "", "mode": mode, "global_segment_size": "16MB", "tenant_id": "t",
        })
    )  # fmt: skip
    settings = PoolSettings.read({}, {"MOONCAKE_CONFIG_PATH": str(file)})
    assert (settings.master, settings.lent_bytes, settings.tenant) == ("host:50051", lent, "t")


def test_nowhere_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="mooncake_store_addr"):
        PoolSettings.read({}, {})
