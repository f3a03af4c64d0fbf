"""What this machine has, as far as the drop-in asks: transports, devices, ports, memory, streams."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from functools import cache
from pathlib import Path

from mooncake.errors import InvalidArgument
from mooncake.transfer.host_address import numeric_host
from mooncake.transfer.memory import is_mapped
from mooncake.transfer.sysfs import discover
from mooncake.transfer.transports import SCHEMES

INFINIBAND = Path("/sys/class/infiniband")
NVIDIA = Path("/dev/nvidiactl")


def rdma_devices() -> list[str]:
    """Names of the RDMA devices that the kernel knows."""
    try:
        return sorted(os.listdir(INFINIBAND))
    except OSError:
        return []


def available_schemes() -> list[str]:
    """Transports that this package has and this machine can use."""
    present = {"rdma": bool(rdma_devices()), "cuda": has_cuda()}
    return [scheme for scheme in SCHEMES if present.get(scheme, True)]


def has_cuda() -> bool:
    """There is a CUDA device, and a driver library to talk to it."""
    return NVIDIA.exists() and _driver() is not None


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def resolves(host: str) -> bool:
    """The host name has an address."""
    try:
        numeric_host(host, "host")
    except InvalidArgument:
        return False
    return True


def is_free(host: str, port: int) -> bool:
    """Nobody listens at this port just now.

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


def may_be_registered(address: int, size: int) -> bool:
    """The range may be registered: it is mapped, or may be a device's, which only the driver knows."""
    return is_mapped(address, size) or has_cuda()


def wait_for_stream(stream: int) -> None:
    """Until a CUDA stream has done what it holds.

    Raises:
        RuntimeError: there is no CUDA driver, or the stream failed.
    """
    driver = _driver()
    if driver is None:
        raise RuntimeError(
            "transfers on a CUDA stream need a CUDA device and its driver (libcuda.so.1 is not there); "
            "use the calls without _on_cuda"
        )
    status = driver.cuStreamSynchronize(ctypes.c_void_p(stream))
    if status:
        raise RuntimeError(f"cuStreamSynchronize answered {status}; is the stream of this thread's context?")


def local_topology(device_name: str) -> str:
    """JSON of each memory location's preferred network cards and the others."""
    return json.dumps(discover().matrix([name for name in device_name.split(",") if name]))
