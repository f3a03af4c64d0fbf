# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``setup`` and the environment variables, and their rows in ``docs/store.md``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.compat.store.setup_arguments import (
    ALWAYS_SO,
    NOT_HONOURED,
    DropinSettings,
    parse_size,
    read_environment,
    setup_arguments,
)
from mooncake.config import options
from mooncake.errors import InvalidArgument

DOCS = (Path(__file__).parents[3] / "docs" / "store.md").read_text()
LEAST = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE"}


def test_sizes_are_powers_of_1024() -> None:
    assert parse_size("0x1000000") == parse_size("+16MB") == 16 << 20
    assert [parse_size(text) for text in ("16MB", "16 MB", "1gb", "4096", 7)] == [
        16 << 20,
        16 << 20,
        1 << 30,
        4096,
        7,
    ]


def test_a_dictionary_has_defaults_and_aliases() -> None:
    arguments = setup_arguments(LEAST)
    assert (arguments.global_segment_size, arguments.local_buffer_size) == (16 << 20, 16 << 20)
    assert (arguments.protocol, arguments.master_server_addr) == ("tcp", "127.0.0.1:50051")
    arguments = setup_arguments(
        {**LEAST, "master_server_address": "m:1", "device_name": "mlx5_0", "tenant_id": 7}
    )
    assert (arguments.master_server_addr, arguments.rdma_devices, arguments.tenant_id) == (
        "m:1",
        "mlx5_0",
        "7",
    )
    arguments = setup_arguments({**LEAST, "master_server_address": "m:1", "master_server_addr": "n:2"})
    assert arguments.master_server_addr == "n:2", "the key's own name takes precedence"


@pytest.mark.parametrize("written", ["", "maybe", "off", False])
def test_a_word_that_is_no_boolean_counts_as_false(caplog: pytest.LogCaptureFixture, written: object) -> None:
    arguments = setup_arguments({**LEAST, "enable_ssd_offload": written})
    assert arguments.enable_ssd_offload is False
    assert ("enable_ssd_offload" in caplog.text) is (written == "maybe")


def test_misspelt_keys_are_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    setup_arguments({**LEAST, "local_buffer_sise": 1, "ipc_socket_path": "/x"})
    assert "local_buffer_size" in caplog.text and "ipc" not in caplog.text


def test_the_environment(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "MC_STORE_CLIENT_MIN_PORT": "20000",
        "MC_STORE_CLIENT_MAX_PORT": "20010",
        "MOONCAKE_OFFLOAD_ENABLED": "true",
        "MC_STORE_LOCAL_HOT_CACHE_SIZE": "1",
    }
    settings = read_environment(given)
    assert (settings.min_port, settings.max_port, settings.ssd_offload) == (20000, 20010, True)
    assert "MC_STORE_LOCAL_HOT_CACHE_SIZE" in caplog.text
    with pytest.raises(InvalidArgument, match="MC_STORE_CLIENT_MIN_PORT"):
        read_environment({"MC_STORE_CLIENT_MIN_PORT": "20000"})
    with pytest.raises(InvalidArgument, match="MC_STORE_CLIENT_SETUP_RETRIES"):
        read_environment({"MC_STORE_CLIENT_SETUP_RETRIES": "many"})
    assert read_environment({"MC_STORE_CLIENT_SETUP_RETRIES": ""}) == read_environment({})


def test_every_variable_is_documented() -> None:
    for option in options(DropinSettings):
        for variable in option.more_variables or [f"MOONCAKE_DROPIN_{option.name.upper()}"]:
            assert f"| `{variable}` | {option.sentence} |" in DOCS
    for variable, reason in NOT_HONOURED.items():
        assert f"| `{variable}` | {reason} |" in DOCS
    for variable, reason in ALWAYS_SO.items():
        assert f"| `{variable}` | None: {reason}. |" in DOCS


@pytest.mark.parametrize("name", ["/tmp/a\0b", "/tmp/\udc80"])
@pytest.mark.parametrize("field", ["ssd_offload_path", "root_fs_dir", "cluster_id"])
def test_names_that_no_file_can_have(field: str, name: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        setup_arguments({**LEAST, field: name}).checked()
