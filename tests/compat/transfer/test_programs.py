# SPDX-License-Identifier: Apache-2.0
"""A program written for the existing package and one written for ``mooncake.transfer``, in two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).with_name("programs.py")

pytestmark = pytest.mark.processes


class Program:
    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS), name],
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

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        errors = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == 0, errors


def test_two_programs_exchange_data() -> None:
    existing, own = Program("existing"), Program("own")
    try:
        theirs, ours = existing.receive(), own.receive()
        existing.send(ours)
        own.send(theirs)
        result = existing.receive()
        assert result == {"read": (b"own" * 6)[:16].hex(), "notified": []}
        own.send(result)
        assert own.receive() == {"found": bytes(range(16)).hex()}
        existing.send("look")
        assert existing.receive() == {
            "found": (b"reply!" * 3)[:16].hex(),
            "notified": [["reply", "is there"]],
        }
        existing.end()
        own.end()
    finally:
        for program in (existing, own):
            program.process.kill()
            program.process.wait()


def test_the_engine_module_does_not_need_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import mooncake.engine as e; "
        "assert e.TransferEngine.TransferOpcode is e.TransferOpcode and e.Write.value == 1; "
        "assert e.CoroRPCInterface is e.RpcInterface and e.SUPPORT_EFA is False"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
