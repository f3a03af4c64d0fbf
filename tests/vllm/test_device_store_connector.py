# SPDX-License-Identifier: Apache-2.0
"""vLLM's own store connector with our options, as it is registered where vLLM computes on another device."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.vllm.engine import BLOCK_TOKENS, Engine, a_prompt
from tests.vllm_server import num_stored, running_store

MODULE = "mooncake.connectors.vllm.device_store_connector"


@pytest.fixture
def registry() -> Iterator[Any]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    before = dict(KVConnectorFactory._registry)
    yield KVConnectorFactory
    KVConnectorFactory._registry.clear()
    KVConnectorFactory._registry.update(before)


def test_on_another_device_vllm_s_own_connectors_stay_and_take_our_options(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector
    from vllm.platforms import current_platform

    from mooncake.connectors.vllm.plugin import register

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    own = registry._registry["MooncakeConnector"]
    register()
    found = registry.get_connector_class_by_name("MooncakeStoreConnector")
    assert found.__module__ == MODULE and issubclass(found, MooncakeStoreConnector)
    # Not the module: an engine that ran in this process before has registered ours for its own device.
    assert registry._registry["MooncakeConnector"] is own


def test_on_cuda_ours_are_registered_and_vllm_s_own_takes_our_options_by_its_module(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    from mooncake.connectors.vllm.plugin import register

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    register()
    for name in ("MooncakeStoreConnector", "MooncakeConnector"):
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        assert registry.get_connector_class(config).__module__.startswith("mooncake.connectors.vllm.")
    back = KVTransferConfig(
        kv_connector="MooncakeStoreConnector", kv_role="kv_both", kv_connector_module_path=MODULE
    )
    assert registry.get_connector_class(back).__name__ == "DeviceStoreConnector"


def test_the_file_has_the_store_s_address_and_is_private() -> None:
    from vllm.distributed.mooncake_store import MooncakeStoreConfig

    from mooncake.connectors.vllm.device_store_connector import configure

    environment: dict[str, str] = {}
    extra: dict[str, Any] = {"mooncake_store_addr": "10.0.0.1:50051", "tenant_id": "a"}
    configure(extra, environment, own_name="8200")
    path = Path(environment["MOONCAKE_CONFIG_PATH"])
    config = MooncakeStoreConfig.from_file(str(path))
    assert (config.master_server_address, config.tenant_id) == ("10.0.0.1:50051", "a")
    assert (config.mode, config.global_segment_size) == ("standalone-store", 0)
    assert extra["lookup_rpc_port"] == "8200" and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()

    configure({**extra, "global_segment_size": "1GB", "protocol": "tcp"}, environment, own_name="8200")
    path = Path(environment["MOONCAKE_CONFIG_PATH"])
    config = MooncakeStoreConfig.from_file(str(path))
    assert (config.mode, config.global_segment_size, config.protocol) == ("embedded", 1 << 30, "tcp")
    path.unlink()

    environment = {"MOONCAKE_CONFIG_PATH": "theirs.json"}
    configure({}, environment, own_name="8200")
    assert environment == {"MOONCAKE_CONFIG_PATH": "theirs.json"}, "without an address the file decides"


def test_engines_of_one_host_have_sockets_of_different_names() -> None:
    """Two that have the same port, or none, differ by their ids, which all their processes have."""
    from mooncake.connectors.vllm.device_store_connector import socket_name

    names = [socket_name(one, ["serve", "M"]) for one in ("a", "b")]
    names.append(socket_name("a", ["serve", "M", "--port", "8001"]))
    assert len(set(names)) == 3 and all(len(name) == 6 for name in names)
    assert socket_name("a", ["serve", "M"]) == names[0]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_one_engine_loads_what_another_has_saved(model: Path, tmp_path: Path) -> None:
    """The connector itself, on a CPU: only the address of ``mooncaked`` is given."""
    prompt = a_prompt("Samarkand")
    with running_store(tmp_path) as store:
        connector = {
            "kv_connector": "DeviceStoreConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"mooncake_store_addr": store},
        }
        answers = []
        for name in ("first", "second"):
            engine = Engine(model, tmp_path / f"{name}.log", connector)
            try:
                answers.append(engine.wait_until_ready().complete(prompt))
                num_blocks = answers[0].num_prompt // BLOCK_TOKENS
                wait_for(lambda: num_stored(store) >= num_blocks, "the blocks to be stored", 120.0)  # noqa: B023
            finally:
                engine.close()
        computed, loaded = answers
        assert computed.num_cached == 0 and loaded.num_cached == num_blocks * BLOCK_TOKENS > 0
        assert loaded.token_ids == computed.token_ids
