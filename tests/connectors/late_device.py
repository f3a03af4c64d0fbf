# SPDX-License-Identifier: Apache-2.0
"""A double of a device: CPU tensors, and work that is done late, in any order that its events allow.

Work is queued on streams. It is done when an event is waited for, together with what must come before, or by
chance, one piece whenever an event is asked about. So a copy that does not wait for what it needs is sooner
or later done too early, and the bytes are wrong. A failing test names its seed in the device's ``repr``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from mooncake.connectors.memory import DeviceEvent


class LateEvent:
    def __init__(self, device: LateDevice, stream: LateStream) -> None:
        self._device, self.stream = device, stream
        self.is_done = False

    def query(self) -> bool:
        self._device.do_some()
        return self.is_done

    def synchronize(self) -> None:
        self._device.finish(self)


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.queue: deque[tuple[Callable[[], None], LateEvent | None, LateEvent]] = deque()

    def run(self, work: Callable[[], None], after: DeviceEvent | None) -> LateEvent:
        assert after is None or isinstance(after, LateEvent)
        with self._device.lock:
            event = LateEvent(self._device, self)
            self.queue.append((work, after, event))
        return event


class LateDevice:
    """A ``KvDevice``. ``computes_now``: the engine's own work is done at once and does not pass through."""

    def __init__(self, seed: int | None = None, computes_now: bool = False) -> None:
        self._seed = Random().randrange(1 << 32) if seed is None else seed
        self._random = Random(self._seed)
        self._computes_now = computes_now
        self.lock = threading.RLock()
        self._streams: list[LateStream] = []
        self._compute = self.new_stream()
        self.num_copies = 0
        """Copies between the pool and host memory that were begun."""

    def __repr__(self) -> str:
        return f"LateDevice({self._seed})"

    def new_stream(self) -> LateStream:
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def compute(self, work: Callable[[], object]) -> None:
        """Begin work of the engine."""
        self._compute.run(lambda: _call(work), None)

    def computed(self) -> LateEvent:
        return self._compute.run(lambda: None, None)

    def compute_after(self, event: DeviceEvent) -> None:
        if self._computes_now:
            event.synchronize()
        self._compute.run(lambda: None, event)

    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def scratch_bytes(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def to_device(self, numbers: Sequence[int]) -> Tensor:
        self.num_copies += 1
        return torch.tensor(numbers, dtype=torch.int64)

    def do_some(self) -> None:
        """Do one piece of work that could be next, or none."""
        with self.lock:
            able = [one for one in self._streams if one.queue and _is_free(one.queue[0][1])]
            if able and self._random.random() < 0.7:
                self._do(self._random.choice(able))

    def finish(self, event: LateEvent) -> None:
        """Do all work up to ``event``, and what that must come after."""
        with self.lock:
            while not event.is_done:
                _, after, _ = event.stream.queue[0]
                if after is not None:
                    self.finish(after)
                self._do(event.stream)

    def finish_all(self) -> None:
        with self.lock:
            for stream in self._streams:
                if stream.queue:
                    self.finish(stream.queue[-1][2])

    def _do(self, stream: LateStream) -> None:
        work, after, event = stream.queue.popleft()
        assert _is_free(after)
        with torch.inference_mode():
            work()
        event.is_done = True


def _call(work: Callable[[], object]) -> None:
    work()


def _is_free(after: LateEvent | None) -> bool:
    return after is None or after.is_done
