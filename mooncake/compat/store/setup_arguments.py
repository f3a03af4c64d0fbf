# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``setup``, in all their forms, and the environment variables of a drop-in client.

Nothing is guessed silently: an unknown key causes a warning, an invalid value is refused by name. Knows
no socket and no store.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from mooncake.compat.store.arguments import flag, number, text
from mooncake.config import AlsoFrom, load
from mooncake.errors import InvalidArgument
from mooncake.log import get_logger

log = get_logger("mooncake.store")

MIN_SEGMENT_BYTES = 4096
"""Size of the smallest segment; smaller ones are enlarged to it."""
MIN_SIZE_BYTES = 1024
MAX_LOCAL_BUFFER_BYTES = 1 << 40
DEFAULT_SIZE_BYTES = 16 << 20
DEFAULT_TENANT = "default"
DEFAULT_MASTER = "127.0.0.1:50051"
DEFAULT_HTTP_PORT = 9300

_Port = Annotated[int, Meta(ge=1, le=65535)]

_UNITS = {"": 0, "b": 0, "k": 10, "kb": 10, "m": 20, "mb": 20, "g": 30, "gb": 30, "t": 40, "tb": 40}


@dataclass(frozen=True)
class DropinSettings:
    """Settings of a ``MooncakeDistributedStore`` from the environment."""

    min_port: Annotated[_Port, AlsoFrom("MC_STORE_CLIENT_MIN_PORT")] = 12300
    "Lowest port that is chosen for a local host name without one."

    max_port: Annotated[_Port, AlsoFrom("MC_STORE_CLIENT_MAX_PORT")] = 14300
    "Highest port that is chosen for a local host name without one."

    setup_retries: Annotated[int, Meta(ge=1, le=10000), AlsoFrom("MC_STORE_CLIENT_SETUP_RETRIES")] = 20
    "Number of ports that are tried."

    huge_pages: Annotated[bool, AlsoFrom("MC_STORE_USE_HUGEPAGE")] = False
    "Ask for huge pages for the segment that this process contributes."

    ssd_offload: Annotated[bool, AlsoFrom("MOONCAKE_OFFLOAD_ENABLED")] = False
    "Use an SSD tier even when `setup` does not request one."

    ssd_path: Annotated[str, AlsoFrom("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH")] = "/data/file_storage"
    "Directory of the SSD tier when `setup` has none."

    ssd_size_bytes: Annotated[int, Meta(ge=1), AlsoFrom("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES")] = 2 << 40
    "Largest size of the SSD tier; less where the file system has less."

    root_fs_dir: Annotated[str, AlsoFrom("MOONCAKE_ROOT_FS_DIR")] = ""
    "Directory for an SSD tier where none is requested; empty takes the `--root_fs_dir` of the master."

    cluster_id: Annotated[str, AlsoFrom("MOONCAKE_CLUSTER_ID")] = ""
    "Name of the cluster's folder in that directory; empty takes the `--cluster_id` of the master."

    accept_root_fs_dir: bool = True
    "Whether the `--root_fs_dir` of the master is used."

    timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    "Seconds that one call may take, including a search for the master; large batches are split."

    probe_timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    "Timeout in seconds of a probe: of a master that failed before, and of `health_check`."

    setup_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    "Seconds that `setup` waits for the master, and then for it to accept the segment."


ALWAYS_SO = {
    "MOONCAKE_STORE_CHECKSUM": "every object carries checksums",
    "MC_STORE_MEMCPY": "bytes of this host are copied through shared memory",
}
NOT_HONOURED = {
    "MC_STORE_LOCAL_HOT_CACHE_SIZE": "a view of the object's memory on this host needs no second copy",
    "MC_STORE_LOCAL_HOT_CACHE_BLOCK_SIZE": "there is no local hot cache",
    "MC_STORE_LOCAL_HOT_CACHE_USE_SHM": "there is no local hot cache",
    "MC_STORE_PIN_MEMORY_MAX_BYTES": "registered memory is pinned by the transports that need it",
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "there is one SSD backend, and it survives restarts",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": "reads from SSD go to the caller's buffer",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "nodes wait for tasks and do not poll",
    "MOONCAKE_OFFLOAD_TOTAL_KEYS_LIMIT": "the tier is limited by its size",
    "MOONCAKE_OFFLOAD_USE_URING": "io_uring is used where the kernel allows it",
}
"""Variables of the existing store that have no effect here, each with the reason."""

_warned: set[str] = set()


def read_environment(environment: Mapping[str, str] | None = None) -> DropinSettings:
    """Read the settings; warn once per process of each known variable that has no effect.

    An empty variable counts as not set, as with the existing store.

    Raises:
        InvalidArgument: a variable's value is not allowed, or the ports are in the wrong order.
    """
    environment = os.environ if environment is None else environment
    for variable, reason in NOT_HONOURED.items():
        if variable in environment and variable not in _warned:
            _warned.add(variable)
            log.warning(f"environment variable {variable} is not honoured: {reason}")
    settings, _ = load(DropinSettings, {}, {name: value for name, value in environment.items() if value})
    if settings.min_port > settings.max_port:
        raise InvalidArgument(
            "MC_STORE_CLIENT_MIN_PORT", settings.min_port, f"at most {settings.max_port}, the highest port"
        )
    return settings


@dataclass(frozen=True)
class SetupArguments:
    """Arguments of ``setup``, by its own names."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    rdma_devices: str
    master_server_addr: str
    engine: Any = None
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = DEFAULT_TENANT
    enable_client_http_server: bool = False
    client_http_port: int = DEFAULT_HTTP_PORT
    root_fs_dir: str = ""
    cluster_id: str = ""

    def __post_init__(self) -> None:
        for check, fields in (
            (text, (*_REQUIRED, *_STRINGS)),
            (number, (*_SIZES, "client_http_port")),
            (flag, _BOOLEANS),
        ):
            for field in fields:
                object.__setattr__(self, field, check("setup", field, getattr(self, field)))

    def checked(self) -> SetupArguments:
        """Check the values and return the arguments themselves.

        Raises:
            InvalidArgument: an invalid value; the message names the argument.
        """
        for field in ("local_hostname", "metadata_server", "master_server_addr"):
            if not getattr(self, field).strip():
                raise InvalidArgument(field, getattr(self, field), "not empty")
        for field in ("ssd_offload_path", "root_fs_dir", "cluster_id"):
            if not _is_file_name(getattr(self, field)):
                raise InvalidArgument(field, getattr(self, field), "UTF-8 without NUL")
        size_bytes = self.global_segment_size
        if size_bytes and not MIN_SIZE_BYTES <= size_bytes < 1 << 62:
            raise InvalidArgument("global_segment_size", size_bytes, f"0, or {MIN_SIZE_BYTES} bytes and more")
        if not 0 <= self.local_buffer_size <= MAX_LOCAL_BUFFER_BYTES:
            raise InvalidArgument("local_buffer_size", self.local_buffer_size, "0 to 1 TiB")
        if not 0 <= self.client_http_port < 65536:
            raise InvalidArgument("client_http_port", self.client_http_port, "0 to 65535")
        return self


ALIASES = {"master_server_address": "master_server_addr", "device_name": "rdma_devices"}
"""Keys that programs use in place of those of the existing package."""
_DEFAULTS: dict[str, Any] = {
    "global_segment_size": DEFAULT_SIZE_BYTES,
    "local_buffer_size": DEFAULT_SIZE_BYTES,
    "protocol": "tcp",
    "rdma_devices": "",
    "master_server_addr": DEFAULT_MASTER,
}
_SIZES = ("global_segment_size", "local_buffer_size")
_BOOLEANS = ("enable_ssd_offload", "enable_client_http_server")
_REQUIRED = ("local_hostname", "metadata_server")
_STRINGS = (
    "protocol",
    "rdma_devices",
    "master_server_addr",
    "ssd_offload_path",
    "tenant_id",
    "root_fs_dir",
    "cluster_id",
)
_IGNORED = ("ipc_socket_path",)
KEYS = (*_REQUIRED, *_SIZES, *_STRINGS, *_BOOLEANS, "client_http_port", *_IGNORED)


def setup_arguments(config: Mapping[str, Any]) -> SetupArguments:
    """Parse the dictionary form of ``setup``; values may be strings. Unknown keys cause a warning.

    Raises:
        InvalidArgument: a required key is missing, or a value is invalid.
    """
    given: dict[str, str] = {}
    for key, value in config.items():
        name = ALIASES.get(key, key)
        if name not in KEYS:
            close = difflib.get_close_matches(str(key), [*KEYS, *ALIASES], 1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(KEYS)}"
            log.warning(f"setup: key {key!r} is unknown; {hint}")
        elif key == name or name not in config:
            given[name] = str(value).strip()
    for key in _REQUIRED:
        if not given.get(key):
            raise InvalidArgument(f"setup key {key!r}", given.get(key), "it is required")
    values: dict[str, Any] = dict(_DEFAULTS)
    for key, written in given.items():
        if key in _SIZES:
            values[key] = _named(key, written, parse_size)
        elif key in _BOOLEANS:
            values[key] = _boolean(key, written)
        elif key == "client_http_port":
            values[key] = _named(key, written, int)
        elif key not in _IGNORED:
            values[key] = written
    return SetupArguments(**values)


def _is_file_name(name: str) -> bool:
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


def _boolean(key: str, written: str) -> bool:
    """Parse a boolean; as in the existing package, a word that is none is False, here with a warning."""
    try:
        return parse_bool(written)
    except ValueError as error:
        log.warning(f"setup key {key!r}: {error}; it counts as false")
        return False


def _named(key: str, text: str, parse: Any) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidArgument(f"setup key {key!r}", text, str(error)) from error


def parse_size(value: int | str) -> int:
    """Parse a size to bytes, from a number or ``16MB``, ``1.5 gb``, ``16k``, ``1e9``; units are binary.

    Also as Python and C write numbers: ``+16MB``, ``1_000``, ``0x1000``.

    Raises:
        ValueError: not a size.
    """
    if isinstance(value, int):
        return int(value)
    hexadecimal = re.fullmatch(r"\s*\+?(0[xX][0-9a-fA-F]+)\s*", str(value))
    if hexadecimal is not None:
        return int(hexadecimal[1], 16)
    digits = re.sub(r"(?<=\d)_(?=\d)", "", str(value))
    match = re.fullmatch(r"\s*\+?(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", digits)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value!r} is not a size such as 4096, 16MB or '1.5 GB'")
    unit = 1 << _UNITS[match[2].lower()]
    return int(match[1]) * unit if match[1].isdecimal() else whole_size(float(match[1]) * unit)


def whole_size(size: float) -> int:
    """Whole bytes of a size. Raises ValueError: it is infinite, or no number."""
    if not math.isfinite(size):
        raise ValueError(f"{size!r} is not a size")
    return int(size)


_BOOLEAN_VALUES = {
    **dict.fromkeys(("true", "1", "yes", "on", "enable"), True),
    **dict.fromkeys(("false", "0", "no", "off", "disable"), False),
}


def parse_bool(value: float | str | None) -> bool:
    """Parse a boolean, from the usual ways of writing one; a number by its truth value, nothing is False.

    Raises:
        ValueError: not a boolean.
    """
    if value is None or isinstance(value, int | float):
        return bool(value)
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in _BOOLEAN_VALUES:
        return _BOOLEAN_VALUES[word]
    if isinstance(value, str) and not word:
        return False
    raise ValueError(f"{value!r} is neither true (1, yes, on, enable) nor false (0, no, off, disable)")
