# SPDX-License-Identifier: Apache-2.0
"""The cuda transport: registers device memory, and copies device to device within one host.

A thin layer: ``native/cuda.h`` copies, ``native/cuda_ipc.h`` exports memory to peers. The driver library is
loaded to check that it exists; devices are started and the endpoint is served when the first device memory
is registered or a peer's is reached, so an engine that never does uses no GPU resources. Other paths
also move device memory, through pinned staging, without this module.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

from mooncake import _native
from mooncake._native import Region, Status
from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    OutOfMemory,
    PeerLost,
    Unavailable,
)
from mooncake.transfer.descriptor import RegionInfo
from mooncake.transfer.memory import device_span_of
from mooncake.transfer.transports import (
    NativeConnection,
    PeerConnection,
    RegionRow,
    TransportContext,
    region_rows,
)


class DeviceMemoryTransport:
    """Transport for device memory.

    Raises:
        Unavailable: the driver library is missing.
    """

    def __init__(self, site: TransportContext) -> None:
        self._library = site.cuda_library
        if why := _native.Cuda.why_not_there(self._library):
            raise Unavailable(f"cuda transport: {why}")
        self._regions = site.regions
        self._epoch = site.epoch
        self._lock = threading.Lock()
        self._started: tuple[_native.Cuda, _native.CudaTransport] | None = None
        self.endpoint = f"mooncake-{secrets.token_hex(8)}"

    def register(self, buffer: Any) -> Region | None:
        """Register device memory; None when ``buffer`` is not device memory.

        Raises:
            InvalidArgument: not contiguous, or freed.
            Unavailable: the driver does not start.
        """
        span = device_span_of(buffer)
        if span is None and isinstance(buffer, tuple):
            address, size = buffer
            if address > 0 and _native.Cuda.is_device_memory(self._library, address):
                span = address, size, True
        if span is None:
            return None
        try:
            return self._start()[0].add(self._regions, *span)
        except ValueError as error:
            raise InvalidArgument("buffer", type(buffer), f"device memory of one device ({error})") from error

    def allocate(self, size_bytes: int, device: str) -> Region:
        """Allocate zeroed memory of ``device`` (``cuda:0``), freed when its region and all uses have ended.

        Raises:
            InvalidArgument: no such device.
            OutOfMemory: the device has less left.
            Unavailable: the driver does not start.
        """
        cuda = self._start()[0]
        known = [f"cuda:{info.number}" for info in cuda.devices]
        if device not in known:
            raise InvalidArgument("device", device, "one of " + ", ".join(known))
        try:
            return cuda.allocate(self._regions, known.index(device), size_bytes)
        except MemoryError as error:
            raise OutOfMemory(f"allocate {size_bytes:,} bytes on {device}: {error}; ask for less") from error

    def pin(self, region: Region) -> None:
        """Lock main memory; raises InvalidArgument when the system does not allow it."""
        try:
            self._start()[0].pin(region)
        except OSError as error:
            raise InvalidArgument("region", region, f"main memory that can be locked ({error})") from error

    def connect(
        self, endpoint: str, epoch: int, regions: Sequence[RegionInfo], timeout_s: float
    ) -> PeerConnection:
        peer = self._start()[1].connect(endpoint, epoch, open_to_others(regions), timeout_s)
        if isinstance(peer, _native.CudaPeer):
            return NativeConnection(peer, open_to_others)
        if peer == Status.TIMED_OUT:
            raise DeadlineExceeded(
                f"cuda peer {endpoint} did not answer within {timeout_s:g} s; is it stopped?"
            )
        if peer == Status.ACCESS_DENIED:
            raise AccessDenied(f"cuda peer {endpoint} runs as another user; use tcp between users")
        raise PeerLost(f"cuda peer {endpoint} is gone; open its current descriptor")

    def close(self) -> None:
        with self._lock:
            if self._started is not None:
                self._started[1].close()

    def _start(self) -> tuple[_native.Cuda, _native.CudaTransport]:
        with self._lock:
            if self._started is None:
                try:
                    cuda = _native.Cuda(self._library)
                    served = _native.CudaTransport(cuda, self._regions, self._epoch, self.endpoint)
                except OSError as error:
                    raise Unavailable(f"cuda transport: {error}") from error
                self._started = cuda, served
            return self._started


def why_unavailable(library: str = "libcuda.so.1") -> str:
    """Reason why this process cannot use device memory; empty when it can. Starts the driver."""
    try:
        _native.Cuda(library)
    except OSError as error:
        return str(error)
    return ""


def open_to_others(regions: Sequence[RegionInfo]) -> list[RegionRow]:
    """Device memory that other processes can open: not virtual memory ranges, pools or managed memory."""
    return region_rows(region for region in regions if region.is_shared and region.kind.startswith("cuda:"))
