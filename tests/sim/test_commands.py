# SPDX-License-Identifier: Apache-2.0
"""The command that runs seeds: what it prints of a seed that fails."""

from __future__ import annotations

import sys

import pytest

from mooncake.sim.__main__ import main
from mooncake.state_table import Faults
from mooncake.transfer.batch import Batch


def test_a_seed_that_fails_is_printed_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handle, num_batches = Batch.handle, 7

    def broken(self: Batch, event: object, now: float) -> object:
        if now > 1.0:
            raise KeyError("lost")
        return handle(self, event, now)  # type: ignore[arg-type]

    monkeypatch.setattr(Batch, "handle", broken)
    monkeypatch.setattr(Faults, "raises", True)
    words = ["--world", "transfer", "--batches", str(num_batches), "--first", "3", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["sim", *words])
    assert main() == 1
    shown = capsys.readouterr().out
    assert shown.startswith("FAILED (core) seed 3 at ") and "KeyError: 'lost'" in shown
    assert "python -m mooncake.sim --world transfer --batches 7 --first 3 --seeds 1 --trace" in shown
