# SPDX-License-Identifier: Apache-2.0
"""The existing package's ``MooncakeConfig``: the flat JSON file named in ``MOONCAKE_CONFIG_PATH``.

Holds the arguments of ``MooncakeDistributedStore.setup``. Programs read its fields and call its helpers by
name, so the names are that package's. Roles of this package have settings of their own (``config.py``),
which can be read from the same file.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake.compat.store import setup_arguments
from mooncake.compat.transfer.transport_choice import PROTOCOLS, UNSUPPORTED_PROTOCOLS
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger

log = get_logger("mooncake.config")
logger = logging.getLogger("mooncake.config")
"""The same, for programs that set the level of the existing package's module."""

DEFAULT_GLOBAL_SEGMENT_SIZE = 3_355_443_200
DEFAULT_LOCAL_BUFFER_SIZE = 1_073_741_824

CONFIG_VARIABLE = "MOONCAKE_CONFIG_PATH"
MASTER_VARIABLE = "MOONCAKE_MASTER"

_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")


def _parse_segment_size(value: int | str) -> int:
    """Parse a size to bytes, from 500gb, '1.5 GB', 16k, 1e9 or a number.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is not a size")
    if isinstance(value, float):
        return setup_arguments.whole_size(value)
    return setup_arguments.parse_size(value)


def _parse_bool(value: float | str | None) -> bool:
    """Parse a boolean, from the usual ways of writing one; a number by its truth value, nothing is False.

    Raises:
        ValueError: not a boolean.
    """
    return setup_arguments.parse_bool(value)


@dataclass
class MooncakeConfig:
    """Configuration that a program needs to use a store."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = setup_arguments.DEFAULT_TENANT
    enable_client_http_server: bool = False
    client_http_port: int = setup_arguments.DEFAULT_HTTP_PORT
    cluster_id: str = ""
    root_fs_dir: str = ""

    def __post_init__(self) -> None:
        for field in _REQUIRED:
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"Missing required config field: {field}")
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"Invalid protocol: {self.protocol!r}; a non-empty string is expected")
        self.protocol = self.protocol.strip().lower()
        if self.protocol not in PROTOCOLS and self.protocol not in UNSUPPORTED_PROTOCOLS:
            log.warning(f"Unrecognised protocol {self.protocol!r}; known are {', '.join(PROTOCOLS)}")
        for field in ("global_segment_size", "local_buffer_size"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be 0 or more, not {getattr(self, field)}")
        if not 0 <= self.client_http_port < 65536:
            raise ValueError(f"client_http_port must be 0 to 65535, not {self.client_http_port}")

    @staticmethod
    def from_file(file_path: str) -> MooncakeConfig:
        """Read the configuration from a JSON file.

        Raises:
            ValueError: a required field is missing or a value is invalid; the message names it.
            OSError: the file cannot be read.
        """
        given = json.loads(Path(file_path).read_text())
        if not isinstance(given, dict):
            raise ValueError(f"{file_path}: a JSON object is expected, not {type(given).__name__}")
        for field in _REQUIRED:
            if given.get(field) in (None, ""):
                raise ValueError(f"Missing required config field: {field}")
        for key in given.keys() - _VARIABLES.keys():  # programs keep keys of their own in that file
            close = difflib.get_close_matches(key, _VARIABLES, 1, cutoff=0.85)
            if close:
                log.warning(f"{file_path}: key {key!r} is unknown; did you mean {close[0]!r}?")
        return MooncakeConfig.of(given)

    @staticmethod
    def of(given: dict[str, Any]) -> MooncakeConfig:
        """Make a configuration from the keys of such a file; unknown keys are ignored.

        Raises:
            ValueError: a required key is missing or a value is invalid; the message names it.
        """
        return _config_from(given)

    @staticmethod
    def load_from_env() -> MooncakeConfig:
        """Read the file that ``MOONCAKE_CONFIG_PATH`` names, or else the ``MOONCAKE_*`` variables.

        Raises:
            ValueError: neither that nor ``MOONCAKE_MASTER`` is set, or a value is invalid.
        """
        file = os.getenv(CONFIG_VARIABLE)
        if file:
            return MooncakeConfig.from_file(file)
        if not os.getenv(MASTER_VARIABLE):
            raise ValueError(
                f"Neither the environment variable '{CONFIG_VARIABLE}' nor '{MASTER_VARIABLE}' is set."
            )
        given = {field: os.environ[name] for field, name in _VARIABLES.items() if name in os.environ}
        return MooncakeConfig.of({"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", **given})


_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": MASTER_VARIABLE,
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_client_http_server": "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",
    "client_http_port": "MOONCAKE_CLIENT_HTTP_PORT",
    "cluster_id": "MOONCAKE_CLUSTER_ID",
    "root_fs_dir": "MOONCAKE_ROOT_FS_DIR",
}


def _config_from(given: dict[str, Any]) -> MooncakeConfig:
    def read(field: str, default: Any, parse: Any) -> Any:
        try:
            return default if given.get(field) is None else parse(given[field])
        except (ValueError, TypeError, InvalidArgument) as error:
            raise ValueError(f"{field}: {error}") from error

    return MooncakeConfig(
        local_hostname=read("local_hostname", "", _text),
        metadata_server=read("metadata_server", "", _text),
        global_segment_size=read("global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE, _parse_segment_size),
        local_buffer_size=read("local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE, _parse_segment_size),
        protocol=read("protocol", "tcp", _text),
        device_name=read("device_name", "", _text),
        master_server_address=read("master_server_address", "", _text),
        enable_ssd_offload=read("enable_ssd_offload", False, _parse_bool),
        ssd_offload_path=read("ssd_offload_path", "", str),
        tenant_id=read("tenant_id", setup_arguments.DEFAULT_TENANT, str),
        enable_client_http_server=read("enable_client_http_server", False, _parse_bool),
        client_http_port=read("client_http_port", setup_arguments.DEFAULT_HTTP_PORT, int),
        cluster_id=read("cluster_id", "", _text),
        root_fs_dir=read("root_fs_dir", "", _text),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text is expected, not {value!r}")
    return value
