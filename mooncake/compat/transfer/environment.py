# SPDX-License-Identifier: Apache-2.0
"""The ``MC_*`` variables: those that are honoured, and for the others the reason why they are not.

A variable that is set and has no effect causes one warning, because it was set for a purpose.
``MC_STORE_*`` belongs to the store. ``docs/engine.md`` has the table.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from mooncake.config import AlsoFrom, Secret, load, options
from mooncake.log import get_logger

log = get_logger(__name__)

SHORTEST_TIMEOUT_S = 5.0
_S_PER_BYTE = 1e-9

_Port = Annotated[int, Meta(ge=1, le=65535)]


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a ``mooncake.engine.TransferEngine`` from the environment."""

    min_rpc_port: Annotated[_Port, AlsoFrom("MC_MIN_RPC_PORT"), AlsoFrom("MC_MIN_PRC_PORT")] = 15000
    "Lowest port of `get_rpc_port()`."

    max_rpc_port: Annotated[_Port, AlsoFrom("MC_MAX_RPC_PORT"), AlsoFrom("MC_MAX_PRC_PORT")] = 17000
    "Highest port of `get_rpc_port()`."

    legacy_rpc_port: Annotated[bool, AlsoFrom("MC_LEGACY_RPC_PORT_BINDING")] = False
    "With a metadata service, listen at the port in the host name (12001 without one)."

    bind_address: Annotated[str, AlsoFrom("MC_TCP_BIND_ADDRESS")] = ""
    "Address to listen on; empty listens on all, or on loopback when the host name is loopback."

    use_ipv6: Annotated[bool, AlsoFrom("MC_USE_IPV6")] = False
    "Listen on all IPv6 addresses even if the host name is an IPv4 one."

    transfer_timeout_s: Annotated[float, Meta(gt=0), AlsoFrom("MC_TRANSFER_TIMEOUT")] = 30.0
    "Seconds that a transfer may take, and 1 s more per GB; at least 5."

    force_tcp: Annotated[bool, AlsoFrom("MC_FORCE_TCP")] = False
    "Use only tcp, whatever the protocol."

    force_hca: Annotated[bool, AlsoFrom("MC_FORCE_HCA")] = False
    "With protocol rdma, fail where there is no device instead of going on with tcp."

    lanes_per_peer: Annotated[int, Meta(ge=0, le=64), AlsoFrom("MC_TCP_LANES_PER_PEER")] = 0
    "Connections that one big transfer is spread over; 0 chooses by the number of cores."

    metadata_cluster: Annotated[str, AlsoFrom("MC_METADATA_CLUSTER_ID")] = ""
    "Prefix that separates the entries of several systems in one metadata service."

    disable_metacache: Annotated[bool, AlsoFrom("MC_DISABLE_METACACHE")] = False
    "Fetch a peer's descriptor before every transfer."

    metadata_refresh_s: Annotated[
        float | None, Meta(ge=0), AlsoFrom("MC_TE_METADATA_REFRESH_INTERVAL_SECONDS")
    ] = None
    "Seconds that a peer's descriptor is cached; when not set, 5, and with P2PHANDSHAKE a day."

    redis_password: Annotated[str, Secret, AlsoFrom("MC_REDIS_PASSWORD")] = ""
    "Password for a Redis metadata service whose URL has none."

    redis_database: Annotated[int, Meta(ge=0, le=255), AlsoFrom("MC_REDIS_DB_INDEX")] = 0
    "Database of a Redis metadata service whose URL names none."

    devices: Annotated[tuple[str, ...], AlsoFrom("MC_TE_FILTERS")] = ()
    "RDMA devices to use when the program names none."

    not_devices: Annotated[tuple[str, ...], AlsoFrom("MC_TE_FILTERS_EXCLUDE")] = ()
    "RDMA devices not to use when the program names none."

    ib_port: Annotated[int, Meta(ge=1, le=255), AlsoFrom("MC_IB_PORT")] = 1
    "Port of the RDMA devices."

    gid_index: Annotated[int, Meta(ge=-1, le=255), AlsoFrom("MC_GID_INDEX")] = -1
    "Index of the RDMA port's address (GID) to use; -1 chooses one."

    ib_traffic_class: Annotated[int, Meta(ge=-1, le=255), AlsoFrom("MC_IB_TC")] = -1
    "Traffic class of RDMA packets; -1 leaves the default."

    log_level: Annotated[str, AlsoFrom("MC_LOG_LEVEL")] = ""
    "Log level of this package: `TRACE`, `INFO`, `WARNING` or `ERROR`; empty leaves it to the program."

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds that a transfer of so many bytes may take."""
        return max(SHORTEST_TIMEOUT_S, self.transfer_timeout_s) + num_bytes * _S_PER_BYTE


ALWAYS_SO = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "connections are kept",
    "MC_TE_METRIC": "counters are always kept, in the Prometheus registry of the process",
}
"""Variables that request what this engine always does, so setting them causes no warning."""

_PIECES = "pieces are sized by the engine"
_QUEUES = "the rdma transport sizes its queues itself"
_PATHS = "paths are ranked by distance and measured speed"
_TENT = "there is one engine here, which always chooses among paths and masks their faults"
_FRAMES = "both peers run this package and use its frames"
NOT_HONOURED = {
    "MC_SLICE_SIZE": _PIECES,
    "MC_TCP_SLICE_SIZE": _PIECES,
    "MC_RETRY_CNT": "a failed path is replaced by the next until the deadline",
    "MC_ENABLE_DEST_DEVICE_AFFINITY": _PATHS,
    "MC_PATH_ROUNDROBIN": _PATHS,
    "MC_CUSTOM_TOPO_JSON": _PATHS + "; name devices with MC_TE_FILTERS",
    "MC_MS_AUTO_DISC": _PATHS + "; name devices with MC_TE_FILTERS",
    "MC_MS_FILTERS": "use MC_TE_FILTERS",
    "MC_FORCE_MNNVL": "there is no such transport here",
    "MC_INTRANODE_NVLINK": "peer access between devices is used where there is one",
    "MC_IB_PCI_RELAXED_ORDERING": _QUEUES,
    "MC_MTU": _QUEUES,
    "MC_NUM_CQ_PER_CTX": _QUEUES,
    "MC_NUM_COMP_CHANNELS_PER_CTX": _QUEUES,
    "MC_MAX_CQE_PER_CTX": _QUEUES,
    "MC_NUM_QP_PER_EP": _QUEUES,
    "MC_MAX_WR": _QUEUES,
    "MC_MAX_SGE": _QUEUES,
    "MC_MAX_INLINE": _QUEUES,
    "MC_MAX_EP_PER_CTX": _QUEUES,
    "MC_WORKERS_PER_CTX": _QUEUES,
    "MC_ENDPOINT_STORE_TYPE": _QUEUES,
    "MC_TCP_PROTO": _FRAMES,
    "MC_TCP_QUEUE_CAPACITY": "batches wait in an unbounded queue until their deadline",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "batches wait in an unbounded queue until their deadline",
    "MC_HANDSHAKE_MAX_LENGTH": _FRAMES,
    "MC_HANDSHAKE_LISTEN_BACKLOG": "the listener's backlog is fixed",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "a handshake may take 5 s",
    "MC_LOG_DIR": "logs go where Python's logging sends them",
    "MC_TE_METRIC_INTERVAL_SECONDS": "counters are in the Prometheus registry and are not printed",
    "MC_USE_TENT": _TENT,
    "MC_USE_TEV1": _TENT,
    "MC_TENT_CONF": _TENT,
    "MC_CXL_DEV_PATH": "there is no cxl transport here",
    "MC_CXL_DEV_SIZE": "there is no cxl transport here",
}
"""Variables of the existing engine that have no effect here, each with the reason."""

_warned: set[str] = set()


def read_environment(environment: Mapping[str, str] | None = None) -> EngineSettings:
    """Read the settings; warn once per process of each ``MC_*`` variable that has no effect.

    An empty variable counts as not set, as with the existing engine.

    Raises:
        InvalidArgument: a variable's value is not allowed; the message names the variable.
    """
    environment = os.environ if environment is None else environment
    for variable in sorted(environment):
        reason = reason_against(variable)
        if reason and variable not in _warned:
            _warned.add(variable)
            log.warning(f"environment variable {variable} is not honoured: {reason}")
    settings, _ = load(EngineSettings, {}, {name: value for name, value in environment.items() if value})
    return settings


def reason_against(variable: str) -> str:
    """Reason why ``variable`` has no effect; empty when it has one, or is not an engine variable."""
    if not variable.startswith("MC_") or variable.startswith("MC_STORE_"):
        return ""
    honoured = [name for option in options(EngineSettings) for name in option.more_variables]
    if variable in honoured or variable in ALWAYS_SO:
        return ""
    if variable in NOT_HONOURED:
        return NOT_HONOURED[variable]
    close = difflib.get_close_matches(variable, honoured, 1, cutoff=0.85)
    return f"did you mean {close[0]}?" if close else "it is unknown"


_LEVELS = {"TRACE": logging.DEBUG, "INFO": logging.INFO, "WARNING": logging.WARNING, "ERROR": logging.ERROR}


def set_log_level(level: str) -> None:
    """Set the level of this package's log events; an empty ``level`` changes nothing."""
    if level:
        logging.getLogger("mooncake").setLevel(_LEVELS.get(level.upper(), logging.INFO))
