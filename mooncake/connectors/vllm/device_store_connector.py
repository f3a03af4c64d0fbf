# SPDX-License-Identifier: Apache-2.0
"""vLLM's own ``MooncakeStoreConnector`` with the options of ours, where ours does not move KV memory.

vLLM's connector reads the store's address from the file that ``MOONCAKE_CONFIG_PATH`` names and knows no
``mooncake_store_addr``. This class writes that file and is vLLM's connector otherwise; it uses our store
through ``mooncake.store``. ``plugin.py`` registers it where vLLM computes neither on a CPU nor on CUDA. On
these it is chosen by ``kv_connector_module_path``, which takes the class of the connector's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as of_vllm

from mooncake.compat.config_file import CONFIG_VARIABLE
from mooncake.connectors.vllm.command_line import http_port
from mooncake.log import get_logger

log = get_logger(__name__)

FILE_KEYS = (
    "protocol",
    "device_name",
    "tenant_id",
    "global_segment_size",
    "local_buffer_size",
    "enable_offload",
)
"""Options of ``kv_connector_extra_config`` that are keys of the file."""


def configuration(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Content of the file for a connector with these options, which have ``mooncake_store_addr``.

    The store's memory is that of ``mooncaked``, unless ``global_segment_size`` asks for memory of each rank.
    """
    given = {name: extra[name] for name in FILE_KEYS if name in extra}
    mounts = bool(given.get("global_segment_size"))
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": str(extra["mooncake_store_addr"]),
        "protocol": "rdma",  # over TCP where the host has no such device
        "device_name": "",
        "mode": "embedded" if mounts else "standalone-store",
        "global_segment_size": 0,
        **given,
    }


def configure(extra: MutableMapping[str, Any], environment: MutableMapping[str, str], own_name: str) -> None:
    """Complete vLLM's configuration in this process: the file with the store's address, a socket's name."""
    extra.setdefault("lookup_rpc_port", own_name)
    if "mooncake_store_addr" not in extra:
        return
    number, path = tempfile.mkstemp(prefix="mooncake-", suffix=".json")
    with os.fdopen(number, "w") as file:
        json.dump(configuration(extra), file)
    environment[CONFIG_VARIABLE] = path
    log.info("store_connector_configured", file=path, master=extra["mooncake_store_addr"])


def socket_name(engine_id: str, command_line: Sequence[str]) -> str:
    """Part of the name of the socket between an engine's scheduler and its worker: equal in its processes.

    It differs between engines of one host, those without an HTTP server included, and is short, because
    the path of a socket has 107 characters, which the host's name may use up.
    """
    return hashlib.sha256(f"{engine_id} {http_port(command_line)}".encode()).hexdigest()[:6]


class DeviceStoreConnector(of_vllm.MooncakeStoreConnector):  # type: ignore[misc]
    """vLLM's connector; ``mooncake_store_addr`` names the store."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        transfer = vllm_config.kv_transfer_config
        # A cache that fails is no reason to fail a request.
        transfer.kv_load_failure_policy = "recompute"
        before = os.environ.get(CONFIG_VARIABLE)
        configure(transfer.kv_connector_extra_config, os.environ, socket_name(transfer.engine_id, sys.argv))
        written = os.environ.get(CONFIG_VARIABLE)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            if written is not None and written != before:  # it has been read
                Path(written).unlink(missing_ok=True)
                os.environ.pop(CONFIG_VARIABLE)
                if before is not None:
                    os.environ[CONFIG_VARIABLE] = before


MooncakeStoreConnector = DeviceStoreConnector
"""The same under the name that ``kv_connector`` has, for ``kv_connector_module_path``."""
