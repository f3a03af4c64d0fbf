# SPDX-License-Identifier: Apache-2.0
"""Programs written for the existing package work unchanged, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake.store import messages as m
from mooncake.store.client.store import Store
from tests.compat.store.servers import LONG_LEASES, RunningMaster

PROGRAMS = Path(__file__).with_name("programs.py")

pytestmark = pytest.mark.processes


class Program:
    def __init__(self, name: str, master: RunningMaster) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS), name, master.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        return json.loads(line)

    def send(self, message: Any = True) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        errors = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == 0, errors


@contextmanager
def program(name: str, master: RunningMaster) -> Iterator[Program]:
    running = Program(name, master)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.fixture(scope="module")
def master() -> Iterator[RunningMaster]:
    running = RunningMaster(LONG_LEASES)
    yield running
    running.close()


@pytest.mark.parametrize(
    "name",
    [
        "vllm_embeddings",
        "vllm_ascend",
        "sglang_hicache",
        "sglang_direct_linker",
        "sglang_embeddings",
        "lmcache",
        "lmdeploy",
        "transfer_queue",
    ],
)
def test_one_program(master: RunningMaster, name: str) -> None:
    with program(name, master) as running:
        assert running.receive() == {"done": True}
        running.end()
    with Store(master.address) as store:
        status: m.MasterStatus = store.ask(m.GetMasterStatus())
    assert not [segment for segment in status.segments if segment.state == "alive"], (
        "every segment is unmounted"
    )


def test_vllm_prefills_and_decodes(master: RunningMaster) -> None:
    with program("vllm_prefill", master) as prefill:
        prefill.receive()
        with program("vllm_decode", master) as decode:
            assert decode.receive() == {"done": True}
            decode.end()
        prefill.send()
        prefill.end()


def test_vllm_omni_waits_for_a_stage(master: RunningMaster) -> None:
    with program("omni_sender", master) as sender, program("omni_receiver", master) as receiver:
        sender.receive()
        assert receiver.receive() == {"size_bytes": 0}
        sender.send()
        assert receiver.receive() == {"done": True}
        receiver.end()
        sender.send()
        sender.end()


def test_checkpoint_engine_reads_from_an_owner(master: RunningMaster) -> None:
    with program("checkpoint_owner", master) as owner, program("checkpoint_reader", master) as reader:
        reader.receive()
        reader.send(owner.receive())
        assert reader.receive() == {"done": True}
        reader.end()
        owner.send()
        owner.end()
