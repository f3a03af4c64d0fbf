# SPDX-License-Identifier: Apache-2.0
"""``MooncakeConfig`` from files and the environment, and the errors of invalid ones."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from mooncake.compat.config_file import (
    DEFAULT_GLOBAL_SEGMENT_SIZE,
    DEFAULT_LOCAL_BUFFER_SIZE,
    MooncakeConfig,
    _parse_bool,
    _parse_segment_size,
    logger,
)

MINIMUM = {"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:50051"}


def write(folder: Path, content: Any) -> str:
    file = folder / "mooncake.json"
    file.write_text(json.dumps(content))
    return str(file)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("500gb", 500 << 30),
        ("1.5 GB", 3 << 29),
        ("16k", 16 << 10),
        ("2tb", 2 << 40),
        ("10b", 10),
        ("1e9", 10**9),
        (" 4096 ", 4096),
        ("64MB", 64 << 20),
        ("+5", 5),
        ("1_000", 1000),
        ("+1_6 mb", 16 << 20),
        ("0x1000", 4096),
    ],
)
def test_sizes(text: Any, size: int) -> None:
    assert _parse_segment_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gb",
        "1 zb",
        "-1",
        None,
        [],
        True,
        "1..5gb",
        "1__0",
        "_1",
        "++1",
        "0x",
        "1e999",
        "1e308 gb",
        math.inf,
        math.nan,
    ],
)
def test_invalid_sizes(text: Any) -> None:
    with pytest.raises(ValueError):
        _parse_segment_size(text)


def test_booleans() -> None:
    assert all(_parse_bool(word) for word in ("true", "1", "YES", "on", "enable", True, 1))
    assert not any(_parse_bool(word) for word in ("false", "0", "No", "off", "disable", False, 0))
    assert _parse_bool(2) and _parse_bool(1.0)
    assert not any(_parse_bool(nothing) for nothing in ("", " ", None, 0.0))
    with pytest.raises(ValueError, match="perhaps"):
        _parse_bool("perhaps")


def test_a_minimal_file_has_defaults(tmp_path: Path) -> None:
    config = MooncakeConfig.from_file(write(tmp_path, MINIMUM))
    assert config.global_segment_size == DEFAULT_GLOBAL_SEGMENT_SIZE == 3355443200
    assert config.local_buffer_size == DEFAULT_LOCAL_BUFFER_SIZE == 1 << 30
    assert (config.protocol, config.device_name, config.tenant_id) == ("tcp", "", "default")
    assert (config.enable_ssd_offload, config.client_http_port) == (False, 9300)


def test_null_is_the_default_of_every_field_that_has_one(tmp_path: Path) -> None:
    names = {field.name for field in dataclasses.fields(MooncakeConfig)} - set(MINIMUM)
    config = MooncakeConfig.from_file(write(tmp_path, MINIMUM | dict.fromkeys(names)))
    assert config == MooncakeConfig.from_file(write(tmp_path, MINIMUM)) and len(names) > 8


def test_an_unknown_protocol_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert MooncakeConfig.from_file(write(tmp_path, MINIMUM | {"protocol": "rmda"})).protocol == "rmda"
    assert "Unrecognised protocol 'rmda'" in caplog.text and caplog.records[0].name == logger.name


def test_a_file_with_everything(tmp_path: Path) -> None:
    more = {
        "global_segment_size": "4GB",
        "protocol": "RDMA",
        "device_name": "mlx5_0",
        "enable_ssd_offload": "true",
        "client_http_port": "9400",
        "cluster_id": "c1",
        "tenant_id": 5,
        "root_fs_dir": "/mnt/x",
    }
    config = MooncakeConfig.from_file(write(tmp_path, MINIMUM | more))
    assert (config.global_segment_size, config.protocol, config.enable_ssd_offload) == (4 << 30, "rdma", True)
    assert config.tenant_id == "5"
    assert (config.client_http_port, config.cluster_id, config.root_fs_dir) == (9400, "c1", "/mnt/x")


def test_a_misspelt_key_is_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MooncakeConfig.from_file(write(tmp_path, MINIMUM | {"global_segment_sise": 1, "mode": "embedded"}))
    assert "did you mean 'global_segment_size'?" in caplog.text and "mode" not in caplog.text


@pytest.mark.parametrize("missing", MINIMUM)
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    given = {field: value for field, value in MINIMUM.items() if field != missing}
    with pytest.raises(ValueError, match=f"Missing required config field: {missing}"):
        MooncakeConfig.from_file(write(tmp_path, given))
    with pytest.raises(ValueError, match=missing):
        MooncakeConfig.from_file(write(tmp_path, MINIMUM | {missing: "  "}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("global_segment_size", "many"),
        ("local_buffer_size", []),
        ("protocol", ""),
        ("protocol", 3),
        ("device_name", 7),
        ("enable_ssd_offload", "perhaps"),
        ("client_http_port", "http"),
        ("client_http_port", 70000),
    ],
)
def test_an_invalid_value_is_named(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        MooncakeConfig.from_file(write(tmp_path, MINIMUM | {field: value}))


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(ValueError, match=r"MOONCAKE_CONFIG_PATH.*MOONCAKE_MASTER"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "1 gb")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_ENABLED", "")
    monkeypatch.setenv("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER", "")
    config = MooncakeConfig.load_from_env()
    assert not config.enable_ssd_offload and not config.enable_client_http_server
    monkeypatch.setenv("MOONCAKE_OFFLOAD_ENABLED", "on")
    config = MooncakeConfig.load_from_env()
    assert (config.local_hostname, config.metadata_server) == ("localhost", "P2PHANDSHAKE")
    assert (config.master_server_address, config.global_segment_size) == ("m:1", 1 << 30)
    assert config.enable_ssd_offload
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", write(tmp_path, MINIMUM))
    assert MooncakeConfig.load_from_env().master_server_address == "m:50051"
