# SPDX-License-Identifier: Apache-2.0
"""Behaviour of shared memory beyond the contract: users, revocation, first touches."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mooncake.errors import PeerLost
from mooncake.transfer import Op, Status, TransferEngine, TransferSettings
from mooncake.transfer.transports.shm import SharedMemoryTransport

SHM = TransferSettings(transports=("shm",))

# The other user may not enter the folder of this checkout where it is closed (root's home is), so everything
# is imported, also what is loaded only when it is used, before the process becomes that user.
AS_ANOTHER_USER = """
import os, sys
from mooncake.transfer import *
from mooncake.transfer.descriptor import decode_descriptor
with TransferEngine(TransferSettings(transports=("shm",))) as warm, TransferEngine(warm.settings) as owner:
    pool, here = owner.allocate(4096), warm.allocate(4096)
    done = warm.run(Op.READ, warm.open(owner.describe()), [here.address], [pool.address], [4096])
    assert done.status == Status.OK, done
os.chdir("/")
os.setuid(65534)
engine = TransferEngine(TransferSettings(transports=("shm",)))
segment = engine.open(decode_descriptor(sys.argv[1].encode()))
here = engine.allocate(4096)
done = engine.run(Op.READ, segment, [here.address], [segment.descriptor.regions[0].address], [4096])
print(done.status.name, repr(segment))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused() -> None:
    with TransferEngine(SHM) as engine:
        engine.allocate(4096)
        done = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER_USER, engine.describe().encode().decode()],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "PEER_LOST" in done.stdout and "another user" in done.stdout


def test_plain_memory_is_not_shown() -> None:
    with TransferEngine(SHM) as near, TransferEngine(SHM) as far:
        registered = far.register(np.zeros(100, dtype=np.uint8))
        here = near.allocate(100)
        segment = near.open(far.describe())
        done = near.run(Op.READ, segment, [here.address], [registered.address], [100])
        assert (done.status, done.failed_slice) == (Status.ACCESS_DENIED, 0)


def test_a_region_is_mapped_in_parts_of_any_size() -> None:
    with TransferEngine(SHM) as near, TransferEngine(SHM) as far:
        for size in (1, 4095, (2 << 20) - 1, 2 << 20, (4 << 20) + 1):
            pool, here = far.allocate(size), near.allocate(size)
            segment = near.open(far.describe())
            here.view()[:] = b"a" * size
            for at, length in ((size - 1, 1), (0, 1), (0, size)):
                done = near.run(Op.WRITE, segment, [here.address], [pool.address + at], [length])
                assert done.status == Status.OK
            assert bytes(pool.view()) == b"a" * size


def test_no_process_at_the_socket() -> None:
    with TransferEngine(SHM) as engine:
        transport = SharedMemoryTransport(engine)
        for endpoint in ("mooncake-missing", "", "x" * 300):
            with pytest.raises(PeerLost, match="gone"):
                transport.connect(endpoint, 1, [], 1.0)
        with pytest.raises(PeerLost, match="gone"):
            transport.connect(transport.endpoint, engine.epoch ^ 1, [], 1.0)
        transport.close()
        other = SharedMemoryTransport(engine)
        with pytest.raises(PeerLost, match="this engine was closed"):
            transport.connect(other.endpoint, engine.epoch, [], 1.0)
        other.close()


def test_memory_of_a_dead_process_is_let_go() -> None:
    def num_mapped() -> int:
        return sum("memfd:mooncake" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = num_mapped()
    with TransferEngine(SHM) as near, TransferEngine(SHM) as far:
        pool, here = far.allocate(4096), near.allocate(4096)
        segment = near.open(far.describe())
        done = near.run(Op.WRITE, segment, [here.address], [pool.address], [4096])
        assert done.status == Status.OK and num_mapped() == before + 3
        del pool
        gc.collect()
        far.close()
        deadline = time.monotonic() + 10
        while num_mapped() > before + 1:
            assert time.monotonic() < deadline, "the peer is gone, its memory is not"
            time.sleep(0.002)
