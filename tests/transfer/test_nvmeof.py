# SPDX-License-Identifier: Apache-2.0
"""The parts that need no kernel target; ``scripts/test-nvmeof`` runs the rest in a VM that has one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake.errors import DeadlineExceeded, InvalidArgument, PeerLost, Unavailable
from mooncake.transfer import Op, Status, TransferEngine, TransferSettings, nvmeof

TARGET = os.environ.get("MOONCAKE_NVMEOF_TARGET", "")
"""``transport address port nqn`` of a target whose bytes may be overwritten; set by the script."""

needs_target = pytest.mark.skipif(
    not TARGET,
    reason="no NVMe over Fabrics target here; scripts/test-nvmeof runs this in a small VM with one",
)


def test_options_for_the_kernel() -> None:
    options = nvmeof.options("tcp", "10.0.0.1", "nqn.2024-01.x:y", 4420, "", 60)
    assert options == (
        "transport=tcp,traddr=10.0.0.1,trsvcid=4420,nqn=nqn.2024-01.x:y,ctrl_loss_tmo=60,reconnect_delay=10"
    )
    assert nvmeof.options("rdma", "a", "n", 1, "me", 0).endswith("reconnect_delay=1,hostnqn=me")
    with pytest.raises(InvalidArgument, match="nqn is 'a,traddr=b'"):
        nvmeof.options("tcp", "10.0.0.1", "a,traddr=b", 4420, "", 60)


def test_what_the_kernel_answers() -> None:
    assert nvmeof.controller_in("instance=12,cntlid=3\n") == "nvme12"
    with pytest.raises(Unavailable, match="not supported"):
        nvmeof.controller_in("cntlid=3\n")


def test_the_device_of_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvmeof, "CONTROLLERS", tmp_path)
    assert nvmeof.device_of("nvme0", 1) is None
    (tmp_path / "nvme0" / "nvme0n1").mkdir(parents=True)
    assert nvmeof.device_of("nvme0", 1) == "/dev/nvme0n1"
    assert nvmeof.device_of("nvme0", 2) is None
    shared = tmp_path / "nvme3" / "nvme1c3n2"  # one of several paths
    shared.mkdir(parents=True)
    (shared / "nsid").write_text("7\n")
    assert nvmeof.device_of("nvme3", 7) == "/dev/nvme1n2"
    nvmeof.detach(nvmeof.Namespace("/dev/nvme9n1", "nvme9", "gone"))


def test_what_cannot_be_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="tcp or rdma"):
        nvmeof.attach("fc", "127.0.0.1", "nqn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(nvmeof, "FABRICS", tmp_path / "nothing")
        with pytest.raises(Unavailable, match="modprobe nvme-tcp"):
            nvmeof.attach("tcp", "127.0.0.1", "nqn", port=port)
    for address in ("127.0.0.1", "a..b", "x" * 64):
        with pytest.raises(PeerLost, match="export"):
            nvmeof.attach("tcp", address, "nqn", port=port)


@pytest.fixture
def namespace() -> Iterator[nvmeof.Namespace]:
    transport, address, port, nqn = TARGET.split()
    attached = nvmeof.attach(transport, address, nqn, port=int(port))
    yield attached
    nvmeof.detach(attached)


@needs_target
def test_a_namespace_is_a_file_segment(namespace: nvmeof.Namespace) -> None:
    """Bytes written here and by a peer, at every alignment, are still there after attaching again."""
    rng = np.random.default_rng(3)
    size = 16 << 20
    model = rng.integers(0, 256, size, dtype=np.uint8)
    # Without huge pages: over loopback Debian's 6.1 takes one that is split across two messages for an attack
    # (usercopy, mm/usercopy.c) and stops the target. Between two hosts nothing is copied out of them.
    mine, theirs = (TransferEngine().allocate(size, huge_pages=False).view() for _ in range(2))
    data, back = np.frombuffer(mine, dtype=np.uint8), np.frombuffer(theirs, dtype=np.uint8)
    data[:] = model
    with TransferEngine() as engine, TransferEngine(TransferSettings(transports=("tcp",))) as peer:
        region = engine.open_file(namespace.device, size)
        assert "O_DIRECT" in region.how and "because" not in region.how, region.how
        for mover in (engine, peer):
            here, landing = mover.register(data), mover.register(back)
            segment = mover.open(engine.describe())
            done = mover.run(Op.WRITE, segment, [here.address], [region.address], [size])
            assert done.status == Status.OK, done
            for _ in range(20):
                start = int(rng.integers(0, size - 1))
                length = int(rng.integers(1, min(1 << 20, size - start) + 1))
                data[start : start + length] = rng.integers(0, 256, length, dtype=np.uint8)
                at, there = here.address + start, region.address + start
                assert mover.run(Op.WRITE, segment, [at], [there], [length]).status == Status.OK
            back[:] = 0
            done = mover.run(Op.READ, segment, [landing.address], [region.address], [size])
            assert done.status == Status.OK and (back == data).all()
        engine.flush(region)
    nvmeof.detach(namespace)
    transport, address, port, nqn = TARGET.split()
    again = nvmeof.attach(transport, address, nqn, port=int(port))
    try:
        with TransferEngine() as engine:
            region = engine.open_file(again.device, size, writable=False)
            back[:] = 0
            here = engine.register(back)
            done = engine.run(
                Op.READ, engine.open(engine.describe()), [here.address], [region.address], [size]
            )
            assert done.status == Status.OK and (back == data).all()
    finally:
        nvmeof.detach(again)


@needs_target
def test_a_namespace_that_is_not_there() -> None:
    transport, address, port, nqn = TARGET.split()
    with pytest.raises(Unavailable, match="no namespace 9"):
        nvmeof.attach(transport, address, nqn, port=int(port), namespace=9, timeout_s=3)
    with pytest.raises((PeerLost, InvalidArgument, DeadlineExceeded)):
        nvmeof.attach(transport, address, "nqn.2024-01.missing:here", port=int(port), timeout_s=5)
