# SPDX-License-Identifier: Apache-2.0
"""What the drop-in needs to know of this host: transports, devices, ports, CUDA streams."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from functools import cache
from pathlib import Path

from mooncake.errors import InvalidArgument
from mooncake.transfer.host import host_topology, numeric_host
from mooncake.transfer.transports import SCHEMES

INFINIBAND = Path("/sys/class/infiniband")
NVIDIA = Path("/dev/nvidiactl")


def rdma_devices() -> list[str]:
    """Names of the RDMA devices that the kernel lists."""
    try:
        return sorted(os.listdir(INFINIBAND))
    except OSError:
        return []


def available_schemes() -> list[str]:
    """Transports of this package that this host can use."""
    present = {"rdma": bool(rdma_devices()), "cuda": has_cuda()}
    return [scheme for scheme in SCHEMES if present.get(scheme, True)]


def has_cuda() -> bool:
    """Whether this host has a CUDA device and its driver library."""
    return NVIDIA.exists() and _driver() is not None


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def resolves(host: str) -> bool:
    """Whether the host name has an address."""
    try:
        numeric_host(host, "host")
    except InvalidArgument:
        return False
    return True


def is_free(host: str, port: int) -> bool:
    """Whether no socket listens at this port now.

    Raises:
        InvalidArgument: the host does not resolve.
    """
    address = numeric_host(host, "local_hostname")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def wait_for_stream(stream: int) -> None:
    """Wait until a CUDA stream has completed its queued work.

    Raises:
        RuntimeError: there is no CUDA driver, or the stream failed.
    """
    driver = _driver()
    if driver is None:
        raise RuntimeError(
            "transfers on a CUDA stream need a CUDA device and its driver (libcuda.so.1 is missing); "
            "use the calls without _on_cuda"
        )
    status = driver.cuStreamSynchronize(ctypes.c_void_p(stream))
    if status:
        raise RuntimeError(
            f"cuStreamSynchronize returned {status}; does the stream belong to this thread's context?"
        )


def local_topology(device_name: str) -> str:
    """JSON with each memory location's preferred network cards and the others."""
    return json.dumps(host_topology().matrix([name for name in device_name.split(",") if name]))
