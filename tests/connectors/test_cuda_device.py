# SPDX-License-Identifier: Apache-2.0
"""Streams and events of a CUDA device: what waits for what. Tests with ``cuda`` in their name need a GPU.

The order of waits is tested on every machine with a double (``test_staged_memory.py``,
``test_block_transfer.py``); here the double's promises are those of real streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import pytest
import torch

from mooncake.connectors.cuda_device import CudaDevice, device_of
from mooncake.connectors.memory import DeviceEvent, memory_of
from mooncake.connectors.staged_memory import StagedMemory, staged
from mooncake.errors import InvalidArgument

NUM_BLOCKS, NUM_LAYERS = 64, 4

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="NOT RUN: torch has no CUDA device here; scripts/test-cuda runs it on one",
)


def test_main_memory_is_no_device_and_other_devices_are_refused() -> None:
    assert device_of(torch.zeros(1)) is None
    with pytest.raises(InvalidArgument, match=r"meta.*cpu or cuda"):
        device_of(torch.zeros(1, device="meta"))


class Recorded:
    """What ``CudaDevice`` asks of ``torch.cuda``, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = RecordedStream(self, "engine")
        self.num_streams = 0

    def new_stream(self, device: torch.device) -> RecordedStream:
        self.num_streams += 1
        return RecordedStream(self, f"copies {self.num_streams}")

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class RecordedStream:
    def __init__(self, record: Recorded, name: str) -> None:
        self._record, self.name = record, name

    def wait_event(self, event: RecordedEvent) -> None:
        self._record.calls.append(f"{self.name} waits for {event.place}")


class RecordedEvent:
    def __init__(self, record: Recorded) -> None:
        self._record = record
        self.place = ""

    def record(self, stream: RecordedStream) -> None:
        self.place = f"event {len(self._record.calls)} of {stream.name}"
        self._record.calls.append(self.place)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """A double of ``torch.cuda``."""
    record = Recorded()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", record.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: RecordedEvent(record))
    monkeypatch.setattr(torch.cuda, "stream", record.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: record.current)
    return record


def test_operations_of_two_threads_do_not_mix(record: Recorded) -> None:
    """An engine's thread saves a step while the loop saves what found no room in the one before."""
    stream = CudaDevice(torch.device("cuda", 1)).new_stream()
    has_begun = threading.Event()

    def others() -> None:
        has_begun.set()
        stream.run(lambda: record.calls.append("the other's"), None)

    other = threading.Thread(target=others)

    def work() -> None:
        record.calls.append("gather")
        other.start()
        assert has_begun.wait(20.0)
        other.join(0.2)  # where nothing holds it back, it is done by then
        record.calls.append("copy")

    stream.run(work, None)
    other.join(20.0)
    works = [call for call in record.calls if not call.startswith("event")]
    assert works == ["gather", "copy", "the other's"]


def test_streams_events_and_waits_are_asked_of_torch_in_order(record: Recorded) -> None:
    device = CudaDevice(torch.device("cuda", 1))
    saves, loads = device.new_stream(), device.new_stream()

    def work() -> None:
        assert torch.is_inference_mode_enabled()
        record.calls.append(f"work in {record.current.name}")

    copied = saves.run(work, device.computed())
    loads.run(work, None)
    device.compute_after(copied)
    assert record.calls == [
        "event 0 of engine",
        "copies 1 waits for event 0 of engine",
        "work in copies 1",
        "event 3 of copies 1",
        "work in copies 2",
        "event 5 of copies 2",
        "engine waits for event 3 of copies 1",
    ]


def _busy(device: torch.device) -> None:
    """Work of the current stream that takes long enough for a copy without a wait to overtake it."""
    square = torch.ones(4096, 4096, device=device)
    for _ in range(50):
        square = square @ square * 1e-4


def _wait(event: DeviceEvent | None) -> None:
    assert event is not None
    event.synchronize()
    assert event.query()


LAYOUTS = {  # each layer [blocks, heads, tokens, keys and values], or one vector per token
    "LBNHC": ((NUM_LAYERS, NUM_BLOCKS, 16, 8, 128), (0, 1, 3, 2, 4)),
    "LBHNC": ((NUM_LAYERS, NUM_BLOCKS, 8, 16, 128), (0, 1, 2, 3, 4)),
    "LHBNC": ((NUM_LAYERS, 8, NUM_BLOCKS, 16, 128), (0, 2, 1, 3, 4)),
    "BLNHC": ((NUM_BLOCKS, NUM_LAYERS, 16, 8, 128), (1, 0, 3, 2, 4)),
    "BHLNC": ((NUM_BLOCKS, 8, NUM_LAYERS, 16, 128), (2, 0, 1, 3, 4)),
    "MLA": ((NUM_LAYERS, NUM_BLOCKS, 1, 64, 576), (0, 1, 2, 3, 4)),
}


def _staged_on_gpu(layout: str) -> tuple[list[torch.Tensor], StagedMemory, int]:
    shape, order = LAYOUTS[layout]
    where = torch.device("cuda", 0)
    layers = list(torch.zeros(shape, dtype=torch.bfloat16, device=where).permute(order))
    device = device_of(layers[0])
    assert isinstance(device, CudaDevice)
    slabs, placed = memory_of(layers, NUM_BLOCKS, layers[0].shape[2])
    area = 16 * slabs.object_bytes(slabs.block_tokens)
    return layers, staged(device, layers, placed, NUM_BLOCKS, slabs.slab_bytes, area), slabs.slab_bytes


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuda_blocks_pass_through_staging_memory_behind_the_work_they_depend_on(layout: str) -> None:
    layers, memory, slab_bytes = _staged_on_gpu(layout)
    where, source, target = layers[0].device, [5, 60, 0, 31], [9, 8, 33, 63]
    content = torch.randn(NUM_LAYERS, 4, *layers[0].shape[1:], device=where).to(torch.bfloat16)
    save = memory.hold(source, "save")
    assert save is not None
    ends = []
    for layer in range(NUM_LAYERS):  # the host is far ahead of the device
        _busy(where)
        layers[layer][source] = content[layer]
        ends.append(memory.leave(save, layer, memory.computed()))
    _busy(where)
    for tensor in layers:  # the last work of an earlier request on the blocks that are loaded
        tensor[target] = 7.0
    load = memory.hold(target, "load", memory.computed())
    assert load is not None
    for layer in range(NUM_LAYERS):
        _wait(ends[layer])
        for one, other in zip(
            memory.addresses(save, layer, range(4)), memory.addresses(load, layer, range(4)), strict=True
        ):
            ctypes.memmove(int(other), int(one), slab_bytes)
        memory.enter(load, layer, [0, 1])
        memory.enter(load, layer, [2, 3])
        memory.compute_after(load, layer)
        seen = layers[layer][target].clone()  # in the engine's stream, at once
        assert torch.equal(seen, content[layer]), f"layer {layer} was read before it had arrived"
    memory.release(save)
    memory.release(load)
    for tensor in layers:
        untouched = [block for block in range(NUM_BLOCKS) if block not in (*source, *target)]
        assert not tensor[untouched].any()


@needs_gpu
def test_cuda_copies_do_not_make_the_engine_wait() -> None:
    """The event of the engine's own work is not reached when all copies behind it have been begun."""
    layers, memory, _ = _staged_on_gpu("LBHNC")
    held = memory.hold(list(range(8)), "save")
    assert held is not None
    _busy(layers[0].device)
    computed = memory.computed()
    ends = [memory.leave(held, layer, computed) for layer in range(NUM_LAYERS)]
    assert computed is not None and not computed.query(), "beginning a copy waited for the device"
    for end in ends:
        _wait(end)
