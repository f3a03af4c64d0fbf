# SPDX-License-Identifier: Apache-2.0
"""Behaviour that only rdma has. Without a device, tests that need one are skipped with the reason.

``scripts/test-rdma`` runs this file and the contract suite in a small VM that has soft-RoCE devices.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from mooncake.errors import InvalidArgument, MooncakeError, Unavailable
from mooncake.metrics import registry
from mooncake.transfer import Op, Status, TransferEngine, TransferSettings
from mooncake.transfer.transports.rdma import (
    MAX_LANES,
    SetupRequest,
    VerbsTransport,
    pairs_of,
    usable_devices,
)

MIB = 1 << 20


def devices() -> list[str]:
    try:
        return usable_devices((), 1)
    except Unavailable:
        return []


needs_device = pytest.mark.skipif(
    not devices(), reason="no RDMA device with an active port; scripts/test-rdma runs this in a VM with one"
)


def test_devices_of_one_name_lead_to_each_other() -> None:
    assert pairs_of(["a", "b"], ["b", "a"]) == [("a", "a"), ("b", "b")]
    assert pairs_of(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    assert pairs_of(["a", "b"], ["c"]) == [("a", "c"), ("b", "c")]
    assert pairs_of(["a"], ["c", "d", "e"]) == [("a", "c"), ("a", "d"), ("a", "e")]
    assert pairs_of(["a"], []) == []


def test_a_device_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises((InvalidArgument, Unavailable), match=r"rdma_devices|libibverbs"):
        TransferEngine(TransferSettings(transports=("rdma",), rdma_devices=("nosuch0",)))


@pytest.mark.skipif(bool(devices()), reason="this machine has an RDMA device")
def test_a_machine_without_devices_says_what_is_missing() -> None:
    with pytest.raises(Unavailable, match=r"libibverbs|active RDMA device"):
        TransferEngine(TransferSettings(transports=("rdma",)))


@pytest.fixture
def engines() -> Iterator[tuple[TransferEngine, TransferEngine]]:
    settings = TransferSettings(transports=("rdma",), rdma_devices=tuple(devices()[:1]))
    with TransferEngine(settings) as near, TransferEngine(settings) as far:
        yield near, far


def rdma_of(engine: TransferEngine) -> VerbsTransport:
    transport = engine._transports["rdma"]
    assert isinstance(transport, VerbsTransport)
    return transport


def num_served(engine: TransferEngine) -> int:
    return rdma_of(engine)._native.num_served(devices()[0])


@needs_device
def test_what_was_given_up_is_retired_before_anything_new(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    near, far = engines
    size = 32 * MIB  # more than is under way at once
    pool, here = far.allocate(size), near.allocate(size)
    segment = near.open(far.describe())
    whole = (segment, [here.address], [pool.address], [size])
    assert near.run(Op.WRITE, *whole).status == Status.OK
    lanes = num_served(far)
    assert lanes >= 2
    for _ in range(5):
        assert near.run(Op.WRITE, *whole, timeout_s=0.002).status == Status.TIMED_OUT
        small = near.run(Op.WRITE, segment, [here.address], [pool.address], [100])
        assert small.status == Status.OK
        assert num_served(far) == lanes, "ends of dead lanes stay"
    near.forget(segment)
    assert num_served(far) == 0, "a peer that leaves takes its lanes along"


@needs_device
def test_only_the_owner_ends_a_lane(engines: tuple[TransferEngine, TransferEngine]) -> None:
    near, far = engines
    pool, here = far.allocate(MIB), near.allocate(MIB)
    segment = near.open(far.describe())
    assert near.run(Op.WRITE, segment, [here.address], [pool.address], [MIB]).status == Status.OK
    lanes = num_served(far)
    address = rdma_of(near)._address(devices()[0])
    everything = [(devices()[0], pair) for pair in range(1 << 10)]
    outsider = SetupRequest(devices()[0], 1, address, [], everything, [])
    rdma_of(far).accept(msgspec.msgpack.encode(outsider))
    assert num_served(far) == lanes


@needs_device
def test_a_set_up_that_makes_no_sense_is_refused(engines: tuple[TransferEngine, TransferEngine]) -> None:
    _, far = engines
    address = rdma_of(far)._address(devices()[0])
    good = SetupRequest(devices()[0], 1, address, [(1, 1)], [], [])
    for bad in (
        msgspec.structs.replace(good, device="nosuch0"),
        msgspec.structs.replace(good, lanes=[(1, 1)] * (MAX_LANES + 1)),
        "not a set-up",
    ):
        with pytest.raises(MooncakeError):
            rdma_of(far).accept(msgspec.msgpack.encode(bad))
    assert num_served(far) == 0


@needs_device
def test_regions_that_come_later_are_granted_when_they_are_used(
    engines: tuple[TransferEngine, TransferEngine],
) -> None:
    near, far = engines
    here = near.allocate(MIB)
    for number in range(20):
        data = np.full(4096, number, dtype=np.uint8)
        region = far.register(data)
        segment = near.open(far.describe())
        assert near.run(Op.READ, segment, [here.address], [region.address], [4096]).status == Status.OK
        assert bytes(here.view()[:4096]) == bytes([number]) * 4096
        if number % 2:
            far.unregister(region)


def num_failed() -> float:
    """Parts of batches that failed on any rail so far."""
    metrics = [metric for metric in registry.collect() if metric.name == "mooncake_transfer_failed_parts"]
    samples = [sample for metric in metrics for sample in metric.samples if sample.name.endswith("_total")]
    return sum(sample.value for sample in samples if sample.labels["path"].startswith("rdma@"))


@pytest.mark.skipif(
    "MOONCAKE_TEST_LINK" not in os.environ or len(devices()) < 2,
    reason="needs two RDMA devices and a network device that may be taken down: scripts/test-rdma",
)
def test_a_rail_that_is_taken_down_mid_batch_costs_nothing_but_time() -> None:
    link = os.environ["MOONCAKE_TEST_LINK"]
    settings = TransferSettings(transports=("rdma",), spray_bytes=MIB)
    size = 32 * MIB
    with TransferEngine(settings) as near, TransferEngine(settings) as far:
        pool, data = far.allocate(size), np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        here = near.register(data)
        segment = near.open(far.describe())
        assert len(segment.paths) == 2
        rows = range(0, size, MIB)
        columns = (
            [here.address + row for row in rows],
            [pool.address + row for row in rows],
            [MIB] * len(rows),
        )
        assert near.run(Op.WRITE, segment, *columns, timeout_s=60).status == Status.OK
        taken_down = threading.Timer(0.2, lambda: subprocess.run(["ip", "link", "set", link, "down"]))
        taken_down.start()
        num_batches = 0
        while not num_failed() and num_batches < 20:
            data[:] = np.roll(data, 1)
            begun = time.monotonic()
            done = near.run(Op.WRITE, segment, *columns, timeout_s=120)
            num_batches += 1
            assert done.status == Status.OK and done.num_bytes == size
            assert (np.frombuffer(pool.view(), dtype=np.uint8) == data).all()
        print(f"batch {num_batches} lost a rail, was whole after {time.monotonic() - begun:.1f} s: {done}")
        taken_down.join()
        assert num_failed(), "no part ever failed; was the link taken down?"
        subprocess.run(["ip", "link", "set", link, "up"], check=True)
