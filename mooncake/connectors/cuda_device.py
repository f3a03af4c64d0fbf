# SPDX-License-Identifier: Apache-2.0
"""A CUDA device's streams and events, through torch. The only module that calls ``torch.cuda``.

It owns how a device is asked for what ``device_streams.py`` promises. What is copied, and after what, is the
decision of ``staged_memory.py`` and ``store_link.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mooncake.connectors.device_streams import DeviceStream, KvDevice
from mooncake.connectors.memory import DeviceEvent
from mooncake.errors import InvalidArgument, OutOfMemory


class _CudaEvent:
    """An event of one device: the calling thread may have another one current."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self.event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def query(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self.event.synchronize()


class _CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        """Two threads that enqueue at once would mix their operations, which share scratch memory."""

    def run(self, work: Callable[[], None], after: DeviceEvent | None) -> DeviceEvent:
        # Tensors that were made in inference mode, as vLLM's, may be written to in this mode only.
        modes = torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode()
        with self._lock, modes[0], modes[1], modes[2]:
            if after is not None:
                assert isinstance(after, _CudaEvent)
                self._stream.wait_event(after.event)
            work()
            return _CudaEvent(self._device, self._stream)


class CudaDevice:
    """A CUDA device, through torch.

    Not to be used while a CUDA graph is captured: nothing is loaded or saved then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_stream(self) -> DeviceStream:
        return _CudaStream(self._device)

    def computed(self) -> DeviceEvent:
        return _CudaEvent(self._device, torch.cuda.current_stream(self._device))

    def compute_after(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream(self._device).wait_event(event.event)

    def host_bytes(self, size_bytes: int) -> Tensor:
        try:
            return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            reason = (
                f"lock {size_bytes:,} bytes of main memory for copies from and to {self._device}: {error}"
            )
            raise OutOfMemory(f"{reason}; set a lower staging_bytes") from error

    def scratch_bytes(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def to_device(self, numbers: Sequence[int]) -> Tensor:
        # From pinned memory: otherwise the calling thread, the engine's, would wait for the stream.
        return torch.tensor(numbers, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)


def device_of(tensor: Tensor) -> KvDevice | None:
    """The device whose memory ``tensor`` is; None: main memory.

    Raises:
        InvalidArgument: a kind of device whose copies have not been written.
    """
    if tensor.device.type == "cpu":
        return None
    if tensor.device.type != "cuda":
        raise InvalidArgument("device", str(tensor.device), "cpu or cuda")
    return CudaDevice(tensor.device)
